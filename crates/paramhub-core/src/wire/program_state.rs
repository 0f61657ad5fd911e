//! A piece of a program state on the wire.

/// Bytes before those of the piece.
pub const PROGRAM_STATE_HEAD_BYTES: usize = 4;

/// Payload of [`Operation::SaveProgramState`](super::Operation::SaveProgramState) and
/// [`Operation::ProgramState`](super::Operation::ProgramState): how many bytes the whole program state has, then a piece
/// of it. The header's `step` is the step that the state belongs to, its `chunk` the place of the piece's first byte in
/// the state.
///
/// ```text
///  0                   4
///  +-------------------+------------------------
///  |    total, u32     |  bytes of the piece ...
///  +-------------------+------------------------
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramState<'a> {
    /// Bytes of the whole program state, or [`MISSING`](Self::MISSING).
    pub total: u32,
    /// The bytes of the piece.
    pub piece: &'a [u8],
}

impl<'a> ProgramState<'a> {
    /// The total with which a hub says that it does not have the state. No piece follows it.
    pub const MISSING: u32 = u32::MAX;

    /// Reads a payload; `None` if it is too short.
    pub fn decode(wire: &'a [u8]) -> Option<Self> {
        let (total, piece) = wire.split_first_chunk::<PROGRAM_STATE_HEAD_BYTES>()?;
        Some(ProgramState { total: u32::from_le_bytes(*total), piece })
    }

    /// The bytes before those of the piece.
    pub fn head(total: u32) -> [u8; PROGRAM_STATE_HEAD_BYTES] {
        total.to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_is_a_total_and_a_piece() {
        let wire = [&ProgramState::head(9)[..], &[1, 2, 3]].concat();
        assert_eq!(ProgramState::decode(&wire), Some(ProgramState { total: 9, piece: &[1, 2, 3] }));
        assert_eq!(ProgramState::decode(&wire[..4]), Some(ProgramState { total: 9, piece: &[] }));
        assert_eq!(ProgramState::decode(&wire[..3]), None);
    }
}
