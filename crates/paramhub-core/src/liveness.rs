//! This decides whether the other end of a connection lives: when a side sends a heartbeat, and when the
//! other's silence is reported or counts as its end. Workers, hubs and meshes follow these rules. Times are
//! passed in.

use std::time::{Duration, Instant};

/// A worker or a hub that has sent nothing on a stream for this long sends a heartbeat there.
pub const HEARTBEAT: Duration = Duration::from_secs(1);
/// A worker that has sent nothing on a stream for this long is reported as silent.
pub const SILENT_AFTER: Duration = Duration::from_secs(3);
/// The time that a final message may take: the reason why a job or a mesh is over, to be sent, read and
/// answered by the end of the connection.
pub const FINAL_MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

/// The shortest time between two heartbeats.
const HEARTBEAT_MIN: Duration = Duration::from_millis(10);
/// The number of checks of the peers in the time of one heartbeat.
const CHECKS_PER_HEARTBEAT: u32 = 4;

/// The waiting times of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LivenessRules {
    /// The time that a side sends nothing before it sends a heartbeat.
    pub heartbeat: Duration,
    /// The silence that is reported.
    pub silent_after: Duration,
    /// The silence after which the other end counts as dead.
    pub dead_after: Duration,
}

impl LivenessRules {
    /// The rules of a stream between a worker and a hub, or two hubs, which carries heartbeats at this
    /// interval. Heartbeat and report come sooner where the job soon gives up.
    pub fn of_stream(heartbeat: Duration, dead_after: Duration) -> Self {
        LivenessRules {
            heartbeat: heartbeat.min(dead_after / 4).max(HEARTBEAT_MIN),
            silent_after: SILENT_AFTER.min(dead_after / 2),
            dead_after,
        }
    }

    /// The rules of a connection of a mesh. A rank has a connection with every other and reports no silence
    /// before the end, so its heartbeats are rare.
    pub fn of_mesh(dead_after: Duration) -> Self {
        LivenessRules { heartbeat: dead_after / 6, silent_after: dead_after, dead_after }
    }

    /// The interval between checks of the peers.
    pub fn check_every(&self) -> Duration {
        self.heartbeat / CHECKS_PER_HEARTBEAT
    }
}

/// The state of the other end of one connection.
#[derive(Clone, Copy, Debug)]
pub struct PeerLiveness {
    last_heard: Instant,
    last_sent: Instant,
    is_reported_silent: bool,
}

/// A change in what is known about a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LivenessChange {
    /// It has been silent for a while.
    Silent(Duration),
    /// It has been silent for so long that it counts as dead.
    Dead(Duration),
    /// It was reported as silent, and is heard again.
    HeardAgain,
}

impl PeerLiveness {
    /// A peer that was connected `now`.
    pub fn new(now: Instant) -> Self {
        PeerLiveness { last_heard: now, last_sent: now, is_reported_silent: false }
    }

    /// Notes that bytes have come.
    pub fn heard(&mut self, now: Instant) {
        self.last_heard = now;
    }

    /// Notes that bytes have left.
    pub fn sent(&mut self, now: Instant) {
        self.last_sent = now;
    }

    /// Returns the time that the peer has been silent.
    pub fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.last_heard)
    }

    /// Returns whether this side has sent nothing for so long that a heartbeat is due.
    pub fn is_heartbeat_due(&self, now: Instant, rules: &LivenessRules) -> bool {
        now.saturating_duration_since(self.last_sent) >= rules.heartbeat
    }

    /// Returns the change since the last check. A death is returned at every check.
    pub fn check(&mut self, now: Instant, rules: &LivenessRules) -> Option<LivenessChange> {
        let silence = self.silence(now);
        if silence >= rules.dead_after {
            return Some(LivenessChange::Dead(silence));
        }
        let is_silent = silence >= rules.silent_after;
        let was_silent = std::mem::replace(&mut self.is_reported_silent, is_silent);
        (is_silent != was_silent).then_some(match is_silent {
            true => LivenessChange::Silent(silence),
            false => LivenessChange::HeardAgain,
        })
    }

    /// Does not count a pause of the own thread as silence of the peer.
    pub fn forgive(&mut self, pause: Duration, now: Instant) {
        // A peer that was heard after the pause must not seem to be heard in the future.
        self.last_heard = now.min(self.last_heard + pause);
    }
}

/// Finds the pauses of an I/O thread: the process was stopped, the machine slept, or a callback was slow.
///
/// A turn counts as at most one heartbeat of a peer's silence. What exceeds it is this thread's own pause. So a
/// thread that wakes up does not take its pause for a death of its peers, and a thread that pauses again and
/// again still finds a dead peer.
#[derive(Clone, Copy, Debug)]
pub struct OwnPauses {
    last_turn: Instant,
    turn_max: Duration,
}

impl OwnPauses {
    /// A thread that runs `now` and sends heartbeats at this interval.
    pub fn new(now: Instant, heartbeat: Duration) -> Self {
        OwnPauses { last_turn: now, turn_max: heartbeat }
    }

    /// Notes that the thread runs, and returns for how long it had paused: mostly zero.
    pub fn turn(&mut self, now: Instant) -> Duration {
        let took = now.saturating_duration_since(std::mem::replace(&mut self.last_turn, now));
        took.saturating_sub(self.turn_max)
    }

    /// Returns the time at which the thread last ran.
    pub fn last_turn(&self) -> Instant {
        self.last_turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: LivenessRules = LivenessRules {
        heartbeat: Duration::from_secs(1),
        silent_after: Duration::from_secs(3),
        dead_after: Duration::from_secs(30),
    };

    /// A time so many milliseconds after a common beginning.
    fn times() -> impl Fn(u64) -> Instant {
        let begin = Instant::now();
        move |ms| begin + Duration::from_millis(ms)
    }

    #[test]
    fn streams_that_give_up_soon_beat_and_report_sooner() {
        assert_eq!(LivenessRules::of_stream(HEARTBEAT, Duration::from_secs(30)), RULES);
        let hasty = LivenessRules::of_stream(HEARTBEAT, Duration::from_secs(2));
        assert_eq!((hasty.heartbeat, hasty.silent_after), (Duration::from_millis(500), HEARTBEAT));
        let mesh = LivenessRules::of_mesh(Duration::from_secs(30));
        assert_eq!((mesh.heartbeat, mesh.check_every().as_millis()), (Duration::from_secs(5), 1250));
    }

    #[test]
    fn each_change_is_reported_once_and_a_death_again_and_again() {
        let at = times();
        let mut peer = PeerLiveness::new(at(0));
        assert_eq!(peer.check(at(2999), &RULES), None);
        assert_eq!(peer.check(at(3000), &RULES), Some(LivenessChange::Silent(RULES.silent_after)));
        assert_eq!(peer.check(at(9000), &RULES), None);
        peer.heard(at(9001));
        assert_eq!(peer.check(at(9002), &RULES), Some(LivenessChange::HeardAgain));
        assert_eq!(peer.check(at(9003), &RULES), None);
        for ms in [39_001, 40_001] {
            let silence = Duration::from_millis(ms - 9001);
            assert_eq!(peer.check(at(ms), &RULES), Some(LivenessChange::Dead(silence)));
        }
    }

    #[test]
    fn a_heartbeat_is_due_after_the_last_bytes_that_left() {
        let at = times();
        let mut peer = PeerLiveness::new(at(0));
        assert!(!peer.is_heartbeat_due(at(999), &RULES) && peer.is_heartbeat_due(at(1000), &RULES));
        peer.sent(at(1000));
        peer.heard(at(1500));
        assert!(!peer.is_heartbeat_due(at(1999), &RULES) && peer.is_heartbeat_due(at(2000), &RULES));
    }

    #[test]
    fn a_thread_that_was_stopped_does_not_find_its_peers_dead() {
        let at = times();
        let (mut pauses, mut peer) = (OwnPauses::new(at(0), RULES.heartbeat), PeerLiveness::new(at(0)));
        for ms in [250, 500, 1500] {
            assert_eq!(pauses.turn(at(ms)), Duration::ZERO, "the thread ran");
        }
        let mut heard_first = peer;
        heard_first.heard(at(600_000));
        let pause = pauses.turn(at(600_000));
        for peer in [&mut peer, &mut heard_first] {
            peer.forgive(pause, at(600_000));
            assert_eq!(peer.check(at(600_000), &RULES), None);
        }
        assert_eq!(peer.silence(at(600_000)), Duration::from_millis(2500));
        assert_eq!(heard_first.silence(at(601_000)), Duration::from_secs(1));
    }

    #[test]
    fn a_thread_that_pauses_again_and_again_still_finds_a_dead_peer() {
        let at = times();
        let (mut pauses, mut peer) = (OwnPauses::new(at(0), RULES.heartbeat), PeerLiveness::new(at(0)));
        let deaths = (1..).map(|turn| at(turn * 10_000)).position(|now| {
            peer.forgive(pauses.turn(now), now);
            matches!(peer.check(now, &RULES), Some(LivenessChange::Dead(_)))
        });
        assert_eq!(deaths, Some(29), "each turn counts as one heartbeat");
    }
}
