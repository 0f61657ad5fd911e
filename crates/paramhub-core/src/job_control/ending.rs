//! How a job ends. When all workers have left, it is finishing: its last checkpoint is copied to memory. Then, or
//! when it fails, it is ending: cores free what they had, and the end is reported when the last has done so. The
//! first cause counts.
//!
//! If a launcher says that the workers' processes have ended, the hub is concluding: their streams tell within
//! [`OUTCOME_TIMEOUT`] whether the job has finished. Where all of them are lost already, the job soon fails.

use std::time::Duration;

use super::job::{Concluding, Job, Phase};
use super::{EndReport, JobControl, LastCheckpoint, OUTCOME_TIMEOUT, Output};
use crate::auth::Namespace;
use crate::placement::RouteId;
use crate::service::{CauseKind, HubEvent, HubJobCounters, JobEnd, StopWhen};
use crate::wire::Failure;

/// The time that the last checkpoint of a job whose workers have left may take to be in memory. It waits until
/// an earlier checkpoint is written, which takes minutes if that is large.
pub const LAST_CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(300);

/// What the message says of a job that has ended, and of one that begins again.
const FAILED: &str = "failed";
const GOES_BACK: &str = "goes back to its newest checkpoint";

/// The time that a hub to which all workers are lost waits to hear whether they have left another hub, once their processes
/// have ended.
const ELSEWHERE_TIMEOUT: Duration = Duration::from_secs(2);

impl JobControl {
    /// The manager ends a job.
    pub(super) fn stop(&mut self, namespace: Namespace, reason: String, when: StopWhen, now: Duration) {
        let job = self.jobs.get_mut(&namespace);
        // A part that has not begun ends with the order, and a former part is ending already.
        let ends_now = when != StopWhen::WorkersEnding;
        let had_next = ends_now && job.and_then(|job| job.next_part.take()).is_some();
        let job = self.jobs.get_mut(&namespace).filter(|job| !(had_next && job.is_ending()));
        match (job, when) {
            (_, StopWhen::WorkersEnding) => self.announce_end(namespace, reason),
            (None, _) => {
                self.report(HubEvent::Ended(JobEnd::failed(namespace, reason, CauseKind::Hearsay)));
            }
            // Every worker has left: only the last checkpoint is missing.
            (Some(job), _) if job.is_finishing() => {}
            // The job begins again, and waits for the end of this part.
            (Some(job), StopWhen::Now) if job.is_retired => job.is_retired = false,
            (Some(_), StopWhen::Now) => self.fail(namespace, CauseKind::Hearsay, None, reason, now),
            (Some(job), StopWhen::WorkersEnded) => {
                // Each stream brings a Leave or an end without one, and both decide the job's outcome.
                let until = now + OUTCOME_TIMEOUT;
                job.concluding.get_or_insert(Concluding { since: now, until, reason });
            }
        }
    }

    /// Notes that the workers of a job are about to be ended, or that nobody comes for those that were lost, and
    /// why. Takes a last checkpoint while the job goes on.
    fn announce_end(&mut self, namespace: Namespace, reason: String) {
        if let Some(job) = self.jobs.get_mut(&namespace) {
            job.announced_end.get_or_insert(reason);
            if job.writes_checkpoints && !job.is_finishing() && !job.is_ending() {
                job.has_last_checkpoint = true;
                let before = match job.ranks.lost().next() {
                    None => LastCheckpoint::EndOfWorkers,
                    Some(_) => LastCheckpoint::FailureForWorkers,
                };
                return self.outputs.push(Output::TakeLastCheckpoint { namespace, before });
            }
        }
        self.report(HubEvent::Kept { namespace });
    }

    /// Ends the jobs that have not finished although the processes of their workers ended long enough ago.
    pub(super) fn check_concluding(&mut self, now: Duration) {
        let over: Vec<(Namespace, String)> = self
            .jobs
            .iter_mut()
            .filter_map(|(&namespace, job)| {
                let are_all_lost = job.are_all_lost();
                let concluding = job.concluding.take_if(|concluding| {
                    now >= concluding.until || are_all_lost && now >= concluding.since + ELSEWHERE_TIMEOUT
                })?;
                (!job.is_finishing()).then_some((namespace, concluding.reason))
            })
            .collect();
        for (namespace, reason) in over {
            self.fail(namespace, CauseKind::Hearsay, None, reason, now);
        }
    }

    /// Notes that a neighbour has left by a port. When all have left, the job finishes, with a last checkpoint
    /// if it writes any.
    pub(super) fn left(&mut self, namespace: Namespace, route: RouteId, port: u32, now: Duration) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        if job.left.insert((route, port)) && job.has_left(port) {
            self.worker_left(namespace, port);
        }
        self.finish_if_all_left(namespace, now);
    }

    /// Lets a job finish once every neighbour has left.
    pub(super) fn finish_if_all_left(&mut self, namespace: Namespace, now: Duration) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        if !job.have_all_left() || job.is_finishing() || job.is_ending() {
            return;
        }
        job.phase = Phase::Finishing { until: now + LAST_CHECKPOINT_TIMEOUT };
        if job.writes_checkpoints {
            self.outputs.push(Output::TakeLastCheckpoint { namespace, before: LastCheckpoint::Finish });
        } else {
            self.finished(namespace, now);
        }
    }

    /// All workers of a job have left another of its hubs, so this one waits for no process in the place of a lost one.
    pub(super) fn finished_elsewhere(&mut self, namespace: Namespace, now: Duration) {
        if let Some(job) = self.jobs.get_mut(&namespace) {
            job.has_finished_elsewhere = true;
            self.finish_if_all_left(namespace, now);
        }
    }

    /// Ends the jobs whose last checkpoint has not been taken for too long, so that a disk that does not answer
    /// does not keep a job for ever.
    pub(super) fn check_finishing(&mut self, now: Duration) {
        let late = self.jobs.iter().filter_map(|(&namespace, job)| match job.phase {
            Phase::Finishing { until } if now >= until => Some((namespace, late_last_checkpoint(job))),
            _ => None,
        });
        for (namespace, reason) in late.collect::<Vec<_>>() {
            self.fail_as_known(namespace, reason, now);
        }
    }

    /// Ends a finishing job whose last checkpoint has been copied to memory, from which a thread writes it, or will
    /// not be taken.
    pub(super) fn last_checkpoint_taken(&mut self, namespace: Namespace, now: Duration) {
        if self.jobs.get(&namespace).is_some_and(|job| job.is_finishing()) {
            self.finished(namespace, now);
        }
    }

    /// A core has lost what it had of a job, of which this hub has nothing to go back to. The job goes on at its standbys if it can,
    /// or begins again from its checkpoint, and otherwise it ends.
    pub(super) fn part_lost(&mut self, namespace: Namespace, reason: String, now: Duration) {
        if self.hand_over(namespace, &reason, now) {
            return;
        }
        let begins_again = self.begins_again_after(namespace, CauseKind::HubLost);
        let cause = if begins_again { CauseKind::HubLost } else { CauseKind::Known };
        self.fail(namespace, cause, None, reason, now);
    }

    /// Ends a job for a reason that this hub has caused or can prove.
    pub(super) fn fail_as_known(&mut self, namespace: Namespace, reason: String, now: Duration) {
        self.fail(namespace, CauseKind::Known, None, reason, now);
    }

    /// Ends a job that cannot go on; all its ranks receive the reason. A job that is ending already keeps its
    /// reason.
    pub(super) fn fail(
        &mut self,
        namespace: Namespace,
        cause: CauseKind,
        rank: Option<u32>,
        reason: String,
        now: Duration,
    ) {
        let Some(job) = self.jobs.get(&namespace).filter(|job| !job.is_ending()) else { return };
        // The launcher has ended the workers for its own reason, and what follows from that does not count.
        let (cause, rank, reason) = match &job.announced_end {
            Some(announced) if cause != CauseKind::Known => (CauseKind::Known, None, announced.clone()),
            _ => (cause, rank, reason),
        };
        let name = job.terms.name.clone();
        let begins_again = job.begins_again_after(cause);
        let reason = own_words(&reason, &name).to_owned();
        if begins_again {
            self.send_back(namespace, &reason);
        }
        let became = if begins_again { GOES_BACK } else { FAILED };
        let message = format!("job `{name}` {became}: {reason}");
        self.warn(message.clone());
        let end = JobEnd { rank, ..JobEnd::failed(namespace, reason, cause) };
        self.end(namespace, Some(Failure { rank, message }), end, now);
    }

    /// Ends a job whose workers have all left.
    pub(super) fn finished(&mut self, namespace: Namespace, now: Duration) {
        self.end(namespace, None, JobEnd::finished(namespace), now);
    }

    fn end(&mut self, namespace: Namespace, failure: Option<Failure>, end: JobEnd, now: Duration) {
        let job = self.jobs.get_mut(&namespace).expect("an ending job is here");
        let routes = job.routes_here();
        job.phase = Phase::Ending { routes, end, since: now };
        if std::mem::take(&mut job.writes_checkpoints) {
            self.outputs.push(Output::StopCheckpoints(namespace));
        }
        let message = failure.as_ref().map(|failure| failure.message.clone());
        let message = message.unwrap_or_else(|| format!("job `{}` has finished", job.terms.name));
        self.outputs.push(Output::RefuseStreams { namespace, message });
        for core in job.terms.cores() {
            self.outputs.push(Output::End { namespace, core, failure: failure.clone() });
        }
        if routes == 0 {
            self.closed(namespace);
        }
    }

    /// Notes that one route of an ending job holds nothing any more.
    pub(super) fn route_closed(&mut self, namespace: Namespace) {
        let job = self.jobs.get_mut(&namespace).expect("a closing job is here");
        if let Phase::Ending { routes, .. } = &mut job.phase {
            *routes -= 1;
            if *routes == 0 {
                self.closed(namespace);
            }
        }
    }

    /// Removes a job of which nothing is left here.
    pub(super) fn closed(&mut self, namespace: Namespace) {
        let job = self.jobs.remove(&namespace).expect("a closed job is here");
        let Phase::Ending { end, since, .. } = job.phase else { unreachable!("only an ending job closes") };
        if end.finished {
            self.info(format!("job `{}` finished", job.terms.name));
        }
        let counters = HubJobCounters { namespace, counters: job.counters, left_out: job.left_out };
        // A job that goes on at other hubs has not ended.
        if !job.is_retired {
            let (held_chunks, held_as) = (!job.terms.routes.is_empty(), (job.terms.epoch, job.terms.hub));
            self.report_end(EndReport { end, since, counters }, held_chunks, held_as);
        }
        self.outputs.push(Output::Forget(namespace));
        self.outputs.extend(job.next_part.filter(|_| self.is_serving()).map(Output::Plan));
    }
}

/// The reason that a hub of another site has sent, without the words that this hub puts before it, too.
fn own_words<'a>(reason: &'a str, job: &str) -> &'a str {
    let [failed, goes_back] = [FAILED, GOES_BACK].map(|became| format!("job `{job}` {became}: "));
    reason.strip_prefix(&failed).or_else(|| reason.strip_prefix(&goes_back)).unwrap_or(reason)
}

/// Why a job ends whose workers have left, but which has no last checkpoint.
fn late_last_checkpoint(job: &Job) -> String {
    format!(
        "its workers have left, but its last checkpoint was not taken within {} s: an earlier one is still being \
         written to {}, whose disk is slow or does not answer",
        LAST_CHECKPOINT_TIMEOUT.as_secs(),
        job.terms.checkpoint_folder
    )
}
