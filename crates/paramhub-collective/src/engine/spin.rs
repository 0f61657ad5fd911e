//! Looking for a moment before sleeping.

use std::time::{Duration, Instant};
use std::{hint, thread};

/// Looks between two offers of the processor: about a microsecond.
const LOOKS: u32 = 64;

/// Looks until there is what to look for, but no longer than `limit`; true if there is.
///
/// Every now and then whoever else wants the processor gets it. Where threads outnumber processors, that may be the very thread
/// that is waited for, and it would otherwise come when the time is up.
pub(super) fn spin(limit: Duration, found: impl Fn() -> bool) -> bool {
    if found() {
        return true;
    }
    if limit.is_zero() {
        return false;
    }
    let started = Instant::now();
    loop {
        for _ in 0..LOOKS {
            if found() {
                return true;
            }
            hint::spin_loop();
        }
        if started.elapsed() >= limit {
            return false;
        }
        thread::yield_now();
    }
}
