//! How a job ends: at once, or when its hubs have said what they know; and what is told of it afterwards.

use paramhub_core::service::{CauseKind, ErrorCode, JobState, StopWhen};

use super::cause::Cause;
use super::{Job, Stage, Transition};
use crate::clock::Now;
use crate::error::refusal;

/// How long the hubs of a job whose workers have ended may take to say how it ended there. It is a bound for hubs that are heard
/// and do not answer: they answer within seconds, unless a last checkpoint takes longer, and a hub that is not heard is lost.
const CONCLUDED_WITHIN_S: f64 = 60.0;

/// A question to the hubs of a job whose workers have ended.
#[derive(Debug)]
pub(super) struct Concluding {
    asked: Now,
    /// Where they have nothing else to say.
    cause: Cause,
}

impl Job {
    /// Fails the job for everyone, with one message that is known for certain; what has ended keeps its own.
    pub(crate) fn fail(&mut self, code: ErrorCode, message: String, now: Now) -> Transition {
        if self.state.has_ended() {
            return Transition::None;
        }
        self.fail_because(code, Cause::known(message, now), now)
    }

    /// Fails the job for everyone. Where it has failed already, the message becomes this one if it explains the other.
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

    /// A launcher is about to end the job's workers: asks the hubs that have it for a last checkpoint. If it ends otherwise than
    /// finished, this is why.
    pub(crate) fn announce(&mut self, reason: String, now: Now) -> Transition {
        let cause = Cause::known(reason.clone(), now);
        if self.state.has_ended() {
            return self.explain(cause);
        }
        self.announced.get_or_insert(cause);
        self.ask(reason, StopWhen::WorkersEnding)
    }

    /// The processes of the job's workers have ended. If all had left, its hubs are about to say so, or are at work on the last
    /// checkpoint: they decide. A job that no hub serves yet ends at once.
    pub(crate) fn conclude(&mut self, reason: String, now: Now) -> Transition {
        if self.state.has_ended() {
            return Transition::None;
        }
        let cause = Cause { kind: CauseKind::Hearsay, rank: None, began: now, message: reason.clone() };
        if self.state != JobState::Running || self.only_meets() {
            return self.fail_because(ErrorCode::JobEnded, cause, now);
        }
        self.concluding.get_or_insert(Concluding { asked: now, cause });
        self.ask(reason, StopWhen::WorkersEnded)
    }

    /// Ends a job whose hubs have not said for too long how it ended there.
    pub(super) fn check_conclusion(&mut self, now: Now) -> Transition {
        match self.concluding.take_if(|concluding| now.seconds_since(concluding.asked) >= CONCLUDED_WITHIN_S)
        {
            Some(Concluding { cause, .. }) => self.fail_because(ErrorCode::JobEnded, cause, now),
            None => Transition::None,
        }
    }

    /// Whether no hub holds anything of it any more.
    pub(crate) fn is_cleared(&self) -> bool {
        *self.stage.borrow() == Stage::Cleared
    }

    /// Whether no hub has still to take a last checkpoint of the job.
    pub(crate) fn is_kept(&self) -> bool {
        self.state.has_ended() || self.members.iter().all(|member| !member.keeps || member.ended)
    }

    /// A hub has taken its part of the last checkpoint, or will not.
    pub(crate) fn hub_kept_last(&mut self, hub: u32) {
        if let Some(member) = self.members.iter_mut().find(|member| member.hub == hub) {
            member.keeps = false;
            // Those who wait look again.
            self.stage.send_modify(|_| {});
        }
    }

    /// Records a cause nearer to the root than the one a job has failed with.
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

    /// Asks the hubs that have the job.
    fn ask(&mut self, reason: String, when: StopWhen) -> Transition {
        let mut hubs = Vec::new();
        for member in self.members.iter_mut().filter(|member| member.asked && !member.ended) {
            member.keeps = when == StopWhen::WorkersEnding;
            hubs.push(member.hub);
        }
        if hubs.is_empty() { Transition::None } else { Transition::Asked { hubs, reason, when } }
    }

    pub(super) fn end(&mut self, state: JobState, now: Now) -> Transition {
        self.state = state;
        if state == JobState::Finished {
            self.message.clear();
        }
        self.ended_at = Some(now.unix_s);
        self.proposed = None;
        self.book = None;
        self.concluding = None;
        self.seats.forget_processes();
        let stop: Vec<u32> =
            self.members.iter().filter(|member| member.asked && !member.ended).map(|m| m.hub).collect();
        self.stage.send_replace(if stop.is_empty() { Stage::Cleared } else { Stage::Ended });
        Transition::Ended { stop }
    }
}
