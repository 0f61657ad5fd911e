//! The time, read once per request and passed inwards.

use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use paramhub_core::membership::{Now, REPORTED_BACK_MAX};
use tokio::time::Instant;

/// The time at which this process first read the time.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The present moment.
pub(crate) fn now() -> Now {
    let unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    Now { monotonic: START.elapsed() + REPORTED_BACK_MAX, unix_s }
}

/// The moment at which [`Now::monotonic`] has this value.
pub(crate) fn instant(monotonic: Duration) -> Instant {
    *START + monotonic.saturating_sub(REPORTED_BACK_MAX)
}
