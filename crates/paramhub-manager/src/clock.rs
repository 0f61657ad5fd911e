//! The time, read once at the edge and handed inwards.

use std::time::{SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// A moment on both clocks: one that never jumps, for waits, and the calendar's, for listings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    pub(crate) instant: Instant,
    pub(crate) unix_s: u64,
}

impl Now {
    pub(crate) fn read() -> Self {
        let unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
        Now { instant: Instant::now(), unix_s }
    }

    /// So many seconds before; not before the clock began.
    pub(crate) fn earlier(self, seconds: f64) -> Now {
        let span = std::time::Duration::from_secs_f64(seconds);
        let instant = self.instant.checked_sub(span).unwrap_or(self.instant);
        Now { instant, unix_s: self.unix_s.saturating_sub(span.as_secs()) }
    }

    pub(crate) fn seconds_since(self, earlier: Now) -> f64 {
        self.instant.saturating_duration_since(earlier.instant).as_secs_f64()
    }
}
