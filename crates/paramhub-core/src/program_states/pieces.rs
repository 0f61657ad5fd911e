//! The pieces in which a program state travels.

use thiserror::Error;

use crate::wire::{Header, Operation, PROGRAM_STATE_HEAD_BYTES, ProgramState};

/// Bytes of the largest piece: a frame takes no longer than one with a chunk.
pub fn piece_bytes_max(chunk_bytes: u32, program_state_bytes: u32) -> u32 {
    chunk_bytes.min(program_state_bytes)
}

/// Bytes of the largest payload with a piece; 0 in a job without program states.
pub fn payload_bytes_max(chunk_bytes: u32, program_state_bytes: u32) -> usize {
    match piece_bytes_max(chunk_bytes, program_state_bytes) {
        0 => 0,
        piece => PROGRAM_STATE_HEAD_BYTES + piece as usize,
    }
}

/// A piece of a program state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    /// The step of the state.
    pub step: u32,
    /// The place of the first byte in the state.
    pub offset: u32,
    /// Bytes of the whole state, or [`ProgramState::MISSING`].
    pub total: u32,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// Why a piece does not belong to the state that comes in.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PieceError {
    /// The payload has no head.
    #[error("a piece of it has {bytes} bytes, which is too few")]
    TooShort {
        /// Bytes of the payload.
        bytes: usize,
    },
    /// The state has more bytes than one may have.
    #[error("that of step {step} has {total} bytes, more than the {most} of the job's `program_state_bytes`")]
    TooLarge {
        /// The step of the state.
        step: u32,
        /// Bytes of the state.
        total: u32,
        /// Bytes that one may have.
        most: u32,
    },
    /// The piece is not the next one.
    #[error("a piece of step {step} begins at byte {offset}, but byte {due} of step {due_step} is due")]
    Order {
        /// The step of the piece.
        step: u32,
        /// The place of the piece.
        offset: u32,
        /// The step of the state that comes in.
        due_step: u32,
        /// The place of the next piece.
        due: u32,
    },
    /// The piece is empty, ends after the state, or names another total than the first piece.
    #[error("a piece of {bytes} of {total} bytes at byte {offset} does not fit that of step {step}")]
    Length {
        /// The step of the state.
        step: u32,
        /// The place of the piece.
        offset: u32,
        /// Bytes of the piece.
        bytes: usize,
        /// Bytes of the whole state, as the piece says.
        total: u32,
    },
}

impl<'a> Piece<'a> {
    /// Reads a frame with a piece.
    ///
    /// # Errors
    /// If the payload is too short.
    pub fn read(header: &Header, payload: &'a [u8]) -> Result<Piece<'a>, PieceError> {
        let too_short = PieceError::TooShort { bytes: payload.len() };
        let ProgramState { total, piece } = ProgramState::decode(payload).ok_or(too_short)?;
        Ok(Piece { step: header.step, offset: header.chunk, total, bytes: piece })
    }

    /// The header of the piece's frame, which says that a worker saves it or that a hub sends it.
    pub fn header(&self, operation: Operation) -> Header {
        let length = (PROGRAM_STATE_HEAD_BYTES + self.bytes.len()) as u32;
        Header { chunk: self.offset, step: self.step, length, ..Header::bare(operation) }
    }

    /// Appends the payload of the piece's frame.
    pub fn write(&self, wire: &mut Vec<u8>) {
        wire.extend_from_slice(&ProgramState::head(self.total));
        wire.extend_from_slice(self.bytes);
    }
}

/// A program state of which the first pieces have come.
#[derive(Debug)]
pub struct IncomingState {
    step: u32,
    total: u32,
    bytes: Vec<u8>,
}

impl IncomingState {
    /// Takes the first piece of a state of at most `bytes_max` bytes. Returns also whether it is the only one.
    ///
    /// # Errors
    /// If it is not the first piece of such a state.
    pub fn begin(first: &Piece<'_>, bytes_max: u32) -> Result<(IncomingState, bool), PieceError> {
        let Piece { step, offset, total, .. } = *first;
        if offset != 0 {
            return Err(PieceError::Order { step, offset, due_step: step, due: 0 });
        }
        if total > bytes_max {
            return Err(PieceError::TooLarge { step, total, most: bytes_max });
        }
        let mut incoming = IncomingState { step, total, bytes: Vec::new() };
        first.check_length(total)?;
        // The system gives the memory when it is written, so a state that never comes takes none.
        incoming.bytes.reserve_exact(total as usize);
        incoming.bytes.extend_from_slice(first.bytes);
        let is_complete = incoming.is_complete();
        Ok((incoming, is_complete))
    }

    /// Takes the next piece. Returns whether it is the last.
    ///
    /// # Errors
    /// If it does not follow the piece before.
    pub fn add(&mut self, piece: &Piece<'_>) -> Result<bool, PieceError> {
        let (due_step, due) = (self.step, self.bytes.len() as u32);
        if (piece.step, piece.offset) != (due_step, due) {
            return Err(PieceError::Order { step: piece.step, offset: piece.offset, due_step, due });
        }
        piece.check_length(self.total)?;
        self.bytes.extend_from_slice(piece.bytes);
        Ok(self.is_complete())
    }

    /// The bytes that have come.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    fn is_complete(&self) -> bool {
        self.bytes.len() == self.total as usize
    }
}

impl Piece<'_> {
    /// Refuses a piece that does not fit a state of `total` bytes. Only an empty state has an empty piece: a rank could
    /// send as many as it likes.
    fn check_length(&self, total: u32) -> Result<(), PieceError> {
        let bytes = self.bytes.len();
        let ends_inside = u64::from(self.offset) + bytes as u64 <= u64::from(total);
        if self.total == total && ends_inside && (bytes > 0 || total == 0) {
            return Ok(());
        }
        Err(PieceError::Length { step: self.step, offset: self.offset, bytes, total: self.total })
    }
}

/// A program state that a worker saves, as it travels: each piece lies behind its head, so that it is sent from here.
#[derive(Debug)]
pub struct StateInPieces {
    step: u32,
    total: u32,
    piece_bytes: usize,
    wire: Vec<u8>,
}

impl StateInPieces {
    /// Cuts a state into pieces of `piece_bytes` bytes, which is not 0.
    pub fn new(step: u32, state: &[u8], piece_bytes: u32) -> StateInPieces {
        let (total, piece_bytes) = (state.len() as u32, piece_bytes as usize);
        let pieces = state.len().div_ceil(piece_bytes).max(1);
        let mut wire = Vec::with_capacity(state.len() + pieces * PROGRAM_STATE_HEAD_BYTES);
        for number in 0..pieces {
            let offset = number * piece_bytes;
            let bytes = &state[offset..state.len().min(offset + piece_bytes)];
            Piece { step, offset: offset as u32, total, bytes }.write(&mut wire);
        }
        StateInPieces { step, total, piece_bytes, wire }
    }

    /// The step of the state.
    pub fn step(&self) -> u32 {
        self.step
    }

    /// The number of pieces, at least one.
    pub fn pieces(&self) -> u32 {
        (self.total as usize).div_ceil(self.piece_bytes).max(1) as u32
    }

    /// A piece by its number, as a frame with its payload.
    ///
    /// # Panics
    /// If there is no such piece.
    pub fn piece(&self, number: u32) -> (Header, &[u8]) {
        let payload = self
            .wire
            .chunks(PROGRAM_STATE_HEAD_BYTES + self.piece_bytes)
            .nth(number as usize)
            .expect("the caller counts the pieces");
        let offset = number * self.piece_bytes as u32;
        let bytes = &payload[PROGRAM_STATE_HEAD_BYTES..];
        let piece = Piece { step: self.step, offset, total: self.total, bytes };
        (piece.header(Operation::SaveProgramState), payload)
    }
}
