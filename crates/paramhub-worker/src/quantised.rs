//! What a worker keeps of quantised keys: what its gradients have lost so far, and the parameters it has.

use std::ops::Range;

use paramhub_core::chunk::{ChunkId, ChunkMap, Extent};
use paramhub_core::codec::Codec;
use paramhub_kernels::{convert, quantise, sum};

/// Of all quantised keys of a job, allocated when it begins.
#[derive(Debug, Default)]
pub(crate) struct Quantised {
    /// Of every key, if it is quantised.
    places: Vec<Option<Place>>,
    chunk_elements: u32,
    /// What earlier gradients lost, to be made up for by the next.
    residual: Vec<f32>,
    /// The parameters, which answers change. None are kept in a job without an optimizer, whose answers stand alone.
    parameters: Vec<f32>,
    /// The gradients as they travel.
    wire: Vec<u8>,
    /// Of every chunk: whether its gradient of the request under way is in `wire`. It must be encoded once, however often it
    /// is sent: what it lost is in the residual then.
    encoded: Vec<bool>,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    codec: Codec,
    /// The first element.
    start: usize,
    /// The first byte as it travels.
    wire: usize,
}

impl Quantised {
    /// For a table cut by `map`, with its gradients' codecs.
    pub(crate) fn new(map: &ChunkMap, codecs: &[Codec], has_parameters: bool) -> Self {
        if !codecs.iter().any(|codec| codec.is_quantised()) {
            return Quantised::default();
        }
        let (mut elements, mut bytes) = (0, 0);
        let place = |(key, &codec): (u32, &Codec)| {
            let place = Place { codec, start: elements, wire: bytes };
            codec.is_quantised().then(|| {
                elements += map.key_elements(key) as usize;
                let chunks = map.chunks_of(key);
                bytes += chunks.len() * codec.payload_bytes(map.chunk_elements() as usize);
                place
            })
        };
        let places = (0..).zip(codecs).map(place).collect();
        Quantised {
            places,
            chunk_elements: map.chunk_elements(),
            residual: vec![0.0; elements],
            parameters: vec![0.0; if has_parameters { elements } else { 0 }],
            wire: vec![0; bytes],
            encoded: vec![false; map.len() as usize],
        }
    }

    /// A request for these chunks begins.
    pub(crate) fn begin(&mut self, chunks: Range<ChunkId>) {
        if let Some(encoded) = self.encoded.get_mut(chunks.start as usize..chunks.end as usize) {
            encoded.fill(false);
        }
    }

    /// From here on a chunk's gradients begin anew: what earlier ones have lost is not made up for. Nothing happens where the
    /// gradient of the request under way is encoded already.
    pub(crate) fn forget(&mut self, chunk: ChunkId, extent: &Extent) {
        if !self.encoded[chunk as usize] {
            let (_, elements, _) = self.ranges(extent);
            self.residual[elements].fill(0.0);
        }
    }

    /// Encodes a chunk's gradient, f32 at any alignment, unless this was done for the request under way. `exact` has room for
    /// a chunk.
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

    /// A chunk's gradient as it travels.
    pub(crate) fn payload(&self, extent: &Extent) -> &[u8] {
        &self.wire[self.ranges(extent).2]
    }

    /// From now on this worker has these parameters, f32 at any alignment.
    pub(crate) fn adopt(&mut self, extent: &Extent, parameters: &[u8]) {
        let elements = self.ranges(extent).1;
        if let Some(mine) = self.parameters.get_mut(elements) {
            convert::decode(parameters, mine, Codec::F32);
        }
    }

    /// Takes an answer, and leaves what it makes at `target`, f32 at any alignment: the parameters, or in a job without an
    /// optimizer the mean or the sum. `exact` has room for a chunk.
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

    /// The codec of a chunk, its elements, and where it lies as it travels.
    fn ranges(&self, extent: &Extent) -> (Codec, Range<usize>, Range<usize>) {
        let place = self.places[extent.key as usize].expect("the chunk's key is quantised");
        let start = place.start + extent.offset as usize;
        let number = (extent.offset / u64::from(self.chunk_elements)) as usize;
        let wire = place.wire + number * place.codec.payload_bytes(self.chunk_elements as usize);
        let length = extent.bytes(place.codec) as usize;
        (place.codec, start..start + extent.elements as usize, wire..wire + length)
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
        let mut kept = Quantised::new(&map, &[Codec::F32, Codec::TwoBit], false);
        let values: Vec<f32> = (0..952).map(|at| (at as f32).sin()).collect();
        // Past what starts on a multiple of four.
        let mut gradient = vec![0; 1 + 952 * 4];
        convert::encode(&values, &mut gradient[1..], Codec::F32);
        let last = map.extent(2).unwrap();
        assert_eq!(last.elements, 952);
        let mut exact = vec![0.0; 2048];
        let mut sum = vec![0.0_f32; 952];
        let mut fresh = Quantised::new(&map, &[Codec::F32, Codec::TwoBit], false);
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
        // Sent again it is not lost from twice, and begun anew it is as the first was.
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
        let mut kept = Quantised::new(&map, &[Codec::BF16], true);
        kept.begin(0..2);
        assert_eq!((kept.residual.len(), kept.wire.len(), kept.encoded.len()), (0, 0, 0));
    }
}
