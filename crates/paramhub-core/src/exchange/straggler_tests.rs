//! Jobs that leave out late workers, case by case.

use super::*;
use crate::consistency::Consistency;
use crate::stragglers::Quorum;

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

#[test]
fn a_site_takes_no_answer_to_a_step_that_cannot_be() {
    let reach = ChunkReach { members: 1, together: 1, has_above: true, site_first: false };
    let mut exchange = Exchange::among_sites(rules(1, Quorum::Count(1)), [reach]);
    exchange.initialise(0, None, 5).unwrap();
    push(&mut exchange, 0, 5);
    for step in [4, u32::MAX] {
        assert_eq!(exchange.lower(0, step), Err(ProtocolViolation::NotAwaited(step)));
    }
    assert!(matches!(exchange.lower(0, 9), Ok(SumAction::Update(Update { step: 9, .. }))));
    assert_eq!((exchange.step(0), exchange.next_step(0, 0)), (10, 10));
}
