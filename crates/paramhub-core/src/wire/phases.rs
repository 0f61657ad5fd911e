//! Payloads between the two phases of a step; docs/protocol.md draws them.

/// Payload of [`Operation::Norm`](super::Operation::Norm): the sum of the squares of the mean gradient's
/// elements in the chunks of one route; an f64.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm(pub f64);

/// Payload of [`Operation::Release`](super::Operation::Release): the factor for the mean gradient; an f32, of
/// any value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Release(pub f32);

impl Norm {
    /// Bytes of the payload.
    pub const BYTES: usize = size_of::<f64>();

    /// The payload.
    pub fn encode(self) -> [u8; Self::BYTES] {
        self.0.to_le_bytes()
    }

    /// Reads a payload; `None` if it has another length.
    pub fn decode(wire: &[u8]) -> Option<Self> {
        Some(Norm(f64::from_le_bytes(wire.try_into().ok()?)))
    }
}

impl Release {
    /// Bytes of the payload.
    pub const BYTES: usize = size_of::<f32>();

    /// The payload.
    pub fn encode(self) -> [u8; Self::BYTES] {
        self.0.to_le_bytes()
    }

    /// Reads a payload; `None` if it has another length.
    pub fn decode(wire: &[u8]) -> Option<Self> {
        Some(Release(f32::from_le_bytes(wire.try_into().ok()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip_and_nothing_else_is_read() {
        for number in [0.0, -1.5, f64::INFINITY] {
            assert_eq!(Norm::decode(&Norm(number).encode()), Some(Norm(number)));
            assert_eq!(Release::decode(&Release(number as f32).encode()), Some(Release(number as f32)));
        }
        assert!(Release::decode(&Release(f32::NAN).encode()).unwrap().0.is_nan());
        assert_eq!((Norm::decode(&[0; 7]), Release::decode(&[0; 8])), (None, None));
    }
}
