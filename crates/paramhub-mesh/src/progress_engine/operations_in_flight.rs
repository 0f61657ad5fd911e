//! The table of operations in flight, which concern all peers.

use std::collections::VecDeque;
use std::sync::Arc;

use super::sequence::Sequence;
use super::slab::{Slab, SlabKey};
use crate::arithmetic;
use crate::command::MeshInbox;
use crate::error::{MeshError, MeshRank};
use crate::operation::{Operation, OperationKind, OperationRequest};
use crate::schedule::{BufferRange, Work};
use crate::wire::Channel;

/// The number of scratch buffers kept for the next operations, and the bytes that they may hold together.
const SCRATCHES_MAX: usize = 8;
const SCRATCH_BYTES_KEPT: usize = 64 << 20;

/// A step of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepId {
    pub(crate) operation: SlabKey,
    pub(crate) step: u32,
}

/// Sends that have come further.
#[derive(Debug, Default)]
pub(crate) struct SendProgress {
    /// Those whose bytes have all left, each once.
    pub(crate) left: Vec<StepId>,
    /// Those that are over: the peer has taken the bytes, or they are kept elsewhere.
    pub(crate) ended: Vec<StepId>,
}

/// The key by which a transfer is matched with the peer's: channel and tag, first come, first served.
pub(crate) type Address = (Channel, u64);

/// Operations under way, and the receives to which incoming data belongs.
pub(crate) struct OperationsInFlight {
    pub(crate) this_rank: MeshRank,
    pub(crate) size: u32,
    pub(crate) operations: Slab<Operation>,
    /// Receives that were announced; their keys are the tickets.
    pub(crate) receives: Slab<PendingReceive>,
    /// Steps that wait for nothing any more.
    pub(crate) ready: VecDeque<StepId>,
    /// Granted receives from any rank, as ticket, tag and the rank that got the grant; the others get a
    /// withdrawal.
    pub(crate) withdrawn: Vec<(u64, u64, u32)>,
    pub(crate) sequence: Sequence,
    /// Collectives under way.
    pub(crate) collectives: usize,
    inbox: Arc<MeshInbox>,
    scratches: Vec<Vec<u8>>,
    /// Operations whose steps have all ended.
    over: VecDeque<SlabKey>,
    /// Whether an operation has received all that it needs, so that the frames that
    /// [may wait](super::outbound::Outbound::control_later) must leave.
    pub(crate) takens_are_due: bool,
    /// The error that a callback caused.
    pub(crate) failure: Option<MeshError>,
}

/// A receive under way.
pub(crate) struct PendingReceive {
    pub(crate) id: StepId,
    pub(crate) into: BufferRange,
    /// The number of bytes that have come.
    pub(crate) arrived: usize,
    /// The sender; not known yet for a receive from any rank.
    pub(crate) from: Option<u32>,
    pub(crate) address: Address,
    /// `true` if the bytes are reduced into the buffer rather than copied.
    is_reduced: bool,
    /// The beginning of an element that a read cut in two.
    cut_off: [u8; 8],
    cut_off_bytes: usize,
}

impl PendingReceive {
    pub(crate) fn new(
        id: StepId,
        into: BufferRange,
        from: Option<u32>,
        address: Address,
        is_reduced: bool,
    ) -> Self {
        PendingReceive { id, into, arrived: 0, from, address, is_reduced, cut_off: [0; 8], cut_off_bytes: 0 }
    }
}

impl OperationsInFlight {
    pub(crate) fn new(this_rank: MeshRank, size: u32, inbox: Arc<MeshInbox>) -> Self {
        OperationsInFlight {
            this_rank,
            size,
            operations: Slab::new(),
            receives: Slab::new(),
            ready: VecDeque::new(),
            withdrawn: Vec::new(),
            sequence: Sequence::default(),
            collectives: 0,
            inbox,
            scratches: Vec::new(),
            over: VecDeque::new(),
            takens_are_due: false,
            failure: None,
        }
    }

    /// Begins an operation: queues its free steps. An operation with a plan has no steps, and ends when its
    /// plan does.
    pub(crate) fn begin(&mut self, request: OperationRequest, number: u64, has_plan: bool) -> SlabKey {
        let scratch = self.scratch(request.schedule.scratch_bytes);
        let operation = Operation::new(request, number, scratch);
        self.collectives += usize::from(operation.is_collective());
        let ready: Vec<u32> = operation.order.ready().collect();
        let is_over = operation.steps_left == 0 && !has_plan;
        let operation = self.operations.insert(operation);
        self.ready.extend(ready.into_iter().map(|step| StepId { operation, step }));
        if is_over {
            self.end(operation, Ok(()));
        }
        operation
    }

    /// Notes what has become of sends.
    pub(crate) fn note(&mut self, progress: &mut SendProgress) {
        for id in progress.left.drain(..) {
            if let Some(operation) = self.operations.get_mut(id.operation) {
                operation.order.left(id.step, |step| {
                    self.ready.push_back(StepId { operation: id.operation, step });
                });
            }
        }
        progress.ended.drain(..).for_each(|id| self.ended(id));
    }

    /// Ends a step. The operation of the last one is over.
    pub(crate) fn ended(&mut self, id: StepId) {
        let Some(operation) = self.operations.get_mut(id.operation) else { return };
        self.takens_are_due |= operation.ended(id.step, |step| {
            self.ready.push_back(StepId { operation: id.operation, step });
        });
        if operation.steps_left == 0 {
            self.over.push_back(id.operation);
        }
    }

    /// Ends the operations whose steps have all ended. This comes after what waits for the peers has been sent: a thread
    /// that is woken may take this one's processor.
    pub(crate) fn end_those_over(&mut self) {
        while let Some(operation) = self.over.pop_front() {
            self.end(operation, Ok(()));
        }
    }

    /// Ends an operation: drops its regions, then completes its handle.
    pub(crate) fn end(&mut self, key: SlabKey, outcome: Result<(), MeshError>) {
        let Some(operation) = self.operations.remove(key) else { return };
        self.collectives -= usize::from(operation.is_collective());
        let (completer, scratch) = operation.into_completer_and_scratch();
        self.keep(scratch);
        self.inbox.uncount();
        if let Err(reason) = completer.finish(outcome) {
            let reason = format!("a callback panicked: {reason}").into();
            self.failure.get_or_insert(MeshError::Internal { this_rank: self.this_rank.clone(), reason });
        }
    }

    /// Ends a request that never began.
    pub(crate) fn refuse(&mut self, request: OperationRequest, error: MeshError) {
        let OperationRequest { buffers, completer, .. } = request;
        drop(buffers);
        self.inbox.uncount();
        // The mesh is failing or the operation was refused; the panic hook has reported a callback's panic.
        let _ = completer.finish(Err(error));
    }

    pub(crate) fn operation(&self, key: SlabKey) -> &Operation {
        self.operations.get(key).expect("a step's operation lives until its last step")
    }

    pub(crate) fn operation_mut(&mut self, key: SlabKey) -> &mut Operation {
        self.operations.get_mut(key).expect("a collective in memory lives until its last chunk")
    }

    /// The address by which a step's transfer is matched.
    pub(crate) fn address(&self, key: SlabKey, index: u32) -> Address {
        let operation = self.operation(key);
        match operation.kind {
            OperationKind::Send { tag, .. }
            | OperationKind::Receive { tag, .. }
            | OperationKind::ReceiveAny { tag } => (Channel::PointToPoint, tag),
            OperationKind::Collective(_) => (Channel::Collective, operation.number << 32 | u64::from(index)),
        }
    }

    /// The buffer that the next bytes of a transfer can be read straight into, if there is one.
    pub(crate) fn window(&mut self, ticket: SlabKey) -> Option<&mut [u8]> {
        let receive = self.receives.get(ticket)?;
        if receive.is_reduced {
            return None;
        }
        let rest = receive.into.part(receive.arrived, receive.into.bytes - receive.arrived);
        Some(self.operations.get_mut(receive.id.operation)?.bytes_mut(rest))
    }

    /// Counts `bytes` of a transfer that were read into its window.
    pub(crate) fn advance_receive(&mut self, ticket: SlabKey, bytes: usize) {
        if let Some(receive) = self.receives.get_mut(ticket) {
            receive.arrived += bytes;
        }
    }

    /// Copies or reduces `bytes` of a transfer.
    pub(crate) fn write_received(&mut self, ticket: SlabKey, bytes: &[u8]) {
        if let Some(window) = self.window(ticket) {
            window[..bytes.len()].copy_from_slice(bytes);
            return self.advance_receive(ticket, bytes.len());
        }
        let Some(receive) = self.receives.get_mut(ticket) else { return };
        let Some(operation) = self.operations.get_mut(receive.id.operation) else { return };
        let (element, op) = operation.reduction();
        let width = element.bytes();
        let mut bytes = bytes;
        let mut at = receive.arrived - receive.cut_off_bytes;
        receive.arrived += bytes.len();
        if receive.cut_off_bytes > 0 {
            let missing = (width - receive.cut_off_bytes).min(bytes.len());
            let (head, rest) = bytes.split_at(missing);
            receive.cut_off[receive.cut_off_bytes..][..missing].copy_from_slice(head);
            receive.cut_off_bytes += missing;
            bytes = rest;
            if receive.cut_off_bytes < width {
                return;
            }
            let into = operation.bytes_mut(receive.into.part(at, width));
            arithmetic::reduce(element, op, into, &receive.cut_off[..width]);
            receive.cut_off_bytes = 0;
            at += width;
        }
        let (whole, rest) = bytes.split_at(bytes.len() / width * width);
        arithmetic::reduce(element, op, operation.bytes_mut(receive.into.part(at, whole.len())), whole);
        receive.cut_off[..rest.len()].copy_from_slice(rest);
        receive.cut_off_bytes = rest.len();
    }

    /// Ends the step of a transfer if its bytes have all come. Returns its operation in this case.
    pub(crate) fn finish_receive(&mut self, ticket: SlabKey) -> Option<SlabKey> {
        let receive = self.receives.get(ticket)?;
        if receive.arrived < receive.into.bytes {
            return None;
        }
        let (id, from) = (receive.id, receive.from);
        self.receives.remove(ticket);
        if let Some(operation) = self.operations.get_mut(id.operation)
            && matches!(operation.work(id.step), Work::Receive { .. } | Work::ReceiveAny { .. })
            && !operation.is_collective()
        {
            operation.completer.value = from;
        }
        self.ended(id);
        Some(id.operation)
    }

    /// The bytes that have come of each receive from this rank that is not complete, by ticket.
    pub(crate) fn arrived_from(&self, rank: u32) -> impl Iterator<Item = (u64, u64)> + '_ {
        let from_it = self.receives.iter().filter(move |(_, receive)| receive.from == Some(rank));
        from_it.map(|(ticket, receive)| (ticket.to_wire(), receive.arrived as u64))
    }

    /// Scratch of `bytes` bytes with any content; a kept one, if there is one.
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
            // The smallest is the cheapest to allocate again.
            let smallest = (0..SCRATCHES_MAX).min_by_key(|place| self.scratches[*place].capacity());
            self.scratches.swap_remove(smallest.expect("there are some"));
        }
        self.scratches.push(scratch);
    }
}
