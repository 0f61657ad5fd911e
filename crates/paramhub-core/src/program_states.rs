//! Program states: what a program needs besides parameters and optimizer state when its process is started again, such as
//! its data position and its random numbers.
//!
//! A rank saves its program state of a step at a hub, which keeps the three newest of each rank, and pulls it again. A rank
//! that has saved none, since it was not there before, gets that of the lowest rank that has one of the step. The hub does not
//! read the bytes. They travel in [`Piece`]s, in order, on the rank's stream of
//! one [route](crate::placement::Placement::program_state_route). A rank saves one state at a time and pulls one at a time.
//!
//! [`ProgramStates`] are the rules of the hub, [`ProgramStateRequests`] those of the worker. Neither knows sockets or a
//! clock.

mod pieces;
mod requests;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use thiserror::Error;

pub use self::pieces::{IncomingState, Piece, PieceError, StateInPieces, payload_bytes_max, piece_bytes_max};
pub use self::requests::{ProgramStateRequests, PulledState, UnexpectedState};
use crate::wire::ProgramState;

/// Program states that a hub keeps of each rank. A rank may be two steps ahead of another: it has saved the state of the
/// step after the one under way, and the other has contributed to the step before, and not saved the state of this one.
pub const KEPT_MAX: usize = 3;

/// The program states of a job's ranks at the hub that keeps them.
#[derive(Debug)]
pub struct ProgramStates {
    /// Bytes that a state may have.
    bytes_max: u32,
    /// Bytes that a piece may have.
    piece_bytes_max: u32,
    ranks: Vec<RankStates>,
}

#[derive(Debug, Default)]
struct RankStates {
    /// The complete states, oldest first.
    kept: Vec<SavedState>,
    /// The state of which a part has come.
    incoming: Option<IncomingState>,
    /// The step of the state that is complete, as the rank has not been told yet.
    saved: Option<u32>,
    /// The state that the rank has asked for.
    pull: Option<Pull>,
}

#[derive(Debug)]
struct SavedState {
    step: u32,
    /// Shared with a checkpoint that is being written.
    bytes: Arc<Vec<u8>>,
}

#[derive(Debug)]
struct Pull {
    step: u32,
    /// The rank that has saved the state.
    of: u32,
    /// Bytes whose piece has begun to leave.
    sent: u32,
}

/// Why a hub ends the job of a rank that saves or pulls a program state.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ProgramStateViolation {
    /// The piece does not continue the state that comes in.
    #[error(transparent)]
    Piece(#[from] PieceError),
    /// A state of an earlier step than the newest.
    #[error(
        "it saved that of step {step} after that of step {newest}, and steps do not go back: save the newest step"
    )]
    Earlier {
        /// The step of the state.
        step: u32,
        /// The step of the newest state of the rank.
        newest: u32,
    },
    /// The answer to an earlier save has not left.
    #[error(
        "it began to save that of step {step} before it was told that of step {before} is saved: save one at a time"
    )]
    SaveUnderWay {
        /// The step of the state.
        step: u32,
        /// The step of the state before.
        before: u32,
    },
    /// An earlier pull has not been answered whole.
    #[error("it asked for that of step {step} before it had that of step {before}: pull one at a time")]
    PullUnderWay {
        /// The step of the state.
        step: u32,
        /// The step of the state that it asked for before.
        before: u32,
    },
}

impl ProgramStates {
    /// No states of so many ranks, each of which may have `bytes_max` bytes and travel in pieces of `piece_bytes_max` bytes.
    pub fn new(ranks: u32, bytes_max: u32, piece_bytes_max: u32) -> ProgramStates {
        let ranks = std::iter::repeat_with(RankStates::default).take(ranks as usize).collect();
        ProgramStates { bytes_max, piece_bytes_max, ranks }
    }

    /// Bytes of memory that the states of so many ranks take at most: of each rank those that are kept, one that
    /// comes in, and one in a checkpoint that is being written, if there are any.
    pub fn memory_bytes(ranks: u32, bytes_max: u32, has_checkpoints: bool) -> u64 {
        let states = (KEPT_MAX as u64 + 1 + u64::from(has_checkpoints)) * u64::from(bytes_max);
        u64::from(ranks) * (states + size_of::<RankStates>() as u64)
    }

    /// Takes a piece of a rank's state. Returns whether the state is complete; the rank is then to be told.
    ///
    /// # Errors
    /// If the piece breaks a rule; nothing has changed then.
    pub fn save(&mut self, rank: u32, piece: &Piece<'_>) -> Result<bool, ProgramStateViolation> {
        let states = &mut self.ranks[rank as usize];
        if let Some(before) = states.saved {
            return Err(ProgramStateViolation::SaveUnderWay { step: piece.step, before });
        }
        let is_complete = match &mut states.incoming {
            Some(incoming) => incoming.add(piece)?,
            None => {
                if let Some(newest) = states.newest().filter(|&newest| piece.step < newest) {
                    return Err(ProgramStateViolation::Earlier { step: piece.step, newest });
                }
                let (incoming, is_complete) = IncomingState::begin(piece, self.bytes_max)?;
                states.incoming = Some(incoming);
                is_complete
            }
        };
        if is_complete {
            let incoming = states.incoming.take().expect("a piece has just been added to it");
            states.saved = Some(piece.step);
            states.keep(SavedState { step: piece.step, bytes: Arc::new(incoming.into_bytes()) });
            self.send_again_if(|pull| (pull.of, pull.step) == (rank, piece.step));
        }
        Ok(is_complete)
    }

    /// The step of the state that a rank has saved, if the rank has not been told yet.
    pub fn saved(&self, rank: u32) -> Option<u32> {
        self.ranks.get(rank as usize)?.saved
    }

    /// Notes that the answer to a save has begun to leave.
    pub fn saved_begun(&mut self, rank: u32) {
        self.ranks[rank as usize].saved = None;
    }

    /// Notes that a rank asks for its state of `step`, or for that of the lowest rank if it has saved none of any step.
    ///
    /// # Errors
    /// If an earlier pull is under way.
    pub fn pull(&mut self, rank: u32, step: u32) -> Result<(), ProgramStateViolation> {
        let states = &self.ranks[rank as usize];
        if let Some(Pull { step: before, .. }) = states.pull {
            return Err(ProgramStateViolation::PullUnderWay { step, before });
        }
        let of = match states.kept.is_empty() {
            true => self.of_step(step).next().map_or(rank, |(lowest, _)| lowest),
            false => rank,
        };
        self.ranks[rank as usize].pull = Some(Pull { step, of, sent: 0 });
        Ok(())
    }

    /// The next piece of the state that a rank has asked for, if one is due.
    pub fn next_piece(&self, rank: u32) -> Option<Piece<'_>> {
        let Pull { step, of, sent } = *self.ranks.get(rank as usize)?.pull.as_ref()?;
        Some(match self.get(of, step) {
            None => Piece { step, offset: 0, total: ProgramState::MISSING, bytes: &[] },
            Some(bytes) => {
                let end = bytes.len().min(sent as usize + self.piece_bytes_max as usize);
                Piece { step, offset: sent, total: bytes.len() as u32, bytes: &bytes[sent as usize..end] }
            }
        })
    }

    /// Notes that the piece which [`next_piece`](Self::next_piece) returned has begun to leave.
    pub fn piece_begun(&mut self, rank: u32) {
        let Some(Piece { offset, total, bytes, .. }) = self.next_piece(rank) else { return };
        let sent = offset + bytes.len() as u32;
        let is_last = total == ProgramState::MISSING || sent == total;
        let pull = &mut self.ranks[rank as usize].pull;
        match pull {
            Some(pull) if !is_last => pull.sent = sent,
            _ => *pull = None,
        }
    }

    /// Drops what is under way on a rank's stream, which another has replaced or whose process is lost. The rank repeats
    /// what was not answered.
    pub fn cut(&mut self, rank: u32) {
        if let Some(states) = self.ranks.get_mut(rank as usize) {
            (states.incoming, states.saved, states.pull) = (None, None, None);
        }
    }

    /// A rank's complete state of `step`, if it is kept.
    pub fn get(&self, rank: u32, step: u32) -> Option<&[u8]> {
        self.ranks.get(rank as usize)?.get(step)
    }

    /// The complete states of `step`, with their ranks. They are shared, not copied.
    pub fn of_step(&self, step: u32) -> impl Iterator<Item = (u32, Arc<Vec<u8>>)> + '_ {
        (0..).zip(&self.ranks).filter_map(move |(rank, states)| {
            let kept = states.kept.iter().find(|kept| kept.step == step)?;
            Some((rank, Arc::clone(&kept.bytes)))
        })
    }

    /// Begins with the state of a rank that has none, which a checkpoint has kept. States of other ranks than the job's, or
    /// with more bytes than it allows, are not taken.
    pub fn restore(&mut self, rank: u32, step: u32, bytes: Vec<u8>) {
        if let Some(states) = self.ranks.get_mut(rank as usize).filter(|states| states.kept.is_empty())
            && bytes.len() <= self.bytes_max as usize
        {
            states.keep(SavedState { step, bytes: Arc::new(bytes) });
        }
    }

    /// The step of a rank's newest complete state.
    pub fn newest(&self, rank: u32) -> Option<u32> {
        self.ranks.get(rank as usize)?.newest()
    }

    /// The newest step of which all ranks that have saved any state have saved that step or a later one.
    pub fn newest_common(&self) -> Option<u32> {
        self.ranks.iter().filter_map(RankStates::newest).min()
    }

    /// Drops all states of steps after `step`, and those of all but the first `ranks` ranks, and what comes in.
    pub fn begin_again(&mut self, step: u32, ranks: u32) {
        let remaining = (ranks as usize).min(self.ranks.len());
        let (remain, gone) = self.ranks.split_at_mut(remaining);
        gone.fill_with(RankStates::default);
        for states in remain {
            states.incoming = None;
            states.kept.retain(|kept| kept.step <= step);
        }
        self.send_again_if(|pull| pull.step > step || pull.of >= ranks);
    }

    /// Sends states that have changed from their beginning again, so that no rank gets parts of two.
    fn send_again_if(&mut self, has_changed: impl Fn(&Pull) -> bool) {
        let pulls = self.ranks.iter_mut().filter_map(|states| states.pull.as_mut());
        pulls.filter(|pull| has_changed(pull)).for_each(|pull| pull.sent = 0);
    }

    /// Frees one state, and returns how many bytes it had; `None` when there is none. For a job that is over, between the
    /// turns of others.
    pub fn free_one(&mut self) -> Option<usize> {
        self.ranks.iter_mut().find_map(|states| match states.incoming.take() {
            Some(incoming) => Some(incoming.into_bytes().capacity()),
            None => states.kept.pop().map(|kept| kept.bytes.capacity()),
        })
    }
}

impl RankStates {
    fn newest(&self) -> Option<u32> {
        self.kept.last().map(|kept| kept.step)
    }

    fn get(&self, step: u32) -> Option<&[u8]> {
        self.kept.iter().find(|kept| kept.step == step).map(|kept| &kept.bytes[..])
    }

    /// Adds the newest state, in place of one of the same step or of the oldest of four.
    fn keep(&mut self, state: SavedState) {
        let step = state.step;
        if self.newest() == Some(step) {
            self.kept.pop();
        } else if self.kept.len() == KEPT_MAX {
            self.kept.remove(0);
        }
        self.kept.push(state);
    }
}
