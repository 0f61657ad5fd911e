//! The steps of one rank for one operation: steps that send, receive and compute, and the order between them.
//!
//! A schedule is a plain value made from the rank, the number of ranks and the lengths. It has no sockets, so
//! a test can run all ranks' schedules of a collective against one another, in any order that their
//! dependencies allow.
//!
//! Where ranks share memory, most collectives have a [`Plan`](crate::memory::Plan) instead.
//!
//! To run collectives as such schedules is the idea of libNBC (Hoefler, Lumsdaine, Rehm: "Implementation and
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

/// The largest operation that is bound by latency: up to here fewer rounds count for more than fewer bytes.
pub(crate) const SMALL_BYTES_MAX: usize = 64 << 10;
/// The largest allreduce among a power of two ranks that goes by halves: it takes fewer rounds than a ring,
/// but has no pipeline.
const HALVING_BYTES_MAX: usize = 1 << 20;
/// The size of a pipeline's pieces, about: one frame.
const PIECE_BYTES: usize = crate::wire::PIECE_BYTES;
/// The smallest piece: a smaller one costs more for its frame than it saves.
const PIECE_BYTES_MIN: usize = 16 << 10;
/// The number of pieces that a pipeline has at least where it can, so that arithmetic overlaps transfers.
const PIECES_MIN: usize = 4;
/// The number of steps in one pipeline, about, which bounds a schedule's memory.
const STEPS_MAX: usize = 8 << 10;
/// The scratch with which the owner of a segment receives all contributions at once rather than one after the
/// other.
const SCRATCH_BYTES_MAX: usize = 256 << 10;

/// The number of the operation's scratch buffer in a [`BufferRange`].
pub(crate) const SCRATCH: u32 = u32::MAX;

/// A part of one of the operation's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferRange {
    /// The position in the operation's list, or [`SCRATCH`].
    pub(crate) buffer: u32,
    pub(crate) start: usize,
    pub(crate) bytes: usize,
}

impl BufferRange {
    pub(crate) const fn whole(buffer: u32, bytes: usize) -> Self {
        BufferRange { buffer, start: 0, bytes }
    }

    pub(crate) const fn end(&self) -> usize {
        self.start + self.bytes
    }

    /// `bytes` from `start` on, counted from the start of this range.
    pub(crate) const fn part(&self, start: usize, bytes: usize) -> Self {
        BufferRange { buffer: self.buffer, start: self.start + start, bytes }
    }
}

/// One step's work. A transfer is matched with the peer's by its index, which is unique among the transfers
/// from one rank to another in one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Send {
        peer: u32,
        index: u32,
        from: BufferRange,
    },
    Receive {
        peer: u32,
        index: u32,
        into: BufferRange,
    },
    /// Receives from the rank that sends first. Point to point only.
    ReceiveAny {
        into: BufferRange,
    },
    /// `into = into op received`, as it arrives.
    ReceiveReduce {
        peer: u32,
        index: u32,
        into: BufferRange,
    },
    /// `into = from`.
    Copy {
        into: BufferRange,
        from: BufferRange,
    },
    /// `into = into op from`.
    Reduce {
        into: BufferRange,
        from: BufferRange,
    },
    /// Divides a sum by the number of ranks.
    Divide {
        span: BufferRange,
    },
}

impl Work {
    pub(crate) fn is_send(&self) -> bool {
        matches!(self, Work::Send { .. })
    }
}

/// The end of a step of a schedule, for later steps to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    number: u32,
    /// For a send: it waits only until all bytes have left. Then the peer may not have taken them yet.
    has_left: bool,
}

impl Step {
    /// The moment at which all bytes of a send have left. A receive into the range that was sent may wait for this
    /// instead of the end if its data depend on what was sent: they come when the peer has taken that.
    fn left(self) -> Step {
        Step { has_left: true, ..self }
    }
}

/// The schedule of one operation; see the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Schedule {
    pub(crate) work: Vec<Work>,
    /// Pairs of an earlier step and the number of a later one that waits for it.
    edges: Vec<(Step, u32)>,
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
        self.edges.extend(after.iter().flatten().map(|earlier| (*earlier, step)));
        Step { number: step, has_left: false }
    }

    /// A new part of the scratch buffer.
    fn scratch(&mut self, bytes: usize) -> BufferRange {
        let span = BufferRange { buffer: SCRATCH, start: self.scratch_bytes, bytes };
        self.scratch_bytes += bytes;
        span
    }

    /// The dependencies between the steps, with which an engine runs them.
    pub(crate) fn order(&self) -> StepDependencies {
        let steps = self.work.len();
        let event = |step: Step| step.number as usize + if step.has_left { steps } else { 0 };
        let mut unmet = vec![0; steps];
        let mut first = vec![0; 2 * steps + 1];
        for &(earlier, later) in &self.edges {
            unmet[later as usize] += 1;
            first[event(earlier) + 1] += 1;
        }
        for event in 0..2 * steps {
            first[event + 1] += first[event];
        }
        let mut next = first.clone();
        let mut later_steps = vec![0; self.edges.len()];
        for &(earlier, later) in &self.edges {
            let place = &mut next[event(earlier)];
            later_steps[*place as usize] = later;
            *place += 1;
        }
        StepDependencies { unmet, first, later_steps }
    }
}

/// The number of events that each step still waits for, and the steps that wait for each event: first the ends of all
/// steps, then the moments at which sends have left.
#[derive(Debug)]
pub(crate) struct StepDependencies {
    unmet: Vec<u32>,
    /// The position in `later_steps` of each event's first follower; the next event's position ends them.
    first: Vec<u32>,
    later_steps: Vec<u32>,
}

impl StepDependencies {
    /// The steps that wait for nothing.
    pub(crate) fn ready(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.unmet.len() as u32).filter(|step| self.unmet[*step as usize] == 0)
    }

    /// Notes that `step` has ended; calls `released` with each step that need not wait any longer.
    pub(crate) fn ended(&mut self, step: u32, released: impl FnMut(u32)) {
        self.happened(step as usize, released);
    }

    /// Notes, once only, that all bytes of the send `step` have left.
    pub(crate) fn left(&mut self, step: u32, released: impl FnMut(u32)) {
        self.happened(self.unmet.len() + step as usize, released);
    }

    fn happened(&mut self, event: usize, mut released: impl FnMut(u32)) {
        let followers = self.first[event] as usize..self.first[event + 1] as usize;
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

/// The part number `part` of `parts` of `span`, cut at whole elements of `width` bytes. Parts differ by one
/// element at most.
pub(crate) fn cut(span: BufferRange, width: usize, parts: usize, part: usize) -> BufferRange {
    let elements = span.bytes / width;
    let (each, longer) = (elements / parts, elements % parts);
    let before = |part: usize| part * each + part.min(longer);
    let (start, end) = (before(part), before(part + 1));
    span.part(start * width, (end - start) * width)
}

/// The number of pieces to cut `bytes` into, which pass through `steps` steps each.
fn pieces(bytes: usize, steps: usize) -> usize {
    let wanted = bytes.div_ceil(PIECE_BYTES).max(PIECES_MIN.min(bytes / PIECE_BYTES_MIN));
    wanted.clamp(1, (STEPS_MAX / steps.max(1)).max(1))
}
