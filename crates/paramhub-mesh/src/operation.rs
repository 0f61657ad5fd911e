//! One operation: its buffers, its schedule and its progress.

use std::fmt;
use std::sync::Arc;

use paramhub_transport::{ReceiveRegion, SendRegion};

use crate::arithmetic;
use crate::descriptor::Descriptor;
use crate::element::{ElementType, ReduceOp};
use crate::handle::OperationCompleter;
use crate::memory::Plan;
use crate::schedule::{BufferRange, SCRATCH, Schedule, StepDependencies, Work};

/// The operation that a user thread asks for.
pub(crate) struct OperationRequest {
    pub(crate) kind: OperationKind,
    pub(crate) buffers: Vec<OperationBuffer>,
    pub(crate) schedule: Schedule,
    /// The plan of a collective that goes through shared memory, in place of a schedule.
    pub(crate) plan: Option<Plan>,
    pub(crate) completer: OperationCompleter,
}

/// The kind of an operation, with its peer or descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum OperationKind {
    Send { peer: u32, tag: u64 },
    Receive { peer: u32, tag: u64 },
    ReceiveAny { tag: u64 },
    Collective(Descriptor),
}

impl fmt::Display for OperationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OperationKind::Send { peer, tag } => write!(f, "send to rank {peer} with tag {tag}"),
            OperationKind::Receive { peer, tag } => write!(f, "receive from rank {peer} with tag {tag}"),
            OperationKind::ReceiveAny { tag } => write!(f, "receive from any rank with tag {tag}"),
            OperationKind::Collective(descriptor) => descriptor.fmt(f),
        }
    }
}

/// Memory that an operation works with.
#[derive(Debug)]
pub(crate) enum OperationBuffer {
    Send(SendRegion),
    Receive(ReceiveRegion),
    Scratch(Vec<u8>),
}

impl OperationBuffer {
    pub(crate) fn len(&self) -> usize {
        self.bytes().len()
    }

    fn bytes(&self) -> &[u8] {
        match self {
            OperationBuffer::Send(region) => region.bytes(),
            OperationBuffer::Receive(region) => region.bytes(),
            OperationBuffer::Scratch(bytes) => bytes,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            OperationBuffer::Send(_) => unreachable!("a schedule writes to what it was lent to read"),
            OperationBuffer::Receive(region) => region.bytes_mut(),
            OperationBuffer::Scratch(bytes) => bytes,
        }
    }
}

/// An operation that has begun.
pub(crate) struct Operation {
    pub(crate) kind: OperationKind,
    /// The position in the sequence of collectives; 0 for other operations.
    pub(crate) number: u64,
    pub(crate) completer: OperationCompleter,
    /// The buffers; the last one is the scratch.
    buffers: Vec<OperationBuffer>,
    work: Vec<Work>,
    pub(crate) order: StepDependencies,
    /// Steps that have not ended.
    pub(crate) steps_left: usize,
    /// Those of them that are no sends.
    receiving_steps_left: usize,
}

impl Operation {
    pub(crate) fn new(request: OperationRequest, number: u64, scratch: Vec<u8>) -> Self {
        let OperationRequest { kind, mut buffers, schedule, plan: _, completer } = request;
        buffers.push(OperationBuffer::Scratch(scratch));
        let (order, steps_left) = (schedule.order(), schedule.work.len());
        let receiving_steps_left = schedule.work.iter().filter(|work| !work.is_send()).count();
        let work = schedule.work;
        Operation { kind, number, completer, buffers, work, order, steps_left, receiving_steps_left }
    }

    /// Notes that a step has ended; calls `released` with each step that need not wait any longer. Returns whether only
    /// sends are left after it, and were not before.
    pub(crate) fn ended(&mut self, step: u32, released: impl FnMut(u32)) -> bool {
        self.order.ended(step, released);
        self.steps_left -= 1;
        let is_send = self.work(step).is_send();
        self.receiving_steps_left -= usize::from(!is_send);
        !is_send && self.receiving_steps_left == 0
    }

    /// Returns whether steps are left that are no sends.
    pub(crate) fn receives(&self) -> bool {
        self.receiving_steps_left > 0
    }

    pub(crate) fn work(&self, step: u32) -> Work {
        self.work[step as usize]
    }

    /// The element and operator of a collective that computes.
    pub(crate) fn reduction(&self) -> (ElementType, ReduceOp) {
        match &self.kind {
            OperationKind::Collective(Descriptor { reduction: Some(reduction), .. }) => *reduction,
            other => unreachable!("{other} computes nothing"),
        }
    }

    pub(crate) fn is_collective(&self) -> bool {
        matches!(self.kind, OperationKind::Collective(_))
    }

    /// The operation's name in messages: a collective has its number.
    pub(crate) fn name(&self) -> Arc<str> {
        match &self.kind {
            OperationKind::Collective(descriptor) => {
                format!("collective {}, {descriptor}", self.number).into()
            }
            other => other.to_string().into(),
        }
    }

    pub(crate) fn bytes(&self, span: BufferRange) -> &[u8] {
        &self.buffers[self.position(span.buffer)].bytes()[span.start..span.end()]
    }

    pub(crate) fn bytes_mut(&mut self, span: BufferRange) -> &mut [u8] {
        let position = self.position(span.buffer);
        &mut self.buffers[position].bytes_mut()[span.start..span.end()]
    }

    /// `into = from`; the two do not overlap.
    pub(crate) fn copy(&mut self, into: BufferRange, from: BufferRange) {
        let (into, from) = self.pair(into, from);
        into.copy_from_slice(from);
    }

    /// Runs a step that needs no peer, from byte `done` on, for at most about `budget` bytes. Returns the new
    /// `done`.
    pub(crate) fn compute(&mut self, work: Work, done: usize, budget: usize, ranks: u32) -> usize {
        let total = match work {
            Work::Copy { into, .. } | Work::Reduce { into, .. } => into.bytes,
            Work::Divide { span } => span.bytes,
            _ => unreachable!("{work:?} needs a peer"),
        };
        // A multiple of 8 bytes: whole elements of any type.
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

    /// Returns the completer, and the scratch for another operation; drops every other buffer.
    pub(crate) fn into_completer_and_scratch(mut self) -> (OperationCompleter, Vec<u8>) {
        let scratch = match self.buffers.pop() {
            Some(OperationBuffer::Scratch(scratch)) => scratch,
            _ => Vec::new(),
        };
        (self.completer, scratch)
    }

    fn position(&self, buffer: u32) -> usize {
        if buffer == SCRATCH { self.buffers.len() - 1 } else { buffer as usize }
    }

    /// The bytes of two ranges that do not overlap.
    fn pair(&mut self, into: BufferRange, from: BufferRange) -> (&mut [u8], &[u8]) {
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
