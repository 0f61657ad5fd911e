//! The steps of operations: how each begins, computes or is withdrawn.

use super::matching::WaitingSend;
use super::operations_in_flight::{Address, PendingReceive, StepId};
use super::peer::{Peer, RankState};
use super::{COMPUTE_BYTES, ProgressEngine, SlabKey};
use crate::error::MeshError;
use crate::schedule::Work;
use crate::wire::{Header, Kind};

impl ProgressEngine {
    /// Begins a step.
    pub(super) fn issue(&mut self, id: StepId) -> Result<(), MeshError> {
        let Some(operation) = self.in_flight.operations.get(id.operation) else { return Ok(()) };
        match operation.work(id.step) {
            Work::Send { peer: rank, index, from } => {
                let address = self.in_flight.address(id.operation, index);
                match &mut self.ranks[rank as usize] {
                    RankState::Connected(peer) => {
                        let outcome = peer.matching.send(address, WaitingSend { id, from });
                        peer.act(&self.in_flight, address, outcome)
                    }
                    _ => self.fail_for_missing_rank(id.operation, rank),
                }
            }
            Work::Receive { peer: rank, index, into } | Work::ReceiveReduce { peer: rank, index, into } => {
                let is_reduced = matches!(operation.work(id.step), Work::ReceiveReduce { .. });
                let address = self.in_flight.address(id.operation, index);
                match &mut self.ranks[rank as usize] {
                    RankState::Connected(peer) => {
                        let receive = PendingReceive::new(id, into, Some(rank), address, is_reduced);
                        let ticket = self.in_flight.receives.insert(receive);
                        announce(peer, Kind::Ready, ticket, address, into.bytes);
                        Ok(())
                    }
                    _ => self.fail_for_missing_rank(id.operation, rank),
                }
            }
            Work::ReceiveAny { into } => {
                let address = self.in_flight.address(id.operation, 0);
                let receive = PendingReceive::new(id, into, None, address, false);
                let ticket = self.in_flight.receives.insert(receive);
                let mut left = None;
                for (rank, state) in self.ranks.iter_mut().enumerate() {
                    match state {
                        RankState::Connected(peer) => {
                            announce(peer, Kind::ReadyAny, ticket, address, into.bytes)
                        }
                        RankState::Left { .. } => left = Some(rank as u32),
                        RankState::Own => {}
                    }
                }
                match left {
                    Some(rank) if !self.has_peers() => {
                        self.in_flight.receives.remove(ticket);
                        self.fail_for_missing_rank(id.operation, rank)
                    }
                    _ => Ok(()),
                }
            }
            Work::Copy { .. } | Work::Reduce { .. } | Work::Divide { .. } => {
                self.computing.push_back(id);
                Ok(())
            }
        }
    }

    pub(super) fn compute(&mut self) {
        let mut budget = COMPUTE_BYTES;
        while budget > 0
            && let Some(&id) = self.computing.front()
        {
            let Some(operation) = self.in_flight.operations.get_mut(id.operation) else {
                (_, self.computed) = (self.computing.pop_front(), 0);
                continue;
            };
            let work = operation.work(id.step);
            let now = operation.compute(work, self.computed, budget, self.in_flight.size);
            budget = budget.saturating_sub((now - self.computed).max(64));
            self.computed = now;
            let (Work::Copy { into: span, .. } | Work::Reduce { into: span, .. } | Work::Divide { span }) =
                work
            else {
                unreachable!("{work:?} computes nothing");
            };
            if now == span.bytes {
                (_, self.computed) = (self.computing.pop_front(), 0);
                self.in_flight.ended(id);
            }
        }
    }

    pub(super) fn withdraw(&mut self) {
        for (ticket, tag, winner) in self.in_flight.withdrawn.drain(..) {
            for state in &mut self.ranks {
                if let RankState::Connected(peer) = state
                    && peer.rank != winner
                {
                    let withdraw = Header { ticket, tag, ..Header::bare(Kind::Withdraw) };
                    peer.outbound.control(withdraw, &[]);
                }
            }
        }
    }
}

fn announce(peer: &mut Peer, kind: Kind, ticket: SlabKey, address: Address, bytes: usize) {
    let header = Header {
        channel: address.0,
        ticket: ticket.to_wire(),
        tag: address.1,
        bytes: bytes as u64,
        ..Header::bare(kind)
    };
    peer.outbound.control(header, &[]);
}
