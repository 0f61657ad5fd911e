//! The copies of chunks for another standby, while the job runs. The rules are those of
//! [`Exchange::take_standby`](paramhub_core::exchange::Exchange::take_standby).
//!
//! A few chunks are copied at a time. Each waits for the standby's acknowledgement before its next update, so that what is sent
//! of it is of one version. Sums of chunks that are copied already go ahead of further copies, as far as a write has room.

use std::sync::Arc;

use paramhub_core::ready_set::ReadySet;
use paramhub_core::wire::{Header, Operation};

use super::Shard;

/// The most chunks that are sent to the new standby and not acknowledged. A chunk has 32 KiB mostly, so they fill a link of
/// 10 Gbit/s for 1 ms.
const COPIES_UNDER_WAY: u32 = if cfg!(test) { 2 } else { 32 };

/// The chunks that a new standby has still to get.
pub(super) struct Copying {
    /// The next slot to copy.
    next: u32,
    unacknowledged: ReadySet,
}

impl Shard {
    /// Has chunks that this hub serves alone get the hub at this position as a standby. The stream to it is still to come.
    pub(crate) fn take_standby(&mut self, standby: u16, name: String) {
        let Some(port) = self.plan.ports.counterpart() else { return };
        self.plan.ports = Arc::new(self.plan.ports.as_ref().clone().with_standby());
        (self.plan.standby, self.plan.counterpart) = (Some(standby), name);
        self.exchange.take_standby();
        self.departures.set_lost(port, false);
        self.outboxes[port as usize].begin_stream_to_standby(self.plan.ports.workers());
        self.tell_standby(port);
        if (0..self.plan.ports.workers()).all(|worker| self.departures.has_left(worker)) {
            // Some have not left other routes yet. No further Leave of a worker would end this one.
            self.departures.set_lost(port, true);
            self.outboxes[port as usize].message(Header::bare(Operation::Leave), Vec::new());
            return;
        }
        let unacknowledged = ReadySet::new(self.slots.len() as u32);
        self.copying = Some(Copying { next: 0, unacknowledged });
        self.copy_more();
    }

    /// Sends the standby what it must know besides chunks, unless that waits for it already: which workers have left, and the
    /// hyperparameters of the steps to come.
    pub(super) fn tell_standby(&mut self, port: u32) {
        let oldest = (0..self.slots.len() as u32).map(|slot| self.exchange.step(slot)).min().unwrap_or(0);
        let outbox = &mut self.outboxes[port as usize];
        for (group, schedule) in (0..).zip(&self.schedules) {
            outbox.retune_once(group, schedule.in_force_from(oldest));
        }
        self.pass_on_leaves_again(port);
        self.dirty.insert(port);
    }

    /// Begins to copy further chunks, as many as may be under way.
    pub(super) fn copy_more(&mut self) {
        // A step of which the end is due since an earlier standby is lost ends before its chunk is copied.
        let waits = self.has_sums_to_end();
        let (Some(copying), Some(port)) = (&mut self.copying, self.plan.ports.counterpart()) else { return };
        while !waits
            && copying.unacknowledged.len() < COPIES_UNDER_WAY
            && (copying.next as usize) < self.slots.len()
        {
            let slot = copying.next;
            copying.next += 1;
            if self.exchange.begin_copy(slot) {
                copying.unacknowledged.insert(slot);
                self.outboxes[port as usize].start.insert(slot);
                self.dirty.insert(port);
            }
        }
    }

    /// Notes that the standby has acknowledged a chunk with which it begins.
    pub(super) fn copy_acknowledged(&mut self, slot: u32) {
        if self.copying.as_mut().is_some_and(|copying| copying.unacknowledged.remove(slot)) {
            self.copy_more();
        }
    }

    /// Gives up copying: the standby is lost, or all workers have left.
    pub(super) fn stop_copying(&mut self) {
        self.copying = None;
    }

    /// Whether chunks are being copied to a new standby.
    pub(super) fn copies_to_standby(&self) -> bool {
        self.copying.is_some()
    }

    /// Returns whether the new standby has got its last chunk since the last call.
    pub(crate) fn take_standby_ready(&mut self) -> bool {
        let slots = self.slots.len();
        let is_over =
            |copying: &mut Copying| copying.next as usize == slots && copying.unacknowledged.is_empty();
        self.copying.take_if(is_over).is_some()
    }
}
