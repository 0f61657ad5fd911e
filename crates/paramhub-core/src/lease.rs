//! The lease of a job: how long it may be without a sign of life from its workers, and how often a worker
//! whose job no hub serves gives one.
//!
//! The manager holds a [`Lease`] for each job, and such a worker a [`LeaseRenewal`]. Both get the time passed
//! in, as a duration since any fixed moment of their own.

use std::time::Duration;

/// The time between two renewals. A renewal also reports whether the job has ended.
const RENEW_EVERY: Duration = Duration::from_secs(2);

/// A job's lease at the manager.
#[derive(Clone, Copy, Debug)]
pub struct Lease {
    seconds: f64,
    last_sign: Duration,
}

impl Lease {
    /// A lease of this many seconds that begins now.
    pub fn new(seconds: f64, now: Duration) -> Lease {
        Lease { seconds, last_sign: now }
    }

    /// A worker shows a sign of life. One that was noticed late does not shorten the lease.
    pub fn renew(&mut self, now: Duration) {
        self.last_sign = self.last_sign.max(now);
    }

    /// Returns whether the lease has run out. It does not run while calls of workers wait, since these are a
    /// sign of life themselves.
    pub fn has_expired(&self, calls_that_wait: usize, now: Duration) -> bool {
        calls_that_wait == 0 && now.saturating_sub(self.last_sign).as_secs_f64() >= self.seconds
    }
}

/// The renewals of a worker that exchanges without hubs.
#[derive(Clone, Copy, Debug)]
pub struct LeaseRenewal {
    lease: Duration,
    answered: Duration,
}

impl LeaseRenewal {
    /// Renewals of a lease that begins now.
    pub fn new(lease: Duration, now: Duration) -> LeaseRenewal {
        LeaseRenewal { lease, answered: now }
    }

    /// The pause between two renewals: there are several within a lease.
    pub fn every(&self) -> Duration {
        RENEW_EVERY.min(self.lease / 4)
    }

    /// The manager has renewed the lease.
    pub fn renewed(&mut self, now: Duration) {
        self.answered = now;
    }

    /// Returns whether the worker gives its job up after a renewal that failed: at once if the manager has
    /// refused it, otherwise if the manager has not answered for the duration of a lease. The ranks do not
    /// need the manager to exchange, so a manager that is out of reach does not stop them at once.
    pub fn gives_up(&self, is_refused: bool, now: Duration) -> bool {
        is_refused || now.saturating_sub(self.answered) >= self.lease
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE_S: u64 = 20;
    const LEASE: Duration = Duration::from_secs(LEASE_S);
    const TICK: Duration = Duration::from_millis(1);

    #[test]
    fn a_lease_runs_out_after_its_seconds_without_a_sign_of_life() {
        let mut lease = Lease::new(LEASE_S as f64, Duration::ZERO);
        assert!(!lease.has_expired(0, LEASE - TICK) && lease.has_expired(0, LEASE));
        assert!(!lease.has_expired(1, LEASE * 2), "a call that waits is a sign of life");
        lease.renew(LEASE);
        lease.renew(LEASE / 2);
        assert!(!lease.has_expired(0, LEASE * 2 - TICK), "a sign that was noticed late shortens nothing");
        assert!(lease.has_expired(0, LEASE * 2));
    }

    #[test]
    fn a_worker_renews_several_times_within_a_lease() {
        assert_eq!(LeaseRenewal::new(LEASE, Duration::ZERO).every(), RENEW_EVERY);
        assert_eq!(LeaseRenewal::new(RENEW_EVERY, Duration::ZERO).every(), RENEW_EVERY / 4);
    }

    #[test]
    fn a_worker_bears_a_manager_that_is_out_of_reach_for_the_duration_of_a_lease() {
        let mut renewal = LeaseRenewal::new(LEASE, Duration::ZERO);
        renewal.renewed(LEASE);
        assert!(!renewal.gives_up(false, LEASE * 2 - TICK) && renewal.gives_up(false, LEASE * 2));
        assert!(renewal.gives_up(true, LEASE), "a refusal is final");
    }
}
