//! This decides when a member that others wait for counts as late.
//!
//! A synchronous step is as slow as its slowest rank, and a rank that hangs in its own code stalls all of
//! them for ever, although its heartbeats arrive. Only the job itself shows how long a wait is normal: its
//! recent steps have kept members waiting for some time. A wait is announced if it is longer than that by
//! [`GRACE`].
//!
//! [`LatenessMonitor`] is sans-IO. The owner of the chunks passes to it from time to time what members wait
//! for at each chunk, with the time; a contribution that arrives causes no call.

use std::time::Duration;

use crate::exchange::Awaited;

/// A wait is late if it is longer than recent steps explain by this much.
pub const GRACE: Duration = Duration::from_secs(3);
/// A wait is announced again each time that it is this many times as long as at the last announcement.
const ANNOUNCED_AGAIN: u32 = 10;
/// The number of recent steps whose longest waits explain later ones.
const RECENT: usize = 16;
/// Waits of steps that are further back than this explain nothing.
const RECENT_STEPS: u32 = 64;

/// The announcement about a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lateness {
    /// The wait is longer than recent steps explain, or ten times as long as when it was last announced.
    Late(OverdueChunk),
    /// The wait has reached the limit.
    Expired(OverdueChunk),
    /// The late event has come.
    Over {
        /// The time that members waited for it.
        waited: Duration,
    },
}

/// A chunk at which members wait too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverdueChunk {
    /// The chunk that has waited longest.
    pub slot: u32,
    /// The event that they wait for.
    pub awaited: Awaited,
    /// The time that the wait was observed to last: it begins with the first contribution to the step, or
    /// request, that was not the last.
    pub waited: Duration,
}

/// The waits of one route's chunks, by slot.
#[derive(Clone, Debug)]
pub struct LatenessMonitor {
    /// The longest wait allowed, if there is a limit.
    limit: Option<Duration>,
    seen: Vec<ObservedWait>,
    /// The slot to look at next.
    next: usize,
    /// The slot that has waited longest, in the round of looks that is under way.
    oldest: Option<(usize, Duration)>,
    recent: [Recent; RECENT],
    newest_recent: usize,
    announced: Option<Announced>,
    /// The time at which what was announced last came: the waits that it explains count from then.
    came_ms: Option<u32>,
    /// The time at which initial parameters came last. No step explains how long many of them take, so waits
    /// for them count from then.
    begun_ms: Option<u32>,
}

/// A wait. Milliseconds here count from an arbitrary time and wrap after 49 days; no wait that is compared is
/// longer.
#[derive(Clone, Copy, Debug, Default)]
struct ObservedWait {
    awaited: Option<Awaited>,
    since_ms: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Recent {
    step: u32,
    longest: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Announced {
    slot: usize,
    awaited: Awaited,
    since_ms: u32,
    again: Duration,
    has_expired: bool,
}

impl LatenessMonitor {
    /// A monitor of this many slots, with a limit on waits if there is one. It allocates all the memory it
    /// will ever need.
    pub fn new(slots: usize, limit: Option<Duration>) -> Self {
        LatenessMonitor {
            limit,
            seen: vec![ObservedWait::default(); slots],
            next: 0,
            oldest: None,
            recent: [Recent::default(); RECENT],
            newest_recent: 0,
            announced: None,
            came_ms: None,
            begun_ms: None,
        }
    }

    /// Bytes that a monitor of this many slots takes.
    pub fn memory_bytes(slots: usize) -> u64 {
        (slots * size_of::<ObservedWait>()) as u64
    }

    /// Looks at the next slots, at most `most`, and at what is [awaited](crate::exchange::Exchange::awaits)
    /// at each. `now` counts from any fixed time. After the last slot, returns what to announce, if anything.
    pub fn look(
        &mut self,
        now: Duration,
        most: usize,
        awaits: impl Fn(u32) -> Option<Awaited>,
    ) -> Option<Lateness> {
        let now_ms = now.as_millis() as u32;
        let end = self.seen.len().min(self.next + most);
        for slot in self.next..end {
            let (before, awaited) = (self.seen[slot], awaits(slot as u32));
            if before.awaited != awaited {
                if before.awaited == Some(Awaited::Parameters) {
                    self.begun_ms = Some(now_ms);
                } else if let Some(came) = before.awaited {
                    self.note(came, since(before.since_ms, now_ms));
                }
                self.seen[slot] = ObservedWait { awaited, since_ms: now_ms };
            } else if awaited.is_some() {
                let waited = since(before.since_ms, now_ms);
                if self.oldest.is_none_or(|(_, longest)| waited > longest) {
                    self.oldest = Some((slot, waited));
                }
            }
        }
        self.next = end;
        if end < self.seen.len() {
            return None;
        }
        self.next = 0;
        self.evaluate(now_ms)
    }

    /// Decides what to announce, after all slots have been looked at.
    fn evaluate(&mut self, now_ms: u32) -> Option<Lateness> {
        let oldest = self.oldest.take();
        if let Some(announced) = &mut self.announced {
            if self.seen[announced.slot].awaited != Some(announced.awaited) {
                let waited = since(announced.since_ms, now_ms);
                (self.announced, self.came_ms) = (None, Some(now_ms));
                return Some(Lateness::Over { waited });
            }
            let waited = since(announced.since_ms, now_ms);
            let wait = OverdueChunk { slot: announced.slot as u32, awaited: announced.awaited, waited };
            if self.limit.is_some_and(|limit| waited >= limit) && !announced.has_expired {
                announced.has_expired = true;
                return Some(Lateness::Expired(wait));
            }
            if waited < announced.again {
                return None;
            }
            announced.again = waited * ANNOUNCED_AGAIN;
            return Some(Lateness::Late(wait));
        }
        let (slot, waited) = oldest?;
        let ObservedWait { awaited, since_ms } = self.seen[slot];
        let awaited = awaited.expect("it waits");
        // When a late member goes on, the chunks that waited for it do not all come at once.
        let begun_ms = self.begun_ms.filter(|_| awaited == Awaited::Parameters);
        let from = [self.came_ms, begun_ms].into_iter().flatten();
        let counted = from.map(|from| since(from, now_ms)).fold(waited, Duration::min);
        let has_expired = self.limit.is_some_and(|limit| counted >= limit);
        if !has_expired && counted < self.explained(awaited) + GRACE {
            return None;
        }
        self.announced =
            Some(Announced { slot, awaited, since_ms, again: waited * ANNOUNCED_AGAIN, has_expired });
        let wait = OverdueChunk { slot: slot as u32, awaited, waited };
        Some(if has_expired { Lateness::Expired(wait) } else { Lateness::Late(wait) })
    }

    /// The wait that recent steps explain. The longest one does not count: one hiccup does not excuse the
    /// next.
    fn explained(&self, awaited: Awaited) -> Duration {
        let Some(step) = awaited.step() else { return Duration::ZERO };
        let is_recent = |recent: &&Recent| step.wrapping_sub(recent.step) <= RECENT_STEPS;
        let (mut longest, mut second) = (Duration::ZERO, Duration::ZERO);
        for Recent { longest: waited, .. } in self.recent.iter().filter(is_recent) {
            if *waited > longest {
                (longest, second) = (*waited, longest);
            } else {
                second = second.max(*waited);
            }
        }
        second
    }

    /// Notes how long a step has kept members waiting.
    fn note(&mut self, came: Awaited, waited: Duration) {
        let Some(step) = came.step() else { return };
        let known = self.recent.iter().position(|recent| recent.step == step && !recent.longest.is_zero());
        let at = known.unwrap_or((self.newest_recent + 1) % RECENT);
        let recent = &mut self.recent[at];
        let longest = if known.is_some() { recent.longest.max(waited) } else { waited };
        *recent = Recent { step, longest };
        if known.is_none() {
            self.newest_recent = at;
        }
    }
}

fn since(since_ms: u32, now_ms: u32) -> Duration {
    Duration::from_millis(now_ms.wrapping_sub(since_ms).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    /// A job of three chunks that is looked at four times a second.
    struct TestMonitor {
        watch: LatenessMonitor,
        now: Duration,
        awaited: [Option<Awaited>; 3],
        announced: Vec<Lateness>,
    }

    impl TestMonitor {
        fn new(limit: Option<Duration>) -> TestMonitor {
            let now = Duration::from_secs(1);
            TestMonitor {
                watch: LatenessMonitor::new(3, limit),
                now,
                awaited: [None; 3],
                announced: Vec::new(),
            }
        }

        fn pass(&mut self, ms: u64) -> Vec<Lateness> {
            for _ in 0..ms / 250 {
                self.now += Duration::from_millis(250);
                let awaited = self.awaited;
                self.announced.extend(self.watch.look(self.now, 64, |slot| awaited[slot as usize]));
            }
            std::mem::take(&mut self.announced)
        }

        /// A step in which one member keeps the others waiting.
        fn step(&mut self, step: u32, waits_ms: u64) -> Vec<Lateness> {
            self.awaited = [Some(Awaited::Contribution(step)); 3];
            let announced = self.pass(waits_ms);
            self.awaited = [None; 3];
            [announced, self.pass(250)].concat()
        }
    }

    fn late(announced: &[Lateness]) -> usize {
        announced.iter().filter(|announced| matches!(announced, Lateness::Late(_))).count()
    }

    #[test]
    fn a_stuck_rank_is_reported_within_seconds_and_again_when_it_has_become_much_longer() {
        let mut job = TestMonitor::new(None);
        for step in 0..100 {
            assert_eq!(job.step(step, 0), []);
        }
        job.awaited[2] = Some(Awaited::Contribution(100));
        let announced = job.pass(5000);
        let [Lateness::Late(wait)] = announced[..] else { panic!("{announced:?}") };
        assert_eq!((wait.slot, wait.awaited), (2, Awaited::Contribution(100)));
        assert_eq!(wait.waited, GRACE);
        let announced = job.pass(400_000);
        assert_eq!(late(&announced), 2, "at 30 and 300 s: {announced:?}");
        job.awaited[2] = Some(Awaited::Contribution(101));
        let announced = job.pass(250);
        let [Lateness::Over { waited }] = announced[..] else { panic!("{announced:?}") };
        assert_eq!(waited, Duration::from_secs(405));
    }

    #[test]
    fn a_wait_that_recent_steps_explain_is_not_reported() {
        let mut job = TestMonitor::new(None);
        assert_eq!(late(&job.step(0, 10_000)), 1, "nothing explains the first");
        assert_eq!(late(&job.step(1, 10_000)), 1, "one explains nothing");
        for step in 2..20 {
            assert_eq!(job.step(step, 10_000), [], "step {step}");
        }
        assert_eq!(late(&job.step(20, 14_000)), 1, "beyond it");
        assert_eq!(job.step(21, 12_000), []);
        // That wait is too far back.
        assert_eq!(late(&job.step(200, 10_000)), 1);
    }

    #[test]
    fn chunks_that_waited_for_a_rank_that_goes_on_are_not_reported_one_by_one() {
        let mut job = TestMonitor::new(None);
        job.awaited = [Some(Awaited::Contribution(7)); 3];
        assert_eq!(late(&job.pass(8000)), 1);
        job.awaited[0] = None;
        assert!(matches!(job.pass(250)[..], [Lateness::Over { .. }]));
        assert_eq!(job.pass(2000), []);
        job.awaited[1] = None;
        assert_eq!(job.pass(500), []);
        // The member hangs once more.
        let announced = job.pass(2000);
        assert!(matches!(announced[..], [Lateness::Late(OverdueChunk { slot: 2, .. })]), "{announced:?}");
    }

    #[test]
    fn a_limit_ends_a_wait_once_however_much_is_explained() {
        let mut job = TestMonitor::new(Some(LIMIT));
        for step in 0..4 {
            job.step(step, 19_000);
        }
        job.awaited[1] = Some(Awaited::Release(4));
        assert_eq!(job.pass(20_000), [], "19 s are explained");
        let announced = job.pass(60_000);
        let [Lateness::Expired(wait)] = announced[..] else { panic!("{announced:?}") };
        assert_eq!((wait.slot, wait.awaited, wait.waited), (1, Awaited::Release(4), LIMIT));
        // If little is explained, the wait is announced as late first.
        let mut job = TestMonitor::new(Some(LIMIT));
        job.awaited[1] = Some(Awaited::Parameters);
        let announced = job.pass(100_000);
        assert!(
            matches!(announced[..], [Lateness::Late(_), Lateness::Expired(_), Lateness::Late(_)]),
            "{announced:?}"
        );
    }

    #[test]
    fn parameters_to_start_from_that_keep_coming_are_not_late() {
        let mut job = TestMonitor::new(None);
        job.awaited = [Some(Awaited::Parameters); 3];
        for slot in 0..3 {
            assert_eq!(job.pass(2750), []);
            job.awaited[slot] = None;
        }
        assert_eq!(job.pass(250), []);
        job.awaited[0] = Some(Awaited::Parameters);
        assert_eq!(late(&job.pass(5000)), 1);
    }

    #[test]
    fn many_chunks_are_looked_at_in_turns() {
        let mut watch = LatenessMonitor::new(10, None);
        let mut announced = Vec::new();
        for tick in 0..60 {
            let now = Duration::from_millis(250 * tick);
            announced.extend(watch.look(now, 3, |slot| (slot == 9).then_some(Awaited::Contribution(0))));
        }
        assert!(matches!(announced[..], [Lateness::Late(OverdueChunk { slot: 9, .. })]), "{announced:?}");
        assert_eq!(LatenessMonitor::new(0, None).look(Duration::ZERO, 3, |_| None), None);
    }
}
