//! Workers that are lost while their job goes on, and the processes that take their places.
//!
//! Such a job has one site: a worker's port is its number as a member, and its rank.

use paramhub_core::hyperparameters::Change;

use super::Shard;
use crate::local::RankArenas;

impl Shard {
    /// Notes that a worker is lost. Nothing leaves by its port any more. The steps that only waited for it are to be
    /// [ended](Self::end_steps).
    pub(crate) fn lose(&mut self, worker: u32) {
        self.exchange.lose(worker);
        self.outboxes[worker as usize].start_again();
        self.program_states.cut(worker);
        self.departures.set_lost(worker, true);
        self.forget_changes(worker);
        self.look_for_steps_to_end();
    }

    /// Notes a change of hyperparameters that a worker has sent. Returns whether it holds: in a job that may lose workers
    /// it does not if an [earlier or lower one](paramhub_core::hyperparameters::ChangesOfMembers) sends them.
    pub(super) fn note_change(&mut self, port: u32, group: u32, change: Change) -> bool {
        let Some(changes) = self.changes_of_members.get_mut(group as usize) else { return true };
        changes.note(port, self.exchange.joined_at(port), change)
    }

    /// Notes that a worker sends no changes of hyperparameters any more. If its changes held, those of another hold from
    /// now on, which has sent the same, or is about to.
    pub(super) fn forget_changes(&mut self, worker: u32) {
        for (changes, schedule) in self.changes_of_members.iter_mut().zip(&mut self.schedules) {
            if let Some(Change { first_step, hyperparameters }) = changes.forget(worker) {
                // A schedule without room is full of later changes, which the worker had sent before.
                let _ = schedule.change(self.newest_step, first_step, hyperparameters);
            }
        }
    }

    /// Gives the place of a lost worker to another process. Returns the first step to which that may contribute here, `None`
    /// if not all chunks have parameters to start from, and the arenas of the former process.
    pub(crate) fn expect(&mut self, worker: u32) -> (Option<u32>, Option<RankArenas>) {
        if self.exchange.begin_steps_again() {
            self.sums.drop_parts();
        } else if self.arenas.has(worker) {
            for (&slot, index) in self.slots.iter().zip(0..) {
                if self.exchange.has_contributed(index, worker, self.exchange.step(index)) {
                    let aggregator = &*self.plan.aggregator;
                    self.sums.take_from_arena(index, slot, worker, &self.arenas, aggregator);
                }
            }
        }
        let arenas = self.arenas.detach(worker);
        let step = self.exchange.rejoin(worker);
        self.departures.set_lost(worker, false);
        self.look_for_steps_to_end();
        (self.exchange.have_all_begun().then_some(step), arenas)
    }

    /// Has the process that takes a worker's place contribute from `step` on, or like the first ones.
    pub(crate) fn join(&mut self, worker: u32, step: Option<u32>) {
        match step {
            Some(step) => self.exchange.join_at(worker, step),
            None => self.exchange.join_at_start(worker),
        }
        self.look_for_steps_to_end();
    }

    /// Notes that the membership has changed: any step may have to end.
    pub(super) fn look_for_steps_to_end(&mut self) {
        self.steps_to_end = self.plan.quorum.is_some().then_some(0);
    }

    /// Returns whether steps may wait for [`end_steps`](Self::end_steps).
    pub(crate) fn has_steps_to_end(&self) -> bool {
        self.steps_to_end.is_some()
    }

    /// Ends the next steps that wait for no member any more, of chunks of about `elements` elements.
    pub(crate) fn end_steps(&mut self, elements: usize) {
        let mut done = 0;
        while let Some(index) = self.steps_to_end.filter(|_| done < elements) {
            self.steps_to_end = Some(index + 1).filter(|&next| (next as usize) < self.slots.len());
            while let Some(update) = self.exchange.end_if_complete(index) {
                done += self.end_step(index, update);
            }
            if self.exchange.skip_missed_steps(index) {
                let slot = self.slots[index as usize];
                self.settle(index);
                if self.arenas.has_targets() {
                    self.deliver(slot, false);
                }
                done += slot.elements as usize;
            }
        }
    }
}
