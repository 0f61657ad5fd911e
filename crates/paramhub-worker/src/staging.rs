//! Memory for payloads that do not lie in memory as they are sent: tensors that travel in another codec,
//! pieces of factors, and optimizer state.

use paramhub_core::codec::Codec;
use paramhub_core::wire::State;
use paramhub_kernels::convert;

/// The number of payloads that one stream's staging memory holds, and so the most that are converted for one
/// write. It is small, because a chunk that the write does not begin to send is converted again for the next.
pub(crate) const PLACES: usize = 8;

/// One stream's staging memory, which is divided into [`PLACES`] places for one payload each. The caller
/// fills the places in turn, and begins after the place whose frame has been sent in part: the bytes of that
/// place must stay until the whole frame has been sent.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    bytes: Vec<u8>,
    place_bytes: usize,
}

impl Staging {
    /// Allocates places for payloads of up to `place_bytes` bytes. With 0 it allocates nothing.
    pub(crate) fn new(place_bytes: usize) -> Self {
        Staging { bytes: vec![0; place_bytes * PLACES], place_bytes }
    }

    /// Returns whether no memory was allocated.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Converts the elements in `source` from codec `from` to codec `to`, into a place. `scratch` has room
    /// for as many elements, which pass through f32.
    pub(crate) fn fill(&mut self, place: usize, source: &[u8], from: Codec, to: Codec, scratch: &mut [f32]) {
        let elements = source.len() / from.bytes();
        let start = place * self.place_bytes;
        let target = &mut self.bytes[start..start + elements * to.bytes()];
        match (from, bytemuck::try_cast_slice::<u8, f32>(source)) {
            (Codec::F32, Ok(values)) => convert::encode(values, target, to),
            _ => {
                let values = &mut scratch[..elements];
                convert::decode(source, values, from);
                convert::encode(values, target, to);
            }
        }
    }

    /// Copies the payload of a chunk's optimizer state into a place: the number of `updates`, and then the
    /// `values`, which are f32.
    pub(crate) fn fill_state(&mut self, place: usize, updates: u64, values: &[u8]) {
        let (head, start) = (State::head(updates), place * self.place_bytes);
        let target = &mut self.bytes[start..start + head.len() + values.len()];
        target[..head.len()].copy_from_slice(&head);
        target[head.len()..].copy_from_slice(values);
    }

    /// Returns the first `length` bytes of a place, to be filled.
    pub(crate) fn place_mut(&mut self, place: usize, length: usize) -> &mut [u8] {
        &mut self.bytes[place * self.place_bytes..][..length]
    }

    /// Returns the first `length` bytes of a place.
    pub(crate) fn place(&self, place: usize, length: usize) -> &[u8] {
        &self.bytes[place * self.place_bytes..][..length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_codecs_converts_from_any_alignment() {
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
