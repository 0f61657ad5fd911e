//! This finds the ranks that are silent, and those that an operation waits for.

use std::sync::Arc;
use std::time::Instant;

use paramhub_core::liveness::LivenessChange;

use super::ProgressEngine;
use super::peer::RankState;
use super::slab::SlabKey;
use crate::error::MeshError;
use crate::handle::OperationCompletion;

impl ProgressEngine {
    /// Sends heartbeats, and fails if a peer has been silent for too long.
    pub(super) fn check_liveness(&mut self, now: Instant) -> Result<(), MeshError> {
        let is_waiting = !self.in_flight.operations.is_empty();
        for state in &mut self.ranks {
            let RankState::Connected(peer) = state else { continue };
            if peer.cut.is_some() {
                continue;
            }
            if peer.liveness.is_heartbeat_due(now, &self.liveness_rules) {
                peer.outbound.heartbeat();
            }
            // While nothing is under way no operation needs the peer, and the program may never ask for it.
            if is_waiting
                && let Some(LivenessChange::Dead(silence)) = peer.liveness.check(now, &self.liveness_rules)
            {
                let (this_rank, seconds) = (self.in_flight.this_rank.clone(), silence.as_secs_f64());
                return Err(MeshError::Silent { this_rank, rank: peer.rank, seconds });
            }
        }
        Ok(())
    }

    /// Does not count the time in which this process was stopped, or a callback kept the thread, as silence
    /// of the peers.
    pub(super) fn discount_own_pause(&mut self, now: Instant) {
        let pause = self.own_pauses.turn(now);
        if pause.is_zero() {
            return;
        }
        for state in &mut self.ranks {
            if let RankState::Connected(peer) = state {
                peer.liveness.forgive(pause, now);
            }
        }
    }

    /// The ranks that an operation waits for; for one that has not begun, those that the collectives before
    /// it wait for.
    pub(super) fn awaited(&self, completion: &Arc<OperationCompletion>) -> Vec<u32> {
        let is_queued = self.queue.iter().any(|request| request.completer.is_of(completion));
        let is_meant = |key: SlabKey| {
            let Some(operation) = self.in_flight.operations.get(key) else { return false };
            if is_queued { operation.is_collective() } else { operation.completer.is_of(completion) }
        };
        let mut ranks = Vec::new();
        for (_, receive) in
            self.in_flight.receives.iter().filter(|(_, receive)| is_meant(receive.id.operation))
        {
            match receive.from {
                Some(rank) => ranks.push(rank),
                None => ranks.extend(self.ranks.iter().filter_map(|state| match state {
                    RankState::Connected(peer) => Some(peer.rank),
                    _ => None,
                })),
            }
        }
        for state in &self.ranks {
            if let RankState::Connected(peer) = state
                && peer.matching.unmatched().chain(peer.outbound.transfers()).any(|id| is_meant(id.operation))
            {
                ranks.push(peer.rank);
            }
        }
        if let Some(pipeline) = &self.pipeline {
            let keys = self.in_flight.operations.iter().map(|(key, _)| key).filter(|key| is_meant(*key));
            ranks.extend(keys.flat_map(|key| pipeline.awaited(key)));
        }
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}
