//! Jobs that go back when a member is lost: whole programs against the chunks of two routes, in any order of arrival,
//! with losses at any moment.

use proptest::prelude::*;

use super::*;
use crate::consistency::Consistency;

const PROGRAM_STEPS: u32 = 9;

fn rules(workers: u32, every: u32) -> Rules {
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
        quorum: None,
        rewind_every: Some(every),
    }
}

/// The chunks of a route, and what the caller of the exchange keeps of each: the version of its parameters, and that of
/// its copy.
struct Route {
    exchange: Exchange,
    parameters: Vec<u32>,
    copies: Vec<Option<u32>>,
}

impl Route {
    /// Chunks whose rank 0 has sent the parameters, of version `start`, and has been answered.
    fn begun(rules: Rules, chunks: u32, start: u32) -> Route {
        let mut exchange = Exchange::new(rules, chunks);
        for slot in 0..chunks {
            exchange.initialise(slot, Some(0), start).unwrap();
            exchange.mark_due_answers(slot, |_, _| {});
            exchange.answer_begun(slot, 0);
        }
        Route { exchange, parameters: vec![start; chunks as usize], copies: vec![None; chunks as usize] }
    }

    /// Takes a contribution, and returns the members that are answered.
    fn push(&mut self, slot: u32, member: u32, step: u32) -> Vec<u32> {
        let then = self.exchange.push(slot, member, step, Answer::Parameters).unwrap().then;
        match then {
            SumAction::Update(update) => self.update(slot, update),
            SumAction::Hold | SumAction::Wait => {}
            other => panic!("{other:?}"),
        }
        self.answer(slot)
    }

    fn update(&mut self, slot: u32, update: Update) {
        assert_eq!(update.contributions, self.exchange.contributors(), "no update lacks a contribution");
        assert_eq!(self.parameters[slot as usize], update.step);
        if self.exchange.keeps_version(slot) {
            self.copies[slot as usize] = Some(self.parameters[slot as usize]);
        }
        self.parameters[slot as usize] += 1;
    }

    fn answer(&mut self, slot: u32) -> Vec<u32> {
        let mut owed = Vec::new();
        self.exchange.mark_due_answers(slot, |member, _| owed.push(member));
        owed.iter().for_each(|&member| self.exchange.answer_begun(slot, member));
        owed
    }

    fn rewind(&mut self, step: u32) {
        self.rewind_with(step, self.exchange.rules.members);
    }

    fn rewind_with(&mut self, step: u32, members: u32) {
        self.exchange.check_rewind(step).unwrap();
        self.exchange.rewind(step, members);
        assert_eq!(self.exchange.contributors(), members);
        for slot in 0..self.parameters.len() as u32 {
            let parameters = &mut self.parameters[slot as usize];
            if self.exchange.rewind_chunk(slot, step) == RewoundTo::Copy {
                *parameters = self.copies[slot as usize].unwrap();
            }
            assert_eq!((*parameters, self.exchange.step(slot)), (step, step));
        }
    }
}

#[test]
fn chunks_that_have_made_a_step_go_back_to_those_that_have_not() {
    let mut route = Route::begun(rules(2, 1), 2, 0);
    assert!(route.push(0, 0, 0).is_empty());
    assert_eq!(route.push(0, 1, 0), [0, 1]);
    assert!(route.push(1, 0, 0).is_empty());
    assert_eq!(route.exchange.newest_rewind(), Ok(Some(0)));
    route.rewind(0);
    assert_eq!((route.exchange.updates(0), route.exchange.updates(1)), (0, 0));
    for (member, slot) in [(1, 0), (0, 1), (0, 0), (1, 1)] {
        route.push(slot, member, 0);
    }
    assert_eq!(route.parameters, [1, 1], "the step is made again, by both");
    assert_eq!(route.exchange.newest_rewind(), Ok(Some(1)));
}

#[test]
fn copies_are_those_of_every_nth_step_from_the_start() {
    let mut route = Route::begun(rules(1, 4), 1, 7);
    assert_eq!(route.exchange.newest_rewind(), Ok(Some(7)));
    for (step, newest) in [(7, 7), (8, 7), (9, 7), (10, 11), (11, 11), (12, 11)] {
        route.push(0, 0, step);
        assert_eq!(route.exchange.newest_rewind(), Ok(Some(newest)), "after step {step}");
    }
    route.rewind(11);
    assert_eq!(route.exchange.updates(0), 4);
    assert_eq!(route.exchange.newest_rewind(), Ok(Some(11)));
}

#[test]
fn a_held_step_and_a_release_under_way_are_forgotten() {
    let rules = Rules { two_phase: true, ..rules(2, 1) };
    let mut route = Route::begun(rules, 2, 0);
    for (member, slot) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
        assert!(route.push(slot, member, 0).is_empty());
    }
    route.exchange.release(Some(0), 0).unwrap();
    let (slot, update) = route.exchange.release_next().unwrap();
    route.update(slot, update);
    route.rewind(0);
    assert!(!route.exchange.is_releasing() && route.exchange.held_step().is_none());
    route.push(0, 0, 0);
    assert_eq!(route.exchange.awaits(0), Some(Awaited::Contribution(0)));
}

#[test]
fn chunks_without_a_step_in_common_cannot_go_back() {
    let mut route = Route::begun(rules(1, 1), 2, 0);
    route.push(0, 0, 0);
    route.push(0, 0, 1);
    let refused = route.exchange.newest_rewind().unwrap_err();
    assert_eq!(refused, CannotRewind { slot: 0, step: 0, version: 2, kept: Some(1) });
    assert_eq!(
        refused.to_string(),
        "it is at step 2 and its copy is of step 1, so that it cannot go back to step 0"
    );
}

#[test]
fn members_begin_anew_if_a_chunk_has_no_parameters() {
    let mut exchange = Exchange::new(rules(2, 1), 2);
    let start = |exchange: &mut Exchange, slot: u32, version: u32| {
        assert!(exchange.initialise(slot, Some(0), version).unwrap());
        exchange.mark_due_answers(slot, |_, _| {});
        exchange.answer_begun(slot, 0);
    };
    exchange.initialise_state(0, Some(0), 5).unwrap();
    exchange.answer_begun(0, 0);
    start(&mut exchange, 0, 3);
    for member in [0, 1] {
        exchange.push(0, member, 3, Answer::Parameters).unwrap();
    }
    assert!(exchange.keeps_version(0));
    exchange.initialise_state(1, Some(0), 5).unwrap();
    assert_eq!(exchange.newest_rewind(), Ok(None), "chunk 1 has none");
    exchange.begin_anew(2);
    (0..2).for_each(|slot| exchange.begin_chunk_anew(slot));
    for slot in 0..2 {
        assert!(!exchange.has_begun(slot));
        assert_eq!((exchange.step(slot), exchange.updates(slot)), (0, 0));
        assert_eq!(exchange.check_push(slot, 1, 3), Err(ProtocolViolation::NotInitialised));
        // The new parameters may be of another version.
        start(&mut exchange, slot, 7);
        exchange.push(slot, 1, 7, Answer::Parameters).unwrap();
        let then = exchange.push(slot, 0, 7, Answer::Parameters).unwrap().then;
        assert_eq!(then, SumAction::Update(Update { step: 7, number: 1, contributions: 2, is_apart: false }));
    }
    assert_eq!(exchange.newest_rewind(), Ok(Some(8)));
}

#[test]
fn members_that_have_left_are_members_again() {
    let mut route = Route::begun(rules(2, 2), 1, 0);
    for step in [0, 1, 2] {
        route.push(0, 0, step);
        route.push(0, 1, step);
    }
    route.exchange.leave(0, |_, _, _| {}).unwrap();
    assert_eq!(route.exchange.newest_rewind(), Ok(Some(2)));
    route.rewind(2);
    assert!(route.push(0, 1, 2).is_empty());
    assert_eq!(route.exchange.check_waits(0), Ok(()), "member 0 has not left");
    assert_eq!(route.push(0, 0, 2), [0, 1]);
}

#[test]
fn steps_end_with_those_that_are_there_after_more_or_fewer_have_begun_again() {
    let elastic = Rules { first_members: 2, ..rules(4, 1) };
    let mut route = Route::begun(elastic, 1, 0);
    let make_step = |route: &mut Route, members: u32, step: u32| {
        for member in 0..members {
            assert_eq!(route.exchange.missing(0).collect::<Vec<_>>(), (member..members).collect::<Vec<_>>());
            let answered = route.push(0, member, step);
            assert_eq!(route.exchange.check_waits(0), Ok(()), "nobody waits for a member that is not there");
            assert_eq!(answered.len(), if member + 1 == members { members as usize } else { 0 });
        }
    };
    make_step(&mut route, 2, 0);
    for (members, step) in [(4, 1), (3, 2), (1, 3), (4, 4)] {
        route.rewind_with(step, members);
        make_step(&mut route, members, step);
    }
    route.exchange.leave(3, |_, _, _| {}).unwrap();
    route.push(0, 0, 5);
    let awaited = LeftWhileAwaited { member: 3, awaited: Awaited::Contribution(5) };
    assert_eq!(route.exchange.check_waits(0), Err(awaited));
}

#[test]
fn a_reproducible_job_sums_those_that_are_there_in_their_order() {
    let elastic = Rules { reproducible: true, first_members: 3, ..rules(4, 1) };
    let mut exchange = Route::begun(elastic, 1, 0).exchange;
    let push =
        |exchange: &mut Exchange, member, step| exchange.push(0, member, step, Answer::Parameters).unwrap();
    assert_eq!(push(&mut exchange, 2, 0).fold, Fold::Park);
    assert_eq!(push(&mut exchange, 0, 0).fold, Fold::Sum { starts_sum: true, parked: 1..1 });
    let last = push(&mut exchange, 1, 0);
    assert_eq!(last.fold, Fold::Sum { starts_sum: false, parked: 2..3 });
    assert_eq!(
        last.then,
        SumAction::Update(Update { step: 0, number: 1, contributions: 3, is_apart: false })
    );
    exchange.rewind(1, 2);
    exchange.rewind_chunk(0, 1);
    assert_eq!(push(&mut exchange, 1, 1).fold, Fold::Park);
    let last = push(&mut exchange, 0, 1);
    assert_eq!(last.fold, Fold::Sum { starts_sum: true, parked: 1..2 });
    assert_eq!(
        last.then,
        SumAction::Update(Update { step: 1, number: 2, contributions: 2, is_apart: false })
    );
}

#[test]
fn a_step_of_two_phases_is_released_with_those_that_are_there() {
    let elastic = Rules { two_phase: true, first_members: 1, ..rules(3, 1) };
    let mut route = Route::begun(elastic, 1, 0);
    route.push(0, 0, 0);
    assert_eq!(route.exchange.held_step(), Some(0));
    route.exchange.release(Some(0), 0).unwrap();
    assert_eq!(
        route.exchange.release_next(),
        Some((0, Update { step: 0, number: 1, contributions: 1, is_apart: false }))
    );
}

/// A worker that exchanges all chunks of both routes in every step.
struct Worker {
    step: u32,
    /// The chunks that it has not pushed, and the number of those that were not answered.
    unpushed: Vec<(usize, u32)>,
    unanswered: usize,
}

fn worker(step: u32, chunks: [u32; 2]) -> Worker {
    let unpushed: Vec<(usize, u32)> =
        (0..2).flat_map(|route| (0..chunks[route]).map(move |slot| (route, slot))).collect();
    Worker { step, unanswered: unpushed.len(), unpushed }
}

proptest! {
    #[test]
    fn every_program_reaches_its_end_whoever_is_lost_whenever(
        workers in 1u32..5,
        every in 1u32..5,
        chunks in prop::array::uniform2(1u32..4),
        start in 0u32..3,
        choices in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1200),
        first in any::<prop::sample::Index>(),
        losses in prop::collection::btree_map(0usize..600, any::<prop::sample::Index>(), 0..6),
    ) {
        // Each time that a member is lost, another number of them begins again.
        let members_of = |index: prop::sample::Index| 1 + index.index(workers as usize) as u32;
        let rules = Rules { first_members: members_of(first), ..rules(workers, every) };
        let mut routes = [0, 1].map(|route: usize| Route::begun(rules, chunks[route], start));
        let mut programs: Vec<Worker> = (0..rules.first_members).map(|_| worker(start, chunks)).collect();
        let mut newest = start;
        for (at, (who, what)) in choices.into_iter().enumerate() {
            if let Some(&members) = losses.get(&at) {
                let members = members_of(members);
                let step = routes.iter().map(|route| route.exchange.newest_rewind().unwrap()).min().unwrap().unwrap();
                let reached = programs.iter().map(|program| program.step).min().unwrap();
                prop_assert!(step + every > reached, "at most {every} steps are repeated: {step} after {reached}");
                prop_assert!(step >= newest, "a later loss never goes further back");
                newest = step;
                routes.iter_mut().for_each(|route| route.rewind_with(step, members));
                programs = (0..members).map(|_| worker(step, chunks)).collect();
            }
            let end = start + PROGRAM_STEPS;
            let busy: Vec<usize> = (0..programs.len())
                .filter(|&member| programs[member].step < end && !programs[member].unpushed.is_empty())
                .collect();
            if busy.is_empty() {
                prop_assert!(programs.iter().all(|program| program.step == end), "nobody waits for ever");
                break;
            }
            let member = busy[who.index(busy.len())];
            let program = &mut programs[member];
            let chosen = what.index(program.unpushed.len());
            let (route, slot) = program.unpushed.swap_remove(chosen);
            let step = program.step;
            for answered in routes[route].push(slot, member as u32, step) {
                let program = &mut programs[answered as usize];
                program.unanswered -= 1;
                if program.unanswered == 0 {
                    *program = worker(program.step + 1, chunks);
                }
            }
        }
    }
}
