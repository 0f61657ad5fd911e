use paramhub_core::consistency::Consistency;
use paramhub_core::key::Key;
use paramhub_core::program_states::Piece;
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_kernels::Hyperparameters;

use super::tests::{header, push_pull, shard, take, wire};
use super::*;
use crate::core::restored::Restored;
use crate::core::shard::memory_bytes;
use crate::core::snapshot::{Snapshot, SnapshotOutcome, SnapshotTarget};

/// Chunks of 256 elements: one key has three and a bit, another one has a single element.
const SIZES: [u64; 2] = [3 * 256 + 9, 1];
const CHUNKS: u32 = 5;

/// A shard that has its parameters, with memory for one snapshot.
fn begun(change: impl FnOnce(&mut Settings)) -> (Shard, Box<Snapshot>) {
    let keys = (0..).zip(SIZES).map(|(number, size)| Key::new(format!("k{number}"), [size])).collect();
    let plan = shard(1, keys, |settings| {
        let hyperparameters = Hyperparameters { learning_rate: 0.1, momentum: 0.9, ..Default::default() };
        settings.optimizer =
            OptimizerChoice { hyperparameters: Some(hyperparameters), ..OptimizerChoice::named("sgd") };
        change(settings);
    });
    let mut shard = Shard::new(ShardPlan { checkpoints: true, ..plan.plan().clone() }).unwrap();
    let snapshot = shard.hand_out_snapshot().expect("it was asked for");
    for chunk in 0..CHUNKS {
        let payload = wire(&vec![1.0; len(&shard, chunk)]);
        take(&mut shard, 0, &header(Operation::Initialise, chunk, 0, &payload), &payload).unwrap();
        forget_answers(&mut shard, chunk);
    }
    (shard, snapshot)
}

fn len(shard: &Shard, chunk: u32) -> usize {
    shard.slots[shard.locate(chunk).unwrap() as usize].elements as usize
}

fn forget_answers(shard: &mut Shard, chunk: u32) {
    let index = shard.locate(chunk).unwrap();
    while shard.outboxes[0].applied.pop_first().or_else(|| shard.outboxes[0].parameters.pop_first()).is_some()
    {
    }
    shard.answer_begun(0, index);
}

fn step(shard: &mut Shard, chunk: u32) {
    let index = shard.locate(chunk).unwrap();
    let step = shard.exchange.step(index);
    let gradient: Vec<f32> = (0..len(shard, chunk))
        .map(|i| ((i as u32 * 7 + chunk * 31 + step * 13) % 97) as f32 / 97.0)
        .collect();
    push_pull(shard, 0, chunk, step, &gradient).unwrap();
    forget_answers(shard, chunk);
}

/// A chunk after this many steps, without snapshots.
fn expected(chunk: u32, steps: u32) -> (Vec<f32>, Vec<f32>) {
    let (mut shard, _) = begun(|_| {});
    (0..steps).for_each(|_| step(&mut shard, chunk));
    let slot = shard.slots[shard.locate(chunk).unwrap() as usize];
    (shard.model.parameters[slot.range()].to_vec(), shard.model.state[slot.range()].to_vec())
}

fn is_of_version(snapshot: &Snapshot, version: u32) {
    assert_eq!(snapshot.outcome, SnapshotOutcome::Complete);
    for (position, (key, first, elements, mark)) in snapshot.chunks().enumerate() {
        assert_eq!((mark.version, mark.updates), (version, u64::from(version)));
        let chunk = if key == 1 { 4 } else { (first / 256) as u32 };
        let (model, state) = expected(chunk, version);
        assert_eq!(model.len(), elements as usize);
        assert_eq!(snapshot.parameters(position), model, "chunk {chunk} at {version}");
        assert_eq!(
            snapshot.state(position, 0).collect::<Vec<_>>().concat(),
            state,
            "chunk {chunk} at {version}"
        );
    }
}

#[test]
fn every_chunk_is_copied_at_the_version_however_chunks_and_turns_race() {
    let mut random = 12_345_u32;
    let mut next = |below: u32| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 8) % below
    };
    let (mut shard, mut snapshot) = begun(|_| {});
    let mut version = 0;
    for round in 0..40 {
        // Some chunks are at the version already, none is beyond it.
        version += 1 + next(3);
        let at = |shard: &Shard, chunk: u32| shard.exchange.step(shard.locate(chunk).unwrap());
        for _ in 0..next(60) {
            let chunk = next(CHUNKS);
            if at(&shard, chunk) < version {
                step(&mut shard, chunk);
            }
        }
        shard.arm(SnapshotTarget::Version(version), snapshot);
        let ended = loop {
            match next(3) {
                0 => shard.copy_some(1),
                _ => {
                    let chunk = next(CHUNKS);
                    // One chunk may be two steps ahead of another.
                    if at(&shard, chunk) <= version + 1 {
                        step(&mut shard, chunk);
                    }
                }
            }
            if let Some(ended) = shard.ended_snapshot() {
                break ended;
            }
        };
        is_of_version(&ended, version);
        assert!(shard.ended_snapshot().is_none() && !shard.is_copying(), "round {round}");
        version += 1;
        snapshot = ended;
    }
}

#[test]
fn a_version_that_is_past_is_missed_and_one_to_come_is_called_off() {
    let (mut shard, snapshot) = begun(|_| {});
    (0..4).for_each(|_| step(&mut shard, 2));
    shard.arm(SnapshotTarget::Version(3), snapshot);
    assert!(shard.ended_snapshot().is_none());
    shard.copy_some(usize::MAX);
    let missed = shard.ended_snapshot().unwrap();
    assert_eq!((missed.outcome, missed.newest), (SnapshotOutcome::Missed, 4));

    shard.arm(SnapshotTarget::Version(5), missed);
    shard.copy_some(usize::MAX);
    step(&mut shard, 2);
    assert!(shard.ended_snapshot().is_none(), "four chunks are missing");
    shard.disarm();
    let off = shard.ended_snapshot().unwrap();
    assert_eq!((off.outcome, off.newest), (SnapshotOutcome::Disarmed, 5));
}

#[test]
fn a_chunk_that_is_not_updated_with_the_others_is_reported() {
    let (mut shard, snapshot) = begun(|_| {});
    shard.arm(SnapshotTarget::Version(2), snapshot);
    shard.copy_some(usize::MAX);
    for round in 0..11 {
        assert!(shard.ended_snapshot().is_none(), "round {round}");
        (0..4).for_each(|chunk| step(&mut shard, chunk));
    }
    step(&mut shard, 0);
    let lagging = shard.ended_snapshot().unwrap();
    assert_eq!(
        (lagging.outcome, lagging.newest, lagging.missing_key()),
        (SnapshotOutcome::Lagging, 12, Some(1))
    );
}

#[test]
fn chunks_without_a_common_version_are_copied_as_they_are() {
    let (mut shard, snapshot) = begun(|settings| settings.consistency = Consistency::Asynchronous);
    (0..3).for_each(|_| step(&mut shard, 0));
    step(&mut shard, 4);
    shard.arm(SnapshotTarget::Now, snapshot);
    shard.copy_some(1);
    // A chunk that was copied moves on, and so does one that was not.
    step(&mut shard, 0);
    step(&mut shard, 1);
    shard.copy_some(usize::MAX);
    let ended = shard.ended_snapshot().unwrap();
    let versions: Vec<u32> = ended.chunks().map(|(.., mark)| mark.version).collect();
    assert_eq!(versions, [3, 1, 0, 0, 1]);
    for (position, (&version, chunk)) in versions.iter().zip(0..).enumerate() {
        assert_eq!(ended.parameters(position), expected(chunk, version).0);
    }
}

#[test]
fn a_shard_goes_on_from_what_another_has_left() {
    let (mut shard, snapshot) = begun(|_| {});
    for chunk in 0..CHUNKS {
        (0..3).for_each(|_| step(&mut shard, chunk));
    }
    shard.arm(SnapshotTarget::Version(3), snapshot);
    shard.copy_some(usize::MAX);
    let ended = shard.ended_snapshot().unwrap();
    // Its chunks differ from those that were copied.
    let keys = (0..).zip(SIZES).map(|(number, size)| Key::new(format!("k{number}"), [size])).collect();
    let optimizer = shard.plan.settings.optimizer.clone();
    let other = super::tests::shard(1, keys, |settings| {
        (settings.chunk_bytes, settings.optimizer) = (4096, optimizer);
    });
    let mut restored = Restored::room(other.plan(), 3, ended.hyperparameters.clone()).unwrap();
    for (position, (key, first, _, mark)) in ended.chunks().enumerate() {
        let slot = other.slots.iter().position(|slot| slot.key == key).unwrap() as u32;
        restored.put_parameters(slot, first as usize, ended.parameters(position));
        let state = ended.state(position, 0).collect::<Vec<_>>().concat();
        restored.put_state(slot, 0, first as usize, &state);
        restored.put_updates(slot, mark.updates);
    }
    let mut resumed = Shard::reserve(other.plan().clone(), Some(restored)).unwrap();
    while resumed.open_some(1 << 20) {}
    let payload = wire(&vec![0.0; 777]);
    let refused = take(&mut resumed, 0, &header(Operation::Initialise, 0, 0, &payload), &payload);
    assert!(refused.unwrap_err().message("rank 0").contains("parameters to start from come once"));
    let early = push_pull(&mut resumed, 0, 0, 2, &[0.0; 777]).unwrap_err().message("rank 0");
    assert!(early.contains("step 2 was pushed, but step 3 is due"), "{early}");
    let gradient: Vec<f32> = (0..4)
        .flat_map(|chunk: u32| {
            (0..len(&shard, chunk)).map(move |i| ((i as u32 * 7 + chunk * 31 + 39) % 97) as f32 / 97.0)
        })
        .collect();
    push_pull(&mut resumed, 0, 0, 3, &gradient).unwrap();
    let slot = resumed.slots.iter().find(|slot| slot.key == 0).unwrap();
    let whole: Vec<f32> = (0..4).flat_map(|chunk| expected(chunk, 4).0).collect();
    assert_eq!(resumed.model.parameters[slot.range()], whole);
}

#[test]
fn a_job_that_goes_on_from_a_checkpoint_needs_no_more_memory_than_another() {
    const CHUNK: u64 = 16 << 10;
    const CHUNKS: u32 = 64;
    const PART: usize = 64 << 10;
    let hyperparameters = Hyperparameters { learning_rate: 0.1, momentum: 0.9, ..Default::default() };
    let fresh = shard(1, vec![Key::new("w", [u64::from(CHUNKS) * CHUNK])], |settings| {
        settings.chunk_bytes = 4 * CHUNK as u32;
        settings.optimizer =
            OptimizerChoice { hyperparameters: Some(hyperparameters), ..OptimizerChoice::named("sgd") };
    });
    let mut restored = Restored::room(fresh.plan(), 3, vec![hyperparameters]).unwrap();
    for slot in 0..CHUNKS {
        restored.put_parameters(slot, 0, &[slot as f32; CHUNK as usize]);
        restored.put_state(slot, 0, 0, &[-(slot as f32); CHUNK as usize]);
        restored.put_updates(slot, 3);
    }
    let most = memory_bytes(fresh.plan()) + 4 * PART as u64;
    let mut resumed = Shard::reserve(fresh.plan().clone(), Some(restored)).unwrap();
    let mut parts = 0;
    while resumed.open_some(PART) {
        parts += 1;
        let taken = resumed.touched_bytes();
        assert!(taken <= most, "{taken} bytes after {parts} parts, of which there are to be {most}");
    }
    assert!(parts > CHUNKS, "{parts} parts");
    for (slot, value) in resumed.slots.iter().zip(0_u32..) {
        assert!(
            resumed.model.parameters[slot.range()].iter().all(|&found| found == value as f32),
            "chunk {value}"
        );
        assert!(
            resumed.model.state[slot.range()].iter().all(|&found| found == -(value as f32)),
            "chunk {value}"
        );
    }
    // A shard that ends while it restores gives everything back.
    let mut restored = Restored::room(fresh.plan(), 3, vec![hyperparameters]).unwrap();
    (0..CHUNKS).for_each(|slot| restored.put_updates(slot, 3));
    let mut ending = Shard::reserve(fresh.plan().clone(), Some(restored)).unwrap();
    for _ in 0..CHUNKS / 2 {
        assert!(ending.open_some(PART), "it is on its way");
    }
    ending.close();
    while ending.free_some(PART) {}
    assert_eq!((ending.touched_bytes(), ending.counters().memory_bytes), (0, 0));
}

/// A shard of one rank that saves program states.
fn begun_with_program_states() -> (Shard, Box<Snapshot>) {
    let (shard, _) = begun(|_| {});
    let mut shard = Shard::new(ShardPlan { program_state_bytes: 100, ..shard.plan().clone() }).unwrap();
    let snapshot = shard.hand_out_snapshot().unwrap();
    for chunk in 0..CHUNKS {
        let payload = wire(&vec![1.0; len(&shard, chunk)]);
        take(&mut shard, 0, &header(Operation::Initialise, chunk, 0, &payload), &payload).unwrap();
        forget_answers(&mut shard, chunk);
    }
    (shard, snapshot)
}

fn save(shard: &mut Shard, step: u32) {
    let state = format!("state of {step}");
    let piece = Piece { step, offset: 0, total: state.len() as u32, bytes: state.as_bytes() };
    let mut payload = Vec::new();
    piece.write(&mut payload);
    take(shard, 0, &piece.header(Operation::SaveProgramState), &payload).unwrap();
    shard.program_states.saved_begun(0);
}

fn states(snapshot: &Snapshot) -> Vec<(u32, &str)> {
    snapshot.program_states.iter().map(|(rank, bytes)| (*rank, str::from_utf8(bytes).unwrap())).collect()
}

#[test]
fn a_snapshot_waits_for_the_program_states_of_its_version() {
    let (mut shard, snapshot) = begun_with_program_states();
    save(&mut shard, 0);
    shard.arm(SnapshotTarget::Version(1), snapshot);
    (0..CHUNKS).for_each(|chunk| step(&mut shard, chunk));
    assert!(shard.ended_snapshot().is_none(), "the rank has not come to save the state of step 1");
    save(&mut shard, 1);
    let snapshot = shard.ended_snapshot().unwrap();
    is_of_version(&snapshot, 1);
    assert_eq!(states(&snapshot), [(0, "state of 1")]);

    // A program that does not save every step has gone past this one.
    shard.arm(SnapshotTarget::Version(2), snapshot);
    (0..CHUNKS).for_each(|chunk| step(&mut shard, chunk));
    assert!(shard.ended_snapshot().is_none());
    step(&mut shard, 0);
    let snapshot = shard.ended_snapshot().unwrap();
    is_of_version(&snapshot, 2);
    assert_eq!(states(&snapshot), []);

    // The rank has left with this step: there is nothing to wait for.
    shard.arm(SnapshotTarget::Version(3), snapshot);
    shard.copy_some(usize::MAX);
    (1..CHUNKS).for_each(|chunk| step(&mut shard, chunk));
    assert!(shard.ended_snapshot().is_none());
    shard.disarm();
    let snapshot = shard.ended_snapshot().unwrap();
    is_of_version(&snapshot, 3);
    assert_eq!(states(&snapshot), []);

    // Chunks go back meanwhile: what would come are the states of another way to the version.
    shard.arm(SnapshotTarget::Version(4), snapshot);
    (0..CHUNKS).for_each(|chunk| step(&mut shard, chunk));
    shard.miss_snapshot();
    assert_eq!(shard.ended_snapshot().unwrap().outcome, SnapshotOutcome::Missed);
}

#[test]
fn a_hub_that_takes_over_has_no_snapshot_of_a_version_whose_program_states_are_lost() {
    let (mut shard, snapshot) = begun_with_program_states();
    (0..CHUNKS).for_each(|chunk| step(&mut shard, chunk));
    shard.take_over_program_states();
    // One step is made. The rank may be two ahead, and have saved the states of steps 2 and 3 elsewhere, and of 1.
    shard.arm(SnapshotTarget::Version(4), snapshot);
    let snapshot = shard.ended_snapshot().unwrap();
    assert_eq!((snapshot.outcome, snapshot.newest), (SnapshotOutcome::Missed, 4));
    shard.arm(SnapshotTarget::Version(5), snapshot);
    for made in 2..=5 {
        (0..CHUNKS).for_each(|chunk| step(&mut shard, chunk));
        assert!(shard.ended_snapshot().is_none());
        save(&mut shard, made);
    }
    let snapshot = shard.ended_snapshot().unwrap();
    is_of_version(&snapshot, 5);
    assert_eq!(states(&snapshot), [(0, "state of 5")]);
    // The rank saves its states seldom, and has saved none here before.
    let (mut shard, snapshot) = begun_with_program_states();
    shard.take_over_program_states();
    shard.arm(SnapshotTarget::Version(4), snapshot);
    for _ in 0..4 {
        (0..CHUNKS).for_each(|chunk| step(&mut shard, chunk));
    }
    assert!(shard.ended_snapshot().is_none());
    save(&mut shard, 4);
    assert_eq!(states(&shard.ended_snapshot().unwrap()), [(0, "state of 4")]);
    // It has left: the last checkpoint is that of the end.
    let (mut shard, snapshot) = begun_with_program_states();
    (0..CHUNKS).for_each(|chunk| step(&mut shard, chunk));
    shard.take_over_program_states();
    take(&mut shard, 0, &paramhub_core::wire::Header::bare(Operation::Leave), &[]).unwrap();
    shard.arm(SnapshotTarget::Version(1), snapshot);
    shard.copy_some(usize::MAX);
    is_of_version(&shard.ended_snapshot().unwrap(), 1);
}

#[test]
fn a_shard_begins_with_the_program_states_of_its_checkpoint() {
    let (shard, _) = begun_with_program_states();
    let mut restored = Restored::room(shard.plan(), 3, vec![Hyperparameters::default()]).unwrap();
    for index in 0..CHUNKS {
        restored.put_updates(index, 3);
    }
    restored.program_states = vec![(0, b"state of 3".to_vec())];
    let mut fresh = Shard::reserve(shard.plan().clone(), Some(restored)).unwrap();
    while fresh.open_some(1 << 20) {}
    assert_eq!(fresh.program_states.get(0, 3), Some(&b"state of 3"[..]));
}

#[test]
fn chunks_begin_anew_if_a_worker_is_lost_before_all_have_parameters() {
    let (shard, _) = begun(|_| {});
    let plan = ShardPlan { rewind_every: Some(1), ..shard.plan().clone() };
    let mut shard = Shard::new(plan).unwrap();
    let start = |shard: &mut Shard, chunks: std::ops::Range<u32>, value: f32| {
        for chunk in chunks {
            let payload = wire(&vec![value; len(shard, chunk)]);
            take(shard, 0, &header(Operation::Initialise, chunk, 0, &payload), &payload).unwrap();
            forget_answers(shard, chunk);
        }
    };
    start(&mut shard, 0..CHUNKS - 1, 5.0);
    (0..2).for_each(|_| step(&mut shard, 0));
    shard.stop_for_rewind();
    assert_eq!(shard.expect_after_rewind(0), Ok(None));
    shard.join_after_rewind(0, None).unwrap();
    while shard.is_rewinding() {
        shard.rewind_some(1);
    }
    start(&mut shard, 0..CHUNKS, 1.0);
    for chunk in 0..CHUNKS {
        (0..3).for_each(|_| step(&mut shard, chunk));
        let slot = shard.slots[shard.locate(chunk).unwrap() as usize];
        let found = (shard.model.parameters[slot.range()].to_vec(), shard.model.state_of(&slot).to_vec());
        assert!(found == expected(chunk, 3), "chunk {chunk} is not as if it had never begun before");
    }
}

#[test]
fn the_last_snapshot_of_a_job_without_workers_takes_its_chunks_back_to_a_common_version() {
    let (shard, _) = begun(|_| {});
    let mut shard = Shard::new(ShardPlan { rewind_every: Some(1), ..shard.plan().clone() }).unwrap();
    let mut snapshot = shard.hand_out_snapshot().unwrap();
    for chunk in 0..CHUNKS {
        let payload = wire(&vec![1.0; len(&shard, chunk)]);
        take(&mut shard, 0, &header(Operation::Initialise, chunk, 0, &payload), &payload).unwrap();
        forget_answers(&mut shard, chunk);
        (0..3).for_each(|_| step(&mut shard, chunk));
    }
    // The worker is lost in the midst of a step.
    [0, 2].iter().for_each(|&chunk| step(&mut shard, chunk));
    shard.stop_for_rewind();
    let end = |shard: &mut Shard| {
        while shard.is_copying() {
            shard.copy_some(1);
        }
        shard.ended_snapshot().unwrap()
    };
    // Another process may still come, so an ordinary snapshot takes nothing back.
    shard.arm(SnapshotTarget::Version(3), snapshot);
    snapshot = end(&mut shard);
    assert_eq!((snapshot.outcome, snapshot.goes_back_to), (SnapshotOutcome::Missed, None));
    snapshot.goes_back = true;
    shard.arm(SnapshotTarget::Version(u32::MAX), snapshot);
    snapshot = end(&mut shard);
    assert_eq!((snapshot.outcome, snapshot.goes_back_to), (SnapshotOutcome::Missed, Some(3)));
    shard.arm(SnapshotTarget::Version(3), snapshot);
    is_of_version(&end(&mut shard), 3);
}
