//! The places of a worker's tensors in the memory that it shares with the hubs of its own host. Both ends
//! compute the same places, so no frame carries them and no peer can send wrong ones.

use std::ops::Range;

use crate::chunk::Extent;
use crate::codec::Codec;
use crate::key::Key;
use crate::settings::Settings;

/// Unless they are packed, tensors start at multiples of this: two cache lines, which processors fetch in
/// pairs.
const ALIGNMENT: u64 = 128;

/// The places of all keys in one arena, in table order: first the gradient of each key in its codec, then the
/// parameters of each key in its dtype. With [`Settings::packed`] there is no gap between tensors of one
/// type. An arena of [`parameters_only`](Self::parameters_only) has no gradients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaLayout {
    gradients: Vec<KeyMemory>,
    parameters: Vec<KeyMemory>,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KeyMemory {
    start: u64,
    codec: Codec,
    elements: u64,
}

impl KeyMemory {
    fn bytes(&self) -> u64 {
        self.elements * self.codec.bytes() as u64
    }
}

impl ArenaLayout {
    /// The layout of a worker's arena.
    pub fn new(settings: &Settings) -> Self {
        let mut end = 0;
        let gradients = lay(settings, &mut end, |key| settings.codec_of(key));
        let parameters = lay(settings, &mut end, |key| key.dtype.codec());
        ArenaLayout { gradients, parameters, bytes: end }
    }

    /// The layout of an arena that holds the parameters of all workers of a host.
    pub fn parameters_only(settings: &Settings) -> Self {
        let mut end = 0;
        let parameters = lay(settings, &mut end, |key| key.dtype.codec());
        ArenaLayout { gradients: Vec::new(), parameters, bytes: end }
    }

    /// Bytes of the whole arena, at least one.
    pub fn bytes(&self) -> u64 {
        self.bytes.max(1)
    }

    /// The bytes of a key's gradient.
    ///
    /// # Panics
    /// If there is no such key, or the arena has no gradients.
    pub fn gradient(&self, key: u32) -> Range<usize> {
        whole(&self.gradients[key as usize])
    }

    /// The bytes of a key's parameters.
    ///
    /// # Panics
    /// If there is no such key.
    pub fn parameters(&self, key: u32) -> Range<usize> {
        whole(&self.parameters[key as usize])
    }

    /// The first byte of a chunk's gradient.
    ///
    /// # Panics
    /// As [`gradient`](Self::gradient).
    pub fn gradient_chunk(&self, extent: &Extent) -> usize {
        chunk(&self.gradients[extent.key as usize], extent)
    }

    /// The first byte of a chunk's parameters.
    ///
    /// # Panics
    /// As [`parameters`](Self::parameters).
    pub fn parameters_chunk(&self, extent: &Extent) -> usize {
        chunk(&self.parameters[extent.key as usize], extent)
    }
}

/// Places all keys one after another, from the first aligned place at or after `end`.
fn lay(settings: &Settings, end: &mut u64, codec: impl Fn(&Key) -> Codec) -> Vec<KeyMemory> {
    *end = end.next_multiple_of(ALIGNMENT);
    let place = |key: &Key| {
        // Quantised keys lie here in their own type: see `Settings::quantises`.
        let codec = Some(codec(key)).filter(|codec| !codec.is_quantised()).unwrap_or(key.dtype.codec());
        let alignment = if settings.packed { codec.bytes() as u64 } else { ALIGNMENT };
        let start = end.next_multiple_of(alignment);
        let place = KeyMemory { start, codec, elements: key.elements().unwrap_or(0) };
        *end = start + place.bytes();
        place
    };
    settings.keys.keys().iter().map(place).collect()
}

fn whole(place: &KeyMemory) -> Range<usize> {
    place.start as usize..(place.start + place.bytes()) as usize
}

fn chunk(place: &KeyMemory, extent: &Extent) -> usize {
    place.start as usize + extent.byte_range(place.codec).start
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::ChunkMap;
    use crate::codec::Dtype;
    use crate::key::{Key, KeyTable};

    #[test]
    fn places_are_aligned_apart_and_as_large_as_their_tensors() {
        let half = Key { dtype: Dtype::F16, ..Key::new("half", [3]) };
        let keys = KeyTable::new(vec![Key::new("w", [1001]), half, Key::new("b", [7])]).unwrap();
        let settings = Settings { codec: Some(Codec::BF16), chunk_bytes: 1024, ..Settings::new(keys) };
        let layout = ArenaLayout::new(&settings);
        let places: Vec<_> =
            (0..3).map(|key| layout.gradient(key)).chain((0..3).map(|key| layout.parameters(key))).collect();
        assert_eq!(places.iter().map(Range::len).collect::<Vec<_>>(), [2002, 6, 14, 4004, 6, 28]);
        assert!(places.iter().all(|place| place.start.is_multiple_of(128)));
        assert!(places.windows(2).all(|pair| pair[0].end <= pair[1].start));
        assert_eq!(layout.bytes(), places[5].end as u64);

        let map = ChunkMap::new(&settings.keys, settings.chunk_bytes).unwrap();
        let second = map.extent(1).unwrap();
        assert_eq!(layout.gradient_chunk(&second), 256 * 2);
        assert_eq!(layout.parameters_chunk(&second), places[3].start + 256 * 4);

        let shared = ArenaLayout::parameters_only(&settings);
        assert_eq!([shared.parameters(0), shared.parameters(2)], [0..4004, 4224..4252]);
    }

    #[test]
    fn packed_tensors_lie_back_to_back_and_aligned_to_their_elements() {
        let half = Key { dtype: Dtype::F16, ..Key::new("half", [3]) };
        let keys =
            KeyTable::new(vec![Key::new("w", [1001]), Key::new("v", [5]), half, Key::new("b", [7])]).unwrap();
        let settings = Settings { packed: true, ..Settings::new(keys) };
        let layout = ArenaLayout::new(&settings);
        let gradients: Vec<_> = (0..4).map(|key| layout.gradient(key)).collect();
        assert_eq!(gradients, [0..4004, 4004..4024, 4024..4030, 4032..4060]);
        let first = layout.parameters(0).start;
        assert!(first >= 4060 && first.is_multiple_of(128), "the halves stay apart: {first}");
        assert_eq!(layout.parameters(1), first + 4004..first + 4024);
        assert_eq!(ArenaLayout::parameters_only(&settings).parameters(1), 4004..4024);
    }
}
