//! The program states that a worker saves and pulls.

use std::sync::Arc;

use thiserror::Error;

use super::pieces::{IncomingState, Piece, PieceError, StateInPieces};
use crate::wire::ProgramState;

/// The requests for program states that are under way at a worker: at most one saves and one pulls.
#[derive(Debug)]
pub struct ProgramStateRequests {
    /// Bytes that a state may have.
    bytes_max: u32,
    save: Option<Save>,
    pull: Option<Pull>,
}

#[derive(Debug)]
struct Save {
    state: Arc<StateInPieces>,
    /// Whether the last piece has left.
    has_left: bool,
}

#[derive(Debug)]
struct Pull {
    step: u32,
    incoming: Option<IncomingState>,
}

/// The end of a pull: the state, or `None` if the hub does not have it.
pub type PulledState = Option<Vec<u8>>;

/// A hub's answer that does not belong to a request.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum UnexpectedState {
    /// Nothing of the kind was saved.
    #[error("it answered that the program state of step {0} is saved, which was not under way")]
    Saved(u32),
    /// No state of the step was asked for.
    #[error("it sent a program state of step {0}, which was not asked for")]
    Unasked(u32),
    /// The piece does not continue the state.
    #[error("it sent a program state that is wrong: {0}")]
    Piece(#[from] PieceError),
}

impl ProgramStateRequests {
    /// No requests, in a job whose states may have `bytes_max` bytes.
    pub fn new(bytes_max: u32) -> ProgramStateRequests {
        ProgramStateRequests { bytes_max, save: None, pull: None }
    }

    /// Begins to save a state. The caller saves one at a time, and sends its pieces in order.
    pub fn begin_save(&mut self, state: Arc<StateInPieces>) {
        debug_assert!(self.save.is_none(), "one state is saved at a time");
        self.save = Some(Save { state, has_left: false });
    }

    /// Notes that the last piece of the state has left. Before that no valid answer can come.
    pub fn save_left(&mut self) {
        if let Some(save) = &mut self.save {
            save.has_left = true;
        }
    }

    /// Begins to pull the state of a step. The caller pulls one at a time, and asks the hub for it.
    pub fn begin_pull(&mut self, step: u32) {
        debug_assert!(self.pull.is_none(), "one state is pulled at a time");
        self.pull = Some(Pull { step, incoming: None });
    }

    /// Takes the answer to a save, which then has ended.
    ///
    /// # Errors
    /// If no state of the step is being saved.
    pub fn saved(&mut self, step: u32) -> Result<(), UnexpectedState> {
        let answered = self.save.take_if(|save| save.has_left && save.state.step() == step);
        answered.map(drop).ok_or(UnexpectedState::Saved(step))
    }

    /// Takes a piece of an answer to a pull. Returns the state if the pull has ended with it. A first piece begins the
    /// answer again: the hub sends one when the rank replaces the state meanwhile.
    ///
    /// # Errors
    /// If the piece was not asked for, or does not follow the one before.
    pub fn piece(&mut self, piece: &Piece<'_>) -> Result<Option<PulledState>, UnexpectedState> {
        let asked = self.pull.as_mut().filter(|pull| pull.step == piece.step);
        let pull = asked.ok_or(UnexpectedState::Unasked(piece.step))?;
        if piece.total == ProgramState::MISSING {
            self.pull = None;
            return Ok(Some(None));
        }
        let is_complete = match pull.incoming.as_mut().filter(|_| piece.offset > 0) {
            Some(incoming) => incoming.add(piece)?,
            None => {
                let (incoming, is_complete) = IncomingState::begin(piece, self.bytes_max)?;
                pull.incoming = Some(incoming);
                is_complete
            }
        };
        if !is_complete {
            return Ok(None);
        }
        let incoming = self.pull.take().and_then(|pull| pull.incoming);
        Ok(Some(incoming.map(IncomingState::into_bytes)))
    }

    /// Notes that the stream was replaced. Returns what must be sent again: the state that is being saved, from its first
    /// piece, and the step of the state that is being pulled. The hub has dropped what was under way.
    pub fn resend(&mut self) -> (Option<Arc<StateInPieces>>, Option<u32>) {
        let save = self.save.as_mut().map(|save| {
            save.has_left = false;
            Arc::clone(&save.state)
        });
        let pull = self.pull.as_mut().map(|pull| {
            pull.incoming = None;
            pull.step
        });
        (save, pull)
    }

    /// The steps of the states that are being saved and pulled.
    pub fn underway(&self) -> impl Iterator<Item = u32> {
        let save = self.save.as_ref().map(|save| save.state.step());
        save.into_iter().chain(self.pull.as_ref().map(|pull| pull.step))
    }
}
