//! Jobs that leave out late workers: whole programs against several chunks, in any order of arrival.

use proptest::prelude::*;

use super::*;
use crate::consistency::Consistency;
use crate::stragglers::Quorum;

const PROGRAM_STEPS: u32 = 6;

fn rules(workers: u32, quorum: Quorum) -> Rules {
    Rules {
        workers,
        members: workers,
        first_members: workers,
        first_site: workers,
        rank_0: Some(0),
        consistency: Consistency::Synchronous,
        reproducible: false,
        has_parameters: true,
        two_phase: false,
        quorum: Some(quorum),
        rewind_every: None,
    }
}

/// An exchange whose rank 0 has sent the parameters and has been answered.
fn begun(workers: u32, quorum: Quorum, chunks: u32) -> Exchange {
    let mut exchange = Exchange::new(rules(workers, quorum), chunks);
    for slot in 0..chunks {
        exchange.initialise(slot, Some(0), 0).unwrap();
        exchange.mark_due_answers(slot, |member, answer| assert_eq!((member, answer), (0, Answer::Applied)));
        exchange.answer_begun(slot, 0);
    }
    exchange
}

/// The members that a slot owes an answer.
fn owed(exchange: &mut Exchange, slot: u32) -> Vec<u32> {
    let mut owed = Vec::new();
    exchange.mark_due_answers(slot, |member, _| owed.push(member));
    owed
}

fn push(exchange: &mut Exchange, member: u32, step: u32) -> SumAction {
    exchange.push(0, member, step, Answer::Parameters).unwrap().then
}

/// Sends the answer to `member`, and returns the version that the member then has.
fn answer(exchange: &mut Exchange, member: u32) -> u32 {
    let version = exchange.answer_version(0, member);
    exchange.answer_begun(0, member);
    version
}

fn all_answered(exchange: &mut Exchange, members: &[u32]) {
    for &member in members {
        answer(exchange, member);
    }
}

#[test]
fn all_but_one_end_a_step_and_the_last_gets_what_they_made() {
    let mut exchange = begun(4, Quorum::Count(3), 1);
    assert_eq!(push(&mut exchange, 2, 0), SumAction::Wait);
    assert_eq!(push(&mut exchange, 0, 0), SumAction::Wait);
    assert_eq!(
        push(&mut exchange, 3, 0),
        SumAction::Update(Update { step: 0, number: 1, contributions: 3, is_apart: false })
    );
    assert_eq!(owed(&mut exchange, 0), [0, 2, 3]);
    for member in [0, 2, 3] {
        assert_eq!(answer(&mut exchange, member), 1);
    }
    assert_eq!(exchange.left_out(), [0, 1, 0, 0]);
    // Two more steps end before it arrives.
    for step in 1..3 {
        for member in [0, 2, 3] {
            push(&mut exchange, member, step);
        }
        owed(&mut exchange, 0);
        all_answered(&mut exchange, &[0, 2, 3]);
    }
    assert_eq!(push(&mut exchange, 0, 3), SumAction::Wait);
    assert_eq!(push(&mut exchange, 1, 0), SumAction::Late);
    assert_eq!(owed(&mut exchange, 0), [1], "no rank waits because it was late");
    assert_eq!(answer(&mut exchange, 1), 3);
    let again = exchange.push(0, 1, 0, Answer::Parameters);
    assert_eq!(
        again,
        Err(ProtocolViolation::StepBehind { expected: 3, got: 0 }),
        "it goes on from where it is"
    );
    assert_eq!(push(&mut exchange, 1, 3), SumAction::Wait);
    assert!(matches!(push(&mut exchange, 2, 3), SumAction::Update(Update { step: 3, contributions: 3, .. })));
    assert_eq!(exchange.left_out(), [0, 3, 0, 1]);
}

#[test]
fn a_rank_that_is_behind_is_not_waited_for() {
    let mut exchange = begun(3, Quorum::Clock, 1);
    push(&mut exchange, 0, 0);
    assert!(!exchange.has_median(0));
    push(&mut exchange, 1, 0);
    assert!(exchange.has_median(0));
    assert_eq!(exchange.end_step(0).unwrap().contributions, 2);
    assert_eq!(owed(&mut exchange, 0), [0, 1]);
    all_answered(&mut exchange, &[0, 1]);
    push(&mut exchange, 1, 1);
    assert!(exchange.has_median(0), "one of two");
    assert!(matches!(push(&mut exchange, 0, 1), SumAction::Update(Update { contributions: 2, .. })));
    assert_eq!(exchange.end_step(0), None, "a step needs a contribution");
    owed(&mut exchange, 0);
    all_answered(&mut exchange, &[0, 1]);
    assert_eq!(push(&mut exchange, 2, 0), SumAction::Late);
    push(&mut exchange, 0, 2);
    assert_eq!(
        push(&mut exchange, 1, 2),
        SumAction::Wait,
        "its answer is on its way: it is waited for again"
    );
    owed(&mut exchange, 0);
    assert_eq!(answer(&mut exchange, 2), 2);
    assert!(matches!(push(&mut exchange, 2, 2), SumAction::Update(Update { contributions: 3, .. })));
}

#[test]
fn an_answer_that_has_not_begun_leaves_with_the_newest() {
    let mut exchange = begun(3, Quorum::Count(2), 1);
    push(&mut exchange, 0, 0);
    push(&mut exchange, 1, 0);
    owed(&mut exchange, 0);
    answer(&mut exchange, 0);
    assert_eq!(exchange.owed(0, 1), Some(Answer::Parameters));
    assert_eq!(push(&mut exchange, 2, 0), SumAction::Late);
    owed(&mut exchange, 0);
    answer(&mut exchange, 2);
    push(&mut exchange, 0, 1);
    assert!(matches!(push(&mut exchange, 2, 1), SumAction::Update(_)), "it goes on without rank 1");
    assert_eq!(owed(&mut exchange, 0), [0, 1, 2], "rank 1 is owed newer ones now");
    assert_eq!(answer(&mut exchange, 1), 2);
    assert_eq!(push(&mut exchange, 1, 2), SumAction::Wait, "and is not late with them");
}

#[test]
fn a_rank_that_leaves_is_not_waited_for_and_strands_no_other() {
    let mut exchange = begun(3, Quorum::Count(3), 1);
    push(&mut exchange, 1, 0);
    for member in [0, 2] {
        exchange.leave(member, |_, _, _| unreachable!("nothing is due before the update")).unwrap();
    }
    let update = exchange.end_if_complete(0).expect("all that are left have contributed");
    assert_eq!(update.contributions, 1);
    assert_eq!(owed(&mut exchange, 0), [1]);
    answer(&mut exchange, 1);
    assert_eq!(
        push(&mut exchange, 1, 1),
        SumAction::Update(Update { step: 1, number: 2, contributions: 1, is_apart: false })
    );
    assert_eq!(exchange.left_out(), [0; 3], "a rank that has left is not left out");
}

#[test]
fn pulled_parameters_may_be_contributed_to() {
    let mut exchange = begun(3, Quorum::Count(2), 1);
    push(&mut exchange, 0, 0);
    push(&mut exchange, 1, 0);
    exchange.pull(0, 2, 0).unwrap();
    assert_eq!(owed(&mut exchange, 0), [0, 1, 2]);
    assert_eq!(answer(&mut exchange, 2), 1);
    assert_eq!(push(&mut exchange, 2, 1), SumAction::Wait);
    let ahead = exchange.pull(0, 1, 9);
    assert_eq!(ahead, Err(ProtocolViolation::Unanswered));
    answer(&mut exchange, 1);
    assert_eq!(exchange.pull(0, 1, 9), Err(ProtocolViolation::StepAhead { expected: 1, got: 9 }));
}

/// A worker whose program pushes every chunk, waits for all answers, and does so again.
#[derive(Clone)]
struct Program {
    done: u32,
    /// The version that it has of each chunk.
    has: Vec<u32>,
    /// Pushes that have not arrived.
    in_flight: Vec<u32>,
    /// Answers that have not come, including those to pushes in flight.
    unanswered: u32,
    gone: bool,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Arrives(u32, u32),
    Answered(u32, u32),
    Deadline(u32),
    Leaves(u32),
}

struct TestJob {
    exchange: Exchange,
    programs: Vec<Program>,
    /// For each chunk: its version, and the members whose contributions are in the sum.
    chunks: Vec<(u32, Vec<u32>)>,
    owed: Vec<(u32, u32)>,
    left_out: Vec<u64>,
}

impl TestJob {
    fn new(workers: u32, quorum: Quorum, chunks: u32) -> Self {
        let program = Program {
            done: 0,
            has: vec![0; chunks as usize],
            in_flight: (0..chunks).collect(),
            unanswered: chunks,
            gone: false,
        };
        TestJob {
            exchange: begun(workers, quorum, chunks),
            programs: vec![program; workers as usize],
            chunks: vec![(0, Vec::new()); chunks as usize],
            owed: Vec::new(),
            left_out: vec![0; workers as usize],
        }
    }

    /// The events that may happen next; `clocks` if steps end by time, too.
    fn events(&self, clocks: bool) -> Vec<Event> {
        let mut events: Vec<Event> = Vec::new();
        for (member, program) in (0..).zip(&self.programs) {
            events.extend(program.in_flight.iter().map(|&slot| Event::Arrives(member, slot)));
            if program.done == PROGRAM_STEPS && !program.gone {
                events.push(Event::Leaves(member));
            }
        }
        events.extend(self.owed.iter().map(|&(member, slot)| Event::Answered(member, slot)));
        let slots = 0..self.chunks.len() as u32;
        events.extend(slots.filter(|&slot| clocks && self.exchange.has_median(slot)).map(Event::Deadline));
        events
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Arrives(member, slot) => {
                let program = &mut self.programs[member as usize];
                program.in_flight.retain(|&other| other != slot);
                let has = program.has[slot as usize];
                let (version, sum) = &mut self.chunks[slot as usize];
                let is_late = has < *version;
                let arrival = self.exchange.push(slot, member, has, Answer::Parameters).unwrap();
                match is_late {
                    true => assert_eq!(arrival, Arrival { fold: Fold::Drop, then: SumAction::Late }),
                    false => {
                        assert_eq!(arrival.fold, Fold::Sum { starts_sum: sum.is_empty(), parked: 0..0 });
                        sum.push(member);
                        if let SumAction::Update(update) = arrival.then {
                            self.update(slot, update);
                        }
                    }
                }
                self.settle(slot);
            }
            Event::Answered(member, slot) => {
                self.owed.retain(|&other| other != (member, slot));
                let version = self.exchange.answer_version(slot, member);
                self.exchange.answer_begun(slot, member);
                assert_eq!(version, self.chunks[slot as usize].0, "what is sent is the newest");
                let program = &mut self.programs[member as usize];
                assert!(version > program.has[slot as usize], "every answer brings something new");
                program.has[slot as usize] = version;
                program.unanswered -= 1;
                if program.unanswered == 0 {
                    program.done += 1;
                    if program.done < PROGRAM_STEPS {
                        program.unanswered = self.chunks.len() as u32;
                        program.in_flight = (0..program.unanswered).collect();
                    }
                }
            }
            Event::Deadline(slot) => {
                let update = self.exchange.end_step(slot).expect("a rank has contributed");
                self.update(slot, update);
                self.settle(slot);
            }
            Event::Leaves(member) => {
                self.programs[member as usize].gone = true;
                let owed = &mut self.owed;
                self.exchange.leave(member, |slot, member, _| owed.push((member, slot))).unwrap();
                for slot in 0..self.chunks.len() as u32 {
                    if let Some(update) = self.exchange.end_if_complete(slot) {
                        self.update(slot, update);
                        self.settle(slot);
                    }
                }
            }
        }
    }

    fn update(&mut self, slot: u32, update: Update) {
        let (version, sum) = &mut self.chunks[slot as usize];
        assert_eq!((update.step, update.number), (*version, u64::from(*version) + 1));
        assert_eq!(update.contributions as usize, sum.len(), "the mean is over those in the sum");
        for (member, program) in (0..).zip(&self.programs) {
            self.left_out[member as usize] += u64::from(!program.gone && !sum.contains(&member));
        }
        *version += 1;
        sum.clear();
    }

    fn settle(&mut self, slot: u32) {
        let owed = &mut self.owed;
        self.exchange.mark_due_answers(slot, |member, _| {
            if !owed.contains(&(member, slot)) {
                owed.push((member, slot));
            }
        });
    }
}

proptest! {
    #[test]
    fn programs_end_whatever_comes_first(
        (workers, quorum) in (1_u32..6).prop_flat_map(|workers| {
            let quorum = prop_oneof![Just(Quorum::Clock), (1..=workers).prop_map(Quorum::Count)];
            (Just(workers), quorum)
        }),
        chunks in 1_u32..4,
        choices in prop::collection::vec(any::<u16>(), 0..400),
    ) {
        let mut job = TestJob::new(workers, quorum, chunks);
        let mut choices = choices.into_iter();
        for _ in 0..10_000 {
            let events = job.events(quorum == Quorum::Clock);
            if events.is_empty() {
                break;
            }
            let choice = usize::from(choices.next().unwrap_or(0)) % events.len();
            job.happen(events[choice]);
        }
        prop_assert!(job.programs.iter().all(|program| program.gone), "a rank waits for ever");
        prop_assert_eq!(job.exchange.left_out(), &job.left_out[..]);
    }
}
