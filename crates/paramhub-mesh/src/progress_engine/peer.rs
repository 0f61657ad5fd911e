//! One peer of the mesh.

use std::time::Instant;

use paramhub_core::liveness::PeerLiveness;

use super::inbound::Inbound;
use super::matching::Matching;
use super::operations_in_flight::OperationsInFlight;
use super::outbound::Outbound;
use crate::socket::PeerSocket;
use crate::wire::{HEADER_BYTES, Header, Kind};

/// A peer that is connected.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: u32,
    pub(crate) socket: PeerSocket,
    pub(crate) inbound: Inbound,
    pub(crate) outbound: Outbound,
    pub(crate) matching: Matching,
    pub(crate) liveness: PeerLiveness,
    /// `true` if the poller waits for the socket to become writable.
    pub(crate) awaits_writable: bool,
    /// The number of the present connection: 0 for that of the join.
    pub(crate) attempt: u32,
    /// Why the connection broke, until another one replaces it.
    pub(crate) cut: Option<String>,
}

impl Peer {
    pub(crate) fn new(rank: u32, socket: PeerSocket, now: Instant) -> Self {
        Peer {
            rank,
            socket,
            inbound: Inbound::new(),
            outbound: Outbound::default(),
            matching: Matching::new(),
            liveness: PeerLiveness::new(now),
            awaits_writable: false,
            attempt: 0,
            cut: None,
        }
    }

    /// Goes on over another connection, whose first frames say how far this rank is.
    pub(crate) fn replace_connection(
        &mut self,
        socket: PeerSocket,
        attempt: u32,
        in_flight: &OperationsInFlight,
        now: Instant,
    ) {
        (self.socket, self.attempt, self.cut, self.awaits_writable) = (socket, attempt, None, false);
        self.liveness.heard(now);
        let counted = self.inbound.replace_connection();
        let mut arrived = Vec::new();
        for (ticket, bytes) in in_flight.arrived_from(self.rank) {
            arrived.extend_from_slice(&Header { ticket, bytes, ..Header::bare(Kind::Arrived) }.encode());
        }
        let receives = (arrived.len() / HEADER_BYTES) as u64;
        let mut frames =
            Header { tag: counted, bytes: receives, ..Header::bare(Kind::Resume) }.encode().to_vec();
        frames.append(&mut arrived);
        self.outbound.replace_connection(frames);
    }
}

/// The state of a rank.
#[derive(Debug)]
pub(crate) enum RankState {
    /// This rank itself.
    Own,
    Connected(Box<Peer>),
    /// The rank has left in order, after so many collectives.
    Left {
        collectives: u64,
    },
}
