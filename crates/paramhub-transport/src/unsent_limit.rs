//! A bound on the bytes that wait in a socket and that the kernel has not sent yet.
//!
//! They leave in the order in which they came, before anything more urgent that comes later. The kernel would let
//! megabytes wait, which take 100 ms on a link of 500 Mbit. On fast links more must wait than on slow ones, or the link
//! would be idle while the thread serves other streams. So the bound grows with the rate of the stream.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// What waits leaves within this time: longer than a thread serves other streams.
const UNSENT_WAIT: Duration = Duration::from_millis(2);
/// The bounds, in bytes, of what may wait. The kernel asks for more when half of it has left.
const UNSENT_BYTES: RangeInclusive<usize> = (128 << 10)..=(4 << 20);
/// The time over which the rate is measured.
const WINDOW: Duration = Duration::from_millis(50);
/// The number of windows in a row after which a bound that is too high is halved: a stream that pauses between steps keeps
/// what it needs within them.
const SLOW_WINDOWS: u32 = 100;

/// The bound of one stream.
#[derive(Debug)]
pub(crate) struct UnsentLimit {
    bytes: usize,
    /// When the current window began, and what was passed to the kernel since.
    window: Option<(Instant, u64)>,
    /// The number of windows in a row that needed half of the bound at most.
    slow_windows: u32,
}

impl UnsentLimit {
    /// The bound of a stream that has sent nothing.
    pub(crate) fn new() -> Self {
        UnsentLimit { bytes: *UNSENT_BYTES.start(), window: None, slow_windows: 0 }
    }

    /// The bound in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Notes that the kernel has taken `bytes`. Returns the new bound if it has changed.
    pub(crate) fn sent(&mut self, bytes: usize, now: Instant) -> Option<usize> {
        let Some((began, before)) = self.window else {
            self.window = Some((now, 0));
            return None;
        };
        let window_bytes = before + bytes as u64;
        let elapsed = now.saturating_duration_since(began);
        if elapsed < WINDOW {
            self.window = Some((began, window_bytes));
            return None;
        }
        self.window = None;
        let leaves_in_time = window_bytes as f64 / elapsed.as_secs_f64() * UNSENT_WAIT.as_secs_f64();
        let needed = (leaves_in_time as usize).clamp(*UNSENT_BYTES.start(), *UNSENT_BYTES.end());
        let bytes = if needed > self.bytes {
            self.slow_windows = 0;
            needed.next_power_of_two()
        } else if 2 * needed > self.bytes {
            self.slow_windows = 0;
            return None;
        } else {
            self.slow_windows += 1;
            if self.slow_windows < SLOW_WINDOWS {
                return None;
            }
            self.slow_windows = 0;
            self.bytes / 2
        };
        (bytes != std::mem::replace(&mut self.bytes, bytes)).then_some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEBIBYTE: usize = 1 << 20;

    /// Sends so many bytes a second for `seconds`, in writes of 64 KiB.
    fn send(limit: &mut UnsentLimit, now: &mut Instant, rate: usize, seconds: f64) {
        const WRITE: usize = 64 << 10;
        let until = *now + Duration::from_secs_f64(seconds);
        while *now < until {
            limit.sent(WRITE, *now);
            *now += Duration::from_secs_f64(WRITE as f64 / rate as f64);
        }
    }

    #[test]
    fn a_slow_stream_keeps_the_lowest_bound() {
        let (mut limit, mut now) = (UnsentLimit::new(), Instant::now());
        send(&mut limit, &mut now, 60 * MEBIBYTE, 10.0);
        assert_eq!(limit.bytes(), 128 << 10);
    }

    #[test]
    fn a_fast_stream_gets_what_it_sends_in_two_milliseconds() {
        let (mut limit, mut now) = (UnsentLimit::new(), Instant::now());
        send(&mut limit, &mut now, 900 * MEBIBYTE, 0.2);
        assert_eq!(limit.bytes(), 2 * MEBIBYTE);
        send(&mut limit, &mut now, 100_000 * MEBIBYTE, 0.2);
        assert_eq!(limit.bytes(), 4 * MEBIBYTE);
    }

    #[test]
    fn a_bound_outlives_pauses_between_steps_and_is_lowered_when_the_stream_stays_slow() {
        let (mut limit, mut now) = (UnsentLimit::new(), Instant::now());
        for _ in 0..50 {
            send(&mut limit, &mut now, 900 * MEBIBYTE, 0.2);
            now += Duration::from_millis(300);
        }
        assert_eq!(limit.bytes(), 2 * MEBIBYTE);
        send(&mut limit, &mut now, 60 * MEBIBYTE, 30.0);
        assert_eq!(limit.bytes(), 128 << 10);
    }
}
