//! The messages between the launcher and its workers.

use std::path::{Path, PathBuf};

use anyhow::Context;
use paramhub::Transport;
use paramhub::service::JobOptions;
use paramhub_bench::training::TrainOptimizer;
use paramhub_core::combinations::{self, Feature, Features};
use paramhub_train::trainer::{Epoch, Progress, Report};
use serde::{Deserialize, Serialize};

use super::environment::options;
use super::rank_launcher::RankLauncher;
use crate::config::{Config, ExchangeKind, TrainSection};
use crate::{Usage, deployment};

/// Bounds of the time from one kill of `--chaos` to the next. A process needs some of it to start.
const CHAOS_S_MIN: f64 = 0.05;
const CHAOS_S_MAX: f64 = 3600.0;

/// The task, in one file for all workers. Each worker's rank and job are in its environment.
#[derive(Serialize, Deserialize)]
pub(super) struct Spec {
    pub(super) train: TrainSection,
    /// The file for the final parameters.
    pub(super) folder: PathBuf,
}

/// A line of a worker's output.
#[derive(Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Message {
    Progress(StepsDone),
    /// The worker has joined the job, and this is the first step to which it contributes. Only `--chaos` asks for this.
    Joined {
        step: usize,
    },
    /// The worker's report is in the folder.
    Reported,
}

/// The progress of rank 0, or of any rank with `--chaos`.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) struct StepsDone {
    pub(super) step: usize,
    pub(super) of: usize,
    pub(super) epoch: usize,
    pub(super) loss: f64,
    pub(super) examples_per_second: f64,
    /// The accuracy on the test set, if it was measured after this step.
    pub(super) accuracy: Option<f64>,
}

impl From<&Progress> for StepsDone {
    fn from(progress: &Progress) -> Self {
        let &Progress { step, of, epoch, loss, examples_per_second, accuracy } = progress;
        StepsDone { step, of, epoch, loss, examples_per_second, accuracy }
    }
}

/// The results of a worker's run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct WorkerReport {
    pub(super) rank: usize,
    pub(super) steps: usize,
    pub(super) seconds: f64,
    pub(super) loss: f64,
    /// The accuracy on the test set, which rank 0 alone measures, except with `--chaos`.
    pub(super) accuracy: Option<f64>,
    pub(super) compute_seconds: f64,
    pub(super) wait_seconds: f64,
    pub(super) exchange_seconds: f64,
    pub(super) hidden_fraction: f64,
    pub(super) bytes_sent: u64,
    pub(super) bytes_received: u64,
    /// The way in which the worker's tensors travelled.
    pub(super) transport: String,
    pub(super) epochs: Vec<EpochDone>,
}

/// The results of an epoch.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct EpochDone {
    epoch: usize,
    /// The step of the run at which the epoch ended.
    step: usize,
    /// Rank 0's mean loss.
    loss: f64,
    /// The accuracy on the test set, if it was measured.
    accuracy: Option<f64>,
}

impl From<&Epoch> for EpochDone {
    fn from(&Epoch { epoch, step, loss, accuracy }: &Epoch) -> Self {
        EpochDone { epoch, step, loss, accuracy }
    }
}

impl WorkerReport {
    /// Writes the report for the launcher.
    pub(super) fn write(&self, folder: &Path) -> anyhow::Result<()> {
        let path = report_file(folder, self.rank);
        let text = serde_json::to_vec(self).context("the report is no JSON")?;
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Reads the report of a worker.
    pub(super) fn read(folder: &Path, rank: usize) -> anyhow::Result<WorkerReport> {
        let path = report_file(folder, rank);
        let text = std::fs::read(&path)
            .with_context(|| format!("cannot read worker {rank}'s report, {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} is no worker's report", path.display()))
    }

    pub(super) fn new(rank: usize, report: &Report, transport: &str) -> Self {
        WorkerReport {
            rank,
            steps: report.steps,
            seconds: report.seconds,
            loss: report.loss,
            accuracy: report.accuracy,
            compute_seconds: report.compute_seconds,
            wait_seconds: report.wait_seconds,
            exchange_seconds: report.exchange_seconds,
            hidden_fraction: report.hidden_fraction,
            bytes_sent: report.bytes_sent,
            bytes_received: report.bytes_received,
            transport: transport.to_owned(),
            epochs: report.epochs.iter().map(EpochDone::from).collect(),
        }
    }
}

fn report_file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("report-{rank}.json"))
}

/// Refuses options that are out of bounds, or do not combine. `launcher` has started this process as one of
/// several ranks; with `None` the command starts the workers itself.
pub(crate) fn check(config: &Config, launcher: Option<RankLauncher>) -> Result<(), String> {
    let section = &config.train;
    if section.workers() == 0 {
        return Err("--workers 0: a job needs at least one worker".into());
    }
    if section.epochs == 0 {
        return Err("--epochs 0: nothing would be learnt".into());
    }
    if section.cores == 0 {
        return Err("--cores 0: a hub needs at least one core".into());
    }
    if let Some(seconds) = section.chaos_s
        && !(CHAOS_S_MIN..=CHAOS_S_MAX).contains(&seconds)
    {
        return Err(format!(
            "--chaos={seconds}: give the seconds from one kill to the next, {CHAOS_S_MIN} to {CHAOS_S_MAX}"
        ));
    }
    combinations::check(asked(config, launcher)).map_err(|conflict| conflict.to_string())
}

/// The features of a training's options. Those that have a default count if they differ from it.
fn asked(config: &Config, launcher: Option<RankLauncher>) -> Features {
    let (section, defaults) = (&config.train, TrainSection::default());
    let is_of_run = launcher == Some(RankLauncher::Run);
    let through_hubs = section.exchange == ExchangeKind::Hub;
    // The job of ranks that `paramhub run` has started has its hubs already.
    let is_managed = config.url.is_some() || is_of_run;
    let starts_hub = through_hubs && !is_managed;
    let chosen = Features::of([
        (Feature::ChosenConsistency, section.consistency != defaults.consistency),
        (Feature::ChosenScheme, section.scheme != defaults.scheme),
        (Feature::ChosenCodec, section.codec != defaults.codec),
        (Feature::ChosenReduction, section.reduction != defaults.reduction),
        (Feature::ChosenTransport, section.transport != defaults.transport),
        (Feature::Reproducible, section.reproducible != defaults.reproducible),
        (Feature::ChunkBytes, section.chunk_bytes != defaults.chunk_bytes),
        (Feature::ComputeThreads, section.compute_threads != defaults.compute_threads),
        (Feature::CheckedCollectives, section.check_collectives),
        (Feature::Trace, section.trace.is_some()),
        (Feature::HubCores, section.cores != defaults.cores),
        (Feature::JobName, section.name.is_some()),
        (Feature::Workers, section.workers.is_some()),
        (Feature::Chaos, section.chaos_s.is_some()),
        (Feature::NoChaos, section.chaos_s.is_none()),
        (Feature::ChaosSeed, section.chaos_seed.is_some()),
    ]);
    let is_adam = matches!(section.optimizer, TrainOptimizer::Adam | TrainOptimizer::AdamW);
    let shares_memory = section.transport == Transport::Shm;
    let circumstances = Features::of([
        (Feature::Momentum, section.momentum != defaults.momentum),
        (Feature::AdamOptimizer, is_adam),
        (Feature::Quantised, section.codec.is_quantised()),
        (Feature::SharedMemory, shares_memory),
        (Feature::OnlySharedMemory, shares_memory),
        (Feature::CheckpointFolder, section.checkpoints.is_some()),
        (Feature::NoCheckpointFolder, starts_hub && section.checkpoints.is_none()),
        (Feature::RunningHub, through_hubs && config.url.is_some() && !is_of_run),
        (Feature::StartedByRun, is_of_run),
        (Feature::StartedByMpi, launcher == Some(RankLauncher::Mpi)),
    ]);
    // `train` has no flag for this policy of its job: messages are to name `--chaos` instead.
    let on_worker_loss = JobOptions::default().on_worker_loss;
    let options = JobOptions { hubs: section.hubs, on_worker_loss, ..options(section) };
    chosen
        .and(circumstances)
        .and(options.features())
        .and(deployment::asked(section.deployment, section.hubs, is_managed))
        .with(section.exchange.feature())
}

/// Refuses destinations in folders that do not exist, rather than fail after minutes of training.
pub(super) fn check_destinations(section: &TrainSection) -> anyhow::Result<()> {
    for (flag, path) in [("--json", &section.json), ("--save", &section.save), ("--trace", &section.trace)] {
        let Some(path) = path else { continue };
        let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        if !parent.is_dir() {
            return Err(
                Usage(format!("{flag} {}: there is no folder {}", path.display(), parent.display())).into()
            );
        }
    }
    Ok(())
}
