//! Which send answers which of a peer's announcements.

use std::collections::HashMap;

use super::board::{Address, StepId};
use super::fifo::Queues;
use super::outbound::Transfer;
use crate::schedule::Span;

/// Announcements of one peer that may wait for their sends. A correct peer is bounded by its own limits on operations and
/// schedules, which stay far below.
const OFFERS_MAX: usize = 1 << 18;

/// A peer's announcement that it can receive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    pub(crate) ticket: u64,
    pub(crate) bytes: u64,
    /// It takes from anyone: the send must be granted first.
    pub(crate) is_any: bool,
}

/// A send without an announcement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) id: StepId,
    pub(crate) from: Span,
}

/// What became of a new offer or send.
#[derive(Debug)]
pub(crate) enum Pairing {
    Nothing,
    /// Send this.
    Matched(Transfer),
    /// Ask for the grant of this ticket.
    Claim(u64),
    /// The lengths differ; the peer's is this.
    Mismatch(Waiting, u64),
    /// The peer announces more than anyone should.
    TooMany,
}

/// Of one peer.
#[derive(Debug)]
pub(crate) struct Matching {
    offers: Queues<Address, Offer>,
    waiting: Queues<Address, Waiting>,
    /// Sends that have asked for a grant; those behind them with the same address wait, so that order is kept.
    claims: HashMap<Address, (u64, Waiting)>,
}

impl Matching {
    pub(crate) fn new() -> Self {
        Matching { offers: Queues::new(), waiting: Queues::new(), claims: HashMap::new() }
    }

    pub(crate) fn send(&mut self, address: Address, send: Waiting) -> Pairing {
        self.waiting.push_back(address, send);
        self.pair(address)
    }

    pub(crate) fn offer(&mut self, address: Address, offer: Offer) -> Pairing {
        if self.offers.len() >= OFFERS_MAX {
            return Pairing::TooMany;
        }
        self.offers.push_back(address, offer);
        self.pair(address)
    }

    /// The peer grants a claim; `None` if there is none.
    pub(crate) fn grant(&mut self, address: Address, ticket: u64) -> Option<Transfer> {
        let (claimed, _) = self.claims.get(&address)?;
        if *claimed != ticket {
            return None;
        }
        let (_, send) = self.claims.remove(&address)?;
        Some(Transfer::new(send.id, send.from, ticket))
    }

    /// The peer has been served by another rank.
    pub(crate) fn withdraw(&mut self, address: Address, ticket: u64) {
        match self.claims.get(&address) {
            Some((claimed, _)) if *claimed == ticket => {
                let (_, send) = self.claims.remove(&address).expect("it was there");
                self.waiting.push_front(address, send);
            }
            _ => {
                self.offers.remove(address, |offer| offer.ticket == ticket);
            }
        }
    }

    /// Matches the first send with the first offer. To be called again after a grant or a withdrawal.
    pub(crate) fn pair(&mut self, address: Address) -> Pairing {
        if self.claims.contains_key(&address) || !self.offers.has(address) || !self.waiting.has(address) {
            return Pairing::Nothing;
        }
        let offer = self.offers.pop_front(address).expect("there is one");
        let send = self.waiting.pop_front(address).expect("there is one");
        if offer.bytes != send.from.bytes as u64 {
            return Pairing::Mismatch(send, offer.bytes);
        }
        if offer.is_any {
            self.claims.insert(address, (offer.ticket, send));
            return Pairing::Claim(offer.ticket);
        }
        Pairing::Matched(Transfer::new(send.id, send.from, offer.ticket))
    }

    /// Sends that have not begun.
    pub(crate) fn unmatched(&self) -> impl Iterator<Item = StepId> + '_ {
        self.waiting.values().chain(self.claims.values().map(|(_, send)| send)).map(|send| send.id)
    }
}
