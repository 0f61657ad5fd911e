//! How a job connects and goes on: the streams that are missing, cut or silent, and the deadlines for them.

use std::ops::Range;
use std::time::Duration;

use super::job::{Job, Phase};
use super::{FaultCause, JobControl, Output};
use crate::auth::Namespace;
use crate::composition::Neighbour;
use crate::limits::RESUME_S;
use crate::placement::RouteId;
use crate::service::CauseKind;

/// How long the workers of a job that continues may take to connect over another interface.
pub const RESUME: Duration = Duration::from_secs(RESUME_S);
/// How long the frames that workers have sent may take to arrive, once the workers' processes have ended.
pub const CONCLUDED: Duration = Duration::from_secs(10);
/// If the manager has been out of reach for this long and a rank is silent, too, the hub assumes that it is
/// cut off itself.
pub const CUT_OFF: Duration = Duration::from_secs(2);

/// Names in the message about streams that are missing.
const NAMED: usize = 8;

/// The streams that the hub has admitted.
pub trait AdmittedStreams {
    /// The workers by rank, then the sites, that lack a stream on some route of a job. Sites above are left
    /// out: this hub dials them.
    fn missing(&self, namespace: Namespace) -> Vec<Neighbour>;

    /// The streams of a job that use an interface, by route and port, with the neighbour at the other end.
    fn through(&self, namespace: Namespace, interface: u16) -> Vec<(RouteId, u32, Neighbour)>;
}

/// An interface that does not work.
#[derive(Debug)]
pub(super) struct Down {
    pub(super) reason: String,
    since: Duration,
}

impl JobControl {
    /// Orders the streams to the sites above: every hub of the job has allocated.
    pub(super) fn link(&mut self, namespace: Namespace, now: Duration) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        // A command can come twice, since the answer to the first may have been lost.
        if !std::mem::replace(&mut job.is_linked, true) {
            let until = now.saturating_add(job.terms.rendezvous);
            self.outputs.push(Output::Link { namespace, until });
        }
    }

    pub(super) fn lose_sites(&mut self, namespace: Namespace, reason: String, now: Duration) {
        self.fail(namespace, CauseKind::PeerLost, None, reason, now);
    }

    /// Ends a job at which a neighbour is at fault. If it is silent while the manager is out of reach, the hub
    /// itself is cut off.
    pub(super) fn faulted(
        &mut self,
        namespace: Namespace,
        culprit: Neighbour,
        message: String,
        cause: FaultCause,
        now: Duration,
    ) {
        let out_of_reach = self.manager_lost.map(|since| now.saturating_sub(since));
        let (cause, message) = match (cause, out_of_reach.filter(|time| *time >= CUT_OFF)) {
            (FaultCause::Kind(kind), _) => (kind, message),
            (FaultCause::Silence, None) => (CauseKind::PeerLost, message),
            (FaultCause::Silence, Some(time)) => {
                let seconds = time.as_secs_f64();
                let reason = format!(
                    "the hub is cut off: it has not reached its connection manager for {seconds:.0} s, and {message}"
                );
                (CauseKind::Known, reason)
            }
        };
        self.fail(namespace, cause, culprit.rank(), message, now);
    }

    /// Lets jobs run whose streams are all here, and ends those that have waited too long for one.
    pub(super) fn check_connecting(&mut self, now: Duration, streams: &impl AdmittedStreams) {
        let mut late = Vec::new();
        for (&namespace, job) in &mut self.jobs {
            let Phase::Connecting { until } = job.phase else { continue };
            let missing = streams.missing(namespace);
            match missing.first() {
                None => job.phase = Phase::Running,
                Some(&first) if now >= until => late.push((namespace, first, not_opened(job, &missing))),
                Some(_) => {}
            }
        }
        for (namespace, first, message) in late {
            self.fail(namespace, CauseKind::PeerLost, first.rank(), message, now);
        }
    }

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

    /// Ends the jobs that have a stream over an interface that does not work: what is in flight there will
    /// not arrive. Streams over other interfaces carry the reason to the workers. A job that may continue
    /// gets some time for it, if there is another interface.
    pub(super) fn check_interfaces(&mut self, now: Duration, streams: &impl AdmittedStreams) {
        let mut cut_off = Vec::new();
        let has_another = self.interfaces_down.len() < self.hub.interfaces;
        for (&number, down) in &self.interfaces_down {
            for (&namespace, job) in &self.jobs {
                let through = streams.through(namespace, number);
                // Nothing is in flight any more where a neighbour has left.
                let counts = |(route, port, _): &&(RouteId, u32, Neighbour)| {
                    !job.terms.continues || !job.left.contains(&(*route, *port))
                };
                if let Some(&(.., neighbour)) = through.iter().filter(counts).min()
                    && let Some(why) = down.ends(job, neighbour, has_another, now)
                {
                    cut_off.push((namespace, why));
                }
            }
        }
        for (namespace, why) in cut_off {
            self.fail_known(namespace, why, now);
        }
    }
}

impl Down {
    /// Why a job cannot go on that has a stream of `neighbour` here; `None` if the neighbour may still come by another
    /// interface.
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

/// Who has not opened all streams of a job in time.
fn not_opened(job: &Job, missing: &[Neighbour]) -> String {
    let names: Vec<String> = missing.iter().take(NAMED).map(|&neighbour| job.name_of(neighbour)).collect();
    let dots = if missing.len() > names.len() { ", ..." } else { "" };
    format!(
        "{}{dots} did not open all streams to the hub within {:.0} s",
        names.join(", "),
        job.terms.rendezvous.as_secs_f64()
    )
}
