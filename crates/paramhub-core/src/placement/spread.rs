//! This module decides how the chunks of a key are dealt to hubs, interfaces and cores. That depends on what
//! a step exchanges of the key: its gradient, factors that a hub makes the gradient of, or nothing through a
//! hub.

use super::{sizes_of, sorted};
use crate::chunk::{ChunkId, ChunkMap};
use crate::key::KeyTable;

/// The way in which a key's chunks are dealt to hubs, interfaces and cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spread {
    /// Each chunk is dealt by itself.
    #[default]
    Chunks,
    /// All chunks go to one core, together with those of all keys that have the same layer number here. A
    /// core that makes a gradient of factors needs the whole layer, and the factors come to one core only.
    Together(u32),
    /// The chunks are dealt after all others, and without an effect on them. In a step nothing of the key
    /// goes through a hub: only its initial parameters from rank 0 and pulls do. So it must not displace what
    /// is exchanged.
    Aside,
}

/// The chunks to deal, in two lists: those that a step exchanges through a hub, and those that are dealt
/// aside. Each list is longest first.
pub(super) struct ChunksToDeal {
    pub(super) exchanged: Vec<ChunkId>,
    pub(super) aside: Vec<ChunkId>,
}

impl ChunksToDeal {
    pub(super) fn new(table: &KeyTable, map: &ChunkMap, sizes: &[u32], spreads: &[Spread]) -> ChunksToDeal {
        let is_aside = |chunk: &ChunkId| spread_of_chunk(map, spreads, *chunk) == Spread::Aside;
        let (aside, exchanged) = sorted(table, map, sizes).into_iter().partition(is_aside);
        ChunksToDeal { exchanged, aside }
    }
}

/// Deals chunks, which come longest first, to bins of these weights, and returns the chunks of each bin in
/// the same order. `sizes` has the elements of each chunk. A layer that stays together counts with the
/// elements of all its chunks.
pub(super) fn deal(
    chunks: &[ChunkId],
    map: &ChunkMap,
    sizes: &[u32],
    spreads: &[Spread],
    weights: &[u64],
) -> Vec<Vec<ChunkId>> {
    if !spreads.iter().any(|spread| matches!(spread, Spread::Together(_))) {
        return super::longest_first(chunks, sizes, weights);
    }
    // An item is a chunk or a whole layer, with its elements. The sort below is stable, so items of one
    // length keep the order of their first chunks.
    let mut items: Vec<(u64, Vec<ChunkId>)> = Vec::new();
    let mut item_of_layer = std::collections::HashMap::new();
    for &chunk in chunks {
        let size = u64::from(sizes[chunk as usize]);
        let item_of_own_layer = match spread_of_chunk(map, spreads, chunk) {
            Spread::Together(layer) => Some(item_of_layer.entry(layer).or_insert(items.len())),
            Spread::Chunks | Spread::Aside => None,
        };
        match item_of_own_layer.and_then(|item| items.get_mut(*item)) {
            Some((length, together)) => {
                *length += size;
                together.push(chunk);
            }
            None => items.push((size, vec![chunk])),
        }
    }
    items.sort_by_key(|(length, _)| std::cmp::Reverse(*length));
    let mut bin_of = vec![0; sizes.len()];
    let lengths = items.iter().map(|(length, _)| *length);
    for (bin, (_, together)) in super::bins(lengths, weights).into_iter().zip(&items) {
        together.iter().for_each(|&chunk| bin_of[chunk as usize] = bin);
    }
    let mut dealt = vec![Vec::new(); weights.len()];
    chunks.iter().for_each(|&chunk| dealt[bin_of[chunk as usize]].push(chunk));
    dealt
}

/// Returns the elements of each chunk for measuring how even a placement is. Chunks that are dealt aside
/// count as empty.
pub(super) fn exchanged_sizes(map: &ChunkMap, spreads: &[Spread]) -> Vec<u32> {
    let mut sizes = sizes_of(map);
    let aside = (0..).zip(spreads).filter(|(_, spread)| **spread == Spread::Aside);
    for (key, _) in aside {
        map.chunks_of(key).for_each(|chunk| sizes[chunk as usize] = 0);
    }
    sizes
}

/// Adds to a digest how those keys are dealt whose chunks are not dealt each by itself. If there are none,
/// the digest does not change.
pub(super) fn digest(hasher: &mut blake3::Hasher, spreads: &[Spread]) {
    for (key, spread) in (0u32..).zip(spreads) {
        let (tag, layer) = match *spread {
            Spread::Chunks => continue,
            Spread::Together(layer) => (1, layer),
            Spread::Aside => (2, 0),
        };
        hasher.update(&key.to_le_bytes()).update(&[tag]).update(&layer.to_le_bytes());
    }
}

/// Returns how the key of a chunk is dealt. `spreads` is empty if all chunks are dealt by themselves.
fn spread_of_chunk(map: &ChunkMap, spreads: &[Spread], chunk: ChunkId) -> Spread {
    if spreads.is_empty() {
        return Spread::Chunks;
    }
    let extent = map.extent(chunk).expect("every chunk is in the map");
    spreads[extent.key as usize]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Key;
    use crate::placement::{HubShape, InterfaceShape, Placement};

    fn hubs(count: usize) -> Vec<HubShape> {
        let interface = InterfaceShape { address: "127.0.0.1:1".into(), cores: vec![0, 1], weight: 1 };
        vec![HubShape { interfaces: vec![interface], local: None, between_hubs: None }; count]
    }

    fn place(sizes: &[u64], hub_count: usize, spreads: &[Spread]) -> (ChunkMap, Placement) {
        let keys = sizes.iter().enumerate().map(|(index, &size)| Key::new(format!("k{index}"), [size]));
        let table = KeyTable::new(keys.collect()).unwrap();
        let map = ChunkMap::new(&table, 4096).unwrap();
        let placement = Placement::planned(&table, &map, &hubs(hub_count), spreads).unwrap();
        (map, placement)
    }

    fn hubs_of(map: &ChunkMap, placement: &Placement, key: u32) -> Vec<u16> {
        let hub = |chunk| placement.routes()[usize::from(placement.locate(chunk).unwrap().0)].hub;
        map.chunks_of(key).map(hub).collect()
    }

    #[test]
    fn keys_that_are_placed_aside_do_not_unbalance_the_others() {
        let sizes = [3000, 90_000, 5000, 7000];
        let spreads = [Spread::Chunks, Spread::Aside, Spread::Chunks, Spread::Chunks];
        let (map, placement) = place(&sizes, 3, &spreads);
        let (others, alone) = place(&[3000, 5000, 7000], 3, &[]);
        for (key, same) in [(0, 0), (2, 1), (3, 2)] {
            assert_eq!(hubs_of(&map, &placement, key), hubs_of(&others, &alone, same), "key {key}");
        }
        assert_eq!(placement.imbalance(), alone.imbalance(), "it is measured without them");
        let counts = |hub| hubs_of(&map, &placement, 1).iter().filter(|&&other| other == hub).count();
        assert_eq!([0, 1, 2].map(counts), [30, 29, 29], "and it is spread evenly itself");
    }

    #[test]
    fn keys_that_stay_together_are_at_one_core() {
        let spreads = [Spread::Chunks, Spread::Together(4), Spread::Together(4), Spread::Together(9)];
        let (map, placement) = place(&[60_000, 40_000, 100, 30_000], 2, &spreads);
        let routes_of = |keys: &[u32]| -> std::collections::BTreeSet<u16> {
            let chunks = keys.iter().flat_map(|&key| map.chunks_of(key));
            chunks.map(|chunk| placement.locate(chunk).unwrap().0).collect()
        };
        assert_eq!(routes_of(&[1, 2]).len(), 1, "the bias is where its weight is");
        assert_eq!(routes_of(&[3]).len(), 1);
        assert_eq!(routes_of(&[0]).len(), 3, "what is dealt by itself fills up the others");
        assert!(placement.imbalance().hubs < 1.05, "{:?}", placement.imbalance());
        assert!(placement.imbalance().cores < 1.3, "{:?}", placement.imbalance());
    }

    #[test]
    fn the_hash_covers_how_keys_are_spread() {
        let hash = |spreads: &[Spread]| place(&[1000, 1000], 1, spreads).1.hash();
        let chunks = hash(&[Spread::Chunks; 2]);
        assert_eq!(chunks, hash(&[]));
        let aside = hash(&[Spread::Chunks, Spread::Aside]);
        assert_ne!(chunks, aside);
        assert_ne!(chunks, hash(&[Spread::Chunks, Spread::Together(0)]));
        assert_ne!(aside, hash(&[Spread::Aside, Spread::Chunks]));
    }
}
