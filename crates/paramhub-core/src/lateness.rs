//! When somebody whom others wait for counts as late.
//!
//! A synchronous step is as slow as its slowest rank, and a rank that is stuck in its own code stalls all of them for ever, though
//! it is heard all the time. How long a wait is normal only the job itself can say: its recent steps have kept others waiting for
//! some time, which explains as much, and what is longer by [`GRACE`] is told.
//!
//! [`Watch`] is sans-IO. Whoever has the chunks shows it now and then what is awaited at each, with the time; nothing is noted when
//! a contribution comes.

use std::time::Duration;

use crate::exchange::Awaited;

/// Beyond what recent steps explain, so much is late.
pub const GRACE: Duration = Duration::from_secs(3);
/// The same wait is told again each time that it has become so many times as long.
const TOLD_AGAIN: u32 = 10;
/// Waits that explain later ones: the longest of so many steps.
const RECENT: usize = 16;
/// Waits of steps further back explain nothing.
const RECENT_STEPS: u32 = 64;

/// What is to be told of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lateness {
    /// It is longer than recent steps explain, or ten times as long as when it was told last.
    Late(Wait),
    /// It is as long as a wait may be.
    Expired(Wait),
    /// What was told to be late has come.
    Over {
        /// After how long.
        waited: Duration,
    },
}

/// Others wait for something at a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The chunk that has waited longest.
    pub slot: u32,
    /// What for.
    pub awaited: Awaited,
    /// How long it has been seen to wait: since the first contribution to the step, or request, that was not the last.
    pub waited: Duration,
}

/// The waits of one route's chunks, by slot.
#[derive(Clone, Debug)]
pub struct Watch {
    /// What ends a wait, if anything does.
    limit: Option<Duration>,
    seen: Vec<Seen>,
    /// The slot to look at next.
    next: usize,
    /// The slot that has waited longest in the round under way.
    oldest: Option<(usize, Duration)>,
    recent: [Recent; RECENT],
    newest_recent: usize,
    told: Option<Told>,
    /// When what was told last came: the waits that it explains count from there.
    came_ms: Option<u32>,
    /// When parameters to start from came last. No step explains how long many of them take, so that each counts from there.
    begun_ms: Option<u32>,
}

/// Milliseconds here count from any time, and wrap after 49 days: no wait is compared that is longer.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    awaited: Option<Awaited>,
    since_ms: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Recent {
    step: u32,
    longest: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Told {
    slot: usize,
    awaited: Awaited,
    since_ms: u32,
    again: Duration,
    has_expired: bool,
}

impl Watch {
    /// For so many slots, whose waits end after `limit`, if there is one. Allocates all it will ever need.
    pub fn new(slots: usize, limit: Option<Duration>) -> Self {
        Watch {
            limit,
            seen: vec![Seen::default(); slots],
            next: 0,
            oldest: None,
            recent: [Recent::default(); RECENT],
            newest_recent: 0,
            told: None,
            came_ms: None,
            begun_ms: None,
        }
    }

    /// Bytes it takes for so many slots.
    pub fn memory_bytes(slots: usize) -> u64 {
        (slots * size_of::<Seen>()) as u64
    }

    /// Looks at the next slots, so many at most, with what is [awaited](crate::exchange::Exchange::awaits) at each; `now` counts
    /// from any fixed time. Where that was the last of them, says what is to be told, if anything is.
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
                self.seen[slot] = Seen { awaited, since_ms: now_ms };
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
        self.judge(now_ms)
    }

    /// After all slots have been looked at.
    fn judge(&mut self, now_ms: u32) -> Option<Lateness> {
        let oldest = self.oldest.take();
        if let Some(told) = &mut self.told {
            if self.seen[told.slot].awaited != Some(told.awaited) {
                let waited = since(told.since_ms, now_ms);
                (self.told, self.came_ms) = (None, Some(now_ms));
                return Some(Lateness::Over { waited });
            }
            let waited = since(told.since_ms, now_ms);
            let wait = Wait { slot: told.slot as u32, awaited: told.awaited, waited };
            if self.limit.is_some_and(|limit| waited >= limit) && !told.has_expired {
                told.has_expired = true;
                return Some(Lateness::Expired(wait));
            }
            if waited < told.again {
                return None;
            }
            told.again = waited * TOLD_AGAIN;
            return Some(Lateness::Late(wait));
        }
        let (slot, waited) = oldest?;
        let Seen { awaited, since_ms } = self.seen[slot];
        let awaited = awaited.expect("it waits");
        // Where somebody who was late goes on, all chunks that waited for it do not come at once.
        let begun_ms = self.begun_ms.filter(|_| awaited == Awaited::Parameters);
        let from = [self.came_ms, begun_ms].into_iter().flatten();
        let counted = from.map(|from| since(from, now_ms)).fold(waited, Duration::min);
        let has_expired = self.limit.is_some_and(|limit| counted >= limit);
        if !has_expired && counted < self.explained(awaited) + GRACE {
            return None;
        }
        self.told = Some(Told { slot, awaited, since_ms, again: waited * TOLD_AGAIN, has_expired });
        let wait = Wait { slot: slot as u32, awaited, waited };
        Some(if has_expired { Lateness::Expired(wait) } else { Lateness::Late(wait) })
    }

    /// The wait that recent steps explain. The longest of all does not count: one hiccup is no reason for the next.
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

    /// What a step has kept others waiting.
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
    struct Looked {
        watch: Watch,
        now: Duration,
        awaited: [Option<Awaited>; 3],
        told: Vec<Lateness>,
    }

    impl Looked {
        fn new(limit: Option<Duration>) -> Looked {
            let now = Duration::from_secs(1);
            Looked { watch: Watch::new(3, limit), now, awaited: [None; 3], told: Vec::new() }
        }

        fn pass(&mut self, ms: u64) -> Vec<Lateness> {
            for _ in 0..ms / 250 {
                self.now += Duration::from_millis(250);
                let awaited = self.awaited;
                self.told.extend(self.watch.look(self.now, 64, |slot| awaited[slot as usize]));
            }
            std::mem::take(&mut self.told)
        }

        /// A step in which somebody keeps the others waiting.
        fn step(&mut self, step: u32, waits_ms: u64) -> Vec<Lateness> {
            self.awaited = [Some(Awaited::Contribution(step)); 3];
            let told = self.pass(waits_ms);
            self.awaited = [None; 3];
            [told, self.pass(250)].concat()
        }
    }

    fn late(told: &[Lateness]) -> usize {
        told.iter().filter(|told| matches!(told, Lateness::Late(_))).count()
    }

    #[test]
    fn a_rank_that_is_stuck_is_told_within_seconds_and_again_when_it_has_become_much_longer() {
        let mut job = Looked::new(None);
        for step in 0..100 {
            assert_eq!(job.step(step, 0), []);
        }
        job.awaited[2] = Some(Awaited::Contribution(100));
        let told = job.pass(5000);
        let [Lateness::Late(wait)] = told[..] else { panic!("{told:?}") };
        assert_eq!((wait.slot, wait.awaited), (2, Awaited::Contribution(100)));
        assert_eq!(wait.waited, GRACE);
        let told = job.pass(400_000);
        assert_eq!(late(&told), 2, "at 30 and 300 s: {told:?}");
        job.awaited[2] = Some(Awaited::Contribution(101));
        let told = job.pass(250);
        let [Lateness::Over { waited }] = told[..] else { panic!("{told:?}") };
        assert_eq!(waited, Duration::from_secs(405));
    }

    #[test]
    fn what_recent_steps_explain_is_not_told() {
        let mut job = Looked::new(None);
        assert_eq!(late(&job.step(0, 10_000)), 1, "nothing explains the first");
        assert_eq!(late(&job.step(1, 10_000)), 1, "one explains nothing");
        for step in 2..20 {
            assert_eq!(job.step(step, 10_000), [], "step {step}");
        }
        assert_eq!(late(&job.step(20, 14_000)), 1, "beyond it");
        assert_eq!(job.step(21, 12_000), []);
        // Long ago.
        assert_eq!(late(&job.step(200, 10_000)), 1);
    }

    #[test]
    fn chunks_that_waited_for_a_rank_that_goes_on_are_not_told_one_after_the_other() {
        let mut job = Looked::new(None);
        job.awaited = [Some(Awaited::Contribution(7)); 3];
        assert_eq!(late(&job.pass(8000)), 1);
        job.awaited[0] = None;
        assert!(matches!(job.pass(250)[..], [Lateness::Over { .. }]));
        assert_eq!(job.pass(2000), []);
        job.awaited[1] = None;
        assert_eq!(job.pass(500), []);
        // It is stuck once more.
        let told = job.pass(2000);
        assert!(matches!(told[..], [Lateness::Late(Wait { slot: 2, .. })]), "{told:?}");
    }

    #[test]
    fn a_limit_ends_a_wait_once_however_much_is_explained() {
        let mut job = Looked::new(Some(LIMIT));
        for step in 0..4 {
            job.step(step, 19_000);
        }
        job.awaited[1] = Some(Awaited::Release(4));
        assert_eq!(job.pass(20_000), [], "19 s are explained");
        let told = job.pass(60_000);
        let [Lateness::Expired(wait)] = told[..] else { panic!("{told:?}") };
        assert_eq!((wait.slot, wait.awaited, wait.waited), (1, Awaited::Release(4), LIMIT));
        // Where little is explained, it is told to be late before.
        let mut job = Looked::new(Some(LIMIT));
        job.awaited[1] = Some(Awaited::Parameters);
        let told = job.pass(100_000);
        assert!(matches!(told[..], [Lateness::Late(_), Lateness::Expired(_), Lateness::Late(_)]), "{told:?}");
    }

    #[test]
    fn parameters_to_start_from_that_keep_coming_are_not_late() {
        let mut job = Looked::new(None);
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
        let mut watch = Watch::new(10, None);
        let mut told = Vec::new();
        for tick in 0..60 {
            let now = Duration::from_millis(250 * tick);
            told.extend(watch.look(now, 3, |slot| (slot == 9).then_some(Awaited::Contribution(0))));
        }
        assert!(matches!(told[..], [Lateness::Late(Wait { slot: 9, .. })]), "{told:?}");
        assert_eq!(Watch::new(0, None).look(Duration::ZERO, 3, |_| None), None);
    }
}
