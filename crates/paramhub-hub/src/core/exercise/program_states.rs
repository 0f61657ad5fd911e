//! The program states of an exercise: each that comes back must be one that was saved.

use std::rc::Rc;
use std::sync::Arc;

use paramhub_core::program_states::{KEPT_MAX, Piece, ProgramStateRequests, StateInPieces, piece_bytes_max};
use paramhub_core::wire::{Header, Operation};

use super::FuzzJob;

/// Bytes that a state may have: some pieces of the usual chunks.
pub(super) const BYTES_MAX: u32 = 2560;

type Frame = (Header, Rc<[u8]>);

/// What a worker has saved, and what it is waiting for.
pub(super) struct RankStates {
    requests: ProgramStateRequests,
    /// The newest states, as the hub must have them.
    kept: Vec<(u32, Vec<u8>)>,
}

impl Default for RankStates {
    fn default() -> Self {
        RankStates { requests: ProgramStateRequests::new(BYTES_MAX), kept: Vec::new() }
    }
}

impl RankStates {
    pub(super) fn is_answer(operation: Operation) -> bool {
        matches!(operation, Operation::ProgramStateSaved | Operation::ProgramState)
    }

    /// Takes an answer, and checks what it brings. Returns whether a request has ended with it.
    pub(super) fn take(&mut self, header: &Header, payload: &[u8]) -> bool {
        if header.operation == Operation::ProgramStateSaved {
            self.requests.saved(header.step).expect("an answer to a state that was saved");
            return true;
        }
        let piece = Piece::read(header, payload).expect("a piece");
        let Some(pulled) = self.requests.piece(&piece).expect("the next piece") else { return false };
        let kept = self.kept.iter().find(|(step, _)| *step == header.step).map(|(_, bytes)| bytes);
        assert!(pulled.as_ref() == kept, "another state of step {} than was saved", header.step);
        true
    }

    /// What a worker repeats on another stream.
    pub(super) fn resend(&mut self) -> Vec<Frame> {
        let (save, pull) = self.requests.resend();
        self.requests.save_left();
        let pieces = save.iter().flat_map(|state| frames(state));
        pieces.chain(pull.map(ask)).collect()
    }

    fn save(&mut self, choice: u8, piece_bytes: u32) -> Vec<Frame> {
        let step = self.kept.last().map_or(0, |(step, _)| step + u32::from(choice % 2));
        let bytes = vec![choice; usize::from(choice) * 10];
        let state = Arc::new(StateInPieces::new(step, &bytes, piece_bytes));
        self.kept.retain(|(kept, _)| *kept != step);
        self.kept.push((step, bytes));
        if self.kept.len() > KEPT_MAX {
            self.kept.remove(0);
        }
        self.requests.begin_save(Arc::clone(&state));
        self.requests.save_left();
        frames(&state).collect()
    }
}

fn frames(state: &StateInPieces) -> impl Iterator<Item = Frame> {
    (0..state.pieces()).map(|number| {
        let (header, payload) = state.piece(number);
        (header, payload.into())
    })
}

fn ask(step: u32) -> Frame {
    (Header { step, ..Header::bare(Operation::PullProgramState) }, Rc::default())
}

impl FuzzJob {
    /// Saves a program state, unless a request for one is under way.
    pub(super) fn save_program_state(&mut self, rank: usize, choice: u8) {
        let piece_bytes = piece_bytes_max(self.plan.settings.chunk_bytes, BYTES_MAX);
        if self.may_ask_for_state(rank) {
            let frames = self.workers[rank].program_states.save(choice, piece_bytes);
            frames.into_iter().for_each(|(header, payload)| self.send(rank, header, payload));
        }
    }

    /// Pulls one of the newest program states, or one before, unless a request for one is under way. A rank that has saved
    /// none would get one of another, which this cannot check.
    pub(super) fn pull_program_state(&mut self, rank: usize, choice: u8) {
        if self.may_ask_for_state(rank) && !self.workers[rank].program_states.kept.is_empty() {
            let states = &mut self.workers[rank].program_states;
            let newest = states.kept.last().map_or(0, |(step, _)| *step);
            let step = newest.saturating_sub(u32::from(choice % 3));
            states.requests.begin_pull(step);
            let (header, payload) = ask(step);
            self.send(rank, header, payload);
        }
    }

    fn may_ask_for_state(&self, rank: usize) -> bool {
        let worker = &self.workers[rank];
        !worker.has_left && !worker.has_ended && worker.program_states.requests.underway().next().is_none()
    }
}
