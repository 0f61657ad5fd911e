//! Runs the plans of collectives, chunk by chunk, as far as the other ranks are.

use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};

use paramhub_kernels::shared::{Floats, gather};
use paramhub_transport::shm::Bell;

use super::commons::{Commons, RANKS_MAX, SLOTS, Stage, Wish, members};
use super::plan::{Plan, Reduction};
use crate::arithmetic;
use crate::descriptor::Descriptor;
use crate::element::{ElementType, ReduceOp};
use crate::engine::{Board, Key};
use crate::operation::Operation;

/// How long a rank looks before it sleeps. It yields meanwhile, so that with more ranks than processors the others go on.
const LOOKING: Duration = Duration::from_micros(50);
/// Bytes that are reduced before the result is copied for the others: both still in the first cache.
const TILE_BYTES: usize = 16 << 10;

/// Collectives under way through a [`Commons`].
pub(crate) struct Pipeline {
    commons: Commons,
    /// In order; the first is the oldest that has not ended.
    flows: VecDeque<Flow>,
    /// The number of the first chunk of the next one.
    next_chunk: u64,
    /// By stage: chunks that this rank has brought so far,
    reached: [u64; 3],
    /// the flow of the next one,
    flow: [usize; 3],
    /// and how far all others are at least, as far as known.
    known: [u64; 3],
    has_more: bool,
    /// Ranks that sleep are woken at every chunk rather than when this one has done what it can.
    is_prompt: bool,
    /// Something was reached that sleepers were not woken for.
    is_untold: bool,
}

/// A collective under way.
struct Flow {
    key: Key,
    number: u64,
    descriptor: Descriptor,
    plan: Plan,
    first_chunk: u64,
}

/// A rank calls something else.
#[derive(Debug)]
pub(crate) struct Stranger {
    pub(crate) rank: u32,
    pub(crate) number: u64,
    pub(crate) ours: Descriptor,
    /// `None`: what it wrote is no collective.
    pub(crate) theirs: Option<(u64, Descriptor)>,
}

impl Pipeline {
    pub(crate) fn new(commons: Commons) -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let is_prompt = commons.size() as usize <= processors;
        Pipeline {
            commons,
            flows: VecDeque::new(),
            next_chunk: 0,
            reached: [0; 3],
            flow: [0; 3],
            known: [0; 3],
            has_more: false,
            is_prompt,
            is_untold: false,
        }
    }

    /// To wait for, and to [`hear`](Bell::hear) when it has rung.
    pub(crate) fn bell(&self) -> &Bell {
        self.commons.bell()
    }

    /// A collective has begun.
    pub(crate) fn push(&mut self, key: Key, number: u64, descriptor: Descriptor, plan: Plan) {
        let first_chunk = self.next_chunk;
        self.next_chunk += plan.chunks();
        self.flows.push_back(Flow { key, number, descriptor, plan, first_chunk });
        self.has_more = true;
    }

    /// Whether it stopped for want of budget.
    pub(crate) fn has_more(&self) -> bool {
        self.has_more
    }

    /// Whether it cannot go on before other ranks do.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.flows.is_empty() && !self.has_more
    }

    /// Goes on until about `budget` bytes were touched or others have to come first.
    pub(crate) fn advance(&mut self, board: &mut Board, budget: usize) -> Result<(), Stranger> {
        let mut left = budget as isize;
        self.has_more = false;
        // What ends a chunk comes first, so that as few bytes as possible are under way and all of them in cache.
        while !self.flows.is_empty() {
            if left <= 0 {
                self.has_more = true;
                break;
            }
            let bytes = if self.may(Stage::Taken) {
                self.take(board)?
            } else if self.may(Stage::Reduced) {
                self.reduce(board)?
            } else if self.may(Stage::Copied) {
                self.copy(board)
            } else {
                break;
            };
            left -= bytes.max(512) as isize;
        }
        if std::mem::take(&mut self.is_untold) {
            self.commons.wake_others();
        }
        Ok(())
    }

    /// Waits a little for others. Returns whether this rank can go on.
    pub(crate) fn look_out(&mut self) -> bool {
        let begun = Instant::now();
        loop {
            for _ in 0..16 {
                if Stage::ALL.into_iter().any(|stage| self.may(stage)) {
                    self.has_more = true;
                    return true;
                }
                thread::yield_now();
            }
            if begun.elapsed() >= LOOKING {
                return false;
            }
        }
    }

    /// Has the bell rung once this rank can go on. Returns whether it may wait for that: not if it can go on already.
    pub(crate) fn fall_asleep(&mut self) -> bool {
        let mut wishes = [Wish::default(); 3];
        for stage in Stage::ALL {
            wishes[awaited_stage(stage) as usize] = self.wish(stage).unwrap_or_default();
        }
        self.commons.sleep(wishes);
        self.has_more = Stage::ALL.into_iter().any(|stage| self.may(stage));
        !self.has_more
    }

    /// It waits for the bell no more.
    pub(crate) fn rise(&mut self) {
        self.commons.rise();
    }

    /// The ranks that the collective of this key waits for, as a list; perhaps because those before it do.
    pub(crate) fn awaited(&self, key: Key) -> Vec<u32> {
        if !self.flows.iter().any(|flow| flow.key == key) {
            return Vec::new();
        }
        let behind = |stage| {
            let wish = self.wish(stage)?;
            Some(self.commons.behind(awaited_stage(stage), wish.count, wish.ranks))
        };
        members(Stage::ALL.into_iter().filter_map(behind).fold(0, |all, ranks| all | ranks)).collect()
    }

    /// What must be so for the next chunk to enter a stage. `None`: this rank itself is not there.
    fn wish_for(&self, stage: Stage) -> Option<Wish> {
        let flow = self.flows.get(self.flow[stage as usize])?;
        let chunk = self.reached[stage as usize];
        let wish = match stage {
            Stage::Copied => {
                // What lay in the slot before.
                let count = (chunk + 1).saturating_sub(SLOTS);
                if self.reached[Stage::Taken as usize] < count {
                    return None;
                }
                Wish { count, ranks: self.commons.others() }
            }
            _ if self.reached[stage as usize - 1] <= chunk => return None,
            Stage::Reduced => {
                let reduces = flow.plan.reduced(chunk - flow.first_chunk).is_some();
                Wish { count: chunk + 1, ranks: if reduces { self.commons.others() } else { 0 } }
            }
            Stage::Taken => Wish { count: chunk + 1, ranks: flow.plan.sources() },
        };
        Some(wish)
    }

    /// What to be woken for.
    fn wish(&self, stage: Stage) -> Option<Wish> {
        let mut wish = self.wish_for(stage)?;
        if stage == Stage::Copied && wish.count > 0 {
            // Not for a single slot. The others can take all there is, for this rank keeps none of them waiting.
            wish.count += SLOTS / 2;
        }
        Some(wish)
    }

    fn may(&mut self, stage: Stage) -> bool {
        let Some(wish) = self.wish_for(stage) else { return false };
        let awaited = awaited_stage(stage);
        if wish.ranks == 0 || self.known[awaited as usize] >= wish.count {
            return true;
        }
        if self.commons.behind(awaited, wish.count, wish.ranks) != 0 {
            return false;
        }
        if wish.ranks == self.commons.others() {
            let furthest = members(wish.ranks).map(|rank| self.commons.reached(rank, awaited)).min();
            self.known[awaited as usize] = furthest.unwrap_or(wish.count);
        }
        true
    }

    fn copy(&mut self, board: &mut Board) -> usize {
        let chunk = self.reached[Stage::Copied as usize];
        let flow = &self.flows[self.flow[Stage::Copied as usize]];
        let operation = board.operation_mut(flow.key);
        let local = chunk - flow.first_chunk;
        self.commons.label(chunk, flow.number, &flow.descriptor);
        let mut bytes = 0;
        for rank in 0..self.commons.size() {
            if let Some((from, offset)) = flow.plan.copied(local, rank) {
                self.commons.put(chunk, offset, operation.bytes(from));
                bytes += from.bytes;
            }
        }
        if let Some((into, from)) = flow.plan.kept(local) {
            operation.copy(into, from);
            bytes += from.bytes;
        }
        self.reach(Stage::Copied);
        bytes
    }

    fn reduce(&mut self, board: &mut Board) -> Result<usize, Stranger> {
        let chunk = self.reached[Stage::Reduced as usize];
        let flow = &self.flows[self.flow[Stage::Reduced as usize]];
        let mut bytes = 0;
        if let Some(reduction) = flow.plan.reduced(chunk - flow.first_chunk) {
            self.recognise(flow, chunk, self.commons.others())?;
            let operation = board.operation_mut(flow.key);
            reduce(&self.commons, operation, chunk, reduction);
            bytes = reduction.into.bytes * self.commons.size() as usize;
        }
        self.reach(Stage::Reduced);
        Ok(bytes)
    }

    fn take(&mut self, board: &mut Board) -> Result<usize, Stranger> {
        let chunk = self.reached[Stage::Taken as usize];
        let flow = &self.flows[0];
        let sources = flow.plan.sources();
        self.recognise(flow, chunk, sources)?;
        let operation = board.operation_mut(flow.key);
        let mut bytes = 0;
        for source in members(sources) {
            if let Some((into, offset)) = flow.plan.taken(chunk - flow.first_chunk, source) {
                self.commons.take(source, chunk, offset, operation.bytes_mut(into));
                bytes += into.bytes;
            }
        }
        let (key, is_last) = (flow.key, chunk + 1 == flow.first_chunk + flow.plan.chunks());
        self.reach(Stage::Taken);
        if is_last {
            self.flows.pop_front();
            self.flow = self.flow.map(|place| place.saturating_sub(1));
            board.end(key, Ok(()));
        }
        Ok(bytes)
    }

    fn reach(&mut self, stage: Stage) {
        let at = stage as usize;
        self.reached[at] += 1;
        let flow = &self.flows[self.flow[at]];
        if self.reached[at] == flow.first_chunk + flow.plan.chunks() {
            self.flow[at] += 1;
        }
        self.commons.reach(stage, self.reached[at]);
        match self.is_prompt {
            true => self.commons.wake_others(),
            false => self.is_untold = true,
        }
    }

    /// Whether these ranks' slots of a chunk are of this collective: nothing of another one may get into it.
    fn recognise(&self, flow: &Flow, chunk: u64, ranks: u64) -> Result<(), Stranger> {
        for rank in members(ranks) {
            let theirs = self.commons.label_of(rank, chunk);
            if theirs != Some((flow.number, flow.descriptor)) {
                return Err(Stranger { rank, number: flow.number, ours: flow.descriptor, theirs });
            }
        }
        Ok(())
    }
}

/// Which counters of the others a stage waits for.
fn awaited_stage(stage: Stage) -> Stage {
    match stage {
        Stage::Copied => Stage::Taken,
        Stage::Reduced => Stage::Copied,
        Stage::Taken => Stage::Reduced,
    }
}

fn reduce(commons: &Commons, operation: &mut Operation, chunk: u64, reduction: Reduction) {
    let Reduction { into, offset, first, is_whole, is_spread } = reduction;
    let (element, op) = operation.reduction();
    if let Some(first) = first {
        operation.copy(into, first);
    }
    let (own, size) = (commons.rank(), commons.size());
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
                    contributions[count] = commons.floats(rank, chunk, offset, sum.len());
                    count += 1;
                }
                gather(sum, !is_whole, &contributions[..count]);
            }
            None => {
                arithmetic::reduce_all(element, op, tile, !is_whole, sources.clone(), |rank, at, copy| {
                    commons.take(rank, chunk, offset + at, copy);
                })
            }
        }
        if op == ReduceOp::Average {
            arithmetic::divide(element, tile, size);
        }
        if is_spread {
            commons.put(chunk, offset, tile);
        }
    }
}
