//! Ranks that leave, this one and others, and the last messages of a mesh.

use std::time::Instant;

use paramhub_core::limits::MESSAGE_BYTES_MAX;

use super::ProgressEngine;
use super::closing::ClosingConnection;
use super::peer::RankState;
use super::slab::SlabKey;
use crate::error::MeshError;
use crate::wire::{Channel, Header, Kind};

impl ProgressEngine {
    /// Handles a peer that has left in order. Every operation that still needs it fails.
    pub(super) fn peer_left(&mut self, rank: u32, collectives: u64) -> Result<(), MeshError> {
        let state = &mut self.ranks[rank as usize];
        let RankState::Connected(peer) = std::mem::replace(state, RankState::Left { collectives }) else {
            return Ok(());
        };
        // This fails only if the descriptor is not in the set.
        let _ = self.poller.remove(&peer.socket);
        let mut needed: Vec<SlabKey> =
            peer.matching.unmatched().chain(peer.outbound.transfers()).map(|id| id.operation).collect();
        if (self.in_flight.this_rank.rank + 1) % self.in_flight.size == rank {
            self.in_flight.sequence.next_left();
        }
        let is_last = !self.has_peers();
        let orphans: Vec<SlabKey> = self
            .in_flight
            .receives
            .iter()
            .filter(|(_, receive)| receive.from == Some(rank) || (receive.from.is_none() && is_last))
            .map(|(ticket, _)| ticket)
            .collect();
        for ticket in orphans {
            needed.extend(self.in_flight.receives.remove(ticket).map(|receive| receive.id.operation));
        }
        needed.extend(self.in_flight.operations.iter().filter_map(|(key, operation)| {
            (operation.is_collective() && operation.number >= collectives).then_some(key)
        }));
        needed.into_iter().try_for_each(|operation| self.fail_for_missing_rank(operation, rank))
    }

    /// Fails an operation that needs a rank that has left. A collective that has begun fails the whole mesh,
    /// for the other ranks wait for its steps.
    pub(super) fn fail_for_missing_rank(&mut self, operation: SlabKey, rank: u32) -> Result<(), MeshError> {
        let Some(operation_in_need) = self.in_flight.operations.get(operation) else { return Ok(()) };
        let error = MeshError::PeerLeft {
            this_rank: self.in_flight.this_rank.clone(),
            what: operation_in_need.name(),
            rank,
        };
        if operation_in_need.is_collective() {
            return Err(error);
        }
        self.in_flight.end(operation, Err(error));
        Ok(())
    }

    /// Returns whether this rank may send its leave message: nothing is under way but receives to which
    /// nothing has come.
    pub(super) fn has_left(&mut self, now: Instant) -> Result<bool, MeshError> {
        let Some((timeout, deadline)) = self.leaving else { return Ok(false) };
        let idle = self
            .in_flight
            .receives
            .iter()
            .filter(|(_, receive)| receive.arrived == 0 && receive.address.0 == Channel::PointToPoint);
        let outstanding = self.in_flight.operations.len() + self.queue.len();
        let has_unsent = self
            .ranks
            .iter()
            .any(|state| matches!(state, RankState::Connected(peer) if peer.outbound.has_something()));
        if outstanding == idle.count() && !has_unsent {
            return Ok(true);
        }
        if now >= deadline {
            let (this_rank, seconds) = (self.in_flight.this_rank.clone(), timeout.as_secs_f64());
            return Err(MeshError::LeaveTimeout { this_rank, seconds, outstanding });
        }
        Ok(false)
    }

    /// Prepares the last messages, a leave message or the reason why the mesh ends, and sends them as far as
    /// it goes without blocking.
    pub(super) fn last_messages(&mut self, is_leave: bool, error: &MeshError) -> Vec<ClosingConnection> {
        let (header, text) = match is_leave {
            true => {
                (Header { tag: self.in_flight.sequence.begun(), ..Header::bare(Kind::Leave) }, String::new())
            }
            false => {
                let tag = error.rank().map_or(u64::MAX, u64::from);
                (Header { tag, ..Header::bare(Kind::Abort) }, abort_text(error))
            }
        };
        let mut connections = Vec::with_capacity(self.ranks.len());
        for state in self.ranks.drain(..) {
            if let RankState::Connected(mut peer) = state {
                let _ = self.poller.remove(&peer.socket);
                let last_messages = peer.outbound.last_messages(&self.in_flight, header, text.as_bytes());
                connections.push(ClosingConnection::begin(peer.socket, last_messages));
            }
        }
        connections
    }
}

/// The reason for the peers, within the bound of a frame.
fn abort_text(error: &MeshError) -> String {
    let mut text = match error {
        // The reason of another rank is passed on unchanged, so that it does not grow from rank to rank.
        MeshError::Aborted { reason, .. } | MeshError::GaveUp { reason, .. } => reason.to_string(),
        other => other.to_string(),
    };
    text.truncate(text.floor_char_boundary(MESSAGE_BYTES_MAX));
    text
}
