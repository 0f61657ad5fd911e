//! The state of quantised keys at a worker: the residuals of its gradients, and its copy of the parameters.

use std::ops::Range;

use paramhub_core::chunk::{ChunkId, ChunkMap, Extent};
use paramhub_core::codec::Codec;
use paramhub_kernels::{convert, quantise, sum};

/// The state of all quantised keys of a job, allocated when it begins.
#[derive(Debug, Default)]
pub(crate) struct QuantisationState {
    /// One entry for each key; `None` where the key is not quantised.
    keys: Vec<Option<QuantisedKey>>,
    chunk_elements: u32,
    /// The loss of earlier gradients, which the next one makes up for.
    residual: Vec<f32>,
    /// The parameters, which answers change. None are kept in a job without an optimizer, where no answer
    /// depends on an earlier one.
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
    /// The offset of the first element.
    start: usize,
    /// The offset of the first byte in `wire`.
    wire: usize,
}

impl QuantisationState {
    /// Allocates the state for a table cut by `map`, with the codecs of its gradients.
    pub(crate) fn new(map: &ChunkMap, codecs: &[Codec], has_parameters: bool) -> Self {
        if !codecs.iter().any(|codec| codec.is_quantised()) {
            return QuantisationState::default();
        }
        let (mut elements, mut bytes) = (0, 0);
        let quantised_key = |(key, &codec): (u32, &Codec)| {
            let quantised_key = QuantisedKey { codec, start: elements, wire: bytes };
            codec.is_quantised().then(|| {
                elements += map.key_elements(key) as usize;
                let chunks = map.chunks_of(key);
                bytes += chunks.len() * codec.payload_bytes(map.chunk_elements() as usize);
                quantised_key
            })
        };
        let keys = (0..).zip(codecs).map(quantised_key).collect();
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

    /// Encodes a chunk's gradient, f32 at any alignment, unless this was done for the request under way.
    /// `exact` has room for a chunk.
    pub(crate) fn encode(&mut self, chunk: ChunkId, extent: &Extent, gradient: &[u8], exact: &mut [f32]) {
        if std::mem::replace(&mut self.encoded[chunk as usize], true) {
            return;
        }
        let (codec, elements, wire) = self.ranges(extent);
        let (residual, wire) = (&mut self.residual[elements], &mut self.wire[wire]);
        match bytemuck::try_cast_slice(gradient) {
            Ok(values) => quantise::encode(values, residual, wire, codec),
            Err(_) => {
                let exact = &mut exact[..residual.len()];
                convert::decode(gradient, exact, Codec::F32);
                quantise::encode(exact, residual, wire, codec);
            }
        }
    }

    /// A chunk's encoded gradient.
    pub(crate) fn payload(&self, extent: &Extent) -> &[u8] {
        &self.wire[self.ranges(extent).2]
    }

    /// Sets this worker's copy of the parameters, f32 at any alignment.
    pub(crate) fn adopt(&mut self, extent: &Extent, parameters: &[u8]) {
        let elements = self.ranges(extent).1;
        if let Some(mine) = self.parameters.get_mut(elements) {
            convert::decode(parameters, mine, Codec::F32);
        }
    }

    /// Decodes an answer and writes the result to `target`, f32 at any alignment: the parameters, or in a job
    /// without an optimizer the mean or the sum. `exact` has room for a chunk.
    pub(crate) fn decode(&mut self, extent: &Extent, answer: &[u8], target: &mut [u8], exact: &mut [f32]) {
        let (codec, elements, _) = self.ranges(extent);
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
        convert::encode(values, target, Codec::F32);
    }

    /// The codec of a chunk, its range of elements, and its range of bytes in `wire`.
    fn ranges(&self, extent: &Extent) -> (Codec, Range<usize>, Range<usize>) {
        let key = self.keys[extent.key as usize].expect("the chunk's key is quantised");
        let start = key.start + extent.offset as usize;
        let number = (extent.offset / u64::from(self.chunk_elements)) as usize;
        let wire = key.wire + number * key.codec.payload_bytes(self.chunk_elements as usize);
        let length = extent.bytes(key.codec) as usize;
        (key.codec, start..start + extent.elements as usize, wire..wire + length)
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
        let mut kept = QuantisationState::new(&map, &[Codec::F32, Codec::TwoBit], false);
        let values: Vec<f32> = (0..952).map(|at| (at as f32).sin()).collect();
        // One byte in, so that the f32 are not aligned.
        let mut gradient = vec![0; 1 + 952 * 4];
        convert::encode(&values, &mut gradient[1..], Codec::F32);
        let last = map.extent(2).unwrap();
        assert_eq!(last.elements, 952);
        let mut exact = vec![0.0; 2048];
        let mut sum = vec![0.0_f32; 952];
        let mut fresh = QuantisationState::new(&map, &[Codec::F32, Codec::TwoBit], false);
        fresh.encode(2, &last, &gradient[1..], &mut exact);
        let anew = fresh.payload(&last);
        for _ in 0..200 {
            kept.begin(1..3);
            kept.encode(2, &last, &gradient[1..], &mut exact);
            let first = kept.payload(&last).to_vec();
            kept.encode(2, &last, &gradient[1..], &mut exact);
            assert_eq!(kept.payload(&last), first, "sent again it is the same");
            sum::add(&mut sum, &first, Codec::TwoBit);
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
    fn nothing_is_kept_where_nothing_is_quantised() {
        let table = KeyTable::new(vec![Key::new("w", [3000])]).unwrap();
        let map = ChunkMap::new(&table, 8192).unwrap();
        let mut kept = QuantisationState::new(&map, &[Codec::BF16], true);
        kept.begin(0..2);
        assert_eq!((kept.residual.len(), kept.wire.len(), kept.encoded.len()), (0, 0, 0));
    }
}
