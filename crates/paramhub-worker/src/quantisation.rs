//! The state of quantised keys at a worker: the residuals of its gradients, and its copy of the parameters.

use std::ops::Range;

use paramhub_core::chunk::{ChunkId, ChunkMap, Extent};
use paramhub_core::codec::{Codec, Dtype};
use paramhub_kernels::{convert, quantise, sum};

/// The state of all quantised keys of a job, allocated when it begins.
#[derive(Debug, Default)]
pub(crate) struct QuantisationState {
    /// One entry for each key; `None` where the key is not quantised.
    keys: Vec<Option<QuantisedKey>>,
    chunk_elements: u32,
    /// The loss of earlier gradients, which the next one makes up for.
    residual: Vec<f32>,
    /// The parameters, which answers change, in f32 whatever the type of the key. None are kept in a job without an optimizer,
    /// where no answer depends on an earlier one.
    parameters: Vec<f32>,
    /// The encoded gradients.
    wire: Vec<u8>,
    /// For each chunk, whether `wire` holds its gradient of the request under way. A gradient must be encoded
    /// once, however often it is sent: encoding it puts its loss into the residual.
    encoded: Vec<bool>,
}

#[derive(Clone, Copy, Debug)]
struct QuantisedKey {
    codec: Codec,
    /// The codec of gradients and parameters in the user's memory.
    lies_as: Codec,
    /// The offset of the first element.
    start: usize,
    /// The offset of the first byte in `wire`.
    wire: usize,
}

impl QuantisationState {
    /// Allocates the state for a table cut by `map`, with the codecs and the types of its keys' gradients.
    pub(crate) fn new(map: &ChunkMap, codecs: &[Codec], dtypes: &[Dtype], has_parameters: bool) -> Self {
        if !codecs.iter().any(|codec| codec.is_quantised()) {
            return QuantisationState::default();
        }
        let (mut elements, mut bytes) = (0, 0);
        let quantised_key = |(key, (&codec, dtype)): (u32, (&Codec, &Dtype))| {
            let quantised_key = QuantisedKey { codec, lies_as: dtype.codec(), start: elements, wire: bytes };
            codec.is_quantised().then(|| {
                elements += map.key_elements(key) as usize;
                let chunks = map.chunks_of(key);
                bytes += chunks.len() * codec.payload_bytes(map.chunk_elements() as usize);
                quantised_key
            })
        };
        let keys = (0..).zip(codecs.iter().zip(dtypes)).map(quantised_key).collect();
        QuantisationState {
            keys,
            chunk_elements: map.chunk_elements(),
            residual: vec![0.0; elements],
            parameters: vec![0.0; if has_parameters { elements } else { 0 }],
            wire: vec![0; bytes],
            encoded: vec![false; map.len() as usize],
        }
    }

    /// Begins a request for these chunks.
    pub(crate) fn begin(&mut self, chunks: Range<ChunkId>) {
        if let Some(encoded) = self.encoded.get_mut(chunks.start as usize..chunks.end as usize) {
            encoded.fill(false);
        }
    }

    /// Clears a chunk's residual: later gradients do not make up for what earlier ones lost. Does nothing
    /// where the gradient of the request under way is encoded already.
    pub(crate) fn forget(&mut self, chunk: ChunkId, extent: &Extent) {
        if !self.encoded[chunk as usize] {
            let (_, elements, _) = self.ranges(extent);
            self.residual[elements].fill(0.0);
        }
    }

    /// Encodes a chunk's gradient, at any alignment, unless this was done for the request under way.
    /// `exact` has room for a chunk.
    pub(crate) fn encode(&mut self, chunk: ChunkId, extent: &Extent, gradient: &[u8], exact: &mut [f32]) {
        if std::mem::replace(&mut self.encoded[chunk as usize], true) {
            return;
        }
        let (QuantisedKey { codec, lies_as, .. }, elements, wire) = self.ranges(extent);
        let (residual, wire) = (&mut self.residual[elements], &mut self.wire[wire]);
        let as_it_lies = bytemuck::try_cast_slice(gradient).ok().filter(|_| lies_as == Codec::F32);
        let values = as_it_lies.unwrap_or_else(|| {
            let exact = &mut exact[..residual.len()];
            convert::decode(gradient, exact, lies_as);
            exact
        });
        quantise::encode(values, residual, wire, codec);
    }

    /// A chunk's encoded gradient.
    pub(crate) fn payload(&self, extent: &Extent) -> &[u8] {
        &self.wire[self.ranges(extent).2]
    }

    /// Sets this worker's copy of the parameters to those in the user's memory.
    pub(crate) fn adopt(&mut self, extent: &Extent, parameters: &[u8]) {
        let (key, elements, _) = self.ranges(extent);
        if let Some(mine) = self.parameters.get_mut(elements) {
            convert::decode(parameters, mine, key.lies_as);
        }
    }

    /// Sets this worker's copy of the parameters to those of an answer, f32 at any alignment, and writes them to `target`.
    pub(crate) fn take_whole(&mut self, extent: &Extent, answer: &[u8], target: &mut [u8]) {
        let (key, elements, _) = self.ranges(extent);
        if let Some(mine) = self.parameters.get_mut(elements) {
            convert::decode(answer, mine, Codec::F32);
            convert::encode(mine, target, key.lies_as);
        }
    }

    /// Decodes an answer and writes the result to `target`: the parameters, or in a job
    /// without an optimizer the mean or the sum. `exact` has room for a chunk.
    pub(crate) fn decode(&mut self, extent: &Extent, answer: &[u8], target: &mut [u8], exact: &mut [f32]) {
        let (QuantisedKey { codec, lies_as, .. }, elements, _) = self.ranges(extent);
        let values = match self.parameters.get_mut(elements) {
            Some(parameters) => {
                sum::add(parameters, answer, codec);
                parameters
            }
            None => {
                let exact = &mut exact[..extent.elements as usize];
                convert::decode(answer, exact, codec);
                exact
            }
        };
        convert::encode(values, target, lies_as);
    }

    /// The key of a chunk, the chunk's range of elements, and its range of bytes in `wire`.
    fn ranges(&self, extent: &Extent) -> (QuantisedKey, Range<usize>, Range<usize>) {
        let key = self.keys[extent.key as usize].expect("the chunk's key is quantised");
        let start = key.start + extent.offset as usize;
        let number = (extent.offset / u64::from(self.chunk_elements)) as usize;
        let wire = key.wire + number * key.codec.payload_bytes(self.chunk_elements as usize);
        let length = extent.bytes(key.codec) as usize;
        (key, start..start + extent.elements as usize, wire..wire + length)
    }
}

#[cfg(test)]
mod tests {
    use paramhub_core::key::{Key, KeyTable};

    use super::*;

    #[test]
    fn a_gradient_is_encoded_once_a_request_and_what_it_lost_goes_with_the_next() {
        let table = KeyTable::new(vec![Key::new("plain", [9]), Key::new("w", [3000])]).unwrap();
        let map = ChunkMap::new(&table, 8192).unwrap();
        let mut kept = QuantisationState::new(&map, &[Codec::F32, Codec::TWO_BIT], &[Dtype::F32; 2], false);
        let values: Vec<f32> = (0..952).map(|at| (at as f32).sin()).collect();
        // One byte in, so that the f32 are not aligned.
        let mut gradient = vec![0; 1 + 952 * 4];
        convert::encode(&values, &mut gradient[1..], Codec::F32);
        let last = map.extent(2).unwrap();
        assert_eq!(last.elements, 952);
        let mut exact = vec![0.0; 2048];
        let mut sum = vec![0.0_f32; 952];
        let mut fresh = QuantisationState::new(&map, &[Codec::F32, Codec::TWO_BIT], &[Dtype::F32; 2], false);
        fresh.encode(2, &last, &gradient[1..], &mut exact);
        let anew = fresh.payload(&last);
        for _ in 0..200 {
            kept.begin(1..3);
            kept.encode(2, &last, &gradient[1..], &mut exact);
            let first = kept.payload(&last).to_vec();
            kept.encode(2, &last, &gradient[1..], &mut exact);
            assert_eq!(kept.payload(&last), first, "sent again it is the same");
            sum::add(&mut sum, &first, Codec::TWO_BIT);
        }
        for (sum, value) in sum.iter().zip(&values) {
            assert!((sum / 200.0 - value).abs() < 0.02, "{} for {value}", sum / 200.0);
        }
        // A gradient sent again adds nothing to the residual; after `forget` it encodes as the first did.
        let sent = kept.payload(&last).to_vec();
        kept.forget(2, &last);
        kept.encode(2, &last, &gradient[1..], &mut exact);
        assert_eq!(kept.payload(&last), sent);
        kept.begin(1..3);
        kept.forget(2, &last);
        kept.encode(2, &last, &gradient[1..], &mut exact);
        assert_eq!(kept.payload(&last), anew);
    }

    #[test]
    fn parameters_of_half_precision_are_kept_in_f32() {
        let table = KeyTable::new(vec![Key { dtype: Dtype::BF16, ..Key::new("w", [4]) }]).unwrap();
        let map = ChunkMap::new(&table, 8192).unwrap();
        let mut kept = QuantisationState::new(&map, &[Codec::TWO_BIT], &[Dtype::BF16], true);
        let extent = map.extent(0).unwrap();
        let (mut target, mut exact) = ([0; 8], [0.0; 4]);
        let in_memory = |target: &[u8]| {
            let mut values = [0.0; 4];
            convert::decode(target, &mut values, Codec::BF16);
            values
        };
        let ones = [1.0_f32; 4].map(f32::to_le_bytes).concat();
        kept.take_whole(&extent, &ones, &mut target);
        // A sixteenth of what bf16 can tell apart at 1: no single change is seen, and all together are.
        let (change, mut lost, mut wire) =
            ([1.0 / 2048.0; 4], [0.0; 4], vec![0; Codec::TWO_BIT.payload_bytes(4)]);
        for step in 1..=16 {
            quantise::encode(&change, &mut lost, &mut wire, Codec::TWO_BIT);
            kept.decode(&extent, &wire, &mut target, &mut exact);
            assert!(step > 7 || in_memory(&target) == [1.0; 4], "{step}");
        }
        assert_eq!(in_memory(&target), [1.0078125; 4]);

        // The gradient is read in its own type.
        let mut gradient = [0; 8];
        convert::encode(&[1.0, -1.0, 2.0, -2.0], &mut gradient, Codec::BF16);
        kept.begin(0..1);
        kept.encode(0, &extent, &gradient, &mut exact);
        let mut decoded = [0.0; 4];
        convert::decode(kept.payload(&extent), &mut decoded, Codec::TWO_BIT);
        assert_eq!(decoded, [1.0, -1.0, 2.0, -2.0]);
    }

    #[test]
    fn nothing_is_kept_where_nothing_is_quantised() {
        let table = KeyTable::new(vec![Key::new("w", [3000])]).unwrap();
        let map = ChunkMap::new(&table, 8192).unwrap();
        let mut kept = QuantisationState::new(&map, &[Codec::BF16], &[Dtype::F32], true);
        kept.begin(0..2);
        assert_eq!((kept.residual.len(), kept.wire.len(), kept.encoded.len()), (0, 0, 0));
    }
}
