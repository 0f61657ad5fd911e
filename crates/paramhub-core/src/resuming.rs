//! Which streams of a job are opened again when they end, after which silence, by which paths, and how long either end
//! waits for that; and when a worker's program is notified.
//!
//! The end of a stream tells what has happened. A process that lives says Leave before it closes a stream, and the
//! system closes the streams of a process that dies: a stream that was [closed](StreamEnd::Closed) without a Leave is the
//! death of the process. A stream that was [reset](StreamEnd::Reset) may be the same, if the process had not read all that
//! had come, or something on the path has forgotten the connection; the worker then dials at once, so that a hub need not
//! wait long. An [error of the path](StreamEnd::PathFailed) says nothing of the process.
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
/// How long a worker tries to open a stream again by other paths.
pub const RESUME: Duration = Duration::from_secs(RESUME_S);
/// How long a worker tries to reach a hub or its standby. The standby takes over when the connection manager says so, which
/// may have to be started again first.
pub const TAKE_OVER: Duration = Duration::from_secs(300);
/// How long the handshake with a hub may take that can have been replaced, before the other is tried.
pub const HANDSHAKE_OF_TWO: Duration = Duration::from_secs(1);
/// How long the handshake of a stream may take that replaces another, before it is dialled once more: a busy hub answers late.
pub const HANDSHAKE: Duration = Duration::from_secs(3);
/// How often in a row a stream may be cut, each time within the redial grace of its opening, before it is lost: a path
/// that resets every connection is not worth dialling for ever.
pub const CUTS_IN_A_ROW_MAX: u32 = 20;
/// The longest pause between two rounds over all paths.
const ROUND_PAUSE: Duration = Duration::from_millis(200);
/// The number of rounds for which a short redial grace has time.
const ROUNDS: u32 = 10;
/// The longest time that one path may take to connect, the shortest, and how often a redial grace has room for it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const CONNECT_TIMEOUT_MIN: Duration = Duration::from_millis(50);
const CONNECTS: u32 = 4;
/// The shortest heartbeat that a short redial grace leads to.
const HEARTBEAT_MIN: Duration = Duration::from_millis(100);

/// How a stream has ended before the last message of the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamEnd {
    /// The other end has closed it, in order or inside a frame: its process has ended.
    Closed,
    /// It was reset.
    Reset,
    /// Its path has failed, or it has been silent.
    PathFailed,
}

/// Which streams of a job are opened again, and how long that may take. By default none is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResumeTerms {
    /// How long a hub waits for a worker whose stream was cut, and how long the worker dials. With zero no stream is
    /// dialled again by its own path.
    pub redial_grace: Duration,
    /// Whether streams go on over other interfaces (`on_interface_down = continue`).
    pub moves: bool,
    /// Whether another hub can take over what a hub serves (`replicas`). A worker then dials both, whatever has happened to a
    /// stream.
    pub has_standbys: bool,
}

/// How long a hub waits for another stream in place of one that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubWait {
    /// For this long.
    For(Duration),
    /// Until the worker has been silent for as long as a dead one: it may have to find another path first.
    UntilDead,
}

impl ResumeTerms {
    /// Whether any stream is opened again.
    pub fn resumes(&self) -> bool {
        self.moves || self.has_standbys || !self.redial_grace.is_zero()
    }

    /// How long a worker tries to open a stream again that has ended like this; `None` if it does not.
    pub fn worker_tries(&self, end: StreamEnd) -> Option<Duration> {
        match self.has_standbys {
            true => Some(TAKE_OVER.max(self.redial_grace)),
            false => self.tries_same_hub(end),
        }
    }

    fn tries_same_hub(&self, end: StreamEnd) -> Option<Duration> {
        match end {
            StreamEnd::Closed => None,
            StreamEnd::PathFailed if self.moves => Some(RESUME.max(self.redial_grace)),
            StreamEnd::Reset | StreamEnd::PathFailed => {
                Some(self.redial_grace).filter(|grace| !grace.is_zero())
            }
        }
    }

    /// How long a hub waits for another stream in place of one that has ended like this; `None` if the worker is lost
    /// at once.
    pub fn hub_waits(&self, end: StreamEnd) -> Option<HubWait> {
        match end {
            StreamEnd::PathFailed if self.moves => Some(HubWait::UntilDead),
            _ => self.tries_same_hub(end).map(HubWait::For),
        }
    }

    /// The time after which a worker that has sent nothing sends a heartbeat, which would be `heartbeat` otherwise. If a
    /// hub alone has learned that a stream was cut, this is how the worker learns of it, so it comes well within the time
    /// for which the hub waits.
    pub fn heartbeat(&self, heartbeat: Duration) -> Duration {
        match self.redial_grace.is_zero() {
            true => heartbeat,
            false => heartbeat.min((self.redial_grace / 2).max(HEARTBEAT_MIN)),
        }
    }
}

/// The cuts of one stream that follow one another so soon that they count as one failure of its path.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cuts {
    opened: Option<Instant>,
    in_a_row: u32,
}

impl Cuts {
    /// Notes that another stream is in the place of the cut one.
    pub fn reopened(&mut self, now: Instant) {
        self.opened = Some(now);
    }

    /// Notes a cut after which a worker tries for `patience`, and returns whether it may try once more.
    pub fn may_retry(&mut self, now: Instant, patience: Duration) -> bool {
        let is_soon = self.opened.is_some_and(|opened| now.saturating_duration_since(opened) < patience);
        self.in_a_row = if is_soon { self.in_a_row + 1 } else { 1 };
        self.in_a_row <= CUTS_IN_A_ROW_MAX
    }
}

/// The attempts to open one stream again: rounds over all paths, until a deadline.
#[derive(Clone, Copy, Debug)]
pub struct Attempts {
    deadline: Instant,
    pause: Duration,
    connect_timeout: Duration,
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
    /// Attempts that begin now and may take so long.
    pub fn new(now: Instant, patience: Duration) -> Attempts {
        Attempts {
            deadline: now + patience,
            pause: ROUND_PAUSE.min(patience / ROUNDS),
            connect_timeout: (patience / CONNECTS).clamp(CONNECT_TIMEOUT_MIN, CONNECT_TIMEOUT),
        }
    }

    /// How long one path may take to connect before the next is tried. A path that drops packets for a moment drops the
    /// first of a connection, which the system repeats after a second only; so a short time has several.
    pub fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    /// Whether no further path may be tried.
    pub fn are_over(&self, now: Instant) -> bool {
        now >= self.deadline
    }

    /// The deadline of a step that may take this long.
    pub fn by(&self, now: Instant, patience: Duration) -> Instant {
        self.deadline.min(now + patience)
    }

    /// What follows a round that has not led to the hub. `is_hub_gone` says that nobody listens at its address: its
    /// process has ended.
    pub fn after_round(&self, now: Instant, is_job_over: bool, is_hub_gone: bool) -> AfterRound {
        match is_job_over || is_hub_gone || now + self.pause >= self.deadline {
            true => AfterRound::GiveUp,
            false => AfterRound::Again(self.pause),
        }
    }
}

/// Why a stream that may go by other paths is opened again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrokenPath {
    /// The worker's own interface is down.
    OwnInterface,
    /// Something on the path is.
    Somewhere,
    /// Nothing is as far as can be known: the stream was reset.
    Nowhere,
}

impl BrokenPath {
    /// What has broken where a stream has ended like this. A reset says nothing against the hub: if its process has died, its
    /// system says so to the next dial at once, and if it lives, it waits for that dial for the redial grace only.
    pub fn after(end: StreamEnd) -> BrokenPath {
        match end {
            StreamEnd::Reset => BrokenPath::Nowhere,
            StreamEnd::Closed | StreamEnd::PathFailed => BrokenPath::Somewhere,
        }
    }
}

/// The place of a path among those that are tried: paths with what is not at fault come first.
pub fn path_order(broken: BrokenPath, same_hub_address: bool, same_source: bool) -> usize {
    match broken {
        // The hub's interface is not at fault.
        BrokenPath::OwnInterface => usize::from(!same_hub_address),
        BrokenPath::Somewhere => usize::from(same_hub_address) + usize::from(same_source),
        BrokenPath::Nowhere => usize::from(!same_hub_address) + usize::from(!same_source),
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
    fn attempts_end_in_time_with_their_job_and_with_their_hub() {
        let begun = Instant::now();
        let attempts = Attempts::new(begun, RESUME);
        assert_eq!(attempts.by(begun, Duration::from_secs(1)), begun + Duration::from_secs(1));
        assert_eq!(attempts.by(begun + RESUME - TICK, Duration::from_secs(1)), begun + RESUME);
        let last = begun + RESUME - ROUND_PAUSE;
        let again = AfterRound::Again(ROUND_PAUSE);
        assert_eq!(attempts.after_round(last - TICK, false, false), again);
        assert_eq!(
            attempts.after_round(last, false, false),
            AfterRound::GiveUp,
            "no time is left after the pause"
        );
        assert_eq!(attempts.after_round(begun, true, false), AfterRound::GiveUp);
        assert_eq!(attempts.after_round(begun, false, true), AfterRound::GiveUp);
        assert!(!attempts.are_over(begun + RESUME - TICK) && attempts.are_over(begun + RESUME));
        assert_eq!(attempts.connect_timeout(), Duration::from_secs(1));
        let hasty = Attempts::new(begun, Duration::from_millis(500));
        assert_eq!(hasty.connect_timeout(), Duration::from_millis(125));
        assert_eq!(hasty.after_round(begun, false, false), AfterRound::Again(Duration::from_millis(50)));
    }

    #[test]
    fn paths_that_avoid_what_is_broken_come_first() {
        use BrokenPath::{Nowhere, OwnInterface, Somewhere};
        // A stream broke on its way: another address of the hub, from another of this worker, comes first.
        assert_eq!([path_order(Somewhere, false, false), path_order(Somewhere, true, true)], [0, 2]);
        assert_eq!([path_order(Somewhere, true, false), path_order(Somewhere, false, true)], [1, 1]);
        // The worker's own interface is down: the hub's address is as good as before.
        assert_eq!([path_order(OwnInterface, true, false), path_order(OwnInterface, false, false)], [0, 1]);
        // A stream that was reset stays where it was.
        assert_eq!([path_order(Nowhere, true, true), path_order(Nowhere, false, false)], [0, 2]);
        assert_eq!(BrokenPath::after(StreamEnd::Reset), Nowhere);
        assert_eq!([StreamEnd::Closed, StreamEnd::PathFailed].map(BrokenPath::after), [Somewhere; 2]);
    }

    #[test]
    fn only_what_may_be_the_paths_fault_is_waited_for() {
        let grace = Duration::from_millis(500);
        let redials = ResumeTerms { redial_grace: grace, moves: false, has_standbys: false };
        let moves = ResumeTerms { redial_grace: Duration::ZERO, moves: true, has_standbys: false };
        let both = ResumeTerms { redial_grace: grace, moves: true, has_standbys: false };
        use StreamEnd::{Closed, PathFailed, Reset};
        let of = |terms: ResumeTerms| [Closed, Reset, PathFailed].map(|end| terms.hub_waits(end));
        assert_eq!(of(ResumeTerms::default()), [None; 3]);
        assert_eq!(of(redials), [None, Some(HubWait::For(grace)), Some(HubWait::For(grace))]);
        assert_eq!(of(moves), [None, None, Some(HubWait::UntilDead)]);
        assert_eq!(of(both), [None, Some(HubWait::For(grace)), Some(HubWait::UntilDead)]);
        let of = |terms: ResumeTerms| [Closed, Reset, PathFailed].map(|end| terms.worker_tries(end));
        assert_eq!(of(redials), [None, Some(grace), Some(grace)]);
        assert_eq!(of(both), [None, Some(grace), Some(RESUME)]);
        let patient = ResumeTerms { redial_grace: RESUME * 2, moves: true, has_standbys: false };
        assert_eq!(patient.worker_tries(PathFailed), Some(RESUME * 2));
        assert!(!ResumeTerms::default().resumes() && redials.resumes() && moves.resumes());
    }

    #[test]
    fn a_worker_learns_of_a_cut_before_its_hub_gives_it_up() {
        let heartbeat = |ms| {
            let terms =
                ResumeTerms { redial_grace: Duration::from_millis(ms), moves: false, has_standbys: false };
            terms.heartbeat(Duration::from_secs(1)).as_millis()
        };
        assert_eq!([0, 20, 500, 10_000].map(heartbeat), [1000, 100, 250, 1000]);
    }

    #[test]
    fn a_stream_that_is_cut_again_and_again_is_lost() {
        let (mut cuts, patience) = (Cuts::default(), Duration::from_millis(500));
        let mut now = Instant::now();
        for _ in 0..CUTS_IN_A_ROW_MAX {
            assert!(cuts.may_retry(now, patience));
            cuts.reopened(now);
            now += patience - TICK;
        }
        assert!(!cuts.clone().may_retry(now, patience));
        assert!(cuts.may_retry(now + TICK, patience), "it has lasted for a while");
        cuts.reopened(now);
        assert!(cuts.may_retry(now, patience), "and counts anew");
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
