//! After which silence a worker opens a stream again, by which paths and how long it tries, and when its program
//! is notified: the rules of a job that goes on when an interface goes down.
//!
//! Whether a stream is opened again, and what becomes of the job then, is decided by
//! [`WorkerJob`](crate::worker_job::WorkerJob). What is sent again on the new stream is decided by
//! [`Requests::resend_route`](crate::requests::Requests) and [`Retunes`]. Times are passed in.

mod retunes;

use std::time::{Duration, Instant};

use crate::limits::RESUME_S;
pub use retunes::Retunes;

/// Silence after which a stream counts as broken somewhere on its path: a hub sends a heartbeat a second. If
/// the hub was only busy, opening its stream again costs time and nothing else.
pub const SILENT: Duration = Duration::from_secs(4);
/// How long a worker tries to open a stream again.
pub const RESUME: Duration = Duration::from_secs(RESUME_S);
/// The pause between two rounds over all paths.
const ROUND_PAUSE: Duration = Duration::from_millis(200);

/// The attempts to open one stream again: rounds over all paths, until a deadline.
#[derive(Clone, Copy, Debug)]
pub struct Attempts {
    deadline: Instant,
}

/// What follows a round over all paths that has not led to the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterRound {
    /// Another round, after this pause.
    Again(Duration),
    /// The stream is lost.
    GiveUp,
}

impl Attempts {
    /// Attempts that begin now.
    pub fn new(now: Instant) -> Attempts {
        Attempts { deadline: now + RESUME }
    }

    /// Whether no further path may be tried.
    pub fn are_over(&self, now: Instant) -> bool {
        now >= self.deadline
    }

    /// The deadline of a step that may take this long.
    pub fn by(&self, now: Instant, patience: Duration) -> Instant {
        self.deadline.min(now + patience)
    }

    /// What follows a round that has not led to the hub.
    pub fn after_round(&self, now: Instant, is_job_over: bool) -> AfterRound {
        match is_job_over || now + ROUND_PAUSE >= self.deadline {
            true => AfterRound::GiveUp,
            false => AfterRound::Again(ROUND_PAUSE),
        }
    }
}

/// What a path has in common with the broken one. Paths with least in common are tried first.
pub fn in_common(is_own_interface_down: bool, same_hub_address: bool, same_source: bool) -> usize {
    match is_own_interface_down {
        // The hub's interface is not at fault.
        true => usize::from(!same_hub_address),
        false => usize::from(same_hub_address) + usize::from(same_source),
    }
}

/// When a worker's program is notified that streams are opened again: once for all that fail together.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResumeNotices {
    last: Option<Instant>,
}

impl ResumeNotices {
    /// Notes that a stream was opened again, and returns whether to notify the program.
    pub fn is_due(&mut self, now: Instant) -> bool {
        self.last.replace(now).is_none_or(|before| now.saturating_duration_since(before) >= SILENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(1);

    #[test]
    fn attempts_end_in_time_and_with_their_job() {
        let begun = Instant::now();
        let attempts = Attempts::new(begun);
        assert_eq!(attempts.by(begun, Duration::from_secs(1)), begun + Duration::from_secs(1));
        assert_eq!(attempts.by(begun + RESUME - TICK, Duration::from_secs(1)), begun + RESUME);
        let last = begun + RESUME - ROUND_PAUSE;
        assert_eq!(attempts.after_round(last - TICK, false), AfterRound::Again(ROUND_PAUSE));
        assert_eq!(attempts.after_round(last, false), AfterRound::GiveUp, "no time is left after the pause");
        assert_eq!(attempts.after_round(begun, true), AfterRound::GiveUp);
        assert!(!attempts.are_over(begun + RESUME - TICK) && attempts.are_over(begun + RESUME));
    }

    #[test]
    fn paths_that_avoid_what_is_broken_come_first() {
        // A stream broke on its way: another address of the hub, from another of this worker, comes first.
        assert_eq!([in_common(false, false, false), in_common(false, true, true)], [0, 2]);
        assert_eq!([in_common(false, true, false), in_common(false, false, true)], [1, 1]);
        // The worker's own interface is down: the hub's address is as good as before.
        assert_eq!([in_common(true, true, false), in_common(true, false, false)], [0, 1]);
    }

    #[test]
    fn streams_that_fail_together_are_announced_once() {
        let mut notices = ResumeNotices::default();
        let first = Instant::now();
        assert!(notices.is_due(first) && !notices.is_due(first + SILENT - TICK));
        assert!(!notices.is_due(first + SILENT), "the last failed just before");
        assert!(notices.is_due(first + SILENT * 2));
    }
}
