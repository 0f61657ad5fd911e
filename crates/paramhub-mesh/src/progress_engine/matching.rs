//! Matches sends with a peer's announcements of receives.

use std::collections::HashMap;

use super::fifo::Queues;
use super::operations_in_flight::{Address, StepId};
use super::outbound::OutgoingTransfer;
use crate::schedule::BufferRange;

/// The maximum of one peer's announcements that wait for their sends. The limits on operations and schedules
/// keep a correct peer far below it.
pub(super) const OFFERS_MAX: usize = 1 << 18;

/// A peer's announcement that it can receive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReceiveAnnouncement {
    pub(crate) ticket: u64,
    pub(crate) bytes: u64,
    /// `true` if it accepts any sender: then the peer must grant the send first.
    pub(crate) is_any: bool,
}

/// A send that has no announcement yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitingSend {
    pub(crate) id: StepId,
    pub(crate) from: BufferRange,
}

/// The outcome of a new offer or send.
#[derive(Debug)]
pub(crate) enum MatchOutcome {
    Nothing,
    /// Send this transfer.
    Matched(OutgoingTransfer),
    /// Ask the peer to grant this ticket.
    Claim(u64),
    /// The lengths differ; the second is the peer's.
    Mismatch(WaitingSend, u64),
    /// The peer has made more announcements than a rank may have.
    TooMany,
}

/// The matching of sends with one peer's announcements.
#[derive(Debug)]
pub(crate) struct Matching {
    offers: Queues<Address, ReceiveAnnouncement>,
    waiting: Queues<Address, WaitingSend>,
    /// Sends that have asked for a grant; those behind them with the same address wait, so that the order is
    /// kept.
    claims: HashMap<Address, (u64, WaitingSend)>,
}

impl Matching {
    pub(crate) fn new() -> Self {
        Matching { offers: Queues::new(), waiting: Queues::new(), claims: HashMap::new() }
    }

    pub(crate) fn send(&mut self, address: Address, send: WaitingSend) -> MatchOutcome {
        self.waiting.push_back(address, send);
        self.pair(address)
    }

    pub(crate) fn offer(&mut self, address: Address, offer: ReceiveAnnouncement) -> MatchOutcome {
        if self.offers.len() >= OFFERS_MAX {
            return MatchOutcome::TooMany;
        }
        self.offers.push_back(address, offer);
        self.pair(address)
    }

    /// Handles the peer's grant of a claim; `None` if there is no such claim.
    pub(crate) fn grant(&mut self, address: Address, ticket: u64) -> Option<OutgoingTransfer> {
        let (claimed, _) = self.claims.get(&address)?;
        if *claimed != ticket {
            return None;
        }
        let (_, send) = self.claims.remove(&address)?;
        Some(OutgoingTransfer::new(send.id, send.from, ticket))
    }

    /// Handles a withdrawal: another rank has served the peer's receive.
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

    /// Matches the first send with the first offer. The caller repeats it after a grant or a withdrawal.
    pub(crate) fn pair(&mut self, address: Address) -> MatchOutcome {
        if self.claims.contains_key(&address) || !self.offers.has(address) || !self.waiting.has(address) {
            return MatchOutcome::Nothing;
        }
        let offer = self.offers.pop_front(address).expect("there is one");
        let send = self.waiting.pop_front(address).expect("there is one");
        if offer.bytes != send.from.bytes as u64 {
            return MatchOutcome::Mismatch(send, offer.bytes);
        }
        if offer.is_any {
            self.claims.insert(address, (offer.ticket, send));
            return MatchOutcome::Claim(offer.ticket);
        }
        MatchOutcome::Matched(OutgoingTransfer::new(send.id, send.from, offer.ticket))
    }

    /// Sends that have not begun.
    pub(crate) fn unmatched(&self) -> impl Iterator<Item = StepId> + '_ {
        self.waiting.values().chain(self.claims.values().map(|(_, send)| send)).map(|send| send.id)
    }
}
