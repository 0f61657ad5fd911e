//! The time of computation, the time with keys under way, and the time with both at once.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Measures how long this process computed, how long a key was under way, and how long both at once.
#[derive(Debug)]
pub struct Meter(Mutex<MeterState>);

/// The measurements of a [`Meter`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Times {
    /// The time during which an operation computed.
    pub computing: Duration,
    /// The time during which a key had a gradient but not yet its sum.
    pub in_flight: Duration,
    /// The time during which both held.
    pub hidden: Duration,
}

#[derive(Debug)]
struct MeterState {
    since: Instant,
    computing: u32,
    in_flight: u32,
    times: Times,
}

impl Meter {
    /// A meter that has measured nothing yet.
    pub fn new() -> Meter {
        let (since, times) = (Instant::now(), Times::default());
        Meter(Mutex::new(MeterState { since, computing: 0, in_flight: 0, times }))
    }

    /// Runs `work` and counts its time as computing. A panic is not counted out: it ends the run, and with it
    /// the need for the numbers.
    pub fn computes<R>(&self, work: impl FnOnce() -> R) -> R {
        self.change(|state| state.computing += 1);
        let made = work();
        self.change(|state| state.computing -= 1);
        made
    }

    /// Records that the gradients of some keys are there.
    pub fn leave(&self, keys: u32) {
        self.change(|state| state.in_flight += keys);
    }

    /// Records that the sum of a key is there.
    pub fn arrive(&self) {
        self.change(|state| state.in_flight -= 1);
    }

    /// The times measured until now.
    pub fn times(&self) -> Times {
        self.change(|state| state.times)
    }

    fn change<R>(&self, change: impl FnOnce(&mut MeterState) -> R) -> R {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let passed = now - std::mem::replace(&mut state.since, now);
        let (computing, in_flight) = (state.computing > 0, state.in_flight > 0);
        let times = &mut state.times;
        let totals = [
            (&mut times.computing, computing),
            (&mut times.in_flight, in_flight),
            (&mut times.hidden, computing && in_flight),
        ];
        totals.into_iter().filter(|(_, counts)| *counts).for_each(|(total, _)| *total += passed);
        change(&mut state)
    }
}

impl Default for Meter {
    fn default() -> Self {
        Meter::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_time_that_overlaps_computation_is_hidden() {
        let meter = Meter::new();
        let nap = || std::thread::sleep(Duration::from_millis(2));
        meter.computes(nap);
        let alone = meter.times();
        assert!(alone.computing >= Duration::from_millis(2) && alone.in_flight.is_zero());
        meter.leave(2);
        nap();
        meter.arrive();
        let exposed = meter.times();
        assert!(exposed.in_flight >= Duration::from_millis(2));
        assert_eq!((exposed.computing, exposed.hidden), (alone.computing, Duration::ZERO));
        meter.computes(nap);
        meter.arrive();
        let both = meter.times();
        assert!(both.hidden >= Duration::from_millis(2));
        assert_eq!(both.hidden, both.computing - alone.computing);
        nap();
        assert_eq!(meter.times(), both);
    }
}
