//! Polls for a moment before a thread sleeps.

use std::time::{Duration, Instant};
use std::{hint, thread};

/// The number of polls between two yields: about a microsecond.
const LOOKS: u32 = 64;

/// Polls until `found`, but no longer than `limit`; true if found.
///
/// Yields the processor now and then. Where threads outnumber processors, it may go to the very thread that
/// this one waits for, which otherwise would run only after the time is up.
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
