//! Streams that are cut at any point and resumed: what the hub ends up with, against a run without cuts.

use std::collections::VecDeque;

use proptest::prelude::*;
use proptest::test_runner::TestRng;

use super::*;
use crate::consistency::Consistency;
use crate::stragglers::Quorum;

const SLOTS: u32 = 3;
const STEPS: u32 = 4;
/// The version of the initial parameters.
const START: u32 = 5;

/// A worker's request for a slot.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ask {
    Initialise,
    Pull,
    PullState,
    Push(u32, Answer),
}

/// One worker with its stream. Each frame may be in flight for a random time.
struct Worker {
    to_hub: VecDeque<(u32, Ask)>,
    to_worker: VecDeque<(u32, Answer, u32)>,
    /// For each slot: the request that was not answered whole.
    waits: Vec<Option<Ask>>,
    next_step: Vec<u32>,
    has_begun: Vec<bool>,
}

/// What becomes of the job when a worker is lost, which none is here.
#[derive(Clone, Copy, Debug, PartialEq)]
enum OnLoss {
    Fail,
    Continue,
    Rewind,
}

struct TestJob {
    exchange: Exchange,
    rules: Rules,
    workers: Vec<Worker>,
    /// For each slot: the ranks in the sum, those parked, and those of each update so far.
    sums: Vec<Vec<u32>>,
    parked: Vec<Vec<bool>>,
    model: Vec<Vec<Vec<u32>>>,
    repeats: u32,
}

impl TestJob {
    fn new(workers: u32, reproducible: bool, has_parameters: bool, loss: OnLoss) -> TestJob {
        let rules = Rules {
            workers,
            members: workers,
            first_members: workers,
            first_site: workers,
            rank_0: Some(0),
            consistency: Consistency::Synchronous,
            reproducible,
            has_parameters,
            two_phase: false,
            quorum: (loss == OnLoss::Continue).then_some(Quorum::NotLost { least: 1 }),
            rewind_every: (loss == OnLoss::Rewind).then_some(1),
        };
        let first = if has_parameters { START } else { 0 };
        let worker = || Worker {
            to_hub: VecDeque::new(),
            to_worker: VecDeque::new(),
            waits: vec![None; SLOTS as usize],
            next_step: vec![first; SLOTS as usize],
            has_begun: vec![!has_parameters; SLOTS as usize],
        };
        TestJob {
            exchange: Exchange::new(rules, SLOTS),
            rules,
            workers: (0..workers).map(|_| worker()).collect(),
            sums: vec![vec![]; SLOTS as usize],
            parked: vec![vec![false; workers as usize]; SLOTS as usize],
            model: vec![vec![]; SLOTS as usize],
            repeats: 0,
        }
    }

    fn first_step(&self) -> u32 {
        if self.rules.has_parameters { START } else { 0 }
    }

    /// A worker makes a request for a slot at which it waits for nothing.
    fn ask(&mut self, rank: u32, slot: u32, rng: &mut TestRng) {
        let worker = &mut self.workers[rank as usize];
        let at = slot as usize;
        let ask = match (worker.has_begun[at], rng.random_range(0..6u32)) {
            (false, _) if rank == 0 => Ask::Initialise,
            (false, _) | (true, 0) => Ask::Pull,
            (true, 1) => Ask::PullState,
            (true, 2) => Ask::Push(worker.next_step[at], Answer::Applied),
            (true, _) => Ask::Push(worker.next_step[at], Answer::Parameters),
        };
        worker.waits[at] = Some(ask);
        worker.to_hub.push_back((slot, ask));
    }

    /// The hub takes the next frame of a worker's stream.
    fn take(&mut self, rank: u32) {
        let Some((slot, ask)) = self.workers[rank as usize].to_hub.pop_front() else { return };
        let at = slot as usize;
        match ask {
            Ask::Initialise => {
                self.repeats += u32::from(!self.exchange.initialise(slot, Some(rank), START).unwrap());
            }
            Ask::Pull => self.exchange.pull(slot, rank, self.workers[rank as usize].next_step[at]).unwrap(),
            Ask::PullState => self.exchange.pull_state(slot, rank, 0).unwrap(),
            Ask::Push(step, answer) => {
                let is_repeat = self.exchange.is_repeat(slot, rank, step);
                let arrival = self.exchange.push(slot, rank, step, answer).unwrap();
                assert_eq!(is_repeat, arrival.then == SumAction::Repeated);
                self.repeats += u32::from(is_repeat);
                match arrival.fold {
                    Fold::Drop => assert!(is_repeat),
                    Fold::Apart => unreachable!("all ranks step together"),
                    Fold::Park => assert!(!std::mem::replace(&mut self.parked[at][rank as usize], true)),
                    Fold::Sum { starts_sum, parked } => {
                        assert_eq!(starts_sum, self.sums[at].is_empty());
                        self.sums[at].push(rank);
                        for rank in parked {
                            assert!(std::mem::take(&mut self.parked[at][rank as usize]), "it was parked");
                            self.sums[at].push(rank);
                        }
                    }
                }
                if let SumAction::Update(update) = arrival.then {
                    assert_eq!(update.step, self.first_step() + self.model[at].len() as u32);
                    self.model[at].push(std::mem::take(&mut self.sums[at]));
                }
            }
        }
        self.exchange.mark_due_answers(slot, |_, _| {});
    }

    /// The hub lets an answer that it owes begin to leave.
    fn answer(&mut self, rank: u32, slot: u32) {
        if let Some(answer) = self.exchange.owed(slot, rank) {
            let version = self.exchange.answer_version(slot, rank);
            self.exchange.answer_begun(slot, rank);
            self.workers[rank as usize].to_worker.push_back((slot, answer, version));
        }
    }

    /// A worker takes the next answer whole.
    fn receive_answer(&mut self, rank: u32) {
        let first_step = self.first_step();
        let worker = &mut self.workers[rank as usize];
        let Some((slot, answer, version)) = worker.to_worker.pop_front() else { return };
        let at = slot as usize;
        let ask = worker.waits[at].take().expect("an answer answers what was asked, once");
        match ask {
            Ask::Push(step, wanted) => {
                assert_eq!((answer, version), (wanted, step + 1));
                worker.next_step[at] = step + 1;
            }
            Ask::Initialise => assert_eq!((answer, version), (Answer::Applied, START)),
            Ask::Pull => assert_eq!((answer, version), (Answer::Parameters, worker.next_step[at])),
            Ask::PullState => assert_eq!(answer, Answer::State(0)),
        }
        worker.has_begun[at] = true;
        assert_eq!(
            self.model[at].len() as u32,
            worker.next_step[at] - first_step,
            "the newest, and no newer"
        );
    }

    /// All frames in flight are lost, both ways, and the worker repeats the requests that are not answered,
    /// in any order.
    fn cut(&mut self, rank: u32, rng: &mut TestRng) {
        self.exchange.resume(rank);
        let worker = &mut self.workers[rank as usize];
        worker.to_hub.clear();
        worker.to_worker.clear();
        let turn = rng.random_range(0..SLOTS);
        for slot in (0..SLOTS).map(|slot| (slot + turn) % SLOTS) {
            if let Some(ask) = worker.waits[slot as usize] {
                worker.to_hub.push_back((slot, ask));
            }
        }
    }

    fn is_over(&self) -> bool {
        let last = self.first_step() + STEPS;
        self.workers.iter().all(|worker| worker.next_step.iter().all(|&step| step == last))
    }

    fn run(&mut self, cuts: bool, rng: &mut TestRng) {
        let last = self.first_step() + STEPS;
        for turn in 0.. {
            if self.is_over() {
                return;
            }
            assert!(turn < 200_000, "a worker starved");
            let rank = rng.random_range(0..self.rules.workers);
            let slot = rng.random_range(0..SLOTS);
            match rng.random_range(0..16u32) {
                // Cuts are rare enough that some frames arrive.
                0 if cuts => self.cut(rank, rng),
                0..=4 => self.take(rank),
                5..=8 => self.answer(rank, slot),
                9..=11 => self.receive_answer(rank),
                _ => {
                    let worker = &self.workers[rank as usize];
                    if worker.waits[slot as usize].is_none() && worker.next_step[slot as usize] < last {
                        self.ask(rank, slot, rng);
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn streams_cut_anywhere_change_no_sum(
        workers in 1u32..5,
        reproducible in any::<bool>(),
        has_parameters in any::<bool>(),
        loss in prop::sample::select(vec![OnLoss::Fail, OnLoss::Continue, OnLoss::Rewind]),
        rng in any::<u32>().prop_perturb(|_, rng| rng),
    ) {
        let mut rng = rng;
        // A job that goes on without lost workers is not reproducible, and both kinds have parameters.
        let reproducible = reproducible && loss != OnLoss::Continue;
        let has_parameters = has_parameters || loss != OnLoss::Fail;
        let mut quiet = TestJob::new(workers, reproducible, has_parameters, loss);
        quiet.run(false, &mut rng);
        prop_assert_eq!(quiet.repeats, 0);
        let mut cut = TestJob::new(workers, reproducible, has_parameters, loss);
        cut.run(true, &mut rng);
        if !reproducible {
            for model in [&mut quiet.model, &mut cut.model] {
                model.iter_mut().flatten().for_each(|ranks| ranks.sort_unstable());
            }
        }
        prop_assert_eq!(&cut.model, &quiet.model);
        let all: Vec<u32> = (0..workers).collect();
        prop_assert!(cut.model.iter().all(|slot| slot.len() == STEPS as usize && slot.iter().all(|ranks| *ranks == all)));
    }
}

#[test]
fn a_repeated_contribution_is_dropped_and_a_repeated_request_is_answered_again() {
    let mut job = TestJob::new(2, false, false, OnLoss::Fail);
    let exchange = &mut job.exchange;
    exchange.push(0, 0, 0, Answer::Parameters).unwrap();
    assert_eq!(
        exchange.push(0, 0, 0, Answer::Parameters),
        Err(ProtocolViolation::Unanswered),
        "nothing was cut"
    );
    exchange.resume(0);
    let repeated = Arrival { fold: Fold::Drop, then: SumAction::Repeated };
    assert_eq!(exchange.push(0, 0, 0, Answer::Parameters), Ok(repeated.clone()));
    assert_eq!(
        exchange.push(0, 0, 0, Answer::Parameters),
        Err(ProtocolViolation::Unanswered),
        "repeated once a cut"
    );
    let arrival = exchange.push(0, 1, 0, Answer::Parameters).unwrap();
    assert!(matches!(arrival.then, SumAction::Update(Update { contributions: 2, .. })), "{arrival:?}");
    exchange.mark_due_answers(0, |_, _| {});
    exchange.answer_begun(0, 0);
    exchange.resume(0);
    assert_eq!(exchange.owed(0, 0), None, "whether it had come whole, the worker knows");
    assert_eq!(exchange.push(0, 0, 0, Answer::Parameters), Ok(repeated));
    exchange.mark_due_answers(0, |_, _| {});
    assert_eq!((exchange.owed(0, 0), exchange.answer_version(0, 0)), (Some(Answer::Parameters), 1));
    exchange.answer_begun(0, 0);
    exchange.resume(0);
    let arrival = exchange.push(0, 0, 1, Answer::Parameters).unwrap();
    assert_eq!(arrival.then, SumAction::Wait, "it had: the next step is no repetition");
    exchange.resume(1);
    let ahead = exchange.push(0, 1, 3, Answer::Parameters);
    assert_eq!(ahead, Err(ProtocolViolation::StepAhead { expected: 1, got: 3 }), "the rules are the same");
}
