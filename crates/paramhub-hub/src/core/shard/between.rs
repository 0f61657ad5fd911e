//! The exchange between a shard and those of other sites: sums go up, answers come down, and what rank 0
//! sends goes to all sites.

use paramhub_core::between_sites::{self, Again};
use paramhub_core::exchange::{Answer, SumAction};
use paramhub_core::hyperparameters::Change;
use paramhub_core::ports::Side;
use paramhub_core::wire::{Header, Operation, Retune};
use paramhub_kernels::convert;

use super::Shard;
use super::checks::CheckedHeader;
use crate::core::fault::Fault;
use crate::core::layout::ChunkPlace;

impl Shard {
    /// Sends the sum, which is complete here, to the site above or to the standby.
    pub(super) fn raise(&mut self, index: u32) {
        self.sums.raise(self.slots[index as usize]);
        let above =
            self.plan.ports.above(index).expect("sums are raised where a site is above, or a standby");
        // A sum goes after the parameters with which its chunk begins there.
        if !self.outboxes[above as usize].starts(index) {
            self.outboxes[above as usize].owe(index, Answer::Parameters);
            self.dirty.insert(above);
        }
    }

    /// Sends again by a new stream to a neighbouring site what the old one may have lost: the parameters to start from,
    /// sums that were not answered, changes of hyperparameters, the end of the last held step
    /// and, as the last frame, Leave.
    pub(super) fn resume_site(&mut self, port: u32) {
        if self.is_followed(port) {
            // The hub that serves the chunks sends again what was not acknowledged.
            return;
        }
        let outbox = &mut self.outboxes[port as usize];
        outbox.start_at = None;
        let is_leave = |(header, _): &(Header, Vec<u8>)| header.operation == Operation::Leave;
        outbox.messages.retain(|message| !is_leave(message));
        outbox.sent_leave = false;
        let again = |again| match again {
            Again::Start(index) => drop(outbox.start.insert(index)),
            Again::Sum(index) if outbox.starts(index) => {}
            Again::Sum(index) => outbox.owe(index, Answer::Parameters),
        };
        let newest = between_sites::resume(&mut self.exchange, &self.plan.ports, port, again);
        if self.plan.ports.side(port) == Side::Standby {
            self.tell_standby(port);
        } else {
            // A site that has contributed to a step, or has answered one, has the changes that were sent before it: at a chunk
            // that is at step t both ends know those for steps before t - 1.
            let outbox = &mut self.outboxes[port as usize];
            for (group, schedule) in (0..).zip(&self.schedules) {
                outbox.retune_once(group, schedule.changes_from(newest.saturating_sub(1)));
            }
            self.send_end(port);
        }
        if self.leaves_above(port) {
            self.outboxes[port as usize].message(Header::bare(Operation::Leave), Vec::new());
        }
        self.dirty.insert(port);
    }

    /// Takes the sum of all workers' gradients: the answer to a sum that went up.
    pub(super) fn lower(&mut self, checked: &CheckedHeader, payload: &[u8]) -> Result<(), Fault> {
        let (index, slot, then) = self.lowered(checked)?;
        self.sums.lower(slot, payload);
        self.go_on(index, slot, then)
    }

    /// Takes new parameters from the chunk's owner: another answer to a sum that went up.
    pub(super) fn lower_parameters(&mut self, checked: &CheckedHeader, payload: &[u8]) -> Result<(), Fault> {
        let (index, slot, then) = self.lowered(checked)?;
        let SumAction::Update(update) = then else { unreachable!("owners optimise in one phase") };
        self.sums.end_step(index);
        self.settle(index);
        self.spill(index);
        self.newest_step = self.newest_step.max(update.step);
        self.counters.steps = u64::from(self.newest_step) + 1;
        convert::decode(payload, &mut self.model.parameters[slot.range()], slot.parameter);
        self.hand_out(slot, true);
        self.arenas.forget_targets();
        Ok(())
    }

    /// Keeps a complete sum of all workers' gradients for the sites below. A sum from above is kept when it comes.
    pub(super) fn keep_total(&mut self, index: u32) {
        if self.plan.ports.above(index).is_none() {
            self.sums.keep_total(self.slots[index as usize]);
        }
    }

    fn lowered(&mut self, checked: &CheckedHeader) -> Result<(u32, ChunkPlace, SumAction), Fault> {
        let (header, (index, slot)) = (&checked.header, self.located(checked));
        // An answer carries the version that it makes, which is the step plus one.
        let then = self.exchange.lower(index, header.step.wrapping_sub(1));
        let then = then.map_err(|violation| self.violation(header.chunk, slot.key, violation))?;
        Ok((index, slot, then))
    }

    /// Takes new hyperparameters, unless those of [another worker](Self::note_change) hold, and sends them to the sites
    /// around, except to the one from which they came.
    /// They arrive before any frame of the step from which they hold, because their sender contributes to
    /// that step only afterwards.
    pub(super) fn retune(&mut self, port: u32, header: &Header, payload: &[u8]) -> Result<(), Fault> {
        let (group, first_step) = (header.chunk, header.step);
        let refused = |reason: String| Fault::Retune { group, reason };
        let groups = self.plan.groups.len();
        let initial = self
            .plan
            .groups
            .get(group as usize)
            .ok_or_else(|| refused(format!("the job has no such group, but {groups}, counted from 0")))?;
        let Retune(next) = Retune::decode(payload)
            .ok_or_else(|| refused("they are not finite numbers in the agreed layout".to_string()))?;
        // The change is checked against the group's own hyperparameters: state that only another group needs
        // would begin at zero here.
        let checked = self.plan.optimizer.check_change(initial, &next);
        checked.map_err(|error| refused(error.to_string()))?;
        if !self.note_change(port, group, Change { first_step, hyperparameters: next }) {
            return Ok(());
        }
        let schedule = &mut self.schedules[group as usize];
        if schedule.has_change(first_step, &next) {
            return Ok(());
        }
        let changed = schedule.change(self.newest_step, first_step, next);
        changed.map_err(|error| refused(error.to_string()))?;
        let ports = self.plan.ports.clone();
        let is_told = |side| side != Side::Serving;
        for (to, _) in ports
            .to_sites()
            .filter(|&(to, there)| to != port && is_told(there.side) && !self.departures.has_left(to))
        {
            if !self.outboxes[to as usize].message(*header, payload.to_vec()) {
                let name = self.plan.name(ports.neighbour(to));
                return Err(refused(format!("{name} has too many of them to read already")));
            }
            self.dirty.insert(to);
        }
        Ok(())
    }

    /// Passes a notice of the site above on to all ranks below.
    pub(super) fn pass_on_notice(&mut self, payload: &[u8]) {
        let ports = self.plan.ports.clone();
        for port in 0..ports.len() {
            let (Side::Worker(member) | Side::Below(member)) = ports.side(port) else { continue };
            if ports.is_worker_or_child(member)
                && !self.departures.has_left(port)
                && self.message(port, Operation::Notice, payload.to_vec())
            {
                self.dirty.insert(port);
            }
        }
    }

    /// Notes that a neighbour has left. Once every neighbour below has left, this hub leaves the sites above.
    pub(super) fn leave(&mut self, port: u32) -> Result<(), Fault> {
        if !self.plan.ports.side(port).is_worker() {
            // A site below may leave with the total, before its step has ended here. Nobody may be left to wait for that.
            self.update_released(usize::MAX);
        }
        let departure = self.departures.leave(&self.plan.ports, port);
        if let Side::Worker(member) | Side::Below(member) = self.plan.ports.side(port) {
            self.forget_changes(member);
            self.pass_on_leave(member);
        }
        let left = departure.member.map_or(Ok(()), |member| self.member_left(member));
        for above in departure.above {
            self.stop_copying();
            self.outboxes[above as usize].message(Header::bare(Operation::Leave), Vec::new());
            self.dirty.insert(above);
        }
        left
    }

    fn member_left(&mut self, member: u32) -> Result<(), Fault> {
        let (outboxes, dirty, ports) = (&mut self.outboxes, &mut self.dirty, &self.plan.ports);
        let mut answers = Vec::new();
        let freed = |slot: u32, member: u32, answer: Answer| {
            let port = ports.of_member(slot, member);
            outboxes[port as usize].owe(slot, answer);
            dirty.insert(port);
            answers.push((slot, member, answer));
        };
        let left = self.exchange.leave(member, freed);
        for (slot, member, answer) in answers {
            if member < self.plan.ports.workers() {
                self.arenas.aim(member, answer);
            }
            if self.arenas.has_targets() {
                self.deliver(self.slots[slot as usize], false);
            }
        }
        left.map_err(|stranded| self.stranded(stranded))?;
        self.end_without_it();
        Ok(())
    }
}
