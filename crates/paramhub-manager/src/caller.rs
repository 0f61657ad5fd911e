//! A caller that waits for the answer to its call.

use std::sync::Arc;
use std::time::Duration;

use paramhub_core::auth::Namespace;
use paramhub_core::membership::{Answer, CallId};
use paramhub_core::service::ServiceError;
use paramhub_core::settings::Settings;
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use crate::clock::{instant, now};
use crate::registry::Registry;
use crate::state::ManagerState;

/// A call that waits. If its connection breaks, this is dropped before the answer is there, and reports that.
pub(crate) struct Caller<'a> {
    registry: &'a Registry,
    call: CallId,
    answer: oneshot::Receiver<Answer>,
    is_answered: bool,
}

impl<'a> Caller<'a> {
    /// Lets a call wait that has just been made.
    pub(crate) fn wait(registry: &'a Registry, state: &mut ManagerState, call: CallId) -> Self {
        Caller { registry, call, answer: state.wait(call), is_answered: false }
    }

    /// The settings in the call agree with the first rank's. Returns the job and its settings if the placement
    /// is to be made.
    pub(crate) fn agree(&self) -> Option<(Namespace, Arc<Settings>)> {
        self.registry.with(|state| state.membership.agree(self.call, now()))
    }

    /// The settings in the call differ from the first rank's.
    pub(crate) fn disagree(&self, disagreement: &str) {
        self.registry.with(|state| state.membership.disagree(self.call, disagreement, now()));
    }

    /// The settings in the call of a process that takes a lost rank agree with those of the job, or do not.
    pub(crate) fn join(&self, agrees: bool) {
        self.registry.with(|state| state.membership.join(self.call, agrees, now()));
    }

    /// The answer, which comes at the call's deadline at the latest.
    pub(crate) async fn answer_by(&mut self, deadline: Duration) -> Result<Answer, ServiceError> {
        tokio::select! {
            biased;
            _ = self.registry.ended() => return Err(self.registry.end_refusal()),
            answered = timeout_at(instant(deadline), &mut self.answer) => {
                if let Ok(answered) = answered {
                    return self.take(answered);
                }
            }
        }
        self.registry.with(|state| state.membership.expire(self.call, now()));
        self.answer().await
    }

    /// The answer to a call without a deadline.
    pub(crate) async fn answer(&mut self) -> Result<Answer, ServiceError> {
        tokio::select! {
            biased;
            _ = self.registry.ended() => Err(self.registry.end_refusal()),
            answered = &mut self.answer => self.take(answered),
        }
    }

    fn take(&mut self, answered: Result<Answer, oneshot::error::RecvError>) -> Result<Answer, ServiceError> {
        self.is_answered = true;
        Ok(answered.expect("a call that waits is answered"))
    }
}

impl Drop for Caller<'_> {
    fn drop(&mut self) {
        if !self.is_answered {
            self.registry.with(|state| state.hang_up(self.call));
        }
    }
}
