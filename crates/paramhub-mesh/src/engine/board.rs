//! What is under way, whichever peers it concerns.

use std::collections::VecDeque;
use std::sync::Arc;

use super::sequence::Sequence;
use super::slab::{Key, Slab};
use crate::arithmetic;
use crate::error::{MeshError, Who};
use crate::inbox::Inbox;
use crate::operation::{Operation, Request, What};
use crate::schedule::{Span, Work};
use crate::wire::Channel;

/// Scratch buffers kept for the next operations, and how much they may hold together.
const SCRATCHES_MAX: usize = 8;
const SCRATCH_BYTES_KEPT: usize = 64 << 20;

/// A step of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepId {
    pub(crate) operation: Key,
    pub(crate) step: u32,
}

/// How a transfer is matched: with the peer's of the same channel and tag, first come, first served.
pub(crate) type Address = (Channel, u64);

/// Operations under way and where what comes in belongs.
pub(crate) struct Board {
    pub(crate) who: Who,
    pub(crate) size: u32,
    pub(crate) operations: Slab<Operation>,
    /// Receives that were announced; their keys are the tickets.
    pub(crate) landings: Slab<Landing>,
    /// Steps that wait for nothing any more.
    pub(crate) free: VecDeque<StepId>,
    /// Receives from anyone that were granted: what to withdraw from the peers other than the last.
    pub(crate) withdrawn: Vec<(u64, u64, u32)>,
    pub(crate) sequence: Sequence,
    /// Collectives under way.
    pub(crate) collectives: usize,
    inbox: Arc<Inbox>,
    scratches: Vec<Vec<u8>>,
    /// What a callback did.
    pub(crate) failure: Option<MeshError>,
}

/// A receive under way.
pub(crate) struct Landing {
    pub(crate) id: StepId,
    pub(crate) into: Span,
    /// Bytes that have come.
    pub(crate) arrived: usize,
    /// Who sends; not known yet of a receive from anyone.
    pub(crate) from: Option<u32>,
    pub(crate) address: Address,
    /// What comes is reduced into what is there.
    is_reduced: bool,
    /// The beginning of an element that a read cut off.
    cut_off: [u8; 8],
    cut_off_bytes: usize,
}

impl Landing {
    pub(crate) fn new(id: StepId, into: Span, from: Option<u32>, address: Address, is_reduced: bool) -> Self {
        Landing { id, into, arrived: 0, from, address, is_reduced, cut_off: [0; 8], cut_off_bytes: 0 }
    }
}

impl Board {
    pub(crate) fn new(who: Who, size: u32, inbox: Arc<Inbox>) -> Self {
        Board {
            who,
            size,
            operations: Slab::new(),
            landings: Slab::new(),
            free: VecDeque::new(),
            withdrawn: Vec::new(),
            sequence: Sequence::default(),
            collectives: 0,
            inbox,
            scratches: Vec::new(),
            failure: None,
        }
    }

    /// Begins an operation: its free steps are queued. One with a plan has none, and ends when its plan has.
    pub(crate) fn begin(&mut self, request: Request, number: u64, has_plan: bool) -> Key {
        let scratch = self.scratch(request.schedule.scratch_bytes);
        let operation = Operation::new(request, number, scratch);
        self.collectives += usize::from(operation.is_collective());
        let free: Vec<u32> = operation.order.free().collect();
        let is_over = operation.steps_left == 0 && !has_plan;
        let operation = self.operations.insert(operation);
        self.free.extend(free.into_iter().map(|step| StepId { operation, step }));
        if is_over {
            self.end(operation, Ok(()));
        }
        operation
    }

    /// A step has ended. The operation's last one ends it.
    pub(crate) fn ended(&mut self, id: StepId) {
        let Some(operation) = self.operations.get_mut(id.operation) else { return };
        operation.order.ended(id.step, |step| {
            self.free.push_back(StepId { operation: id.operation, step });
        });
        operation.steps_left -= 1;
        if operation.steps_left == 0 {
            self.end(id.operation, Ok(()));
        }
    }

    /// Ends an operation: its regions are dropped, then whoever waits is told.
    pub(crate) fn end(&mut self, key: Key, outcome: Result<(), MeshError>) {
        let Some(operation) = self.operations.remove(key) else { return };
        self.collectives -= usize::from(operation.is_collective());
        let source = operation.source;
        let (ticket, scratch) = operation.into_ticket_and_scratch();
        self.keep(scratch);
        self.inbox.ended();
        if let Err(reason) = ticket.finish(outcome.map(|()| source)) {
            let reason = format!("a callback panicked: {reason}").into();
            self.failure.get_or_insert(MeshError::Internal { who: self.who.clone(), reason });
        }
    }

    /// Ends a request that never began.
    pub(crate) fn refuse(&mut self, request: Request, error: MeshError) {
        let Request { buffers, ticket, .. } = request;
        drop(buffers);
        self.inbox.ended();
        // The mesh is failing or the operation was refused; a callback that panics on top of that was reported.
        let _ = ticket.finish(Err(error));
    }

    pub(crate) fn operation(&self, key: Key) -> &Operation {
        self.operations.get(key).expect("a step's operation lives until its last step")
    }

    pub(crate) fn operation_mut(&mut self, key: Key) -> &mut Operation {
        self.operations.get_mut(key).expect("a collective in memory lives until its last chunk")
    }

    /// How a step's transfer is matched.
    pub(crate) fn address(&self, key: Key, index: u32) -> Address {
        let operation = self.operation(key);
        match operation.what {
            What::Send { tag, .. } | What::Receive { tag, .. } | What::ReceiveAny { tag } => {
                (Channel::PointToPoint, tag)
            }
            What::Collective(_) => (Channel::Collective, operation.number << 32 | u64::from(index)),
        }
    }

    /// Where the next bytes of a transfer are to be written straight to, if they are.
    pub(crate) fn window(&mut self, ticket: Key) -> Option<&mut [u8]> {
        let landing = self.landings.get(ticket)?;
        if landing.is_reduced {
            return None;
        }
        let rest = landing.into.part(landing.arrived, landing.into.bytes - landing.arrived);
        Some(self.operations.get_mut(landing.id.operation)?.bytes_mut(rest))
    }

    /// `bytes` of a transfer were written to its window.
    pub(crate) fn landed(&mut self, ticket: Key, bytes: usize) {
        if let Some(landing) = self.landings.get_mut(ticket) {
            landing.arrived += bytes;
        }
    }

    /// `bytes` of a transfer have come: copies or reduces them.
    pub(crate) fn land(&mut self, ticket: Key, bytes: &[u8]) {
        if let Some(window) = self.window(ticket) {
            window[..bytes.len()].copy_from_slice(bytes);
            return self.landed(ticket, bytes.len());
        }
        let Some(landing) = self.landings.get_mut(ticket) else { return };
        let Some(operation) = self.operations.get_mut(landing.id.operation) else { return };
        let (element, op) = operation.reduction();
        let width = element.bytes();
        let mut bytes = bytes;
        let mut at = landing.arrived - landing.cut_off_bytes;
        landing.arrived += bytes.len();
        if landing.cut_off_bytes > 0 {
            let missing = (width - landing.cut_off_bytes).min(bytes.len());
            let (head, rest) = bytes.split_at(missing);
            landing.cut_off[landing.cut_off_bytes..][..missing].copy_from_slice(head);
            landing.cut_off_bytes += missing;
            bytes = rest;
            if landing.cut_off_bytes < width {
                return;
            }
            let into = operation.bytes_mut(landing.into.part(at, width));
            arithmetic::reduce(element, op, into, &landing.cut_off[..width]);
            landing.cut_off_bytes = 0;
            at += width;
        }
        let (whole, rest) = bytes.split_at(bytes.len() / width * width);
        arithmetic::reduce(element, op, operation.bytes_mut(landing.into.part(at, whole.len())), whole);
        landing.cut_off[..rest.len()].copy_from_slice(rest);
        landing.cut_off_bytes = rest.len();
    }

    /// If all of a transfer has come, ends its step.
    pub(crate) fn finish_landing(&mut self, ticket: Key) {
        let Some(landing) = self.landings.get(ticket) else { return };
        if landing.arrived < landing.into.bytes {
            return;
        }
        let (id, from) = (landing.id, landing.from);
        self.landings.remove(ticket);
        if let Some(operation) = self.operations.get_mut(id.operation)
            && matches!(operation.work(id.step), Work::Receive { .. } | Work::ReceiveAny { .. })
            && !operation.is_collective()
        {
            operation.source = from;
        }
        self.ended(id);
    }

    /// Scratch of `bytes` bytes with any content; one that was used before, if there is one.
    fn scratch(&mut self, bytes: usize) -> Vec<u8> {
        if bytes == 0 {
            return Vec::new();
        }
        let best = self
            .scratches
            .iter()
            .enumerate()
            .filter(|(_, scratch)| scratch.capacity() >= bytes)
            .min_by_key(|(_, scratch)| scratch.capacity())
            .map(|(place, _)| place);
        match best {
            Some(place) => {
                let mut scratch = self.scratches.swap_remove(place);
                scratch.resize(bytes, 0);
                scratch
            }
            None => vec![0; bytes],
        }
    }

    fn keep(&mut self, scratch: Vec<u8>) {
        let kept: usize = self.scratches.iter().map(Vec::capacity).sum();
        if scratch.capacity() == 0 || kept + scratch.capacity() > SCRATCH_BYTES_KEPT {
            return;
        }
        if self.scratches.len() == SCRATCHES_MAX {
            // The smallest is the easiest to make anew.
            let smallest = (0..SCRATCHES_MAX).min_by_key(|place| self.scratches[*place].capacity());
            self.scratches.swap_remove(smallest.expect("there are some"));
        }
        self.scratches.push(scratch);
    }
}
