//! Quantised keys, both ways, by built-in codecs and one that is registered: the numbers are those of the kernels, all ranks have the
//! same, and keys that cannot be quantised are refused with the reason.

use std::sync::Barrier;

use bytemuck::Pod;
use half::{bf16, f16};
use paramhub_core::chunk::ChunkMap;
use paramhub_core::codec::{Codec, Dtype};
use paramhub_core::consistency::Consistency;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_core::wire::{Header, Operation, Verdict};
use paramhub_kernels::{Hyperparameters, Registry, Step, convert, quantise};
use paramhub_worker::{Job, Member, Options, ParameterSharing, Transport};

use crate::bystander::beside_a_running_job;
use crate::cluster::{Cluster, Transports, gradient, sgd};
use crate::own_codec::four_bits;
use crate::raw::Raw;

over_transports!(
    [tcp shm mixed]
    quantised_keys_beside_exact_ones_come_out_as_the_kernels_make_them,
    means_and_sums_come_back_quantised_with_what_the_hub_lost_before,
    many_steps_end_where_exact_ones_do,
    ranks_have_the_same_parameters_however_they_come_by_them,
    keys_of_half_precision_are_kept_in_f32_and_rounded_at_the_ranks,
    gradients_are_clipped_as_they_were_rebuilt,
    a_gradient_that_is_not_finite_fails_its_job_by_name,
);

const STEPS: u32 = 6;

/// Returns whether a rank quantises its gradients.
fn quantises(transports: Transports, rank: u32) -> bool {
    transports.of_rank(rank) == Transport::Tcp
}

/// Matrices over several chunks and below one block, biases, and keys with codecs of their own.
fn mixed() -> KeyTable {
    KeyTable::new(vec![
        Key::new("fc1.weight", [300, 67]),
        Key::new("fc1.bias", [300]),
        Key::new("fc2.weight", [130, 130]).in_codec(Codec::TWO_BIT),
        Key::new("conv.weight", [16, 8, 3, 3]),
        Key::new("fc3.weight", [9, 5]),
        Key::new("exact.weight", [64, 64]).in_codec(Codec::F32),
        Key::new("half.weight", [64, 64]).in_codec(Codec::F16),
        Key::new("flat", [8193]).in_codec(Codec::ONE_BIT),
        Key::new("bytes.weight", [8, 7, 5, 5]).in_codec(Codec::INT8),
        Key::new("bytes.flat", [8449]).in_codec(Codec::INT8),
        Key::new("own.weight", [91, 91]).in_codec(four_bits()),
    ])
    .unwrap()
}

fn adam() -> OptimizerChoice {
    let hyperparameters = Hyperparameters { learning_rate: 0.01, ..Default::default() };
    OptimizerChoice { hyperparameters: Some(hyperparameters), ..OptimizerChoice::named("adam") }
}

fn settings(optimizer: OptimizerChoice) -> Settings {
    Settings { optimizer, reproducible: true, codec: Some(Codec::ONE_BIT), ..Settings::new(mixed()) }
}

fn start(settings: &Settings) -> Vec<Vec<f32>> {
    let lengths = settings.keys.keys().iter().map(|key| key.elements().unwrap());
    lengths.map(|elements| (0..elements).map(|i| i as f32 / 1000.0).collect()).collect()
}

/// The final parameters of every rank, chunk by chunk, by the kernels. `quantises` says which ranks quantise their gradients:
/// those whose bytes go over TCP.
fn expected(settings: &Settings, workers: u32, quantises: impl Fn(u32) -> bool) -> Vec<Vec<f32>> {
    let registry = Registry::with_builtins();
    let optimizer = registry.optimizer(&settings.optimizer.name).unwrap();
    let aggregator = registry.aggregator("sum").unwrap();
    let hyperparameters = settings.optimizer.hyperparameters.unwrap_or(optimizer.defaults());
    let map = ChunkMap::new(&settings.keys, settings.chunk_bytes).unwrap();
    let mut had = start(settings);
    for chunk in 0..map.len() {
        let extent = map.extent(chunk).unwrap();
        let key = &settings.keys.keys()[extent.key as usize];
        let (codec, whole) = (settings.codec_of(key), key.elements().unwrap() as usize);
        let at = extent.offset as usize..(extent.offset + u64::from(extent.elements)) as usize;
        let mut model = had[extent.key as usize][at.clone()].to_vec();
        let elements = model.len();
        let mut lost = vec![vec![0.0; elements]; workers as usize];
        let mut lost_by_hub = vec![0.0; elements];
        let mut seen = model.clone();
        let mut state = vec![0.0; elements * optimizer.state_slots(&hyperparameters)];
        let mut sum = vec![0.0; elements];
        let mut wire = vec![0; codec.payload_bytes(elements)];
        for step in 0..STEPS {
            for rank in 0..workers {
                let gradient = gradient(rank, extent.key, step, whole)[at.clone()].to_vec();
                let (wire, codec) = match codec.is_quantised() {
                    true if quantises(rank) => {
                        quantise::encode(&gradient, &mut lost[rank as usize], &mut wire, codec);
                        (&wire[..], codec)
                    }
                    true => (bytemuck::cast_slice(&gradient), Codec::F32),
                    false => {
                        convert::encode(&gradient, &mut wire, codec);
                        (&wire[..], codec)
                    }
                };
                match rank {
                    0 => aggregator.assign(&mut sum, wire, codec),
                    _ => aggregator.add(&mut sum, wire, codec),
                }
            }
            let number = u64::from(step) + 1;
            let step = Step {
                hyperparameters: &hyperparameters,
                number,
                contributions: workers,
                factor: 1.0,
                tensor: None,
            };
            optimizer.apply(&step, &mut model, &sum, &mut state);
            if !codec.is_quantised() {
                seen.copy_from_slice(&model);
            } else if settings.has_parameters() {
                quantise::encode_change(&model, &mut seen, &mut wire, codec);
            } else {
                quantise::encode(&model, &mut lost_by_hub, &mut wire, codec);
                convert::decode(&wire, &mut seen, codec);
            }
        }
        had[extent.key as usize][at].copy_from_slice(&seen);
    }
    had
}

/// One step of all keys, back to front as in training.
fn exchange_step(job: &Job, step: u32, model: &mut [Vec<f32>]) {
    let keys = (0..model.len() as u32).rev();
    let handles: Vec<_> = keys
        .map(|key| {
            let out = std::mem::take(&mut model[key as usize]);
            let gradient = gradient(job.rank(), key, step, out.len());
            (key, job.push_pull(key, gradient, out).unwrap())
        })
        .collect();
    for (key, handle) in handles {
        model[key as usize] = handle.wait().unwrap().1;
    }
}

#[track_caller]
fn assert_models(got: &[Vec<f32>], want: &[Vec<f32>], settings: &Settings, what: &str) {
    for ((got, want), key) in got.iter().zip(want).zip(settings.keys.keys()) {
        let wrong = got.iter().zip(want).position(|(got, want)| got.to_bits() != want.to_bits());
        let difference = wrong.map(|at| (at, got[at], want[at]));
        assert_eq!(difference, None, "{what}: key {key}: element, value, expected");
    }
}

fn quantised_keys_beside_exact_ones_come_out_as_the_kernels_make_them(transports: Transports) {
    for (workers, optimizer) in [(2, sgd(0.1, 0.9)), (3, adam()), (4, sgd(0.05, 0.0))] {
        for cores in [1, 2] {
            let cluster = Cluster::new(transports, cores);
            let settings = settings(optimizer.clone());
            let models = cluster.job("mixed", workers).run(&settings, |job| {
                let mut model = start(&settings);
                if job.rank() > 0 {
                    model.iter_mut().for_each(|values| values.fill(f32::NAN));
                }
                job.broadcast(&mut model, 0).unwrap();
                (0..STEPS).for_each(|step| exchange_step(job, step, &mut model));
                let mut pulled: Vec<Vec<f32>> =
                    model.iter().map(|values| vec![f32::NAN; values.len()]).collect();
                for (key, out) in (0..).zip(&mut pulled) {
                    *out = job.pull(key, std::mem::take(out)).unwrap().wait().unwrap().1;
                }
                assert_models(&pulled, &model, &settings, "pulled");
                model
            });
            let expected = expected(&settings, workers, |rank| quantises(transports, rank));
            for (rank, model) in models.iter().enumerate() {
                assert_models(model, &expected, &settings, &format!("rank {rank} of {workers}"));
            }
        }
    }
}

fn means_and_sums_come_back_quantised_with_what_the_hub_lost_before(transports: Transports) {
    for (workers, optimizer) in [(2, "mean"), (3, "sum")] {
        let cluster = Cluster::new(transports, 1);
        let settings = settings(OptimizerChoice::named(optimizer));
        let models = cluster.job(optimizer, workers).run(&settings, |job| {
            let mut model = start(&settings);
            (0..STEPS).for_each(|step| exchange_step(job, step, &mut model));
            // A pull into new memory returns the last mean once more.
            let out = job.pull(0, vec![f32::NAN; model[0].len()]).unwrap().wait().unwrap().1;
            assert_eq!(out, model[0]);
            model
        });
        let expected = expected(&settings, workers, |rank| quantises(transports, rank));
        for model in &models {
            assert_models(model, &expected, &settings, optimizer);
        }
    }
}

/// With the same gradient again and again, the relative error shrinks as the parameters move.
fn many_steps_end_where_exact_ones_do(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let train = |codec: Codec, steps: u32| {
        let settings = Settings {
            optimizer: sgd(0.01, 0.0),
            codec: Some(codec),
            ..Settings::new(KeyTable::new(vec![Key::new("w", [40, 100])]).unwrap())
        };
        let mut models = cluster.job(&format!("{codec}-{steps}"), 2).run(&settings, |job| {
            let mut model = start(&settings);
            job.broadcast(&mut model, 0).unwrap();
            for _ in 0..steps {
                exchange_step(job, 7, &mut model);
            }
            model.remove(0)
        });
        assert_eq!(models[0], models[1]);
        models.remove(0)
    };
    // The distance from the result of exact gradients, relative to the way there: squares of all parameters.
    let part = |codec, steps| {
        let (exact, ended) = (train(Codec::F32, steps), train(codec, steps));
        let squares = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
        let begun: Vec<f32> = (0..exact.len()).map(|i| i as f32 / 1000.0).collect();
        (squares(&exact, &ended) / squares(&exact, &begun)).sqrt()
    };
    for (codec, bound) in
        [(Codec::ONE_BIT, 0.1), (Codec::TWO_BIT, 0.03), (four_bits(), 0.01), (Codec::INT8, 1e-3)]
    {
        let (sooner, later) = (part(codec, 100), part(codec, 1000));
        println!("{codec}: {sooner} of the way off after 100 steps, {later} after 1000");
        assert!(later < sooner / 4.0 && later < bound, "{codec}: {sooner}, then {later}");
    }
}

#[test]
fn fewer_bytes_travel_each_way() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let table = || KeyTable::new(vec![Key::new("fc.weight", [4096, 256])]).unwrap();
    let travelled = |name: &str, codec: Codec| {
        let settings = Settings { optimizer: sgd(0.1, 0.0), codec: Some(codec), ..Settings::new(table()) };
        let counted = cluster.job(name, 2).run(&settings, |job| {
            let mut model = start(&settings);
            job.broadcast(&mut model, 0).unwrap();
            exchange_step(job, 0, &mut model);
            let before = job.statistics();
            (1..11).for_each(|step| exchange_step(job, step, &mut model));
            let after = job.statistics();
            [after.bytes_sent - before.bytes_sent, after.bytes_received - before.bytes_received]
        });
        counted[1]
    };
    let exact = travelled("exact", Codec::F32);
    for (codec, part) in
        [(Codec::ONE_BIT, 30.0), (Codec::TWO_BIT, 15.0), (four_bits(), 6.6), (Codec::INT8, 3.9)]
    {
        let quantised = travelled(&codec.to_string(), codec);
        for (way, (few, many)) in ["to the hub", "back"].into_iter().zip(quantised.into_iter().zip(exact)) {
            let times = many as f64 / few as f64;
            println!("{codec} {way}: {few} bytes instead of {many}, 1/{times:.2}");
            assert!(times > part, "{codec} {way}: {few} bytes instead of {many}");
        }
    }
}

/// Sums in order of arrival may differ from run to run, but never from rank to rank. How a rank gets its
/// parameters, and whether it skips some, does not matter either.
fn ranks_have_the_same_parameters_however_they_come_by_them(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings = Settings { reproducible: false, ..settings(adam()) };
    let models = cluster.job("ways", 3).run(&settings, |job| {
        let mut model = start(&settings);
        job.broadcast(&mut model, 0).unwrap();
        for step in 0..8 {
            let splits = job.rank() == 1 || (job.rank() == 2 && step % 3 == 0);
            if !splits {
                exchange_step(job, step, &mut model);
                continue;
            }
            for (key, values) in (0..).zip(&mut model) {
                let gradient = gradient(job.rank(), key, step, values.len());
                job.push(key, gradient).unwrap().wait().unwrap();
                // Rank 2 skips the parameters of this step.
                if job.rank() == 1 {
                    *values = job.pull(key, std::mem::take(values)).unwrap().wait().unwrap().1;
                }
            }
        }
        model
    });
    for model in &models[1..] {
        assert_models(model, &models[0], &settings, "another rank");
    }
}

/// Trains with values that all are in half precision, and returns the parameters and those that a pull brings. `to` makes an
/// element of the keys' type from a value in half precision.
fn train_in_half<T: Pod + Send + Sync>(job: &Job, to: impl Fn(bf16) -> T) -> [Vec<Vec<T>>; 2] {
    let of = |values: Vec<f32>| -> Vec<T> {
        values.into_iter().map(|value| to(bf16::from_f32((value * 64.0).round() / 64.0))).collect()
    };
    let zeros = |elements: usize| vec![to(bf16::ZERO); elements];
    let mut model: Vec<Vec<T>> = start(job.settings()).into_iter().map(&of).collect();
    if job.settings().has_parameters() {
        job.broadcast(&mut model, 0).unwrap();
    }
    for step in 0..2 * STEPS {
        let handles: Vec<_> = (0..)
            .zip(&model)
            .map(|(key, values)| {
                let gradient = of(gradient(job.rank(), key, step, values.len()));
                job.push_pull(key, gradient, zeros(values.len())).unwrap()
            })
            .collect();
        model = handles.into_iter().map(|handle| handle.wait().unwrap().1).collect();
    }
    let pulled = (0..)
        .zip(&model)
        .map(|(key, values)| job.pull(key, zeros(values.len())).unwrap().wait().unwrap().1)
        .collect();
    [model, pulled]
}

fn keys_of_half_precision_are_kept_in_f32_and_rounded_at_the_ranks(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    for (optimizer, choice) in [("sgd", sgd(0.001, 0.9)), ("mean", OptimizerChoice::named("mean"))] {
        let settings = |dtype| {
            let key = |name: &str, shape: &[u64]| Key { dtype, ..Key::new(name, shape) };
            let keys =
                vec![key("w", &[300, 67]), key("flat", &[8193]).in_codec(Codec::TWO_BIT), key("b", &[9])];
            Settings {
                optimizer: choice.clone(),
                reproducible: true,
                codec: Some(Codec::ONE_BIT),
                ..Settings::new(KeyTable::new(keys).unwrap())
            }
        };
        let exact =
            cluster.job(optimizer, 3).run(&settings(Dtype::F32), |job| train_in_half(job, bf16::to_f32));
        let exact = &exact[0];
        let between = exact[0][0].iter().filter(|value| bf16::from_f32(**value).to_f32() != **value).count();
        // Means come back as levels, which are bf16.
        assert_eq!(between > 1000, optimizer == "sgd", "{between} values are none in bf16");
        let in_f16 = cluster
            .job(&format!("{optimizer}-f16"), 3)
            .run(&settings(Dtype::F16), |job| train_in_half(job, |value| f16::from_f32(value.to_f32())));
        let in_bf16 = cluster
            .job(&format!("{optimizer}-bf16"), 3)
            .run(&settings(Dtype::BF16), |job| train_in_half(job, |value| value));
        for rank in 0..3 {
            for (way, exact) in exact.iter().enumerate() {
                for (key, exact) in exact.iter().enumerate() {
                    let what = format!("{optimizer}, rank {rank}, key {key}, pulled: {way}");
                    let rounded: Vec<f16> = exact.iter().map(|value| f16::from_f32(*value)).collect();
                    assert!(in_f16[rank][way][key] == rounded, "{what}: f16");
                    let rounded: Vec<bf16> = exact.iter().map(|value| bf16::from_f32(*value)).collect();
                    assert!(in_bf16[rank][way][key] == rounded, "{what}: bf16");
                }
            }
        }
    }
}

fn gradients_are_clipped_as_they_were_rebuilt(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let settings = Settings { clip_norm: Some(0.5), ..settings(sgd(1.0, 0.0)) };
    let models = cluster.job("clipped", 2).run(&settings, |job| {
        let mut model = start(&settings);
        job.broadcast(&mut model, 0).unwrap();
        exchange_step(job, 0, &mut model);
        model
    });
    assert_models(&models[1], &models[0], &settings, "the other rank");
    // The whole gradient is clipped to 0.5, so an exact key moves by no more than that. The larger the key,
    // the larger is its part of the whole.
    let moved: f32 = models[0][5]
        .iter()
        .zip(&start(&settings)[5])
        .map(|(new, old)| (new - old).powi(2))
        .sum::<f32>()
        .sqrt();
    assert!(moved > 0.05 && moved < 0.5, "moved by {moved}");
}

fn a_gradient_that_is_not_finite_fails_its_job_by_name(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let settings = Settings { codec: Some(Codec::ONE_BIT), ..Settings::new(mixed()) };
    beside_a_running_job(&cluster, || {
        let ticket = cluster.job("diverged", 2);
        // A rank that is still dialling would be notified of the end in another way.
        let both_are_in = Barrier::new(2);
        let messages = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..2)
                .map(|rank| {
                    let (ticket, settings, both_are_in) = (&ticket, &settings, &both_are_in);
                    scope.spawn(move || {
                        let job = ticket.join(rank, settings.clone()).unwrap();
                        both_are_in.wait();
                        let mut gradient = vec![0.5_f32; 300 * 67];
                        if rank == 1 {
                            gradient[9000] = f32::NAN;
                        }
                        let out = vec![0.0_f32; 300 * 67];
                        // The job may have failed before rank 0 asks.
                        let asked = job.push_pull(0, gradient, out);
                        asked.and_then(|handle| handle.wait()).map(drop).unwrap_err().to_string()
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        for message in messages {
            assert!(message.contains("rank 1") && message.contains("`fc1.weight`"), "{message}");
            // 808 into the second chunk, and so in its first block.
            let where_it_is = match quantises(transports, 1) {
                true => "from element 8192 on, which one-bit cannot carry",
                false => "element 9000",
            };
            assert!(message.contains(where_it_is), "{message}");
        }
    });
}

#[test]
fn payloads_that_are_none_fail_their_job_with_their_reason() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let one_bit = || Key::new("w", [4, 4]).in_codec(Codec::ONE_BIT);
    let settings = Settings::new(KeyTable::new(vec![one_bit()]).unwrap());
    let bytes = Codec::ONE_BIT.payload_bytes(16) as u32;
    assert_eq!(bytes, 6);
    let frame = |codec, length: u32, payload: &[u8]| {
        let header = Header { operation: Operation::PushPull, codec, chunk: 0, step: 0, length };
        [&header.encode()[..], payload].concat()
    };
    let nan = [0, 0, 0xc0, 0x7f, 0xff, 0xff];
    let offences = [
        (
            "short",
            frame(Codec::ONE_BIT, bytes - 1, &[0; 5]),
            "5 bytes of one-bit for chunk 0 of key `w`, which has 6",
        ),
        ("long", frame(Codec::ONE_BIT, bytes + 1, &[0; 7]), "7 bytes of one-bit"),
        ("another codec", frame(Codec::TWO_BIT, 12, &[0; 12]), "12 bytes of two-bit"),
        ("in full", frame(Codec::F32, 64, &[0; 64]), "64 bytes of f32"),
        ("no number", frame(Codec::ONE_BIT, bytes, &nan), "from element 0 on, which one-bit cannot carry"),
        (
            "no codec",
            {
                let mut bad = frame(Codec::ONE_BIT, bytes, &[0; 6]);
                bad[1] = 6;
                bad
            },
            "codec 6 does not exist",
        ),
    ];
    beside_a_running_job(&cluster, || {
        for (number, (what, bytes, reason)) in offences.into_iter().enumerate() {
            let ticket = cluster.job(&format!("offence{number}"), 1);
            let (mut raw, hello) = Raw::join_with(&cluster, &ticket, 0, &settings);
            let Verdict::Welcome { .. } = raw.shake_hands(&hello, &ticket) else {
                panic!("{what}: not let in")
            };
            raw.send(&bytes);
            let failure = raw.await_failure();
            assert_eq!(failure.rank, Some(0), "{what}");
            assert!(failure.message.contains(reason), "{what}: {}", failure.message);
            assert!(raw.is_closed(), "{what}");
        }
    });
}

#[test]
fn a_key_that_cannot_be_quantised_is_refused_with_its_reason() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let stale = Settings { consistency: Consistency::Asynchronous, reproducible: false, ..settings(adam()) };
    let message = cluster.job("async", 1).join(0, stale).map(drop).unwrap_err().to_string();
    assert!(
        message.contains("key `fc1.weight` (one-bit): ") && message.contains("answers are changes"),
        "{message}"
    );
}

#[test]
fn ranks_beside_their_hub_read_the_parameters_that_all_have_from_one_copy() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let settings = settings(sgd(0.1, 0.9));
    let ticket = cluster.job("shared", 3);
    let models = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let (ticket, settings) = (&ticket, &settings);
                scope.spawn(move || {
                    let (transport, shared_parameters) = match rank {
                        0 => (Transport::Tcp, ParameterSharing::Never),
                        _ => (Transport::Auto, ParameterSharing::Always),
                    };
                    let options = Options { transport, shared_parameters, ..Default::default() };
                    let member = Member::connect_with(ticket.membership(rank), options).unwrap();
                    let job = member.init(settings.clone()).unwrap();
                    assert_eq!(job.shares_memory(), rank > 0, "by default, too");
                    let mut model = start(settings);
                    job.broadcast(&mut model, 0).unwrap();
                    (0..STEPS).for_each(|step| exchange_step(&job, step, &mut model));
                    job.leave().unwrap();
                    model
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    let expected = expected(&settings, 3, |rank| rank == 0);
    for model in &models {
        assert_models(model, &expected, &settings, "with one copy of the parameters");
    }
}
