//! Random numbers from a seed.

use std::ops::Range;
use std::time::Duration;

/// A generator whose numbers depend on its seed alone (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// The generator of this seed.
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next number.
    pub(crate) fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    /// A number below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.number() % end
    }

    /// Whether something happens that happens in this percentage of cases.
    pub(crate) fn happens(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// A time in a range that is not empty, in whole microseconds.
    pub(crate) fn time(&mut self, range: &Range<Duration>) -> Duration {
        let width = (range.end - range.start).as_micros() as u64;
        range.start + Duration::from_micros(self.below(width.max(1)))
    }
}

/// A number that depends on all bits of another.
pub(crate) fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
