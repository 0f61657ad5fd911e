//! The arrays of a shard, which follow from its plan, and the places of chunks in them.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use paramhub_core::chunk::Extent;
use paramhub_core::codec::Codec;
use paramhub_core::exchange::{GatheredLayer, Rules};
use paramhub_core::factors::FactorBlock;
use paramhub_core::wire::State;
use paramhub_kernels::TILE_ELEMENTS;

use super::buffer::whole_lines;
use super::plan::ShardPlan;

/// Elements that are handled at once: few enough that a sum, a model and its state stay in the first cache
/// while contributions stream in from arenas and parameters stream out to them, so that reads and writes
/// overlap.
pub(super) const BLOCK_ELEMENTS: usize = TILE_ELEMENTS;

/// The largest number of elements that the optimizer of a shard gets at once.
pub(super) fn block_elements(plan: &ShardPlan) -> usize {
    if plan.optimizer.needs_whole_chunks() { usize::MAX } else { BLOCK_ELEMENTS }
}

/// The place of a chunk in the shard's arrays.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) key: u32,
    pub(super) elements: u32,
    /// First element in the key.
    pub(super) first: u64,
    /// First element in `model` and `merge`. It is at the start of a cache line, except for the chunks of a
    /// key that takes factors, which lie without gaps.
    pub(super) offset: usize,
    /// The codec in which gradients arrive.
    pub(super) gradient: Codec,
    /// The codec in which parameters leave, unless the gradient is quantised and a change is enough.
    pub(super) parameter: Codec,
    pub(super) group: u16,
    /// `true` if contributions with NaN or an infinity are refused.
    pub(super) is_checked: bool,
    /// For a quantised chunk: its first element among the quantised elements, and its first byte among the
    /// answers.
    pub(super) quantised: [usize; 2],
}

impl Slot {
    pub(super) fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.elements as usize
    }

    pub(super) fn encoded_range(&self) -> Range<usize> {
        let start = self.offset * 2;
        start..start + self.elements as usize * 2
    }

    pub(super) fn extent(&self) -> Extent {
        Extent { key: self.key, offset: self.first, elements: self.elements }
    }

    /// The place of a slot of the optimizer's state for each of the [`blocks`](Self::blocks) that the
    /// optimizer gets: the slots of one block are back to back.
    pub(super) fn state_blocks(
        &self,
        state_slots: usize,
        state_slot: usize,
        block_elements: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let offset = self.offset;
        self.blocks(block_elements).map(move |block| {
            let start = (offset + block.start) * state_slots + state_slot * block.len();
            start..start + block.len()
        })
    }

    /// Ranges of the chunk's elements that are handled one after the other.
    pub(super) fn blocks(&self, block_elements: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let elements = self.elements as usize;
        let end = move |start: usize| elements.min(start.saturating_add(block_elements));
        (0..elements).step_by(block_elements).map(move |start| start..end(start))
    }
}

/// The arrays that follow from a plan.
pub(super) struct Layout {
    pub(super) slots: Vec<Slot>,
    pub(super) elements: usize,
    pub(super) state_slots: usize,
    pub(super) parked_members: usize,
    /// `true` if the sums of previous steps are kept for the sites below.
    pub(super) keeps_totals: bool,
    pub(super) encoded_bytes: usize,
    /// Elements of quantised chunks, and bytes of their answers.
    pub(super) quantised: [usize; 2],
    pub(super) payload_bytes_max: usize,
    pub(super) rules: Rules,
    /// The layers whose factors come to this route, most urgent first.
    pub(super) factors: Vec<GatheredLayer>,
}

impl Layout {
    pub(super) fn new(plan: &ShardPlan) -> Self {
        let settings = &plan.settings;
        let factor_keys: HashSet<u32> = plan.blocks.iter().flat_map(FactorBlock::keys).collect();
        // The slots of their keys; the chunks of one key have neighbouring slots.
        let mut slots_of: HashMap<u32, Range<u32>> = HashMap::with_capacity(factor_keys.len());
        let mut offset = 0;
        let mut quantised = [0; 2];
        let slots: Vec<Slot> = plan
            .placement()
            .chunks(plan.route)
            .iter()
            .zip(0..)
            .map(|(&chunk, index)| {
                let extent = plan.map.extent(chunk).expect("a placed chunk is in the map");
                let key = &settings.keys.keys()[extent.key as usize];
                let takes_factors = factor_keys.contains(&extent.key);
                if takes_factors {
                    slots_of.entry(extent.key).or_insert(index..index).end = index + 1;
                }
                // No gradient travels in the codec of a key whose factors come.
                let gradient = if takes_factors { key.dtype.codec() } else { settings.codec_of(key) };
                let slot = Slot {
                    key: extent.key,
                    elements: extent.elements,
                    first: extent.offset,
                    offset,
                    gradient,
                    parameter: key.dtype.codec(),
                    group: key.group,
                    is_checked: settings.reject_non_finite || gradient.is_quantised(),
                    quantised,
                };
                // A gradient that is made of factors is stored like a matrix, without gaps between its
                // chunks.
                let is_last = extent.offset + u64::from(extent.elements) == plan.map.key_elements(extent.key);
                offset += match takes_factors && !is_last {
                    true => extent.elements as usize,
                    false => whole_lines(extent.elements as usize),
                };
                if slot.gradient.is_quantised() {
                    quantised[0] += whole_lines(extent.elements as usize);
                    quantised[1] += extent.bytes(slot.gradient) as usize;
                }
                slot
            })
            .collect();
        let any_encoded = slots.iter().any(|slot| slot.parameter != Codec::F32);
        let range = |key: Option<u32>| key.and_then(|key| slots_of.get(&key)).cloned().unwrap_or_default();
        let gathered = plan.blocks.iter().map(|&block| GatheredLayer {
            block,
            weight: range(Some(block.weight)),
            bias: range(block.bias),
        });
        let mut factors: Vec<GatheredLayer> = gathered.filter(|layer| !layer.weight.is_empty()).collect();
        factors.sort_by_key(|layer| layer.weight.start);
        Layout {
            factors,
            elements: offset,
            // All chunks have the same layout, so a group that needs less leaves some of it unused.
            state_slots: plan.groups.iter().map(|h| plan.optimizer.state_slots(h)).max().unwrap_or(0),
            parked_members: if settings.reproducible { plan.ports.members() as usize - 1 } else { 0 },
            keeps_totals: plan.ports.has_member_sites() && plan.optimizes_here(),
            encoded_bytes: if any_encoded { offset * 2 } else { 0 },
            quantised,
            payload_bytes_max: slots
                .iter()
                .map(|slot| State::bytes(slot.elements) as usize)
                .max()
                .unwrap_or(0),
            rules: Rules {
                workers: plan.workers(),
                members: plan.ports.members(),
                sites_from: plan.ports.workers(),
                rank_0: plan.ports.rank_0(),
                consistency: settings.consistency,
                reproducible: settings.reproducible,
                has_parameters: settings.has_parameters(),
                two_phase: settings.is_two_phase(),
                quorum: plan.stragglers.quorum(plan.workers()),
            },
            slots,
        }
    }
}
