//! Room for payloads that are converted before they are sent: gradients in another encoding, pieces of
//! factors, and optimizer state.

use paramhub_core::codec::Codec;
use paramhub_core::wire::State;
use paramhub_kernels::convert;

/// The number of chunks converted for one write. It is small, since a chunk that the write does not begin is
/// converted again.
pub(crate) const PLACES: usize = 8;

/// One stream's converted chunks. Places are reused round-robin, starting behind the one whose frame has
/// begun, so that the bytes of a begun frame stay in place until it has left.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    bytes: Vec<u8>,
    place_bytes: usize,
}

impl Staging {
    /// Allocates room for chunks of up to `place_bytes` bytes on the wire; none for 0.
    pub(crate) fn new(place_bytes: usize) -> Self {
        Staging { bytes: vec![0; place_bytes * PLACES], place_bytes }
    }

    /// Whether it has no room.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Converts `source` from codec `from` to codec `to`, into a place. `exact` has room for as many f32.
    pub(crate) fn fill(&mut self, place: usize, source: &[u8], from: Codec, to: Codec, exact: &mut [f32]) {
        let elements = source.len() / from.bytes();
        let start = place * self.place_bytes;
        let target = &mut self.bytes[start..start + elements * to.bytes()];
        match (from, bytemuck::try_cast_slice::<u8, f32>(source)) {
            (Codec::F32, Ok(values)) => convert::encode(values, target, to),
            _ => {
                let exact = &mut exact[..elements];
                convert::decode(source, exact, from);
                convert::encode(exact, target, to);
            }
        }
    }

    /// Puts a chunk of optimizer state, f32, into a place, behind its head.
    pub(crate) fn fill_state(&mut self, place: usize, updates: u64, values: &[u8]) {
        let (head, start) = (State::head(updates), place * self.place_bytes);
        let target = &mut self.bytes[start..start + head.len() + values.len()];
        target[..head.len()].copy_from_slice(&head);
        target[head.len()..].copy_from_slice(values);
    }

    /// The first `length` bytes of a place, to be filled.
    pub(crate) fn place_mut(&mut self, place: usize, length: usize) -> &mut [u8] {
        &mut self.bytes[place * self.place_bytes..][..length]
    }

    /// The first `length` bytes of a place.
    pub(crate) fn place(&self, place: usize, length: usize) -> &[u8] {
        &self.bytes[place * self.place_bytes..][..length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_encodings_converts_from_any_alignment() {
        let values = [1.5_f32, -2.0, 0.25];
        let codecs = [Codec::F32, Codec::F16, Codec::BF16];
        for from in codecs {
            for shift in 0..4 {
                let mut source = vec![0; shift + 3 * from.bytes()];
                convert::encode(&values, &mut source[shift..], from);
                for to in codecs {
                    let mut staging = Staging::new(12);
                    staging.fill(PLACES - 1, &source[shift..], from, to, &mut [0.0; 3]);
                    let mut back = [0.0; 3];
                    convert::decode(staging.place(PLACES - 1, 3 * to.bytes()), &mut back, to);
                    assert_eq!(back, values, "{from} to {to}");
                }
            }
        }
    }
}
