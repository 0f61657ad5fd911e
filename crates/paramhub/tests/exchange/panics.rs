//! A panic in a hub's core: the core's own jobs fail with the reason, all others go on, and the core serves
//! again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use paramhub_core::chunk::ChunkMap;
use paramhub_core::placement::Placement;
use paramhub_core::scheme::{self, Plan};
use paramhub_core::service::{JobOptions, JobState, OnWorkerLoss};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_hub::{CheckpointConfig, HubConfig, RunningHub};
use paramhub_kernels::{Hyperparameters, Optimizer, Step};
use paramhub_worker::WorkerError;

use crate::cluster::{Cluster, Transports, await_true, keys};

over_transports!(
    [tcp shm mixed]
    a_core_that_panics_costs_its_own_jobs_and_no_others,
    a_core_may_panic_again_and_again,
    a_core_that_panics_costs_a_job_with_checkpoints_the_steps_since_the_newest,
    an_optimizer_that_panics_before_a_job_begins_is_refused,
);

/// A sum on which the optimizer under test panics.
const UNFORESEEN: f32 = 13.0;

/// Panics if a sum begins with [`UNFORESEEN`].
struct Fragile;

impl Optimizer for Fragile {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        0
    }

    fn apply(&self, _: &Step<'_>, model: &mut [f32], sum: &[f32], _: &mut [f32]) {
        assert!(sum[0] != UNFORESEEN, "an unforeseen\nsum");
        model.copy_from_slice(sum);
    }
}

/// Does the same, but for the first sum only that begins so.
#[derive(Default)]
struct FragileOnce {
    has_panicked: AtomicBool,
}

impl Optimizer for FragileOnce {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        0
    }

    fn apply(&self, _: &Step<'_>, model: &mut [f32], sum: &[f32], _: &mut [f32]) {
        let panics = sum[0] == UNFORESEEN && !self.has_panicked.swap(true, Ordering::Relaxed);
        assert!(!panics, "an unforeseen sum");
        model.iter_mut().zip(sum).for_each(|(parameter, sum)| *parameter += sum);
    }
}

/// Panics before any core uses it.
struct Absurd;

impl Optimizer for Absurd {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        panic!("how should I know")
    }

    fn apply(&self, _: &Step<'_>, _: &mut [f32], _: &[f32], _: &mut [f32]) {}
}

fn cluster(transports: Transports) -> Cluster {
    Cluster::with(transports, |config: &mut HubConfig| {
        config.cores = 2;
        config.registry.register_optimizer("fragile", Arc::new(Fragile)).unwrap();
        config.registry.register_optimizer("absurd", Arc::new(Absurd)).unwrap();
    })
}

/// The settings of a job with a tensor on each core.
fn settings() -> Settings {
    Settings { optimizer: OptimizerChoice::named("fragile"), ..Settings::new(keys(&[4, 4])) }
}

/// The core of the hub that has a key's only chunk.
fn core_of(cluster: &Cluster, settings: &Settings, key: u32) -> u16 {
    let map = ChunkMap::new(&settings.keys, settings.chunk_bytes).unwrap();
    let shape = cluster.client.hubs().unwrap().remove(0).shape;
    let spreads = Plan::new(settings, &scheme::Cluster::beside_workers(2)).spreads(settings.keys.len());
    let placement = Placement::planned(&settings.keys, &map, &[shape], &spreads).unwrap();
    let (route, _) = placement.locate(key).unwrap();
    placement.routes()[usize::from(route)].core
}

/// Pushes a tensor that begins with `first`, and returns the result.
fn exchange(
    job: &paramhub_worker::Job,
    key: u32,
    first: f32,
) -> Result<Vec<f32>, paramhub_worker::WorkerError> {
    let gradient = vec![first, 1.0, 1.0, 1.0];
    Ok(job.push_pull(key, gradient, vec![0.0_f32; 4])?.wait()?.1)
}

fn begin(job: &paramhub_worker::Job) {
    job.broadcast(&mut vec![vec![0.0_f32; 4]; job.settings().keys.len()], 0).unwrap();
}

fn a_core_that_panics_costs_its_own_jobs_and_no_others(transports: Transports) {
    let cluster = cluster(transports);
    let alone = Settings::new(keys(&[4]));
    let beside = core_of(&cluster, &alone, 0);
    let key =
        (0..2).find(|&key| core_of(&cluster, &settings(), key) != beside).expect("a tensor on each core");
    let (elsewhere, fragile) = (cluster.job("elsewhere", 1), cluster.job("fragile", 2));
    let going_on = elsewhere.join(0, alone).unwrap();
    assert_eq!(exchange(&going_on, 0, 2.0).unwrap(), [2.0, 1.0, 1.0, 1.0]);
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let fragile = &fragile;
            scope.spawn(move || {
                let job = fragile.join(rank, settings()).unwrap();
                begin(&job);
                for key in 0..2 {
                    assert_eq!(exchange(&job, key, 1.0).unwrap()[0], 2.0, "of two ranks");
                }
                exchange(&job, key, UNFORESEEN / 2.0).unwrap_err().to_string()
            })
        });
        for rank in ranks {
            let error = rank.join().unwrap();
            assert!(error.contains("job `fragile` failed") && error.contains("panicked"), "{error}");
        }
    });
    let status = cluster.await_end("fragile");
    assert_eq!(status.state, JobState::Failed);
    for part in ["of its hub panicked (an unforeseen sum)", "fault of the hub", "start the job again"] {
        assert!(status.message.contains(part), "{part}: {}", status.message);
    }
    // The other core's job was not affected.
    assert_eq!(exchange(&going_on, 0, 3.0).unwrap(), [3.0, 1.0, 1.0, 1.0]);
    assert_eq!(cluster.hub().failure(), None);
    // No job is left on either core, and both serve the next one.
    let both = cluster.job("after", 2).run(&settings(), |job| {
        begin(job);
        [0, 1].map(|key| exchange(job, key, 2.0).unwrap()[0])
    });
    assert_eq!(both, [[4.0; 2]; 2]);
    going_on.leave().unwrap();
    for name in ["after", "elsewhere"] {
        assert_eq!(cluster.await_end(name).state, JobState::Finished, "{name}");
    }
    await_true("all memory is free", || (cluster.hub().memory_bytes() == 0).then_some(()));
}

fn a_core_may_panic_again_and_again(transports: Transports) {
    let cluster = cluster(transports);
    for round in 0..5 {
        let name = format!("round{round}");
        let job = cluster.job(&name, 1).join(0, settings()).unwrap();
        begin(&job);
        let message = exchange(&job, 0, UNFORESEEN).unwrap_err().to_string();
        assert!(message.contains("panicked (an unforeseen sum)"), "{message}");
        assert_eq!(cluster.await_end(&name).state, JobState::Failed);
    }
    assert_eq!(cluster.hub().failure(), None);
}

fn an_optimizer_that_panics_before_a_job_begins_is_refused(transports: Transports) {
    let cluster = cluster(transports);
    let ticket = cluster.job("absurd", 1);
    let absurd = Settings { optimizer: OptimizerChoice::named("absurd"), ..Settings::new(keys(&[4])) };
    let message = ticket.join(0, absurd).map(drop).unwrap_err().to_string();
    assert!(message.contains("made its hub panic (how should I know)"), "{message}");
    assert_eq!(cluster.hub().failure(), None);
    cluster.job("after", 1).run(&settings(), begin);
}

fn a_core_that_panics_costs_a_job_with_checkpoints_the_steps_since_the_newest(transports: Transports) {
    const STEPS_AFTERWARDS: u32 = 50;
    let folder = tempfile::tempdir().unwrap();
    let cluster = Cluster::with(transports, |config: &mut HubConfig| {
        config.cores = 2;
        config.checkpoints = Some(CheckpointConfig { folder: folder.path().into(), keep: 2 });
        config.registry.register_optimizer("fragile", Arc::new(FragileOnce::default())).unwrap();
    });
    let options = JobOptions {
        rendezvous_timeout_s: 20.0,
        on_worker_loss: OnWorkerLoss::Rewind,
        checkpoint_every: Some("2".parse().unwrap()),
        ..Default::default()
    };
    let ticket = cluster.job_with("going-on", 2, options);
    let is_kept = || {
        let status = cluster.client.job("going-on").unwrap();
        status.checkpoints.is_some_and(|written| written.step.is_some())
    };
    // Makes steps until the core panics or, after that, some more. Returns the number of all steps, and the tensors.
    let life = |rank: u32| -> Result<(u32, Vec<f32>), WorkerError> {
        let job = ticket.join(rank, settings())?;
        job.broadcast(&mut vec![vec![0.0_f32; 4]; 2], 0)?;
        let end = job.resumed_step().map_or(u32::MAX, |step| step + STEPS_AFTERWARDS);
        let mut model = vec![0.0; 2];
        for step in job.next_step(0)?..end {
            // The other rank contributes 1.
            let is_unforeseen = rank == 0 && end == u32::MAX && step % 20 == 19 && is_kept();
            let first = if is_unforeseen { UNFORESEEN - 1.0 } else { 1.0 };
            for (key, parameter) in (0..).zip(&mut model) {
                *parameter = exchange(&job, key, first)?[0];
            }
        }
        job.leave()?;
        Ok((end, model))
    };
    let ends = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let life = &life;
            scope.spawn(move || {
                loop {
                    match life(rank) {
                        Err(WorkerError::Rewound { .. }) => {}
                        ended => return ended.unwrap(),
                    }
                }
            })
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    for (steps, model) in ends {
        assert!(steps > STEPS_AFTERWARDS, "it went back to a checkpoint");
        assert_eq!(model, [steps as f32 * 2.0; 2], "each step counts once");
    }
    assert_eq!(cluster.await_end("going-on").state, JobState::Finished);
}

#[test]
fn a_core_that_panics_costs_a_job_with_standbys_nothing() {
    let optimizer = Arc::new(FragileOnce::default());
    let register = |config: &mut HubConfig| {
        config.registry.register_optimizer("fragile", optimizer.clone()).unwrap();
    };
    let cluster = Cluster::with(Transports::tcp(), register);
    let mut config = HubConfig { memory_bytes: Some(1 << 30), ..Default::default() };
    register(&mut config);
    let second = RunningHub::start(cluster.client.clone(), config).unwrap();
    let options = JobOptions { replicas: 1, hubs: Some(2), ..Default::default() };
    let both = cluster.job_with("kept", 2, options).run(&settings(), |job| {
        begin(job);
        let mut model = [0.0; 2];
        for step in 0..6 {
            for key in 0..2 {
                let first = if step == 2 && key == 0 { UNFORESEEN / 2.0 } else { 1.0 };
                model[key as usize] = exchange(job, key, first).unwrap()[0];
            }
        }
        model
    });
    assert_eq!(both, [[UNFORESEEN + 10.0, 12.0]; 2]);
    assert!(optimizer.has_panicked.load(Ordering::Relaxed));
    assert_eq!(cluster.await_end("kept").state, JobState::Finished);
    second.stop();
}
