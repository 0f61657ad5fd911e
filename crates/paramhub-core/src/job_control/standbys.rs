//! Hubs that are lost while their job goes on at their [standbys](crate::standbys).
//!
//! A hub that loses the other hub of a share reports it, and the manager decides: it changes the shares, and every hub of the
//! job [takes](JobControl::change_shares) its new roles. Until then a hub that serves answers nobody, since its standby
//! acknowledges nothing. If the decision takes longer than a moment, it closes the streams of its workers: the manager may
//! have decided for the standby, and be out of this hub's reach. The workers then ask the standby, and this hub, again and
//! again.
//!
//! Such a job has one site, so that a worker's port on each route is its rank. Behind the ports of the workers is that of the
//! other hub.

use std::time::Duration;

use super::job::{Job, Phase};
use super::{AdmittedStreams, JobControl, Output, RouteTerms};
use crate::auth::Namespace;
use crate::composition::Neighbour;
use crate::placement::{HubShape, RouteId};
use crate::service::{CauseKind, HubEvent, JobEnd};
use crate::standbys::{Role, Share};

/// The time for which a hub without its standby keeps its workers' streams and waits for the manager's decision.
const DOUBTFUL: Duration = Duration::from_millis(300);
/// The time after which a hub ends a job of which it has lost a worker. A hub that was frozen or cut off sees the ends of
/// streams before it hears that the job goes on elsewhere.
pub(super) const LOSS_CERTAIN: Duration = Duration::from_secs(1);
/// The time that workers may take, beyond that after which they notice that a hub is silent, to come to the hub that serves
/// instead.
const COME_OVER: Duration = Duration::from_secs(10);

/// The other hub of a share is lost to this one, and the manager has not decided what follows.
#[derive(Clone, Debug)]
pub(super) struct LostCounterpart {
    since: Duration,
    reason: String,
    /// Whether this hub has closed its workers' streams meanwhile.
    is_doubted: bool,
}

/// A worker is lost to this hub.
#[derive(Clone, Debug)]
pub(super) struct LostWorker {
    since: Duration,
    cause: CauseKind,
    message: String,
}

impl Job {
    /// What this hub is for a route.
    pub(super) fn role(&self, route: &RouteTerms) -> Role {
        match self.shares.get(usize::from(route.share)) {
            Some(share) => share.role(self.terms.hub),
            None => Role::Serves { has_standby: false },
        }
    }

    /// Whether all have left a route of a job with standbys that this hub has now to do with.
    pub(super) fn is_left(&self, route: &RouteTerms) -> bool {
        let workers = route.streams - 1;
        let ports = match self.role(route) {
            Role::Serves { has_standby: true } => 0..workers + 1,
            Role::Serves { has_standby: false } => 0..workers,
            Role::StandsBy => workers..workers + 1,
            Role::None => 0..0,
        };
        ports.into_iter().all(|port| self.left.contains(&(route.id, port)))
    }

    /// Whether a worker has left every route that this hub serves.
    fn has_left_here(&self, rank: u32) -> bool {
        let serves = |route: &&RouteTerms| matches!(self.role(route), Role::Serves { .. });
        self.terms.routes.iter().filter(serves).all(|route| self.left.contains(&(route.id, rank)))
    }

    /// Whether another hub can take over all that this one serves. The manager may know of a standby that it has all chunks, and
    /// this hub not yet that the manager does.
    pub(super) fn can_be_replaced(&self) -> bool {
        let is_alone = |(number, share): (u16, &Share)| {
            let has_standby = share.ready_standby().is_some() || self.copied_to(number).is_some();
            share.served_by == self.terms.hub && !has_standby
        };
        !self.shares.is_empty() && !(0..).zip(&self.shares).any(is_alone)
    }

    /// Whether all that this hub serves has a standby, and one of them still receives its chunks.
    pub(super) fn copies_all(&self) -> bool {
        let mut served =
            (0..).zip(&self.shares).filter(|(_, share): &(u16, &Share)| share.served_by == self.terms.hub);
        let is_lost = |number: u16| self.lost_counterparts.contains_key(&number);
        let has_standbys = served.all(|(number, share)| share.standby.is_some() && !is_lost(number));
        !self.shares.is_empty()
            && has_standbys
            && self.has_opened
            && !self.is_ending()
            && !self.can_be_replaced()
    }

    pub(super) fn routes_of(&self, share: u16) -> impl Iterator<Item = &RouteTerms> {
        self.terms.routes.iter().filter(move |route| route.share == share)
    }
}

impl JobControl {
    /// Reports that the other hub of a route's share is lost to this one. The manager decides what follows.
    pub(super) fn counterpart_lost(
        &mut self,
        namespace: Namespace,
        route: RouteId,
        reason: String,
        now: Duration,
    ) {
        let Some(job) = self.jobs.get_mut(&namespace).filter(|job| !job.is_ending()) else { return };
        let Some(share) = job.terms.routes.iter().find(|terms| terms.id == route).map(|terms| terms.share)
        else {
            return;
        };
        // The manager may have decided meanwhile, or another route has reported it.
        if job.shares[usize::from(share)].counterpart(job.terms.hub).is_none()
            || job.lost_counterparts.contains_key(&share)
        {
            return;
        }
        job.lost_counterparts
            .insert(share, LostCounterpart { since: now, reason: reason.clone(), is_doubted: false });
        let message =
            format!("job `{}`: {reason}; the connection manager decides how it goes on", job.terms.name);
        self.warn(message);
        self.report_lost_counterpart(namespace, share);
    }

    /// Reports once more which hubs are lost to this one: the manager has restarted, and may not have had the report.
    pub(super) fn report_lost_counterparts_again(&mut self, namespace: Namespace) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        let shares: Vec<u16> = job.lost_counterparts.keys().copied().collect();
        shares.into_iter().for_each(|share| self.report_lost_counterpart(namespace, share));
    }

    fn report_lost_counterpart(&mut self, namespace: Namespace, share: u16) {
        let job = &self.jobs[&namespace];
        let hub = job.shares[usize::from(share)].counterpart(job.terms.hub);
        let (Some(hub), Some(lost)) = (hub, job.lost_counterparts.get(&share)) else { return };
        let (number, reason) = (job.shares_number, lost.reason.clone());
        self.report(HubEvent::HubLost { namespace, share, hub, number, reason });
    }

    /// Whether other hubs may have replaced this one in a job, and this one has not heard of it.
    pub(super) fn may_be_replaced(&self, namespace: Namespace) -> bool {
        self.jobs.get(&namespace).is_some_and(|job| !job.shares.is_empty() && !job.is_ending())
    }

    /// Notes that a neighbour is lost, which ends the job soon, unless that goes on elsewhere.
    pub(super) fn note_lost_worker(
        &mut self,
        namespace: Namespace,
        at: (RouteId, Neighbour),
        cause: CauseKind,
        message: String,
        now: Duration,
    ) {
        if let Some(job) = self.jobs.get_mut(&namespace) {
            job.lost_workers.entry(at).or_insert(LostWorker { since: now, cause, message });
        }
    }

    /// Ends jobs that have lost a worker and go on nowhere else.
    pub(super) fn check_lost_workers(&mut self, now: Duration) {
        let mut certain = Vec::new();
        for (&namespace, job) in &mut self.jobs {
            let first = job.lost_workers.iter().min_by_key(|(_, lost)| lost.since);
            let is_certain = |lost: &LostWorker| now >= lost.since + LOSS_CERTAIN;
            let first = first.filter(|(_, lost)| is_certain(lost));
            certain.extend(first.map(|(&(_, culprit), lost)| (namespace, culprit, lost.clone())));
        }
        for (namespace, culprit, LostWorker { cause, message, .. }) in certain {
            self.fail(namespace, cause, culprit.rank(), message, now);
        }
    }

    /// Closes the streams of workers at routes whose standby is lost, if the manager has not decided soon.
    pub(super) fn check_counterparts(&mut self, now: Duration) {
        let mut doubted = Vec::new();
        for (&namespace, job) in &mut self.jobs {
            for (&share, lost) in &mut job.lost_counterparts {
                let serves = job.shares[usize::from(share)].role(job.terms.hub) != Role::StandsBy;
                if serves && !lost.is_doubted && now >= lost.since + DOUBTFUL && !job.phase.is_over() {
                    lost.is_doubted = true;
                    doubted.push((namespace, share));
                }
            }
        }
        for (namespace, share) in doubted {
            let job = &self.jobs[&namespace];
            let message = format!(
                "job `{}` waits: {}, and the connection manager has not said yet how the job goes on",
                job.terms.name, job.lost_counterparts[&share].reason
            );
            let routes: Vec<(RouteId, u16)> =
                job.routes_of(share).map(|route| (route.id, route.core)).collect();
            self.notify_all(namespace, None, &message);
            for (route, core) in routes {
                self.outputs.push(Output::ChangeRole { namespace, core, route, role: RoleChange::Doubt });
            }
        }
    }

    /// The manager has changed the shares of a job, for this reason: this is the change with this number. `later_hubs` are those
    /// that the job has got since it began.
    pub(super) fn change_shares(
        &mut self,
        namespace: Namespace,
        (number, shares): (u32, Vec<Share>),
        later_hubs: Vec<HubShape>,
        reason: &str,
        now: Duration,
    ) {
        let Some(job) = self.jobs.get_mut(&namespace).filter(|job| !job.is_ending()) else { return };
        if number <= job.shares_number || shares.len() != job.shares.len() {
            return;
        }
        job.shares_number = number;
        let before = std::mem::replace(&mut job.shares, shares);
        let hub = job.terms.hub;
        if !job.shares.iter().any(|share| share.role(hub) != Role::None) {
            return self.retire(namespace, reason, now);
        }
        let mut to_give_up = job.refused_further();
        let (mut changes, mut to_link) = (Vec::new(), Vec::new());
        for (share, (was, is)) in (0..).zip(before.iter().zip(&job.shares)) {
            let roles = role_changes(was, is, hub);
            if roles.is_empty() {
                continue;
            }
            let lost = job.lost_counterparts.remove(&share);
            let come_again = lost.is_some_and(|lost| lost.is_doubted) || roles[0] == RoleChange::TakeOver;
            if come_again && roles[0] != RoleChange::Stop {
                let until = now.saturating_add(job.terms.dead_after).saturating_add(COME_OVER);
                job.awaits_workers_until = job.awaits_workers_until.max(Some(until));
            }
            if roles.contains(&RoleChange::Stop) {
                to_give_up.extend(job.routes_of(share).copied());
                continue;
            }
            for route in job.terms.routes.iter().filter(|route| route.share == share) {
                job.copied.remove(&route.id);
                changes.extend(roles.iter().map(|&role| (route.id, route.core, role)));
                let takes_standby = |role: &RoleChange| matches!(role, RoleChange::TakeStandby { .. });
                to_link.extend(roles.iter().any(takes_standby).then_some(route.id));
            }
        }
        let is_loss =
            changes.iter().any(|(.., role)| matches!(role, RoleChange::TakeOver | RoleChange::GoOnAlone));
        let message = format!("job `{}` goes on: {reason}", job.terms.name);
        let until = now.saturating_add(job.terms.opening());
        let shares = job.shares.clone();
        self.outputs.push(Output::NoteShares { namespace, shares, later_hubs });
        for (route, core, role) in changes {
            self.outputs.push(Output::ChangeRole { namespace, core, route, role });
        }
        if !to_give_up.is_empty() {
            self.give_up_routes(namespace, &to_give_up);
            // The job has less here than the manager knows.
            self.report_allocated(namespace);
        }
        if !to_link.is_empty() {
            self.outputs.push(Output::LinkStandbys { namespace, routes: to_link, until });
        }
        // That a share gets another standby concerns nobody's program.
        match is_loss {
            true => self.notify_all(namespace, None, &message),
            false => self.info(message),
        }
        self.finish_if_all_left(namespace, now);
    }

    /// Ends a job at a hub that has lost its workers to hubs which have taken over, if they do not come.
    pub(super) fn check_workers_come(&mut self, now: Duration, streams: &impl AdmittedStreams) {
        let mut late = Vec::new();
        for (&namespace, job) in &mut self.jobs {
            let Some(until) = job.awaits_workers_until else { continue };
            let missing = streams.missing(namespace);
            let mut ranks = missing.iter().filter_map(|neighbour| neighbour.rank());
            match ranks.find(|&rank| !job.has_left_here(rank)) {
                None => job.awaits_workers_until = None,
                Some(rank) if now >= until => late.push((namespace, rank, job.terms.dead_after + COME_OVER)),
                Some(_) => {}
            }
        }
        for (namespace, rank, limit) in late {
            let seconds = limit.as_secs_f64();
            let reason = format!(
                "rank {rank} was lost: it did not come to the hub that has taken over within {seconds:.0} s"
            );
            self.fail(namespace, CauseKind::PeerLost, Some(rank), reason, now);
        }
    }

    /// Hands a job over to the standbys for this reason, if there are any for all that this hub serves. Returns whether it does.
    pub(super) fn hand_over(&mut self, namespace: Namespace, reason: &str, now: Duration) -> bool {
        let Some(job) = self.jobs.get(&namespace).filter(|job| job.can_be_replaced() && job.has_opened)
        else {
            return false;
        };
        let (hub, number) = (job.terms.hub, job.shares_number);
        let share = job.shares.iter().position(|share| share.role(hub) != Role::None);
        let Some(share) = share.filter(|_| !job.is_ending()) else { return false };
        let retires = format!("its hub has left: {reason}");
        let reason = reason.to_owned();
        self.report(HubEvent::HubLost { namespace, share: share as u16, hub, number, reason });
        self.retire(namespace, &retires, now);
        true
    }

    /// Ends a job here that goes on at other hubs. Its workers hear nothing but the end of their streams, and dial the others.
    fn retire(&mut self, namespace: Namespace, reason: &str, now: Duration) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let (routes, cores) = (job.routes_here(), job.terms.cores());
        let message = format!("job `{}` goes on at other hubs: {reason}", job.terms.name);
        let end = JobEnd::failed(namespace, message.clone(), CauseKind::Hearsay);
        job.phase = Phase::Ending { routes, end, since: now };
        job.is_retired = true;
        if std::mem::take(&mut job.writes_checkpoints) {
            self.outputs.push(Output::StopCheckpoints(namespace));
        }
        self.warn(message.clone());
        self.outputs.push(Output::SendElsewhere { namespace, message });
        self.outputs.extend(cores.into_iter().map(|core| Output::End { namespace, core, failure: None }));
        if routes == 0 {
            self.closed(namespace);
        }
    }
}

/// What becomes of the routes of a share at the hub at this position, in this order: the hub may have missed a change.
fn role_changes(was: &Share, is: &Share, hub: u16) -> Vec<RoleChange> {
    let loses = match (was.role(hub), is.role(hub)) {
        (Role::StandsBy, Role::Serves { .. }) => Some(RoleChange::TakeOver),
        (Role::Serves { .. }, Role::Serves { .. }) if was.standby == is.standby => return Vec::new(),
        (Role::Serves { has_standby: true }, Role::Serves { .. }) => Some(RoleChange::GoOnAlone),
        (Role::Serves { has_standby: false }, Role::Serves { .. }) => None,
        (Role::Serves { .. } | Role::StandsBy, Role::None) => Some(RoleChange::Stop),
        (Role::None, _) | (_, Role::StandsBy) => None,
    };
    let serves = matches!(is.role(hub), Role::Serves { .. }) && was.role(hub) != Role::None;
    let takes = is.standby.filter(|_| serves).map(|standby| RoleChange::TakeStandby { standby });
    loses.into_iter().chain(takes).collect()
}

/// What becomes of a route of a share whose hubs have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoleChange {
    /// This hub, which was the standby, serves the route.
    TakeOver,
    /// This hub goes on without the standby.
    GoOnAlone,
    /// This hub, which serves the route alone, gets the hub at this position as a standby, and copies the chunks to it.
    TakeStandby {
        /// The position of the standby in the job.
        standby: u16,
    },
    /// The standby is lost, and it is not known yet which of the two hubs serves the route: the streams of workers are closed
    /// and others refused.
    Doubt,
    /// This hub has nothing more to do with the route: its memory is freed.
    /// [`CoreEvent::Closed`](super::CoreEvent::Closed) answers.
    Stop,
}
