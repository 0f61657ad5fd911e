//! One peer of the mesh.

use std::os::fd::OwnedFd;
use std::time::Instant;

use super::inbound::Inbound;
use super::matching::Matching;
use super::outbound::Outbound;

/// A peer that is connected.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: u32,
    pub(crate) socket: OwnedFd,
    pub(crate) inbound: Inbound,
    pub(crate) outbound: Outbound,
    pub(crate) matching: Matching,
    /// When something last came.
    pub(crate) heard: Instant,
    /// When something was last sent.
    pub(crate) spoken: Instant,
    /// Whether the poller waits for it to become writable.
    pub(crate) awaits_writable: bool,
}

impl Peer {
    pub(crate) fn new(rank: u32, socket: OwnedFd, now: Instant) -> Self {
        Peer {
            rank,
            socket,
            inbound: Inbound::new(),
            outbound: Outbound::default(),
            matching: Matching::new(),
            heard: now,
            spoken: now,
            awaits_writable: false,
        }
    }
}

/// What stands at a rank.
#[derive(Debug)]
pub(crate) enum Seat {
    /// This rank itself.
    Own,
    Present(Box<Peer>),
    /// It has left in order, after so many collectives.
    Left {
        collectives: u64,
    },
}
