//! The optimizer's state, read from the hub and restored: training goes on as if it had never stopped.

use std::sync::Barrier;

use paramhub_core::codec::{Codec, Dtype};
use paramhub_core::consistency::Consistency;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::service::JobState;
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_core::wire::{Header, Operation, State, Verdict, Welcome};
use paramhub_hub::{HubConfig, RunningHub};
use paramhub_kernels::Hyperparameters;
use paramhub_worker::{Finished, Job, RegionRequest};

use crate::cluster::{Cluster, Ticket, Transports, gradient, keys, sgd};
use crate::raw::{self, Raw};

over_transports!(
    [tcp shm mixed]
    restored_training_is_the_uninterrupted_one_to_the_bit,
    state_comes_from_every_hub_and_of_half_precision_keys_in_single,
    state_of_a_step_under_way_is_that_of_the_last_one_complete,
    state_is_pulled_beside_asynchronous_updates_chunk_by_chunk_whole,
    a_request_that_cannot_succeed_is_refused_before_it_leaves,
    offences_against_state_fail_their_job_with_the_reason,
);

/// Sizes on both sides of the chunk size, whole blocks and not, and one element.
const SIZES: [u64; 5] = [1, 8192, 8193, 30_011, 300];

fn optimizers() -> Vec<OptimizerChoice> {
    let with = |name: &str, change: fn(&mut Hyperparameters)| {
        let mut hyperparameters =
            Hyperparameters { learning_rate: 0.01, weight_decay: 1e-3, ..Default::default() };
        change(&mut hyperparameters);
        OptimizerChoice { hyperparameters: Some(hyperparameters), ..OptimizerChoice::named(name) }
    };
    vec![
        with("sgd", |h| h.momentum = 0.9),
        with("sgd", |h| (h.momentum, h.nesterov) = (0.9, true)),
        with("adam", |_| {}),
        with("adamw", |_| {}),
    ]
}

/// The data from which a run is resumed.
#[derive(Clone, Debug, PartialEq)]
struct Checkpoint {
    step: u32,
    model: Vec<Vec<f32>>,
    /// Values and updates of every key and slot.
    state: Vec<Vec<(Vec<f32>, u64)>>,
}

impl Checkpoint {
    fn start() -> Self {
        let key = |&size: &u64| (0..size).map(|i| i as f32 / 1000.0).collect();
        Checkpoint { step: 0, model: SIZES.iter().map(key).collect(), state: Vec::new() }
    }

    fn of(job: &Job, step: u32, model: Vec<Vec<f32>>) -> Self {
        let slot = |key: u32, slot: u8, len: usize| {
            let pulled = job.pull_state(key, slot, vec![f32::NAN; len]).unwrap().finish();
            pulled.outcome.unwrap();
            (pulled.parameters, pulled.updates)
        };
        let state = (0..)
            .zip(&model)
            .map(|(key, values)| (0..job.state_slots()).map(|s| slot(key, s, values.len())).collect())
            .collect();
        Checkpoint { step, model, state }
    }

    /// Restores the state first, then the parameters.
    fn restore(&self, job: &Job) -> Vec<Vec<f32>> {
        if job.rank() == 0 {
            for (key, slots) in (0..).zip(&self.state) {
                for (slot, (values, updates)) in (0..).zip(slots) {
                    job.initialise_state(key, slot, values.clone(), *updates).unwrap().wait().unwrap();
                }
            }
        }
        let mut model = match job.rank() {
            0 => self.model.clone(),
            _ => self.model.iter().map(|key| vec![0.0; key.len()]).collect(),
        };
        job.broadcast(&mut model, self.step).unwrap();
        model
    }
}

/// Trains from a checkpoint until `end`. Returns what every rank could resume from.
fn train(ticket: &Ticket, settings: &Settings, from: &Checkpoint, end: u32) -> Vec<Checkpoint> {
    ticket.run(settings, |job| {
        let mut model = from.restore(job);
        for step in from.step..end {
            let handles: Vec<_> = (0..SIZES.len() as u32)
                .map(|key| {
                    let out = std::mem::take(&mut model[key as usize]);
                    job.push_pull(key, gradient(job.rank(), key, step, out.len()), out).unwrap()
                })
                .collect();
            for (handle, key) in handles.into_iter().zip(&mut model) {
                *key = handle.wait().unwrap().1;
            }
        }
        Checkpoint::of(job, end, model)
    })
}

fn restored_training_is_the_uninterrupted_one_to_the_bit(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    for (number, optimizer) in optimizers().into_iter().enumerate() {
        let settings = Settings { optimizer, reproducible: true, ..Settings::new(keys(&SIZES)) };
        let job = |what: &str| cluster.job(&format!("{what}{number}"), 3);
        let whole = train(&job("whole"), &settings, &Checkpoint::start(), 6);
        let half = train(&job("half"), &settings, &Checkpoint::start(), 3);
        assert!(half.windows(2).all(|pair| pair[0] == pair[1]), "every rank is given the same state");
        let slots = if settings.optimizer.name == "sgd" { 1 } else { 2 };
        assert!(half[0].state.iter().all(|key| key.len() == slots));
        assert!(half[0].state.iter().flatten().all(|(values, updates)| {
            *updates == 3 && values.iter().any(|&value| value != 0.0) && values.iter().all(|v| v.is_finite())
        }));
        let resumed = train(&job("resumed"), &settings, &half[0], 6);
        assert!(resumed == whole, "{:?} went on otherwise", settings.optimizer);
        // The state is what makes the difference.
        let forgetful = Checkpoint { state: Vec::new(), ..half[0].clone() };
        let other = train(&job("forgetful"), &settings, &forgetful, 6);
        assert_ne!(other[0].model, whole[0].model, "{:?}", settings.optimizer);
    }
}

fn state_comes_from_every_hub_and_of_half_precision_keys_in_single(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let second =
        RunningHub::start(cluster.client.clone(), HubConfig { cores: 2, ..Default::default() }).unwrap();
    let mut table = vec![Key::new("half", [20_001]), Key::new("single", [20_001])];
    table[0].dtype = Dtype::BF16;
    let settings = Settings {
        optimizer: sgd(0.5, 0.5),
        codec: Some(Codec::F16),
        ..Settings::new(KeyTable::new(table).unwrap())
    };
    let ticket = cluster.job("wide", 2);
    ticket.run(&settings, |job| {
        let (mut half, mut single) = (vec![half::bf16::ZERO; 20_001], vec![0.0_f32; 20_001]);
        job.scope(|scope| {
            let pair = match job.rank() {
                0 => [scope.initialise(0, &half[..], 0), scope.initialise(1, &single[..], 0)],
                _ => [scope.pull(0, &mut half[..]), scope.pull(1, &mut single[..])],
            };
            for handle in pair {
                handle.unwrap().wait().unwrap();
            }
        });
        let gradient: Vec<f32> = (0..20_001).map(|i| (i % 64) as f32).collect();
        let halves: Vec<half::bf16> = gradient.iter().map(|&value| half::bf16::from_f32(value)).collect();
        job.push_pull(0, halves, half).unwrap().wait().unwrap();
        job.push_pull(1, gradient.clone(), single).unwrap().wait().unwrap();
        for key in 0..2 {
            let mut momentum = vec![f32::NAN; 20_001];
            let updates =
                job.scope(|scope| scope.pull_state(key, 0, &mut momentum).unwrap().finish().updates);
            assert_eq!((updates, &momentum), (1, &gradient), "key {key}");
        }
    });
    second.stop();
}

fn state_of_a_step_under_way_is_that_of_the_last_one_complete(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings = Settings { optimizer: sgd(1.0, 1.0), ..Settings::new(keys(&[30_000])) };
    let (pushed, pulled) = (Barrier::new(2), Barrier::new(2));
    cluster.job("between", 2).run(&settings, |job| {
        let mut model = vec![vec![0.0_f32; 30_000]];
        job.broadcast(&mut model, 0).unwrap();
        let mut out = model.remove(0);
        for step in 1..=5_u64 {
            let push = |out| job.push_pull(0, vec![1.0_f32; 30_000], out).unwrap();
            out = match job.rank() {
                0 => {
                    let sent = job.statistics().bytes_sent;
                    let handle = push(out);
                    while job.statistics().bytes_sent < sent + 4 * 30_000 {
                        std::thread::yield_now();
                    }
                    pushed.wait();
                    pulled.wait();
                    handle.wait().unwrap().1
                }
                _ => {
                    pushed.wait();
                    let Finished { parameters, updates, .. } =
                        job.pull_state(0, 0, vec![f32::NAN; 30_000]).unwrap().finish();
                    pulled.wait();
                    assert_eq!(updates, step - 1);
                    assert!(parameters.iter().all(|&momentum| momentum == (step - 1) as f32), "step {step}");
                    push(out).wait().unwrap().1
                }
            };
            let Finished { parameters, updates, .. } =
                job.pull_state(0, 0, vec![f32::NAN; 30_000]).unwrap().finish();
            // The other rank can be a step ahead only after this one has contributed to that step.
            assert_eq!((updates, parameters[29_999]), (step, step as f32));
        }
    });
}

fn state_is_pulled_beside_asynchronous_updates_chunk_by_chunk_whole(transports: Transports) {
    const ELEMENTS: usize = 50_000;
    let cluster = Cluster::new(transports, 2);
    let settings = Settings {
        optimizer: OptimizerChoice {
            hyperparameters: Some(Hyperparameters { momentum: 1.0, ..Default::default() }),
            ..OptimizerChoice::named("sgd")
        },
        consistency: Consistency::Asynchronous,
        ..Settings::new(keys(&[ELEMENTS as u64]))
    };
    cluster.job("restless", 3).run(&settings, |job| {
        let mut model = vec![vec![0.0_f32; ELEMENTS]];
        job.broadcast(&mut model, 0).unwrap();
        for _ in 0..30 {
            job.push(0, vec![1.0_f32; ELEMENTS]).unwrap().wait().unwrap();
            let pulled = job.pull_state(0, 0, vec![f32::NAN; ELEMENTS]).unwrap().finish();
            pulled.outcome.unwrap();
            let mut least = u64::MAX;
            for chunk in pulled.parameters.chunks(8192) {
                assert!(chunk.iter().all(|&value| value == chunk[0]), "a chunk torn between two updates");
                least = least.min(chunk[0] as u64);
            }
            assert_eq!(pulled.updates, least, "each contribution of ones adds one to the momentum");
        }
    });
}

fn a_request_that_cannot_succeed_is_refused_before_it_leaves(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let settings = Settings { optimizer: sgd(0.1, 0.9), ..Settings::new(keys(&[10])) };
    let ticket = cluster.job("careful", 2);
    ticket.run(&settings, |job| {
        assert_eq!(job.state_slots(), 1);
        let message = job.pull_state(0, 1, vec![0.0_f32; 10]).unwrap_err().to_string();
        assert!(
            message.contains("keeps 1 values of state a parameter") && message.contains("there is no slot 1"),
            "{message}"
        );
        let message = job.pull_state(0, 0, vec![0.0_f32; 9]).unwrap_err().to_string();
        assert!(message.contains("takes 40 bytes, but the state has 36"), "{message}");
        if job.rank() == 0 {
            let message = job.initialise_state(0, 0, vec![0.0_f32; 10], u64::MAX).unwrap_err().to_string();
            assert!(message.contains("updates at most"), "{message}");
        } else {
            let message = job.initialise_state(0, 0, vec![0.0_f32; 10], 0).unwrap_err().to_string();
            assert!(message.contains("comes from rank 0"), "{message}");
        }
        // Over regions, as language bindings do it.
        if job.rank() == 0 {
            let values = paramhub_transport::SendRegion::owned(vec![2.0_f32; 10]);
            job.submit(0, RegionRequest::InitialiseState(values, 0, 4)).unwrap().wait().unwrap();
        }
        job.broadcast(&mut [vec![0.0_f32; 10]], 4).unwrap();
        let room = paramhub_transport::ReceiveRegion::owned(vec![0.0_f32; 10]);
        let pulled = job.submit(0, RegionRequest::PullState(room, 0)).unwrap().finish();
        assert_eq!((pulled.outcome.is_ok(), pulled.updates), (true, 4));
    });
    let plain = Settings::new(keys(&[10]));
    cluster.job("without", 1).run(&plain, |job| {
        assert_eq!(job.state_slots(), 0);
        let message = job.initialise_state(0, 0, vec![0.0_f32; 10], 0).unwrap_err().to_string();
        assert!(message.contains("keep no parameters"), "{message}");
    });
}

/// Frames by hand that break the rules of state, over TCP.
fn offences_against_state_fail_their_job_with_the_reason(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let settings = Settings { optimizer: sgd(0.1, 0.9), ..raw::settings() };
    let frame = |operation, step, payload: &[u8]| {
        let header = Header { step, length: payload.len() as u32, ..Header::bare(operation) };
        [&header.encode()[..], payload].concat()
    };
    let restore = |slot, updates| {
        frame(Operation::InitialiseState, slot, &[&State::head(updates)[..], &[0; 16]].concat())
    };
    let start = frame(Operation::Initialise, 0, &[0; 16]);
    let keeps = "of which this optimizer keeps 1, counted from 0";
    let before = "comes from rank 0, before its parameters";
    let offences: [(&str, Vec<u8>, u32, &str); 8] = [
        ("a slot that is not there", frame(Operation::PullState, 1, &[]), 0, keeps),
        ("a slot far away", frame(Operation::PullState, 0x0100_0000, &[]), 0, keeps),
        ("to a slot that is not there", restore(1, 0), 0, keeps),
        (
            "too little",
            frame(Operation::InitialiseState, 0, &[0; 20]),
            0,
            "20 bytes of f32 for chunk 0 of key `layer0`, which has 24 bytes",
        ),
        ("a request with a payload", frame(Operation::PullState, 0, &[0; 4]), 0, "announces 4 bytes"),
        ("after the parameters", [start, restore(0, 3)].concat(), 0, before),
        ("from another rank", restore(0, 3), 1, before),
        ("more updates than count", restore(0, u64::MAX), 0, "more than the 281474976710656"),
    ];
    for (number, (what, bytes, rank, reason)) in offences.into_iter().enumerate() {
        let name = format!("state{number}");
        let ticket = cluster.job(&name, 2);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let (mut other, hello) = Raw::join_with(&cluster, &ticket, 1 - rank, &settings);
                match other.shake_hands(&hello, &ticket) {
                    Verdict::Welcome { welcome: Welcome { state_slots: 1, .. }, .. } => {
                        other.await_failure().message
                    }
                    Verdict::Welcome { welcome, .. } => panic!("{welcome:?} announces other slots"),
                    // The job had failed before.
                    Verdict::Refused { message, .. } => message,
                }
            });
            let (mut raw, hello) = Raw::join_with(&cluster, &ticket, rank, &settings);
            assert!(matches!(raw.shake_hands(&hello, &ticket), Verdict::Welcome { .. }));
            raw.send(&bytes);
            let failure = raw.await_failure();
            assert_eq!(failure.rank, Some(rank), "{what}: {failure:?}");
            assert!(failure.message.contains(reason), "{what}: {}", failure.message);
            assert_eq!(other.join().unwrap(), failure.message, "{what}");
        });
        assert_eq!(cluster.await_end(&name).state, JobState::Failed, "{what}");
    }
    // The hub goes on.
    train(
        &cluster.job("after", 2),
        &Settings { optimizer: sgd(0.1, 0.9), ..Settings::new(keys(&SIZES)) },
        &Checkpoint::start(),
        1,
    );
}
