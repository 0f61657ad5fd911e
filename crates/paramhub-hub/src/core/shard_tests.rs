use std::sync::Arc;

use paramhub_core::chunk::ChunkMap;
use paramhub_core::codec::{Codec, Dtype};
use paramhub_core::composition::{Composed, Composition, Neighbour};
use paramhub_core::consistency::Consistency;
use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::norms::TensorSquares;
use paramhub_core::placement::{HubShape, InterfaceShape};
use paramhub_core::ports::Ports;
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_core::stragglers::Stragglers;
use paramhub_core::wire::{HEADER_BYTES, Header, Norm, Release, State, Tensors};
use paramhub_kernels::Registry;
use paramhub_transport::encryption::Encryption;

use super::*;
use crate::core::outbox::{Begun, Source};
use crate::core::shard::memory_bytes;
use crate::core::stepped_hub::plan_with;

/// A shard of all chunks of `keys`, on one core.
pub(in crate::core) fn shard(workers: u32, keys: Vec<Key>, change: impl FnOnce(&mut Settings)) -> Shard {
    shard_with(workers, keys, Stragglers::Wait, change)
}

/// [`shard`], for a job with stragglers.
pub(in crate::core) fn shard_with(
    workers: u32,
    keys: Vec<Key>,
    stragglers: Stragglers,
    change: impl FnOnce(&mut Settings),
) -> Shard {
    Shard::new(plan_with(workers, keys, stragglers, change)).unwrap()
}

pub(in crate::core) fn wire(values: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

pub(in crate::core) fn header(operation: Operation, chunk: u32, step: u32, payload: &[u8]) -> Header {
    Header { operation, codec: Codec::F32, chunk, step, length: payload.len() as u32 }
}

/// Checks and takes a frame as a lane does.
pub(in crate::core) fn take(
    shard: &mut Shard,
    rank: u32,
    header: &Header,
    payload: &[u8],
) -> Result<(), Fault> {
    let checked = shard.check(rank, header)?;
    shard.frame(rank, &checked, Payload::Here(payload))
}

pub(in crate::core) fn push_pull(
    shard: &mut Shard,
    rank: u32,
    chunk: u32,
    step: u32,
    values: &[f32],
) -> Result<(), Fault> {
    let payload = wire(values);
    take(shard, rank, &header(Operation::PushPull, chunk, step, &payload), &payload)
}

/// Takes the one answer that is owed to `rank`, as values.
pub(super) fn answer(shard: &mut Shard, rank: u32) -> (Header, Vec<f32>) {
    let slot = shard.outboxes[rank as usize].parameters.pop_first().expect("parameters are owed");
    let (header, payload) = shard.answer(rank, slot, Answer::Parameters);
    let values = payload.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    shard.answer_begun(rank, slot);
    (header, values)
}

#[test]
fn the_last_contribution_makes_the_mean_and_owes_it_to_all() {
    let mut shard = shard(3, vec![Key::new("w", [4])], |_| {});
    push_pull(&mut shard, 2, 0, 0, &[1.0, 2.0, 3.0, 4.0]).unwrap();
    push_pull(&mut shard, 0, 0, 0, &[1.0, 2.0, 3.0, 4.0]).unwrap();
    assert!(shard.dirty.is_empty(), "nothing is owed before all have contributed");
    push_pull(&mut shard, 1, 0, 0, &[1.0, 5.0, 0.0, -8.0]).unwrap();
    for rank in 0..3 {
        let (header, mean) = answer(&mut shard, rank);
        assert_eq!((header.operation, header.step), (Operation::Parameters, 1));
        assert_eq!(mean, [1.0, 3.0, 2.0, 0.0]);
    }
    assert_eq!((shard.counters().contributions, shard.counters().updates), (3, 1));
}

#[test]
fn reproducible_sums_do_not_depend_on_the_order_of_arrival() {
    // Values whose sum depends on the order of addition.
    let values = [1.0e8f32, 1.0, -1.0e8, 0.5];
    let expected = ((values[0] + values[1]) + values[2] + values[3]) * 0.25;
    assert_ne!(expected, ((values[3] + values[2]) + values[1] + values[0]) * 0.25);
    let mut order = [0u32, 1, 2, 3];
    // Heap's algorithm: all 24 orders.
    fn permutations(k: usize, order: &mut [u32; 4], visit: &mut impl FnMut(&[u32; 4])) {
        if k == 1 {
            return visit(order);
        }
        for i in 0..k {
            permutations(k - 1, order, visit);
            order.swap(if k.is_multiple_of(2) { i } else { 0 }, k - 1);
        }
    }
    let mut seen = 0;
    permutations(4, &mut order, &mut |order| {
        let mut shard = shard(4, vec![Key::new("w", [1])], |settings| settings.reproducible = true);
        for &rank in order {
            push_pull(&mut shard, rank, 0, 0, &[values[rank as usize]]).unwrap();
        }
        assert_eq!(answer(&mut shard, 0).1, [expected], "order {order:?}");
        seen += 1;
    });
    assert_eq!(seen, 24);
}

#[test]
fn a_frame_under_way_keeps_the_values_it_began_with() {
    let mut shard = shard(2, vec![Key::new("w", [2])], |settings| {
        settings.consistency = Consistency::Asynchronous;
    });
    push_pull(&mut shard, 0, 0, 0, &[1.0, 2.0]).unwrap();
    let (begun, _) = answer(&mut shard, 0);
    shard.outboxes[0].begun = Some(Begun { header: begun, source: Source::Model(0) });
    push_pull(&mut shard, 1, 0, 0, &[7.0, 8.0]).unwrap();
    let source = shard.outboxes[0].begun.unwrap().source;
    assert_eq!(source, Source::Spill);
    assert_eq!(shard.of_source(0, source), wire(&[1.0, 2.0]));
    assert_eq!(answer(&mut shard, 1).1, [7.0, 8.0], "what had not begun leaves with the newest values");
    shard.close();
    while shard.free_some(4096) {}
    assert_eq!(shard.of_source(0, source), wire(&[1.0, 2.0]), "it outlives even the job's buffers");
}

#[test]
fn state_is_given_back_to_its_place_and_keeps_its_values_under_way() {
    // Several blocks, of which the last is not whole, with Adam's two slots in turn.
    const ELEMENTS: usize = 3 * BLOCK_ELEMENTS + 7;
    let mut shard = shard(2, vec![Key::new("w", [ELEMENTS as u64])], |settings| {
        settings.optimizer.name = "adam".into();
        settings.consistency = Consistency::Asynchronous;
        settings.chunk_bytes = 1 << 20;
    });
    let values = |slot: usize| (0..ELEMENTS).map(|i| (i + slot * 10_000) as f32).collect::<Vec<_>>();
    let acknowledged = |shard: &mut Shard| {
        let slot = shard.outboxes[0].applied.pop_first().expect("an acknowledgement is owed");
        shard.answer_begun(0, slot);
    };
    for slot in 0..2 {
        let payload = [&State::head(41)[..], &wire(&values(slot))].concat();
        take(&mut shard, 0, &header(Operation::InitialiseState, 0, slot as u32, &payload), &payload).unwrap();
        acknowledged(&mut shard);
    }
    let payload = wire(&vec![0.0; ELEMENTS]);
    take(&mut shard, 0, &header(Operation::Initialise, 0, 0, &payload), &payload).unwrap();
    acknowledged(&mut shard);
    let pull = |shard: &mut Shard, slot: u32| {
        take(shard, 0, &header(Operation::PullState, 0, slot, &[]), &[]).unwrap();
        let index = shard.outboxes[0].state.pop_first().expect("state is owed");
        let answer = shard.stage_state(0, index);
        let (header, payload) = shard.answer(0, index, answer);
        let (header, payload) = (header, payload.to_vec());
        assert_eq!((header.operation, header.step), (Operation::State, slot));
        shard.answer_begun(0, index);
        (header, payload)
    };
    for slot in [1, 0] {
        let expected = wire(&values(slot));
        let (_, payload) = pull(&mut shard, slot as u32);
        assert_eq!(State::decode(&payload), Some(State { updates: 41, values: &expected }));
    }
    let (begun, payload) = pull(&mut shard, 1);
    shard.outboxes[0].begun = Some(Begun { header: begun, source: Source::Spill });
    assert!(!shard.outboxes[0].may_spill(), "no other state may be staged over it");
    push_pull(&mut shard, 1, 0, 0, &vec![1.0; ELEMENTS]).unwrap();
    answer(&mut shard, 1);
    assert_eq!(shard.of_source(0, Source::Spill), payload, "what has begun to leave changes no more");
    shard.outboxes[0].begun = None;
    let (_, changed) = pull(&mut shard, 1);
    assert_eq!(State::decode(&changed).unwrap().updates, 42);
    assert!(payload.chunks(4).skip(2).zip(changed.chunks(4).skip(2)).all(|(before, after)| before != after));
}

#[test]
fn a_held_step_sends_its_norm_and_is_updated_a_few_chunks_at_a_time() {
    const CHUNKS: u32 = 8;
    let start = |reproducible| {
        let keys = vec![Key::new("w", [u64::from(CHUNKS) * 256])];
        let mut shard = shard(2, keys, |settings| {
            let rate = Hyperparameters { learning_rate: 1.0, ..Default::default() };
            settings.optimizer =
                OptimizerChoice { hyperparameters: Some(rate), ..OptimizerChoice::named("sgd") };
            settings.two_phase = true;
            settings.reproducible = reproducible;
        });
        let zeros = wire(&[0.0; 256]);
        for chunk in 0..CHUNKS {
            take(&mut shard, 0, &header(Operation::Initialise, chunk, 0, &zeros), &zeros).unwrap();
            let slot = shard.outboxes[0].applied.pop_first().expect("an acknowledgement is owed");
            shard.answer_begun(0, slot);
        }
        shard
    };
    for reproducible in [false, true] {
        let mut shard = start(reproducible);
        for step in 0..3 {
            for chunk in (0..CHUNKS).rev() {
                assert!(shard.outboxes.iter().all(|outbox| outbox.norm.is_none()), "it is not complete");
                for rank in [1, 0] {
                    push_pull(&mut shard, rank, chunk, step, &[1.0 + 2.0 * rank as f32; 256]).unwrap();
                }
            }
            // The mean of 1 and 3 in each element.
            let norm = Norm(f64::from(CHUNKS * 256) * 4.0).encode();
            for outbox in &mut shard.outboxes {
                let (header, payload) = outbox.norm.take().expect("every port gets the norm");
                assert_eq!((header.operation, header.step, &payload[..]), (Operation::Norm, step, &norm[..]));
                assert!(outbox.is_empty(), "nothing is answered before the release");
            }
            assert!(!shard.is_releasing());
            let factor = Release(0.25).encode();
            take(&mut shard, 0, &header(Operation::Release, 0, step, &factor), &factor).unwrap();
            let mut turns = 0;
            while shard.is_releasing() {
                shard.update_released(3 * 256);
                turns += 1;
                let updated = (3 * turns).min(CHUNKS);
                assert_eq!(shard.outboxes[1].parameters.len(), updated, "so many and no more");
                assert_eq!(shard.counters().updates, u64::from(step * CHUNKS + updated));
            }
            assert_eq!(turns, 3);
            for rank in 0..2 {
                for chunk in 0..CHUNKS {
                    let (header, model) = answer(&mut shard, rank);
                    assert_eq!((header.chunk, header.step), (chunk, step + 1));
                    assert_eq!(model, [-0.5 * (step + 1) as f32; 256]);
                }
            }
        }
        shard.close();
        while shard.free_some(4096) {}
        shard.update_released(usize::MAX);
    }
}

#[test]
fn the_norms_of_tensors_go_with_the_norm_and_come_back_with_the_release() {
    let keys = vec![Key::new("v", [256]), Key::new("w", [512])];
    let mut shard = shard(1, keys, |settings| {
        let rate = Hyperparameters { learning_rate: 1.0, ..Default::default() };
        let one = rate.with("trust_coefficient", 1.0).unwrap();
        settings.optimizer = OptimizerChoice { hyperparameters: Some(one), ..OptimizerChoice::named("lars") };
    });
    for (chunk, value) in [(0, 1.0), (1, 2.0), (2, 2.0)] {
        let values = wire(&[value; 256]);
        take(&mut shard, 0, &header(Operation::Initialise, chunk, 0, &values), &values).unwrap();
        let slot = shard.outboxes[0].applied.pop_first().expect("an acknowledgement is owed");
        shard.answer_begun(0, slot);
    }
    for chunk in [2, 0, 1] {
        push_pull(&mut shard, 0, chunk, 0, &[0.5; 256]).unwrap();
    }
    let (_, payload) = shard.outboxes[0].norm.take().expect("all chunks are held");
    let (norm, tensors) = Norm::decode(&payload).unwrap();
    let of = |parameters, update| TensorSquares { parameters, update };
    assert_eq!(norm, Norm(768.0 * 0.25));
    assert_eq!(tensors.iter().collect::<Vec<_>>(), [of(256.0, 64.0), of(2048.0, 128.0)]);
    // Another route has as much of each tensor.
    let mut release = Release(1.0).encode().to_vec();
    for (length, tensors) in
        [(20, &[of(512.0, 128.0)][..]), (36, &[of(512.0, 128.0), of(4096.0, 65536.0)][..])]
    {
        release.truncate(4);
        Tensors::encode(tensors, &mut release);
        let taken = take(&mut shard, 0, &header(Operation::Release, 0, 0, &release), &release);
        assert_eq!(taken.is_ok(), length == 36, "{taken:?}");
    }
    shard.update_released(usize::MAX);
    let models: Vec<_> = (0..3).map(|_| answer(&mut shard, 0).1).collect();
    assert_eq!(models, [[0.0; 256], [1.875; 256], [1.875; 256]]);
}

#[test]
fn a_norm_that_has_begun_to_leave_outlives_its_job() {
    let mut shard = shard(1, vec![Key::new("w", [1])], |_| {});
    shard.outboxes[0].send_norm(3, Norm(1.0).encode().as_slice().into());
    let (header, payload) = shard.outboxes[0].norm.clone().unwrap();
    shard.outboxes[0].begun = Some(Begun { header, source: Source::Norm });
    shard.close();
    while shard.free_some(4096) {}
    assert_eq!(shard.of_source(0, Source::Norm), &payload[..]);
    shard.outboxes[0].begun = None;
    shard.outboxes[0].forget();
    assert!(shard.outboxes[0].is_empty());
}

#[test]
fn an_optimizer_starts_from_rank_zeros_parameters_and_learns_new_rates_in_time() {
    let rate = |learning_rate| Hyperparameters { learning_rate, ..Default::default() };
    let mut shard = shard(1, vec![Key::new("w", [300])], |settings| {
        settings.optimizer =
            OptimizerChoice { hyperparameters: Some(rate(0.5)), ..OptimizerChoice::named("sgd") };
    });
    let refused = push_pull(&mut shard, 0, 1, 0, &[0.0; 44]).unwrap_err();
    assert_eq!(
        refused.message("rank 0"),
        "rank 0 broke the rules on chunk 1 of key `w`: a gradient came before rank 0 had sent the parameters to start from"
    );
    for (chunk, elements) in [(0, 256), (1, 44)] {
        let payload = wire(&vec![1.0; elements]);
        take(&mut shard, 0, &header(Operation::Initialise, chunk, 0, &payload), &payload).unwrap();
        let slot = shard.outboxes[0].applied.pop_first().expect("an acknowledgement is owed");
        shard.answer_begun(0, slot);
    }
    let retune = rate(0.25).to_wire();
    take(&mut shard, 0, &header(Operation::Retune, 0, 1, &retune), &retune).unwrap();
    push_pull(&mut shard, 0, 1, 0, &[1.0; 44]).unwrap();
    assert_eq!(answer(&mut shard, 0).1, [0.5; 44], "step 0 knows the first rate");
    push_pull(&mut shard, 0, 1, 1, &[1.0; 44]).unwrap();
    assert_eq!(answer(&mut shard, 0).1, [0.25; 44], "step 1 knows the second");
    let momentum = Hyperparameters { momentum: 0.9, ..rate(0.1) }.to_wire();
    let refused = take(&mut shard, 0, &header(Operation::Retune, 0, 2, &momentum), &momentum).unwrap_err();
    assert!(
        refused.message("rank 0").contains("hyperparameters of group 0 that cannot be used"),
        "{}",
        refused.message("rank 0")
    );
}

#[test]
fn groups_have_their_own_numbers_and_one_layout() {
    let rate = |learning_rate| Hyperparameters { learning_rate, ..Default::default() };
    let momentum = Hyperparameters { momentum: 0.5, ..rate(1.0) };
    let keys = vec![Key::new("w", [300]), Key::new("b", [2]).in_group(1)];
    let mut shard = shard(1, keys, |settings| {
        let groups = vec![momentum];
        settings.optimizer =
            OptimizerChoice { hyperparameters: Some(rate(0.25)), groups, ..OptimizerChoice::named("sgd") };
    });
    assert_eq!(
        shard.model.state.len(),
        shard.model.parameters.len(),
        "room for what the more demanding group needs"
    );
    let announced = memory_bytes(shard.plan());
    let ungrouped = ShardPlan { groups: vec![momentum].into(), ..shard.plan().clone() };
    assert_eq!(announced - memory_bytes(&ungrouped), Schedule::MEMORY_BYTES, "a group takes a schedule");
    let encrypted = ShardPlan { encrypts: true, ..shard.plan().clone() };
    let stream_bytes = Encryption::memory_bytes(HEADER_BYTES + encrypted.frame_bytes_max());
    assert_eq!(
        memory_bytes(&encrypted) - announced,
        stream_bytes as u64,
        "an encrypted stream keeps records"
    );
    for (chunk, elements) in [(0, 256), (1, 44), (2, 2)] {
        let payload = wire(&vec![1.0; elements]);
        take(&mut shard, 0, &header(Operation::Initialise, chunk, 0, &payload), &payload).unwrap();
        let slot = shard.outboxes[0].applied.pop_first().unwrap();
        shard.answer_begun(0, slot);
    }
    let retune = rate(0.5).to_wire();
    take(&mut shard, 0, &header(Operation::Retune, 1, 2, &retune), &retune).unwrap();
    // From step 2 on there is no momentum and the rate differs; the other group is unaffected.
    for (step, of_first, of_second) in [(0, 0.75, 0.0), (1, 0.5, -1.5), (2, 0.25, -2.0)] {
        push_pull(&mut shard, 0, 1, step, &[1.0; 44]).unwrap();
        assert_eq!(answer(&mut shard, 0).1, [of_first; 44], "step {step}");
        push_pull(&mut shard, 0, 2, step, &[1.0; 2]).unwrap();
        assert_eq!(answer(&mut shard, 0).1, [of_second; 2], "step {step}");
    }
    let mut refused = |group, hyperparameters: Hyperparameters| {
        let payload = hyperparameters.to_wire();
        let retune = header(Operation::Retune, group, 3, &payload);
        take(&mut shard, 0, &retune, &payload).unwrap_err().message("rank 0")
    };
    let message = refused(2, rate(0.1));
    assert_eq!(
        message,
        "rank 0 sent hyperparameters of group 2 that cannot be used: the job has no such group, but 2, counted from 0"
    );
    let message = refused(0, momentum);
    assert!(
        message.contains("group 0") && message.contains("need 1 state values"),
        "its own state counts: {message}"
    );
    assert!(refused(1, rate(-1.0)).contains("group 1 that cannot be used: learning_rate is -1"));
}

#[test]
fn half_precision_is_summed_and_kept_in_single() {
    let mut keys = vec![Key::new("w", [2])];
    keys[0].dtype = Dtype::BF16;
    let mut shard = shard(2, keys, |settings| {
        settings.optimizer.name = "sgd".into();
        settings.optimizer.hyperparameters =
            Some(Hyperparameters { learning_rate: 1.0, ..Default::default() });
    });
    let bf16 = |values: [f32; 2]| values.map(|value| (value.to_bits() >> 16) as u16);
    let frame = |operation, values| {
        let payload: Vec<u8> = bytemuck::cast_slice(&bf16(values)).to_vec();
        (Header { codec: Codec::BF16, ..header(operation, 0, 0, &payload) }, payload)
    };
    let (start, payload) = frame(Operation::Initialise, [1.0, 2.0]);
    take(&mut shard, 0, &start, &payload).unwrap();
    let slot = shard.outboxes[0].applied.pop_first().unwrap();
    shard.answer_begun(0, slot);
    for rank in 0..2 {
        // Their mean, 2^-9, is lost next to 1 in bf16, but not in the hub's parameters.
        let (push, payload) = frame(Operation::PushPull, [-(2.0f32.powi(-9)), 1.0]);
        take(&mut shard, rank, &push, &payload).unwrap();
    }
    let slot = shard.outboxes[1].parameters.pop_first().unwrap();
    let (header, payload) = shard.answer(1, slot, Answer::Parameters);
    assert_eq!((header.codec, header.length), (Codec::BF16, 4));
    assert_eq!(payload, bytemuck::cast_slice::<u16, u8>(&bf16([1.0, 1.0])));
    assert_eq!(shard.model.parameters[0], 1.0 + 2.0f32.powi(-9));
}

/// A shard of one initialised quantised chunk with parameters.
fn quantised_shard() -> Shard {
    let key = Key::new("w", [8, 16]).in_codec(Codec::ONE_BIT);
    let mut shard = shard(2, vec![key], |settings| settings.optimizer.name = "sgd".into());
    let start = wire(&[1.0; 128]);
    take(&mut shard, 0, &header(Operation::Initialise, 0, 0, &start), &start).unwrap();
    let slot = shard.outboxes[0].applied.pop_first().unwrap();
    shard.answer_begun(0, slot);
    shard
}

/// Every rank pushes two levels. Returns the one answer that is owed to each: its codec and bytes.
fn quantised_step(shard: &mut Shard, step: u32) -> [(Codec, Vec<u8>); 2] {
    // The levels are bf16 -1 and 2; the first four elements of each byte have the second.
    let payload = [&[0x80, 0xbf, 0x00, 0x40][..], &[0x0f; 16]].concat();
    for rank in 0..2 {
        let push = Header { codec: Codec::ONE_BIT, ..header(Operation::PushPull, 0, step, &payload) };
        take(shard, rank, &push, &payload).unwrap();
    }
    [0, 1].map(|rank| take_answer(shard, rank))
}

fn take_answer(shard: &mut Shard, rank: u32) -> (Codec, Vec<u8>) {
    let slot = shard.outboxes[rank as usize].parameters.pop_first().expect("parameters are owed");
    let (header, payload) = shard.answer(rank, slot, Answer::Parameters);
    let answer = (header.codec, payload.to_vec());
    assert_eq!(header.length as usize, answer.1.len());
    shard.answer_begun(rank, slot);
    answer
}

#[test]
fn a_rank_with_the_version_before_gets_the_change_and_others_get_all() {
    let mut shard = quantised_shard();
    let [begun, joined] = quantised_step(&mut shard, 0);
    assert_eq!((begun.0, begun.1.len()), (Codec::ONE_BIT, 20));
    assert_eq!(
        (joined.0, joined.1.len()),
        (Codec::F32, 512),
        "it never asked for the parameters to start from"
    );
    let rebuilt = |begun: &[f32], change: &[u8]| {
        let mut model = begun.to_vec();
        paramhub_kernels::sum::add(&mut model, change, Codec::ONE_BIT);
        model
    };
    let first = rebuilt(&[1.0; 128], &begun.1);
    assert_eq!(wire(&first), joined.1);
    let [again, also] = quantised_step(&mut shard, 1);
    assert_eq!(again, also);
    assert_eq!(again.0, Codec::ONE_BIT);

    // The hub cannot know how much a cut stream has lost: its rank receives everything again, with the same
    // values.
    shard.resume(1);
    let payload = [0; 20];
    let push = Header { codec: Codec::ONE_BIT, ..header(Operation::PushPull, 0, 1, &payload) };
    take(&mut shard, 1, &push, &payload).unwrap();
    let (codec, whole) = take_answer(&mut shard, 1);
    assert_eq!((codec, whole), (Codec::F32, wire(&rebuilt(&first, &again.1))));
    let [first_rank, second_rank] = quantised_step(&mut shard, 2);
    assert_eq!(first_rank, second_rank);
}

#[test]
fn an_answer_that_has_begun_is_saved_before_the_next_takes_its_place() {
    let mut shard = quantised_shard();
    quantised_step(&mut shard, 0);
    let payload = [&[0x80, 0xbf, 0x00, 0x40][..], &[0x0f; 16]].concat();
    let push = Header { codec: Codec::ONE_BIT, ..header(Operation::PushPull, 0, 1, &payload) };
    (0..2).for_each(|rank| take(&mut shard, rank, &push, &payload).unwrap());
    let slot = shard.outboxes[1].parameters.pop_first().unwrap();
    let source = shard.source(1, slot);
    assert_eq!(source, Source::Change(0));
    let (begun, answer) = shard.answer(1, slot, Answer::Parameters);
    let answer = answer.to_vec();
    shard.answer_begun(1, slot);
    shard.outboxes[1].begun = Some(Begun { header: begun, source });
    take_answer(&mut shard, 0);
    let another = [&[0x80, 0xbf, 0x00, 0x40][..], &[0x77; 16]].concat();
    for rank in 0..2 {
        let push = Header { step: 2, ..push };
        take(&mut shard, rank, &push, &another).unwrap();
    }
    assert_eq!(shard.outboxes[1].begun.unwrap().source, Source::Spill);
    assert_eq!(shard.of_source(1, Source::Spill), answer);
    assert_ne!(shard.quantised.answer(&shard.slots[0]), answer, "the next is another");
    shard.outboxes[1].begun = None;
    assert_eq!(take_answer(&mut shard, 0), take_answer(&mut shard, 1));
    shard.close();
    while shard.free_some(4096) {}
}

#[test]
fn each_fault_names_what_is_wrong_and_changes_nothing() {
    let mut shard = shard(2, vec![Key::new("conv", [300]), Key::new("fc", [5])], |settings| {
        settings.reject_non_finite = true;
    });
    let fault = |shard: &mut Shard, header: Header, payload: &[u8]| {
        take(shard, 1, &header, payload).unwrap_err().message("rank 1")
    };
    let five = wire(&[1.0; 5]);
    let unknown = fault(&mut shard, header(Operation::Push, 9, 0, &five), &five);
    assert!(unknown.starts_with("rank 1 sent a frame for chunk 9, which is not on this stream"), "{unknown}");
    let short = fault(&mut shard, header(Operation::Push, 2, 0, &five[4..]), &five[4..]);
    assert!(short.contains("16 bytes of f32 for chunk 2 of key `fc`, which has 20 bytes"), "{short}");
    let ahead = fault(&mut shard, header(Operation::PushPull, 2, 3, &five), &five);
    assert!(ahead.contains("step 3 was asked for, but step 0 is under way"), "{ahead}");
    let codec = Header { codec: Codec::F16, ..header(Operation::Push, 2, 0, &five) };
    assert!(fault(&mut shard, codec, &five).contains("bytes of f16"));
    let mut gradient = vec![0.0; 44];
    gradient[3] = f32::NAN;
    let nan = wire(&gradient);
    let refused = fault(&mut shard, header(Operation::Push, 1, 0, &nan), &nan);
    assert!(refused.contains("key `conv` whose element 259 is not finite"), "{refused}");
    assert_eq!(shard.counters().contributions, 0);
    push_pull(&mut shard, 1, 2, 0, &[1.0; 5]).unwrap();
    take(&mut shard, 1, &Header::bare(Operation::Leave), &[]).unwrap();
    assert!(fault(&mut shard, header(Operation::Push, 2, 1, &five), &five).contains("after it had left"));
    push_pull(&mut shard, 0, 2, 0, &[1.0; 5]).unwrap();
    answer(&mut shard, 0);
    let stranded = push_pull(&mut shard, 0, 2, 1, &[1.0; 5]).unwrap_err();
    assert_eq!(stranded.culprit(Neighbour::Worker(0)), Neighbour::Worker(1), "not the one that found out");
    let stranded = stranded.message("rank 1");
    assert_eq!(stranded, "rank 1 left the job, but other ranks wait for its contribution to step 1");
}

#[test]
fn memory_is_what_was_announced() {
    let many = (0..50).map(|i| Key::new(format!("k{i}"), [1000])).collect();
    let mut shard = shard(3, many, |settings| {
        settings.optimizer.name = "adam".into();
        settings.reproducible = true;
    });
    let with_snapshots = ShardPlan { checkpoints: true, ..shard.plan().clone() };
    let snapshot = memory_bytes(&with_snapshots) - memory_bytes(shard.plan());
    let floats = Shard::new(with_snapshots).unwrap().hand_out_snapshot().unwrap().floats() as u64;
    assert!((floats * 4..floats * 4 + floats).contains(&snapshot), "{snapshot} for {floats}");
    assert!(shard.spare_snapshot.is_none());
    // Parameters, sums, two slots of state, and two members' parked contributions.
    let arrays = 1 + 1 + 2 + 2;
    let (announced, touched) = (memory_bytes(shard.plan()), shard.touched_bytes());
    assert!(touched >= (shard.model.parameters.len() * 4 * arrays) as u64, "{touched}");
    assert!(
        announced >= touched - (arrays * 12 * 64) as u64 && announced < touched * 11 / 10,
        "{announced} announced, {touched} touched"
    );
}

#[test]
fn a_failure_finds_room_among_unread_messages() {
    let mut shard = shard(1, vec![Key::new("w", [1])], |_| {});
    for _ in 0..1000 {
        shard.outboxes[0].message(Header::bare(Operation::Heartbeat), Vec::new());
    }
    let begun = Begun { header: Header::bare(Operation::Heartbeat), source: Source::Message };
    shard.outboxes[0].begun = Some(begun);
    shard.close();
    while shard.free_some(4096) {}
    shard.outboxes[0].message(Header::bare(Operation::Failure), Vec::new());
    let operations = shard.outboxes[0].messages.iter().map(|(header, _)| header.operation);
    assert_eq!(operations.collect::<Vec<_>>(), [Operation::Heartbeat, Operation::Failure]);
}

#[test]
fn keys_over_four_gibibytes_are_laid_out_without_wrapping() {
    let settings = Settings::new(
        KeyTable::new(vec![Key::new("large", [1_500_000_000]), Key::new("small", [3])]).unwrap(),
    );
    let map = ChunkMap::new(&settings.keys, settings.chunk_bytes).unwrap();
    let interface = InterfaceShape { address: "127.0.0.1:1".into(), cores: vec![0], weight: 1 };
    let hubs = vec![HubShape { interfaces: vec![interface], local: None, between_hubs: None }];
    let composed = Composed::new(&settings.keys, &map, Composition::flat(hubs, 2)).unwrap();
    let registry = Registry::with_builtins();
    let plan = ShardPlan {
        optimizer: registry.optimizer("adam").unwrap(),
        map: Arc::new(map),
        ports: Arc::new(Ports::new(&composed, 0, 0)),
        composed: Arc::new(composed),
        settings: Arc::new(settings),
        ..shard(2, vec![Key::new("w", [1])], |_| {}).plan().clone()
    };
    let layout = Layout::new(&plan);
    let last = layout.slots.iter().max_by_key(|slot| slot.array_offset).unwrap();
    assert!(last.array_offset >= 1_500_000_000, "{last:?}");
    assert!(
        last.encoded_range().start > u32::MAX as usize / 2 && last.encoded_range().end <= layout.elements * 2
    );
    // Model, merge and Adam's two slots: 24 GB.
    assert!(memory_bytes(&plan) > 24_000_000_000);
}
