//! One peer of the mesh.

use std::time::Instant;

use paramhub_core::liveness::PeerLiveness;

use super::inbound::Inbound;
use super::matching::Matching;
use super::outbound::Outbound;
use crate::socket::PeerSocket;

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
        }
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
