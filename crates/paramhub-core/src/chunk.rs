//! Chunks: slices of a key, the unit of exchange (PHub's virtual keys, section 3.2.3).

use crate::codec::Codec;
use crate::key::{KeyTable, elements_of};
use thiserror::Error;

/// Position of a chunk in its job, counted through the key table in order.
pub type ChunkId = u32;

/// The place of a chunk in its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Position of the key in its table.
    pub key: u32,
    /// First element of the key that belongs to the chunk.
    pub offset: u64,
    /// Elements in the chunk, at least one.
    pub elements: u32,
}

impl Extent {
    /// Bytes of the chunk's payload.
    pub const fn bytes(&self, codec: Codec) -> u32 {
        codec.payload_bytes(self.elements as usize) as u32
    }

    /// The bytes of the chunk in a key that is encoded with `codec`.
    ///
    /// # Panics
    /// If the codec is quantised: it encodes each chunk by itself.
    pub fn byte_range(&self, codec: Codec) -> std::ops::Range<usize> {
        let start = self.offset as usize * codec.bytes();
        start..start + self.bytes(codec) as usize
    }
}

/// A table has more chunks than a frame can number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "the key table makes {chunks} chunks of {chunk_bytes} bytes, more than the 2^32 - 2 a job may have: choose a larger chunk size"
)]
pub struct TooManyChunks {
    /// The chunks that the table needs.
    pub chunks: u64,
    /// The chunk size asked for.
    pub chunk_bytes: u32,
}

/// The division of a key table into chunks: each chunk has `chunk_bytes / 4` elements, except that the last
/// one of each key has the rest.
///
/// The cut counts elements, not bytes on the wire, so it does not depend on the codec.
#[derive(Clone, Debug)]
pub struct ChunkMap {
    chunk_elements: u32,
    key_elements: Vec<u64>,
    /// `first_chunk[k]..first_chunk[k + 1]` are the chunks of key `k`.
    first_chunk: Vec<ChunkId>,
    /// The key of each chunk. Every frame looks it up.
    key_of: Vec<u32>,
}

impl ChunkMap {
    /// Cuts a table; `chunk_bytes` counts f32 elements and is at least four.
    pub fn new(table: &KeyTable, chunk_bytes: u32) -> Result<Self, TooManyChunks> {
        let chunk_elements = (chunk_bytes / 4).max(1);
        let key_elements: Vec<u64> = table.keys().iter().map(elements_of).collect();
        let first_chunk = first_chunks(&key_elements, chunk_bytes)?;
        let mut key_of = Vec::with_capacity(last(&first_chunk) as usize);
        for (key, range) in (0..).zip(first_chunk.windows(2)) {
            key_of.resize(range[1] as usize, key);
        }
        Ok(ChunkMap { chunk_elements, key_elements, first_chunk, key_of })
    }

    /// The number of chunks that a table makes. The map itself takes four bytes a chunk.
    ///
    /// # Errors
    /// If they are more than a frame can number.
    pub fn count(table: &KeyTable, chunk_bytes: u32) -> Result<u32, TooManyChunks> {
        let key_elements: Vec<u64> = table.keys().iter().map(elements_of).collect();
        Ok(last(&first_chunks(&key_elements, chunk_bytes)?))
    }

    /// Number of chunks of the whole table.
    #[allow(clippy::len_without_is_empty, reason = "a table is never empty, so neither is its map")]
    pub fn len(&self) -> u32 {
        last(&self.first_chunk)
    }

    /// Number of keys of the table.
    pub fn keys(&self) -> usize {
        self.key_elements.len()
    }

    /// Number of elements of a key.
    pub fn key_elements(&self, key: u32) -> u64 {
        self.key_elements[key as usize]
    }

    /// Number of elements of a full chunk.
    pub fn chunk_elements(&self) -> u32 {
        self.chunk_elements
    }

    /// The chunks of a key, in order of offset.
    pub fn chunks_of(&self, key: u32) -> std::ops::Range<ChunkId> {
        self.first_chunk[key as usize]..self.first_chunk[key as usize + 1]
    }

    /// The key of a chunk and the chunk's place in it; `None` beyond the last chunk.
    pub fn extent(&self, chunk: ChunkId) -> Option<Extent> {
        let key = *self.key_of.get(chunk as usize)? as usize;
        let offset = u64::from(chunk - self.first_chunk[key]) * u64::from(self.chunk_elements);
        let elements = (self.key_elements[key] - offset).min(u64::from(self.chunk_elements)) as u32;
        Some(Extent { key: key as u32, offset, elements })
    }
}

/// The first chunk of each key, and behind them the number of all chunks.
fn first_chunks(key_elements: &[u64], chunk_bytes: u32) -> Result<Vec<ChunkId>, TooManyChunks> {
    let chunk_elements = u64::from((chunk_bytes / 4).max(1));
    let mut chunks = 0u64;
    let mut first_chunk = Vec::with_capacity(key_elements.len() + 1);
    for &elements in key_elements {
        first_chunk.push(chunks as ChunkId);
        chunks += elements.div_ceil(chunk_elements);
    }
    if chunks >= u64::from(u32::MAX) {
        return Err(TooManyChunks { chunks, chunk_bytes });
    }
    first_chunk.push(chunks as ChunkId);
    Ok(first_chunk)
}

/// The number of all chunks.
fn last(first_chunk: &[ChunkId]) -> u32 {
    *first_chunk.last().expect("the list ends with the number of chunks")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Key;
    use proptest::prelude::*;

    fn map(sizes: &[u64], chunk_bytes: u32) -> ChunkMap {
        let keys = sizes.iter().enumerate().map(|(i, &n)| Key::new(format!("k{i}"), [n])).collect();
        ChunkMap::new(&KeyTable::new(keys).unwrap(), chunk_bytes).unwrap()
    }

    #[test]
    fn keys_over_four_gibibytes_keep_64_bit_offsets() {
        let map = map(&[1, 3_000_000_000, 5], 32 << 10);
        let last = map.chunks_of(1).end - 1;
        let extent = map.extent(last).unwrap();
        assert_eq!(extent.key, 1);
        assert_eq!(extent.offset + u64::from(extent.elements), 3_000_000_000);
        assert!(extent.byte_range(Codec::F32).end > 4 << 30);
        assert_eq!(map.extent(map.len()), None);
    }

    #[test]
    fn more_chunks_than_a_frame_can_number_are_refused() {
        let table = KeyTable::new(vec![Key::new("w", [1 << 40])]).unwrap();
        let refused = ChunkMap::new(&table, 1024).unwrap_err();
        assert_eq!(refused.chunks, 1 << 32);
        // The map itself would take 16 GiB.
        let count = |chunks| ChunkMap::count(&KeyTable::new(vec![Key::new("w", [chunks])]).unwrap(), 4);
        assert_eq!(count((1 << 32) - 2), Ok(u32::MAX - 1));
        let refused = count((1 << 32) - 1).unwrap_err().to_string();
        assert!(refused.contains("more than the 2^32 - 2"), "{refused}");
    }

    proptest! {
        #[test]
        fn chunks_tile_every_key(sizes in prop::collection::vec(1u64..100_000, 1..40), chunk_bytes in 4u32..70_000) {
            let map = map(&sizes, chunk_bytes);
            let mut chunk = 0;
            for (key, &size) in sizes.iter().enumerate() {
                let mut offset = 0;
                prop_assert_eq!(map.chunks_of(key as u32).start, chunk);
                while offset < size {
                    let extent = map.extent(chunk).unwrap();
                    prop_assert_eq!((extent.key as usize, extent.offset), (key, offset));
                    prop_assert!(extent.elements >= 1 && extent.elements <= map.chunk_elements());
                    offset += u64::from(extent.elements);
                    chunk += 1;
                }
                prop_assert_eq!(offset, size);
            }
            prop_assert_eq!(chunk, map.len());
        }
    }
}
