//! The calls that wait for a job: ConnectService and InitService of its ranks, and StopService.
//!
//! A call is answered once, when the job has come as far as the call asks or when the call's deadline has
//! passed. A caller that hangs up before gets no answer.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::auth::Incarnation;
use crate::composition::SiteId;
use crate::membership::hubs::OfferedHub;
use crate::membership::{Answer, CallId, Now};
use crate::service::{ErrorCode, JobStatus, ServiceError, StopWhen, refusal};

use super::ending::stop_timeout;
use super::{Job, JobPhase, Transition};

/// A call that waits for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JobCall {
    /// ConnectService. The ticket distinguishes the rank's calls.
    Connect { rank: u32, incarnation: Incarnation, ticket: u64 },
    /// InitService.
    Init { rank: u32, ticket: u64 },
    /// StopService.
    Stop(StopWhen),
}

/// The answers to one kind of call, of which all ranks of a site share one. It names every rank of the job,
/// so that one for each rank would take the square of their number.
pub(super) struct AnswersBySite<T>(BTreeMap<SiteId, Arc<T>>);

impl<T> AnswersBySite<T> {
    pub(super) fn new() -> Self {
        AnswersBySite(BTreeMap::new())
    }

    /// The answer for a site; `answer` makes it for the first rank of the site.
    pub(super) fn of(&mut self, site: SiteId, answer: impl FnOnce() -> T) -> Arc<T> {
        Arc::clone(self.0.entry(site).or_insert_with(|| Arc::new(answer())))
    }
}

impl JobCall {
    fn is_of_rank(&self) -> bool {
        !matches!(self, JobCall::Stop(_))
    }

    /// A refusal in the form that the call expects.
    fn refused(&self, refused: ServiceError) -> Answer {
        match self {
            JobCall::Connect { .. } => Answer::Connected(Err(refused)),
            JobCall::Init { .. } => Answer::Initialised(Err(refused)),
            JobCall::Stop(_) => Answer::Stopped(Err(refused)),
        }
    }
}

impl Job {
    /// Lets a call wait.
    pub(crate) fn wait(&mut self, id: CallId, call: JobCall) {
        self.calls.insert(id, call);
    }

    /// Returns the number of waiting calls of ranks.
    pub fn waiting(&self) -> usize {
        self.calls.values().filter(|call| call.is_of_rank()).count()
    }

    /// A call that waits.
    pub(crate) fn call(&self, id: CallId) -> Option<JobCall> {
        self.calls.get(&id).copied()
    }

    /// The answers to the calls that need not wait any longer.
    pub(crate) fn take_answers(&mut self, now: Now) -> Vec<(CallId, Answer)> {
        let is_due = |call: &JobCall| match call {
            JobCall::Connect { .. } => self.phase > JobPhase::Connecting,
            // The job has begun again.
            JobCall::Init { .. } if self.phase == JobPhase::Connecting => true,
            JobCall::Init { rank, .. } => {
                self.phase > JobPhase::Initialising && (self.state.has_ended() || !self.is_joining(*rank))
            }
            JobCall::Stop(StopWhen::WorkersEnding) => self.is_kept(),
            JobCall::Stop(StopWhen::Now) => self.is_cleared(),
            JobCall::Stop(StopWhen::WorkersEnded) => self.is_concluded(),
        };
        let due: Vec<CallId> =
            self.calls.iter().filter(|(_, call)| is_due(call)).map(|(&id, _)| id).collect();
        let (mut connected, mut initialised) = (AnswersBySite::new(), AnswersBySite::new());
        let mut answers = Vec::with_capacity(due.len());
        for id in due {
            let Some(call) = self.end_call(id, now) else { continue };
            let answer = match call {
                JobCall::Connect { rank, incarnation, .. } => {
                    Answer::Connected(self.connect_answer(rank, incarnation, &mut connected))
                }
                JobCall::Init { rank, .. } => Answer::Initialised(self.init_answer(rank, &mut initialised)),
                JobCall::Stop(_) => Answer::Stopped(Ok(Box::new(self.status(now)))),
            };
            answers.push((id, answer));
        }
        answers
    }

    /// The answers to all calls that wait for a job that is forgotten.
    pub(crate) fn refuse_calls(self, refused: &ServiceError) -> impl Iterator<Item = (CallId, Answer)> {
        self.calls.into_iter().map(move |(id, call)| (id, call.refused(refused.clone())))
    }

    /// A call has waited as long as it may. `hubs` are those that have joined.
    pub(crate) fn call_expired(
        &mut self,
        id: CallId,
        hubs: &[OfferedHub],
        now: Now,
    ) -> Option<(Answer, Transition)> {
        Some(match self.end_call(id, now)? {
            JobCall::Connect { rank, ticket, .. } => {
                let refused = self.connect_timed_out(rank, ticket, hubs);
                (Answer::Connected(Err(refused)), Transition::None)
            }
            JobCall::Init { rank, .. } if self.is_joining(rank) => {
                let refused = self.join_timed_out(rank);
                (Answer::Initialised(Err(refused)), self.rank_lost_again(rank, now))
            }
            JobCall::Init { rank, .. } => {
                let transition = self.init_timed_out(now);
                let answer = self.init_answer(rank, &mut AnswersBySite::new());
                (Answer::Initialised(answer), transition)
            }
            JobCall::Stop(when) => (Answer::Stopped(self.stop_timed_out(when, now)), Transition::None),
        })
    }

    /// The connection of a call that waits is gone.
    pub(crate) fn caller_gone(&mut self, id: CallId, now: Now) {
        match self.end_call(id, now) {
            Some(JobCall::Connect { rank, ticket, .. }) => self.connect_dropped(rank, ticket),
            Some(JobCall::Init { rank, ticket }) => self.init_dropped(rank, ticket, now),
            Some(JobCall::Stop(_)) | None => {}
        }
    }

    /// A call does not wait any longer: it is refused.
    pub(crate) fn end_refused(&mut self, id: CallId, now: Now) {
        self.end_call(id, now);
    }

    /// A call does not wait any longer. Until now that of a rank was a sign of life.
    fn end_call(&mut self, id: CallId, now: Now) -> Option<JobCall> {
        let call = self.calls.remove(&id)?;
        if call.is_of_rank() {
            self.lease.renew(now.monotonic);
        }
        Some(call)
    }

    /// The answer to a StopService that has waited as long as it may.
    fn stop_timed_out(&self, when: StopWhen, now: Now) -> Result<Box<JobStatus>, ServiceError> {
        // A launcher that ends its workers does not wait longer than this for a checkpoint.
        if when == StopWhen::WorkersEnding {
            return Ok(Box::new(self.status(now)));
        }
        let (name, holding) = (&self.name, self.hubs_not_cleared());
        let seconds = stop_timeout(when).as_secs();
        let message = match self.state.has_ended() {
            true => format!(
                "job `{name}` is stopped, but {holding} did not confirm within {seconds} s that its memory is free; it \
                 frees it when it next hears from the connection manager"
            ),
            false => format!(
                "{holding} did not say within {seconds} s how job `{name}` ended, whose workers have ended: `paramhub jobs \
                 show {name}` says it later"
            ),
        };
        Err(refusal(ErrorCode::Missing, message))
    }
}
