//! Runs the plans of collectives, chunk by chunk, as far as the other ranks have come.

use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};

use paramhub_kernels::shared::{Floats, gather};
use paramhub_transport::shm::Doorbell;

use super::plan::{ChunkReduction, Plan};
use super::shared_segment::{ChunkStage, RANKS_MAX, SLOTS, SharedSegment, WakeCondition, members};
use crate::arithmetic;
use crate::descriptor::Descriptor;
use crate::element::{ElementType, ReduceOp};
use crate::operation::Operation;
use crate::progress_engine::{OperationsInFlight, SlabKey};

/// The time that a rank polls before it sleeps. It yields meanwhile, so that the other ranks run where
/// there are more ranks than processors.
const SPIN: Duration = Duration::from_micros(50);
/// The same where every rank may have a processor to itself. It is longer than a sleeping rank takes to wake, or else ranks
/// that once slept would sleep at every chunk, each until the other has woken.
const SPIN_ALONE: Duration = Duration::from_micros(300);
/// Bytes that are reduced before the result is copied to the slot for the other ranks: both still lie in the
/// first cache.
const TILE_BYTES: usize = 16 << 10;

/// Collectives under way through a [`SharedSegment`].
pub(crate) struct Pipeline {
    segment: SharedSegment,
    /// The collectives in order; the first is the oldest that has not ended.
    collectives: VecDeque<CollectiveInFlight>,
    /// The number of the first chunk of the next collective.
    next_chunk: u64,
    /// The number of chunks that this rank has brought past each stage.
    reached: [u64; 3],
    /// The position in `collectives` of the next chunk of each stage.
    flow: [usize; 3],
    /// The number of chunks that all other ranks are known to have brought past each stage.
    known: [u64; 3],
    has_more: bool,
    /// Whether there are as many processors as ranks. If so, sleeping ranks are woken at every chunk, rather than when this rank
    /// can go no further, and this rank polls for longer before it sleeps.
    has_processor: bool,
    /// `true` if this rank has made progress since it last woke sleepers.
    has_unsignalled: bool,
}

/// A collective under way.
struct CollectiveInFlight {
    key: SlabKey,
    number: u64,
    descriptor: Descriptor,
    plan: Plan,
    first_chunk: u64,
}

/// The mismatch where another rank runs another collective.
#[derive(Debug)]
pub(crate) struct CollectiveMismatch {
    pub(crate) rank: u32,
    pub(crate) number: u64,
    pub(crate) ours: Descriptor,
    /// The other rank's collective; `None` if its label is no collective.
    pub(crate) theirs: Option<(u64, Descriptor)>,
}

impl Pipeline {
    pub(crate) fn new(segment: SharedSegment) -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let has_processor = segment.size() as usize <= processors;
        Pipeline {
            segment,
            collectives: VecDeque::new(),
            next_chunk: 0,
            reached: [0; 3],
            flow: [0; 3],
            known: [0; 3],
            has_more: false,
            has_processor,
            has_unsignalled: false,
        }
    }

    /// The doorbell to wait for, and to [`clear`](Doorbell::clear) after a wake.
    pub(crate) fn doorbell(&self) -> &Doorbell {
        self.segment.doorbell()
    }

    /// Adds a collective that has begun.
    pub(crate) fn push(&mut self, key: SlabKey, number: u64, descriptor: Descriptor, plan: Plan) {
        let first_chunk = self.next_chunk;
        self.next_chunk += plan.chunks();
        self.collectives.push_back(CollectiveInFlight { key, number, descriptor, plan, first_chunk });
        self.has_more = true;
    }

    /// Returns whether the pipeline stopped only because its budget was spent.
    pub(crate) fn has_more(&self) -> bool {
        self.has_more
    }

    /// Returns whether the pipeline waits for other ranks.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.collectives.is_empty() && !self.has_more
    }

    /// Advances until it has touched about `budget` bytes or must wait for other ranks.
    pub(crate) fn advance(
        &mut self,
        in_flight: &mut OperationsInFlight,
        budget: usize,
    ) -> Result<(), CollectiveMismatch> {
        let mut left = budget as isize;
        self.has_more = false;
        // The last stage of a chunk comes first, so that few bytes are under way and all of them stay in the
        // cache.
        while !self.collectives.is_empty() {
            if left <= 0 {
                self.has_more = true;
                break;
            }
            let bytes = if self.may(ChunkStage::ReadByRank) {
                self.take(in_flight)?
            } else if self.may(ChunkStage::Reduced) {
                self.reduce(in_flight)?
            } else if self.may(ChunkStage::Copied) {
                self.copy(in_flight)
            } else {
                break;
            };
            left -= bytes.max(512) as isize;
        }
        if std::mem::take(&mut self.has_unsignalled) {
            self.segment.wake_others();
        }
        Ok(())
    }

    /// Polls for other ranks for a short time. Returns whether this rank can go on.
    pub(crate) fn spin_for_others(&mut self) -> bool {
        let spin = if self.has_processor { SPIN_ALONE } else { SPIN };
        let begun = Instant::now();
        loop {
            for _ in 0..16 {
                if ChunkStage::ALL.into_iter().any(|stage| self.may(stage)) {
                    self.has_more = true;
                    return true;
                }
                thread::yield_now();
            }
            if begun.elapsed() >= spin {
                return false;
            }
        }
    }

    /// Asks the other ranks to ring the doorbell once this rank can go on. Returns whether it may sleep:
    /// `false` if it can go on already.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        let mut conditions = [WakeCondition::default(); 3];
        for stage in ChunkStage::ALL {
            conditions[awaited_stage(stage) as usize] = self.wake_condition(stage).unwrap_or_default();
        }
        self.segment.announce_sleep(conditions);
        self.has_more = ChunkStage::ALL.into_iter().any(|stage| self.may(stage));
        !self.has_more
    }

    /// Withdraws the request to ring the doorbell.
    pub(crate) fn clear_sleep(&mut self) {
        self.segment.clear_sleep();
    }

    /// The ranks that the collective of this key waits for; perhaps because earlier collectives wait for
    /// them.
    pub(crate) fn awaited(&self, key: SlabKey) -> Vec<u32> {
        if !self.collectives.iter().any(|flow| flow.key == key) {
            return Vec::new();
        }
        let behind = |stage| {
            let wake_condition = self.wake_condition(stage)?;
            Some(self.segment.behind(awaited_stage(stage), wake_condition.count, wake_condition.ranks))
        };
        members(ChunkStage::ALL.into_iter().filter_map(behind).fold(0, |all, ranks| all | ranks)).collect()
    }

    /// The condition for the next chunk to enter a stage. `None` if this rank's own previous stage has not
    /// come so far.
    fn condition_to_enter(&self, stage: ChunkStage) -> Option<WakeCondition> {
        let flow = self.collectives.get(self.flow[stage as usize])?;
        let chunk = self.reached[stage as usize];
        let wake_condition = match stage {
            ChunkStage::Copied => {
                // The chunk that lay in the slot before must have been taken.
                let count = (chunk + 1).saturating_sub(SLOTS);
                if self.reached[ChunkStage::ReadByRank as usize] < count {
                    return None;
                }
                WakeCondition { count, ranks: self.segment.others() }
            }
            _ if self.reached[stage as usize - 1] <= chunk => return None,
            ChunkStage::Reduced => {
                let reduces = flow.plan.reduced(chunk - flow.first_chunk).is_some();
                WakeCondition { count: chunk + 1, ranks: if reduces { self.segment.others() } else { 0 } }
            }
            ChunkStage::ReadByRank => WakeCondition { count: chunk + 1, ranks: flow.plan.sources() },
        };
        Some(wake_condition)
    }

    /// The condition on which to be woken.
    fn wake_condition(&self, stage: ChunkStage) -> Option<WakeCondition> {
        let mut wake_condition = self.condition_to_enter(stage)?;
        if stage == ChunkStage::Copied && wake_condition.count > 0 {
            // A rank is not woken for a single free slot. The other ranks can take all chunks there are, for
            // none of them waits for this rank.
            wake_condition.count += SLOTS / 2;
        }
        Some(wake_condition)
    }

    fn may(&mut self, stage: ChunkStage) -> bool {
        let Some(wake_condition) = self.condition_to_enter(stage) else { return false };
        let awaited = awaited_stage(stage);
        if wake_condition.ranks == 0 || self.known[awaited as usize] >= wake_condition.count {
            return true;
        }
        if self.segment.behind(awaited, wake_condition.count, wake_condition.ranks) != 0 {
            return false;
        }
        if wake_condition.ranks == self.segment.others() {
            let furthest =
                members(wake_condition.ranks).map(|rank| self.segment.reached(rank, awaited)).min();
            self.known[awaited as usize] = furthest.unwrap_or(wake_condition.count);
        }
        true
    }

    fn copy(&mut self, in_flight: &mut OperationsInFlight) -> usize {
        let chunk = self.reached[ChunkStage::Copied as usize];
        let flow = &self.collectives[self.flow[ChunkStage::Copied as usize]];
        let operation = in_flight.operation_mut(flow.key);
        let local = chunk - flow.first_chunk;
        self.segment.write_label(chunk, flow.number, &flow.descriptor);
        let mut bytes = 0;
        for rank in 0..self.segment.size() {
            if let Some((from, offset)) = flow.plan.copied(local, rank) {
                self.segment.put(chunk, offset, operation.bytes(from));
                bytes += from.bytes;
            }
        }
        if let Some((into, from)) = flow.plan.own_copy(local) {
            operation.copy(into, from);
            bytes += from.bytes;
        }
        self.reach(ChunkStage::Copied);
        bytes
    }

    fn reduce(&mut self, in_flight: &mut OperationsInFlight) -> Result<usize, CollectiveMismatch> {
        let chunk = self.reached[ChunkStage::Reduced as usize];
        let flow = &self.collectives[self.flow[ChunkStage::Reduced as usize]];
        let mut bytes = 0;
        if let Some(reduction) = flow.plan.reduced(chunk - flow.first_chunk) {
            self.check_labels(flow, chunk, self.segment.others())?;
            let operation = in_flight.operation_mut(flow.key);
            reduce(&self.segment, operation, chunk, reduction);
            bytes = reduction.into.bytes * self.segment.size() as usize;
        }
        self.reach(ChunkStage::Reduced);
        Ok(bytes)
    }

    fn take(&mut self, in_flight: &mut OperationsInFlight) -> Result<usize, CollectiveMismatch> {
        let chunk = self.reached[ChunkStage::ReadByRank as usize];
        let flow = &self.collectives[0];
        let sources = flow.plan.sources();
        self.check_labels(flow, chunk, sources)?;
        let operation = in_flight.operation_mut(flow.key);
        let mut bytes = 0;
        for source in members(sources) {
            if let Some((into, offset)) = flow.plan.taken(chunk - flow.first_chunk, source) {
                self.segment.take(source, chunk, offset, operation.bytes_mut(into));
                bytes += into.bytes;
            }
        }
        let (key, is_last) = (flow.key, chunk + 1 == flow.first_chunk + flow.plan.chunks());
        self.reach(ChunkStage::ReadByRank);
        if is_last {
            self.collectives.pop_front();
            self.flow = self.flow.map(|place| place.saturating_sub(1));
            in_flight.end(key, Ok(()));
        }
        Ok(bytes)
    }

    fn reach(&mut self, stage: ChunkStage) {
        let at = stage as usize;
        self.reached[at] += 1;
        let flow = &self.collectives[self.flow[at]];
        if self.reached[at] == flow.first_chunk + flow.plan.chunks() {
            self.flow[at] += 1;
        }
        self.segment.reach(stage, self.reached[at]);
        match self.has_processor {
            true => self.segment.wake_others(),
            false => self.has_unsignalled = true,
        }
    }

    /// Checks that these ranks' slots of a chunk belong to this collective, so that no bytes of another one
    /// get into it.
    fn check_labels(
        &self,
        flow: &CollectiveInFlight,
        chunk: u64,
        ranks: u64,
    ) -> Result<(), CollectiveMismatch> {
        for rank in members(ranks) {
            let theirs = self.segment.read_label(rank, chunk);
            if theirs != Some((flow.number, flow.descriptor)) {
                return Err(CollectiveMismatch { rank, number: flow.number, ours: flow.descriptor, theirs });
            }
        }
        Ok(())
    }
}

/// The stage of the other ranks that a stage waits for.
fn awaited_stage(stage: ChunkStage) -> ChunkStage {
    match stage {
        ChunkStage::Copied => ChunkStage::ReadByRank,
        ChunkStage::Reduced => ChunkStage::Copied,
        ChunkStage::ReadByRank => ChunkStage::Reduced,
    }
}

fn reduce(segment: &SharedSegment, operation: &mut Operation, chunk: u64, reduction: ChunkReduction) {
    let ChunkReduction { into, offset, first, is_whole, is_spread } = reduction;
    let (element, op) = operation.reduction();
    if let Some(first) = first {
        operation.copy(into, first);
    }
    let (own, size) = (segment.rank(), segment.size());
    let sources = (0..size).filter(move |&rank| is_whole || rank != own);
    for (number, tile) in operation.bytes_mut(into).chunks_mut(TILE_BYTES).enumerate() {
        let offset = offset + number * TILE_BYTES;
        let floats = match (element, op) {
            (ElementType::F32, ReduceOp::Sum | ReduceOp::Average) => {
                bytemuck::try_cast_slice_mut::<u8, f32>(tile).ok()
            }
            _ => None,
        };
        match floats {
            Some(sum) => {
                let mut contributions = [Floats::NONE; RANKS_MAX as usize];
                let mut count = 0;
                for rank in sources.clone() {
                    contributions[count] = segment.floats(rank, chunk, offset, sum.len());
                    count += 1;
                }
                gather(sum, !is_whole, &contributions[..count]);
            }
            None => {
                arithmetic::reduce_all(element, op, tile, !is_whole, sources.clone(), |rank, at, copy| {
                    segment.take(rank, chunk, offset + at, copy);
                })
            }
        }
        if op == ReduceOp::Average {
            arithmetic::divide(element, tile, size);
        }
        if is_spread {
            segment.put(chunk, offset, tile);
        }
    }
}
