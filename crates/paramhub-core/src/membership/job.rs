//! One job from CreateService to its end: a state machine without clock, sockets or store.
//!
//! Events of a job come in as method calls. Their consequences for the rest of the manager go out as a
//! [`Transition`]. Calls that wait for the job are answered as its [`JobPhase`] advances.

mod arrangement;
mod begin_again;
#[cfg(test)]
mod begin_again_tests;
mod calls;
pub(crate) mod cause;
mod drain;
#[cfg(test)]
mod drain_tests;
mod ending;
#[cfg(test)]
mod ending_tests;
mod further_shares;
#[cfg(test)]
mod further_shares_tests;
mod information_book;
pub(crate) mod job_hubs;
mod loss_tally;
#[cfg(test)]
mod loss_tests;
mod losses;
mod moves;
#[cfg(test)]
mod moves_tests;
pub(super) mod new_standbys;
#[cfg(test)]
mod new_standbys_tests;
mod rank_assignments;
mod rank_texts;
mod record;
mod rendezvous;
#[cfg(test)]
mod restart_tests;
mod rewind;
#[cfg(test)]
mod rewind_tests;
mod silence;
#[cfg(test)]
mod standby_tests;
mod standbys;
#[cfg(test)]
pub(super) mod tests;
mod without_hubs;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::auth::{Epoch, Namespace, Nonce};
use crate::checkpoint::CheckpointStatus;
use crate::composition::{Composition, Place};
use crate::lease::Lease;
use crate::membership::{CallId, Now};
use crate::placement::{Imbalance, Placement};
use crate::scheme::InformationBook;
use crate::service::{
    CreateService, ErrorCode, JobCounters, JobOptions, JobState, JobStatus, ServiceError, StopWhen, refusal,
};
use crate::settings::Settings;
use crate::standbys::Share;
use begin_again::{FormerMembers, Returns};
pub(crate) use calls::JobCall;
use cause::Cause;
use ending::{PendingConclusion, PendingFailure};
use job_hubs::JobHub;
use loss_tally::LossTally;
pub(crate) use losses::MembershipChange;
use losses::PendingJoin;
use moves::MoveOrder;
use rank_assignments::RankAssignments;
pub use record::{JobRecord, MembersRecord};
pub(crate) use rendezvous::InitNext;
use rewind::Rewind;
pub(crate) use standbys::LastContact;
use standbys::SuspectedHub;

/// The time that a rank whose InitService connection broke may take to call again before the job fails.
pub(crate) const COME_BACK_S: f64 = 2.0;

/// The phase of a job, for calls that wait. The phases are ordered: a job never goes back, unless it begins again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum JobPhase {
    Connecting,
    Initialising,
    Running,
    /// The job is over, but a hub has yet to report that it has freed the job's memory.
    Ended,
    /// The job is over, and no hub holds anything of it.
    Cleared,
}

/// The consequences of an event for the rest of the manager.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Transition {
    /// Nothing, or nothing yet.
    None,
    /// The job's record has changed.
    Advanced,
    /// The job is over; these hubs must get the command to stop.
    Ended { stop: Vec<u32> },
    /// The membership has changed, and with it the job's record.
    MembershipChanged {
        /// What each hub that serves the job must hear, in this order.
        changes: Vec<MembershipChange>,
        /// The newest epoch.
        epoch: u64,
        /// What has happened, for the log.
        message: String,
    },
    /// Other hubs have the shares of the job, and with it the job's record has changed.
    SharesChanged {
        /// What has happened, for the log; `None` if the hubs are only to be told once more.
        message: Option<String>,
        /// A hub that is told later: another has just reported its loss, and the manager is about to learn whether it is there.
        /// The end of a call that waits for commands says so best.
        told_later: Option<u32>,
    },
    /// A hub was lost, and the job begins again from its newest checkpoint. Its record has changed.
    BeganAgain {
        /// The hubs that still have it, which must hear the change and then end the job.
        hubs: Vec<u32>,
        /// The hub that is lost, if it has not been forgotten yet. It gets no jobs before it calls.
        lost: Option<u32>,
        /// What these hubs must hear first.
        change: MembershipChange,
        /// The epoch that begins with this.
        epoch: u64,
        /// Why they end it.
        reason: String,
        /// What has happened, for the log.
        message: String,
    },
    /// These hubs must report how the job ends.
    AskHubs { hubs: Vec<u32>, reason: String, when: StopWhen },
    /// The job failed for another reason than the one recorded.
    Explained,
}

/// One job.
pub struct Job {
    /// The number of the job among all jobs ever created.
    pub order: u64,
    /// Its name, for people.
    pub name: String,
    /// Its identity everywhere.
    pub namespace: Namespace,
    /// Its secret.
    pub nonce: Nonce,
    /// Its epoch; `None` for a job of an earlier release, which has ended.
    pub epoch: Option<Epoch>,
    /// Its number of ranks.
    pub workers: u32,
    /// Its waits and lifetimes.
    pub options: JobOptions,
    state: JobState,
    message: String,
    created_at: u64,
    ended_at: Option<u64>,
    assignments: RankAssignments,
    /// The place of each rank.
    places: Vec<Place>,
    peer_addresses: Vec<Option<SocketAddr>>,
    /// The hubs that serve the job; empty while it is connecting.
    job_hubs: Vec<JobHub>,
    /// The hubs of each share, if the chunks have standbys; their positions are those in `job_hubs`.
    shares: Vec<Share>,
    /// The number of the last change of the shares, and why they have changed.
    shares_number: u32,
    shares_reason: String,
    /// Since when shares have had no standby.
    lacking_since: BTreeMap<u16, Now>,
    /// The hubs off which an operator has moved it, the newest order last.
    moves: Vec<MoveOrder>,
    /// The hubs that their standbys have lost, until it is known whether they are still there.
    suspected_hubs: Vec<SuspectedHub>,
    /// The hubs that may still have a part of the job from before it began again, and whether they have said so to this
    /// manager.
    former_hubs: BTreeMap<u32, bool>,
    former_members: Option<FormerMembers>,
    /// Whether the hubs of the job had streams among one another before it began again.
    had_linked_hubs: bool,
    /// How often it has begun again, and whether that was of use.
    returns: Returns,
    /// The sites of these hubs; `None` while the job is connecting.
    composition: Option<Arc<Composition>>,
    /// The way in which the sites reduce and why, for people.
    reduction: String,
    /// The counters of hubs for a job that ended under an earlier manager.
    recorded_counters: JobCounters,
    recorded_left_out: Vec<u64>,
    /// The checkpoints of a job that ended under an earlier manager.
    recorded_checkpoints: Option<CheckpointStatus>,
    /// The settings on which all ranks have agreed, in a job with standbys: a hub that becomes one later needs them.
    settings: Option<Arc<Settings>>,
    /// The first rank's settings, until every rank has agreed.
    proposed: Option<(u32, Arc<Settings>)>,
    /// `true` if every rank has agreed. The placement is then made or being made.
    agreed: bool,
    summary: SettingsSummary,
    /// The placement of every site; empty until it is made.
    placements: Vec<SitePlacement>,
    /// The information book; none until the placement is made.
    information_book: Option<Arc<InformationBook>>,
    /// The refusal for ranks that still wait or come late.
    failure: Option<ServiceError>,
    /// The reason why the job has failed, as long as a later report may change that.
    cause: Option<Cause>,
    /// The reason why the job will have failed if it does not finish.
    announced: Option<Cause>,
    concluding: Option<PendingConclusion>,
    /// Set while it waits for a last checkpoint, after which it fails for want of workers.
    pending_failure: Option<PendingFailure>,
    /// The processes that join, by rank.
    joins: BTreeMap<u32, PendingJoin>,
    /// Set while ranks are missing because all go back to an earlier step.
    rewind: Option<Rewind>,
    /// In a job whose ranks go back: the number of those that take part, counted from rank 0.
    current_workers: u32,
    /// The workers that the job has lost.
    loss_tally: LossTally,
    /// Since when the job has had fewer workers than it goes on with.
    waits_since: Option<Now>,
    /// Whether all workers of a job that may lose some have left one of its hubs.
    has_finished_at_a_hub: bool,
    /// The calls that wait for the job.
    calls: BTreeMap<CallId, JobCall>,
    lease: Lease,
    phase: JobPhase,
}

/// A site's placement, in the form in which ranks and hubs compare it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SitePlacement {
    /// Its digest, in hexadecimal digits.
    pub hash: String,
    /// Its imbalance.
    pub imbalance: Imbalance,
    /// The hubs that have no chunks, by their positions; those of several sites are not listed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub empty_hubs: Vec<u16>,
}

impl SitePlacement {
    /// What is kept of a placement.
    pub fn of(placement: &Placement) -> SitePlacement {
        SitePlacement {
            hash: placement.hash().to_hex().to_string(),
            imbalance: placement.imbalance(),
            empty_hubs: placement.empty_hubs(),
        }
    }
}

/// The part of a job's settings that listings show.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SettingsSummary {
    /// Keys in the table.
    pub keys: u64,
    /// Bytes of one worker's gradients.
    pub bytes: u64,
    /// The optimizer's name.
    pub optimizer: String,
    /// The consistency.
    pub consistency: String,
    /// The digest of the settings, with which a process that takes a lost rank compares its own. Listings do not show
    /// it.
    pub digest: String,
}

impl Job {
    /// A job that no rank has joined yet, in its first epoch.
    pub fn new(
        order: u64,
        request: CreateService,
        namespace: Namespace,
        nonce: Nonce,
        epoch: Option<Epoch>,
        now: Now,
    ) -> Self {
        Job {
            order,
            namespace,
            nonce,
            epoch,
            assignments: RankAssignments::new(
                request.workers,
                request.options.first_workers(request.workers),
                epoch.map_or(Epoch::FIRST, |epoch| epoch.number),
            ),
            current_workers: request.options.first_workers(request.workers),
            name: request.name,
            workers: request.workers,
            options: request.options,
            state: JobState::Connecting,
            message: String::new(),
            created_at: now.unix_s,
            ended_at: None,
            places: vec![Place::default(); request.workers as usize],
            peer_addresses: vec![None; request.workers as usize],
            job_hubs: Vec::new(),
            shares: Vec::new(),
            shares_number: 0,
            shares_reason: String::new(),
            lacking_since: BTreeMap::new(),
            moves: Vec::new(),
            suspected_hubs: Vec::new(),
            former_hubs: BTreeMap::new(),
            former_members: None,
            had_linked_hubs: false,
            returns: Returns::default(),
            composition: None,
            reduction: String::new(),
            recorded_counters: JobCounters::default(),
            recorded_left_out: Vec::new(),
            recorded_checkpoints: None,
            settings: None,
            proposed: None,
            agreed: false,
            summary: SettingsSummary::default(),
            placements: Vec::new(),
            information_book: None,
            failure: None,
            cause: None,
            announced: None,
            concluding: None,
            pending_failure: None,
            joins: BTreeMap::new(),
            rewind: None,
            loss_tally: LossTally::default(),
            waits_since: None,
            has_finished_at_a_hub: false,
            calls: BTreeMap::new(),
            lease: Lease::new(request.options.lease_s, now.monotonic),
            phase: JobPhase::Connecting,
        }
    }

    /// The job's sites, once every rank has connected.
    pub fn composition(&self) -> Option<Arc<Composition>> {
        self.composition.clone()
    }

    /// Returns whether the job's hubs have streams among one another.
    pub(crate) fn has_several_sites(&self) -> bool {
        self.composition.as_ref().is_some_and(|composition| !composition.is_flat())
    }

    /// Returns whether hubs are told when all of them have allocated.
    pub(crate) fn is_linked(&self) -> bool {
        self.has_several_sites() || self.options.outlives_workers() || self.options.has_standbys()
    }

    /// Returns the reason why the job has failed, or the newest notice while it runs.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Returns the way in which the sites reduce and why; empty before the hubs are chosen.
    pub(crate) fn reduction(&self) -> &str {
        &self.reduction
    }

    /// The place of each rank.
    pub(crate) fn places(&self) -> &[Place] {
        &self.places
    }

    /// Returns the phase of the job.
    pub fn state(&self) -> JobState {
        self.state
    }

    /// Fails a job that waits for ranks that will not come: its lease ran out, or a rank did not call again.
    pub(crate) fn check_time(&mut self, now: Now) -> Transition {
        let is_served = self.state == JobState::Running && !self.is_rendezvous_only();
        if is_served || self.state.has_ended() {
            return match self.check_conclusion(now) {
                Transition::None if is_served => self.check_ranks(now),
                transition => transition,
            };
        }
        if let Some((rank, holder)) = self.assignments.come_back_expired(now) {
            let message = format!("rank {rank} ({holder}) was lost before the job ran");
            return self.fail_before_it_runs(message, now);
        }
        if self.lease.has_expired(self.waiting(), now.monotonic) {
            let lease_s = self.options.lease_s;
            let message = format!("its lease of {lease_s} s ran out: no worker has been heard for that long");
            return self.fail(ErrorCode::JobEnded, message, now);
        }
        Transition::None
    }

    /// The refusal of a call to a job that is over. Its code is always `JobEnded`, and its message says why
    /// the job has ended.
    pub(crate) fn ended_refusal(&self) -> ServiceError {
        let message = match (self.state, self.message.is_empty()) {
            (JobState::Finished, _) => format!("job `{}` has finished", self.name),
            (_, true) => format!("job `{}` has ended", self.name),
            (_, false) => format!("job `{}` has ended: {}", self.name, self.message),
        };
        refusal(ErrorCode::JobEnded, message)
    }

    /// The refusal of a rank that waited when the job failed, or that hands in its settings after that: the
    /// failure itself, if its code is another than `JobEnded`, else [`ended_refusal`](Self::ended_refusal).
    fn failure_refusal(&self) -> ServiceError {
        match &self.failure {
            Some(failure) if failure.code != ErrorCode::JobEnded => failure.clone(),
            _ => self.ended_refusal(),
        }
    }

    /// The job as listings show it.
    pub fn status(&self, now: Now) -> JobStatus {
        JobStatus {
            name: self.name.clone(),
            namespace: self.namespace,
            state: self.state,
            message: self.message.clone(),
            workers: self.workers,
            start_workers: self.options.start_workers,
            current_workers: self.may_change_workers().then_some(self.current_workers),
            connected: self.assignments.connected(),
            lost: self.lost_after_start(),
            epoch: self.assignments.newest_epoch(),
            keys: self.summary.keys,
            bytes: self.summary.bytes,
            optimizer: self.summary.optimizer.clone(),
            consistency: self.summary.consistency.clone(),
            options: self.options.to_string(),
            reduction: self.reduction.clone(),
            counters: self.counters(),
            left_out: self.left_out(),
            losses: self.losses(now),
            standbys: self.standby_counts(),
            awaited: self.awaited(now),
            checkpoints: self.checkpoints(),
            created_at: self.created_at,
            ended_at: self.ended_at,
        }
    }
}

fn join_words(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [only] => only.clone(),
        [most @ .., last] => format!("{} and {last}", most.join(", ")),
    }
}
