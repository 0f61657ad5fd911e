//! Jobs whose ranks all go back to an earlier step when one of them is lost.
//!
//! All ranks are lost with the first one, in one epoch. The processes that are still there join anew, as those do that
//! are started in the place of others. When each rank has a process that has called InitService, the hubs are asked for the
//! newest step to which they can go back, and told the earliest of these steps.
//!
//! As long as the hubs were not asked, a process that goes away again concerns its own rank alone. After that all ranks
//! are lost once more, since those that have joined may have contributed.
//!
//! A launcher that starts all ranks again may start more or fewer than before. Each of their calls says how many there are,
//! and as long as the hubs were not asked, the job changes to that number. The ranks are those from 0 on.

use serde::{Deserialize, Serialize};

use super::losses::MembershipChange;
use super::rank_assignments::Standing;
use super::rank_texts::list_ranks_with_verb;
use super::{Job, Transition};
use crate::membership::Now;
use crate::service::{ConnectService, ErrorCode, JobState, ServiceError, refusal};

/// All ranks are lost, and not all have joined again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rewind {
    /// The rank that was lost first.
    rank: u32,
    /// The epoch that began with this.
    epoch: u64,
    reason: String,
    /// Whether the hubs were told which processes have the ranks, or were about to be. A manager that restarts tells them
    /// again.
    #[serde(default, skip_serializing_if = "is_false")]
    is_told: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

impl Rewind {
    fn change(&self) -> MembershipChange {
        MembershipChange::Rewind { rank: Some(self.rank), epoch: self.epoch, reason: self.reason.clone() }
    }
}

impl Job {
    /// A rank is lost: all ranks go back to an earlier step. A process that waits for the others to come is no worker yet,
    /// and another can take its rank.
    pub(super) fn begin_rewind(&mut self, rank: u32, reason: &str, now: Now) -> Transition {
        if self.rewind.is_some() && !self.expects_all_ranks() {
            if let Some(holder) = self.assignments.holder_mut(rank) {
                holder.standing = Standing::Lost;
            }
            self.joins.remove(&rank);
            let (epoch, message) = (self.assignments.newest_epoch(), reason.to_owned());
            return Transition::MembershipChanged { changes: Vec::new(), epoch, message };
        }
        let epoch = self.assignments.begin_epoch();
        for each in 0..self.workers {
            let Some(holder) = self.assignments.holder_mut(each) else { continue };
            (holder.standing, holder.since) = (Standing::Lost, epoch);
        }
        self.joins.clear();
        self.loss_tally.lost();
        self.message = reason.to_owned();
        self.note_presence(now);
        let rewind = Rewind { rank, epoch, reason: reason.to_owned(), is_told: false };
        let changes = vec![rewind.change()];
        self.rewind = Some(rewind);
        let message = format!(
            "{reason}; all ranks go back to an earlier step, and it waits {} s for their processes",
            self.options.linger_s
        );
        Transition::MembershipChanged { changes, epoch, message }
    }

    /// Takes the number of ranks that have been started together with a caller, if the job waits for its first ranks, or for
    /// all ranks because they go back. The processes of an earlier start with another number count no more.
    ///
    /// Fails if the job cannot have so many.
    pub(super) fn take_number_of_workers(&mut self, call: &ConnectService) -> Result<(), ServiceError> {
        let Some(workers) = call.workers.filter(|_| self.options.rewinds()) else { return Ok(()) };
        let most = if self.may_change_workers() { 1..=self.workers } else { self.workers..=self.workers };
        if !most.contains(&workers) {
            let message = match self.may_change_workers() {
                true => format!(
                    "{workers} ranks have been started, and job `{}` can have {} at most",
                    self.name, self.workers
                ),
                false => format!(
                    "{workers} ranks have been started, and job `{}` was created for {}: it must be created with a largest \
                     number of workers (max_workers) if they are to be more or fewer",
                    self.name, self.workers
                ),
            };
            return Err(refusal(ErrorCode::BadRequest, message));
        }
        let waits = match self.state {
            JobState::Connecting => true,
            _ => self.rewind.is_some() && !self.expects_all_ranks(),
        };
        if workers == self.current_workers || !waits {
            return Ok(());
        }
        self.current_workers = workers;
        if self.state == JobState::Connecting {
            self.options.start_workers = Some(workers);
            self.assignments.begin_with(workers);
            return Ok(());
        }
        for rank in self.assignments.standing(Standing::Joining) {
            self.assignments.holder_mut(rank).into_iter().for_each(|holder| holder.standing = Standing::Lost);
        }
        self.joins.clear();
        Ok(())
    }

    /// Whether the ranks of a job that goes back may be more or fewer afterwards.
    pub(super) fn may_change_workers(&self) -> bool {
        self.options.rewinds() && self.options.start_workers.is_some()
    }

    /// Whether a rank takes part, or will when the job runs again.
    pub(super) fn takes_part(&self, rank: u32) -> bool {
        !self.options.rewinds() || rank < self.current_workers
    }

    /// What hubs must hear while ranks are missing, in a job that goes back.
    pub(super) fn changes_of_rewind(&self) -> Vec<MembershipChange> {
        let Some(rewind) = &self.rewind else { return Vec::new() };
        let expected = |&rank: &u32| {
            let holder = self.assignments.holder(rank)?;
            Some(MembershipChange::Expect { rank, epoch: holder.since })
        };
        // Hubs begin with as many ranks as they hear of together. So a manager that has restarted waits until all have called again.
        let are_told = rewind.is_told && self.ranks_without_process().is_empty();
        let told = self.joins.keys().filter(|_| are_told).filter_map(expected);
        std::iter::once(rewind.change()).chain(told).collect()
    }

    /// The settings of a process agree with the job's. When each rank has such a process, the hubs are to expect them.
    pub(super) fn join_after_rewind(&mut self, rank: u32) -> Transition {
        let epoch = self.assignments.newest_epoch();
        self.joins.entry(rank).or_default();
        let missing = self.ranks_without_process();
        if !missing.is_empty() {
            let message = format!(
                "rank {rank} has a process again; {}",
                list_ranks_with_verb(&missing, "is missing", "are missing")
            );
            return Transition::MembershipChanged { changes: Vec::new(), epoch, message };
        }
        if let Some(rewind) = &mut self.rewind {
            rewind.is_told = true;
        }
        let message = "each rank has a process again".to_owned();
        Transition::MembershipChanged { changes: self.changes_of_rewind(), epoch, message }
    }

    /// Whether all ranks go back and have processes, which the hubs expect: no other can take the place of one of them
    /// before all ranks are lost again.
    pub(super) fn expects_all_ranks(&self) -> bool {
        self.rewind.as_ref().is_some_and(|rewind| rewind.is_told)
    }

    /// The ranks that are lost and have no process that has handed in its settings.
    pub(super) fn ranks_without_process(&self) -> Vec<u32> {
        let is_missing = |rank: &u32| self.takes_part(*rank) && !self.joins.contains_key(rank);
        self.lost_ranks().into_iter().filter(is_missing).collect()
    }

    /// Notes that a rank has joined. When all have, the job has gone back.
    pub(super) fn note_joined_after_rewind(&mut self) {
        if !self.lost_ranks().into_iter().any(|rank| self.takes_part(rank)) {
            self.rewind = None;
        }
    }

    /// The time that a rank may wait in InitService.
    pub(crate) fn init_timeout_s(&self, rank: u32) -> f64 {
        match self.is_joining(rank) {
            true => self.options.join_timeout_s(),
            false => self.options.rendezvous_timeout_s,
        }
    }

    /// The refusal of a process that was about to join when another was lost.
    pub(super) fn refuse_lost(&self, rank: u32) -> ServiceError {
        let message = format!(
            "rank {rank} of job `{}` has not joined, since {}: begin again with ConnectService",
            self.name, self.message
        );
        refusal(ErrorCode::Busy, message)
    }
}
