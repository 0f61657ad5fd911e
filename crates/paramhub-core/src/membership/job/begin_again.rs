//! Jobs that begin again from their newest checkpoint when a hub is lost, or in racks and hosts and with standbys a rank.
//!
//! A job whose ranks go back to an earlier step needs its hubs for that. If one is lost that has no standby, and they write
//! checkpoints, all ranks connect anew, in an epoch that begins with this. The job is then arranged for the hubs that are there, as
//! at the start, and they begin with the newest checkpoint that this job has written. Hubs that still have a part of it end that
//! first.
//!
//! Between hubs of several sites, and between hubs and their standbys, sums are under way that no hub could take back alone. So
//! such a job begins again when a rank is lost, too. Its hubs end their parts as soon as they lose a rank, at several sites also
//! when they lose one another, and the first report of that decides.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::cause::Cause;
use super::job_hubs::{JobHub, cause_of};
use super::losses::MembershipChange;
use super::{Job, JobPhase, LastContact, Transition};
use crate::auth::{Epoch, StreamSecret};
use crate::membership::Now;
use crate::service::{CauseKind, ErrorCode, JobEnd, JobState};

/// How often a job may begin again without having written a newer checkpoint. A rank or a hub that always fails at the same step
/// would have it do so for ever.
const FRUITLESS_MAX: u32 = 10;

/// What the job has gained by beginning again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Returns {
    /// The step of the checkpoint with which it has begun last, if it had one.
    newest: Option<u32>,
    /// How often it has begun again with that.
    fruitless: u32,
}

/// The processes that had the ranks before the job began again. Their calls are refused with the reason.
#[derive(Debug)]
pub(super) struct FormerMembers {
    epoch: Epoch,
    /// The epoch since which each rank had its process.
    since: BTreeMap<u32, u64>,
}

impl FormerMembers {
    /// The secret of the process that had a rank.
    pub(super) fn secret(&self, rank: u32) -> Option<StreamSecret> {
        self.since.get(&rank).map(|&since| self.epoch.of_rank(rank, since))
    }
}

impl Job {
    /// Whether the job has begun again since it was created.
    pub(super) fn has_begun_again(&self) -> bool {
        self.epoch.is_some_and(|epoch| epoch.begins_again())
    }

    /// Whether the job begins again when a rank is lost, since its hubs have streams among one another.
    pub(super) fn begins_again_without_ranks(&self) -> bool {
        self.options.outlives_hubs() && !self.options.keeps_copies(self.has_several_sites())
    }

    /// Whether the job may go on after its part at a hub has ended for a reason of this kind: the hub has lost a rank or another
    /// hub, or all that it had of the job.
    pub(super) fn may_outlive_end(&self, kind: CauseKind) -> bool {
        match kind {
            CauseKind::HubLost => self.options.outlives_hubs(),
            CauseKind::PeerLost | CauseKind::GaveUp => self.begins_again_without_ranks(),
            CauseKind::Known | CauseKind::Hearsay => false,
        }
    }

    /// A hub is lost, and its part of the job has ended: the job begins again from its newest checkpoint if it may, and
    /// otherwise fails.
    pub(super) fn begin_again_or_fail(&mut self, mut cause: Cause, now: Now) -> Transition {
        let Some(former) = self.epoch.filter(|_| self.may_begin_again()) else {
            return self.fail_because(ErrorCode::JobEnded, cause, now);
        };
        let newest = self.checkpoints().and_then(|written| written.step);
        match newest > self.returns.newest {
            true => self.returns = Returns { newest, fruitless: 0 },
            false => self.returns.fruitless += 1,
        }
        if self.returns.fruitless > FRUITLESS_MAX {
            cause.message.push_str(&format!(
                "; the job has begun again {FRUITLESS_MAX} times and has written no newer checkpoint since"
            ));
            return self.fail_because(ErrorCode::JobEnded, cause, now);
        }
        if cause.rank.is_some() {
            self.loss_tally.lost();
        }
        self.begin_again(former, &cause.message, now)
    }

    /// Whether ranks and hubs are still to come to a job that is about to end otherwise. One that begins again may do so once
    /// more before it runs.
    fn may_begin_again(&self) -> bool {
        let has_begun = match self.state {
            JobState::Running => true,
            JobState::Initialising => self.has_begun_again(),
            JobState::Connecting | JobState::Finished | JobState::Failed => false,
        };
        let has_finished = self.has_finished_at_a_hub || self.assignments.have_all_finished();
        let is_ending = self.announced.is_some() || self.concluding.is_some() || self.is_failing();
        self.options.outlives_hubs() && has_begun && !has_finished && !is_ending
    }

    /// The job is over at a hub that shuts down, which has taken a last checkpoint if the ranks were at one step.
    pub(crate) fn leaving_hub_ended(&mut self, hub: u32, end: &JobEnd, now: Now) -> Transition {
        let may_begin_again = self.may_begin_again() && !end.finished;
        match self.job_hubs.iter_mut().find(|job_hub| job_hub.hub == hub && !job_hub.ended) {
            Some(job_hub) if may_begin_again => {
                job_hub.ended = true;
                self.begin_again_or_fail(cause_of(end, now), now)
            }
            _ => self.hub_ended(hub, end, now),
        }
    }

    /// Ranks go back to an earlier step, for which every hub is needed, and one of them is gone: the job begins again without it.
    /// `last_contact` says what is known of a hub that is not forgotten.
    pub(crate) fn check_hubs_to_go_back(
        &mut self,
        last_contact: impl Fn(u32) -> Option<LastContact>,
        now: Now,
    ) -> Transition {
        if self.rewind.is_none() || !self.may_begin_again() {
            return Transition::None;
        }
        let is_quiet = |hub| last_contact(hub).is_some_and(|contact| contact.is_gone(now));
        let is_gone = |it: &&JobHub| !it.ended && (it.unheard.is_some() || is_quiet(it.hub));
        let Some(job_hub) = self.job_hubs.iter().find(is_gone) else { return Transition::None };
        let (gone, name) = (job_hub.hub, job_hub.describe());
        let message =
            format!("{name} was lost: the connection manager does not hear it, and the ranks go back");
        let began = last_contact(gone).map_or(now, |contact| contact.call);
        let cause = Cause { kind: CauseKind::HubLost, rank: None, began, message };
        self.go_on_without_unheard(gone, cause, now)
    }

    /// Begins again, or fails, without a hub that has not been forgotten, and gets no jobs before it calls again.
    pub(super) fn go_on_without_unheard(&mut self, gone: u32, cause: Cause, now: Now) -> Transition {
        let transition = self.begin_again_or_fail(cause, now);
        without_unheard(gone, transition)
    }

    /// A rank or a hub has gone before the job ran: the job fails, or begins again once more.
    pub(crate) fn fail_before_it_runs(&mut self, message: String, now: Now) -> Transition {
        self.begin_again_or_fail(Cause::known(message, now), now)
    }

    fn begin_again(&mut self, former: Epoch, reason: &str, now: Now) -> Transition {
        let since = self.assignments.held_since();
        self.former_members = Some(FormerMembers { epoch: former, since });
        self.had_linked_hubs = self.begins_again_without_ranks();
        let epoch = self.assignments.begin_epoch();
        self.epoch = Some(former.begin_again(epoch));
        (self.recorded_counters, self.recorded_left_out) = (self.counters(), self.left_out());
        self.recorded_checkpoints = self.checkpoints();
        // A hub without which the job has gone on may not have heard of that.
        let may_have_part =
            |job_hub: &&JobHub| job_hub.asked && (!job_hub.ended || job_hub.failed_standby.is_some());
        let hubs: BTreeSet<u32> =
            self.job_hubs.iter().filter(may_have_part).map(|job_hub| job_hub.hub).collect();
        self.former_hubs.extend(hubs.iter().map(|&hub| (hub, true)));
        let hubs: Vec<u32> = hubs.into_iter().collect();
        self.job_hubs.clear();
        self.forget_shares();
        (self.composition, self.information_book, self.proposed) = (None, None, None);
        self.placements.clear();
        self.agreed = false;
        self.joins.clear();
        (self.rewind, self.waits_since) = (None, None);
        if self.may_change_workers() {
            self.options.start_workers = Some(self.current_workers);
        }
        self.assignments.begin_again(self.first_workers(), epoch);
        (self.state, self.phase) = (JobState::Connecting, JobPhase::Connecting);
        self.lease.renew(now.monotonic);
        self.loss_tally.note(true, now);
        self.message = format!(
            "{reason}; all ranks go back to its newest checkpoint, and it waits {} s for them and for hubs",
            self.options.linger_s
        );
        let change = MembershipChange::Rewind { rank: None, epoch, reason: reason.to_owned() };
        let (reason, message) = (reason.to_owned(), self.message.clone());
        Transition::BeganAgain { hubs, lost: None, change, epoch, reason, message }
    }

    /// Whether the job has begun again and none of its ranks has come.
    pub(crate) fn is_deserted(&self) -> bool {
        let is_alone = self.waiting() == 0 && self.assignments.connected().is_empty();
        self.state == JobState::Connecting && self.has_begun_again() && is_alone
    }

    /// How long a rank waits in ConnectService for the others and for hubs, in seconds.
    pub(crate) fn connect_timeout_s(&self) -> f64 {
        match self.has_begun_again() {
            true => self.options.linger_s,
            false => self.options.rendezvous_timeout_s,
        }
    }

    /// Whether one of these hubs has a part of the job from before it began again.
    pub(super) fn awaits_former_part(&self, mut hubs: impl Iterator<Item = u32>) -> bool {
        hubs.any(|hub| self.former_hubs.contains_key(&hub))
    }

    /// A hub has reported a part that it has from before.
    pub(crate) fn former_part_reported(&mut self, hub: u32) {
        if !self.state.has_ended() {
            self.former_hubs.insert(hub, true);
        }
    }

    /// A hub reports how its part from before has ended. Hubs with streams among one another hear of one another's ends: one may
    /// have reported a loss that has followed from what this one can prove, and the job would fail for that again.
    pub(crate) fn former_part_ended(&mut self, end: &JobEnd, is_leaving: bool, now: Now) -> Transition {
        let is_proven = !end.finished && end.cause == CauseKind::Known && !is_leaving;
        match is_proven && self.had_linked_hubs && self.has_begun_again() && !self.state.has_ended() {
            true => self.fail_because(ErrorCode::JobEnded, cause_of(end, now), now),
            false => Transition::None,
        }
    }

    /// A hub has no part from before any more, or it is gone. Returns whether the job was still waiting for that.
    pub(crate) fn former_part_over(&mut self, hub: u32) -> bool {
        self.former_hubs.remove(&hub).is_some()
    }

    /// A hub has reported all jobs that it has. Returns whether it turns out to have no part from before.
    pub(crate) fn former_parts_reported(&mut self, hub: u32) -> bool {
        self.former_hubs.get(&hub) == Some(&false) && self.former_part_over(hub)
    }

    /// The hubs that may have a part from before the job began again.
    pub(crate) fn former_hubs(&self) -> Vec<u32> {
        self.former_hubs.keys().copied().collect()
    }
}

/// If the job begins again, it does so without this hub, which the manager does not hear. When the hub calls again, it is to end its
/// part first.
pub(super) fn without_unheard(gone: u32, transition: Transition) -> Transition {
    match transition {
        Transition::BeganAgain { hubs, change, epoch, reason, message, .. } => {
            Transition::BeganAgain { hubs, lost: Some(gone), change, epoch, reason, message }
        }
        other => other,
    }
}
