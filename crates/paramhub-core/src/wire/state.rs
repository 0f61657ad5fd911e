//! A chunk's optimizer state on the wire.

/// Bytes before the values.
pub const STATE_HEAD_BYTES: usize = 8;

/// Payload of [`Operation::State`](super::Operation::State) and
/// [`Operation::InitialiseState`](super::Operation::InitialiseState): how often the optimizer has run on the
/// chunk, then one slot of its state, one value per element. The header's `step` is the slot's number.
///
/// ```text
///  0                   8
///  +-------------------+------------------------
///  |   updates, u64    |  values, f32 each ...
///  +-------------------+------------------------
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State<'a> {
    /// Updates since the state was zero.
    pub updates: u64,
    /// The values, little-endian f32, at any alignment.
    pub values: &'a [u8],
}

impl<'a> State<'a> {
    /// Reads a payload; `None` if it is too short or ends inside a value.
    pub fn decode(wire: &'a [u8]) -> Option<Self> {
        let (updates, values) = wire.split_first_chunk::<STATE_HEAD_BYTES>()?;
        let updates = u64::from_le_bytes(*updates);
        values.len().is_multiple_of(size_of::<f32>()).then_some(State { updates, values })
    }

    /// The bytes before the values.
    pub fn head(updates: u64) -> [u8; STATE_HEAD_BYTES] {
        updates.to_le_bytes()
    }

    /// Bytes of the payload for a chunk of this many elements.
    pub const fn bytes(elements: u32) -> u32 {
        STATE_HEAD_BYTES as u32 + elements * size_of::<f32>() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_is_a_count_and_whole_values() {
        let wire = [&State::head(3)[..], &[1, 2, 3, 4]].concat();
        assert_eq!(State::decode(&wire), Some(State { updates: 3, values: &[1, 2, 3, 4] }));
        assert_eq!(wire.len(), State::bytes(1) as usize);
        assert_eq!(State::decode(&wire[..8]), Some(State { updates: 3, values: &[] }));
        assert_eq!(State::decode(&wire[..7]), None);
        assert_eq!(State::decode(&wire[..10]), None);
    }
}
