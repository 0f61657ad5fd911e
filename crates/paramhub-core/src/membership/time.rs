//! The time of an event, which the caller reads and passes in.

use std::time::Duration;

/// The longest time by which what an event reports may lie before the event. Times further back are not
/// distinguished.
pub const REPORTED_BACK_MAX: Duration = Duration::from_secs(86_400);

/// A moment on two clocks: one that never jumps, for waits, and the calendar's, for listings. It has its name
/// because a caller passes in the present one with each event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// The time since any fixed moment that lies at least [`REPORTED_BACK_MAX`] before the first event.
    pub monotonic: Duration,
    /// Seconds since the Unix epoch.
    pub unix_s: u64,
}

impl Now {
    /// The moment `seconds` before, but not before the clock began.
    pub fn earlier(self, seconds: f64) -> Now {
        let span = Duration::from_secs_f64(seconds);
        let monotonic = self.monotonic.saturating_sub(span);
        Now { monotonic, unix_s: self.unix_s.saturating_sub(span.as_secs()) }
    }

    /// The seconds that have passed since an earlier moment; 0 if that moment is later.
    pub fn seconds_since(self, earlier: Now) -> f64 {
        self.monotonic.saturating_sub(earlier.monotonic).as_secs_f64()
    }
}

/// A moment of a test.
#[cfg(test)]
pub(crate) fn at(seconds: f64) -> Now {
    let monotonic = REPORTED_BACK_MAX + Duration::from_secs_f64(seconds);
    Now { monotonic, unix_s: 1_700_000_000 + seconds as u64 }
}
