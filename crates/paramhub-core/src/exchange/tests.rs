//! Single rules of the exchange.

use super::*;
use crate::consistency::Consistency;

#[test]
fn parameters_may_start_at_any_version_but_the_optimizers_state_starts_anew() {
    let rules = Rules {
        members: 2,
        first_members: 2,
        first_site: 2,
        rank_0: Some(0),
        workers: 2,
        consistency: Consistency::Synchronous,
        reproducible: false,
        has_parameters: true,
        two_phase: false,
        quorum: None,
        rewind_every: None,
    };
    let mut exchange = Exchange::new(rules, 1);
    exchange.initialise(0, Some(0), 100).unwrap();
    exchange.mark_due_answers(0, |_, _| {});
    assert_eq!(exchange.answer_version(0, 0), 100);
    exchange.answer_begun(0, 0);
    assert_eq!(
        exchange.push(0, 1, 0, Answer::Applied),
        Err(ProtocolViolation::StepBehind { expected: 100, got: 0 })
    );
    exchange.push(0, 1, 100, Answer::Applied).unwrap();
    assert_eq!(exchange.missing(0).collect::<Vec<_>>(), [0]);
    let update = exchange.push(0, 0, 100, Answer::Applied).unwrap().then;
    let SumAction::Update(update) = update else { panic!("{update:?}") };
    assert_eq!(update, Update { step: 100, number: 1, contributions: 2, is_apart: false });
}

#[test]
fn state_is_restored_by_rank_zero_before_the_parameters_and_may_be_asked_for_before() {
    let consistency = Consistency::Asynchronous;
    let rules = Rules {
        members: 2,
        first_members: 2,
        first_site: 2,
        rank_0: Some(0),
        workers: 2,
        consistency,
        reproducible: false,
        has_parameters: true,
        two_phase: false,
        quorum: None,
        rewind_every: None,
    };
    let mut exchange = Exchange::new(rules, 1);
    assert_eq!(exchange.initialise_state(0, Some(1), 5), Err(ProtocolViolation::StateInitialised));
    let most = 1 << 48;
    assert_eq!(
        exchange.initialise_state(0, Some(0), most + 1),
        Err(ProtocolViolation::StateUpdates(most + 1))
    );
    exchange.pull_state(0, 1, 3).unwrap();
    exchange.mark_due_answers(0, |rank, _| panic!("rank {rank} is answered from nothing"));
    exchange.initialise_state(0, Some(0), most).unwrap();
    exchange.answer_begun(0, 0);
    exchange.initialise(0, Some(0), 9).unwrap();
    let mut owed = vec![];
    exchange.mark_due_answers(0, |rank, answer| owed.push((rank, answer)));
    assert_eq!(owed, [(0, Answer::Applied), (1, Answer::State(3))]);
    assert_eq!((exchange.updates(0), exchange.owed(0, 1)), (most, Some(Answer::State(3))));
    exchange.answer_begun(0, 0);
    assert_eq!(
        exchange.initialise_state(0, Some(0), 5),
        Err(ProtocolViolation::StateInitialised),
        "too late"
    );
    let update = exchange.push(0, 0, 9, Answer::Applied).unwrap().then;
    let SumAction::Update(update) = update else { panic!("{update:?}") };
    assert_eq!(update.number, most + 1);
}

#[test]
fn an_answer_may_still_be_sent_when_its_rank_has_left() {
    let consistency = Consistency::Asynchronous;
    let rules = Rules {
        members: 1,
        first_members: 1,
        first_site: 1,
        rank_0: Some(0),
        workers: 1,
        consistency,
        reproducible: false,
        has_parameters: false,
        two_phase: false,
        quorum: None,
        rewind_every: None,
    };
    let mut exchange = Exchange::new(rules, 1);
    exchange.push(0, 0, 0, Answer::Parameters).unwrap();
    exchange.mark_due_answers(0, |_, _| {});
    exchange.leave(0, |_, _, _| {}).unwrap();
    exchange.answer_begun(0, 0);
}

#[test]
fn a_rank_that_waits_for_parameters_is_stranded_by_rank_zero_alone() {
    for consistency in [Consistency::Synchronous, Consistency::Asynchronous, Consistency::BoundedStaleness(1)]
    {
        let rules = Rules {
            members: 3,
            first_members: 3,
            first_site: 3,
            rank_0: Some(0),
            workers: 3,
            consistency,
            reproducible: false,
            has_parameters: true,
            two_phase: false,
            quorum: None,
            rewind_every: None,
        };
        let mut exchange = Exchange::new(rules, 1);
        exchange.pull(0, 1, 0).unwrap();
        assert_eq!(exchange.leave(2, |_, _, _| {}), Ok(()), "{consistency}: rank 0 may still send them");
        assert_eq!(
            exchange.leave(0, |_, _, _| {}).unwrap_err().member,
            0,
            "{consistency}: no rank will send them"
        );
    }
}

#[test]
fn steps_end_where_versions_could_not_be_counted_any_more() {
    let consistency = Consistency::BoundedStaleness(0);
    let rules = Rules {
        members: 2,
        first_members: 2,
        first_site: 2,
        rank_0: Some(0),
        workers: 2,
        consistency,
        reproducible: false,
        has_parameters: true,
        two_phase: false,
        quorum: None,
        rewind_every: None,
    };
    let mut exchange = Exchange::new(rules, 1);
    exchange.initialise(0, Some(0), u32::MAX - 1).unwrap();
    exchange.push(0, 1, u32::MAX - 1, Answer::Applied).unwrap();
    exchange.mark_due_answers(0, |_, _| {});
    exchange.answer_begun(0, 0);
    exchange.push(0, 0, u32::MAX - 1, Answer::Applied).unwrap();
    exchange.mark_due_answers(0, |_, _| {});
    exchange.answer_begun(0, 0);
    assert_eq!(exchange.push(0, 0, u32::MAX, Answer::Applied), Err(ProtocolViolation::StepsExhausted));
}

/// A synchronous job of two ranks with two phases.
fn two_phases(chunks: u32) -> Exchange {
    let consistency = Consistency::Synchronous;
    let rules = Rules {
        members: 2,
        first_members: 2,
        first_site: 2,
        rank_0: Some(0),
        workers: 2,
        consistency,
        reproducible: false,
        has_parameters: true,
        two_phase: true,
        quorum: None,
        rewind_every: None,
    };
    Exchange::new(rules, chunks)
}

/// Settles a chunk, answers all members at once, and returns how many there were.
fn answer_all(exchange: &mut Exchange, slot: u32) -> usize {
    let mut owed = vec![];
    exchange.mark_due_answers(slot, |rank, _| owed.push(rank));
    owed.iter().for_each(|&rank| exchange.answer_begun(slot, rank));
    owed.len()
}

#[test]
fn a_step_is_held_until_all_of_it_is_there_and_released_chunk_by_chunk() {
    const CHUNKS: u32 = 3;
    let mut exchange = two_phases(CHUNKS);
    for slot in 0..CHUNKS {
        exchange.initialise(slot, Some(0), 20).unwrap();
        answer_all(&mut exchange, slot);
    }
    let push = |exchange: &mut Exchange, slot, step| {
        for rank in 0..2 {
            let arrival = exchange.push(slot, rank, step, Answer::Parameters).unwrap();
            assert_eq!(arrival.then, if rank == 1 { SumAction::Hold } else { SumAction::Wait });
        }
    };
    for slot in [2, 0, 1] {
        assert_eq!(
            (exchange.held_step(), exchange.release(Some(0), 20)),
            (None, Err(ProtocolViolation::Released(20)))
        );
        push(&mut exchange, slot, 20);
        assert_eq!(answer_all(&mut exchange, slot), 0, "no rank is answered before the release");
    }
    assert_eq!(exchange.held_step(), Some(20));
    assert_eq!(exchange.release(Some(1), 20), Err(ProtocolViolation::Released(20)), "from another rank");
    exchange.release(Some(0), 20).unwrap();
    assert_eq!(exchange.held_step(), None);
    for slot in 0..CHUNKS {
        assert!(exchange.is_releasing());
        let update = Update { step: 20, number: 1, contributions: 2, is_apart: false };
        assert_eq!(exchange.release_next(), Some((slot, update)));
        assert_eq!(answer_all(&mut exchange, slot), 2);
        // An answered member goes on, while other chunks of the previous step still wait.
        push(&mut exchange, slot, 21);
        assert_eq!(exchange.held_step(), (slot == CHUNKS - 1).then_some(21));
        assert!(exchange.release(Some(0), 21).is_ok() == (slot == CHUNKS - 1), "one release at a time");
    }
    assert_eq!(
        exchange.release_next().unwrap().1,
        Update { step: 21, number: 2, contributions: 2, is_apart: false }
    );
}

#[test]
fn a_skipped_step_has_a_version_and_is_no_update_of_the_optimizer() {
    let mut exchange = two_phases(1);
    exchange.initialise(0, Some(0), 7).unwrap();
    answer_all(&mut exchange, 0);
    let mut updates = 0;
    for (step, skips) in (7..).zip([true, false, true, true, false]) {
        for rank in 0..2 {
            exchange.push(0, rank, step, Answer::Parameters).unwrap();
        }
        assert_eq!(exchange.skip(Some(1), step), Err(ProtocolViolation::Released(step)), "from another rank");
        let ended = if skips { exchange.skip(Some(0), step) } else { exchange.release(Some(0), step) };
        assert_eq!((ended, exchange.skips()), (Ok(true), skips));
        assert_eq!(exchange.skip(Some(0), step), Err(ProtocolViolation::Released(step)), "twice");
        assert_eq!(exchange.skips(), skips, "a refused order changes nothing");
        let (_, update) = exchange.release_next().unwrap();
        updates += u64::from(!skips);
        assert_eq!((update.step, exchange.updates(0), exchange.step(0)), (step, updates, step + 1));
        assert!(skips || update.number == updates);
        assert_eq!(answer_all(&mut exchange, 0), 2, "all ranks get the unchanged parameters");
    }
}

#[test]
fn rank_0_may_repeat_its_last_release_once_after_its_stream_was_replaced() {
    let mut exchange = two_phases(1);
    exchange.initialise(0, Some(0), 0).unwrap();
    answer_all(&mut exchange, 0);
    let hold = |exchange: &mut Exchange, step| {
        for rank in 0..2 {
            exchange.push(0, rank, step, Answer::Parameters).unwrap();
        }
    };
    let refused = |step| Err(ProtocolViolation::Released(step));
    hold(&mut exchange, 0);
    exchange.resume(1);
    exchange.resume(0);
    assert_eq!(exchange.release(Some(0), 0), Ok(true), "the release was lost with the stream");
    assert_eq!(exchange.release(Some(0), 0), refused(0), "twice on one stream");
    exchange.release_next().unwrap();
    answer_all(&mut exchange, 0);
    exchange.resume(1);
    assert_eq!(exchange.release(Some(0), 0), refused(0), "another rank's stream was replaced");
    exchange.resume(0);
    assert_eq!(exchange.release(Some(0), 0), Ok(false), "repeated");
    assert_eq!(exchange.release(Some(0), 0), refused(0));
}

/// A hub of two chunks in a two-phase job of sites. Its members are a worker, which is not rank 0, and a site below.
fn among_sites(has_above: bool) -> Exchange {
    let rules = Rules { workers: 3, first_site: 1, rank_0: None, ..two_phases(1).rules };
    let reach = ChunkReach { members: 2, together: 2, has_above, site_first: false };
    let mut exchange = Exchange::among_sites(rules, [reach; 2]);
    for slot in 0..2 {
        exchange.initialise(slot, None, 5).unwrap();
    }
    exchange
}

/// Sends all answers that are due, and returns who gets them and which version they have.
fn answers(exchange: &mut Exchange, slot: u32) -> Vec<(u32, u32)> {
    let mut owed = vec![];
    exchange.mark_due_answers(slot, |member, _| owed.push(member));
    let sent = owed.into_iter().map(|member| {
        let version = exchange.answer_version(slot, member);
        exchange.answer_begun(slot, member);
        (member, version)
    });
    sent.collect()
}

/// In whatever order contributions come, those of the site and of three workers are summed in the order of ranks.
#[test]
fn the_sum_of_a_site_that_comes_first_is_before_those_of_workers() {
    let order_of = |site_first, arrivals: [u32; 4]| {
        let rules = Rules {
            workers: 6,
            members: 4,
            first_members: 4,
            first_site: 3,
            reproducible: true,
            ..two_phases(1).rules
        };
        let reach = ChunkReach { members: 4, together: 4, has_above: false, site_first };
        let mut exchange = Exchange::among_sites(rules, [reach]);
        exchange.initialise(0, None, 0).unwrap();
        let (mut sum, mut waiting) = (Vec::new(), [false; 4]);
        for member in arrivals {
            match exchange.push(0, member, 0, Answer::Parameters).unwrap().fold {
                Fold::Park => waiting[member as usize] = true,
                Fold::Sum { starts_sum, parked } => {
                    assert_eq!(starts_sum, sum.is_empty());
                    sum.push(member);
                    for member in parked {
                        assert!(std::mem::take(&mut waiting[member as usize]), "it waits");
                        sum.push(member);
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(waiting, [false; 4]);
        sum
    };
    let members = [0, 1, 2, 3];
    for (a, b, c) in (0..4).flat_map(|a| (0..4).flat_map(move |b| (0..4).map(move |c| (a, b, c)))) {
        let mut arrivals = members;
        [(0, a), (1, b), (2, c)].into_iter().for_each(|(at, with)| arrivals.swap(at, with));
        assert_eq!(order_of(true, arrivals), [3, 0, 1, 2], "{arrivals:?}");
        assert_eq!(order_of(false, arrivals), members, "{arrivals:?}");
    }
}

#[test]
fn a_site_below_gets_the_total_of_a_held_chunk_and_goes_on_with_the_release() {
    let (worker, site) = (0, 1);
    let mut exchange = among_sites(false);
    for slot in 0..2 {
        exchange.push(slot, worker, 5, Answer::Parameters).unwrap();
        assert_eq!(exchange.push(slot, site, 5, Answer::Parameters).unwrap().then, SumAction::Hold);
        assert_eq!(answers(&mut exchange, slot), [(site, 6)], "the total makes the next version");
        assert!(!exchange.is_at_start(slot), "the site has begun the chunk");
    }
    // Its stream is cut, and the total is lost.
    exchange.resume_at(1, site);
    assert_eq!(exchange.push(1, site, 5, Answer::Parameters).unwrap().then, SumAction::Repeated);
    assert_eq!(answers(&mut exchange, 1), [(site, 6)]);
    assert_eq!(exchange.release(Some(worker), 5), Err(ProtocolViolation::Released(5)), "it is not rank 0");
    assert_eq!(exchange.release(None, 5), Ok(true));
    // The site was released before, and contributes to the next step of a chunk that waits for its update.
    let ahead = exchange.push(1, site, 6, Answer::Parameters);
    assert_eq!(ahead, Err(ProtocolViolation::StepAhead { expected: 5, got: 6 }));
    assert_eq!(
        exchange.release_chunk(1),
        Some(Update { step: 5, number: 1, contributions: 3, is_apart: false })
    );
    assert_eq!(answers(&mut exchange, 1), [(worker, 6)]);
    assert_eq!(exchange.push(1, site, 6, Answer::Parameters).unwrap().then, SumAction::Wait);
    assert_eq!((exchange.release_chunk(1), exchange.release_next().map(|(slot, _)| slot)), (None, Some(0)));
    assert_eq!((exchange.release_next(), exchange.is_releasing()), (None, false));
    let known = [5, 4].map(|step| exchange.release(None, step));
    assert_eq!(known, [Ok(false); 2], "it comes by every stream");
    let early = exchange.release(None, 7);
    assert_eq!(early, Err(ProtocolViolation::Released(7)), "chunks are at step 6");
}

#[test]
fn a_release_may_come_before_the_last_totals_of_its_step() {
    let mut exchange = among_sites(true);
    let push = |exchange: &mut Exchange, slot, step| {
        exchange.push(slot, 0, step, Answer::Parameters).unwrap();
        assert_eq!(exchange.push(slot, 1, step, Answer::Parameters).unwrap().then, SumAction::Raise);
    };
    (0..2).for_each(|slot| push(&mut exchange, slot, 5));
    assert_eq!(exchange.lower(0, 5), Ok(SumAction::Hold));
    answers(&mut exchange, 0);
    assert_eq!((exchange.complete_step(), exchange.skip(None, 5)), (None, Ok(true)));
    assert_eq!(exchange.release_next().map(|(slot, update)| (slot, update.step)), Some((0, 5)));
    assert_eq!((exchange.release_next(), exchange.updates(0)), (None, 0));
    answers(&mut exchange, 0);
    // The chunk is complete at the next step before the other is at this one.
    push(&mut exchange, 0, 6);
    assert_eq!(exchange.lower(0, 6), Ok(SumAction::Hold));
    assert_eq!((exchange.release_chunk(0), exchange.complete_step()), (None, None));
    assert_eq!(exchange.lower(1, 5), Ok(SumAction::Hold));
    assert_eq!((exchange.complete_step(), exchange.held_step()), (Some(5), None));
    assert!(exchange.release_chunk(1).is_some(), "its step is over already");
    assert_eq!(exchange.updates(1), 0, "and has no update");
    answers(&mut exchange, 1);
    push(&mut exchange, 1, 6);
    assert_eq!(exchange.lower(1, 6), Ok(SumAction::Hold));
    assert_eq!(exchange.held_step(), Some(6));
    assert_eq!(exchange.release(None, 6), Ok(true));
    assert_eq!([0, 1].map(|_| exchange.release_next().unwrap().1.number), [1, 1]);
}

#[test]
fn rank_0_may_repeat_among_sites_what_came_from_another() {
    let rules = Rules { workers: 3, first_site: 1, ..two_phases(1).rules };
    let mut exchange = Exchange::among_sites(
        rules,
        [ChunkReach { members: 2, together: 2, has_above: false, site_first: false }],
    );
    exchange.initialise(0, Some(0), 0).unwrap();
    answer_all(&mut exchange, 0);
    for member in 0..2 {
        exchange.push(0, member, 0, Answer::Parameters).unwrap();
    }
    assert_eq!(
        [None, Some(0), Some(0)].map(|from| exchange.release(from, 0)),
        [Ok(true), Ok(false), Ok(false)]
    );
    assert_eq!(exchange.release(Some(0), 1), Err(ProtocolViolation::Released(1)), "it waits for the norm");
}

#[test]
fn all_chunks_of_a_two_phase_job_start_from_one_version() {
    let mut exchange = two_phases(2);
    exchange.initialise(1, Some(0), 5).unwrap();
    assert_eq!(exchange.initialise(0, Some(0), 6), Err(ProtocolViolation::Versions { expected: 5, got: 6 }));
    exchange.initialise(0, Some(0), 5).unwrap();
}

#[test]
fn rank_zero_must_stay_to_release_what_is_held() {
    let start = |exchange: &mut Exchange| {
        for slot in 0..2 {
            exchange.initialise(slot, Some(0), 0).unwrap();
            answer_all(exchange, slot);
        }
    };
    let push = |exchange: &mut Exchange, slot, rank| {
        exchange.push(slot, rank, 0, Answer::Applied).unwrap();
        exchange.check_waits(slot)
    };
    let stranded = Err(LeftWhileAwaited { member: 0, awaited: Awaited::Release(0) });
    // It has pushed all its chunks and leaves before the others have.
    let mut exchange = two_phases(2);
    start(&mut exchange);
    (0..2).for_each(|slot| push(&mut exchange, slot, 0).unwrap());
    assert_eq!(exchange.leave(0, |_, _, _| {}), Ok(()), "no rank waits yet");
    assert_eq!(push(&mut exchange, 0, 1), stranded);
    // It leaves while all members wait, and after it has released.
    for released in [false, true] {
        let mut exchange = two_phases(2);
        start(&mut exchange);
        (0..4).for_each(|number| push(&mut exchange, number / 2, number % 2).unwrap());
        if released {
            exchange.release(Some(0), 0).unwrap();
            exchange.release_next().unwrap();
        }
        let left = exchange.leave(0, |_, _, _| {});
        assert_eq!(left, if released { Ok(()) } else { stranded });
        // The other rank may leave at any time.
        let mut exchange = two_phases(1);
        exchange.initialise(0, Some(0), 0).unwrap();
        answer_all(&mut exchange, 0);
        (0..2).for_each(|rank| push(&mut exchange, 0, rank).unwrap());
        assert_eq!(exchange.leave(1, |_, _, _| {}), Ok(()));
    }
}
