//! Schedules by which each rank meets every other rank.

/// Two different ranks, the lower one first.
pub type Pair = [u32; 2];

/// Each pair in its own round.
pub fn one_by_one(size: u32) -> Vec<Vec<Pair>> {
    (0..size).flat_map(|low| (low + 1..size).map(move |high| vec![[low, high]])).collect()
}

/// Rounds of disjoint pairs in which each rank meets every other rank once: the circle method. One rank stays
/// and the others move on by one place a round. If the number of ranks is odd, the rank opposite the empty
/// place pauses.
pub fn tournament(size: u32) -> Vec<Vec<Pair>> {
    let places = size.next_multiple_of(2);
    let rounds = if size < 2 { 0 } else { places - 1 };
    let moving = places.saturating_sub(1);
    (0..rounds)
        .map(|round| {
            let at = |place: u32| (round + place) % moving;
            let first = (at(0), places - 1);
            let others = (1..places / 2).map(|place| (at(place), at(moving - place)));
            std::iter::once(first)
                .chain(others)
                .filter(|&(a, b)| a < size && b < size)
                .map(|(a, b)| [a.min(b), a.max(b)])
                .collect()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_rank_meets_every_other_rank_once() {
        for size in 1..=33 {
            for rounds in [one_by_one(size), tournament(size)] {
                let pairs: Vec<Pair> = rounds.iter().flatten().copied().collect();
                assert!(pairs.iter().all(|pair| pair[0] < pair[1] && pair[1] < size), "{size}: {pairs:?}");
                let distinct: HashSet<Pair> = pairs.iter().copied().collect();
                assert_eq!(distinct.len(), pairs.len());
                assert_eq!(pairs.len() as u32, size * (size - 1) / 2, "{size}");
                for round in &rounds {
                    let ranks: HashSet<u32> = round.iter().flatten().copied().collect();
                    assert_eq!(ranks.len(), 2 * round.len(), "{size}: {round:?} has a rank twice");
                }
            }
        }
        assert_eq!(tournament(8).len(), 7);
        assert_eq!(tournament(7).len(), 7);
        assert_eq!(one_by_one(8).len(), 28);
    }
}
