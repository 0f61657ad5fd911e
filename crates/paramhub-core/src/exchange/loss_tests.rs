//! Jobs that go on when members are lost: whole programs against the chunks of two routes, in any order of
//! arrival, with members that die at any moment and processes that take their places.

use proptest::prelude::*;

use super::*;
use crate::consistency::Consistency;
use crate::stragglers::Quorum;

const PROGRAM_STEPS: u32 = 8;

fn rules(workers: u32, least: u32) -> Rules {
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
        quorum: Some(Quorum::NotLost { least }),
        rewind_every: None,
    }
}

/// An exchange whose rank 0 has sent the parameters and has been answered.
fn begun(workers: u32, least: u32, chunks: u32) -> Exchange {
    let mut exchange = Exchange::new(rules(workers, least), chunks);
    for slot in 0..chunks {
        exchange.initialise(slot, Some(0), 0).unwrap();
        exchange.mark_due_answers(slot, |member, answer| assert_eq!((member, answer), (0, Answer::Applied)));
        exchange.answer_begun(slot, 0);
    }
    exchange
}

fn push(exchange: &mut Exchange, slot: u32, member: u32, step: u32) -> SumAction {
    exchange.push(slot, member, step, Answer::Parameters).unwrap().then
}

/// Answers every request that may be answered, and returns who was answered.
fn answer_all(exchange: &mut Exchange, slot: u32) -> Vec<u32> {
    let mut owed = Vec::new();
    exchange.mark_due_answers(slot, |member, _| owed.push(member));
    owed.iter().for_each(|&member| exchange.answer_begun(slot, member));
    owed
}

#[test]
fn a_step_ends_with_those_who_remain_and_what_came_whole_counts() {
    let mut exchange = begun(3, 1, 2);
    push(&mut exchange, 0, 1, 0);
    push(&mut exchange, 0, 0, 0);
    push(&mut exchange, 1, 0, 0);
    exchange.lose(1);
    assert_eq!((exchange.end_if_complete(0), exchange.end_if_complete(1)), (None, None));
    let update = |contributions| Update { step: 0, number: 1, contributions, is_apart: false };
    assert_eq!(push(&mut exchange, 0, 2, 0), SumAction::Update(update(3)), "with what the lost member sent");
    assert_eq!(push(&mut exchange, 1, 2, 0), SumAction::Update(update(2)));
    assert_eq!(answer_all(&mut exchange, 0), [0, 2], "a lost member gets no answer");
    assert_eq!(exchange.left_out(), [0, 1, 0]);
    assert!(exchange.has_contributed(0, 1, 0) && !exchange.has_contributed(1, 1, 0));
}

#[test]
fn the_loss_of_the_last_that_was_awaited_ends_the_step() {
    let mut exchange = begun(3, 1, 1);
    push(&mut exchange, 0, 0, 0);
    push(&mut exchange, 0, 2, 0);
    exchange.lose(1);
    assert_eq!(
        exchange.end_if_complete(0),
        Some(Update { step: 0, number: 1, contributions: 2, is_apart: false })
    );
    assert_eq!(answer_all(&mut exchange, 0), [0, 2]);
}

#[test]
fn a_process_that_takes_the_place_contributes_to_the_step_under_way_if_the_former_has_not() {
    let mut exchange = begun(2, 2, 1);
    push(&mut exchange, 0, 0, 0);
    push(&mut exchange, 0, 1, 0);
    answer_all(&mut exchange, 0);
    exchange.lose(1);
    assert_eq!(push(&mut exchange, 0, 0, 1), SumAction::Wait, "the job waits for its second member");
    assert_eq!(exchange.end_if_complete(0), None);
    assert_eq!(exchange.rejoin(1), 1);
    exchange.join_at(1, 1);
    assert_eq!(exchange.end_if_complete(0), None);
    exchange.pull(0, 1, 1).unwrap();
    assert_eq!(answer_all(&mut exchange, 0), [1]);
    let update = Update { step: 1, number: 2, contributions: 2, is_apart: false };
    assert_eq!(push(&mut exchange, 0, 1, 1), SumAction::Update(update), "no step was lost");
}

#[test]
fn a_process_that_takes_the_place_does_not_contribute_where_the_former_has() {
    let mut exchange = begun(2, 2, 2);
    for slot in [0, 1] {
        push(&mut exchange, slot, 0, 0);
    }
    push(&mut exchange, 0, 1, 0);
    answer_all(&mut exchange, 0);
    exchange.lose(1);
    // Chunk 0 is at step 1 and chunk 1 at step 0, without a contribution of member 1.
    push(&mut exchange, 0, 0, 1);
    assert_eq!(exchange.rejoin(1), 1);
    assert!(!exchange.has_contributed(1, 1, 0));
    assert_eq!(
        exchange.end_if_complete(1),
        Some(Update { step: 0, number: 1, contributions: 1, is_apart: false })
    );
    exchange.pull(0, 1, 1).unwrap();
    exchange.pull(1, 1, 1).unwrap();
    assert_eq!((answer_all(&mut exchange, 0), answer_all(&mut exchange, 1)), (vec![1], vec![0, 1]));
    // The former process of the place is lost in the middle of step 1.
    push(&mut exchange, 0, 1, 1);
    exchange.lose(1);
    assert_eq!(exchange.rejoin(1), 2, "a place has one contribution to a step");
}

#[test]
fn steps_before_the_one_at_which_a_process_joins_are_made_without_its_rank() {
    let mut exchange = begun(2, 1, 2);
    push(&mut exchange, 0, 1, 0);
    exchange.lose(1);
    // The former process is in the sum of step 0 at chunk 0, and not at chunk 1.
    assert_eq!(exchange.rejoin(1), 1);
    exchange.join_at(1, 3);
    for (slot, contributions) in [(0, 2), (1, 1)] {
        let update = Update { step: 0, number: 1, contributions, is_apart: false };
        assert_eq!(push(&mut exchange, slot, 0, 0), SumAction::Update(update));
        answer_all(&mut exchange, slot);
        for step in [1, 2] {
            assert!(matches!(push(&mut exchange, slot, 0, step), SumAction::Update(_)));
            answer_all(&mut exchange, slot);
        }
    }
    assert_eq!(exchange.left_out(), [0, 2 + 3], "two steps at chunk 0, three at chunk 1");
}

#[test]
fn a_member_that_joins_later_waits_for_the_parameters_of_its_first_step() {
    let mut exchange = begun(2, 1, 1);
    exchange.lose(1);
    assert_eq!(exchange.rejoin(1), 0);
    exchange.join_at(1, 2);
    exchange.pull(0, 1, 2).unwrap();
    assert!(answer_all(&mut exchange, 0).is_empty());
    for step in [0, 1] {
        assert!(matches!(
            push(&mut exchange, 0, 0, step),
            SumAction::Update(Update { contributions: 1, .. })
        ));
        assert_eq!(answer_all(&mut exchange, 0), if step == 0 { vec![0] } else { vec![0, 1] });
    }
    assert_eq!(push(&mut exchange, 0, 0, 2), SumAction::Wait, "it is there now");
}

#[test]
fn all_begin_at_one_step_if_all_were_lost() {
    let mut exchange = begun(2, 2, 3);
    for member in [0, 1] {
        push(&mut exchange, 0, member, 0);
    }
    push(&mut exchange, 1, 0, 0);
    exchange.lose(0);
    exchange.lose(1);
    // Chunk 0 has had step 0, chunk 1 has half of it, chunk 2 nothing.
    assert!(exchange.begin_steps_again());
    assert_eq!((exchange.rejoin(1), exchange.end_if_complete(1)), (1, None));
    assert!(!exchange.skip_missed_steps(2), "there are too few yet");
    exchange.join_at(1, 1);
    assert!(!exchange.begin_steps_again());
    assert_eq!(exchange.rejoin(0), 1);
    for slot in [1, 2] {
        assert_eq!(exchange.end_if_complete(slot), None);
        assert!(exchange.skip_missed_steps(slot), "half a step does not count");
    }
    for (slot, member) in [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)] {
        exchange.pull(slot, member, 1).unwrap();
        assert_eq!(answer_all(&mut exchange, slot), [member], "slot {slot}");
    }
    assert_eq!((exchange.updates(1), exchange.updates(2)), (0, 0));
}

#[test]
fn all_make_the_step_again_from_which_all_were_lost() {
    let mut exchange = begun(2, 2, 2);
    push(&mut exchange, 0, 0, 0);
    push(&mut exchange, 1, 1, 0);
    for member in [0, 1] {
        exchange.lose(member);
    }
    assert!(exchange.begin_steps_again());
    for member in [0, 1] {
        assert_eq!(exchange.rejoin(member), 0, "although both had contributed to a part");
        exchange.join_at(member, 0);
    }
    for slot in [0, 1] {
        for member in [0, 1] {
            exchange.pull(slot, member, 0).unwrap();
        }
        assert_eq!(answer_all(&mut exchange, slot), [0, 1]);
        assert_eq!(push(&mut exchange, slot, 0, 0), SumAction::Wait);
        let update = Update { step: 0, number: 1, contributions: 2, is_apart: false };
        assert_eq!(push(&mut exchange, slot, 1, 0), SumAction::Update(update));
    }
    assert_eq!(exchange.left_out(), [0, 0]);
}

#[test]
fn a_new_process_of_rank_0_sends_the_parameters_that_are_missing() {
    let mut exchange = Exchange::new(rules(2, 1), 2);
    exchange.initialise_state(0, Some(0), 5).unwrap();
    answer_all(&mut exchange, 0);
    exchange.answer_begun(0, 0);
    exchange.initialise(0, Some(0), 4).unwrap();
    assert_eq!(answer_all(&mut exchange, 0), [0]);
    exchange.pull(1, 1, 0).unwrap();
    exchange.lose(0);
    assert_eq!(exchange.end_if_complete(1), None);
    assert_eq!(exchange.awaits(1), Some(Awaited::Parameters), "the other member waits");
    assert_eq!(exchange.check_waits(1), Ok(()), "not in vain");
    assert!(!exchange.have_all_begun());
    exchange.rejoin(0);
    exchange.join_at_start(0);
    assert_eq!(exchange.initialise_state(0, Some(0), 5), Ok(false), "it stays as it is");
    exchange.answer_begun(0, 0);
    assert_eq!(exchange.updates(0), 5);
    assert_eq!(exchange.initialise(0, Some(0), 3), Err(ProtocolViolation::Initialised), "of another version");
    assert_eq!(exchange.initialise(0, Some(0), 4), Ok(false));
    assert_eq!(answer_all(&mut exchange, 0), [0]);
    assert_eq!(exchange.initialise(1, Some(0), 4), Ok(true));
    assert_eq!(answer_all(&mut exchange, 1), [0, 1]);
    for slot in [0, 1] {
        assert_eq!(push(&mut exchange, slot, 0, 4), SumAction::Wait);
        let then = push(&mut exchange, slot, 1, 4);
        assert!(matches!(then, SumAction::Update(Update { step: 4, contributions: 2, .. })), "{then:?}");
    }
}

#[test]
fn a_member_that_is_lost_before_the_start_is_not_waited_for() {
    let mut exchange = Exchange::new(rules(3, 1), 1);
    exchange.pull(0, 1, 0).unwrap();
    exchange.lose(1);
    exchange.pull(0, 2, 0).unwrap();
    exchange.initialise(0, Some(0), 0).unwrap();
    assert_eq!(answer_all(&mut exchange, 0), [0, 2]);
    assert_eq!(push(&mut exchange, 0, 0, 0), SumAction::Wait);
    let then = push(&mut exchange, 0, 2, 0);
    assert!(matches!(then, SumAction::Update(Update { step: 0, contributions: 2, .. })), "{then:?}");
}

#[test]
fn a_member_may_be_lost_after_it_has_left_at_these_chunks() {
    let mut exchange = begun(2, 2, 1);
    exchange.leave(1, |_, _, _| ()).unwrap();
    exchange.lose(1);
    assert!(exchange.is_lost(1));
    assert_eq!(push(&mut exchange, 0, 0, 0), SumAction::Wait, "another process takes its place");
    assert_eq!(exchange.rejoin(1), 0);
    exchange.join_at(1, 0);
    exchange.pull(0, 1, 0).unwrap();
    assert_eq!(answer_all(&mut exchange, 0), [1]);
    assert!(matches!(push(&mut exchange, 0, 1, 0), SumAction::Update(Update { contributions: 2, .. })));
}

/// A process of a member that pulls every chunk, then pushes each in any order, step by step.
#[derive(Clone, Debug)]
struct Process {
    step: u32,
    /// For each chunk of all routes: whether it was asked for, and answered, in this round.
    asked: Vec<bool>,
    answered: Vec<bool>,
    has_pulled: bool,
}

impl Process {
    fn new(step: u32, chunks: usize, has_pulled: bool) -> Process {
        Process { step, asked: vec![false; chunks], answered: vec![false; chunks], has_pulled }
    }
}

/// What has been added to the sum of a chunk's step under way: member and generation of its process.
type Sum = Vec<(u32, u32)>;

struct Program {
    routes: Vec<Exchange>,
    chunks: u32,
    sums: Vec<Sum>,
    processes: Vec<Option<Process>>,
    generations: Vec<u32>,
    /// The step that each route has named to a member that rejoins.
    named: Vec<Vec<Option<u32>>>,
    updates: u64,
    /// For each route and member, how many updates of chunks were made without it.
    left_out: Vec<Vec<u64>>,
}

impl Program {
    fn new(workers: u32, least: u32, chunks: u32) -> Program {
        let all = 2 * chunks as usize;
        Program {
            routes: vec![begun(workers, least, chunks); 2],
            chunks,
            sums: vec![Vec::new(); all],
            processes: vec![Some(Process::new(0, all, true)); workers as usize],
            generations: vec![0; workers as usize],
            named: vec![vec![None; 2]; workers as usize],
            updates: 0,
            left_out: vec![vec![0; workers as usize]; 2],
        }
    }

    fn at(&self, chunk: usize) -> (usize, u32) {
        (chunk / self.chunks as usize, chunk as u32 % self.chunks)
    }

    fn updated(&mut self, chunk: usize, update: Update) {
        let (route, slot) = self.at(chunk);
        let sum = std::mem::take(&mut self.sums[chunk]);
        assert_eq!(sum.len(), update.contributions as usize, "the mean divides by those who contributed");
        let mut members: Vec<u32> = sum.iter().map(|(member, _)| *member).collect();
        members.sort_unstable();
        members.dedup();
        assert_eq!(members.len(), sum.len(), "a place counts once: {sum:?}");
        for (member, left_out) in (0..).zip(&mut self.left_out[route]) {
            *left_out += u64::from(!members.contains(&member));
        }
        for member in members {
            assert!(
                self.routes[route].has_contributed(slot, member, update.step)
                    || self.routes[route].joined_at[member as usize] > update.step
            );
        }
        self.updates += 1;
    }

    fn settle(&mut self, route: usize) {
        for slot in 0..self.chunks {
            let chunk = route * self.chunks as usize + slot as usize;
            loop {
                if let Some(update) = self.routes[route].end_if_complete(slot) {
                    self.updated(chunk, update);
                } else if !self.routes[route].skip_missed_steps(slot) {
                    break;
                }
            }
            self.answer(chunk);
        }
    }

    fn answer(&mut self, chunk: usize) {
        let (route, slot) = self.at(chunk);
        for member in answer_all(&mut self.routes[route], slot) {
            let version = self.routes[route].step(slot);
            let process = self.processes[member as usize].as_mut().expect("nobody answers the dead");
            let expected = process.step + u32::from(process.has_pulled);
            assert_eq!(version, expected, "member {member} gets the version that it asked for");
            process.answered[chunk] = true;
        }
    }

    /// Lets one process do something. Returns whether it could.
    fn act(&mut self, member: u32, pick: usize) -> bool {
        let Some(process) = self.processes[member as usize].clone() else { return self.revive(member) };
        let waiting: Vec<usize> = (0..process.asked.len()).filter(|&chunk| !process.asked[chunk]).collect();
        if waiting.is_empty() {
            if !process.answered.iter().all(|&answered| answered) || process.step >= PROGRAM_STEPS {
                return false;
            }
            let step = process.step + u32::from(process.has_pulled);
            self.processes[member as usize] = Some(Process::new(step, process.asked.len(), true));
            return true;
        }
        if process.has_pulled && process.step >= PROGRAM_STEPS {
            return false;
        }
        let chunk = waiting[pick % waiting.len()];
        let (route, slot) = self.at(chunk);
        self.processes[member as usize].as_mut().unwrap().asked[chunk] = true;
        if process.has_pulled {
            self.sums[chunk].push((member, self.generations[member as usize]));
            if let SumAction::Update(update) = push(&mut self.routes[route], slot, member, process.step) {
                self.updated(chunk, update);
            }
        } else {
            self.routes[route].pull(slot, member, process.step).unwrap();
        }
        self.answer(chunk);
        true
    }

    fn kill(&mut self, member: u32) {
        if self.processes[member as usize].take().is_some() || self.named[member as usize] != [None, None] {
            self.named[member as usize] = vec![None; 2];
            for route in 0..2 {
                self.routes[route].lose(member);
                self.settle(route);
            }
        }
    }

    /// Takes the next of the steps by which a dead member's place is given to another process.
    fn revive(&mut self, member: u32) -> bool {
        let missing = (0..2).find(|&route| self.named[member as usize][route].is_none());
        if let Some(route) = missing {
            if !self.routes[route].is_lost(member) {
                return false;
            }
            if self.routes[route].begin_steps_again() {
                let of_route = route * self.chunks as usize..(route + 1) * self.chunks as usize;
                self.sums[of_route].iter_mut().for_each(Sum::clear);
            }
            self.named[member as usize][route] = Some(self.routes[route].rejoin(member));
            self.settle(route);
            return true;
        }
        let step = self.named[member as usize].iter().flatten().max().copied().unwrap();
        for route in 0..2 {
            self.routes[route].join_at(member, step);
            self.settle(route);
        }
        self.named[member as usize] = vec![None; 2];
        self.generations[member as usize] += 1;
        self.processes[member as usize] = Some(Process::new(step, 2 * self.chunks as usize, false));
        true
    }

    fn is_done(&self) -> bool {
        self.processes
            .iter()
            .all(|process| process.as_ref().is_some_and(|process| process.step >= PROGRAM_STEPS))
    }
}

proptest! {
    #[test]
    fn every_program_ends_whoever_dies_and_no_place_counts_twice(
        workers in 1_u32..5,
        least in 1_u32..5,
        chunks in 1_u32..4,
        choices in proptest::collection::vec((0_u32..40, 0_usize..8), 0..400),
    ) {
        let mut program = Program::new(workers, least.min(workers), chunks);
        for (choice, pick) in choices {
            match choice < 2 {
                true => program.kill(pick as u32 % workers),
                false => drop(program.act(choice % workers, pick)),
            }
        }
        // Nobody dies any more: all come to the end.
        while !program.is_done() {
            let acted = (0..workers).filter(|&member| program.act(member, 0)).count();
            prop_assert!(acted > 0, "nobody can do anything: {:?}", program.processes);
        }
        for (route, left_out) in program.routes.iter().zip(&program.left_out) {
            prop_assert_eq!(route.left_out(), &left_out[..]);
        }
    }
}

/// An exchange that begins with the first of its members, whose rank 0 has sent the parameters.
fn begun_with(first: u32, workers: u32) -> Exchange {
    let mut exchange = Exchange::new(Rules { first_members: first, ..rules(workers, 2) }, 1);
    exchange.initialise(0, Some(0), 0).unwrap();
    answer_all(&mut exchange, 0);
    exchange
}

#[test]
fn steps_do_not_wait_for_members_that_have_not_come_and_do_not_count_them_as_left_out() {
    let mut exchange = begun_with(2, 4);
    push(&mut exchange, 0, 1, 0);
    let update =
        |step, contributions| Update { step, number: u64::from(step) + 1, contributions, is_apart: false };
    assert_eq!(push(&mut exchange, 0, 0, 0), SumAction::Update(update(0, 2)));
    assert_eq!(answer_all(&mut exchange, 0), [0, 1]);
    assert_eq!(exchange.left_out(), [0; 4]);
    // Member 3 joins, and is awaited from then on.
    assert_eq!(exchange.rejoin(3), 1);
    exchange.join_at(3, 1);
    (0..2).for_each(|member| assert_eq!(push(&mut exchange, 0, member, 1), SumAction::Wait));
    assert_eq!(push(&mut exchange, 0, 3, 1), SumAction::Update(update(1, 3)));
    answer_all(&mut exchange, 0);
    // Two of the first members are lost, so that there are fewer than two.
    (0..2).for_each(|member| exchange.lose(member));
    assert_eq!(
        push(&mut exchange, 0, 3, 2),
        SumAction::Wait,
        "a member that has not come makes no second one"
    );
    assert_eq!(exchange.rejoin(2), 2);
    exchange.join_at(2, 2);
    assert_eq!(push(&mut exchange, 0, 2, 2), SumAction::Update(update(2, 2)));
    assert_eq!(exchange.left_out(), [1, 1, 0, 0]);
}

#[test]
fn a_member_that_joins_before_the_parameters_are_here_begins_with_them() {
    let mut exchange = Exchange::new(Rules { first_members: 1, ..rules(2, 1) }, 1);
    assert_eq!(exchange.rejoin(1), 0);
    exchange.join_at(1, 0);
    exchange.pull(0, 1, 0).unwrap();
    exchange.initialise(0, Some(0), 7).unwrap();
    assert_eq!(answer_all(&mut exchange, 0), [0, 1]);
    assert_eq!(push(&mut exchange, 0, 0, 7), SumAction::Wait);
    assert!(matches!(push(&mut exchange, 0, 1, 7), SumAction::Update(Update { contributions: 2, .. })));
}
