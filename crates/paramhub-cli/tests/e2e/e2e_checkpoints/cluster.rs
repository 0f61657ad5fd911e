//! A manager and hubs that keep checkpoints, jobs on them, and the trainings of these jobs.

use std::path::Path;

use crate::common::wait_until;
use paramhub::checkpoint::{Every, Resume};
use paramhub::service::{CreateService, JobOptions};
use paramhub::settings::{OptimizerChoice, Settings};
use paramhub::{
    CheckpointConfig, HubConfig, Hyperparameters, Job, Key, KeyTable, Manager, ManagerClient, ManagerConfig,
    Member, Membership, Options, RunningHub, RunningManager, WorkerError,
};
use paramhub_hub::{FoundCheckpoint, list_checkpoints};
use tempfile::TempDir;

/// Below and above the size of a chunk, in whole blocks and not.
pub(crate) const SIZES: [u64; 4] = [1, 8192, 30_011, 300];
pub(crate) const WORKERS: u32 = 2;

/// A manager and hubs that share a folder of checkpoints.
pub(crate) struct Cluster {
    pub(crate) client: ManagerClient,
    pub(crate) hubs: Vec<RunningHub>,
    /// The racks of the ranks, if they have any.
    racks: Vec<&'static str>,
    pub(crate) manager: Option<RunningManager>,
}

impl Cluster {
    /// A cluster with one hub for each number of cores.
    pub(crate) fn new(folder: &Path, cores: &[usize]) -> Cluster {
        Cluster::with(folder, cores, Vec::new())
    }

    /// A cluster in which each hub and each rank is in the rack of that name.
    pub(crate) fn of_racks(folder: &Path, racks: Vec<&'static str>) -> Cluster {
        Cluster::with(folder, &vec![2; racks.len()], racks)
    }

    pub(crate) fn with(folder: &Path, cores: &[usize], racks: Vec<&'static str>) -> Cluster {
        let listen = "127.0.0.1:0".parse().unwrap();
        let manager = Manager::start(ManagerConfig { listen, ..Default::default() }).unwrap();
        let client = ManagerClient::new(&manager.url(), None).unwrap();
        let hub = |(number, &cores): (usize, &usize)| {
            let checkpoints = Some(CheckpointConfig { folder: folder.to_path_buf(), keep: 3 });
            let (memory_bytes, rack) = (Some(2 << 30), racks.get(number).map(ToString::to_string));
            let config = HubConfig { cores, rack, checkpoints, memory_bytes, ..Default::default() };
            RunningHub::start(client.clone(), config).unwrap()
        };
        let hubs = cores.iter().enumerate().map(hub).collect();
        Cluster { client, hubs, racks, manager: Some(manager) }
    }

    pub(crate) fn options(&self, every: Option<&str>, resume: Option<Resume>) -> JobOptions {
        JobOptions {
            rendezvous_timeout_s: 30.0,
            checkpoint_every: every.map(|every| every.parse::<Every>().unwrap()),
            resume,
            hubs: Some(self.hubs.len() as u32),
            ..Default::default()
        }
    }

    /// Runs a job. Returns each rank's result.
    pub(crate) fn run<T: Send>(
        &self,
        name: &str,
        options: JobOptions,
        settings: &Settings,
        work: impl Fn(&Job) -> T + Sync,
    ) -> Result<Vec<T>, WorkerError> {
        let request = CreateService { name: name.into(), workers: WORKERS, options };
        let created = self.client.create_service(&request).unwrap();
        let made = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..WORKERS)
                .map(|rank| {
                    let (work, url) = (&work, self.client.url().to_owned());
                    let rack = self.racks.get(rank as usize).map(ToString::to_string);
                    let membership = Membership::of_job(url, &created, rank);
                    scope.spawn(move || {
                        let job = Member::connect_with(membership, Options { rack, ..Default::default() })?
                            .init(settings.clone())?;
                        let made = work(&job);
                        job.leave()?;
                        Ok(made)
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        // The job's name is free again.
        self.await_end(name);
        made
    }

    /// Waits until the hubs are done with a job, including its last checkpoint.
    pub(crate) fn await_end(&self, name: &str) {
        wait_until("the job's end", || self.client.job(name).is_ok_and(|job| job.state.has_ended()));
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.hubs.drain(..).for_each(RunningHub::stop);
        if let Some(manager) = self.manager.take() {
            manager.stop();
        }
    }
}

pub(crate) fn settings() -> Settings {
    let hyperparameters =
        Hyperparameters { learning_rate: 0.1 / 3.0, weight_decay: 1e-3, ..Default::default() };
    let keys = SIZES.iter().enumerate().map(|(i, &n)| Key::new(format!("layer{i}.weight"), [n]));
    Settings {
        optimizer: OptimizerChoice {
            hyperparameters: Some(hyperparameters),
            ..OptimizerChoice::named("adamw")
        },
        reproducible: true,
        ..Settings::new(KeyTable::new(keys.collect()).unwrap())
    }
}

pub(crate) fn gradient(rank: u32, key: u32, step: u32, elements: usize) -> Vec<f32> {
    let seed = u64::from(rank) << 40 ^ u64::from(key) << 20 ^ u64::from(step);
    let number = |element: u64| {
        let mut bits = (seed << 20 ^ element).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((bits >> 40) as f32 / (1_u64 << 23) as f32) - 1.0
    };
    (0..elements as u64).map(number).collect()
}

/// Trains until `end` from the job's present step, and returns where it began. Rank 0 calls `between` after
/// each step, while the others are at most one step's gradient ahead.
pub(crate) fn train(job: &Job, end: u32, between: impl Fn(u32)) -> (u32, Vec<Vec<f32>>) {
    let mut model: Vec<Vec<f32>> = SIZES.iter().map(|&n| vec![0.5; n as usize]).collect();
    job.broadcast(&mut model, 0).unwrap();
    let begin = job.next_step(0).unwrap();
    for step in begin..end {
        let handles: Vec<_> = (0..SIZES.len() as u32)
            .map(|key| {
                let out = std::mem::take(&mut model[key as usize]);
                job.push_pull(key, gradient(job.rank(), key, step, out.len()), out).unwrap()
            })
            .collect();
        for (handle, key) in handles.into_iter().zip(&mut model) {
            *key = handle.wait().unwrap().1;
        }
        if job.rank() == 0 {
            between(step + 1);
        }
    }
    (begin, model)
}

/// The same from these parameters and this step.
pub(crate) fn train_on(job: &Job, mut model: Vec<Vec<f32>>, begin: u32, end: u32) -> Vec<Vec<f32>> {
    for step in begin..end {
        for key in 0..SIZES.len() as u32 {
            let out = std::mem::take(&mut model[key as usize]);
            let gradient = gradient(job.rank(), key, step, out.len());
            model[key as usize] = job.push_pull(key, gradient, out).unwrap().wait().unwrap().1;
        }
    }
    model
}

pub(crate) fn scratch() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// A job's checkpoints, the newest first.
pub(crate) fn all(folder: &Path, job: &str) -> Vec<FoundCheckpoint> {
    list_checkpoints(folder).ok().and_then(|mut jobs| jobs.remove(job)).unwrap_or_default()
}

pub(crate) fn complete(folder: &Path, job: &str) -> Vec<u32> {
    all(folder, job).into_iter().filter(|found| found.flaw.is_none()).map(|found| found.step).collect()
}

/// Waits after each multiple of `every` until the checkpoint that is due has been written, before the next
/// step.
pub(crate) fn waiting_for_checkpoints<'a>(
    folder: &'a Path,
    job: &'a str,
    every: u32,
) -> impl Fn(u32) + Sync + 'a {
    move |step| {
        if step.is_multiple_of(every) {
            wait_until("a checkpoint", || complete(folder, job).contains(&step));
        }
    }
}
