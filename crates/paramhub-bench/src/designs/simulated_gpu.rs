//! A GPU's queue of computations, simulated by sleeping.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A GPU that runs one computation after the other and takes exactly the given times.
pub(super) struct SimulatedGpu {
    /// The time at which all computations so far end.
    busy_until: Mutex<Instant>,
}

impl SimulatedGpu {
    pub(super) fn new() -> SimulatedGpu {
        SimulatedGpu { busy_until: Mutex::new(Instant::now()) }
    }

    /// Starts again: the GPU is free from now on.
    pub(super) fn restart(&self) {
        *self.busy_until() = Instant::now();
    }

    /// Sleeps until a computation of `seconds` would end that starts when its data is ready and the GPU is
    /// free. Returns that time, which may already be past: a thread that wakes too late sleeps less the next
    /// time.
    pub(super) fn compute(&self, ready_at: Instant, seconds: f64) -> Instant {
        let end = {
            let mut busy_until = self.busy_until();
            *busy_until = (*busy_until).max(ready_at) + Duration::from_secs_f64(seconds);
            *busy_until
        };
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
        end
    }

    fn busy_until(&self) -> MutexGuard<'_, Instant> {
        self.busy_until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The time of the last [`note`](Self::note), at first that of [`new`](Self::new).
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
    fn a_simulated_computation_ends_on_time_however_late_threads_wake() {
        let gpu = SimulatedGpu::new();
        gpu.restart();
        let data = Instant::now() + Duration::from_millis(1);
        let first = gpu.compute(data, 0.002);
        assert_eq!(first, data + Duration::from_millis(2));
        assert!(Instant::now() >= first);
        // The data was there before.
        assert_eq!(gpu.compute(data, 0.001), first + Duration::from_millis(1));
        assert_eq!(gpu.compute(data, 0.0), first + Duration::from_millis(1));
    }

    #[test]
    fn the_latest_of_several_is_kept() {
        let latest = Latest::new();
        let before = Instant::now();
        latest.note();
        assert!(latest.read() >= before);
    }
}
