//! What one rank does for one operation: steps that send, receive and compute, and which step waits for which.
//!
//! A schedule is a plain value made from the rank, the number of ranks and the lengths. It knows no sockets, so that all ranks'
//! schedules of a collective can be run against one another in a test, in any order their dependencies allow.
//!
//! Where ranks share memory, a [`Plan`](crate::memory::Plan) takes its place for most collectives.
//!
//! The idea of running collectives as such schedules is that of libNBC (Hoefler, Lumsdaine, Rehm: "Implementation and
//! performance analysis of non-blocking collective operations for MPI", SC 2007).

mod allreduce;
mod broadcast;
mod direct;
mod hosts;
mod reduce;
#[cfg(test)]
mod simulation;

pub(crate) use allreduce::allreduce;
pub(crate) use broadcast::{barrier, broadcast};
pub(crate) use direct::{all_to_all, allgather, gather, scatter};
pub(crate) use hosts::allgather_between_hosts;
pub(crate) use reduce::{reduce, reduce_scatter};

/// Up to here an operation is bound by latency: fewer rounds count for more than fewer bytes.
pub(crate) const SMALL_BYTES_MAX: usize = 64 << 10;
/// Up to here an allreduce among a power of two ranks goes by halves: fewer rounds than a ring, without its pipeline.
const HALVING_BYTES_MAX: usize = 1 << 20;
/// A piece of a pipeline is about so large: one frame.
const PIECE_BYTES: usize = crate::wire::PIECE_BYTES;
/// Smaller pieces than this do not pay for their frames.
const PIECE_BYTES_MIN: usize = 16 << 10;
/// Where it can, a pipeline has so many pieces, so that arithmetic overlaps transfers.
const PIECES_MIN: usize = 4;
/// Steps of one pipeline, about: what bounds a schedule's memory.
const STEPS_MAX: usize = 8 << 10;
/// Scratch that the owner of a segment takes to receive all contributions at once rather than one after the other.
const SCRATCH_BYTES_MAX: usize = 256 << 10;

/// Stands for the operation's scratch buffer in a [`Span`].
pub(crate) const SCRATCH: u32 = u32::MAX;

/// A part of one of the operation's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Position in the operation's list, or [`SCRATCH`].
    pub(crate) buffer: u32,
    pub(crate) start: usize,
    pub(crate) bytes: usize,
}

impl Span {
    pub(crate) const fn whole(buffer: u32, bytes: usize) -> Self {
        Span { buffer, start: 0, bytes }
    }

    pub(crate) const fn end(&self) -> usize {
        self.start + self.bytes
    }

    /// `bytes` from `start` on, counted from this span's start.
    pub(crate) const fn part(&self, start: usize, bytes: usize) -> Self {
        Span { buffer: self.buffer, start: self.start + start, bytes }
    }
}

/// One thing to do. A transfer is matched with the peer's by its index, which no two transfers from one rank to another in
/// one operation share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Send {
        peer: u32,
        index: u32,
        from: Span,
    },
    Receive {
        peer: u32,
        index: u32,
        into: Span,
    },
    /// Receives from whoever sends first. Point to point only.
    ReceiveAny {
        into: Span,
    },
    /// `into = into op received`, as it arrives.
    ReceiveReduce {
        peer: u32,
        index: u32,
        into: Span,
    },
    /// `into = from`.
    Copy {
        into: Span,
        from: Span,
    },
    /// `into = into op from`.
    Reduce {
        into: Span,
        from: Span,
    },
    /// Divides a sum by the number of ranks.
    Divide {
        span: Span,
    },
}

/// A step of a schedule, for others to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step(u32);

/// See the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Schedule {
    pub(crate) work: Vec<Work>,
    /// Earlier step, later step.
    edges: Vec<(u32, u32)>,
    pub(crate) scratch_bytes: usize,
}

impl Schedule {
    /// A schedule of one step.
    pub(crate) fn of(work: Work) -> Self {
        Schedule { work: vec![work], ..Schedule::default() }
    }

    /// Adds a step that begins once all of `after` have ended.
    fn push(&mut self, work: Work, after: &[Option<Step>]) -> Step {
        let step = self.work.len() as u32;
        self.work.push(work);
        self.edges.extend(after.iter().flatten().map(|earlier| (earlier.0, step)));
        Step(step)
    }

    /// A new part of the scratch buffer.
    fn scratch(&mut self, bytes: usize) -> Span {
        let span = Span { buffer: SCRATCH, start: self.scratch_bytes, bytes };
        self.scratch_bytes += bytes;
        span
    }

    /// The order between the steps, for whoever runs them.
    pub(crate) fn order(&self) -> Order {
        let mut unmet = vec![0; self.work.len()];
        let mut first = vec![0; self.work.len() + 1];
        for &(earlier, later) in &self.edges {
            unmet[later as usize] += 1;
            first[earlier as usize + 1] += 1;
        }
        for step in 0..self.work.len() {
            first[step + 1] += first[step];
        }
        let mut next = first.clone();
        let mut later_steps = vec![0; self.edges.len()];
        for &(earlier, later) in &self.edges {
            let place = &mut next[earlier as usize];
            later_steps[*place as usize] = later;
            *place += 1;
        }
        Order { unmet, first, later_steps }
    }
}

/// How many steps each step still waits for, and who waits for it.
#[derive(Debug)]
pub(crate) struct Order {
    unmet: Vec<u32>,
    /// Where the followers of a step begin in `later_steps`; the next step's beginning ends them.
    first: Vec<u32>,
    later_steps: Vec<u32>,
}

impl Order {
    /// The steps that wait for nothing.
    pub(crate) fn free(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.unmet.len() as u32).filter(|step| self.unmet[*step as usize] == 0)
    }

    /// `step` has ended; calls `released` with each step that need not wait any longer.
    pub(crate) fn ended(&mut self, step: u32, mut released: impl FnMut(u32)) {
        let followers = self.first[step as usize] as usize..self.first[step as usize + 1] as usize;
        for follower in followers {
            let later = self.later_steps[follower];
            let unmet = &mut self.unmet[later as usize];
            *unmet -= 1;
            if *unmet == 0 {
                released(later);
            }
        }
    }
}

/// Part `part` of `parts` of `span`, cut at whole elements of `width` bytes. Parts differ by one element at most.
pub(crate) fn cut(span: Span, width: usize, parts: usize, part: usize) -> Span {
    let elements = span.bytes / width;
    let (each, longer) = (elements / parts, elements % parts);
    let before = |part: usize| part * each + part.min(longer);
    let (start, end) = (before(part), before(part + 1));
    span.part(start * width, (end - start) * width)
}

/// Into how many pieces to cut `bytes` that pass through `steps` steps each.
fn pieces(bytes: usize, steps: usize) -> usize {
    let wanted = bytes.div_ceil(PIECE_BYTES).max(PIECES_MIN.min(bytes / PIECE_BYTES_MIN));
    wanted.clamp(1, (STEPS_MAX / steps.max(1)).max(1))
}
