//! The seeded generator behind every shuffle and every initial parameter.

/// SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
///
/// It uses integer arithmetic and one exact conversion only, so that the same seed gives the same bits on
/// every machine. Ranks that never communicate still agree on the order of the examples and on the initial
/// parameters.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// An independent generator for each `path`, so that no use of the seed depends on how much another one
    /// has drawn.
    pub fn new(seed: u64, path: &[u64]) -> Self {
        Random {
            state: path
                .iter()
                .fold(mix(seed), |state, &step| mix(state ^ mix(step.wrapping_add(GOLDEN_GAMMA)))),
        }
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN_GAMMA);
        mix(self.state)
    }

    /// An integer in `0..bound`, by multiplication (the bias is below `bound` / 2^64).
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A float in `[0, 1)` out of 24 bits, each value exact.
    pub fn uniform(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 * (1.0 / (1 << 24) as f32)
    }

    /// Permutes in place. Every order is equally likely (Fisher-Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_published_sequence() {
        // The reference implementation's first outputs for state 1234567.
        let mut random = Random { state: 1_234_567 };
        let drawn: Vec<u64> = (0..3).map(|_| random.next_u64()).collect();
        assert_eq!(drawn, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn paths_are_independent_and_values_stay_in_range() {
        let first = Random::new(1, &[0, 1]).next_u64();
        assert_eq!(first, Random::new(1, &[0, 1]).next_u64());
        for other in [Random::new(2, &[0, 1]), Random::new(1, &[1, 0]), Random::new(1, &[0])] {
            assert_ne!(first, other.clone().next_u64());
        }
        let mut random = Random::new(3, &[]);
        assert!((0..10_000).all(|_| random.below(7) < 7));
        let mean = (0..10_000).map(|_| f64::from(random.uniform())).sum::<f64>() / 10_000.0;
        assert!((0.49..0.51).contains(&mean), "{mean}");
    }

    #[test]
    fn shuffling_keeps_every_item() {
        let mut items: Vec<u32> = (0..1000).collect();
        Random::new(4, &[]).shuffle(&mut items);
        assert_ne!(items, (0..1000).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..1000).collect::<Vec<_>>());
    }
}
