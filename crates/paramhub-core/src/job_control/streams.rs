//! This module decides what becomes of a job whose streams are missing, cut or silent, and keeps the
//! deadlines for them.

use std::ops::Range;
use std::time::Duration;

use super::job::{Job, Phase};
use super::{FaultCause, JobControl, Output};
use crate::auth::Namespace;
use crate::composition::Neighbour;
use crate::limits::RESUME_S;
use crate::placement::RouteId;
use crate::service::CauseKind;

/// The time that the workers of a job with `continue` as its reaction to a lost interface may take to connect
/// over another one.
pub const RESUME: Duration = Duration::from_secs(RESUME_S);
/// The time that frames of workers may take to arrive after the workers' processes have ended.
pub const OUTCOME_TIMEOUT: Duration = Duration::from_secs(10);
/// If the manager has been out of reach for this long and a rank is silent, too, the hub assumes that it is
/// cut off itself.
pub const CUT_OFF: Duration = Duration::from_secs(2);

/// The most neighbours that the message about missing streams names.
const NEIGHBOURS_NAMED_MAX: usize = 8;

/// The streams that the hub has admitted.
pub trait AdmittedStreams {
    /// Returns the workers by rank, then the sites, that lack a stream on some route of a job. It leaves out
    /// the sites above, because this hub dials them.
    fn missing(&self, namespace: Namespace) -> Vec<Neighbour>;

    /// Returns the streams of a job that use an interface, each as its route, its port and the neighbour at
    /// the other end.
    fn through(&self, namespace: Namespace, interface: u16) -> Vec<(RouteId, u32, Neighbour)>;
}

/// An interface that does not work.
#[derive(Debug)]
pub(super) struct Down {
    pub(super) reason: String,
    /// When it went down, counted from the moment from which events count their time.
    since: Duration,
}

impl JobControl {
    /// Orders the streams to the sites above, and waits for those of workers no longer than for those of a process that
    /// [joins](super::ranks) later, if the job goes on without lost workers. The manager calls for them once every hub of
    /// the job has allocated.
    pub(super) fn link(&mut self, namespace: Namespace, now: Duration) {
        // A manager that restarts before the ranks have their answers says so once more, and only then do they come.
        if let Some(job) = self.jobs.get_mut(&namespace)
            && let Phase::Connecting { until } = &mut job.phase
            && job.terms.min_workers.is_some()
        {
            *until = now.saturating_add(job.terms.opening());
            self.wait_for_workers_again(namespace);
        }
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        // A command can come twice, since the answer to the first may have been lost.
        if !std::mem::replace(&mut job.is_linked, true) {
            let until = now.saturating_add(job.terms.rendezvous);
            self.outputs.push(Output::Link { namespace, until });
        }
    }

    /// Whether a job begins again from its newest checkpoint after its part here has ended for a reason of this kind.
    pub(super) fn begins_again_after(&self, namespace: Namespace, cause: CauseKind) -> bool {
        self.jobs.get(&namespace).is_some_and(|job| job.begins_again_after(cause))
    }

    /// Ends a job whose sites above cannot be reached.
    pub(super) fn lose_sites(&mut self, namespace: Namespace, reason: String, now: Duration) {
        self.fail(namespace, CauseKind::PeerLost, None, reason, now);
    }

    /// Ends a job at which a neighbour is at fault, or reports the loss of a worker to the manager. If the neighbour
    /// is silent while the manager is out of reach, a job ends because the hub itself is cut off; but a job that goes on
    /// without lost workers waits until the manager, which decides who is lost, is back.
    pub(super) fn faulted(
        &mut self,
        namespace: Namespace,
        (at, culprit): (RouteId, Neighbour),
        message: String,
        cause: FaultCause,
        now: Duration,
    ) {
        let is_loss = matches!(cause, FaultCause::Silence | FaultCause::Kind(CauseKind::PeerLost));
        if let Neighbour::Counterpart(route) = culprit
            && (is_loss || self.is_copying(namespace, route))
        {
            return self.counterpart_lost(namespace, route, message, now);
        }
        let out_of_reach = self.manager_lost.map(|since| now.saturating_sub(since));
        let (cause, message) = match (cause, out_of_reach.filter(|time| *time >= CUT_OFF)) {
            (FaultCause::Kind(kind), _) => (kind, message),
            (FaultCause::Silence, None) => (CauseKind::PeerLost, message),
            (FaultCause::Silence, Some(_))
                if self.may_lose(namespace, CauseKind::PeerLost)
                    || self.begins_again_after(namespace, CauseKind::PeerLost) =>
            {
                (CauseKind::PeerLost, message)
            }
            (FaultCause::Silence, Some(time)) => {
                let seconds = time.as_secs_f64();
                let reason = format!(
                    "the hub is cut off: it has not reached its connection manager for {seconds:.0} s, and {message}"
                );
                (CauseKind::Known, reason)
            }
        };
        match culprit.rank().filter(|_| self.may_lose(namespace, cause)) {
            Some(rank) => self.worker_lost(namespace, rank, message),
            None if is_loss && self.may_be_replaced(namespace) => {
                self.note_lost_worker(namespace, (at, culprit), cause, message, now);
            }
            None => self.fail(namespace, cause, culprit.rank(), message, now),
        }
    }

    /// Lets each connecting job run if all its streams are here. If it has waited too long for one, it ends, or takes
    /// the workers for lost.
    pub(super) fn check_connecting(&mut self, now: Duration, streams: &impl AdmittedStreams) {
        let mut late = Vec::new();
        let is_manager_away = self.manager_lost.is_some();
        for (&namespace, job) in &mut self.jobs {
            let Phase::Connecting { until } = &mut job.phase else { continue };
            // Workers come when the manager has answered them.
            if is_manager_away && job.terms.min_workers.is_some() {
                *until = (*until).max(now.saturating_add(job.terms.opening()));
            }
            let until = *until;
            let missing = streams.missing(namespace);
            match missing.first() {
                None => job.phase = Phase::Running,
                Some(_) if now >= until => {
                    let message = missing_streams_message(job, &missing);
                    late.push((namespace, missing, message));
                }
                Some(_) => {}
            }
        }
        for (namespace, missing, message) in late {
            if !self.may_lose(namespace, CauseKind::PeerLost) {
                let first = missing.first().and_then(|first| first.rank());
                self.fail(namespace, CauseKind::PeerLost, first, message, now);
                continue;
            }
            let seconds = self.jobs[&namespace].terms.opening().as_secs_f64();
            for rank in missing.iter().filter_map(|neighbour| neighbour.rank()) {
                let reason = format!(
                    "rank {rank} was lost: the job has begun, and it did not open all streams within {seconds:.0} s"
                );
                self.worker_late(namespace, rank, reason);
            }
        }
    }

    /// Notes that interfaces have gone down, for the reason `down`, or that they work again.
    pub(super) fn note_interfaces(&mut self, numbers: Range<u16>, down: Option<String>, now: Duration) {
        for number in numbers {
            match &down {
                Some(reason) => {
                    self.interfaces_down.insert(number, Down { reason: reason.clone(), since: now })
                }
                None => self.interfaces_down.remove(&number),
            };
        }
    }

    /// Ends the jobs that have a stream over an interface that does not work, because frames in flight there
    /// will not arrive. Streams over other interfaces carry the reason to the workers. If the hub has another
    /// interface, a job that may continue gets [`RESUME`] to connect over it.
    pub(super) fn check_interfaces(&mut self, now: Duration, streams: &impl AdmittedStreams) {
        let mut cut_off = Vec::new();
        let has_another = self.interfaces_down.len() < self.hub.interfaces;
        for (&number, down) in &self.interfaces_down {
            for (&namespace, job) in &self.jobs {
                let job_streams = streams.through(namespace, number);
                // In a job that continues, nothing is in flight any more on a stream by which a neighbour has
                // left.
                let may_lose_frames = |(route, port, _): &&(RouteId, u32, Neighbour)| {
                    !job.terms.continues || !job.left.contains(&(*route, *port))
                };
                if let Some(&(.., neighbour)) = job_streams.iter().filter(may_lose_frames).min()
                    && let Some(why) = down.ends(job, neighbour, has_another, now)
                {
                    cut_off.push((namespace, why));
                }
            }
        }
        for (namespace, why) in cut_off {
            self.fail_as_known(namespace, why, now);
        }
    }
}

impl Down {
    /// Returns why a job cannot go on whose stream of `neighbour` uses this interface; `None` if the
    /// neighbour may still come by another interface.
    fn ends(&self, job: &Job, neighbour: Neighbour, has_another: bool, now: Duration) -> Option<String> {
        let reason = &self.reason;
        match job.terms.continues {
            false => Some(format!("the hub's {reason}")),
            true if !has_another => Some(format!("the hub's {reason}; no other of its interfaces is left")),
            true if now.saturating_sub(self.since) < RESUME => None,
            true => Some(format!(
                "the hub's {reason}, and {} did not come by another within {} s",
                job.name_of(neighbour),
                RESUME.as_secs()
            )),
        }
    }
}

/// Returns the message that says which neighbours have not opened all streams of a job in time.
fn missing_streams_message(job: &Job, missing: &[Neighbour]) -> String {
    let names: Vec<String> =
        missing.iter().take(NEIGHBOURS_NAMED_MAX).map(|&neighbour| job.name_of(neighbour)).collect();
    let dots = if missing.len() > names.len() { ", ..." } else { "" };
    format!(
        "{}{dots} did not open all streams to the hub within {:.0} s",
        names.join(", "),
        job.terms.rendezvous.as_secs_f64()
    )
}
