//! The kills of `train --chaos`: which worker is killed when, and what the launcher sees of the training meanwhile.

use std::time::{Duration, Instant};

use paramhub::service::{JobStatus, LossCounters};
use paramhub_train::random::Random;
use serde::Serialize;

use super::spec::StepsDone;
use crate::config::TrainSection;

/// No worker is killed when less than this is left of the training, so that its successor takes part in the end.
const LEFT_MIN: Duration = Duration::from_secs(1);
/// The same, as a multiple of the longest time that a successor has taken to join.
const LEFT_RETURNS: u32 = 4;

/// The kills of a training. It reads no clock itself.
pub(super) struct Chaos {
    seed: u64,
    interval: Duration,
    random: Random,
    /// By rank.
    processes: Vec<Process>,
    /// The rank that is killed next. It is drawn before it is needed: if its process has yet to join, the kill waits
    /// for it. So the seed alone decides who is killed after whom.
    next: usize,
    /// When it is killed; `None` before the first step, since a job does not outlive a worker that is lost before.
    due: Option<Instant>,
    steps: Option<Steps>,
    /// Whether the training is about to end.
    is_over: bool,
    kills: u32,
    returns: u32,
    slowest_return: Duration,
}

/// The process of a rank.
#[derive(Clone, Copy, PartialEq)]
enum Process {
    /// It is the first, and has yet to join.
    Starting,
    /// It trains.
    Working,
    /// It was killed then, and the one in its place has yet to join.
    Killed(Instant),
}

/// The steps that the launcher has heard of, from whichever rank was the first to make them.
struct Steps {
    first: (usize, Instant),
    newest: (usize, Instant),
    /// Whether ranks have measured the test set after the newest.
    was_measured: bool,
    of: usize,
    /// The longest time from one step to the next, but for those during which ranks measured the test set.
    longest_gap: Duration,
}

/// What the kills did to the training.
#[derive(Serialize)]
pub(super) struct ChaosSummary {
    seed: u64,
    /// Workers that were killed, and how many of their ranks came back.
    kills: u32,
    returns: u32,
    /// Seconds from a kill to the successor's joining, at most.
    slowest_return_s: f64,
    /// Seconds from one step to the next, at most, as the launcher saw them, but for those during which ranks measured
    /// the test set.
    longest_gap_s: f64,
    /// Steps of the training, and the seconds from the first to the last.
    #[serde(skip)]
    pub(super) steps: usize,
    #[serde(skip)]
    pub(super) seconds: f64,
    /// Share of all contributions to updates that are missing; null if the manager did not answer.
    pub(super) missing_contributions: Option<f64>,
    /// What the manager has counted.
    losses: Option<LossCounters>,
}

impl Chaos {
    /// The kills that were asked for, if they were.
    pub(super) fn new(section: &TrainSection) -> anyhow::Result<Option<Chaos>> {
        let Some(seconds) = section.chaos_s else { return Ok(None) };
        let seed = match section.chaos_seed {
            Some(seed) => seed,
            None => u64::from(getrandom::u32()?),
        };
        let (mut random, workers) = (Random::new(seed, &[]), section.workers());
        let next = random.below(u64::from(workers)) as usize;
        Ok(Some(Chaos {
            seed,
            interval: Duration::from_secs_f64(seconds),
            random,
            processes: vec![Process::Starting; workers as usize],
            next,
            due: None,
            steps: None,
            is_over: false,
            kills: 0,
            returns: 0,
            slowest_return: Duration::ZERO,
        }))
    }

    /// What is about to happen, for people.
    pub(super) fn title(&self) -> String {
        let seconds = self.interval.as_secs_f64();
        format!("a random worker is killed every {seconds} s; --chaos-seed {} repeats the choice", self.seed)
    }

    /// A worker has made a step. Returns whether it is the first to have made it.
    pub(super) fn stepped(&mut self, done: &StepsDone, now: Instant) -> bool {
        let Some(steps) = &mut self.steps else {
            self.due = Some(now + self.interval);
            let first = (done.step, now);
            let (was_measured, longest_gap) = (done.accuracy.is_some(), Duration::ZERO);
            self.steps = Some(Steps { first, newest: first, was_measured, of: done.of, longest_gap });
            return true;
        };
        let (newest, at) = steps.newest;
        if done.step <= newest {
            return false;
        }
        // The first rank to have measured reports its step late, and the last makes the next one late.
        let is_measured = done.accuracy.is_some();
        if !is_measured && !steps.was_measured {
            steps.longest_gap = steps.longest_gap.max(now.saturating_duration_since(at));
        }
        (steps.newest, steps.was_measured) = ((done.step, now), is_measured);
        true
    }

    /// A worker has joined the job, and this is the first step to which it contributes. Returns what to tell.
    pub(super) fn joined(&mut self, rank: usize, step: usize, now: Instant) -> Option<String> {
        let Process::Killed(at) = std::mem::replace(&mut self.processes[rank], Process::Working) else {
            return None;
        };
        let after = now.saturating_duration_since(at);
        self.returns += 1;
        self.slowest_return = self.slowest_return.max(after);
        Some(format!("rank {rank} is back at step {step}, {:.2} s later", after.as_secs_f64()))
    }

    /// A worker has ended well: nobody is killed any more.
    pub(super) fn finished(&mut self) {
        self.is_over = true;
    }

    /// The rank whose process is to be killed now, if one is.
    pub(super) fn victim(&mut self, now: Instant) -> Option<usize> {
        let is_due = self.due.is_some_and(|due| now >= due);
        let victim = self.next;
        if !is_due || self.processes[victim] != Process::Working || self.is_ending(now) {
            return None;
        }
        self.processes[victim] = Process::Killed(now);
        self.due = Some(now + self.interval);
        self.next = self.random.below(self.processes.len() as u64) as usize;
        Some(victim)
    }

    /// The worker has been killed. Returns what to tell.
    pub(super) fn killed(&mut self, rank: usize) -> String {
        self.kills += 1;
        let step = self.steps.as_ref().map_or(0, |steps| steps.newest.0);
        format!("rank {rank} killed after step {step}")
    }

    /// Whether the rank's process was killed and the one in its place has not joined.
    pub(super) fn is_away(&self, rank: usize) -> bool {
        matches!(self.processes[rank], Process::Killed(_))
    }

    fn is_ending(&self, now: Instant) -> bool {
        let Some(Steps { first, newest, of, .. }) = &self.steps else { return true };
        let made = newest.0 - first.0;
        if self.is_over || made == 0 {
            return true;
        }
        let left = now.saturating_duration_since(first.1).mul_f64((of - newest.0) as f64 / made as f64);
        left < LEFT_MIN.max(LEFT_RETURNS * self.slowest_return)
    }

    /// What the kills did to a training that has ended well. `status` is that of its job.
    pub(super) fn summary(&self, status: Option<&JobStatus>) -> ChaosSummary {
        let span = |steps: &Steps| steps.newest.1.saturating_duration_since(steps.first.1).as_secs_f64();
        let contributions = |status: &JobStatus| status.counters.updates * u64::from(status.workers);
        let missing = |status: &JobStatus| {
            let missing: u64 = status.left_out.iter().sum();
            missing as f64 / contributions(status).max(1) as f64
        };
        ChaosSummary {
            seed: self.seed,
            kills: self.kills,
            returns: self.returns,
            slowest_return_s: self.slowest_return.as_secs_f64(),
            longest_gap_s: self.steps.as_ref().map_or(0.0, |steps| steps.longest_gap.as_secs_f64()),
            steps: self.steps.as_ref().map_or(0, |steps| steps.newest.0),
            seconds: self.steps.as_ref().map_or(0.0, span),
            missing_contributions: status.map(missing),
            losses: status.and_then(|status| status.losses),
        }
    }
}

impl ChaosSummary {
    /// Rows for a table.
    pub(super) fn rows(&self) -> Vec<(&'static str, String)> {
        let killed = match (self.kills, self.returns) {
            (0, _) => "none: the training was too short, give more --epochs or a shorter --chaos".to_owned(),
            (kills, returns) => {
                format!("{kills}; {returns} came back, the slowest after {:.2} s", self.slowest_return_s)
            }
        };
        let mut rows = vec![
            ("workers killed", killed),
            ("longest gap between two steps", format!("{:.3} s", self.longest_gap_s)),
        ];
        if let Some(share) = self.missing_contributions {
            rows.push(("contributions missing", format!("{:.2} %", 100.0 * share)));
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chaos(workers: u32, seed: u64) -> Chaos {
        let section = TrainSection {
            workers: Some(workers),
            chaos_s: Some(1.0),
            chaos_seed: Some(seed),
            ..TrainSection::default()
        };
        Chaos::new(&section).unwrap().unwrap()
    }

    fn step(step: usize) -> StepsDone {
        StepsDone { step, of: 1000, epoch: 1, loss: 1.0, examples_per_second: 1.0, accuracy: None }
    }

    /// A training of three workers whose first step was made now.
    fn begun(seed: u64) -> (Chaos, Instant) {
        let (mut chaos, now) = (chaos(3, seed), Instant::now());
        for rank in 0..3 {
            assert_eq!(chaos.joined(rank, 1, now), None, "nobody was killed");
        }
        assert!(chaos.stepped(&step(1), now));
        (chaos, now)
    }

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn the_seed_alone_decides_who_is_killed_after_whom() {
        let victims = |seed, pause: f64| {
            let (mut chaos, began) = begun(seed);
            let victims = (1..=20).map(|kill| {
                let now = began + seconds(f64::from(kill) * pause);
                chaos.stepped(&step(1 + kill as usize), now);
                let victim = chaos.victim(now).unwrap();
                assert_eq!(chaos.victim(now + seconds(60.0)).filter(|&next| next == victim), None);
                for rank in 0..3 {
                    chaos.joined(rank, 2, now);
                }
                chaos.due = Some(now);
                victim
            });
            victims.collect::<Vec<_>>()
        };
        assert_eq!(victims(7, 1.0), victims(7, 3.0));
        assert_ne!(victims(7, 1.0), victims(8, 1.0));
    }

    #[test]
    fn nobody_is_killed_before_the_first_step_or_shortly_before_the_end() {
        let mut early = chaos(3, 1);
        let now = Instant::now();
        (0..3).for_each(|rank| drop(early.joined(rank, 1, now)));
        assert_eq!(early.victim(now + seconds(9.0)), None, "rank 0 may not have sent all parameters");
        // 100 steps a second: the end is less than a second away after step 900.
        let (mut chaos, began) = begun(1);
        chaos.stepped(&step(891), began + seconds(8.9));
        assert!(chaos.victim(began + seconds(8.9)).is_some());
        let (mut chaos, began) = begun(1);
        chaos.stepped(&step(911), began + seconds(9.1));
        assert_eq!(chaos.victim(began + seconds(9.1)), None);
        // Successors that take long to join get more.
        let (mut chaos, began) = begun(1);
        chaos.slowest_return = seconds(1.0);
        chaos.stepped(&step(611), began + seconds(6.1));
        assert_eq!(chaos.victim(began + seconds(6.1)), None);
        let (mut chaos, began) = begun(1);
        chaos.stepped(&step(301), began + seconds(3.0));
        chaos.finished();
        assert_eq!(chaos.victim(began + seconds(3.0)), None);
    }

    #[test]
    fn gaps_and_returns_are_measured_and_told() {
        let (mut chaos, began) = begun(1);
        assert!(chaos.stepped(&step(2), began + seconds(0.01)));
        assert!(!chaos.stepped(&step(2), began + seconds(0.02)), "another rank made it before");
        assert_eq!(chaos.victim(began + seconds(0.5)), None, "it is too early");
        let victim = chaos.victim(began + seconds(1.0)).unwrap();
        assert_eq!(chaos.killed(victim), format!("rank {victim} killed after step 2"));
        assert!(chaos.is_away(victim));
        assert!(chaos.stepped(&step(3), began + seconds(1.05)));
        let back = chaos.joined(victim, 9, began + seconds(1.25));
        assert_eq!(back, Some(format!("rank {victim} is back at step 9, 0.25 s later")));
        assert!(!chaos.is_away(victim));
        let measured = StepsDone { accuracy: Some(0.9), ..step(4) };
        assert!(
            chaos.stepped(&measured, began + seconds(5.0)) && chaos.stepped(&step(5), began + seconds(9.0))
        );
        let summary = chaos.summary(None);
        assert_eq!((summary.kills, summary.returns, summary.steps), (1, 1, 5));
        assert!((summary.longest_gap_s - 1.04).abs() < 1e-6, "{}", summary.longest_gap_s);
        assert_eq!(summary.rows()[0].1, "1; 1 came back, the slowest after 0.25 s");
    }
}
