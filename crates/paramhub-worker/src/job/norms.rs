//! Steps in two phases: the norm of a step's mean gradient, and what rank 0 makes of it.

use super::{Job, Shared};
use crate::error::WorkerError;
use crate::handle::{Buffers, Handle, Ticket};
use crate::inbox::Command;
use crate::norms::NormBook;

impl Job {
    /// Waits for the Euclidean norm of the whole mean gradient of `step`, of all keys, in a job whose steps are in two phases
    /// ([`Settings::two_phase`](paramhub_core::settings::Settings::two_phase), [`Settings::clip_norm`](paramhub_core::settings::Settings::clip_norm)). Every rank may ask; the handle gives the norm.
    ///
    /// A step has a norm when every rank has pushed every key to it: one that is left out keeps everybody waiting.
    ///
    /// # Errors
    /// [`WorkerError::Misplaced`] in any other job, and where 1,024 such waits are under way. The handle fails likewise for a
    /// step more than 16 steps back.
    pub fn gradient_norm(&self, step: u32) -> Result<Handle<(), f64>, WorkerError> {
        self.shared.check_two_phase()?;
        if let Some(error) = self.failure() {
            return Err(error);
        }
        if !self.shared.norms.begin_wait() {
            let reason = format!("{} waits for norms are under way already", NormBook::WAITS_MAX);
            return Err(self.shared.misplaced(reason));
        }
        let if_lost = WorkerError::Left { who: self.shared.who.clone() };
        let (ticket, completion) = Ticket::new(Buffers::default(), true, if_lost);
        match self.shared.inbox.put(Command::AwaitNorm { step, ticket }) {
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

    /// Rank 0, in a job with [`Settings::two_phase`](paramhub_core::settings::Settings::two_phase) and no [`Settings::clip_norm`](paramhub_core::settings::Settings::clip_norm): lets the hubs update `step`, with its mean
    /// gradient times `factor`; 1 changes nothing. Pushes of the step end after it. Once a step, when its
    /// [norm](Self::gradient_norm) is known.
    ///
    /// # Errors
    /// [`WorkerError::Misplaced`] says which of these does not hold.
    pub fn release(&self, step: u32, factor: f32) -> Result<(), WorkerError> {
        self.shared.check_two_phase()?;
        if self.rank() != 0 {
            return Err(self.shared.misplaced("steps are released by rank 0".into()));
        }
        if let Some(norm) = self.settings().clip_norm {
            let reason = format!("steps are released by themselves in a job that clips gradients to {norm}");
            return Err(self.shared.misplaced(reason));
        }
        if !self.shared.norms.release(step) {
            let reason = format!("step {step} cannot be released: wait for its norm, and release it once");
            return Err(self.shared.misplaced(reason));
        }
        self.shared.inbox.put(Command::Release { step, factor })
    }
}

impl Shared {
    fn check_two_phase(&self) -> Result<(), WorkerError> {
        if self.settings.is_two_phase() {
            return Ok(());
        }
        Err(self.misplaced(
            "a step has a norm and a release only in two phases: ask for them in the settings, or for a norm to clip to"
                .into(),
        ))
    }
}
