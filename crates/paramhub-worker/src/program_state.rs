//! The requests for program states: what user threads must know of them, and what the I/O thread keeps.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paramhub_core::program_states::{Piece, ProgramStateRequests, StateInPieces, UnexpectedState};

use crate::error::WorkerError;
use crate::handle::Ticket;

/// Whether a program state is being saved or pulled: user threads must know this without asking the I/O thread.
#[derive(Debug, Default)]
pub(crate) struct ProgramStateClaims {
    claims: Mutex<Claims>,
}

#[derive(Debug, Default)]
struct Claims {
    /// The step of the state that is being saved.
    saving: Option<u32>,
    /// The step of the state that is being pulled.
    pulling: Option<u32>,
    /// The step of the newest state that this process has saved.
    newest: Option<u32>,
}

/// Why a program state cannot be saved or pulled now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClaimError {
    /// A request for the state of this step is under way.
    Busy(u32),
    /// The state of this later step was saved.
    Later(u32),
}

impl ProgramStateClaims {
    /// Notes that the state of `step` is about to be saved.
    pub(crate) fn begin_save(&self, step: u32) -> Result<(), ClaimError> {
        let mut claims = self.claims();
        if let Some(busy) = claims.saving {
            return Err(ClaimError::Busy(busy));
        }
        if let Some(later) = claims.newest.filter(|&newest| step < newest) {
            return Err(ClaimError::Later(later));
        }
        (claims.saving, claims.newest) = (Some(step), Some(step));
        Ok(())
    }

    /// Notes that the state of `step` is about to be pulled.
    pub(crate) fn begin_pull(&self, step: u32) -> Result<(), ClaimError> {
        let pulling = &mut self.claims().pulling;
        match *pulling {
            Some(busy) => Err(ClaimError::Busy(busy)),
            None => {
                *pulling = Some(step);
                Ok(())
            }
        }
    }

    /// Lets another state be saved.
    pub(crate) fn end_save(&self) {
        self.claims().saving = None;
    }

    /// Lets another state be pulled.
    pub(crate) fn end_pull(&self) {
        self.claims().pulling = None;
    }

    fn claims(&self) -> MutexGuard<'_, Claims> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The I/O thread's table of requests for program states.
pub(crate) struct ProgramStatesInFlight {
    requests: ProgramStateRequests,
    save: Option<Ticket>,
    pull: Option<Ticket>,
}

/// The end of a request, which fails with the panic of a callback, or an answer that no request has.
pub(crate) type Answered = Result<Result<(), Arc<str>>, UnexpectedState>;

impl ProgramStatesInFlight {
    /// No requests, for states of at most `bytes_max` bytes.
    pub(crate) fn new(bytes_max: u32) -> Self {
        ProgramStatesInFlight { requests: ProgramStateRequests::new(bytes_max), save: None, pull: None }
    }

    /// Begins to save a state, whose pieces the caller sends.
    pub(crate) fn begin_save(&mut self, state: StateInPieces, ticket: Ticket) -> Arc<StateInPieces> {
        let state = Arc::new(state);
        self.requests.begin_save(Arc::clone(&state));
        self.save = Some(ticket);
        state
    }

    /// Begins to pull the state of a step, for which the caller asks the hub.
    pub(crate) fn begin_pull(&mut self, step: u32, ticket: Ticket) {
        self.requests.begin_pull(step);
        self.pull = Some(ticket);
    }

    /// Notes that the last piece of the state has left.
    pub(crate) fn save_left(&mut self) {
        self.requests.save_left();
    }

    /// Takes the answer to a save.
    pub(crate) fn saved(&mut self, claims: &ProgramStateClaims, step: u32) -> Answered {
        self.requests.saved(step)?;
        // Before the handle ends: a caller who sees the end may save the next state at once.
        claims.end_save();
        Ok(self.save.take().map_or(Ok(()), |ticket| ticket.finish(Ok(()))))
    }

    /// Takes a piece of the answer to a pull, which ends with the last.
    pub(crate) fn piece(&mut self, claims: &ProgramStateClaims, piece: &Piece<'_>) -> Answered {
        let Some(pulled) = self.requests.piece(piece)? else { return Ok(Ok(())) };
        claims.end_pull();
        Ok(self.pull.take().map_or(Ok(()), |mut ticket| {
            ticket.value.program_state = pulled;
            ticket.finish(Ok(()))
        }))
    }

    /// What must be sent again on a stream that has replaced another: a state, and the step of one that is asked for.
    pub(crate) fn resend(&mut self) -> (Option<Arc<StateInPieces>>, Option<u32>) {
        self.requests.resend()
    }

    /// The steps of the states that are being saved and pulled.
    pub(crate) fn underway(&self) -> impl Iterator<Item = u32> {
        self.requests.underway()
    }

    /// Fails every request under way. Ignores panics of callbacks, for the job has failed already.
    pub(crate) fn fail_all(&mut self, claims: &ProgramStateClaims, error: &WorkerError) {
        claims.end_save();
        claims.end_pull();
        for ticket in self.save.take().into_iter().chain(self.pull.take()) {
            let _ = ticket.finish(Err(error.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_state_is_saved_and_one_is_pulled_at_a_time_and_steps_do_not_go_back() {
        let claims = ProgramStateClaims::default();
        assert_eq!([claims.begin_save(3), claims.begin_pull(1)], [Ok(()), Ok(())]);
        assert_eq!(claims.begin_save(4), Err(ClaimError::Busy(3)));
        assert_eq!(claims.begin_pull(1), Err(ClaimError::Busy(1)));
        claims.end_save();
        claims.end_pull();
        assert_eq!(claims.begin_save(2), Err(ClaimError::Later(3)));
        assert_eq!([claims.begin_save(3), claims.begin_pull(0)], [Ok(()), Ok(())]);
    }
}
