//! Layers whose factors go to one hub each, which computes the gradient and the update.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use paramhub_core::codec::{Codec, Dtype};
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::scheme::{LayerSettings, Scheme, SchemeChoice};
use paramhub_core::service::{JobOptions, JobState, OnInterfaceDown};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_core::wire::{Attempt, Factors, Header, Operation, Verdict};
use paramhub_hub::{HubConfig, RunningHub};
use paramhub_kernels::convert;
use paramhub_worker::{FactorBuffers, Job, WorkerError};

use crate::bystander::beside_a_running_job;
use crate::cluster::{Cluster, Ticket, Transports, await_true, gradient, sgd};
use crate::raw::Raw;

over_transports!(
    [tcp shm mixed]
    a_mixed_model_learns_what_the_dense_exchange_learns,
    factors_may_be_half_as_wide_as_parameters,
    neither_chunks_nor_hubs_nor_a_codec_of_gradients_change_a_bit,
    steps_are_clipped_by_a_norm_that_counts_what_was_made,
    the_wire_carries_what_the_plan_says,
    a_large_product_lets_another_job_have_its_share_of_the_core,
    factors_that_do_not_fit_a_layer_are_refused_before_they_leave,
    each_bad_piece_fails_its_job_with_its_reason_and_no_other_job,
    a_block_may_come_again_on_another_stream,
);

/// A layer of the model below: the keys of its weight and bias, and M, N and K.
struct Layer {
    keys: (u32, Option<u32>),
    sides: [usize; 3],
}

const LAYERS: [Layer; 2] =
    [Layer { keys: (1, Some(2)), sides: [300, 170, 6] }, Layer { keys: (3, None), sides: [64, 300, 6] }];
const STEPS: u32 = 5;
const WORKERS: u32 = 3;

/// A dense key in front and behind, and between them a layer with a bias and one without.
fn settings(scheme: Scheme, dtype: Dtype) -> Settings {
    let keys = [
        Key::new("front", [20_000]),
        Key::new("fc1.weight", [300, 170]),
        Key::new("fc1.bias", [300]),
        Key::new("fc2.weight", [64, 300]),
        Key::new("back", [500]),
    ];
    let keys = keys.map(|key| Key { dtype, ..key });
    let layers = (1..).zip(&LAYERS).map(|(number, layer)| {
        let keys: Vec<u32> = [layer.keys.0].into_iter().chain(layer.keys.1).collect();
        LayerSettings::fully_connected(format!("fc{number}"), keys, layer.sides.map(|side| side as u64))
    });
    Settings {
        layers: layers.collect(),
        scheme: SchemeChoice::Only(scheme),
        optimizer: sgd(0.05, 0.9),
        chunk_bytes: 4096,
        ..Settings::new(KeyTable::new(keys.into()).unwrap())
    }
}

fn encoded(values: &[f32], codec: Codec) -> Vec<u8> {
    let mut wire = vec![0; values.len() * codec.bytes()];
    convert::encode(values, &mut wire, codec);
    wire
}

fn decoded(wire: &[u8], codec: Codec) -> Vec<f32> {
    let mut values = vec![0.0; wire.len() / codec.bytes()];
    convert::decode(wire, &mut values, codec);
    values
}

/// A rank's inputs and output gradients: not always of the largest number of samples, and sometimes of none.
fn factors(rank: u32, layer: &Layer, step: u32) -> [Vec<f32>; 2] {
    let [outputs, inputs, most] = layer.sides;
    let samples = [most, most, 1, 0][((rank + step) % 4) as usize];
    [(inputs, 100), (outputs, 200)].map(|(row, salt)| {
        let values = gradient(rank, salt + layer.keys.0, step, samples * row);
        values.into_iter().map(|value| value / 4.0).collect()
    })
}

/// The gradients of weight and bias that these factors make.
fn multiplied(layer: &Layer, [inputs, gradients]: [&[f32]; 2]) -> [Vec<f32>; 2] {
    let [m, n, _] = layer.sides;
    let (mut weight, mut bias) = (vec![0.0_f64; m * n], vec![0.0_f64; m]);
    for (inputs, gradients) in inputs.chunks(n).zip(gradients.chunks(m)) {
        for (row, &gradient) in gradients.iter().enumerate() {
            bias[row] += f64::from(gradient);
            let products = inputs.iter().map(|&input| f64::from(input) * f64::from(gradient));
            weight[row * n..][..n].iter_mut().zip(products).for_each(|(sum, product)| *sum += product);
        }
    }
    [weight, bias].map(|values| values.into_iter().map(|value| value as f32).collect())
}

/// One step of all keys. Parameters are the bytes in memory.
fn step_of(job: &Job, step: u32, model: &mut [Vec<u8>]) {
    let keys = job.settings().keys.keys();
    let (dense_codec, factor_codec) = (keys[0].dtype.codec(), job.settings().layers[0].factor_codec(keys));
    let by_factors = !job.information_book().plan.is_hub_only();
    let (mut dense, mut layers) = (Vec::new(), Vec::new());
    let mut push = |key: u32, gradient: &[f32], model: &mut [Vec<u8>]| {
        let out = std::mem::take(&mut model[key as usize]);
        dense.push((key, job.push_pull(key, encoded(gradient, dense_codec), out).unwrap()));
    };
    for layer in LAYERS.iter().rev() {
        let [inputs, output_gradients] =
            factors(job.rank(), layer, step).map(|values| encoded(&values, factor_codec));
        let (weight, bias) = layer.keys;
        if by_factors {
            let mut room = |key: u32| std::mem::take(&mut model[key as usize]);
            let buffers =
                FactorBuffers { inputs, output_gradients, weight: room(weight), bias: bias.map(room) };
            layers.push((layer.keys, job.push_pull_factors(weight, buffers).unwrap()));
        } else {
            let [inputs, output_gradients] =
                [inputs, output_gradients].map(|wire| decoded(&wire, factor_codec));
            let [of_weight, of_bias] = multiplied(layer, [&inputs, &output_gradients]);
            push(weight, &of_weight, model);
            if let Some(bias) = bias {
                push(bias, &of_bias, model);
            }
        }
    }
    for key in [4, 0] {
        let elements = model[key as usize].len() / dense_codec.bytes();
        push(key, &gradient(job.rank(), key, step, elements), model);
    }
    for (key, handle) in dense {
        model[key as usize] = handle.wait().unwrap().1;
    }
    for ((weight, bias), handle) in layers {
        let done = handle.wait().unwrap();
        model[weight as usize] = done.weight;
        if let Some((bias, values)) = bias.zip(done.bias) {
            model[bias as usize] = values;
        }
    }
}

/// The final parameters of every rank.
fn train(ticket: &Ticket, settings: &Settings) -> Vec<Vec<Vec<f32>>> {
    ticket.run(settings, |job| {
        let mut model: Vec<Vec<u8>> = settings
            .keys
            .keys()
            .iter()
            .map(|key| {
                let values: Vec<f32> = (0..key.elements().unwrap()).map(|at| at as f32 / 1e5).collect();
                encoded(&values, key.dtype.codec())
            })
            .collect();
        job.broadcast(&mut model, 0).unwrap();
        (0..STEPS).for_each(|step| step_of(job, step, &mut model));
        let dtype = settings.keys.keys()[0].dtype;
        // A pull returns the parameters of the last answer.
        let pulled = job.pull(1, vec![0_u8; model[1].len()]).unwrap().wait().unwrap().1;
        assert!(pulled == model[1], "rank {}", job.rank());
        model.iter().map(|values| decoded(values, dtype.codec())).collect()
    })
}

fn assert_near(found: &[Vec<f32>], expected: &[Vec<f32>], most: f32) {
    for (key, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.len(), expected.len());
        for (at, (got, expected)) in found.iter().zip(expected).enumerate() {
            let difference = (got - expected).abs();
            assert!(difference <= most * expected.abs().max(1.0), "{key}.{at}: {got} for {expected}");
        }
    }
}

fn a_mixed_model_learns_what_the_dense_exchange_learns(transports: Transports) {
    let cluster = Cluster::new(transports, 3);
    for (dtype, most) in [(Dtype::F32, 1e-5), (Dtype::F16, 1e-2), (Dtype::BF16, 6e-2)] {
        let mut dense =
            train(&cluster.job(&format!("dense-{dtype}"), WORKERS), &settings(Scheme::Hub, dtype));
        let expected = dense.remove(0);
        let by_factors = settings(Scheme::FactorsToHub, dtype);
        let models = train(&cluster.job(&format!("factors-{dtype}"), WORKERS), &by_factors);
        assert_near(&models[0], &expected, most);
        assert!(models.iter().all(|model| *model == models[0]), "all ranks have the same bits");
        let again = train(&cluster.job(&format!("again-{dtype}"), WORKERS), &by_factors);
        for key in [1, 2, 3] {
            assert!(again[0][key] == models[0][key], "key {key} has other bits in another run");
        }
    }
}

fn factors_may_be_half_as_wide_as_parameters(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    for codec in [Codec::BF16, Codec::F16] {
        let run = |scheme| {
            let mut settings = settings(scheme, Dtype::F32);
            settings.layers.iter_mut().for_each(|layer| layer.factor_codec = Some(codec));
            train(&cluster.job(&format!("{codec}-{scheme}"), WORKERS), &settings)
        };
        // With the scheme `hub` the factors are rounded, too, before this test multiplies them.
        let expected = run(Scheme::Hub).remove(0);
        let models = run(Scheme::FactorsToHub);
        assert_near(&models[0], &expected, 1e-5);
        assert!(models.iter().all(|model| *model == models[0]), "all ranks have the same bits");
    }
}

fn neither_chunks_nor_hubs_nor_a_codec_of_gradients_change_a_bit(transports: Transports) {
    let alone = train(
        &Cluster::new(transports, 1).job("alone", WORKERS),
        &settings(Scheme::FactorsToHub, Dtype::F32),
    );
    let expected = &alone[0];
    let cluster = Cluster::new(transports, 2);
    let config = HubConfig { cores: 2, memory_bytes: Some(1 << 30), ..Default::default() };
    let second = RunningHub::start(cluster.client.clone(), config).unwrap();
    let run = |name: &str, settings: &Settings| {
        let options = JobOptions { rendezvous_timeout_s: 20.0, hubs: Some(2), ..Default::default() };
        train(&cluster.job_with(name, WORKERS, options), settings).remove(0)
    };
    for (name, chunk_bytes, reproducible) in
        [("small", 1028, false), ("large", 1 << 20, false), ("in-order", 4096, true)]
    {
        let found =
            run(name, &Settings { chunk_bytes, reproducible, ..settings(Scheme::FactorsToHub, Dtype::F32) });
        assert!([1, 2, 3].iter().all(|&key| found[key] == expected[key]), "{name}");
    }
    if transports == Transports::tcp() {
        let quantised =
            Settings { codec: Some(Codec::ONE_BIT), ..settings(Scheme::FactorsToHub, Dtype::F32) };
        let found = run("quantised", &quantised);
        assert!([1, 2, 3].iter().all(|&key| found[key] == expected[key]), "a codec is for gradients");
    }
    second.stop();
}

fn steps_are_clipped_by_a_norm_that_counts_what_was_made(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let run = |name: &str, scheme| {
        let settings = Settings { clip_norm: Some(2.0), ..settings(scheme, Dtype::F32) };
        train(&cluster.job(name, WORKERS), &settings).remove(0)
    };
    let dense = run("dense", Scheme::Hub);
    assert_near(&run("factors", Scheme::FactorsToHub), &dense, 1e-5);
}

fn the_wire_carries_what_the_plan_says(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings = Settings {
        chunk_bytes: 32 << 10,
        optimizer: OptimizerChoice::default(),
        ..settings(Scheme::FactorsToHub, Dtype::F32)
    };
    let is_tcp = transports == Transports::tcp();
    cluster.job("counted", WORKERS).run(&settings, |job| {
        let plan = &job.information_book().plan;
        let layers = || plan.layers.iter().filter(|planned| planned.scheme == Scheme::FactorsToHub);
        assert_eq!(layers().count(), 2);
        let planned = |planned| plan.traffic(planned, Scheme::FactorsToHub).unwrap().worker.unwrap();
        let (sent, received) =
            layers().map(planned).fold((0.0, 0.0), |sum, one| (sum.0 + one.sent, sum.1 + one.received));
        for step in 0..4 {
            let before = job.statistics();
            for layer in &LAYERS {
                let [outputs, inputs, samples] = layer.sides;
                let buffers = FactorBuffers {
                    inputs: vec![0.5_f32; samples * inputs],
                    output_gradients: vec![step as f32; samples * outputs],
                    weight: vec![0.0_f32; outputs * inputs],
                    bias: layer.keys.1.map(|_| vec![0.0; outputs]),
                };
                let done = job.push_pull_factors(layer.keys.0, buffers).unwrap().wait().unwrap();
                let expected = 0.5 * step as f32 * samples as f32;
                assert!(done.weight.iter().all(|&value| value == expected));
                assert!(done.bias.into_iter().flatten().all(|value| value == 2.0 * expected));
            }
            let after = job.statistics();
            let [up, down] =
                [after.bytes_sent - before.bytes_sent, after.bytes_received - before.bytes_received];
            assert!((up as f64 / sent - 1.0).abs() < 0.03, "{up} bytes sent, {sent} planned");
            // Over shared memory parameters count, too, though they do not move.
            assert!(
                (down as f64 / received - 1.0).abs() < 0.03,
                "{down} received, {received} planned, {is_tcp}"
            );
        }
    });
}

fn a_large_product_lets_another_job_have_its_share_of_the_core(transports: Transports) {
    const SIDE: usize = 1024;
    const SAMPLES: usize = 4096;
    /// A rank has all samples or none. The block of the one that has none, of 8 bytes, lets the product
    /// begin.
    const BLOCK_BYTES: u64 = (2 * SIDE * SAMPLES * 4) as u64;
    let cluster = Cluster::new(transports, 1);
    let (ticket, beside) = (cluster.job("large", 2), cluster.job("beside", 1));
    let (steps, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let is_there = Barrier::new(2);
    let done = || steps.load(Ordering::SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let settings = Settings::new(KeyTable::new(vec![Key::new("w", [1000])]).unwrap());
            beside.run(&settings, |job| {
                while !over.load(Ordering::SeqCst) {
                    job.push_pull(0, vec![1.0_f32; 1000], vec![0.0_f32; 1000]).unwrap().wait().unwrap();
                    steps.fetch_add(1, Ordering::SeqCst);
                }
            });
        });
        let layer = LayerSettings::fully_connected("fc", [0], [SIDE as u64, SIDE as u64, SAMPLES as u64]);
        let settings = Settings {
            layers: vec![layer.by(SchemeChoice::Only(Scheme::FactorsToHub))],
            ..Settings::new(KeyTable::new(vec![Key::new("fc", [SIDE as u64, SIDE as u64])]).unwrap())
        };
        let found = ticket.run(&settings, |job| {
            let samples = if job.rank() == 0 { SAMPLES } else { 0 };
            let mut buffers = FactorBuffers {
                inputs: vec![0.25_f32; samples * SIDE],
                output_gradients: vec![2.0_f32; samples * SIDE],
                weight: vec![0.0_f32; SIDE * SIDE],
                bias: None,
            };
            let mut least = u64::MAX;
            for step in 1..=2 {
                if job.rank() == 0 {
                    let handle = job.push_pull_factors(0, buffers).unwrap();
                    await_true("the factors", || {
                        (job.statistics().bytes_sent > step * BLOCK_BYTES).then_some(())
                    });
                    is_there.wait();
                    buffers = handle.wait().unwrap();
                } else {
                    is_there.wait();
                    // Frames that are under way reach the hub long before the other job has taken so many
                    // steps.
                    let before = done();
                    await_true("the hub has them", || (done() > before + 200).then_some(()));
                    let before = done();
                    buffers = job.push_pull_factors(0, buffers).unwrap().wait().unwrap();
                    least = least.min(done() - before);
                }
                assert!(buffers.weight.iter().all(|&value| value == 1024.0));
            }
            least
        });
        over.store(true, Ordering::SeqCst);
        // After each of the 128 tiles of a product the other job has its turn. The turns of the answers alone
        // would give a dozen.
        assert!(found[1] >= 60, "{} steps beside it", found[1]);
    });
}

fn factors_that_do_not_fit_a_layer_are_refused_before_they_leave(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    cluster.job("careful", 1).run(&settings(Scheme::FactorsToHub, Dtype::F32), |job| {
        let sizes = [20_000, 300 * 170, 300, 64 * 300, 500];
        let mut model: Vec<Vec<f32>> = sizes.iter().map(|&size| vec![0.0; size]).collect();
        job.broadcast(&mut model, 0).unwrap();
        let message_of = |refused: Result<(), WorkerError>| refused.unwrap_err().to_string();
        for key in [1, 2, 3] {
            let pushed = job.push(key, vec![0.0_f32; sizes[key as usize]]).map(drop);
            let message = message_of(pushed);
            assert!(
                message.contains("its layer goes by factors-to-hub: push the factors of its weight"),
                "{message}"
            );
        }
        let try_factors = |weight: u32, inputs: usize, gradients: usize, out: usize, bias: Option<usize>| {
            let buffers = FactorBuffers {
                inputs: vec![0.0_f32; inputs],
                output_gradients: vec![0.0_f32; gradients],
                weight: vec![0.0_f32; out],
                bias: bias.map(|bias| vec![0.0_f32; bias]),
            };
            job.push_pull_factors(weight, buffers)
        };
        for (weight, inputs, gradients, out, bias, reason) in [
            (0, 0, 0, 20_000, None, "it is no weight of a layer that goes by factors-to-hub"),
            (2, 0, 0, 300, None, "it is no weight"),
            (1, 171, 300, 51_000, Some(300), "K being 6 at most, but 684 and 1200 bytes"),
            (1, 170, 600, 51_000, Some(300), "K rows of 170 inputs"),
            (1, 7 * 170, 7 * 300, 51_000, Some(300), "K being 6 at most"),
            (1, 170, 300, 51_000, None, "its layer has a bias"),
            (3, 300, 64, 19_200, Some(64), "its layer has no bias"),
            (1, 170, 300, 50_999, Some(300), "parameters"),
            (1, 170, 300, 51_000, Some(299), "bias"),
        ] {
            let message = message_of(try_factors(weight, inputs, gradients, out, bias).map(drop));
            assert!(message.contains(reason), "{message}");
        }
        let under_way = try_factors(1, 170, 300, 51_000, Some(300)).unwrap();
        let busy = job.pull(2, vec![0.0_f32; 300]);
        if let Err(busy) = busy.map(|handle| handle.wait().unwrap()) {
            assert!(matches!(busy, WorkerError::KeyBusy { .. }), "{busy}");
        }
        assert_eq!(under_way.wait().unwrap().bias, Some(vec![0.0; 300]));
        let mut weight = vec![0.0_f32; 51_000];
        let mut bias = vec![0.0_f32; 300];
        let (inputs, output_gradients) = (vec![1.0_f32; 170], vec![-20.0_f32; 300]);
        job.scope(|scope| {
            let (weight, bias) = (&mut weight[..], Some(&mut bias[..]));
            let buffers =
                FactorBuffers { inputs: &inputs[..], output_gradients: &output_gradients[..], weight, bias };
            scope.push_pull_factors(1, buffers).unwrap().wait().map(drop).unwrap();
        });
        assert!(weight.iter().chain(&bias).all(|&value| value == 1.0), "{:?}", &bias[..3]);
    });
}

/// A piece of zeros as a raw worker sends it.
fn piece(step: u32, samples: u32, piece: u32, elements: usize) -> Vec<u8> {
    let payload = [&Factors::head(samples, piece)[..], &vec![0; elements * 4]].concat();
    let length = payload.len() as u32;
    [&Header { step, length, ..Header::bare(Operation::Factors) }.encode()[..], &payload].concat()
}

/// A layer of 100 x 30 with 10 samples at most: blocks of two pieces of 1,024 and 276 elements, answers of three chunks.
fn small() -> Settings {
    let layer = LayerSettings::fully_connected("fc", [0], [100, 30, 10]);
    Settings {
        layers: vec![layer.by(SchemeChoice::Only(Scheme::FactorsToHub))],
        chunk_bytes: 4096,
        ..Settings::new(KeyTable::new(vec![Key::new("fc", [100, 30])]).unwrap())
    }
}

fn each_bad_piece_fails_its_job_with_its_reason_and_no_other_job(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let first = || piece(0, 10, 0, 1024);
    let offences = [
        ("a piece twice", [first(), first()].concat(), "piece 0 of its factors came, but piece 1 is due"),
        ("a piece ahead", piece(0, 10, 1, 276), "piece 1 of its factors came, but piece 0 is due"),
        ("a step ahead", piece(3, 10, 0, 1024), "step 3 was asked for, but step 0 is under way"),
        (
            "too many samples",
            piece(0, 11, 0, 1024),
            "factors of 11 samples came, but the layer has 10 at most",
        ),
        (
            "a short piece",
            piece(0, 10, 0, 1023),
            "piece 0 of its factors came with 1023 numbers, but it has 1024",
        ),
        ("a long piece", piece(0, 10, 0, 1025), "announces 4108 bytes"),
        ("other samples", [first(), piece(0, 9, 1, 276)].concat(), "a block of 9 samples came"),
    ];
    beside_a_running_job(&cluster, || {
        for (number, (what, bytes, reason)) in offences.into_iter().enumerate() {
            let name = format!("offence{number}");
            let ticket = cluster.job(&name, 1);
            let (mut raw, hello) = Raw::join_with(&cluster, &ticket, 0, &small());
            assert!(matches!(raw.shake_hands(&hello, &ticket), Verdict::Welcome { .. }));
            raw.send(&bytes);
            let failure = raw.await_failure();
            assert!(failure.message.contains(reason), "{what}: {}", failure.message);
            assert!(raw.is_closed(), "{what}");
            assert_eq!(cluster.await_end(&name).state, JobState::Failed, "{what}");
        }
    });
}

fn a_block_may_come_again_on_another_stream(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let options = JobOptions {
        on_interface_down: OnInterfaceDown::Continue,
        dead_after_s: 20.0,
        rendezvous_timeout_s: 20.0,
        ..Default::default()
    };
    let ticket = cluster.job_with("cut", 1, options);
    let (mut raw, mut hello) = Raw::join_with(&cluster, &ticket, 0, &small());
    assert!(matches!(raw.shake_hands(&hello, &ticket), Verdict::Welcome { .. }));
    let mut retired = Vec::new();
    let mut number = 0;
    let mut resume = |raw: &mut Raw| {
        number += 1;
        hello.attempt = Attempt::Numbered { epoch: 1, number };
        let mut next = Raw::dial(cluster.hub().addresses()[0]);
        assert!(matches!(next.shake_hands(&hello, &ticket), Verdict::Welcome { .. }));
        retired.push(std::mem::replace(raw, next));
    };
    let whole = |step| [piece(step, 10, 0, 1024), piece(step, 10, 1, 276)].concat();
    let answers = |raw: &mut Raw, step: u32| {
        let mut chunks: Vec<u32> = (0..3)
            .map(|_| {
                let (header, payload) = raw.await_frame(Operation::Parameters);
                assert!(header.step == step + 1 && payload.iter().all(|&byte| byte == 0));
                header.chunk
            })
            .collect();
        chunks.sort_unstable();
        assert_eq!(chunks, [0, 1, 2]);
    };
    // The stream is cut inside a block, and again behind its last piece, whatever was answered.
    raw.send(&piece(0, 10, 0, 1024));
    resume(&mut raw);
    raw.send(&whole(0));
    resume(&mut raw);
    raw.send(&whole(0));
    answers(&mut raw, 0);
    // The stream is cut with all answered, and the next step follows.
    resume(&mut raw);
    raw.send(&whole(1));
    answers(&mut raw, 1);
    raw.send(&Header::bare(Operation::Leave).encode());
    assert_eq!(cluster.await_end("cut").state, JobState::Finished);
}
