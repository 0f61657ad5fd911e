//! The chunks of a route that two hubs have: at the hub that serves them, at its standby, and what becomes of them when one of
//! the two hubs is lost. The rules are those of [`Exchange`](paramhub_core::exchange::Exchange).

use paramhub_core::codec::Codec;
use paramhub_core::exchange::{Answer, SumAction};
use paramhub_core::ports::Side;
use paramhub_core::wire::{Header, Operation};
use paramhub_kernels::convert;

use super::Shard;
use super::checks::CheckedHeader;
use crate::core::fault::Fault;
use crate::core::outbox::Source;

impl Shard {
    /// Takes a sum from the hub that serves the chunk, makes the update of that step, and acknowledges it.
    pub(super) fn follow(&mut self, port: u32, checked: &CheckedHeader, payload: &[u8]) -> Result<(), Fault> {
        let (header, (index, slot)) = (&checked.header, self.located(checked));
        let then = self.exchange.follow(index, header.step);
        let then = then.map_err(|violation| self.violation(header.chunk, slot.key, violation))?;
        if let SumAction::Update(update) = then {
            convert::decode(payload, self.sums.part_mut(slot.range()), Codec::F32);
            self.sums.is_made(index);
            self.arenas.find_no_sources();
            self.optimise(index, slot, update);
        }
        self.acknowledge(port, index);
        Ok(())
    }

    /// Acknowledges the version of a chunk to the hub that serves it.
    pub(super) fn acknowledge(&mut self, port: u32, index: u32) {
        self.outboxes[port as usize].owe(index, Answer::Applied);
        self.dirty.insert(port);
    }

    /// Takes the standby's acknowledgement.
    pub(super) fn acknowledged(&mut self, port: u32, checked: &CheckedHeader) -> Result<(), Fault> {
        let (header, (index, slot)) = (&checked.header, self.located(checked));
        let then = self.exchange.acknowledged(index, header.step);
        let then = then.map_err(|violation| self.violation(header.chunk, slot.key, violation))?;
        if !self.exchange.awaits_standby(index) {
            self.copy_acknowledged(index);
        }
        match then {
            Some(then) => {
                self.forget_sum(port, index);
                self.go_on(index, slot, then)
            }
            None => {
                self.settle(index);
                self.stranded_at(index)
            }
        }
    }

    /// Notes that a sum need not leave by a port any more, which may be about to do so once more over another stream.
    fn forget_sum(&mut self, port: u32, index: u32) {
        self.outboxes[port as usize].parameters.remove(index);
        if self.outboxes[port as usize].has_begun(Source::Sum(index)) {
            self.spill_begun(port, Source::Sum(index));
        }
    }

    /// Whether another hub can take over what this one serves.
    pub(crate) fn has_standby(&self) -> bool {
        self.exchange.has_standby()
    }

    /// Tells the standby that a worker has left, so that it does not wait for that worker if it takes over.
    pub(super) fn pass_on_leave(&mut self, member: u32) {
        if let Some(port) = self.plan.ports.counterpart().filter(|_| self.has_standby()) {
            self.outboxes[port as usize].message(leave_of(member), Vec::new());
            self.dirty.insert(port);
        }
    }

    /// Notes at the standby that a worker has left the hub that serves the chunks.
    pub(super) fn left_elsewhere(&mut self, member: u32) -> Result<(), Fault> {
        if member >= self.plan.ports.workers() || self.departures.has_left(member) {
            return Ok(());
        }
        self.leaves_to_report.push(member);
        self.leave(member)
    }

    /// The workers that have left the hub that serves the chunks since the last call, at the standby.
    pub(crate) fn take_left_elsewhere(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.leaves_to_report)
    }

    /// Has the chunks go on without their standby. The sums for which it was awaited are to be [ended](Self::end_sums).
    pub(crate) fn go_on_alone(&mut self) {
        self.exchange.go_on_alone();
        self.forget_counterpart();
        self.sums_to_end = Some(0);
    }

    /// Returns whether sums wait for [`end_sums`](Self::end_sums).
    pub(crate) fn has_sums_to_end(&self) -> bool {
        self.sums_to_end.is_some()
    }

    /// Ends the next steps for which the standby was awaited, of chunks of about `elements` elements.
    pub(crate) fn end_sums(&mut self, elements: usize) -> Result<(), Fault> {
        let mut done = 0;
        while let Some(index) = self.sums_to_end.filter(|_| done < elements) {
            let slot = self.slots[index as usize];
            self.sums_to_end = Some(index + 1).filter(|&next| (next as usize) < self.slots.len());
            match self.exchange.complete_alone(index) {
                Some(then) => {
                    done += slot.elements as usize;
                    self.go_on(index, slot, then)?;
                }
                None => self.settle(index),
            }
        }
        self.copy_more();
        Ok(())
    }

    /// Has the standby serve the chunks from now on.
    pub(crate) fn take_over(&mut self) {
        self.exchange.take_over();
        self.forget_counterpart();
        self.take_over_program_states();
    }

    /// Notes that the stream of a worker is closed, and that it repeats elsewhere, or here later, what was not answered.
    pub(crate) fn send_away(&mut self, worker: u32) {
        self.outboxes[worker as usize].start_again();
        self.exchange.resume(worker);
    }

    /// The other hub has nothing to do with the chunks any more.
    fn forget_counterpart(&mut self) {
        self.plan.standby = None;
        self.stop_copying();
        if let Some(port) = self.plan.ports.counterpart() {
            self.outboxes[port as usize].forget();
            self.outboxes[port as usize].start_again();
            self.departures.set_lost(port, true);
        }
    }

    /// Sends the standby again by a new stream which workers have left.
    pub(super) fn pass_on_leaves_again(&mut self, port: u32) {
        for member in (0..self.plan.ports.workers()).filter(|&member| self.departures.has_left(member)) {
            self.outboxes[port as usize].message(leave_of(member), Vec::new());
        }
    }

    /// Whether a port is that of the hub which this one follows.
    pub(super) fn is_followed(&self, port: u32) -> bool {
        self.plan.ports.side(port) == Side::Serving
    }
}

/// The message that a worker has left, for the standby.
fn leave_of(member: u32) -> Header {
    Header { step: member + 1, ..Header::bare(Operation::Leave) }
}
