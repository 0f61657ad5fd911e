//! What all measurements of a network need.

use std::time::Duration;

/// Bytes that no link can compress: SplitMix64, whose seed does not matter here.
pub fn incompressible(bytes: usize) -> Vec<u8> {
    let mut state = 0_u64;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)).to_le_bytes()
    };
    (0..bytes.div_ceil(8)).flat_map(|_| next()).take(bytes).collect()
}

/// The rate at which `bytes` came within `time`, in bits per second. A time that is shorter than the clock's
/// `resolution` counts as that.
pub fn bits_per_second(bytes: u64, time: Duration, resolution: Duration) -> f64 {
    bytes as f64 * 8.0 / time.max(resolution).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_of_bits_and_finite() {
        let (second, nanosecond) = (Duration::from_secs(1), Duration::from_nanos(1));
        assert_eq!(bits_per_second(125_000_000, second, nanosecond), 1e9);
        assert!(bits_per_second(1, Duration::ZERO, nanosecond).is_finite());
    }

    #[test]
    fn no_bytes_repeat() {
        let bytes = incompressible(1003);
        assert_eq!(bytes.len(), 1003);
        let (words, _) = bytes.as_chunks::<8>();
        let distinct: std::collections::HashSet<_> = words.iter().collect();
        assert_eq!(distinct.len(), words.len());
    }
}
