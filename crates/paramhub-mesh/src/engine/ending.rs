//! Ranks that leave, this one and others, and what a mesh says last.

use std::time::Instant;

use paramhub_core::limits::MESSAGE_BYTES_MAX;

use super::Engine;
use super::parting::Parting;
use super::peer::Seat;
use super::slab::Key;
use crate::error::MeshError;
use crate::wire::{Channel, Header, Kind};

impl Engine {
    /// A peer has left in order. Whatever still needs it fails.
    pub(super) fn let_go(&mut self, rank: u32, collectives: u64) -> Result<(), MeshError> {
        let seat = &mut self.seats[rank as usize];
        let Seat::Present(peer) = std::mem::replace(seat, Seat::Left { collectives }) else { return Ok(()) };
        // Fails only if the descriptor is not in the set.
        let _ = self.poller.remove(&peer.socket);
        let mut needed: Vec<Key> =
            peer.matching.unmatched().chain(peer.outbound.transfers()).map(|id| id.operation).collect();
        if (self.board.who.rank + 1) % self.board.size == rank {
            self.board.sequence.next_left();
        }
        let is_last = !self.has_peers();
        let orphans: Vec<Key> = self
            .board
            .landings
            .iter()
            .filter(|(_, landing)| landing.from == Some(rank) || (landing.from.is_none() && is_last))
            .map(|(ticket, _)| ticket)
            .collect();
        for ticket in orphans {
            needed.extend(self.board.landings.remove(ticket).map(|landing| landing.id.operation));
        }
        needed.extend(self.board.operations.iter().filter_map(|(key, operation)| {
            (operation.is_collective() && operation.number >= collectives).then_some(key)
        }));
        needed.into_iter().try_for_each(|operation| self.miss(operation, rank))
    }

    /// An operation needs a rank that has left: it fails, and a collective that has begun takes the mesh with it, for the other
    /// ranks wait for its steps.
    pub(super) fn miss(&mut self, operation: Key, rank: u32) -> Result<(), MeshError> {
        let Some(missed) = self.board.operations.get(operation) else { return Ok(()) };
        let error = MeshError::PeerLeft { who: self.board.who.clone(), what: missed.name(), rank };
        if missed.is_collective() {
            return Err(error);
        }
        self.board.end(operation, Err(error));
        Ok(())
    }

    /// Whether this rank may say goodbye: nothing is under way but receives to which nothing has come.
    pub(super) fn has_left(&mut self, now: Instant) -> Result<bool, MeshError> {
        let Some((timeout, deadline)) = self.leaving else { return Ok(false) };
        let idle = self
            .board
            .landings
            .iter()
            .filter(|(_, landing)| landing.arrived == 0 && landing.address.0 == Channel::PointToPoint);
        let outstanding = self.board.operations.len() + self.queue.len();
        let has_unsent = self
            .seats
            .iter()
            .any(|seat| matches!(seat, Seat::Present(peer) if peer.outbound.has_something()));
        if outstanding == idle.count() && !has_unsent {
            return Ok(true);
        }
        if now >= deadline {
            let (who, seconds) = (self.board.who.clone(), timeout.as_secs_f64());
            return Err(MeshError::LeaveTimeout { who, seconds, outstanding });
        }
        Ok(false)
    }

    /// Says goodbye, or why the mesh ends, as far as it goes without waiting.
    pub(super) fn last_words(&mut self, is_goodbye: bool, error: &MeshError) -> Vec<Parting> {
        let (header, text) = match is_goodbye {
            true => {
                (Header { tag: self.board.sequence.begun(), ..Header::bare(Kind::Goodbye) }, String::new())
            }
            false => {
                let tag = error.rank().map_or(u64::MAX, u64::from);
                (Header { tag, ..Header::bare(Kind::Abort) }, abort_text(error))
            }
        };
        let mut partings = Vec::with_capacity(self.seats.len());
        for seat in self.seats.drain(..) {
            if let Seat::Present(mut peer) = seat {
                let _ = self.poller.remove(&peer.socket);
                let words = peer.outbound.last_words(&self.board, header, text.as_bytes());
                partings.push(Parting::begin(peer.socket, words));
            }
        }
        partings
    }
}

/// What the peers are told, within the bound of a frame.
fn abort_text(error: &MeshError) -> String {
    let mut text = match error {
        // Said by somebody already: passed on as it is, so that it does not grow from rank to rank.
        MeshError::Aborted { reason, .. } | MeshError::GaveUp { reason, .. } => reason.to_string(),
        other => other.to_string(),
    };
    text.truncate(text.floor_char_boundary(MESSAGE_BYTES_MAX));
    text
}
