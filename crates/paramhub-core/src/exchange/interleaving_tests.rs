//! Workers and a hub in one thread, their messages interleaved at random, against a reference that keeps each
//! contribution by name instead of summing it.

use proptest::prelude::*;
use proptest::test_runner::TestRng;

use super::*;
use crate::consistency::Consistency;

const STEPS: u32 = 4;
/// The update count of the state that rank 0 restores; zero if it restores none.
const UPDATES_BEFORE: u64 = 1000;

/// The rank that contributed, and the step.
type Contribution = (u32, u32);

struct Worker {
    next_step: u32,
    waiting: Option<Answer>,
    left: bool,
}

/// A hub that handles names as a core handles bytes.
struct TestJob {
    exchange: Exchange,
    rules: Rules,
    /// The number of ranks that step together, from rank 0 on.
    together: u32,
    workers: Vec<Worker>,
    sum: Vec<Contribution>,
    parked: Vec<Option<Contribution>>,
    apart: Option<Contribution>,
    /// For each update: its contributions, in the order in which they were summed.
    model: Vec<Vec<Contribution>>,
    /// The number of updates that are of all ranks that step together.
    steps: u32,
    owed: Vec<(u32, Answer)>,
}

impl TestJob {
    fn new(rules: Rules, together: u32) -> Self {
        let reach = ChunkReach { members: rules.members, together, has_above: false, site_first: false };
        let worker = || Worker { next_step: 0, waiting: None, left: false };
        TestJob {
            exchange: Exchange::among_sites(rules, [reach]),
            rules,
            together,
            apart: None,
            steps: 0,
            workers: (0..rules.workers).map(|_| worker()).collect(),
            sum: vec![],
            parked: vec![None; rules.workers as usize],
            model: vec![],
            owed: vec![],
        }
    }

    fn settle(&mut self) {
        let owed = &mut self.owed;
        self.exchange.mark_due_answers(0, |rank, answer| owed.push((rank, answer)));
    }

    fn push(&mut self, rank: u32, step: u32, answer: Answer) -> Result<(), ProtocolViolation> {
        let arrival = self.exchange.push(0, rank, step, answer)?;
        match arrival.fold {
            Fold::Drop => unreachable!("no stream is cut here"),
            Fold::Apart => assert!(self.apart.replace((rank, step)).is_none()),
            Fold::Park => {
                assert!(self.parked[rank as usize].replace((rank, step)).is_none(), "a place taken twice")
            }
            Fold::Sum { starts_sum, parked } => {
                assert_eq!(
                    starts_sum,
                    self.sum.is_empty(),
                    "the first contribution, and no other, starts the sum"
                );
                self.sum.push((rank, step));
                for rank in parked {
                    self.sum.push(self.parked[rank as usize].take().expect("a contribution was parked"));
                }
            }
        }
        assert_eq!(
            arrival.then == SumAction::Hold,
            self.exchange.held_step() == Some(step),
            "one chunk is all chunks"
        );
        if let SumAction::Update(update) = arrival.then {
            self.update(Some(update));
        }
        Ok(())
    }

    fn update(&mut self, update: Option<Update>) {
        if let Some(update) = update {
            let sum = match self.apart.take() {
                Some(apart) => vec![apart],
                None => std::mem::take(&mut self.sum),
            };
            self.steps += u32::from(!update.is_apart);
            assert_eq!(update.contributions as usize, sum.len());
            let before = if self.rules.has_parameters { UPDATES_BEFORE } else { 0 };
            assert_eq!(update.number, before + self.model.len() as u64 + 1);
            assert!(sum.iter().all(|&(_, step)| step == update.step));
            self.model.push(sum);
            self.settle();
        }
    }

    /// Rank 0 releases a held step.
    fn release(&mut self) {
        let step = self.model.len() as u32;
        assert_eq!(self.exchange.release(Some(0), step + 1), Err(ProtocolViolation::Released(step + 1)));
        self.exchange.release(Some(0), step).unwrap();
        assert_eq!(self.exchange.release(Some(0), step), Err(ProtocolViolation::Released(step)), "once");
        let (slot, update) = self.exchange.release_next().unwrap();
        assert_eq!((slot, self.exchange.release_next()), (0, None));
        self.update(Some(update));
    }

    /// Delivers one owed answer and checks what the worker may conclude from it.
    fn deliver(&mut self, index: usize) {
        let (rank, answer) = self.owed.swap_remove(index);
        let version = self.exchange.answer_version(0, rank);
        self.exchange.answer_begun(0, rank);
        let worker = &mut self.workers[rank as usize];
        if worker.left {
            return;
        }
        assert_eq!(worker.waiting.take(), Some(answer), "an answer answers a request, once");
        assert_eq!(version, worker.next_step);
        let (step, clock) = (version, worker.next_step);
        if rank < self.together {
            assert_eq!(self.steps, step, "no rank sees a step before all contributed, nor two at once");
        }
        if let Consistency::BoundedStaleness(bound) = self.rules.consistency {
            let slowest = self.workers.iter().filter(|w| !w.left).map(|w| w.next_step).min().unwrap();
            assert!(clock - slowest <= bound, "rank {rank} is {} steps ahead", clock - slowest);
        }
        if step > 0 {
            let own = self.model.iter().flatten().filter(|&&(r, s)| r == rank && s + 1 == step).count();
            assert_eq!(own, 1, "a worker sees its own contribution, once");
        }
    }

    /// Makes requests that the rules must refuse, and that must change nothing.
    fn offend(&mut self, rank: u32, rng: &mut TestRng) {
        let (next, waiting) = {
            let worker = &self.workers[rank as usize];
            (worker.next_step, worker.waiting.is_some())
        };
        let before = format!("{:?}", self.exchange);
        let violation = match rng.random_range(0..7u32) {
            0 if next > 0 => self.push(rank, next - 1, Answer::Applied).unwrap_err(),
            1 => self.push(rank, next + 1, Answer::Parameters).unwrap_err(),
            2 => self.exchange.pull(0, rank, next + 1 + u32::from(waiting)).unwrap_err(),
            3 => self.exchange.initialise_state(0, Some(rank), 3).unwrap_err(),
            4 if rank > 0 || self.exchange.held_step().is_none() => {
                self.exchange.release(Some(rank), self.model.len() as u32).unwrap_err()
            }
            5 if waiting => self.exchange.pull_state(0, rank, 0).unwrap_err(),
            _ => self.exchange.initialise(0, Some(rank), 0).unwrap_err(),
        };
        let of_request = !matches!(
            violation,
            ProtocolViolation::Initialised
                | ProtocolViolation::StateInitialised
                | ProtocolViolation::Released(_)
        );
        if waiting && of_request {
            assert_eq!(violation, ProtocolViolation::Unanswered);
        }
        assert_eq!(before, format!("{:?}", self.exchange), "{violation:?} left a trace");
    }
}

fn run(rules: Rules, together: u32, losses: bool, mut rng: TestRng) {
    let mut job = TestJob::new(rules, together);
    if rules.has_parameters {
        for rank in 1..rules.workers {
            assert_eq!(job.push(rank, 0, Answer::Applied), Err(ProtocolViolation::NotInitialised));
            job.exchange.pull(0, rank, 0).unwrap();
            job.settle();
            job.workers[rank as usize].waiting = Some(Answer::Parameters);
        }
        assert!(job.owed.is_empty(), "there is nothing to answer with yet");
        job.exchange.initialise_state(0, Some(0), 7).unwrap();
        assert_eq!(job.exchange.initialise_state(0, Some(0), 8), Err(ProtocolViolation::Unanswered));
        assert_eq!(job.exchange.owed(0, 0), Some(Answer::Applied), "state waits for no parameters");
        job.exchange.answer_begun(0, 0);
        job.exchange.initialise_state(0, Some(0), UPDATES_BEFORE).unwrap();
        job.exchange.answer_begun(0, 0);
        job.settle();
        assert!(job.owed.is_empty(), "state alone answers no request");
        job.exchange.initialise(0, Some(0), 0).unwrap();
        job.workers[0].waiting = Some(Answer::Applied);
        job.settle();
    }
    loop {
        let able: Vec<u32> = (0..rules.workers)
            .filter(|&rank| {
                let worker = &job.workers[rank as usize];
                worker.waiting.is_none() && !worker.left && worker.next_step < STEPS
            })
            .collect();
        let is_held = job.exchange.held_step().is_some();
        if able.is_empty() && job.owed.is_empty() && !is_held {
            break;
        }
        if is_held && rng.random_range(0..3) == 0 {
            job.release();
            continue;
        }
        if rng.random_range(0..5) == 0 {
            let rank = rng.random_range(0..rules.workers);
            if !job.workers[rank as usize].left && job.owed.iter().all(|&(owed, _)| owed != rank) {
                job.offend(rank, &mut rng);
            }
        }
        if losses && rng.random_range(0..20) == 0 {
            if leave(&mut job, &mut rng) {
                return;
            }
            continue;
        }
        if !job.owed.is_empty() && (able.is_empty() || rng.random_range(0..2) == 0) {
            let index = rng.random_range(0..job.owed.len());
            job.deliver(index);
        } else if !able.is_empty() {
            act(&mut job, able[rng.random_range(0..able.len())], &mut rng);
            if stranded(&job) {
                assert!(job.exchange.check_waits(0).is_err(), "a job that cannot go on must get an error");
                return;
            }
            assert_eq!(job.exchange.check_waits(0), Ok(()));
        }
    }
    for (rank, worker) in job.workers.iter().enumerate() {
        assert!(worker.left || worker.next_step == STEPS, "rank {rank} starved at step {}", worker.next_step);
    }
    check_model(&job);
}

/// Makes one request of a worker that waits for nothing.
fn act(job: &mut TestJob, rank: u32, rng: &mut TestRng) {
    let step = job.workers[rank as usize].next_step;
    let answer = match rng.random_range(0..5) {
        0 => {
            job.exchange.pull(0, rank, step).unwrap();
            job.workers[rank as usize].waiting = Some(Answer::Parameters);
            job.settle();
            return;
        }
        4 => {
            let answer = Answer::State(1);
            job.exchange.pull_state(0, rank, 1).unwrap();
            job.workers[rank as usize].waiting = Some(answer);
            job.settle();
            assert!(job.owed.contains(&(rank, answer)), "state is there at any time");
            return;
        }
        1 => Answer::Applied,
        _ => Answer::Parameters,
    };
    job.workers[rank as usize].waiting = Some(answer);
    job.workers[rank as usize].next_step += 1;
    job.push(rank, step, answer).unwrap();
}

/// Makes a random rank leave, and returns whether that ends the job.
fn leave(job: &mut TestJob, rng: &mut TestRng) -> bool {
    let rank = rng.random_range(0..job.rules.workers);
    if job.workers[rank as usize].left {
        return false;
    }
    job.workers[rank as usize].left = true;
    job.workers[rank as usize].waiting = None;
    job.owed.retain(|&(owed, _)| owed != rank);
    let owed = &mut job.owed;
    let outcome = job.exchange.leave(rank, |_, rank, answer| owed.push((rank, answer)));
    assert_eq!(outcome.is_err(), stranded(job), "{outcome:?}");
    outcome.is_err()
}

/// Returns whether a present rank waits for a step to which a rank that left has not contributed.
fn stranded(job: &TestJob) -> bool {
    let mut together = job.workers[..job.together as usize].iter();
    let incomplete = together.any(|worker| worker.left && worker.next_step <= job.steps);
    let waits = |rank: usize| {
        let worker = &job.workers[rank];
        !worker.left && worker.waiting.is_some() && job.owed.iter().all(|&(owed, _)| owed as usize != rank)
    };
    let unreleased = job.workers[0].left && job.exchange.held_step().is_some();
    (incomplete || unreleased) && (0..job.together as usize).any(waits)
}

fn check_model(job: &TestJob) {
    let is_apart = |&(rank, _): &Contribution| rank >= job.together;
    let (apart, together): (Vec<_>, Vec<_>) = job.model.iter().partition(|update| is_apart(&update[0]));
    for (step, update) in together.into_iter().enumerate() {
        let mut ranks: Vec<u32> = update.iter().map(|&(rank, _)| rank).collect();
        if !job.rules.reproducible {
            ranks.sort_unstable();
        }
        assert_eq!(ranks, (0..job.together).collect::<Vec<_>>(), "step {step}");
    }
    let present = job.workers[job.together as usize..].iter().filter(|worker| !worker.left).count();
    assert!(apart.iter().all(|update| update.len() == 1));
    assert!(apart.len() >= present * STEPS as usize);
}

/// The rules of a job, and how many ranks step together.
fn rules() -> impl Strategy<Value = (Rules, u32)> {
    let consistency = prop_oneof![
        3 => Just((Consistency::Synchronous, false)),
        3 => Just((Consistency::Synchronous, true)),
        1 => Just((Consistency::Asynchronous, false)),
        2 => (0u32..3).prop_map(|bound| (Consistency::BoundedStaleness(bound), false)),
    ];
    (1u32..6, 0u32..6, consistency, any::<bool>(), any::<bool>()).prop_map(
        |(workers, together, (consistency, reproducible), has_parameters, two_phase)| {
            let is_synchronous = consistency == Consistency::Synchronous;
            let rules = Rules {
                members: workers,
                first_members: workers,
                first_site: workers,
                rank_0: Some(0),
                workers,
                consistency,
                reproducible,
                has_parameters,
                two_phase: two_phase && has_parameters && is_synchronous,
                quorum: None,
                rewind_every: None,
            };
            (rules, if is_synchronous { workers } else { together.min(workers) })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    #[test]
    fn any_interleaving_serves_every_worker_right((rules, together) in rules(), losses in prop::bool::weighted(0.4), rng in any_rng()) {
        run(rules, together, losses, rng);
    }
}

fn any_rng() -> impl Strategy<Value = TestRng> {
    any::<u32>().prop_perturb(|_, rng| rng)
}
