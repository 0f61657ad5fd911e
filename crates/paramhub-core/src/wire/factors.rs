//! A piece of a worker's factors on the wire.

/// Bytes before the values.
pub const FACTORS_HEAD_BYTES: usize = 8;

/// Payload of [`Operation::Factors`](super::Operation::Factors): the number of samples of the whole block,
/// the number of this piece, and the piece's values in the header's codec.
/// [`FactorBlock`](crate::factors::FactorBlock) states how blocks are cut.
///
/// ```text
///  0                4              8
///  +----------------+--------------+------------------------
///  |  samples, u32  |  piece, u32  |  values ...
///  +----------------+--------------+------------------------
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Factors<'a> {
    /// Samples of the whole block.
    pub samples: u32,
    /// The piece's number, from 0.
    pub piece: u32,
    /// The values, little-endian, at any alignment.
    pub values: &'a [u8],
}

impl<'a> Factors<'a> {
    /// Reads a payload; `None` if it is too short.
    pub fn decode(wire: &'a [u8]) -> Option<Self> {
        let (samples, rest) = wire.split_first_chunk()?;
        let (piece, values) = rest.split_first_chunk()?;
        Some(Factors { samples: u32::from_le_bytes(*samples), piece: u32::from_le_bytes(*piece), values })
    }

    /// The bytes before the values.
    pub fn head(samples: u32, piece: u32) -> [u8; FACTORS_HEAD_BYTES] {
        let mut head = [0; FACTORS_HEAD_BYTES];
        head[..4].copy_from_slice(&samples.to_le_bytes());
        head[4..].copy_from_slice(&piece.to_le_bytes());
        head
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_is_two_numbers_and_values() {
        let wire = [&Factors::head(32, 7)[..], &[1, 2, 3]].concat();
        assert_eq!(Factors::decode(&wire), Some(Factors { samples: 32, piece: 7, values: &[1, 2, 3] }));
        assert_eq!(Factors::decode(&wire[..8]), Some(Factors { samples: 32, piece: 7, values: &[] }));
        assert_eq!(Factors::decode(&wire[..7]), None);
    }
}
