//! This computes, from a shard's plan, the sizes of its arrays and the place of each chunk in them.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use paramhub_core::chunk::Extent;
use paramhub_core::codec::Codec;
use paramhub_core::composition::BetweenSites;
use paramhub_core::consistency::Consistency;
use paramhub_core::exchange::{GatheredLayer, Rules};
use paramhub_core::factors::FactorBlock;
use paramhub_core::wire::State;
use paramhub_kernels::TILE_ELEMENTS;

use super::buffer::{LINE_BYTES, whole_lines};
use super::plan::ShardPlan;

/// Elements that are handled at once. So few that their sum, parameters and optimizer state stay in the L1
/// cache while contributions are read from arenas and parameters are written to them.
pub(super) const BLOCK_ELEMENTS: usize = TILE_ELEMENTS;

/// The largest number of elements that the optimizer of a shard gets at once.
pub(super) fn block_elements(plan: &ShardPlan) -> usize {
    if plan.optimizer.needs_whole_chunks() { usize::MAX } else { BLOCK_ELEMENTS }
}

/// The place of a chunk in the shard's arrays.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkPlace {
    pub(super) key: u32,
    pub(super) elements: u32,
    /// The first element in the key.
    pub(super) key_offset: u64,
    /// The first element in the arrays of parameters and sums. It is at the start of a cache line, except for the chunks of a
    /// key that takes factors, which lie without gaps.
    pub(super) array_offset: usize,
    /// The codec in which gradients arrive over TCP.
    pub(super) gradient: Codec,
    /// The codec in which they lie in arenas: the same or, if that one quantises, the key's own.
    pub(super) in_arena: Codec,
    /// The codec of the parameters that are sent to workers. If gradients are quantised, the hub may send a
    /// quantised change instead.
    pub(super) parameter: Codec,
    /// The codec in which sums cross between sites.
    pub(super) between_sites: Codec,
    /// The first byte among the sums as they cross between sites.
    pub(super) crossing_offset_bytes: usize,
    pub(super) group: u16,
    /// `true` if contributions with NaN or an infinity are refused.
    pub(super) rejects_non_finite: bool,
    /// If gradients of the chunk are quantised: its first element among those of all such chunks.
    pub(super) quantised_offset: usize,
    /// If gradients of the chunk are quantised: the first byte of its answer among the answers.
    pub(super) answer_offset_bytes: usize,
}

impl ChunkPlace {
    pub(super) fn range(&self) -> Range<usize> {
        self.array_offset..self.array_offset + self.elements as usize
    }

    /// The chunk's bytes in the array of encoded parameters: 2 for each element.
    pub(super) fn encoded_range(&self) -> Range<usize> {
        let start = self.array_offset * 2;
        start..start + self.elements as usize * 2
    }

    /// The chunk's bytes among the sums as they cross between sites.
    pub(super) fn crossing_range(&self) -> Range<usize> {
        let start = self.crossing_offset_bytes;
        start..start + self.extent().bytes(self.between_sites) as usize
    }

    pub(super) fn extent(&self) -> Extent {
        Extent { key: self.key, offset: self.key_offset, elements: self.elements }
    }

    /// The ranges of one array of the optimizer's state that belong to this chunk, one for each of the
    /// [`blocks`](Self::blocks) that the optimizer gets. Within a block the state arrays lie one after the
    /// other.
    pub(super) fn state_blocks(
        &self,
        arrays: usize,
        array: usize,
        block_elements: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let offset = self.array_offset;
        self.blocks(block_elements).map(move |block| {
            let start = (offset + block.start) * arrays + array * block.len();
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
    /// The place of each chunk, by slot.
    pub(super) slots: Vec<ChunkPlace>,
    /// The elements of the array of parameters, with the gaps between chunks.
    pub(super) elements: usize,
    /// The number of arrays of optimizer state.
    pub(super) state_slots: usize,
    /// The number of members whose contributions can be parked: all but one in a reproducible job.
    pub(super) parked_members: usize,
    /// `true` if the sums of previous steps are kept for the sites below.
    pub(super) keeps_totals: bool,
    /// The bytes of the array of sums as they cross between sites.
    pub(super) crossing_bytes: usize,
    /// The elements of the array of what the quantising of sums between sites has lost; 0 if none are quantised.
    pub(super) lost_elements: usize,
    /// The elements of the array for a contribution that is an update of its own; 0 if there are none.
    pub(super) apart_elements: usize,
    /// The bytes of the array of encoded parameters; 0 if all parameters are sent as f32.
    pub(super) encoded_bytes: usize,
    /// The elements of all chunks whose gradients are quantised.
    pub(super) quantised_elements: usize,
    /// The bytes of the answers of these chunks.
    pub(super) answer_bytes: usize,
    /// The largest payload: a chunk of optimizer state, or a piece of a program state, with its head.
    pub(super) payload_bytes_max: usize,
    pub(super) rules: Rules,
    /// The layers whose factors come to this route, most urgent first.
    pub(super) factor_layers: Vec<GatheredLayer>,
}

impl Layout {
    pub(super) fn new(plan: &ShardPlan) -> Self {
        let settings = &plan.settings;
        let factor_keys: HashSet<u32> = plan.factor_blocks.iter().flat_map(FactorBlock::keys).collect();
        // The slots of each key that takes factors. They are consecutive.
        let mut slots_of: HashMap<u32, Range<u32>> = HashMap::with_capacity(factor_keys.len());
        let mut offset = 0;
        let (mut quantised_elements, mut answer_bytes, mut crossing_bytes) = (0, 0, 0);
        let between_sites = plan.composed.composition.between_sites;
        let keeps_totals = plan.ports.has_member_sites() && plan.optimizes_here();
        // Sums in f32 go up from where they are made.
        let crosses = keeps_totals || between_sites != BetweenSites::F32;
        let slots: Vec<ChunkPlace> = plan
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
                // A key that takes factors gets no gradient frames, so the gradient codec does not apply to it.
                let gradient = if takes_factors { key.dtype.codec() } else { settings.codec_of(key) };
                let between_sites = between_sites.codec_of(key);
                let slot = ChunkPlace {
                    key: extent.key,
                    elements: extent.elements,
                    key_offset: extent.offset,
                    array_offset: offset,
                    gradient,
                    in_arena: if gradient.is_quantised() { key.dtype.codec() } else { gradient },
                    parameter: key.dtype.codec(),
                    between_sites,
                    crossing_offset_bytes: crossing_bytes,
                    group: key.group,
                    rejects_non_finite: settings.reject_non_finite
                        || gradient.is_quantised()
                        || between_sites.is_quantised(),
                    quantised_offset: quantised_elements,
                    answer_offset_bytes: answer_bytes,
                };
                // A gradient that is made of factors is stored like a matrix, without gaps between its
                // chunks.
                let is_last = extent.offset + u64::from(extent.elements) == plan.map.key_elements(extent.key);
                offset += match takes_factors && !is_last {
                    true => extent.elements as usize,
                    false => whole_lines(extent.elements as usize),
                };
                if crosses {
                    crossing_bytes += (extent.bytes(between_sites) as usize).next_multiple_of(LINE_BYTES);
                }
                if slot.gradient.is_quantised() {
                    quantised_elements += whole_lines(extent.elements as usize);
                    answer_bytes += extent.bytes(slot.gradient) as usize;
                }
                slot
            })
            .collect();
        let any_encoded = slots.iter().any(|slot| slot.parameter != Codec::F32);
        let range = |key: Option<u32>| key.and_then(|key| slots_of.get(&key)).cloned().unwrap_or_default();
        let gathered = plan.factor_blocks.iter().map(|&block| GatheredLayer {
            block,
            weight: range(Some(block.weight)),
            bias: range(block.bias),
        });
        let mut factor_layers: Vec<GatheredLayer> =
            gathered.filter(|layer| !layer.weight.is_empty()).collect();
        factor_layers.sort_by_key(|layer| layer.weight.start);
        Layout {
            factor_layers,
            elements: offset,
            // Every chunk has as many state arrays as the most demanding group needs. Other groups leave some
            // unused.
            state_slots: plan.groups.iter().map(|group| plan.optimizer.state_slots(group)).max().unwrap_or(0),
            parked_members: if settings.reproducible { plan.ports.members() as usize - 1 } else { 0 },
            keeps_totals,
            crossing_bytes,
            lost_elements: if slots.iter().any(|slot| slot.between_sites.is_quantised()) {
                offset
            } else {
                0
            },
            apart_elements: match settings.consistency {
                Consistency::Synchronous => 0,
                _ => slots.iter().map(|slot| slot.elements as usize).max().unwrap_or(0),
            },
            encoded_bytes: if any_encoded { offset * 2 } else { 0 },
            quantised_elements,
            answer_bytes,
            payload_bytes_max: slots
                .iter()
                .map(|slot| State::bytes(slot.elements) as usize)
                .max()
                .unwrap_or(0)
                .max(plan.program_state_payload_bytes_max()),
            rules: Rules {
                workers: plan.workers(),
                members: plan.ports.members(),
                // Only a flat job begins without some workers; its members are these.
                first_members: plan.ports.members() - (plan.workers() - plan.first_workers),
                first_site: plan.ports.workers(),
                rank_0: plan.ports.rank_0(),
                consistency: settings.consistency,
                reproducible: settings.reproducible,
                has_parameters: settings.has_parameters(),
                two_phase: settings.is_two_phase(),
                quorum: plan.quorum,
                rewind_every: plan.rewind_every,
            },
            slots,
        }
    }
}
