use super::*;
use crate::consistency::Consistency;
use crate::factors::tests::block;

const WORKERS: u32 = 3;
/// The chunks of another key, of the weight and of the bias.
const SLOTS: u32 = 2 + 3 + 1;

fn hub(change: impl FnOnce(&mut Rules)) -> (Exchange, Gathering) {
    let mut rules = Rules {
        workers: WORKERS,
        members: WORKERS,
        first_members: WORKERS,
        first_site: WORKERS,
        rank_0: Some(0),
        consistency: Consistency::Synchronous,
        reproducible: false,
        has_parameters: false,
        two_phase: false,
        quorum: None,
        rewind_every: None,
    };
    change(&mut rules);
    let mut exchange = Exchange::new(rules, SLOTS);
    let block = crate::factors::FactorBlock { piece_elements: 100, ..block().1 };
    let layer = GatheredLayer { block, weight: 2..5, bias: 5..6 };
    exchange.take_factors(layer.slots());
    (exchange, Gathering::new(vec![layer], WORKERS))
}

/// Sends the pieces of a block that `numbers` names, and returns what to do after the last.
fn send(
    (exchange, gathering): &mut (Exchange, Gathering),
    member: u32,
    step: u32,
    samples: u32,
    numbers: std::ops::Range<u32>,
) -> Result<Gathered, ProtocolViolation> {
    let block = gathering.layers()[0].block;
    let mut last = None;
    for number in numbers {
        let elements = block.piece(samples, number).map_or(0, |piece| piece.elements());
        last = Some(gathering.piece(exchange, (0, member), step, (samples, number), elements)?);
    }
    Ok(last.expect("some are sent"))
}

fn answered(exchange: &mut Exchange, slot: u32) -> Vec<u32> {
    let mut owed = Vec::new();
    exchange.mark_due_answers(slot, |member, answer| {
        assert_eq!(answer, Answer::Parameters);
        owed.push(member);
    });
    owed
}

/// Makes the layer and answers all members.
fn make((exchange, gathering): &mut (Exchange, Gathering), step: u32) {
    for slot in gathering.layers()[0].slots() {
        let SumAction::Update(update) = exchange.made(slot) else { panic!("in one phase") };
        assert_eq!((update.step, update.contributions), (step, WORKERS));
        for member in answered(exchange, slot) {
            exchange.answer_begun(slot, member);
        }
    }
}

#[test]
fn the_last_piece_of_the_last_rank_lets_the_layer_be_made() {
    let mut hub = hub(|_| ());
    assert_eq!(hub.1.layer_at(2), Some(0));
    assert_eq!(hub.1.layer_at(3), None, "the first chunk names the layer");
    for step in 0..3 {
        // Blocks in different orders, with the most samples, fewer, or none.
        for (member, samples) in [(1, 5), (2, 2), (0, 0)] {
            let pieces = hub.1.layers()[0].block.pieces(samples);
            for number in 0..pieces - 1 {
                assert_eq!(send(&mut hub, member, step, samples, number..number + 1).unwrap().then, None);
            }
            let last = send(&mut hub, member, step, samples, pieces - 1..pieces).unwrap();
            assert_eq!(last.then, Some(if member == 0 { SumAction::Make } else { SumAction::Wait }));
        }
        for slot in 2..6 {
            assert!(answered(&mut hub.0, slot).is_empty(), "nothing is made yet");
            assert_eq!(hub.0.check_waits(slot), Ok(()));
        }
        make(&mut hub, step);
        assert_eq!(hub.0.step(2), step + 1);
    }
}

#[test]
fn a_piece_that_breaks_the_rules_is_refused_and_changes_nothing() {
    let mut hub = hub(|_| ());
    let mut refused = |member, step, samples, number, elements| {
        hub.1.piece(&mut hub.0, (0, member), step, (samples, number), elements).unwrap_err()
    };
    assert_eq!(refused(0, 0, 6, 0, 100), ProtocolViolation::Samples { most: 5, got: 6 });
    assert_eq!(refused(0, 0, 5, 1, 100), ProtocolViolation::Piece { expected: 0, got: 1 });
    assert_eq!(
        refused(0, 0, 5, 0, 99),
        ProtocolViolation::PieceElements { piece: 0, expected: 100, got: 99 }
    );
    assert_eq!(refused(0, 1, 5, 0, 100), ProtocolViolation::StepAhead { expected: 0, got: 1 });
    send(&mut hub, 0, 0, 5, 0..2).unwrap();
    let mut refused = |member, step, samples, number, elements| {
        hub.1.piece(&mut hub.0, (0, member), step, (samples, number), elements).unwrap_err()
    };
    assert_eq!(refused(0, 0, 5, 1, 100), ProtocolViolation::Piece { expected: 2, got: 1 }, "it came before");
    assert_eq!(refused(0, 0, 4, 2, 50), ProtocolViolation::OtherSamples { expected: 5, got: 4 });
    assert_eq!(refused(0, 1, 5, 2, 50), ProtocolViolation::StepAhead { expected: 0, got: 1 });
    send(&mut hub, 0, 0, 5, 2..3).unwrap();
    assert_eq!(send(&mut hub, 0, 0, 5, 0..1), Err(ProtocolViolation::Unanswered));
    for member in 1..WORKERS {
        send(&mut hub, member, 0, 1, 0..1).unwrap();
    }
    // The bias and all chunks of the weight except the last are made and answered.
    for slot in [5, 2, 3] {
        hub.0.made(slot);
        answered(&mut hub.0, slot);
        hub.0.answer_begun(slot, 0);
    }
    assert_eq!(send(&mut hub, 0, 1, 5, 0..1), Err(ProtocolViolation::Unanswered), "its place is still read");
}

#[test]
fn factors_wait_for_the_parameters_to_start_from() {
    let mut hub = hub(|rules| rules.has_parameters = true);
    assert_eq!(send(&mut hub, 1, 7, 5, 0..1), Err(ProtocolViolation::NotInitialised));
    for slot in 0..SLOTS {
        hub.0.initialise(slot, Some(0), 7).unwrap();
        hub.0.mark_due_answers(slot, |_, _| ());
        hub.0.answer_begun(slot, 0);
    }
    assert!(hub.0.takes_factors(2) && !hub.0.takes_factors(1), "also after they have begun");
    for member in 0..WORKERS {
        send(&mut hub, member, 7, 5, 0..3).unwrap();
    }
    make(&mut hub, 7);
}

#[test]
fn a_gradient_made_of_factors_is_held_in_two_phases() {
    let mut hub = hub(|rules| (rules.two_phase, rules.has_parameters) = (true, true));
    for slot in 0..SLOTS {
        hub.0.initialise(slot, Some(0), 0).unwrap();
        hub.0.mark_due_answers(slot, |_, _| ());
        hub.0.answer_begun(slot, 0);
    }
    for member in 0..WORKERS {
        send(&mut hub, member, 0, 5, 0..3).unwrap();
        for slot in 0..2 {
            hub.0.push(slot, member, 0, Answer::Parameters).unwrap();
        }
    }
    for slot in hub.1.layers()[0].slots() {
        assert_eq!(hub.0.held_step(), None);
        assert_eq!(hub.0.made(slot), SumAction::Hold);
    }
    assert_eq!(hub.0.held_step(), Some(0));
}

#[test]
fn a_block_is_sent_again_on_another_stream_whatever_of_it_was_here() {
    let mut hub = hub(|_| ());
    send(&mut hub, 0, 0, 5, 0..2).unwrap();
    let resume = |hub: &mut (Exchange, Gathering)| {
        hub.0.resume(0);
        hub.1.resume(0);
    };
    resume(&mut hub);
    let again = send(&mut hub, 0, 0, 5, 0..3).unwrap();
    assert_eq!((again.piece.is_some(), again.then), (true, Some(SumAction::Wait)), "a part of it was here");
    resume(&mut hub);
    let again = send(&mut hub, 0, 0, 5, 0..3).unwrap();
    assert_eq!(again, Gathered { piece: None, then: Some(SumAction::Repeated) }, "all of it was here");
    for member in 1..WORKERS {
        send(&mut hub, member, 0, 5, 0..3).unwrap();
    }
    // While the layer is being made.
    hub.0.made(5);
    assert_eq!(answered(&mut hub.0, 5), [0, 1, 2]);
    resume(&mut hub);
    assert_eq!(send(&mut hub, 0, 0, 5, 0..3).unwrap().then, Some(SumAction::Repeated));
    assert_eq!(answered(&mut hub.0, 5), [0], "it is answered again");
    for slot in 2..5 {
        hub.0.made(slot);
        assert_eq!(answered(&mut hub.0, slot), [0, 1, 2]);
    }
    for slot in 2..6 {
        (0..WORKERS).for_each(|member| hub.0.answer_begun(slot, member));
    }
    assert_eq!(send(&mut hub, 0, 1, 5, 0..3).unwrap().then, Some(SumAction::Wait));
}
