//! What a core must know to serve one route of a job, and how that turns into arrays.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use paramhub_core::auth::Namespace;
use paramhub_core::chunk::{ChunkMap, Extent};
use paramhub_core::codec::Codec;
use paramhub_core::composition::{Composed, OptimizeAt, SiteId};
use paramhub_core::exchange::{Exchange, GatheredLayer, Rules};
use paramhub_core::factors::FactorBlock;
use paramhub_core::hyperparameters::{Hyperparameters, Schedule};
use paramhub_core::lateness::Watch;
use paramhub_core::limits::CONTROL_BYTES_MAX;
use paramhub_core::placement::{Placement, RouteId};
use paramhub_core::settings::Settings;
use paramhub_core::stragglers::Stragglers;
use paramhub_core::wire::{STATE_HEAD_BYTES, State};
use paramhub_kernels::{Aggregator, Optimizer, TILE_ELEMENTS};

use super::buffer::whole_lines;
use super::deadlines::Deadlines;
use super::ports::{Neighbour, Ports};
use super::quantised::Quantised;
use super::restored::Restored;
use super::shard::FactorLayers;
use super::snapshot::Snapshot;

/// Elements worked on at once: few enough that a sum, a model and its state stay in the first cache while contributions
/// stream in from arenas and parameters stream out to them, so that reads and writes overlap.
pub(super) const BLOCK_ELEMENTS: usize = TILE_ELEMENTS;

/// What a core must know to serve one route of a job.
#[derive(Clone)]
pub(crate) struct ShardPlan {
    pub(crate) name: String,
    pub(crate) namespace: Namespace,
    pub(crate) dead_after: Duration,
    /// Streams may be cut and resumed.
    pub(crate) continues: bool,
    pub(crate) stragglers: Stragglers,
    /// How long others may wait for somebody, if that ends the job.
    pub(crate) progress_timeout: Option<Duration>,
    /// Of the core's time, against other jobs' weights.
    pub(crate) weight: u32,
    pub(crate) settings: Arc<Settings>,
    pub(crate) map: Arc<ChunkMap>,
    /// Of the job's layers whose factors come to hubs, here or elsewhere.
    pub(crate) blocks: Arc<[FactorBlock]>,
    pub(crate) composed: Arc<Composed>,
    /// Where in it the hub is.
    pub(crate) site: SiteId,
    pub(crate) route: RouteId,
    pub(crate) ports: Arc<Ports>,
    pub(crate) aggregator: Arc<dyn Aggregator>,
    pub(crate) optimizer: Arc<dyn Optimizer>,
    /// Of every group at step 0.
    pub(crate) groups: Arc<[Hyperparameters]>,
    /// Snapshots will be asked for.
    pub(crate) checkpoints: bool,
    /// What the chunks begin with, where it is not rank 0's parameters.
    pub(crate) restored: Option<Arc<Restored>>,
}

impl ShardPlan {
    /// Of the shard's site.
    pub(crate) fn placement(&self) -> &Placement {
        &self.composed.placements[usize::from(self.site)]
    }

    /// Workers of the whole job.
    pub(crate) fn workers(&self) -> u32 {
        self.composed.composition.workers()
    }

    /// Whether every site optimises, this one too, and answers are sums; else each chunk's owner does.
    pub(crate) fn optimizes_here(&self) -> bool {
        self.composed.composition.optimize_at == OptimizeAt::EverySite
    }

    /// What the optimizer is given at once, at most.
    pub(super) fn block_elements(&self) -> usize {
        if self.optimizer.needs_whole_chunks() { usize::MAX } else { BLOCK_ELEMENTS }
    }

    /// How people call who is at the other end of a port.
    pub(crate) fn name(&self, neighbour: Neighbour) -> String {
        match neighbour {
            Neighbour::Worker(rank) => format!("rank {rank}"),
            Neighbour::Site(site) => self.composed.composition.name(site),
        }
    }

    /// Bytes of the largest payload a worker may send.
    pub(crate) fn frame_bytes_max(&self) -> usize {
        (self.settings.chunk_bytes as usize + STATE_HEAD_BYTES).max(CONTROL_BYTES_MAX as usize)
    }
}

impl std::fmt::Debug for ShardPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShardPlan")
            .field("name", &self.name)
            .field("route", &self.route)
            .finish_non_exhaustive()
    }
}

/// Where a chunk lies in the shard's arrays.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) key: u32,
    pub(super) elements: u32,
    /// First element in the key.
    pub(super) first: u64,
    /// First element in `model` and `merge`; a multiple of a cache line.
    pub(super) offset: usize,
    /// How gradients come.
    pub(super) gradient: Codec,
    /// How parameters leave, unless the gradient is quantised and a change will do.
    pub(super) parameter: Codec,
    pub(super) group: u16,
    /// Of a quantised chunk: the first element, and the first byte of what leaves, in what is kept of those.
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

    /// Where a slot of the optimizer's state lies for each of the [`blocks`](Self::blocks) that the optimizer is given: a
    /// block's slots lie back to back.
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

    /// Ranges of the chunk's elements that are worked on one after the other.
    pub(super) fn blocks(&self, block_elements: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let elements = self.elements as usize;
        let end = move |start: usize| elements.min(start.saturating_add(block_elements));
        (0..elements).step_by(block_elements).map(move |start| start..end(start))
    }
}

/// Bytes a shard will take, so that a job can be refused before anything is allocated.
pub(crate) fn memory_bytes(plan: &ShardPlan) -> u64 {
    Layout::new(plan).memory_bytes(plan)
}

/// How a plan turns into arrays.
pub(super) struct Layout {
    pub(super) slots: Vec<Slot>,
    pub(super) elements: usize,
    pub(super) state_slots: usize,
    pub(super) parked_members: usize,
    /// The sums of steps that are over are kept for the sites below.
    pub(super) keeps_totals: bool,
    pub(super) encoded_bytes: usize,
    /// Elements of quantised chunks, and bytes of what leaves of them.
    pub(super) quantised: [usize; 2],
    pub(super) payload_bytes_max: usize,
    pub(super) rules: Rules,
    /// Layers whose factors come here, most urgent first.
    pub(super) factors: Vec<GatheredLayer>,
}

impl Layout {
    pub(super) fn new(plan: &ShardPlan) -> Self {
        let settings = &plan.settings;
        let factor_keys: HashSet<u32> = plan.blocks.iter().flat_map(FactorBlock::keys).collect();
        // Of those: their chunks have neighbouring slots.
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
                let slot = Slot {
                    key: extent.key,
                    elements: extent.elements,
                    first: extent.offset,
                    offset,
                    // Where factors come no gradient travels in its codec.
                    gradient: if takes_factors { key.dtype.codec() } else { settings.codec_of(key) },
                    parameter: key.dtype.codec(),
                    group: key.group,
                    quantised,
                };
                // What is made of factors lies as a matrix does, without gaps between its chunks.
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
            // One layout for all chunks: a group that needs less leaves some unused.
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

    /// Bytes that a shard of the plan will take.
    pub(super) fn memory_bytes(&self, plan: &ShardPlan) -> u64 {
        let quantised = Quantised::memory_bytes(self, plan.ports.workers());
        let arrays = 2 + self.state_slots + self.parked_members + usize::from(self.keeps_totals);
        let books = Exchange::memory_bytes(self.rules, self.slots.len() as u32);
        let squares = if self.rules.two_phase { size_of::<f64>() } else { 0 };
        let slots = self.slots.len() as u64 * (size_of::<Slot>() + squares) as u64;
        // Of each stream: the frame it is about to spill, and the one a read cut off.
        let streams = u64::from(plan.ports.len()) * (self.payload_bytes_max + plan.frame_bytes_max()) as u64;
        let schedules = plan.groups.len() as u64 * Schedule::MEMORY_BYTES;
        let deadlines =
            if plan.stragglers.leaves_out() { Deadlines::memory_bytes(self.slots.len()) } else { 0 };
        let snapshot = if plan.checkpoints { Snapshot::memory_bytes(plan, self) } else { 0 };
        self.elements as u64 * 4 * arrays as u64
            + self.encoded_bytes as u64
            + quantised
            + books
            + slots
            + streams
            + schedules
            + deadlines
            + Watch::memory_bytes(self.slots.len())
            + snapshot
            + FactorLayers::memory_bytes(plan, self)
    }
}
