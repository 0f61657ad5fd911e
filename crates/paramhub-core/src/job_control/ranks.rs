//! Workers that are lost while their job goes on, and the processes that take their ranks.
//!
//! A hub that loses a worker reports it, and the manager decides: it begins a new epoch without the rank, and all
//! hubs of the job [lose](JobControl::lose_rank) the rank then. So all hubs have the same members. A process that
//! takes the rank begins another epoch. Every hub [expects](JobControl::expect_rank) it and names the first step to
//! which it may contribute there. The manager chooses the latest of them, and every hub lets the rank
//! [join](JobControl::join_rank) at it. Only then does the process get its answer from the manager and open its
//! streams.
//!
//! In a job whose ranks go back to an earlier step, the manager [rewinds](JobControl::rewind) all of them when one is lost,
//! and expects the processes of all together. Every hub then names the newest step to which it can go back, and the manager
//! chooses the earliest of them. If a chunk has no parameters to start from yet, there is none, and the ranks begin anew.
//!
//! Commands can come twice: epochs only grow, and a command of an epoch that is over changes nothing.
//!
//! Such a job has one site, so that a worker's port on each route is its rank.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use super::job::Phase;
use super::{AdmittedStreams, JobControl, Output, RankChange};
use crate::auth::Namespace;
use crate::composition::Neighbour;
use crate::service::{CauseKind, HubEvent};
use crate::wire::Notice;

/// The ranks of a job whose process is lost, or is not the one with which the job began.
#[derive(Debug, Default)]
pub(super) struct ChangedRanks(BTreeMap<u32, ChangedRank>);

#[derive(Debug)]
struct ChangedRank {
    /// The epoch since which the rank is lost or has its process.
    epoch: u64,
    phase: RankPhase,
    /// Whether a process has contributed in the rank's name.
    has_begun: bool,
}

/// How far a rank has come, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RankPhase {
    /// Its worker is lost to this hub, for this reason, and the manager has not decided yet. `is_late` if it is one of the first
    /// workers, and did not open its streams in time.
    Reported { reason: String, is_late: bool },
    /// It is lost.
    Lost,
    /// Another process takes it. This many cores have not named their step; the others have `named` theirs.
    Expected { cores: usize, named: Vec<Option<u32>> },
    /// All cores have named their steps. This is the latest of them or, in a job that goes back, the earliest; `None` is
    /// earlier than any step.
    Named { step: Option<u32> },
    /// The process joins at `step`, which this many cores do not have yet.
    Joining { cores: usize, step: Option<u32> },
    /// The process is to open its streams; after `until` it counts as lost.
    Connecting { until: Duration, step: Option<u32> },
    /// All streams of the process are here. It joined at `step`.
    Present { step: Option<u32> },
}

impl ChangedRanks {
    /// The ranks of a job that begins, in this epoch, without `ranks`: these are lost until a process takes them.
    pub(super) fn without(ranks: Range<u32>, epoch: u64) -> ChangedRanks {
        let changed = |rank| (rank, ChangedRank { epoch, phase: RankPhase::Lost, has_begun: false });
        ChangedRanks(ranks.map(changed).collect())
    }

    /// Whether a rank is lost and the process that takes it, if any, has not joined.
    pub(super) fn is_lost(&self, rank: u32) -> bool {
        self.0.get(&rank).is_some_and(|changed| changed.is_lost())
    }

    /// The ranks that are lost, ascending.
    pub(super) fn lost(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().filter(|(_, changed)| changed.is_lost()).map(|(&rank, _)| rank)
    }

    /// The lowest rank that is not lost, as far as there is one.
    pub(super) fn first_present(&self) -> u32 {
        (0..).find(|&rank| !self.is_lost(rank)).unwrap_or(0)
    }

    /// The rank if this is its epoch.
    fn of_epoch(&mut self, rank: u32, epoch: u64) -> Option<&mut RankPhase> {
        let changed = self.0.get_mut(&rank)?;
        (changed.epoch == epoch).then_some(&mut changed.phase)
    }

    fn begin(&mut self, rank: u32, epoch: u64, phase: RankPhase) {
        let has_begun = self.0.get(&rank).is_none_or(|changed| changed.has_begun);
        self.0.insert(rank, ChangedRank { epoch, phase, has_begun });
    }
}

impl RankPhase {
    /// The step at which the rank joins or has joined, if this hub has named one, or that there is none.
    fn step(&self) -> Option<Option<u32>> {
        match *self {
            RankPhase::Reported { .. } | RankPhase::Lost | RankPhase::Expected { .. } => None,
            RankPhase::Named { step }
            | RankPhase::Joining { step, .. }
            | RankPhase::Connecting { step, .. }
            | RankPhase::Present { step } => Some(step),
        }
    }
}

impl ChangedRank {
    fn is_lost(&self) -> bool {
        use RankPhase::{Connecting, Expected, Joining, Lost, Named, Present, Reported};
        match self.phase {
            Reported { .. } | Connecting { .. } | Present { .. } => false,
            Lost | Expected { .. } | Named { .. } | Joining { .. } => true,
        }
    }
}

impl JobControl {
    /// Whether a job goes on if one of its workers is lost for a reason of this kind. A worker that breaks the rules
    /// ends the job: another process would break them as well.
    pub(super) fn may_lose(&self, namespace: Namespace, cause: CauseKind) -> bool {
        let is_loss = matches!(cause, CauseKind::PeerLost | CauseKind::GaveUp);
        let runs = |phase: &Phase| matches!(phase, Phase::Connecting { .. } | Phase::Running);
        let may = |job: &super::Job| {
            job.terms.min_workers.is_some() && runs(&job.phase) && job.announced_end.is_none()
        };
        is_loss && self.jobs.get(&namespace).is_some_and(may)
    }

    /// Reports that a worker is lost to this hub. The manager decides what follows.
    pub(super) fn worker_lost(&mut self, namespace: Namespace, rank: u32, reason: String) {
        self.report_lost(namespace, rank, reason, false);
    }

    /// Reports that one of the first workers has not opened its streams in time, and counts as lost.
    pub(super) fn worker_late(&mut self, namespace: Namespace, rank: u32, reason: String) {
        self.report_lost(namespace, rank, reason, true);
    }

    fn report_lost(&mut self, namespace: Namespace, rank: u32, reason: String, is_late: bool) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let (epoch, is_first) = match job.ranks.0.get(&rank) {
            None => (job.terms.epoch, true),
            Some(changed)
                if matches!(changed.phase, RankPhase::Connecting { .. } | RankPhase::Present { .. }) =>
            {
                (changed.epoch, false)
            }
            // It is known.
            Some(_) => return,
        };
        let phase = RankPhase::Reported { reason: reason.clone(), is_late: is_late && is_first };
        job.ranks.begin(rank, epoch, phase);
        self.warn(format!("job `{}`: {reason}", self.jobs[&namespace].terms.name));
        self.report(HubEvent::WorkerLost { namespace, rank, epoch, reason });
    }

    /// The manager lets the job run, perhaps once more, since it has restarted and did not know that it ran. It has ignored what
    /// it has heard of lost workers meanwhile. Those that have not come get their answers only now.
    pub(super) fn wait_for_workers_again(&mut self, namespace: Namespace) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let is_late =
            |changed: &ChangedRank| matches!(changed.phase, RankPhase::Reported { is_late: true, .. });
        job.ranks.0.retain(|_, changed| !is_late(changed));
        self.report_lost_workers_again(namespace);
    }

    /// Reports that a worker has left this hub, in a job whose ranks other processes may take.
    pub(super) fn worker_left(&mut self, namespace: Namespace, rank: u32) {
        let Some(job) = self.jobs.get(&namespace).filter(|job| job.terms.min_workers.is_some()) else {
            return;
        };
        let epoch = job.ranks.0.get(&rank).map_or(job.terms.epoch, |changed| changed.epoch);
        self.report(HubEvent::WorkerLeft { namespace, rank, epoch });
    }

    /// Reports once more who is lost, and who has left: the manager has restarted, and may not have had the report. The one before
    /// it may also have decided so and not saved that, if its disk was full.
    pub(super) fn report_lost_workers_again(&mut self, namespace: Namespace) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        let reported = job.ranks.0.iter().filter_map(|(&rank, changed)| match &changed.phase {
            RankPhase::Reported { reason, .. } => {
                Some(HubEvent::WorkerLost { namespace, rank, epoch: changed.epoch, reason: reason.clone() })
            }
            RankPhase::Lost => {
                let reason = format!("rank {rank} was lost");
                Some(HubEvent::WorkerLost { namespace, rank, epoch: changed.epoch, reason })
            }
            RankPhase::Named { step } => {
                Some(HubEvent::RankExpected { namespace, rank, epoch: changed.epoch, step: *step })
            }
            _ => None,
        });
        let again: Vec<HubEvent> = reported.collect();
        again.into_iter().for_each(|event| self.report(event));
        let ranks = 0..self.jobs[&namespace].terms.composed.composition.workers();
        let left: Vec<u32> = ranks.filter(|&rank| self.jobs[&namespace].has_left(rank)).collect();
        left.into_iter().for_each(|rank| self.worker_left(namespace, rank));
    }

    /// The manager has decided that a rank is lost, since an epoch that begins with it.
    pub(super) fn lose_rank(
        &mut self,
        namespace: Namespace,
        (rank, epoch): (u32, u64),
        reason: &str,
        now: Duration,
    ) {
        let Some(job) = self.jobs.get_mut(&namespace).filter(|job| !job.is_ending()) else { return };
        if job.ranks.0.get(&rank).map_or(job.terms.epoch, |changed| changed.epoch) >= epoch {
            return;
        }
        // A process that would have taken the rank has gone before this hub has heard of it.
        if let Some(lost) = job.ranks.0.get_mut(&rank).filter(|changed| changed.phase == RankPhase::Lost) {
            lost.epoch = epoch;
            return;
        }
        job.ranks.begin(rank, epoch, RankPhase::Lost);
        let workers = job.terms.composed.composition.workers();
        let left = workers - job.ranks.lost().count() as u32;
        let least = job.terms.min_workers.unwrap_or(workers);
        let message = match left < least {
            true => format!(
                "job `{}` waits: {reason}. It has {left} of its {workers} workers, and goes on with {least} or more",
                job.terms.name
            ),
            false => {
                format!("job `{}` goes on with {left} of its {workers} workers: {reason}", job.terms.name)
            }
        };
        self.outputs.push(Output::RefuseRank { namespace, rank, epoch });
        self.change_rank(namespace, (rank, epoch), RankChange::Lose);
        self.notify_all(namespace, Some(rank), &message);
        self.finish_if_all_left(namespace, now);
    }

    /// The manager has decided that a rank is lost, and that all ranks go back to an earlier step: every rank is lost, since
    /// an epoch that begins with this.
    pub(super) fn rewind(
        &mut self,
        namespace: Namespace,
        (lost, epoch): (Option<u32>, u64),
        reason: &str,
        now: Duration,
    ) {
        if self.jobs.get(&namespace).is_some_and(|job| job.terms.begins_again) {
            return self.send_back(namespace, reason);
        }
        let Some(job) = self.jobs.get_mut(&namespace).filter(|job| !job.is_ending()) else { return };
        let begun = job.terms.epoch;
        let workers = job.terms.composed.composition.workers();
        let of_rank = |ranks: &ChangedRanks, rank| ranks.0.get(&rank).map_or(begun, |changed| changed.epoch);
        if (0..workers).all(|rank| of_rank(&job.ranks, rank) >= epoch) {
            return;
        }
        for rank in 0..workers {
            job.ranks.begin(rank, epoch, RankPhase::Lost);
            self.outputs.push(Output::RefuseRank { namespace, rank, epoch });
        }
        job.left.clear();
        job.current_workers = 0;
        let name = &job.terms.name;
        let message = format!(
            "job `{name}` goes back to an earlier step: {reason}. It goes on when each of its ranks has a process again"
        );
        let notice = Notice { rank: lost, message: message.clone() };
        let cores = job.terms.cores();
        self.warn(message);
        let command = |core| Output::Rewind { namespace, core, epoch, notice: notice.clone() };
        self.outputs.extend(cores.into_iter().map(command));
        // All workers may have left another hub, so that nobody comes any more.
        self.finish_if_all_left(namespace, now);
    }

    /// Another process takes a lost rank, in an epoch that begins with it.
    pub(super) fn expect_rank(&mut self, namespace: Namespace, (rank, epoch): (u32, u64), now: Duration) {
        let Some(job) = self.jobs.get_mut(&namespace).filter(|job| !job.is_ending()) else { return };
        let cores = job.terms.cores().len();
        let Some(changed) = job.ranks.0.get(&rank) else { return };
        if changed.epoch < epoch && changed.phase == RankPhase::Lost {
            job.current_workers = job.current_workers.max(rank + 1);
            job.ranks.begin(rank, epoch, RankPhase::Expected { cores, named: Vec::new() });
            return self.change_rank(namespace, (rank, epoch), RankChange::Expect);
        }
        // The command comes again: the manager has restarted since the first.
        if changed.epoch == epoch
            && let Some(step) = changed.phase.step()
        {
            self.renew_opening(namespace, (rank, epoch), now);
            self.report(HubEvent::RankExpected { namespace, rank, epoch, step });
        }
    }

    /// A core has named the first step to which the process that takes a rank may contribute.
    pub(super) fn rank_expected(
        &mut self,
        namespace: Namespace,
        (rank, epoch): (u32, u64),
        step: Option<u32>,
    ) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let rewinds = job.terms.rewinds;
        let Some(phase) = job.ranks.of_epoch(rank, epoch) else { return };
        let RankPhase::Expected { cores, named } = phase else { return };
        *cores -= 1;
        named.push(step);
        if *cores == 0 {
            let step = chosen_step(rank, named.iter().copied(), rewinds);
            *phase = RankPhase::Named { step };
            self.report(HubEvent::RankExpected { namespace, rank, epoch, step });
        }
    }

    /// The process that takes a rank contributes from `step` on.
    pub(super) fn join_rank(
        &mut self,
        namespace: Namespace,
        (rank, epoch): (u32, u64),
        step: Option<u32>,
        now: Duration,
    ) {
        let Some(job) = self.jobs.get_mut(&namespace).filter(|job| !job.is_ending()) else { return };
        let cores = job.terms.cores().len();
        let Some(phase) = job.ranks.of_epoch(rank, epoch) else { return };
        match phase {
            RankPhase::Named { .. } => {
                *phase = RankPhase::Joining { cores, step };
                self.change_rank(namespace, (rank, epoch), RankChange::Join { step });
            }
            // The command comes again: the manager has restarted since the first.
            RankPhase::Connecting { .. } | RankPhase::Present { .. } => {
                self.renew_opening(namespace, (rank, epoch), now);
                self.report(HubEvent::RankJoined { namespace, rank, epoch });
            }
            _ => {}
        }
    }

    /// A manager that has restarted answers a process that has joined later: the time in which that must open its streams
    /// begins anew.
    fn renew_opening(&mut self, namespace: Namespace, (rank, epoch): (u32, u64), now: Duration) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let renewed = now.saturating_add(job.terms.opening());
        if let Some(RankPhase::Connecting { until, .. }) = job.ranks.of_epoch(rank, epoch) {
            *until = renewed;
        }
    }

    /// All chunks of a core have the step at which a rank joins. When all cores have it, the streams of its process
    /// are admitted.
    pub(super) fn rank_joined(&mut self, namespace: Namespace, (rank, epoch): (u32, u64), now: Duration) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let until = now.saturating_add(job.terms.opening());
        let Some(changed) = job.ranks.0.get_mut(&rank).filter(|changed| changed.epoch == epoch) else {
            return;
        };
        let RankPhase::Joining { cores, step } = &mut changed.phase else { return };
        *cores -= 1;
        if *cores > 0 {
            return;
        }
        let step = *step;
        changed.phase = RankPhase::Connecting { until, step };
        let is_first = !std::mem::replace(&mut changed.has_begun, true);
        job.left.retain(|&(_, port)| port != rank);
        let name = job.terms.name.clone();
        let message = match (is_first, step) {
            (true, Some(step)) => format!("rank {rank} of job `{name}` has joined, at step {step}"),
            (true, None) => format!("rank {rank} of job `{name}` has joined"),
            (false, _) => format!("rank {rank} of job `{name}` is back: another process has it"),
        };
        self.outputs.push(Output::AdmitRank { namespace, rank, epoch });
        self.report(HubEvent::RankJoined { namespace, rank, epoch });
        self.notify_all(namespace, Some(rank), &message);
    }

    /// Takes for lost the processes that have joined and do not open their streams in time. They do so when the manager has
    /// answered them.
    pub(super) fn check_joining(&mut self, now: Duration, streams: &impl AdmittedStreams) {
        let mut late = Vec::new();
        let is_manager_away = self.manager_lost.is_some();
        for (&namespace, job) in &mut self.jobs {
            let is_connecting = |changed: &ChangedRank| matches!(changed.phase, RankPhase::Connecting { .. });
            if !job.ranks.0.values().any(is_connecting) {
                continue;
            }
            let missing = streams.missing(namespace);
            let opening = job.terms.opening();
            for (&rank, changed) in &mut job.ranks.0 {
                let RankPhase::Connecting { until, step } = &mut changed.phase else { continue };
                if is_manager_away {
                    *until = (*until).max(now.saturating_add(opening));
                }
                if !missing.contains(&Neighbour::Worker(rank)) {
                    changed.phase = RankPhase::Present { step: *step };
                } else if now >= *until {
                    late.push((namespace, rank, opening));
                }
            }
        }
        for (namespace, rank, limit) in late {
            let seconds = limit.as_secs_f64();
            let reason = format!(
                "rank {rank} was lost: it has joined, and did not open all streams within {seconds:.0} s"
            );
            self.worker_lost(namespace, rank, reason);
        }
    }

    fn change_rank(&mut self, namespace: Namespace, (rank, epoch): (u32, u64), change: RankChange) {
        let cores = self.jobs[&namespace].terms.cores();
        let command = |core| Output::ChangeRank { namespace, core, rank, epoch, change };
        self.outputs.extend(cores.into_iter().map(command));
    }
}

/// The step at which a process takes a rank, of those that cores or hubs have named: the latest or, in a job that goes back,
/// the earliest. They name `None` where parameters to start from are missing. If one of them does, a process of rank 0 begins
/// like the first ones, for which this returns `None`, and so do all in a job that goes back. Another process does so only if
/// all of them name `None`: rank 0 may have sent the rest since one of them has answered, and have gone on at others.
pub fn chosen_step(rank: u32, named: impl Iterator<Item = Option<u32>>, rewinds: bool) -> Option<u32> {
    let named: Vec<Option<u32>> = named.collect();
    let are_missing = match rewinds || rank == 0 {
        true => named.contains(&None),
        false => !named.is_empty() && named.iter().all(Option::is_none),
    };
    let steps = named.into_iter().flatten();
    let chosen = if rewinds { steps.min() } else { steps.max() };
    (!are_missing).then(|| chosen.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_begins_like_the_first_ones_where_rank_0_may_not_have_gone_on() {
        let chosen = |rank, named: &[Option<u32>]| chosen_step(rank, named.iter().copied(), false);
        for rank in [0, 1] {
            assert_eq!(chosen(rank, &[Some(2), Some(3)]), Some(3));
            assert_eq!(chosen(rank, &[None, None]), None);
            assert_eq!(chosen(rank, &[]), Some(0), "a hub without chunks");
        }
        assert_eq!(chosen(0, &[None, Some(0)]), None, "it sends what is missing");
        assert_eq!(chosen(1, &[None, Some(1)]), Some(1), "rank 0 has gone on since the first has answered");
        let chosen = |named: &[Option<u32>]| chosen_step(1, named.iter().copied(), true);
        assert_eq!((chosen(&[Some(2), Some(3)]), chosen(&[None, Some(3)])), (Some(2), None));
    }
}
