//! The lease of a job: how long it may be without a sign of life from its workers, and how often a worker
//! whose job no hub serves gives one.
//!
//! The manager holds a [`Lease`] for each job, and such a worker a [`LeaseRenewal`]. Both get the time passed
//! in, as a duration since any fixed moment of their own.

use std::time::Duration;

/// The time between two renewals. A renewal also reports whether the job has ended.
const RENEW_EVERY: Duration = Duration::from_secs(2);
/// The longest pause before a manager that does not answer is called again.
const RENEW_PAUSE_MAX: Duration = Duration::from_secs(8);

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

/// The renewals of a worker that exchanges without hubs. However long the manager does not answer, the worker goes on, since
/// the ranks do not need it to exchange: it calls again, with longer pauses.
#[derive(Clone, Copy, Debug)]
pub struct LeaseRenewal {
    lease: Duration,
    pause: Duration,
}

impl LeaseRenewal {
    /// Renewals of a lease.
    pub fn new(lease: Duration) -> LeaseRenewal {
        LeaseRenewal { lease, pause: RENEW_EVERY.min(lease / 4) }
    }

    /// The pause before the next renewal. It is at most a quarter of a lease: a manager that restarts counts the lease
    /// anew, and is called in time.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    /// The manager has renewed the lease.
    pub fn renewed(&mut self) {
        *self = LeaseRenewal::new(self.lease);
    }

    /// The manager has not answered.
    pub fn not_answered(&mut self) {
        self.pause = (self.pause * 2).min(RENEW_PAUSE_MAX).min(self.lease / 4);
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
    fn a_worker_renews_several_times_within_a_lease_also_one_that_begins_while_the_manager_is_away() {
        for (lease, pauses) in [
            (LEASE * 6, [2000, 4000, 8000, 8000]),
            (LEASE, [2000, 4000, 5000, 5000]),
            (RENEW_EVERY, [500; 4]),
        ] {
            let mut renewal = LeaseRenewal::new(lease);
            for pause in pauses {
                assert_eq!(renewal.pause(), Duration::from_millis(pause), "{lease:?}");
                renewal.not_answered();
            }
            renewal.renewed();
            assert_eq!(renewal.pause(), Duration::from_millis(pauses[0]));
        }
    }
}
