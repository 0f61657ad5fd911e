//! Ranks that are lost while their job runs, and the processes that take them.
//!
//! A hub reports that it has lost a worker; the job then begins an epoch without the rank, and tells all hubs. A
//! process that calls ConnectService for a lost rank begins another epoch. When it calls InitService, every hub is
//! asked for the first step to which the process may contribute there, and then told the latest of these steps. The
//! process is answered when all hubs have it.
//!
//! The record of the job is saved before a hub hears of a change. A process that repeats its call after the manager
//! has restarted is expected once more in the same epoch, and hubs answer as before.

use std::collections::{BTreeMap, BTreeSet};

use super::cause::Cause;
use super::rank_assignments::{RankHolder, Standing};
use super::rank_texts::{describe_process, list_ranks_with_verb};
use super::{COME_BACK_S, Job, Transition};
use crate::auth::Namespace;
use crate::job_control::chosen_step;
use crate::membership::Now;
use crate::service::{
    CauseKind, ConnectService, ErrorCode, HubCommand, JobState, LossCounters, ServiceError, refusal,
};

/// The number of epochs of a rank that a manager may have begun and not saved. A hub that names a later one is wrong.
const FORGOTTEN_EPOCHS_MAX: u64 = 1 << 32;

/// A process that joins a running job.
#[derive(Debug, Default)]
pub(super) struct PendingJoin {
    /// The step that each hub has named; `None` if its chunks have no parameters to start from.
    named: BTreeMap<u32, Option<u32>>,
    /// The hubs at which it has joined.
    joined: BTreeSet<u32>,
}

/// A change of the membership, as the hubs of a job hear of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MembershipChange {
    /// A rank is lost.
    Lose { rank: u32, epoch: u64, reason: String },
    /// A rank is lost, and all ranks go back to an earlier step. `None`: a hub is.
    Rewind { rank: Option<u32>, epoch: u64, reason: String },
    /// Another process takes a lost rank.
    Expect { rank: u32, epoch: u64 },
    /// That process contributes from this step on; `None` if it begins like the first ones.
    Join { rank: u32, epoch: u64, step: Option<u32> },
    /// All workers have left a hub, so that the job has finished at the others, too.
    Finish,
}

impl MembershipChange {
    /// The command for a hub of the job.
    pub(crate) fn command(&self, namespace: Namespace) -> HubCommand {
        match *self {
            MembershipChange::Lose { rank, epoch, ref reason } => {
                HubCommand::LoseRank { namespace, rank, epoch, reason: reason.clone() }
            }
            MembershipChange::Rewind { rank, epoch, ref reason } => {
                HubCommand::Rewind { namespace, rank, epoch, reason: reason.clone() }
            }
            MembershipChange::Finish => HubCommand::Finish { namespace },
            MembershipChange::Expect { rank, epoch } => HubCommand::ExpectRank { namespace, rank, epoch },
            MembershipChange::Join { rank, epoch, step } => {
                HubCommand::JoinRank { namespace, rank, epoch, step }
            }
        }
    }
}

impl Job {
    /// A hub has lost the process that has had a rank since this epoch, or knows since this epoch that it is lost. If the
    /// epoch is newer than what is known of the rank, a manager before this one has begun it and could not save that: the
    /// process that is known has gone.
    pub(crate) fn worker_lost(&mut self, (rank, epoch): (u32, u64), reason: &str, now: Now) -> Transition {
        let Some(holder) = self.assignments.holder(rank) else { return Transition::None };
        let is_forgotten = (1..=FORGOTTEN_EPOCHS_MAX).contains(&epoch.saturating_sub(holder.since));
        let is_current = holder.since == epoch && holder.standing != Standing::Lost;
        if !self.may_lose_ranks() || !is_forgotten && !is_current {
            return Transition::None;
        }
        if is_forgotten {
            // Hubs obey no epoch that they know already, and those of a job that goes back may have come further than
            // this manager knows.
            self.assignments.reach_epoch(epoch);
            self.rewind = None;
        }
        self.lose(rank, reason, now)
    }

    /// A hub has named the first step of the process that takes a rank since this epoch. If the epoch is newer than what is
    /// known of the rank, a manager before this one has let the process take it and could not save that.
    pub(crate) fn process_expected(
        &mut self,
        hub: u32,
        (rank, epoch): (u32, u64),
        step: Option<u32>,
        now: Now,
    ) -> Transition {
        if self.assignments.holder(rank).is_some_and(|holder| holder.since < epoch) {
            let reason = format!(
                "rank {rank} was lost: the connection manager has restarted, and does not know the process that was to take it"
            );
            return self.worker_lost((rank, epoch), &reason, now);
        }
        self.rank_expected(hub, (rank, epoch), step)
    }

    /// The process that has had a rank since this epoch has left a hub.
    pub(crate) fn worker_left(&mut self, (rank, epoch): (u32, u64)) {
        if self.assignments.holder(rank).is_some_and(|holder| holder.since == epoch) {
            self.assignments.finish(rank);
        }
    }

    /// The job has finished at a hub. The others wait for no process in the place of a lost one any more: one that was lost
    /// while it left has left that hub, and one that was about to take the rank of another came too late.
    pub(super) fn finish_elsewhere(&mut self) -> Transition {
        let mut holders = (0..self.workers).filter_map(|rank| self.assignments.holder(rank));
        let have_all_left =
            holders.all(|holder| holder.standing != Standing::Member || holder.has_finished());
        self.has_finished_at_a_hub |= self.may_lose_ranks() && have_all_left;
        if !self.has_finished_at_a_hub || self.lost_ranks().is_empty() {
            return Transition::None;
        }
        let message = "all workers have left one of its hubs, so it finishes at the others, too".into();
        let epoch = self.assignments.newest_epoch();
        Transition::MembershipChanged { changes: vec![MembershipChange::Finish], epoch, message }
    }

    /// Tells the hubs once more which ranks are lost, since one of them has reported the job to a manager that has
    /// restarted, and may not have heard what the earlier one had decided. Hubs that know it ignore it.
    pub(super) fn repeat_losses(&self) -> Transition {
        let changes: Vec<MembershipChange> = match self.options.rewinds() {
            true => self.changes_of_rewind(),
            false => {
                self.lost_after_start().into_iter().flat_map(|rank| self.changes_of_lost(rank)).collect()
            }
        };
        if changes.is_empty() {
            return Transition::None;
        }
        let message = list_ranks_with_verb(&self.lost_after_start(), "is lost", "are lost");
        Transition::MembershipChanged { changes, epoch: self.assignments.newest_epoch(), message }
    }

    /// What hubs must hear of a rank that is lost, and of the process that takes it if that has sent its settings.
    fn changes_of_lost(&self, rank: u32) -> Vec<MembershipChange> {
        let Some(holder) = self.assignments.holder(rank) else { return Vec::new() };
        // The epoch of a process that is joining begins after the loss.
        let lost_since = holder.since - u64::from(holder.standing == Standing::Joining);
        let reason = match holder.standing {
            Standing::Joining => format!("another process takes rank {rank}"),
            Standing::Lost | Standing::Member => format!("rank {rank} was lost"),
        };
        let lost = MembershipChange::Lose { rank, epoch: lost_since, reason };
        let joins = self.joins.contains_key(&rank);
        let expected = joins.then_some(MembershipChange::Expect { rank, epoch: holder.since });
        std::iter::once(lost).chain(expected).collect()
    }

    /// Another process that would have taken a rank will not come.
    pub(crate) fn rank_lost_again(&mut self, rank: u32, now: Now) -> Transition {
        let Some(holder) = self.assignments.holder(rank) else { return Transition::None };
        let reason = format!("rank {rank} was lost: {holder} did not join");
        self.lose(rank, &reason, now)
    }

    fn lose(&mut self, rank: u32, reason: &str, now: Now) -> Transition {
        if self.begins_again_without_ranks() {
            let (kind, message) = (CauseKind::PeerLost, reason.to_owned());
            return self.begin_again_or_fail(Cause { kind, rank: Some(rank), began: now, message }, now);
        }
        // A hub at which the job has finished cannot go back.
        if self.options.rewinds() && !self.has_finished_at_a_hub {
            return self.begin_rewind(rank, reason, now);
        }
        let epoch = self.assignments.begin_epoch();
        let Some(holder) = self.assignments.holder_mut(rank) else { return Transition::None };
        // A process that was to take a rank, and did not, had not become one of the job's workers.
        if holder.standing == Standing::Member {
            self.loss_tally.lost();
        }
        (holder.standing, holder.since) = (Standing::Lost, epoch);
        self.joins.remove(&rank);
        self.message = reason.to_owned();
        let present = self.note_presence(now);
        let least = self.least_workers();
        let then = match present < least {
            true => format!(
                "it waits {} s for other processes, since it goes on with {least} workers or more",
                self.options.linger_s
            ),
            false => format!("it goes on with {present} of its {} workers", self.workers),
        };
        let message = format!("{reason}; {then}");
        let mut changes = vec![MembershipChange::Lose { rank, epoch, reason: reason.to_owned() }];
        changes.extend(self.has_finished_at_a_hub.then_some(MembershipChange::Finish));
        Transition::MembershipChanged { changes, epoch, message }
    }

    /// Whether the job goes on when a rank is lost.
    pub(crate) fn may_lose_ranks(&self) -> bool {
        self.options.outlives_workers() && self.state == JobState::Running
    }

    /// Whether a process may take the rank of this one: it is lost, or it has left, or it was about to take the rank and
    /// has not been heard for a while. Launchers that start all ranks again also start those that have left; in a job that
    /// goes back these wait until another rank is lost, and all with it.
    pub(super) fn may_replace(&self, holder: &RankHolder, now: Now) -> bool {
        self.state == JobState::Running
            && match holder.standing {
                Standing::Member => holder.has_finished() && self.may_lose_ranks() && !self.options.rewinds(),
                Standing::Lost => true,
                Standing::Joining => holder.is_silent(COME_BACK_S, now) && !self.expects_all_ranks(),
            }
    }

    /// Gives a lost rank to the process that calls, which begins an epoch. Returns the call's ticket.
    pub(super) fn replace_rank(&mut self, call: &ConnectService, now: Now) -> Result<u64, ServiceError> {
        let rank = call.rank;
        if call.claim.is_none() {
            let message = format!(
                "rank {rank} of job `{}` was lost, and only a worker that claims it can take it: use this release of \
                 paramhub for the worker, too",
                self.name
            );
            return Err(refusal(ErrorCode::BadRequest, message));
        }
        if self.joins.contains_key(&rank) {
            let message = format!(
                "rank {rank} of job `{}` is being taken by another process, so {} cannot have it: start every rank once",
                self.name,
                describe_process(&call.host, call.process)
            );
            return Err(refusal(ErrorCode::Busy, message));
        }
        if self.assignments.holder(rank).is_some_and(|holder| holder.standing != Standing::Lost) {
            // The hubs expect the process that has gone, or know it as a member. To them it is lost in an epoch of its own.
            self.assignments.begin_epoch();
        }
        Ok(self.assignments.replace(call, now))
    }

    /// Whether the process that holds a rank takes it from one that was lost, and has not joined.
    pub(super) fn is_joining(&self, rank: u32) -> bool {
        self.assignments.holder(rank).is_some_and(|holder| holder.standing == Standing::Joining)
    }

    /// The step at which the process of a rank has joined the running job, if it has.
    pub(super) fn joined_at(&self, rank: u32) -> Option<u32> {
        self.assignments.holder(rank)?.joined_at
    }

    /// The settings of a process that takes a lost rank agree with the job's: its hubs are to expect it.
    pub(crate) fn join(&mut self, rank: u32) -> Transition {
        let may_join = self.is_joining(rank) && !self.is_failing();
        let Some(holder) = self.assignments.holder(rank).filter(|_| may_join) else {
            return Transition::None;
        };
        if self.options.rewinds() {
            return self.join_after_rewind(rank);
        }
        let (epoch, message) = (holder.since, format!("rank {rank} is taken by {holder}"));
        self.joins.insert(rank, PendingJoin::default());
        // A hub may not have heard of the loss from a manager that has restarted since.
        let changes = self.changes_of_lost(rank);
        Transition::MembershipChanged { changes, epoch, message }
    }

    /// A hub has named the first step to which the process that takes a rank may contribute.
    pub(crate) fn rank_expected(
        &mut self,
        hub: u32,
        (rank, epoch): (u32, u64),
        step: Option<u32>,
    ) -> Transition {
        let is_current = self.assignments.holder(rank).is_some_and(|holder| holder.since == epoch);
        let Some(join) = self.joins.get_mut(&rank).filter(|_| is_current) else { return Transition::None };
        join.named.insert(hub, step);
        let Some((change, message)) = self.join_if_named(rank) else { return Transition::None };
        Transition::MembershipChanged { changes: vec![change], epoch, message }
    }

    /// The process that takes a rank has joined at a hub. Its call is answered when it has at all.
    pub(crate) fn rank_joined(&mut self, hub: u32, (rank, epoch): (u32, u64), now: Now) -> Transition {
        let is_current = self.assignments.holder(rank).is_some_and(|holder| holder.since == epoch);
        let Some(join) = self.joins.get_mut(&rank).filter(|_| is_current) else { return Transition::None };
        join.joined.insert(hub);
        // The record, with a rank that is a member, is saved before the process hears of it.
        let Some(message) = self.end_join_if_joined(rank, now) else { return Transition::None };
        Transition::MembershipChanged { changes: Vec::new(), epoch, message }
    }

    /// A hub has no part in the job any more: processes that join wait for the others alone.
    pub(super) fn go_on_without_hub(&mut self, now: Now) -> Transition {
        let joining: Vec<u32> = self.joins.keys().copied().collect();
        let (mut changes, mut messages) = (Vec::new(), Vec::new());
        for rank in joining {
            if let Some(message) = self.end_join_if_joined(rank, now) {
                messages.push(message);
            } else if let Some((change, message)) = self.join_if_named(rank) {
                changes.push(change);
                messages.push(message);
            }
        }
        if messages.is_empty() {
            return Transition::None;
        }
        let (epoch, message) = (self.assignments.newest_epoch(), messages.join("; "));
        Transition::MembershipChanged { changes, epoch, message }
    }

    /// Chooses the step at which a process joins if every hub has named one. Returns what the hubs must hear, and what has
    /// happened.
    fn join_if_named(&mut self, rank: u32) -> Option<(MembershipChange, String)> {
        let join = self.joins.get(&rank)?;
        if !self.hubs_of_members().all(|hub| join.named.contains_key(&hub)) {
            return None;
        }
        let step = chosen_step(rank, join.named.values().copied(), self.options.rewinds());
        let holder = self.assignments.holder_mut(rank)?;
        holder.joined_at = step;
        let change = MembershipChange::Join { rank, epoch: holder.since, step };
        let message = match step {
            Some(step) => format!("rank {rank} joins at step {step}"),
            None => format!(
                "rank {rank} begins as at the start, since not all parameters to start from are there"
            ),
        };
        Some((change, message))
    }

    /// Makes a process that joins a member if it has joined at every hub, and returns what has happened.
    fn end_join_if_joined(&mut self, rank: u32, now: Now) -> Option<String> {
        let join = self.joins.get(&rank)?;
        if !self.hubs_of_members().all(|hub| join.joined.contains(&hub)) {
            return None;
        }
        self.joins.remove(&rank);
        let holder = self.assignments.holder_mut(rank)?;
        holder.standing = Standing::Member;
        let is_first = holder.is_first;
        self.loss_tally.joined();
        self.note_joined_after_rewind();
        let present = self.note_presence(now);
        self.message = match is_first {
            true => format!("rank {rank} has joined"),
            false => format!("rank {rank} is back: another process has it"),
        };
        let what = if is_first { "has joined" } else { "is back" };
        let workers = if self.options.rewinds() { self.current_workers } else { self.workers };
        Some(format!("rank {rank} {what}: {present} of {workers} workers"))
    }

    /// Takes for lost the processes that were to take a rank and have gone, and fails a job that has waited long enough
    /// for others.
    pub(super) fn check_ranks(&mut self, now: Now) -> Transition {
        let mut gone = self.assignments.joining_for(COME_BACK_S, now).into_iter();
        let asked = gone.find(|rank| self.joins.contains_key(rank) || self.expects_all_ranks());
        let never_asked =
            self.assignments.joining_for(self.options.rendezvous_timeout_s, now).first().copied();
        if let Some(rank) = asked.or(never_asked) {
            return self.rank_lost_again(rank, now);
        }
        if self.is_failing() {
            return self.check_pending_failure(now);
        }
        let present = if self.may_lose_ranks() { self.note_presence(now) } else { 0 };
        let linger_s = self.options.linger_s;
        match self.waits_since {
            Some(since) if now.seconds_since(since) >= linger_s => {
                let lost = list_ranks_with_verb(&self.lost_after_start(), "was lost", "were lost");
                let last = &self.message;
                let needed = match self.options.rewinds() {
                    true => "while the job goes on with all of its workers".to_owned(),
                    false if present >= self.least_workers() => {
                        "while no parameters can be updated without those that rank 0 had yet to send"
                            .to_owned()
                    }
                    false => format!(
                        "while the job goes on with {} workers or more (min_workers)",
                        self.options.min_workers
                    ),
                };
                let message = format!(
                    "{lost}, and no other process has come for {linger_s} s (linger_s), {needed}. The last loss: {last}"
                );
                self.fail_after_last_checkpoint(message, now)
            }
            _ => Transition::None,
        }
    }

    /// The refusal of a process that takes a lost rank with other settings than the job's.
    pub(crate) fn refuse_other_settings(&self, rank: u32) -> ServiceError {
        let message = format!(
            "rank {rank} of job `{}` cannot be taken: the settings of the process that came are not those on which the \
             ranks agreed when the job began (key table, optimizer, codecs)",
            self.name
        );
        refusal(ErrorCode::Disagreement, message)
    }

    /// The refusal of a process that has waited as long as it may to take a lost rank.
    pub(super) fn join_timed_out(&self, rank: u32) -> ServiceError {
        let (name, seconds) = (&self.name, self.options.join_timeout_s());
        let message = match self.rewind.as_ref().map(|_| self.ranks_without_process()) {
            Some(missing) if !missing.is_empty() => format!(
                "{} no process that has joined job `{name}` again within {seconds} s",
                list_ranks_with_verb(&missing, "has", "have")
            ),
            _ => format!(
                "the hubs of job `{name}` did not let rank {rank} join within {seconds} s: `paramhub hubs` shows whether they \
                 are heard"
            ),
        };
        refusal(ErrorCode::Missing, message)
    }

    /// The newest epoch of the job.
    pub(crate) fn newest_epoch(&self) -> u64 {
        self.assignments.newest_epoch()
    }

    /// The hubs that have chunks of the job and so know its members.
    pub(crate) fn hubs_of_members(&self) -> impl Iterator<Item = u32> + '_ {
        self.job_hubs.iter().filter(|job_hub| !job_hub.ended).map(|job_hub| job_hub.hub)
    }

    /// The ranks that are lost and that no process has taken, ascending.
    pub(super) fn lost_ranks(&self) -> Vec<u32> {
        let mut lost = self.assignments.standing(Standing::Lost);
        lost.extend(self.assignments.standing(Standing::Joining));
        lost.sort_unstable();
        lost
    }

    /// The least number of workers that make steps.
    fn least_workers(&self) -> u32 {
        self.options.least_workers(self.expected_workers()).unwrap_or(self.workers)
    }

    /// What the job has lost so far, if it goes on when a rank is lost.
    pub fn losses(&self, now: Now) -> Option<LossCounters> {
        self.options.outlives_workers().then(|| self.loss_tally.counters(now))
    }

    /// The number of workers without which the job counts as incomplete: that with which it begins or, if its ranks go back, of
    /// those that take part now.
    pub(super) fn expected_workers(&self) -> u32 {
        if self.options.rewinds() { self.current_workers } else { self.first_workers() }
    }

    /// The number of workers with which the job begins.
    pub(super) fn first_workers(&self) -> u32 {
        self.options.first_workers(self.workers)
    }

    /// The ranks that had a process and are lost, ascending.
    pub(super) fn lost_after_start(&self) -> Vec<u32> {
        let is_nobody = |rank| self.assignments.holder(rank).is_some_and(RankHolder::is_nobody);
        self.lost_ranks().into_iter().filter(|&rank| !is_nobody(rank) && self.takes_part(rank)).collect()
    }

    /// Notes since when there are fewer workers than at the beginning, or too few, if so, and returns how many there are. Before
    /// the first update those that are there may wait for what only a process of rank 0 can send, the parameters to start
    /// from.
    pub(super) fn note_presence(&mut self, now: Now) -> u32 {
        let present = self.assignments.standing(Standing::Member).len() as u32;
        self.loss_tally.note(present < self.expected_workers(), now);
        let awaits_rank_0 = self.counters().updates == 0 && self.lost_ranks().contains(&0);
        self.waits_since = match present < self.least_workers() || awaits_rank_0 {
            true => self.waits_since.or(Some(now)),
            false => None,
        };
        present
    }
}
