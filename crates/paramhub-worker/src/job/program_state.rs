//! Program states: what a program keeps at the hub, so that its process can be started again.

use paramhub_core::program_states::{PulledState, StateInPieces, piece_bytes_max};

use super::{Job, Shared};
use crate::command::JobCommand;
use crate::error::WorkerError;
use crate::handle::{Handle, new_request};
use crate::program_state::ClaimError;

impl Job {
    /// Saves this rank's program state of `step` at the hub: what the program must restore when its process is started
    /// again at this step, such as its data position and its random numbers. The hub keeps the three newest states of each
    /// rank. One of the newest step replaces that. The request ends when the hub has the whole state.
    ///
    /// # Errors
    /// [`WorkerError::Misused`] for a state of more bytes than the job's option `program_state_bytes` allows, for one of an
    /// earlier step than the newest, and while another is being saved.
    pub fn save_program_state(
        &self,
        step: u32,
        state: impl AsRef<[u8]>,
    ) -> Result<Handle<(), ()>, WorkerError> {
        let (shared, state) = (&self.shared, state.as_ref());
        let most = shared.check_program_states()?;
        if state.len() > most as usize {
            return Err(shared.misused(format!(
                "the program state of step {step} has {} bytes, but program_state_bytes of the job is {most}: save less, or create \
                 the job with a larger program_state_bytes",
                state.len()
            )));
        }
        if let Some(error) = self.failure() {
            return Err(error);
        }
        shared
            .program_states
            .begin_save(step)
            .map_err(|claim| shared.misused(refusal("saved", step, claim)))?;
        let state = StateInPieces::new(step, state, piece_bytes_max(shared.settings.chunk_bytes, most));
        let (ticket, completion) = new_request(true, shared.left());
        match shared.inbox.put(JobCommand::SaveProgramState { state, ticket }) {
            Ok(()) => Ok(Handle::new(completion, |_| ((), ()))),
            Err(error) => {
                shared.program_states.end_save();
                Err(error)
            }
        }
    }

    /// Receives this rank's program state of `step`, which this process or an earlier one of the rank has saved; `None` if
    /// the hub does not have it. A rank that has saved none of any step, since it was not there before, receives that of the
    /// lowest rank which has one of the step.
    ///
    /// # Errors
    /// [`WorkerError::Misused`] in a job without the option `program_state_bytes`, and while another state is being
    /// received.
    pub fn program_state(&self, step: u32) -> Result<Handle<(), PulledState>, WorkerError> {
        let shared = &self.shared;
        shared.check_program_states()?;
        if let Some(error) = self.failure() {
            return Err(error);
        }
        shared
            .program_states
            .begin_pull(step)
            .map_err(|claim| shared.misused(refusal("received", step, claim)))?;
        let (ticket, completion) = new_request(true, shared.left());
        match shared.inbox.put(JobCommand::PullProgramState { step, ticket }) {
            Ok(()) => Ok(Handle::new(completion, |buffers| ((), buffers.program_state))),
            Err(error) => {
                shared.program_states.end_pull();
                Err(error)
            }
        }
    }
}

impl Shared {
    /// The bytes that a program state may have.
    fn check_program_states(&self) -> Result<u32, WorkerError> {
        if self.program_state_bytes > 0 {
            return Ok(self.program_state_bytes);
        }
        Err(self.misused(
            "the hub keeps no program states of this job: create it with program_state_bytes, the most bytes of one, and with the \
             reduction flat if its hubs serve racks or hosts"
                .into(),
        ))
    }

    fn left(&self) -> WorkerError {
        WorkerError::Left { who: self.who.clone() }
    }
}

fn refusal(what: &str, step: u32, claim: ClaimError) -> String {
    match claim {
        ClaimError::Busy(busy) => {
            format!(
                "the program state of step {busy} is still being {what}: wait for it before that of step {step}"
            )
        }
        ClaimError::Later(later) => format!(
            "the program state of step {step} cannot be {what} after that of step {later}: steps do not go back"
        ),
    }
}
