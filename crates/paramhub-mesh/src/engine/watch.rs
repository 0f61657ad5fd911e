//! Who is silent, and who is waited for.

use std::sync::Arc;
use std::time::Instant;

use super::Engine;
use super::peer::Seat;
use super::slab::Key;
use crate::error::MeshError;
use crate::handle::Completion;
use crate::wire::{Header, Kind};

impl Engine {
    /// Heartbeats, and whether peers are silent for too long.
    pub(super) fn beat(&mut self, now: Instant) -> Result<(), MeshError> {
        let is_waiting = !self.board.operations.is_empty();
        for seat in &mut self.seats {
            let Seat::Present(peer) = seat else { continue };
            if now.duration_since(peer.spoken) >= self.heartbeat && !peer.outbound.has_something() {
                peer.outbound.control(Header::bare(Kind::Heartbeat), &[]);
            }
            let silence = now.duration_since(peer.heard);
            if is_waiting && silence >= self.dead_after {
                let (who, seconds) = (self.board.who.clone(), silence.as_secs_f64());
                return Err(MeshError::Silent { who, rank: peer.rank, seconds });
            }
        }
        Ok(())
    }

    /// Time in which this process was stopped, or a callback kept the thread, is not held against the peers.
    pub(super) fn forgive_own_absence(&mut self, now: Instant) {
        let absence = now.duration_since(self.last_turn);
        self.last_turn = now;
        if absence > self.heartbeat * 2 {
            for seat in &mut self.seats {
                if let Seat::Present(peer) = seat {
                    peer.heard = now;
                }
            }
        }
    }

    /// The ranks an operation waits for; those that the collectives before it wait for, if it has not begun.
    pub(super) fn awaited(&self, completion: &Arc<Completion>) -> Vec<u32> {
        let is_queued = self.queue.iter().any(|request| request.ticket.is_of(completion));
        let is_meant = |key: Key| {
            let Some(operation) = self.board.operations.get(key) else { return false };
            if is_queued { operation.is_collective() } else { operation.ticket.is_of(completion) }
        };
        let mut ranks = Vec::new();
        for (_, landing) in self.board.landings.iter().filter(|(_, landing)| is_meant(landing.id.operation)) {
            match landing.from {
                Some(rank) => ranks.push(rank),
                None => ranks.extend(self.seats.iter().filter_map(|seat| match seat {
                    Seat::Present(peer) => Some(peer.rank),
                    _ => None,
                })),
            }
        }
        for seat in &self.seats {
            if let Seat::Present(peer) = seat
                && peer.matching.unmatched().chain(peer.outbound.transfers()).any(|id| is_meant(id.operation))
            {
                ranks.push(peer.rank);
            }
        }
        if let Some(pipeline) = &self.pipeline {
            let keys = self.board.operations.iter().map(|(key, _)| key).filter(|key| is_meant(*key));
            ranks.extend(keys.flat_map(|key| pipeline.awaited(key)));
        }
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}
