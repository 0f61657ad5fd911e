//! This module handles ranks that leave, this one and others, and sends the last messages of a mesh.

use std::time::Instant;

use paramhub_core::limits::MESSAGE_BYTES_MAX;

use super::ProgressEngine;
use super::closing::ClosingConnection;
use super::peer::RankState;
use super::slab::SlabKey;
use crate::error::MeshError;
use crate::socket::PeerSocket;
use crate::wire::{Channel, Header, Kind};

impl ProgressEngine {
    /// Handles the leave message of a peer, which had begun this number of collectives. Every operation that
    /// still needs the peer fails.
    pub(super) fn peer_left(&mut self, rank: u32, collectives: u64) -> Result<(), MeshError> {
        let state = &mut self.ranks[rank as usize];
        let RankState::Connected(peer) = std::mem::replace(state, RankState::Left { collectives }) else {
            return Ok(());
        };
        // This fails only if the descriptor is not in the set.
        let _ = self.poller.remove(&peer.socket);
        let mut failing: Vec<SlabKey> =
            peer.matching.unmatched().chain(peer.outbound.transfers()).map(|id| id.operation).collect();
        if (self.in_flight.this_rank.rank + 1) % self.in_flight.size == rank {
            // The next rank acknowledges this rank's collectives, and nothing is to wait for that any more.
            self.in_flight.sequence.next_left();
        }
        let is_last = !self.has_peers();
        let unmatchable: Vec<SlabKey> = self
            .in_flight
            .receives
            .iter()
            .filter(|(_, receive)| receive.from == Some(rank) || (receive.from.is_none() && is_last))
            .map(|(ticket, _)| ticket)
            .collect();
        for ticket in unmatchable {
            failing.extend(self.in_flight.receives.remove(ticket).map(|receive| receive.id.operation));
        }
        failing.extend(self.in_flight.operations.iter().filter_map(|(key, operation)| {
            (operation.is_collective() && operation.number >= collectives).then_some(key)
        }));
        failing.into_iter().try_for_each(|operation| self.fail_for_missing_rank(operation, rank))
    }

    /// Fails an operation that needs a rank that has left. If the operation is a collective, returns the
    /// error that ends the whole mesh, because the other ranks wait for this rank's steps of the collective.
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

    /// Returns whether this rank may send its leave message: the user has
    /// asked it to leave, and nothing is under way except receives for which no byte has come. Fails at the
    /// deadline.
    pub(super) fn may_leave(&mut self, now: Instant) -> Result<bool, MeshError> {
        let Some((timeout, deadline)) = self.leaving else { return Ok(false) };
        let idle_receives = self
            .in_flight
            .receives
            .iter()
            .filter(|(_, receive)| receive.arrived == 0 && receive.address.0 == Channel::PointToPoint);
        let outstanding = self.in_flight.operations.len() + self.queue.len();
        let has_unsent = self
            .ranks
            .iter()
            .any(|state| matches!(state, RankState::Connected(peer) if peer.outbound.is_outstanding()));
        if outstanding == idle_receives.count() && !has_unsent {
            return Ok(true);
        }
        if now >= deadline {
            let (this_rank, seconds) = (self.in_flight.this_rank.clone(), timeout.as_secs_f64());
            return Err(MeshError::LeaveTimeout { this_rank, seconds, outstanding });
        }
        Ok(false)
    }

    /// Queues the last message to each peer: the leave message, or an abort message with `error` as the
    /// reason. Sends as much as is possible without blocking, and returns the connections that have to send
    /// the rest.
    pub(super) fn last_messages(&mut self, is_leave: bool, error: &MeshError) -> Vec<ClosingConnection> {
        let (header, text) = match is_leave {
            true => {
                (Header { tag: self.in_flight.sequence.begun(), ..Header::bare(Kind::Leave) }, String::new())
            }
            false => {
                // The tag names the rank at fault.
                let tag = error.rank().map_or(u64::MAX, u64::from);
                (Header { tag, ..Header::bare(Kind::Abort) }, abort_text(error))
            }
        };
        let mut connections = Vec::with_capacity(self.ranks.len());
        for state in self.ranks.drain(..) {
            if let RankState::Connected(mut peer) = state {
                // This fails only if the descriptor is not in the set.
                let _ = self.poller.remove(&peer.socket);
                let last_messages = peer.outbound.last_messages(&self.in_flight, header, text.as_bytes());
                let PeerSocket { socket, encryption } = peer.socket;
                let last_messages = match encryption {
                    None => last_messages,
                    Some(mut encryption) => encryption.last_records(&last_messages),
                };
                connections.push(ClosingConnection::begin(socket, last_messages));
            }
        }
        connections
    }
}

/// Returns the text of an abort message, at most `MESSAGE_BYTES_MAX` bytes.
fn abort_text(error: &MeshError) -> String {
    let mut text = match error {
        // The reason of another rank is passed on unchanged, so that it does not grow from rank to rank.
        MeshError::Aborted { reason, .. } | MeshError::GaveUp { reason, .. } => reason.to_string(),
        other => other.to_string(),
    };
    text.truncate(text.floor_char_boundary(MESSAGE_BYTES_MAX));
    text
}
