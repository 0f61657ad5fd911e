//! The stream of a GPU, simulated by sleeping.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The time at which all computation so far would end on a machine that takes exactly the given times.
pub(super) struct Clock(Mutex<Instant>);

impl Clock {
    pub(super) fn new() -> Clock {
        Clock(Mutex::new(Instant::now()))
    }

    /// Restarts the clock: no computation was done before now.
    pub(super) fn restart(&self) {
        *self.now() = Instant::now();
    }

    /// Computes for `seconds`, from `data` on at the earliest. Returns when the computation is over. A thread
    /// that wakes too late sleeps less the next time.
    pub(super) fn pass(&self, data: Instant, seconds: f64) -> Instant {
        let end = {
            let mut now = self.now();
            *now = (*now).max(data) + Duration::from_secs_f64(seconds);
            *now
        };
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
        end
    }

    fn now(&self) -> MutexGuard<'_, Instant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The latest of several instants.
pub(super) struct Latest(Mutex<Instant>);

impl Latest {
    pub(super) fn new() -> Latest {
        Latest(Mutex::new(Instant::now()))
    }

    pub(super) fn note(&self) {
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *latest = (*latest).max(Instant::now());
    }

    pub(super) fn read(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simulated_pass_ends_on_time_however_late_threads_wake() {
        let clock = Clock::new();
        clock.restart();
        let data = Instant::now() + Duration::from_millis(1);
        let first = clock.pass(data, 0.002);
        assert_eq!(first, data + Duration::from_millis(2));
        assert!(Instant::now() >= first);
        // The data was there before.
        assert_eq!(clock.pass(data, 0.001), first + Duration::from_millis(1));
        assert_eq!(clock.pass(data, 0.0), first + Duration::from_millis(1));
    }

    #[test]
    fn the_latest_of_several_is_kept() {
        let latest = Latest::new();
        let before = Instant::now();
        latest.note();
        assert!(latest.read() >= before);
    }
}
