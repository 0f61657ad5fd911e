//! One job at a hub.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::JobTerms;
use super::awaited::Waits;
use super::further_shares::AllocatedFurther;
use super::notices::Announced;
use super::ranks::ChangedRanks;
use super::standbys::{LostCounterpart, LostWorker};
use crate::composition::Neighbour;
use crate::placement::RouteId;
use crate::service::{CauseKind, FurtherShares, JobCounters, JobEnd, JobPlan, add_by_rank};
use crate::standbys::Share;

/// The state of a job.
pub(super) struct Job {
    pub(super) terms: JobTerms,
    pub(super) phase: Phase,
    /// Whether all cores have allocated it.
    pub(super) has_opened: bool,
    /// Whether the streams to the sites above were ordered.
    pub(super) is_linked: bool,
    /// The routes and ports by which a neighbour has left.
    pub(super) left: BTreeSet<(RouteId, u32)>,
    /// The hubs of each share as the manager has decided last, and the number of that change.
    pub(super) shares: Vec<Share>,
    pub(super) shares_number: u32,
    /// The shares whose other hub is lost to this one.
    pub(super) lost_counterparts: BTreeMap<u16, LostCounterpart>,
    /// The further shares whose standby this hub may become.
    pub(super) further: Option<AllocatedFurther>,
    /// Further shares for which this hub was asked while cores freed others.
    pub(super) further_waits: Option<(Box<JobTerms>, FurtherShares)>,
    /// The number of routes that cores free while the job goes on.
    pub(super) routes_closing: usize,
    /// The routes whose new standby has all chunks.
    pub(super) copied: BTreeSet<RouteId>,
    /// The workers that are lost to this hub, each with the route of the stream that shows it, while it is not certain that the
    /// job goes on here.
    pub(super) lost_workers: BTreeMap<(RouteId, Neighbour), LostWorker>,
    /// When the job fails unless all workers have come to the routes that this hub serves instead of another.
    pub(super) awaits_workers_until: Option<Duration>,
    /// Whether it goes on at other hubs without this one.
    pub(super) is_retired: bool,
    /// The part of the job that this hub is to have once this one has ended: it becomes a standby.
    pub(super) next_part: Option<Box<JobPlan>>,
    /// The ranks that are lost, or were.
    pub(super) ranks: ChangedRanks,
    /// What has been reported of neighbours.
    pub(super) announced: Announced,
    /// The waits at routes.
    pub(super) waits: Waits,
    /// Whether a route has memory for snapshots.
    pub(super) has_snapshots: bool,
    /// Whether a thread writes its checkpoints.
    pub(super) writes_checkpoints: bool,
    /// Whether it has taken a last checkpoint while it goes on, after which it takes no others.
    pub(super) has_last_checkpoint: bool,
    /// The step with which the chunks began, if it is a checkpoint's.
    pub(super) resumed_step: Option<u32>,
    /// Why the job has failed, unless it finishes: its launcher has announced that it ends the workers.
    pub(super) announced_end: Option<String>,
    /// Set if the processes of its workers have ended, but not all streams of theirs.
    pub(super) concluding: Option<Concluding>,
    /// What its closed routes have counted.
    pub(super) counters: JobCounters,
    /// For each rank: the updates that left it out on routes that are closed.
    pub(super) left_out: Vec<u64>,
    /// Whether all workers have left another hub of the job.
    pub(super) has_finished_elsewhere: bool,
    /// In a job whose ranks go back: the number of those that take part, counted from rank 0, as far as this hub expects them.
    pub(super) current_workers: u32,
}

/// How far a job has come, in this order. A job can fail in each phase before `Ending`.
#[derive(Debug)]
pub(super) enum Phase {
    /// Its checkpoint is being read; after `until` the job is refused.
    Loading { until: Duration },
    /// It was refused because its checkpoint is still being read. Its memory counts until that has ended.
    Refused,
    /// Cores allocate; this many routes are not done.
    Opening { routes: usize },
    /// Streams connect; after `until` the missing ones are reported.
    Connecting { until: Duration },
    /// All streams are here.
    Running,
    /// Every neighbour has left, and the last checkpoint is being taken; after `until` the job fails.
    Finishing { until: Duration },
    /// Cores free their memory; this many routes are not done.
    Ending { routes: usize, end: JobEnd, since: Duration },
}

impl Phase {
    /// Whether it is decided that the job is over.
    pub(super) fn is_over(&self) -> bool {
        matches!(self, Phase::Refused | Phase::Ending { .. })
    }
}

/// The wait for the frames of workers whose processes have ended.
pub(super) struct Concluding {
    pub(super) since: Duration,
    pub(super) until: Duration,
    /// Why the job has failed if it has not finished by then.
    pub(super) reason: String,
}

impl Job {
    pub(super) fn new(terms: JobTerms) -> Job {
        // A hub that has joined later serves nothing at first. The streams to its own standbys are ordered one by one.
        let is_linked = usize::from(terms.hub) >= terms.composed.composition.hubs();
        let not_yet = terms.first_workers..terms.composed.composition.workers();
        Job {
            current_workers: terms.first_workers,
            ranks: ChangedRanks::without(not_yet, terms.epoch),
            phase: Phase::Opening { routes: terms.routes.len() },
            shares: terms.shares.clone(),
            shares_number: 0,
            lost_counterparts: BTreeMap::new(),
            further: None,
            further_waits: None,
            routes_closing: 0,
            copied: BTreeSet::new(),
            lost_workers: BTreeMap::new(),
            awaits_workers_until: None,
            is_retired: false,
            next_part: None,
            terms,
            has_opened: false,
            is_linked,
            left: BTreeSet::new(),
            announced: Announced::default(),
            waits: Waits::default(),
            has_snapshots: false,
            writes_checkpoints: false,
            has_last_checkpoint: false,
            resumed_step: None,
            announced_end: None,
            concluding: None,
            counters: JobCounters::default(),
            left_out: Vec::new(),
            has_finished_elsewhere: false,
        }
    }

    /// The name of a neighbour for people.
    pub(super) fn name_of(&self, neighbour: Neighbour) -> String {
        self.terms.composed.composition.name_of(neighbour)
    }

    pub(super) fn is_finishing(&self) -> bool {
        matches!(self.phase, Phase::Finishing { .. })
    }

    /// Whether it is decided that the job is over.
    pub(super) fn is_ending(&self) -> bool {
        self.phase.is_over()
    }

    /// Whether the job begins again from a checkpoint after its part here has ended for a reason of this kind.
    pub(super) fn begins_again_after(&self, cause: CauseKind) -> bool {
        let may = match cause {
            CauseKind::HubLost => true,
            CauseKind::PeerLost | CauseKind::GaveUp => self.terms.begins_again,
            CauseKind::Known | CauseKind::Hearsay => false,
        };
        may && self.outlives_hubs() && self.announced_end.is_none() && self.concluding.is_none()
    }

    /// Whether the job begins again from a checkpoint if a hub is lost.
    pub(super) fn outlives_hubs(&self) -> bool {
        // A hub below another site writes none.
        let has_checkpoints = self.terms.begins_again || self.terms.rewinds && self.writes_checkpoints;
        has_checkpoints && !self.is_finishing()
    }

    /// Whether the neighbour of a port has left by it on every route.
    pub(super) fn has_left(&self, port: u32) -> bool {
        self.left.iter().filter(|&&(_, of)| of == port).count() == self.terms.routes.len()
    }

    /// Whether every neighbour has left by every port, and this hub has left the sites above. Lost ranks need not
    /// have left if the job goes on without them, but one rank must have: a job of which all ranks are lost has not
    /// finished.
    pub(super) fn have_all_left(&self) -> bool {
        if !self.shares.is_empty() {
            return self.terms.routes.iter().all(|route| self.is_left(route));
        }
        let is_away = |&(_, port): &(RouteId, u32)| !self.ranks.is_lost(port);
        let left = self.left.iter().filter(|&port| is_away(port)).count() as u64;
        let lost = self.ranks.lost().count();
        let remain = self.terms.composed.composition.workers() - lost as u32;
        let least = if self.terms.rewinds { Some(self.current_workers) } else { self.terms.min_workers };
        let goes_on = left > 0 && least.is_none_or(|least| remain >= least);
        left + (lost * self.terms.routes.len()) as u64 == self.terms.streams()
            && (goes_on || self.has_finished_elsewhere)
    }

    /// Whether all workers are lost, so that no stream can bring anything more.
    pub(super) fn are_all_lost(&self) -> bool {
        self.ranks.lost().count() == self.terms.composed.composition.workers() as usize
    }

    /// Adds what a closed route has counted.
    pub(super) fn count(&mut self, counters: JobCounters, left_out: &[u64]) {
        self.counters += counters;
        add_by_rank(&mut self.left_out, left_out);
    }
}
