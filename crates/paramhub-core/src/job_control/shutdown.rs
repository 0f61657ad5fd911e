//! How a hub shuts down: while the jobs go on, the last checkpoints are taken, and standbys get the rest of their chunks. Then the
//! jobs end or go on at their standbys, and the cores end last. The hub waits for nothing longer than for a fixed time.

use std::collections::BTreeSet;
use std::time::Duration;

use super::job::Job;
use super::{Event, JobControl, LastCheckpoint, Output};
use crate::auth::Namespace;
use crate::wire::Notice;

/// How long the last checkpoint of a job may wait for its workers.
pub const LAST_CHECKPOINT: Duration = Duration::from_secs(5);
/// How long a hub that shuts down waits for standbys that still receive their chunks.
pub const LAST_COPIES: Duration = Duration::from_secs(25);
/// How long ending jobs may take when the hub shuts down.
pub const SHUTDOWN: Duration = Duration::from_millis(600);
/// How long beyond [`LAST_CHECKPOINT`] a hub that shuts down waits for the report of a last checkpoint.
const REPORT_DELAY: Duration = Duration::from_millis(500);

/// How far a hub has come with shutting down.
#[derive(Debug)]
pub(super) enum Shutdown {
    /// It has not begun.
    Serving,
    /// The last checkpoints of some jobs are being taken, and the standbys of others receive their chunks.
    Preparing { checkpoints: BTreeSet<Namespace>, checkpoints_until: Duration, copies_until: Duration },
    /// The cores free what jobs have.
    EndingJobs { until: Duration },
    /// The cores are to end.
    Done,
}

impl Shutdown {
    /// When the wait of this phase is over; `None` if the hub serves.
    pub(super) fn deadline(&self) -> Option<Duration> {
        match self {
            Shutdown::Serving => None,
            Shutdown::Preparing { checkpoints, checkpoints_until, copies_until } => {
                Some(if checkpoints.is_empty() { *copies_until } else { *checkpoints_until })
            }
            Shutdown::EndingJobs { until } => Some(*until),
            Shutdown::Done => Some(Duration::ZERO),
        }
    }
}

impl JobControl {
    /// Whether the hub has shut down: no event changes anything any more.
    pub fn is_done(&self) -> bool {
        matches!(self.shutdown, Shutdown::Done)
    }

    pub(super) fn is_serving(&self) -> bool {
        matches!(self.shutdown, Shutdown::Serving)
    }

    /// Begins to shut down.
    pub(super) fn shut_down(&mut self, now: Duration) {
        self.outputs.push(Output::ReportLeaving);
        let mut checkpoints = BTreeSet::new();
        // A job that goes on at its standbys has its next checkpoint there.
        let takes_one = |job: &Job| {
            let goes_on = job.can_be_replaced() || job.copies_all();
            job.writes_checkpoints && !job.has_last_checkpoint && (job.is_finishing() || !goes_on)
        };
        for (&namespace, job) in self.jobs.iter().filter(|(_, job)| takes_one(job)) {
            checkpoints.insert(namespace);
            // That of a job that finishes is being taken already.
            if !job.is_finishing() {
                self.outputs.push(Output::TakeLastCheckpoint { namespace, before: LastCheckpoint::Shutdown });
            }
        }
        self.shutdown = Shutdown::Preparing {
            checkpoints,
            checkpoints_until: now + LAST_CHECKPOINT + REPORT_DELAY,
            copies_until: now + LAST_COPIES,
        };
        self.check_shutdown(now);
    }

    /// Handles an event while the hub shuts down: only what cores and checkpoint writers report still counts.
    pub(super) fn handle_stopping(&mut self, event: Event, now: Duration) {
        match event {
            Event::Core { namespace, event } if !self.is_done() => self.handle_core(namespace, event, now),
            // The manager has heard that a standby has all chunks, or that one is lost.
            Event::ChangeShares { namespace, number, shares, later_hubs, reason } if !self.is_done() => {
                self.change_shares(namespace, (number, shares), later_hubs, &reason, now);
            }
            Event::StandbyUnreachable { namespace, route, standby, reason } if !self.is_done() => {
                self.standby_unreachable(namespace, (route, standby), reason, now);
            }
            Event::LastCheckpointTaken { namespace } => {
                if let Shutdown::Preparing { checkpoints, .. } = &mut self.shutdown {
                    checkpoints.remove(&namespace);
                    self.last_checkpoint_taken(namespace, now);
                }
            }
            _ => {}
        }
        self.check_shutdown(now);
    }

    /// Goes on to the next phase of shutting down, if nothing is left to wait for or the wait was long enough.
    pub(super) fn check_shutdown(&mut self, now: Duration) {
        if let Shutdown::Preparing { checkpoints, checkpoints_until, copies_until } = &mut self.shutdown {
            checkpoints
                .retain(|namespace| self.jobs.get(namespace).is_some_and(|job| job.writes_checkpoints));
            if now >= *checkpoints_until {
                checkpoints.clear();
            }
            let awaits_copies = now < *copies_until && self.jobs.values().any(Job::copies_all);
            if checkpoints.is_empty() && !awaits_copies {
                self.end_jobs(now);
            }
        }
        if let Shutdown::EndingJobs { until } = self.shutdown
            && (self.jobs.is_empty() || now >= until)
        {
            self.shutdown = Shutdown::Done;
            self.outputs.push(Output::StopCores);
        }
    }

    /// Lets the ranks of a job hear that they go back, which begins again from its checkpoint once this hub has ended its part.
    pub(super) fn send_back(&mut self, namespace: Namespace, reason: &str) {
        let Some(job) = self.jobs.get(&namespace).filter(|job| job.outlives_hubs() && !job.is_ending())
        else {
            return;
        };
        let message = format!(
            "job `{}` goes back to its newest checkpoint: {reason}. It goes on when hubs and all ranks are there",
            job.terms.name
        );
        let (cores, epoch) = (job.terms.cores(), job.terms.epoch);
        let notice = Notice { rank: None, message };
        let command = |core| Output::Rewind { namespace, core, epoch, notice: notice.clone() };
        self.outputs.extend(cores.into_iter().map(command));
    }

    fn end_jobs(&mut self, now: Duration) {
        let living: Vec<Namespace> = self.jobs.keys().copied().collect();
        for namespace in living {
            if self.hand_over(namespace, "it is shutting down", now) {
                continue;
            }
            let reason = "the hub is shutting down";
            self.send_back(namespace, reason);
            self.fail_as_known(namespace, reason.to_string(), now);
        }
        self.shutdown = Shutdown::EndingJobs { until: now + SHUTDOWN };
    }
}
