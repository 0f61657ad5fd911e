use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::wire::Operation;

const BYTES_MAX: u32 = 40;
const PIECE_BYTES: u32 = 8;

fn states(ranks: u32) -> ProgramStates {
    ProgramStates::new(ranks, BYTES_MAX, PIECE_BYTES)
}

/// Saves a whole state, and reads the answer.
fn save(states: &mut ProgramStates, rank: u32, step: u32, state: &[u8]) {
    send(states, rank, &StateInPieces::new(step, state, PIECE_BYTES)).unwrap();
    assert_eq!(states.saved(rank), Some(step));
    states.saved_begun(rank);
}

fn send(states: &mut ProgramStates, rank: u32, state: &StateInPieces) -> Result<(), ProgramStateViolation> {
    for number in 0..state.pieces() {
        let (header, payload) = state.piece(number);
        let is_complete = states.save(rank, &Piece::read(&header, payload).unwrap())?;
        assert_eq!(is_complete, number + 1 == state.pieces());
    }
    Ok(())
}

/// Hands the hub's pieces to the worker until the pull has ended.
fn receive(states: &mut ProgramStates, rank: u32, requests: &mut ProgramStateRequests) -> PulledState {
    loop {
        let piece = states.next_piece(rank).expect("a piece is due");
        let mut payload = Vec::new();
        piece.write(&mut payload);
        let header = piece.header(Operation::ProgramState);
        assert_eq!(header.length as usize, payload.len());
        assert!(payload.len() <= payload_bytes_max(PIECE_BYTES, BYTES_MAX));
        let ended = requests.piece(&Piece::read(&header, &payload).unwrap()).unwrap();
        states.piece_begun(rank);
        if let Some(pulled) = ended {
            assert_eq!(states.next_piece(rank), None, "nothing follows");
            return pulled;
        }
    }
}

fn pull(states: &mut ProgramStates, rank: u32, step: u32) -> PulledState {
    let mut requests = ProgramStateRequests::new(BYTES_MAX);
    requests.begin_pull(step);
    states.pull(rank, step).unwrap();
    receive(states, rank, &mut requests)
}

#[test]
fn a_checkpoint_shares_the_states_of_its_step_and_a_later_job_begins_with_them() {
    let mut first = states(3);
    for (rank, step) in [(0, 6), (0, 7), (1, 7), (1, 8)] {
        save(&mut first, rank, step, format!("{rank} at {step}").as_bytes());
    }
    let taken: Vec<_> = first.of_step(7).collect();
    let texts: Vec<_> = taken.iter().map(|(rank, bytes)| (*rank, str::from_utf8(bytes).unwrap())).collect();
    assert_eq!(texts, [(0, "0 at 7"), (1, "1 at 7")], "rank 2 has saved none");
    while first.free_one().is_some() {}

    let mut later = states(2);
    for (rank, bytes) in taken {
        later.restore(rank, 7, bytes.to_vec());
    }
    assert_eq!(pull(&mut later, 1, 7), Some(b"1 at 7".to_vec()));
    assert_eq!(later.newest_common(), Some(7), "all can go back to it");
    save(&mut later, 0, 8, b"eight");
    later.restore(0, 7, b"too late".to_vec());
    assert_eq!(later.get(0, 7), Some(&b"0 at 7"[..]));
    let mut small = ProgramStates::new(1, 3, 3);
    small.restore(0, 7, b"four".to_vec());
    small.restore(1, 7, b"one".to_vec());
    assert_eq!(small.newest_common(), None);
}

#[test]
fn the_three_newest_states_of_each_rank_are_kept_and_the_same_step_is_replaced() {
    let mut states = states(2);
    save(&mut states, 0, 3, b"three");
    save(&mut states, 0, 4, &[4; 40]);
    assert_eq!((states.newest(0), states.newest(1), states.newest_common()), (Some(4), None, Some(4)));
    save(&mut states, 0, 4, b"");
    assert_eq!((pull(&mut states, 0, 3), pull(&mut states, 0, 4)), (Some(b"three".to_vec()), Some(vec![])));
    save(&mut states, 0, 8, b"eight");
    save(&mut states, 0, 9, b"nine");
    save(&mut states, 1, 5, b"other");
    assert_eq!((pull(&mut states, 0, 3), pull(&mut states, 0, 9)), (None, Some(b"nine".to_vec())));
    assert_eq!(states.newest_common(), Some(5));
    assert_eq!(pull(&mut states, 1, 9), None, "a rank that has saved any state has its own only");
    states.begin_again(4, 2);
    assert_eq!((states.newest(0), states.newest(1)), (Some(4), None));
    save(&mut states, 0, 5, b"again");
    assert_eq!(states.get(0, 5), Some(&b"again"[..]));
}

#[test]
fn each_offence_is_refused_and_changes_nothing() {
    let mut states = states(1);
    save(&mut states, 0, 5, b"five");
    let piece = |step, offset, total, bytes: &'static [u8]| Piece { step, offset, total, bytes };
    let offences: [(Piece<'_>, &str); 7] = [
        (piece(4, 0, 1, b"a"), "it saved that of step 4 after that of step 5"),
        (
            piece(6, 0, 41, b"a"),
            "that of step 6 has 41 bytes, more than the 40 of the job's `program_state_bytes`",
        ),
        (piece(6, 0, u32::MAX, b""), "more than the 40"),
        (piece(6, 8, 40, b"a"), "a piece of step 6 begins at byte 8, but byte 0 of step 6 is due"),
        (piece(6, 0, 2, b"abc"), "a piece of 3 of 2 bytes at byte 0 does not fit that of step 6"),
        (piece(6, 0, 2, b""), "a piece of 0 of 2 bytes"),
        (piece(6, u32::MAX, 2, b"ab"), "begins at byte 4294967295"),
    ];
    for (offence, reason) in offences {
        let refused = states.save(0, &offence).unwrap_err().to_string();
        assert!(refused.contains(reason), "{refused}");
    }
    assert_eq!(states.save(0, &piece(6, 0, 4, b"ab")), Ok(false));
    for (offence, reason) in [
        (piece(6, 0, 4, b"ab"), "a piece of step 6 begins at byte 0, but byte 2 of step 6 is due"),
        (piece(7, 2, 4, b"ab"), "a piece of step 7 begins at byte 2, but byte 2 of step 6 is due"),
        (piece(6, 2, 4, b"abc"), "does not fit"),
        (piece(6, 2, 3, b"a"), "does not fit"),
        (piece(6, 2, 4, b""), "does not fit"),
    ] {
        let refused = states.save(0, &offence).unwrap_err().to_string();
        assert!(refused.contains(reason), "{refused}");
    }
    assert_eq!(states.save(0, &piece(6, 2, 4, b"cd")), Ok(true));
    let early = states.save(0, &piece(7, 0, 1, b"a")).unwrap_err();
    assert_eq!(early, ProgramStateViolation::SaveUnderWay { step: 7, before: 6 });
    states.pull(0, 6).unwrap();
    let twice = states.pull(0, 5).unwrap_err();
    assert_eq!(twice, ProgramStateViolation::PullUnderWay { step: 5, before: 6 });
    assert_eq!(states.get(0, 6), Some(&b"abcd"[..]));
}

#[test]
fn a_state_that_changes_while_it_is_sent_is_sent_from_its_beginning_or_not_at_all() {
    let mut states = states(1);
    for change in ["replaced", "dropped", "saved again after it was forgotten"] {
        states.begin_again(0, 1);
        save(&mut states, 0, 1, &[1; 30]);
        let mut requests = ProgramStateRequests::new(BYTES_MAX);
        requests.begin_pull(1);
        states.pull(0, 1).unwrap();
        let first = states.next_piece(0).unwrap();
        assert_eq!(requests.piece(&first), Ok(None));
        states.piece_begun(0);
        let expected = match change {
            "replaced" => {
                save(&mut states, 0, 1, &[2; 20]);
                Some(vec![2; 20])
            }
            "dropped" => {
                (2..5).for_each(|step| save(&mut states, 0, step, b"later"));
                None
            }
            _ => {
                states.begin_again(0, 1);
                save(&mut states, 0, 1, &[3; 9]);
                Some(vec![3; 9])
            }
        };
        assert_eq!(receive(&mut states, 0, &mut requests), expected, "{change}");
    }
}

#[test]
fn a_rank_that_was_not_there_before_gets_the_state_of_the_lowest_whole() {
    let mut states = states(3);
    assert_eq!(pull(&mut states, 2, 4), None, "nobody has one");
    save(&mut states, 1, 4, &[1; 30]);
    save(&mut states, 0, 5, b"five");
    assert_eq!(pull(&mut states, 2, 4), Some(vec![1; 30]), "the lowest that has one of the step");
    let mut requests = ProgramStateRequests::new(BYTES_MAX);
    requests.begin_pull(4);
    states.pull(2, 4).unwrap();
    assert_eq!(requests.piece(&states.next_piece(2).unwrap()), Ok(None));
    states.piece_begun(2);
    save(&mut states, 1, 4, &[2; 30]);
    assert_eq!(receive(&mut states, 2, &mut requests), Some(vec![2; 30]), "from its beginning again");
    save(&mut states, 2, 5, b"own");
    assert_eq!(pull(&mut states, 2, 5), Some(b"own".to_vec()));
    // Rank 2 is not there any more, and then there again.
    states.begin_again(5, 2);
    assert_eq!((states.newest(2), states.newest_common()), (None, Some(4)));
    assert_eq!(pull(&mut states, 2, 5), Some(b"five".to_vec()));
}

#[test]
fn a_cut_stream_repeats_what_was_under_way() {
    let mut states = states(1);
    save(&mut states, 0, 1, &[1; 30]);
    let mut requests = ProgramStateRequests::new(BYTES_MAX);
    let save = Arc::new(StateInPieces::new(2, &[2; 30], PIECE_BYTES));
    requests.begin_save(Arc::clone(&save));
    requests.begin_pull(1);
    // The second piece is lost, and so is the rest of the answer.
    let (header, payload) = save.piece(0);
    assert_eq!(states.save(0, &Piece::read(&header, payload).unwrap()), Ok(false));
    states.pull(0, 1).unwrap();
    requests.piece(&states.next_piece(0).unwrap()).unwrap();
    states.piece_begun(0);
    states.cut(0);
    assert_eq!((states.next_piece(0), states.saved(0)), (None, None));
    let (Some(save), Some(step)) = requests.resend() else { panic!("both are under way") };
    send(&mut states, 0, &save).unwrap();
    // The answer is lost, too, so that a state which is saved already comes again.
    states.cut(0);
    send(&mut states, 0, &requests.resend().0.unwrap()).unwrap();
    requests.save_left();
    requests.saved(states.saved(0).unwrap()).unwrap();
    states.pull(0, step).unwrap();
    assert_eq!(receive(&mut states, 0, &mut requests), Some(vec![1; 30]));
    assert!(matches!(requests.resend(), (None, None)));
    assert_eq!(states.get(0, 2), Some(&[2; 30][..]));
}

#[test]
fn an_answer_to_nothing_is_refused() {
    let mut requests = ProgramStateRequests::new(BYTES_MAX);
    assert_eq!(requests.saved(1), Err(UnexpectedState::Saved(1)));
    let piece = Piece { step: 1, offset: 0, total: 41, bytes: b"a" };
    assert_eq!(requests.piece(&piece), Err(UnexpectedState::Unasked(1)));
    requests.begin_pull(1);
    assert_eq!(requests.piece(&Piece { step: 2, ..piece }), Err(UnexpectedState::Unasked(2)));
    let large = PieceError::TooLarge { step: 1, total: 41, most: 40 };
    assert_eq!(requests.piece(&piece), Err(UnexpectedState::Piece(large)));
    requests.begin_save(Arc::new(StateInPieces::new(3, b"", PIECE_BYTES)));
    assert_eq!(requests.saved(3), Err(UnexpectedState::Saved(3)), "it has not left");
    requests.save_left();
    assert_eq!(requests.saved(2), Err(UnexpectedState::Saved(2)));
    assert_eq!(requests.underway().collect::<Vec<_>>(), [3, 1]);
    assert_eq!(requests.saved(3), Ok(()));
}

/// What a rank does next.
#[derive(Clone, Debug)]
enum Action {
    /// Saves a state of so many steps after the newest, but for so many pieces.
    Save {
        rank: u32,
        further: u32,
        bytes: u32,
        without: u32,
    },
    Pull {
        rank: u32,
        step: u32,
    },
    BeginAgain {
        step: u32,
        ranks: u32,
    },
    Cut(u32),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let (rank, step) = (0u32..3, 0u32..12);
    let save = (rank.clone(), 0u32..3, 0u32..=BYTES_MAX, 0u32..3)
        .prop_map(|(rank, further, bytes, without)| Action::Save { rank, further, bytes, without });
    let pull = (rank.clone(), step.clone()).prop_map(|(rank, step)| Action::Pull { rank, step });
    let action = prop_oneof![
        4 => save,
        3 => pull,
        1 => (step, 1u32..4).prop_map(|(step, ranks)| Action::BeginAgain { step, ranks }),
        1 => rank.prop_map(Action::Cut),
    ];
    prop::collection::vec(action, 0..40)
}

proptest! {
    #[test]
    fn the_states_are_those_of_a_map(actions in actions()) {
        let mut states = states(3);
        let mut model: [BTreeMap<u32, Vec<u8>>; 3] = Default::default();
        for (number, action) in actions.into_iter().enumerate() {
            match action {
                Action::Save { rank, further, bytes, without } => {
                    let kept = &mut model[rank as usize];
                    let step = kept.last_key_value().map_or(0, |(&step, _)| step) + further;
                    let bytes = vec![number as u8; bytes as usize];
                    let whole = StateInPieces::new(step, &bytes, PIECE_BYTES);
                    let sent = whole.pieces().saturating_sub(without);
                    for piece in 0..sent {
                        let (header, payload) = whole.piece(piece);
                        states.save(rank, &Piece::read(&header, payload).unwrap()).unwrap();
                    }
                    if sent == whole.pieces() {
                        prop_assert_eq!(states.saved(rank), Some(step));
                        states.saved_begun(rank);
                        kept.insert(step, bytes);
                        while kept.len() > KEPT_MAX {
                            kept.pop_first();
                        }
                    } else {
                        states.cut(rank);
                    }
                }
                Action::Pull { rank, step } => {
                    let own = &model[rank as usize];
                    let expected = match own.is_empty() {
                        true => model.iter().find_map(|kept| kept.get(&step)),
                        false => own.get(&step),
                    };
                    prop_assert_eq!(pull(&mut states, rank, step), expected.cloned());
                }
                Action::BeginAgain { step, ranks } => {
                    states.begin_again(step, ranks);
                    for (rank, kept) in (0..).zip(&mut model) {
                        kept.retain(|&of, _| of <= step && rank < ranks);
                    }
                }
                Action::Cut(rank) => states.cut(rank),
            }
            let newest = |kept: &BTreeMap<u32, Vec<u8>>| kept.last_key_value().map(|(&step, _)| step);
            for (rank, kept) in (0..).zip(&model) {
                prop_assert_eq!(states.newest(rank), newest(kept));
                for step in 0..20 {
                    prop_assert_eq!(states.get(rank, step), kept.get(&step).map(|bytes| &bytes[..]));
                }
            }
            prop_assert_eq!(states.newest_common(), model.iter().filter_map(newest).min());
        }
        let kept: usize = model.iter().map(BTreeMap::len).sum();
        prop_assert_eq!(std::iter::from_fn(|| states.free_one()).count(), kept);
    }

    #[test]
    fn a_state_is_cut_into_pieces_that_make_it_again(state in prop::collection::vec(any::<u8>(), 0..41), piece in 1u32..50) {
        let cut = StateInPieces::new(7, &state, piece);
        let mut states = ProgramStates::new(1, BYTES_MAX, piece);
        send(&mut states, 0, &cut).unwrap();
        prop_assert_eq!(states.get(0, 7), Some(&state[..]));
    }
}
