//! One operation: its buffers, its schedule and how far it is.

use std::fmt;
use std::sync::Arc;

use paramhub_transport::{ReceiveRegion, SendRegion};

use crate::arithmetic;
use crate::descriptor::Descriptor;
use crate::element::{ElementType, ReduceOp};
use crate::handle::Ticket;
use crate::memory::Plan;
use crate::schedule::{Order, SCRATCH, Schedule, Span, Work};

/// What a user thread asks for.
pub(crate) struct Request {
    pub(crate) what: What,
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) schedule: Schedule,
    /// In place of a schedule, of a collective that goes through shared memory.
    pub(crate) plan: Option<Plan>,
    pub(crate) ticket: Ticket,
}

/// Which operation it is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    Send { peer: u32, tag: u64 },
    Receive { peer: u32, tag: u64 },
    ReceiveAny { tag: u64 },
    Collective(Descriptor),
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::Send { peer, tag } => write!(f, "send to rank {peer} with tag {tag}"),
            What::Receive { peer, tag } => write!(f, "receive from rank {peer} with tag {tag}"),
            What::ReceiveAny { tag } => write!(f, "receive from any rank with tag {tag}"),
            What::Collective(descriptor) => descriptor.fmt(f),
        }
    }
}

/// Memory that an operation works with.
#[derive(Debug)]
pub(crate) enum Buffer {
    Send(SendRegion),
    Receive(ReceiveRegion),
    Scratch(Vec<u8>),
}

impl Buffer {
    fn bytes(&self) -> &[u8] {
        match self {
            Buffer::Send(region) => region.bytes(),
            Buffer::Receive(region) => region.bytes(),
            Buffer::Scratch(bytes) => bytes,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Buffer::Send(_) => unreachable!("a schedule writes to what it was lent to read"),
            Buffer::Receive(region) => region.bytes_mut(),
            Buffer::Scratch(bytes) => bytes,
        }
    }
}

/// An operation that has begun.
pub(crate) struct Operation {
    pub(crate) what: What,
    /// Position in the sequence of collectives; 0 for others.
    pub(crate) number: u64,
    pub(crate) ticket: Ticket,
    /// The last one is the scratch.
    buffers: Vec<Buffer>,
    work: Vec<Work>,
    pub(crate) order: Order,
    /// Steps that have not ended.
    pub(crate) steps_left: usize,
    /// Where a receive's bytes came from.
    pub(crate) source: Option<u32>,
}

impl Operation {
    pub(crate) fn new(request: Request, number: u64, scratch: Vec<u8>) -> Self {
        let Request { what, mut buffers, schedule, plan: _, ticket } = request;
        buffers.push(Buffer::Scratch(scratch));
        let (order, steps_left) = (schedule.order(), schedule.work.len());
        Operation { what, number, ticket, buffers, work: schedule.work, order, steps_left, source: None }
    }

    pub(crate) fn work(&self, step: u32) -> Work {
        self.work[step as usize]
    }

    /// Element and operator of a collective that computes.
    pub(crate) fn reduction(&self) -> (ElementType, ReduceOp) {
        match &self.what {
            What::Collective(Descriptor { reduction: Some(reduction), .. }) => *reduction,
            other => unreachable!("{other} computes nothing"),
        }
    }

    pub(crate) fn is_collective(&self) -> bool {
        matches!(self.what, What::Collective(_))
    }

    /// For messages: a collective with its number.
    pub(crate) fn name(&self) -> Arc<str> {
        match &self.what {
            What::Collective(descriptor) => format!("collective {}, {descriptor}", self.number).into(),
            other => other.to_string().into(),
        }
    }

    pub(crate) fn bytes(&self, span: Span) -> &[u8] {
        &self.buffers[self.position(span.buffer)].bytes()[span.start..span.end()]
    }

    pub(crate) fn bytes_mut(&mut self, span: Span) -> &mut [u8] {
        let position = self.position(span.buffer);
        &mut self.buffers[position].bytes_mut()[span.start..span.end()]
    }

    /// `into = from`, which do not overlap.
    pub(crate) fn copy(&mut self, into: Span, from: Span) {
        let (into, from) = self.pair(into, from);
        into.copy_from_slice(from);
    }

    /// Does a step that needs no peer, from byte `done` on, and at most about `budget` bytes of it. Returns where it stands.
    pub(crate) fn compute(&mut self, work: Work, done: usize, budget: usize, ranks: u32) -> usize {
        let total = match work {
            Work::Copy { into, .. } | Work::Reduce { into, .. } => into.bytes,
            Work::Divide { span } => span.bytes,
            _ => unreachable!("{work:?} needs a peer"),
        };
        // Whole elements of any type.
        let bytes = (total - done).min(budget.max(8) / 8 * 8);
        match work {
            Work::Copy { into, from } => {
                self.copy(into.part(done, bytes), from.part(done, bytes));
            }
            Work::Reduce { into, from } => {
                let (element, op) = self.reduction();
                let (into, from) = self.pair(into.part(done, bytes), from.part(done, bytes));
                arithmetic::reduce(element, op, into, from);
            }
            Work::Divide { span } => {
                let (element, _) = self.reduction();
                arithmetic::divide(element, self.bytes_mut(span.part(done, bytes)), ranks);
            }
            _ => unreachable!(),
        }
        done + bytes
    }

    /// The scratch, for another operation; every other buffer is dropped.
    pub(crate) fn into_ticket_and_scratch(mut self) -> (Ticket, Vec<u8>) {
        let scratch = match self.buffers.pop() {
            Some(Buffer::Scratch(scratch)) => scratch,
            _ => Vec::new(),
        };
        (self.ticket, scratch)
    }

    fn position(&self, buffer: u32) -> usize {
        if buffer == SCRATCH { self.buffers.len() - 1 } else { buffer as usize }
    }

    /// Two spans that do not overlap.
    fn pair(&mut self, into: Span, from: Span) -> (&mut [u8], &[u8]) {
        let (target, source) = (self.position(into.buffer), self.position(from.buffer));
        if target != source {
            let [target, source] =
                self.buffers.get_disjoint_mut([target, source]).expect("two buffers of the operation");
            return (
                &mut target.bytes_mut()[into.start..into.end()],
                &source.bytes()[from.start..from.end()],
            );
        }
        let bytes = self.buffers[target].bytes_mut();
        if into.end() <= from.start {
            let (head, tail) = bytes.split_at_mut(from.start);
            (&mut head[into.start..into.end()], &tail[..from.bytes])
        } else {
            assert!(from.end() <= into.start, "{into:?} and {from:?} overlap");
            let (head, tail) = bytes.split_at_mut(into.start);
            (&mut tail[..into.bytes], &head[from.start..from.end()])
        }
    }
}
