//! Connections that were cut, and those that replace them.

use std::time::Instant;

use paramhub_transport::Interest;

use super::ProgressEngine;
use super::peer::RankState;
use crate::error::MeshError;
use crate::socket::PeerSocket;

impl ProgressEngine {
    /// Handles a connection that broke. Its peer counts as lost if it is not made again.
    pub(super) fn cut(&mut self, rank: u32, reason: String) -> Result<(), MeshError> {
        let Some(redialler) = &self.redialler else { return Err(self.lost(rank, reason)) };
        let RankState::Connected(peer) = &mut self.ranks[rank as usize] else { return Ok(()) };
        // This fails only if the descriptor is not in the set.
        let _ = self.poller.remove(&peer.socket);
        peer.outbound.cut();
        if !redialler.connection_is_cut(rank, peer.attempt) {
            return Err(self.lost(rank, reason));
        }
        peer.cut = Some(reason);
        Ok(())
    }

    /// Goes on with a peer over another connection. This rank may not have noticed that the one before was cut.
    pub(super) fn reconnected(
        &mut self,
        rank: u32,
        attempt: u32,
        socket: PeerSocket,
    ) -> Result<(), MeshError> {
        let RankState::Connected(peer) = &mut self.ranks[rank as usize] else { return Ok(()) };
        if peer.cut.is_none() {
            // This fails only if the descriptor is not in the set.
            let _ = self.poller.remove(&peer.socket);
        }
        let now = Instant::now();
        peer.replace_connection(socket, attempt, &self.in_flight, now);
        self.poller
            .add(&peer.socket, u64::from(rank), Interest::READABLE)
            .map_err(|error| self.system("wait for a peer", &error))
    }

    pub(super) fn not_reconnected(&mut self, rank: u32, attempt: u32, reason: &str) -> Result<(), MeshError> {
        match &self.ranks[rank as usize] {
            RankState::Connected(peer) if peer.attempt == attempt => match &peer.cut {
                Some(cut) => Err(self.lost(rank, format!("{cut}, and it cannot be made again: {reason}"))),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// Sends something to every peer.
    pub(super) fn beat(&mut self) {
        for state in &mut self.ranks {
            if let RankState::Connected(peer) = state {
                peer.outbound.heartbeat();
            }
        }
    }

    pub(super) fn lost(&self, rank: u32, reason: String) -> MeshError {
        MeshError::Lost { this_rank: self.in_flight.this_rank.clone(), rank, reason: reason.into() }
    }
}
