//! The sixteen bytes before every payload. Everything else was agreed at InitService (PHub section 3.2.1,
//! minimal metadata).
//!
//! ```text
//!  0         1         2                   4                   8                  12                  16
//!  +---------+---------+-------------------+-------------------+-------------------+-------------------+
//!  |operation|  codec  |     zero, u16     |    chunk, u32     |     step, u32     |    length, u32    |
//!  +---------+---------+-------------------+-------------------+-------------------+-------------------+
//! ```
//! All little-endian. `length` counts the payload bytes that follow.

use thiserror::Error;

use crate::chunk::ChunkId;
use crate::codec::Codec;
use crate::limits::{CHUNK_BYTES_MAX, CONTROL_BYTES_MAX};
use crate::wire::{FACTORS_HEAD_BYTES, PROGRAM_STATE_HEAD_BYTES, STATE_HEAD_BYTES};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 16;

/// The meaning of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Operation {
    /// Worker to hub: a gradient. The hub answers `Applied` when it has taken effect.
    Push = 1,
    /// Worker to hub, no payload: asks for parameters of at least version `step`.
    Pull = 2,
    /// Worker to hub: a gradient. The hub answers `Parameters`.
    PushPull = 3,
    /// Rank 0 to hub: the initial parameters, at version `step`. The hub answers `Applied`.
    Initialise = 4,
    /// Worker to hub: hyperparameters of the group `chunk`, which hold from `step` on.
    Retune = 5,
    /// Worker to hub, no payload: the worker ends its part of the job; the connection closes after it.
    Leave = 6,
    /// Either way, no payload: the sender lives.
    Heartbeat = 7,
    /// Worker to hub, no payload: asks for the values of optimizer state slot `step`. The hub answers
    /// `State`.
    PullState = 8,
    /// Rank 0 to hub: the initial values of optimizer state slot `step`. The hub answers `Applied`.
    InitialiseState = 9,
    /// Rank 0 to hub: the chunks held at `step` may be updated, with their mean gradients times the factor in
    /// the payload, and perhaps with the norms of whole tensors.
    Release = 10,
    /// Worker to hub: a piece of its factors of the layer whose weight begins with `chunk`. The hub answers
    /// the last piece with `Parameters` for every chunk of the layer.
    Factors = 11,
    /// Worker to hub: a piece of the worker's program state of `step`, from byte `chunk` on. The hub answers the last
    /// piece with `ProgramStateSaved`.
    SaveProgramState = 12,
    /// Worker to hub, no payload: asks for the worker's program state of `step`. The hub answers `ProgramState`.
    PullProgramState = 13,
    /// Rank 0 to hub, no payload: the chunks held at `step` end it without an update.
    Skip = 14,
    /// Hub to worker: parameters of version `step`.
    Parameters = 16,
    /// Hub to worker, no payload: a `Push` or `Initialise` has taken effect; `step` is the version that
    /// resulted.
    Applied = 17,
    /// Hub to worker: the job has failed; the connection closes after the frame. Worker to hub: the worker
    /// cannot go on, so the job fails.
    Failure = 18,
    /// Hub to worker: something that the job's owner should know, while the job goes on.
    Notice = 19,
    /// Hub to worker: the values of optimizer state slot `step`.
    State = 20,
    /// Hub to worker: all chunks of the route are held at `step`; the payload is the sum of the squares of
    /// their mean gradients, and perhaps each tensor's sums of squares.
    Norm = 21,
    /// Hub to a hub below: the sum of all workers' gradients, in f32; `step` is the version that it makes.
    Total = 22,
    /// Hub to worker, no payload: the hub has the whole program state of `step`.
    ProgramStateSaved = 23,
    /// Hub to worker: a piece of the worker's program state of `step`, from byte `chunk` on.
    ProgramState = 24,
    /// Hub to worker: all workers go back to an earlier step, and join anew; the connection closes after the frame. The
    /// payload is that of a `Notice`.
    Rewound = 25,
}

impl Operation {
    const ALL: [Operation; 24] = [
        Operation::Push,
        Operation::Pull,
        Operation::PushPull,
        Operation::Initialise,
        Operation::Retune,
        Operation::Leave,
        Operation::Heartbeat,
        Operation::PullState,
        Operation::InitialiseState,
        Operation::Release,
        Operation::Factors,
        Operation::SaveProgramState,
        Operation::PullProgramState,
        Operation::Skip,
        Operation::Parameters,
        Operation::Applied,
        Operation::Failure,
        Operation::Notice,
        Operation::State,
        Operation::Norm,
        Operation::Total,
        Operation::ProgramStateSaved,
        Operation::ProgramState,
        Operation::Rewound,
    ];

    /// The operations by their numbers on the wire.
    const BY_NUMBER: [Option<Operation>; 32] = {
        let (mut by_number, mut at) = ([None; 32], 0);
        while at < Self::ALL.len() {
            by_number[Self::ALL[at] as usize] = Some(Self::ALL[at]);
            at += 1;
        }
        by_number
    };

    /// The operation with this number on the wire, if there is one.
    pub fn from_wire(number: u8) -> Option<Operation> {
        Self::BY_NUMBER.get(usize::from(number)).copied().flatten()
    }

    /// Largest payload a frame of this kind may announce.
    pub const fn length_max(self) -> u32 {
        match self {
            Operation::Push
            | Operation::PushPull
            | Operation::Initialise
            | Operation::Parameters
            | Operation::Total
            | Operation::Norm
            | Operation::Release => CHUNK_BYTES_MAX,
            Operation::InitialiseState | Operation::State => CHUNK_BYTES_MAX + STATE_HEAD_BYTES as u32,
            Operation::Factors => CHUNK_BYTES_MAX + FACTORS_HEAD_BYTES as u32,
            Operation::SaveProgramState | Operation::ProgramState => {
                CHUNK_BYTES_MAX + PROGRAM_STATE_HEAD_BYTES as u32
            }
            Operation::Retune | Operation::Failure | Operation::Notice | Operation::Rewound => {
                CONTROL_BYTES_MAX
            }
            Operation::Pull
            | Operation::PullState
            | Operation::Leave
            | Operation::Heartbeat
            | Operation::PullProgramState
            | Operation::Skip
            | Operation::ProgramStateSaved
            | Operation::Applied => 0,
        }
    }

    /// Returns whether the payload is a chunk of a tensor. On a stream with an arena such payloads are in the
    /// arena and do not follow their headers. Optimizer state moves at checkpoints only, and factors and
    /// program states are few, so these have no place in an arena and always follow.
    pub const fn carries_tensor(self) -> bool {
        matches!(self, Operation::Push | Operation::PushPull | Operation::Initialise | Operation::Parameters)
    }

    /// Returns whether the header names a chunk.
    pub const fn is_about_a_chunk(self) -> bool {
        match self {
            Operation::Push
            | Operation::Pull
            | Operation::PushPull
            | Operation::Initialise
            | Operation::PullState
            | Operation::InitialiseState
            | Operation::Factors
            | Operation::Parameters
            | Operation::Applied
            | Operation::State
            | Operation::Total => true,
            Operation::Retune
            | Operation::Leave
            | Operation::Heartbeat
            | Operation::Release
            | Operation::Skip
            | Operation::Failure
            | Operation::Notice
            | Operation::Rewound
            | Operation::Norm
            | Operation::SaveProgramState
            | Operation::PullProgramState
            | Operation::ProgramStateSaved
            | Operation::ProgramState => false,
        }
    }

    /// Returns whether workers send the operation, hubs send it, or both do.
    pub const fn goes(self) -> Direction {
        match self {
            Operation::Heartbeat | Operation::Failure => Direction::Both,
            Operation::Parameters
            | Operation::Applied
            | Operation::Notice
            | Operation::Rewound
            | Operation::State
            | Operation::Norm
            | Operation::Total
            | Operation::ProgramStateSaved
            | Operation::ProgramState => Direction::ToWorker,
            _ => Direction::ToHub,
        }
    }
}

/// The direction of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Frames from workers.
    ToHub,
    /// Frames from hubs.
    ToWorker,
    /// Frames from either.
    Both,
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The meaning of the frame.
    pub operation: Operation,
    /// Encoding of a tensor payload; `F32` where there is none.
    pub codec: Codec,
    /// The chunk that the frame is about, the group, or the place of a piece in a program state; 0 if there is none.
    pub chunk: ChunkId,
    /// The step of the frame, or the slot of optimizer state; 0 if there is none.
    pub step: u32,
    /// Payload bytes that follow.
    pub length: u32,
}

/// The reason why sixteen bytes are not a valid header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// No such operation.
    #[error("operation {0} does not exist")]
    Operation(u8),
    /// The operation travels the other way.
    #[error("operation {0:?} does not go this way")]
    Direction(Operation),
    /// No such codec.
    #[error("codec {0} does not exist")]
    Codec(u8),
    /// The reserved bytes are not zero.
    #[error("the reserved bytes are {0:#06x}, not zero")]
    Reserved(u16),
    /// The payload is longer than the operation allows.
    #[error("{operation:?} announces {length} bytes, more than the {max} it may have")]
    Length {
        /// The operation.
        operation: Operation,
        /// The length announced.
        length: u32,
        /// The length allowed.
        max: u32,
    },
}

impl Header {
    /// A header without payload, chunk or step.
    pub const fn bare(operation: Operation) -> Self {
        Header { operation, codec: Codec::F32, chunk: 0, step: 0, length: 0 }
    }

    /// The wire form.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut wire = [0; HEADER_BYTES];
        wire[0] = self.operation as u8;
        wire[1] = self.codec.number();
        wire[4..8].copy_from_slice(&self.chunk.to_le_bytes());
        wire[8..12].copy_from_slice(&self.step.to_le_bytes());
        wire[12..16].copy_from_slice(&self.length.to_le_bytes());
        wire
    }

    /// Reads a header and checks what it announces. It came from a worker (`Direction::ToHub`), from a hub
    /// (`Direction::ToWorker`) or, between hubs, may be either.
    pub fn decode(wire: &[u8; HEADER_BYTES], direction: Direction) -> Result<Header, FrameError> {
        let word = |at: usize| u32::from_le_bytes(wire[at..at + 4].try_into().expect("four bytes"));
        let operation = Operation::from_wire(wire[0]).ok_or(FrameError::Operation(wire[0]))?;
        if ![operation.goes(), Direction::Both].contains(&direction) && operation.goes() != Direction::Both {
            return Err(FrameError::Direction(operation));
        }
        let codec = Codec::from_wire(wire[1]).ok_or(FrameError::Codec(wire[1]))?;
        let reserved = u16::from_le_bytes([wire[2], wire[3]]);
        if reserved != 0 {
            return Err(FrameError::Reserved(reserved));
        }
        let (length, max) = (word(12), operation.length_max());
        if length > max {
            return Err(FrameError::Length { operation, length, max });
        }
        Ok(Header { operation, codec, chunk: word(4), step: word(8), length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_offence_has_its_own_error() {
        let good =
            Header { operation: Operation::Push, codec: Codec::BF16, chunk: 7, step: 9, length: 64 }.encode();
        let with = |at: usize, byte: u8| {
            let mut wire = good;
            wire[at] = byte;
            Header::decode(&wire, Direction::ToHub).unwrap_err()
        };
        assert_eq!(with(0, 99), FrameError::Operation(99));
        assert_eq!(with(0, 16), FrameError::Direction(Operation::Parameters));
        assert_eq!(with(1, 6), FrameError::Codec(6));
        assert_eq!(with(1, 255), FrameError::Codec(255));
        assert_eq!(with(2, 1), FrameError::Reserved(1));
        assert!(matches!(with(15, 0x7f), FrameError::Length { .. }));
        assert!(matches!(with(0, Operation::Pull as u8), FrameError::Length { max: 0, .. }));
    }

    proptest! {
        #[test]
        fn whatever_decodes_encodes_to_the_same_bytes(wire in prop::array::uniform16(any::<u8>()), hub in any::<bool>()) {
            let direction = if hub { Direction::ToHub } else { Direction::ToWorker };
            if let Ok(header) = Header::decode(&wire, direction) {
                prop_assert_eq!(header.encode(), wire);
                prop_assert!(header.length <= header.operation.length_max());
            }
        }

        #[test]
        fn headers_round_trip(operation in 0usize..Operation::ALL.len(), codec in 0u8..5, chunk: u32, step: u32, length: u32) {
            let operation = Operation::ALL[operation];
            let direction = if operation.goes() == Direction::ToWorker { Direction::ToWorker } else { Direction::ToHub };
            let length = length.checked_rem(operation.length_max()).unwrap_or(0);
            let header = Header { operation, codec: Codec::from_wire(codec).unwrap(), chunk, step, length };
            prop_assert_eq!(Header::decode(&header.encode(), direction), Ok(header));
        }
    }
}
