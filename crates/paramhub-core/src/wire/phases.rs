//! Payloads between the two phases of a step; docs/protocol.md draws them.

use crate::norms::TensorSquares;

/// Head of the payload of [`Operation::Norm`](super::Operation::Norm): the sum of the squares of the mean gradient's
/// elements in the chunks of one route; an f64. [`Tensors`] follow, if the optimizer needs the norms of whole tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm(pub f64);

/// Head of the payload of [`Operation::Release`](super::Operation::Release): the factor for the mean gradient; an f32, of
/// any value. [`Tensors`] follow, if those of the Norms did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Release(pub f32);

/// The sums of squares of all keys, in the order of their numbers: two f64 for each, of the parameters and of the update. In a Norm
/// they are those of the route's chunks, in a Release those of the whole tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tensors<'a>(&'a [[u8; Tensors::BYTES_EACH]]);

impl Norm {
    /// Bytes of the head.
    pub const BYTES: usize = size_of::<f64>();

    /// The payload without tensors.
    pub fn encode(self) -> [u8; Self::BYTES] {
        self.0.to_le_bytes()
    }

    /// Reads a payload; `None` if it has no possible length.
    pub fn decode(wire: &[u8]) -> Option<(Self, Tensors<'_>)> {
        let (head, tensors) = wire.split_first_chunk()?;
        Some((Norm(f64::from_le_bytes(*head)), Tensors::decode(tensors)?))
    }
}

impl Release {
    /// Bytes of the head.
    pub const BYTES: usize = size_of::<f32>();

    /// The payload without tensors.
    pub fn encode(self) -> [u8; Self::BYTES] {
        self.0.to_le_bytes()
    }

    /// Reads a payload; `None` if it has no possible length.
    pub fn decode(wire: &[u8]) -> Option<(Self, Tensors<'_>)> {
        let (head, tensors) = wire.split_first_chunk()?;
        Some((Release(f32::from_le_bytes(*head)), Tensors::decode(tensors)?))
    }
}

impl<'a> Tensors<'a> {
    /// Bytes of one key.
    pub const BYTES_EACH: usize = 2 * size_of::<f64>();

    /// Appends the sums of all keys to a payload.
    pub fn encode(tensors: &[TensorSquares], payload: &mut Vec<u8>) {
        for squares in tensors {
            payload.extend_from_slice(&squares.parameters.to_le_bytes());
            payload.extend_from_slice(&squares.update.to_le_bytes());
        }
    }

    fn decode(wire: &'a [u8]) -> Option<Self> {
        let (tensors, rest) = wire.as_chunks();
        rest.is_empty().then_some(Tensors(tensors))
    }

    /// The number of keys; 0 where nothing follows the head.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether nothing follows the head.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The sums of each key.
    pub fn iter(&self) -> impl Iterator<Item = TensorSquares> + use<'a> {
        self.0.iter().map(|wire| {
            let (halves, _) = wire.as_chunks();
            let [parameters, update] = [0, 1].map(|half: usize| f64::from_le_bytes(halves[half]));
            TensorSquares { parameters, update }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip_and_nothing_else_is_read() {
        let tensors = [TensorSquares { parameters: 1.5, update: -2.0 }, TensorSquares::default()];
        for number in [0.0, -1.5, f64::INFINITY] {
            for count in 0..3 {
                let mut norm = Norm(number).encode().to_vec();
                Tensors::encode(&tensors[..count], &mut norm);
                let (read, rest) = Norm::decode(&norm).unwrap();
                assert_eq!((read, rest.len(), rest.is_empty()), (Norm(number), count, count == 0));
                assert!(rest.iter().eq(tensors[..count].iter().copied()));
                let mut release = Release(number as f32).encode().to_vec();
                Tensors::encode(&tensors[..count], &mut release);
                let (read, rest) = Release::decode(&release).unwrap();
                assert_eq!(read, Release(number as f32));
                assert!(rest.iter().eq(tensors[..count].iter().copied()));
            }
        }
        assert!(Release::decode(&Release(f32::NAN).encode()).unwrap().0.0.is_nan());
        let unreadable = [0, 7, 9, 23, 25].map(|length| Norm::decode(&[0; 64][..length]));
        assert_eq!(unreadable, [None; 5]);
        assert_eq!([0, 3, 5, 8, 19].map(|length| Release::decode(&[0; 64][..length])), [None; 5]);
    }
}
