//! Two-phase steps: the norm of a step's mean gradient, and rank 0's release of the step.

use super::{Job, Shared};
use crate::command::JobCommand;
use crate::error::WorkerError;
use crate::handle::{Handle, new_request};
use crate::norms::NormHistory;

impl Job {
    /// Waits for the Euclidean norm of the whole mean gradient of `step`, over all keys, in a job with
    /// two-phase steps ([`Settings::two_phase`](paramhub_core::settings::Settings::two_phase),
    /// [`Settings::clip_norm`](paramhub_core::settings::Settings::clip_norm)). Every rank may ask; the handle
    /// gives the norm.
    ///
    /// A step has a norm when every rank has pushed every key to it: a key left out keeps all ranks waiting.
    ///
    /// # Errors
    /// [`WorkerError::Misused`] in any other job, and where 1,024 such waits are under way. The handle fails
    /// likewise for a step more than 16 steps back.
    pub fn gradient_norm(&self, step: u32) -> Result<Handle<(), f64>, WorkerError> {
        self.shared.check_two_phase()?;
        if let Some(error) = self.failure() {
            return Err(error);
        }
        if !self.shared.norms.begin_wait() {
            let reason = format!("{} waits for norms are under way already", NormHistory::WAITS_MAX);
            return Err(self.shared.misused(reason));
        }
        let if_lost = WorkerError::Left { who: self.shared.who.clone() };
        let (ticket, completion) = new_request(true, if_lost);
        match self.shared.inbox.put(JobCommand::AwaitNorm { step, ticket }) {
            Ok(()) => Ok(Handle::new(completion, |buffers| ((), buffers.norm))),
            Err(error) => {
                self.shared.norms.end_wait();
                Err(error)
            }
        }
    }

    /// The newest step whose [norm](Self::gradient_norm) is known, and the norm.
    pub fn last_gradient_norm(&self) -> Option<(u32, f64)> {
        self.shared.norms.last().map(|last| (last.step, last.norm))
    }

    /// Rank 0, in a job with [`Settings::two_phase`](paramhub_core::settings::Settings::two_phase) and no
    /// [`Settings::clip_norm`](paramhub_core::settings::Settings::clip_norm): lets the hubs update `step`
    /// with its mean gradient times `factor`; 1 changes nothing. Pushes of the step end after the update.
    /// Call it or [`skip`](Self::skip) once a step, when the step's [norm](Self::gradient_norm) is known.
    ///
    /// # Errors
    /// [`WorkerError::Misused`] says which of these does not hold.
    pub fn release(&self, step: u32, factor: f32) -> Result<(), WorkerError> {
        self.end_held(step, Some(factor))
    }

    /// Rank 0, as with [`release`](Self::release): lets the hubs end `step` without an update, for instance since its norm
    /// is not finite. Parameters and the optimizer's state stay as they are, and the optimizer does not count the step (Adam's
    /// `t`). The version of the parameters goes up by 1 nevertheless.
    ///
    /// # Errors
    /// As for `release`.
    pub fn skip(&self, step: u32) -> Result<(), WorkerError> {
        self.end_held(step, None)
    }

    fn end_held(&self, step: u32, factor: Option<f32>) -> Result<(), WorkerError> {
        self.shared.check_two_phase()?;
        if self.rank() != 0 {
            return Err(self.shared.misused("steps are released by rank 0".into()));
        }
        if self.settings().releases_by_itself() {
            let why = self.settings().clip_norm.map_or_else(
                || format!("with the optimizer {}", self.settings().optimizer.name),
                |norm| format!("in a job that clips gradients to {norm}"),
            );
            return Err(self.shared.misused(format!("steps are released by themselves {why}")));
        }
        if !self.shared.norms.release(step) {
            let reason = format!("step {step} cannot be released: wait for its norm, and release it once");
            return Err(self.shared.misused(reason));
        }
        self.shared.inbox.put(JobCommand::Release { step, factor })
    }
}

impl Shared {
    fn check_two_phase(&self) -> Result<(), WorkerError> {
        if self.settings.is_two_phase() {
            return Ok(());
        }
        Err(self.misused(
            "a step has a norm and a release only in two phases: ask for them in the settings, or for a norm to clip to"
                .into(),
        ))
    }
}
