//! The time, read once per request and passed inwards.

use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use paramhub_core::membership::{Now, REPORTED_BACK_MAX};
use rustix::time::{ClockId, clock_gettime};
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

/// The time since the machine was started, also while it slept: a lease at another machine goes on meanwhile.
pub(crate) fn since_boot() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}
