//! This part ends a job: at once, or when its hubs have reported what they know; and how later reports are
//! recorded.

use std::time::Duration;

use super::cause::Cause;
use super::job_hubs::JobHub;
use super::{Job, JobPhase, Transition};
use crate::job_control::LAST_CHECKPOINT_TIMEOUT;
use crate::membership::Now;
use crate::service::{CauseKind, ErrorCode, JobState, StopWhen, refusal};

/// The time that an operator's stop waits for the hubs to report that they freed the job.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// The time that a launcher that is about to end its workers waits for the hubs' last checkpoints. These
/// take 5 s at most if the workers reach a step together.
const KEEP_TIMEOUT: Duration = Duration::from_secs(8);
/// The time that a launcher whose workers have ended waits for the hubs to report how the job ended.
const CONCLUDE_TIMEOUT: Duration = Duration::from_secs(15);

/// The time that the hubs of a job whose workers have ended may take to report how it ended there. The
/// bound is for hubs that call but do not answer. They answer within seconds, or within [`LAST_CHECKPOINT_TIMEOUT`] if a
/// last checkpoint takes longer, and then with a better reason.
const CONCLUDED_WITHIN_S: f64 = (LAST_CHECKPOINT_TIMEOUT.as_secs() + 60) as f64;
/// The time that a job that fails without workers waits for its last checkpoint to be on the disk.
const FAILS_WITHIN_S: f64 = 60.0;
/// The same for a hub that is not heard. It is less than [`CONCLUDE_TIMEOUT`], so that the launcher learns how the job
/// ended.
const UNHEARD_CONCLUDED_WITHIN_S: f64 = 10.0;

/// A question to the hubs of a job whose workers have ended.
#[derive(Debug)]
pub(super) struct PendingConclusion {
    asked: Now,
    /// The cause if the hubs report no other.
    cause: Cause,
}

/// A job that fails as soon as its hubs have written a last checkpoint, since nobody comes for the ranks that it has lost.
#[derive(Debug)]
pub(super) struct PendingFailure {
    asked: Now,
    message: String,
}

/// Returns the time that a StopService waits for what it asks.
pub(super) fn stop_timeout(when: StopWhen) -> Duration {
    match when {
        StopWhen::Now => STOP_TIMEOUT,
        StopWhen::WorkersEnding => KEEP_TIMEOUT,
        StopWhen::WorkersEnded => CONCLUDE_TIMEOUT,
    }
}

impl Job {
    /// StopService: ends the job, or asks its hubs how it ends. Returns how long the call may wait for that.
    pub(crate) fn stop(&mut self, reason: String, when: StopWhen, now: Now) -> (Duration, Transition) {
        let transition = match when {
            StopWhen::Now => self.fail(ErrorCode::JobEnded, reason, now),
            StopWhen::WorkersEnding => self.announce(reason, now),
            StopWhen::WorkersEnded => self.conclude(reason, now),
        };
        (stop_timeout(when), transition)
    }

    /// Whether its workers are about to end, or have ended.
    pub(super) fn is_concluding(&self) -> bool {
        self.announced.is_some() || self.concluding.is_some()
    }

    /// Fails the job for all callers, with a message that is certain. A job that has ended keeps its own.
    pub(crate) fn fail(&mut self, code: ErrorCode, message: String, now: Now) -> Transition {
        if self.state.has_ended() {
            return Transition::None;
        }
        self.fail_because(code, Cause::known(message, now), now)
    }

    /// Fails the job for all callers. If it has failed already, this cause replaces the recorded one that it
    /// explains.
    pub(crate) fn fail_because(&mut self, code: ErrorCode, cause: Cause, now: Now) -> Transition {
        if self.state.has_ended() {
            return self.explain(cause);
        }
        let announced = self.announced.take();
        self.note_cause(code, cause);
        if let Some(announced) = announced {
            let _ = self.replace(announced);
        }
        self.end(JobState::Failed, now)
    }

    /// A launcher is about to end the job's workers: asks the job's hubs for a last checkpoint. `reason` is
    /// why the job ended, unless it finishes.
    pub(crate) fn announce(&mut self, reason: String, now: Now) -> Transition {
        let cause = Cause::known(reason.clone(), now);
        if self.state.has_ended() {
            return self.explain(cause);
        }
        self.announced.get_or_insert(cause);
        self.ask(reason, StopWhen::WorkersEnding)
    }

    /// The processes of the job's workers have ended. If all workers had left, the job's hubs are about to
    /// report that, or are writing the last checkpoint, so their reports decide. A job that no hub serves yet
    /// ends at once.
    pub(crate) fn conclude(&mut self, reason: String, now: Now) -> Transition {
        if self.state.has_ended() {
            return Transition::None;
        }
        let cause = Cause { kind: CauseKind::Hearsay, rank: None, began: now, message: reason.clone() };
        if self.state != JobState::Running || self.is_rendezvous_only() {
            return self.fail_because(ErrorCode::JobEnded, cause, now);
        }
        self.concluding.get_or_insert(PendingConclusion { asked: now, cause });
        self.ask(reason, StopWhen::WorkersEnded)
    }

    /// Ends a job whose hubs have not reported for too long how it ended there.
    pub(super) fn check_conclusion(&mut self, now: Now) -> Transition {
        let Some(PendingConclusion { asked, cause }) = &self.concluding else { return Transition::None };
        let waited_s = now.seconds_since(*asked);
        let cause = match self.unheard_cause() {
            Some(unheard) if waited_s >= UNHEARD_CONCLUDED_WITHIN_S => unheard.clone(),
            _ if waited_s >= CONCLUDED_WITHIN_S => cause.clone(),
            _ => return Transition::None,
        };
        self.fail_because(ErrorCode::JobEnded, cause, now)
    }

    /// Fails a job for whose lost ranks nobody has come. If it has checkpoints, its hubs first write one of the step that they
    /// have in common, and the message says which.
    pub(super) fn fail_after_last_checkpoint(&mut self, message: String, now: Now) -> Transition {
        if self.options.checkpoint_every.is_none() {
            return self.fail(ErrorCode::JobEnded, message, now);
        }
        self.pending_failure = Some(PendingFailure { asked: now, message: message.clone() });
        match self.ask(message, StopWhen::WorkersEnding) {
            Transition::None => self.check_pending_failure(now),
            asked => asked,
        }
    }

    /// Whether the job is about to fail for want of workers, so that nobody joins it any more.
    pub(super) fn is_failing(&self) -> bool {
        self.pending_failure.is_some()
    }

    /// Fails a job whose hubs have written its last checkpoint, or cannot.
    pub(super) fn check_pending_failure(&mut self, now: Now) -> Transition {
        let Some(PendingFailure { asked, message }) = &self.pending_failure else { return Transition::None };
        if !self.is_kept() && now.seconds_since(*asked) < FAILS_WITHIN_S {
            return Transition::None;
        }
        let message = format!("{message}. {}", self.describe_newest_checkpoint());
        self.fail(ErrorCode::JobEnded, message, now)
    }

    /// What is known of the newest checkpoint. Of several hubs each has written its part, and parts of different steps
    /// are no checkpoint.
    fn describe_newest_checkpoint(&self) -> String {
        let step_of = |job_hub: &JobHub| job_hub.checkpoints.as_ref().and_then(|status| status.step);
        let mut steps = self.hubs_that_write().filter(|job_hub| job_hub.has_streams()).map(step_of);
        let first = steps.next().flatten();
        match first {
            Some(step) if steps.all(|other| other == first) => format!(
                "Its newest checkpoint, of step {step}, has been written: a job of this name goes on from it with resume = auto"
            ),
            _ => "No checkpoint of its last step could be written: not all chunks were at one step, or a disk failed".into(),
        }
    }

    /// Returns whether no hub holds anything of the job any more.
    pub(crate) fn is_cleared(&self) -> bool {
        self.phase == JobPhase::Cleared
    }

    /// Returns whether the job is over and no hub that is heard holds anything of it.
    pub(crate) fn is_concluded(&self) -> bool {
        self.is_cleared() || (self.state.has_ended() && !self.job_hubs.iter().any(JobHub::will_free))
    }

    /// Returns whether every hub that is heard has taken its part of the job's last checkpoint, or has none to take.
    pub(crate) fn is_kept(&self) -> bool {
        let keeps = |job_hub: &JobHub| job_hub.keeps && !job_hub.ended && job_hub.unheard.is_none();
        self.state.has_ended() || !self.job_hubs.iter().any(keeps)
    }

    /// A hub has taken its part of the last checkpoint, or will not take it.
    pub(crate) fn hub_kept_last(&mut self, hub: u32) {
        if let Some(index) = self.job_hub_index(hub) {
            self.job_hubs[index].keeps = false;
        }
    }

    /// Replaces the recorded cause of a failed job by one nearer to the root.
    pub(super) fn explain(&mut self, cause: Cause) -> Transition {
        if self.state == JobState::Failed && self.replace(cause) {
            return Transition::Explained;
        }
        Transition::None
    }

    fn replace(&mut self, cause: Cause) -> bool {
        let is_nearer = self.cause.as_ref().is_some_and(|held| cause.explains(held));
        if is_nearer {
            let code = self.failure.as_ref().map_or(ErrorCode::JobEnded, |failure| failure.code);
            self.note_cause(code, cause);
        }
        is_nearer
    }

    fn note_cause(&mut self, code: ErrorCode, cause: Cause) {
        self.message.clone_from(&cause.message);
        self.failure = Some(refusal(code, cause.message.clone()));
        self.cause = Some(cause);
    }

    /// Asks the hubs that hold the job.
    fn ask(&mut self, reason: String, when: StopWhen) -> Transition {
        let mut hubs = Vec::new();
        for job_hub in self.job_hubs.iter_mut().filter(|job_hub| job_hub.asked && !job_hub.ended) {
            job_hub.keeps = when == StopWhen::WorkersEnding;
            hubs.push(job_hub.hub);
        }
        if hubs.is_empty() { Transition::None } else { Transition::AskHubs { hubs, reason, when } }
    }

    pub(super) fn end(&mut self, state: JobState, now: Now) -> Transition {
        self.state = state;
        if state == JobState::Finished {
            self.message.clear();
        }
        self.ended_at = Some(now.unix_s);
        self.loss_tally.note(false, now);
        self.proposed = None;
        self.information_book = None;
        self.concluding = None;
        self.pending_failure = None;
        self.assignments.forget_processes();
        let stop: Vec<u32> =
            self.job_hubs.iter().filter(|job_hub| job_hub.asked && !job_hub.ended).map(|m| m.hub).collect();
        self.phase = if stop.is_empty() { JobPhase::Cleared } else { JobPhase::Ended };
        Transition::Ended { stop }
    }
}
