use paramhub_core::codec::{Codec, Dtype};
use paramhub_core::factors::FactorBlock;
use paramhub_core::key::Key;
use paramhub_core::scheme::{LayerSettings, Scheme, SchemeChoice};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_core::wire::{Factors as Wire, Header};
use paramhub_kernels::convert;

use super::tests::{header, push_pull, shard, wire};
use super::*;

const WORKERS: u32 = 3;
/// M, N and K.
const SHAPE: [u64; 3] = [37, 91, 6];

/// A dense key, and a layer exchanged by factors, in chunks of 257 elements: not a multiple of a cache line.
fn factor_shard(dtype: Dtype, change: impl FnOnce(&mut Settings)) -> (Shard, FactorBlock) {
    let [outputs, inputs, _] = SHAPE;
    let mut keys = vec![Key::new("dense", [300]), Key::new("w", [outputs, inputs]), Key::new("b", [outputs])];
    keys.iter_mut().for_each(|key| key.dtype = dtype);
    let shard = shard(WORKERS, keys, |settings| {
        settings.chunk_bytes = 1028;
        let layer = LayerSettings::fully_connected("fc", [1, 2], SHAPE);
        settings.layers = vec![layer.by(SchemeChoice::Only(Scheme::FactorsToHub))];
        change(settings);
    });
    let block = shard.plan.factor_blocks[0];
    (shard, block)
}

/// A rank's output gradients, then its inputs.
fn block_of(rank: u32, step: u32, samples: u32) -> Vec<f32> {
    let [outputs, inputs, _] = SHAPE;
    let value =
        |at: u64| ((at * 7919 + u64::from(rank) * 31 + u64::from(step) * 17) % 199) as f32 / 64.0 - 1.5;
    (0..u64::from(samples) * (outputs + inputs)).map(value).collect()
}

/// Sends some pieces of a rank's block.
fn send(
    shard: &mut Shard,
    rank: u32,
    step: u32,
    samples: u32,
    pieces: impl IntoIterator<Item = u32>,
) -> Result<(), Fault> {
    let block = shard.plan.factor_blocks[0];
    let values = block_of(rank, step, samples);
    for piece in pieces {
        let start = piece as usize * block.piece_elements;
        let end = values.len().min(start + block.piece_elements);
        let mut payload = Wire::head(samples, piece).to_vec();
        payload.resize(8 + (end - start) * block.codec.bytes(), 0);
        convert::encode(&values[start..end], &mut payload[8..], block.codec);
        take_piece(shard, rank, step, block.codec, &payload)?;
    }
    Ok(())
}

fn take_piece(shard: &mut Shard, rank: u32, step: u32, codec: Codec, payload: &[u8]) -> Result<(), Fault> {
    let header = Header { codec, ..header(Operation::Factors, 2, step, payload) };
    let checked = shard.check(rank, &header)?;
    shard.frame(rank, &checked, Payload::Here(payload))
}

/// The mean gradient of weight and bias, by a plain loop in f64.
fn reference(step: u32, samples: &[u32], codec: Codec) -> (Vec<f64>, Vec<f64>) {
    let [outputs, inputs, _] = SHAPE.map(|side| side as usize);
    let (mut weight, mut bias) = (vec![0.0; outputs * inputs], vec![0.0; outputs]);
    for (rank, &samples) in (0..).zip(samples) {
        let mut values = block_of(rank, step, samples);
        let mut encoded = vec![0; values.len() * codec.bytes()];
        convert::encode(&values, &mut encoded, codec);
        convert::decode(&encoded, &mut values, codec);
        let (gradients, rows) = values.split_at(samples as usize * outputs);
        for sample in 0..samples as usize {
            for o in 0..outputs {
                let gradient = f64::from(gradients[sample * outputs + o]) / f64::from(WORKERS);
                bias[o] += gradient;
                for i in 0..inputs {
                    weight[o * inputs + i] += gradient * f64::from(rows[sample * inputs + i]);
                }
            }
        }
    }
    (weight, bias)
}

fn make_all(shard: &mut Shard) -> usize {
    let mut turns = 0;
    while shard.is_making() {
        shard.make_some(1).unwrap();
        turns += 1;
    }
    turns
}

/// Takes all answers that are owed to a rank: chunk and values, ordered by chunk.
fn answers(shard: &mut Shard, rank: u32) -> Vec<(u32, Vec<f32>)> {
    let mut found = Vec::new();
    while let Some(slot) = shard.outboxes[rank as usize].parameters.pop_first() {
        let (header, payload) = shard.answer(rank, slot, Answer::Parameters);
        let mut values = vec![0.0; payload.len() / header.codec.bytes()];
        convert::decode(payload, &mut values, header.codec);
        found.push((header.chunk, values));
        shard.answer_begun(rank, slot);
    }
    found
}

fn assert_near(found: &[(u32, Vec<f32>)], (weight, bias): (Vec<f64>, Vec<f64>), most: f64) {
    let numbers: Vec<f64> = found.iter().flat_map(|(_, values)| values).map(|&v| f64::from(v)).collect();
    let expected: Vec<f64> = weight.into_iter().chain(bias).collect();
    assert_eq!(numbers.len(), expected.len());
    for (at, (got, expected)) in numbers.iter().zip(&expected).enumerate() {
        assert!((got - expected).abs() <= most * expected.abs().max(1.0), "{at}: {got} for {expected}");
    }
}

#[test]
fn the_mean_gradient_of_all_samples_is_made_and_answered() {
    for (dtype, most) in [(Dtype::F32, 1e-5), (Dtype::F16, 2e-3), (Dtype::BF16, 1e-2)] {
        for reproducible in [false, true] {
            let (mut shard, block) = factor_shard(dtype, |settings| settings.reproducible = reproducible);
            for (step, samples) in [(0, [6, 6, 6]), (1, [6, 2, 0]), (2, [1, 6, 6])] {
                // Ranks come in any order, and their pieces are interleaved.
                for piece in 0..block.pieces(6) {
                    for rank in [2, 0, 1] {
                        let samples: u32 = samples[rank as usize];
                        if piece < block.pieces(samples) {
                            assert!(!shard.is_making());
                            send(&mut shard, rank, step, samples, [piece]).unwrap();
                        }
                    }
                }
                // The bias, two tiles of columns at most, and a turn for each chunk.
                assert!(make_all(&mut shard) >= 3 + 14);
                let first = answers(&mut shard, 0);
                assert_near(&first, reference(step, &samples, dtype.codec()), most);
                for rank in 1..WORKERS {
                    assert_eq!(answers(&mut shard, rank), first);
                }
            }
            assert_eq!((shard.counters().updates, shard.counters().contributions), (3 * 15, 9 * 15));
        }
    }
}

#[test]
fn the_optimizer_runs_on_what_is_made_and_a_pull_gets_it() {
    let (mut shard, block) = factor_shard(Dtype::F32, |settings| {
        let hyperparameters =
            Hyperparameters { learning_rate: 0.5, momentum: 0.9, ..Hyperparameters::default() };
        settings.optimizer =
            OptimizerChoice { hyperparameters: Some(hyperparameters), ..OptimizerChoice::named("sgd") };
    });
    let extents: Vec<_> =
        (0..shard.plan.map.len()).map(|chunk| shard.plan.map.extent(chunk).unwrap()).collect();
    for (chunk, extent) in (0..).zip(&extents) {
        let ones = wire(&vec![1.0; extent.elements as usize]);
        let begin = header(Operation::Initialise, chunk, 0, &ones);
        let checked = shard.check(0, &begin).unwrap();
        shard.frame(0, &checked, Payload::Here(&ones)).unwrap();
        let slot = shard.outboxes[0].applied.pop_first().unwrap();
        shard.answer_begun(0, slot);
    }
    let (mut model, mut velocity) = (vec![1.0; 37 * 92], vec![0.0; 37 * 92]);
    for step in 0..3 {
        for rank in 0..WORKERS {
            send(&mut shard, rank, step, 6, 0..block.pieces(6)).unwrap();
        }
        make_all(&mut shard);
        let found = answers(&mut shard, 1);
        for rank in [0, 2] {
            answers(&mut shard, rank);
        }
        let (weight, bias) = reference(step, &[6; 3], Codec::F32);
        for (at, gradient) in weight.into_iter().chain(bias).enumerate() {
            velocity[at] = 0.9 * velocity[at] + gradient;
            model[at] -= 0.5 * velocity[at];
        }
        assert_near(&found, (model.clone(), Vec::new()), 1e-5);
        let pull = Header { step: step + 1, chunk: 2, ..Header::bare(Operation::Pull) };
        let checked = shard.check(2, &pull).unwrap();
        shard.frame(2, &checked, Payload::Here(&[])).unwrap();
        assert_eq!(answers(&mut shard, 2), found[..1]);
    }
}

#[test]
fn a_gradient_made_of_factors_has_the_same_bits_in_any_order_of_arrival() {
    let made = |order: [u32; 3], together: bool| {
        let (mut shard, block) = factor_shard(Dtype::F32, |_| {});
        if together {
            (0..block.pieces(6)).for_each(|piece| {
                order.iter().for_each(|&rank| send(&mut shard, rank, 0, 6, [piece]).unwrap());
            });
        } else {
            order.iter().for_each(|&rank| send(&mut shard, rank, 0, 6, 0..block.pieces(6)).unwrap());
        }
        make_all(&mut shard);
        answers(&mut shard, 0)
    };
    let first = made([0, 1, 2], false);
    for order in [[2, 1, 0], [1, 0, 2], [0, 2, 1]] {
        assert!(made(order, true) == first && made(order, false) == first, "{order:?}");
    }
}

#[test]
fn frames_that_do_not_fit_a_block_are_refused() {
    let (mut shard, block) = factor_shard(Dtype::F32, |settings| settings.reject_non_finite = true);
    let whole = |piece: u32| [&Wire::head(6, piece)[..], &vec![0; block.piece_elements * 4]].concat();
    let mut refused = |header: Header, payload: &[u8]| -> String {
        let checked = shard.check(0, &header);
        let outcome = checked.and_then(|checked| shard.frame(0, &checked, Payload::Here(payload)));
        outcome.unwrap_err().to_string()
    };
    let good = header(Operation::Factors, 2, 0, &whole(0));
    for (header, payload, reason) in [
        (Header { chunk: 3, ..good }, whole(0), "factors for chunk 3 of key `w`, with which no layer begins"),
        (Header { chunk: 0, ..good }, whole(0), "factors for chunk 0 of key `dense`"),
        (Header { codec: Codec::F16, ..good }, whole(0), "of f16 as a piece of the factors of key `w`"),
        (Header { length: 4, ..good }, vec![0; 4], "has 8 to 1036 bytes of whole f32"),
        (Header { length: 1040, ..good }, vec![0; 1040], "sent 1040 bytes"),
        (Header { length: 11, ..good }, vec![0; 11], "whole f32"),
        (good, whole(1), "piece 1 of its factors came, but piece 0 is due"),
        (Header { step: 1, ..good }, whole(0), "step 1 was asked for, but step 0 is under way"),
        (
            header(Operation::Factors, 2, 0, &Wire::head(7, 0)),
            Wire::head(7, 0).to_vec(),
            "factors of 7 samples came, but the layer has 6 at most",
        ),
        (
            header(Operation::Factors, 2, 0, &Wire::head(6, 0)),
            Wire::head(6, 0).to_vec(),
            "piece 0 of its factors came with 0 numbers, but it has 257",
        ),
    ] {
        let message = refused(header, &payload);
        assert!(message.contains(reason), "{message}");
    }
    let dense = wire(&[0.0; 257]);
    let message = refused(header(Operation::PushPull, 2, 0, &dense), &dense);
    assert!(message.contains("a gradient was pushed, but the layer goes by its factors"), "{message}");
    let nan = [&Wire::head(6, 0)[..], &f32::NAN.to_le_bytes(), &vec![0; 1024]].concat();
    let message = refused(good, &nan);
    assert!(message.contains("factors of key `w` with a NaN"), "{message}");
    push_pull(&mut shard, 0, 0, 0, &[0.0; 257]).unwrap();
}

#[test]
fn a_block_that_comes_again_after_a_cut_makes_no_difference() {
    let (mut shard, block) = factor_shard(Dtype::F32, |_| {});
    let pieces = block.pieces(6);
    send(&mut shard, 0, 0, 6, 0..1).unwrap();
    shard.resume(0);
    send(&mut shard, 0, 0, 6, 0..pieces).unwrap();
    send(&mut shard, 1, 0, 6, 0..pieces).unwrap();
    send(&mut shard, 2, 0, 6, 0..pieces).unwrap();
    shard.make_some(1).unwrap();
    shard.make_some(1).unwrap();
    assert!(shard.is_making());
    assert_eq!(answers(&mut shard, 0).len(), 1, "the bias");
    shard.resume(0);
    // A piece with the numbers of another step; none of them is used.
    let value = block.codec.bytes();
    for piece in 0..pieces {
        let elements = block.piece(6, piece).unwrap().elements();
        let payload = [&Wire::head(6, piece)[..], &vec![0x55; elements * value]].concat();
        take_piece(&mut shard, 0, 0, block.codec, &payload).unwrap();
    }
    make_all(&mut shard);
    let again = answers(&mut shard, 0);
    assert_near(&again, reference(0, &[6; 3], Codec::F32), 1e-5);
    assert_eq!(answers(&mut shard, 1), again);
}

#[test]
fn factors_count_among_what_a_job_takes() {
    let bytes = |scheme| {
        let (shard, _) = factor_shard_by(scheme);
        shard.counters().memory_bytes
    };
    let [outputs, inputs, samples] = SHAPE;
    let factors = u64::from(WORKERS) * samples * (outputs + inputs) * 4;
    let more = bytes(Scheme::FactorsToHub) - bytes(Scheme::Hub);
    assert!((factors..factors + 1024).contains(&more), "{more} for {factors}");
}

fn factor_shard_by(scheme: Scheme) -> (Shard, usize) {
    let [outputs, inputs, _] = SHAPE;
    let keys = vec![Key::new("w", [outputs, inputs])];
    let shard = shard(WORKERS, keys, |settings| {
        let layer = LayerSettings::fully_connected("fc", [0], SHAPE);
        settings.layers = vec![layer.by(SchemeChoice::Only(scheme))];
    });
    let layers = shard.plan.factor_blocks.len();
    (shard, layers)
}

#[test]
fn a_bias_of_many_samples_is_made_in_several_turns() {
    const SAMPLES: u32 = 12_000;
    let mut shard = shard(1, vec![Key::new("w", [200, 3]), Key::new("b", [200])], |settings| {
        let layer = LayerSettings::fully_connected("fc", [0, 1], [200, 3, u64::from(SAMPLES)]);
        settings.layers = vec![layer.by(SchemeChoice::Only(Scheme::FactorsToHub))];
        settings.chunk_bytes = 64 << 10;
    });
    let block = shard.plan.factor_blocks[0];
    for piece in 0..block.pieces(SAMPLES) {
        let elements = block.piece(SAMPLES, piece).unwrap().elements();
        let payload = [&Wire::head(SAMPLES, piece)[..], &wire(&vec![1.0; elements])].concat();
        let header = header(Operation::Factors, 0, 0, &payload);
        let checked = shard.check(0, &header).unwrap();
        shard.frame(0, &checked, Payload::Here(&payload)).unwrap();
    }
    let mut turns = 0;
    while answers(&mut shard, 0).is_empty() {
        shard.make_some(1).unwrap();
        turns += 1;
    }
    assert_eq!(turns, 4, "87 rows a turn, and one for the only chunk");
    make_all(&mut shard);
    let all = |range: std::ops::Range<usize>| {
        shard.model.parameters[range].iter().all(|&value| value == SAMPLES as f32)
    };
    assert!(all(shard.slots[0].range()) && all(shard.slots[1].range()));
}
