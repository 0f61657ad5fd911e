//! What the launcher tells its workers, and they tell it.

use std::path::{Path, PathBuf};

use anyhow::Context;
use paramhub_core::scheme::LayerSettings;
use paramhub_train::net::Network;
use paramhub_train::trainer::{Epoch, Evaluate, Progress, Report, TrainConfig};
use serde::{Deserialize, Serialize};

use crate::cli::Usage;
use crate::config::{ExchangeKind, TrainOptimizer, TrainSection};
use crate::settings::{OptimizerChoice, Settings};
use crate::{Hyperparameters, KeyTable, Registry, Transport};

/// How often a training measures the test set unless it is said how often.
const TESTS: usize = 8;

/// One file for all workers; where and as whom to join stands in their environment.
#[derive(Serialize, Deserialize)]
pub(super) struct Spec {
    pub(super) train: TrainSection,
    /// Where the final parameters go.
    pub(super) folder: PathBuf,
}

/// A line of a worker's output.
#[derive(Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Message {
    Progress(StepsDone),
    /// The worker's report is in the folder.
    Reported,
}

/// Where rank 0 is.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) struct StepsDone {
    pub(super) step: usize,
    pub(super) of: usize,
    pub(super) epoch: usize,
    pub(super) loss: f64,
    pub(super) examples_per_second: f64,
    /// The accuracy on the test set, where it was measured after this step.
    pub(super) accuracy: Option<f64>,
}

impl From<&Progress> for StepsDone {
    fn from(progress: &Progress) -> Self {
        let &Progress { step, of, epoch, loss, examples_per_second, accuracy } = progress;
        StepsDone { step, of, epoch, loss, examples_per_second, accuracy }
    }
}

/// A worker's run, at its end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct WorkerReport {
    pub(super) steps: usize,
    pub(super) seconds: f64,
    pub(super) loss: f64,
    /// Rank 0 measures it.
    pub(super) accuracy: Option<f64>,
    pub(super) compute_seconds: f64,
    pub(super) wait_seconds: f64,
    pub(super) exchange_seconds: f64,
    pub(super) hidden_fraction: f64,
    pub(super) bytes_sent: u64,
    pub(super) bytes_received: u64,
    /// How its tensors travelled.
    pub(super) transport: String,
    pub(super) epochs: Vec<EpochDone>,
}

/// What an epoch came to.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct EpochDone {
    epoch: usize,
    /// Of the run, when it ended.
    step: usize,
    /// Rank 0's mean.
    loss: f64,
    /// Of the test set, where it was measured.
    accuracy: Option<f64>,
}

impl From<&Epoch> for EpochDone {
    fn from(&Epoch { epoch, step, loss, accuracy }: &Epoch) -> Self {
        EpochDone { epoch, step, loss, accuracy }
    }
}

impl WorkerReport {
    /// Leaves it for the launcher.
    pub(super) fn write(&self, folder: &Path, rank: usize) -> anyhow::Result<()> {
        let path = report_file(folder, rank);
        let text = serde_json::to_vec(self).context("the report is no JSON")?;
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// What a worker has left.
    pub(super) fn read(folder: &Path, rank: usize) -> anyhow::Result<WorkerReport> {
        let path = report_file(folder, rank);
        let text = std::fs::read(&path)
            .with_context(|| format!("cannot read worker {rank}'s report, {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} is no worker's report", path.display()))
    }

    pub(super) fn new(report: &Report, transport: &str) -> Self {
        WorkerReport {
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

impl TrainSection {
    pub(in crate::cli) fn trainer(&self, evaluate: bool) -> TrainConfig {
        let usual = || match self.stragglers.leaves_out() {
            // Who measures is late, and would be left out.
            true => Evaluate::AtEnd,
            false => Evaluate::Every(self.epochs.div_ceil(TESTS)),
        };
        let evaluate = match evaluate {
            false => Evaluate::Never,
            true => self.test_every.map_or_else(usual, |every| Evaluate::Every(every.get())),
        };
        TrainConfig { epochs: self.epochs, batch: self.batch, seed: self.seed, evaluate }
    }

    pub(in crate::cli) fn hyperparameters(&self, registry: &Registry) -> anyhow::Result<Hyperparameters> {
        let optimizer = registry.optimizer(self.optimizer.kernel())?;
        let defaults = optimizer.defaults();
        let hyperparameters = Hyperparameters {
            learning_rate: self.learning_rate(),
            momentum: self.momentum,
            nesterov: self.optimizer == TrainOptimizer::Nesterov,
            weight_decay: self.weight_decay.unwrap_or(defaults.weight_decay),
            ..defaults
        };
        optimizer.check(&hyperparameters).map_err(|error| Usage(format!("{}: {error}", self.optimizer)))?;
        Ok(hyperparameters)
    }

    /// What all ranks ask of the hub.
    pub(in crate::cli) fn settings(&self, network: &Network) -> anyhow::Result<Settings> {
        let hyperparameters = self.hyperparameters(&Registry::with_builtins())?;
        let chunk_bytes = u32::try_from(self.chunk_bytes.0).unwrap_or(u32::MAX);
        let layers = network.fully_connected().map(|(weight, [outputs, inputs])| {
            let name = network.keys()[weight].name.trim_end_matches(".weight");
            let weight = weight as u32;
            let shape = [outputs as u64, inputs as u64, self.batch as u64];
            LayerSettings::fully_connected(name, [weight, weight + 1], shape)
        });
        let settings = Settings {
            scheme: self.scheme,
            layers: layers.collect(),
            optimizer: OptimizerChoice {
                hyperparameters: Some(hyperparameters),
                ..OptimizerChoice::named(self.optimizer.kernel())
            },
            consistency: self.consistency,
            chunk_bytes,
            codec: Some(self.codec),
            reproducible: self.reproducible,
            ..Settings::new(KeyTable::new(network.keys().to_vec())?)
        };
        settings.check().map_err(|error| Usage(error.to_string()))?;
        Ok(settings)
    }
}

/// Refuses what contradicts itself.
pub(super) fn check(section: &TrainSection) -> Result<(), String> {
    if section.workers() == 0 {
        return Err("--workers 0: a job needs at least one worker".into());
    }
    if section.epochs == 0 {
        return Err("--epochs 0: nothing would be learnt".into());
    }
    if section.cores == 0 {
        return Err("--cores 0: a hub needs at least one core".into());
    }
    if section.codec.is_quantised() && section.transport == Transport::Shm {
        return Err(format!(
            "--codec {} needs --transport tcp or auto: memory that is shared with a hub carries raw tensors",
            section.codec
        ));
    }
    check_exchange(section)?;
    Ok(())
}

/// What a job at hubs is created with, and whether it was asked for.
pub(super) fn of_the_job(section: &TrainSection) -> [(&'static str, bool); 9] {
    let defaults = TrainSection::default();
    [
        ("--checkpoints", section.checkpoints.is_some()),
        ("--checkpoint-every", section.checkpoint_every.is_some()),
        ("--resume", section.resume.is_some()),
        ("--stragglers", section.stragglers != defaults.stragglers),
        ("--progress-timeout", section.progress_timeout_s.is_some()),
        ("--reduction", section.reduction != defaults.reduction),
        ("--on-interface-down", section.on_interface_down != defaults.on_interface_down),
        ("--deployment", section.deployment.is_some()),
        ("--hubs", section.hubs.is_some()),
    ]
}

/// Refuses what only a hub does where none exchanges, and what only collectives know where none are.
fn check_exchange(section: &TrainSection) -> Result<(), String> {
    let defaults = TrainSection::default();
    let exchange = section.exchange;
    let of_its_workers = [
        ("--consistency", section.consistency != defaults.consistency),
        ("--scheme", section.scheme != defaults.scheme),
        ("--codec", section.codec != defaults.codec),
    ];
    let mut of_a_hub = of_the_job(section).into_iter().chain(of_its_workers);
    let asked = of_a_hub.find_map(|(flag, is_asked)| is_asked.then_some(flag));
    if let Some(flag) = asked.filter(|_| exchange != ExchangeKind::Hub) {
        return Err(format!("{flag} is a hub's: it needs --exchange hub, not {exchange}"));
    }
    let is_collective = exchange.collective().is_some();
    if exchange == ExchangeKind::Local && section.transport != defaults.transport {
        let transport = section.transport;
        return Err(format!("--transport {transport} needs workers that exchange: locally nothing travels"));
    }
    if is_collective && section.transport == Transport::Shm {
        return Err(format!(
            "--transport shm is for hubs: with --exchange {exchange} workers share memory where all are on one host, unless \
             --transport tcp forbids it"
        ));
    }
    let of_sums_at_hubs = [
        ("--reproducible", section.reproducible != defaults.reproducible),
        ("--chunk-bytes", section.chunk_bytes != defaults.chunk_bytes),
    ];
    let asked = of_sums_at_hubs.into_iter().find_map(|(flag, is_asked)| is_asked.then_some(flag));
    if let Some(flag) = asked.filter(|_| is_collective) {
        return Err(format!(
            "{flag} is about sums that hubs make: it needs --exchange hub, since with {exchange} the workers add up in an order and in \
             parts of their own"
        ));
    }
    let of_collectives = [
        ("--compute-threads", section.compute_threads != defaults.compute_threads),
        ("--check-collectives", section.check_collectives),
        ("--trace", section.trace.is_some()),
    ];
    let asked = of_collectives.into_iter().find_map(|(flag, is_asked)| is_asked.then_some(flag));
    if let Some(flag) = asked.filter(|_| !is_collective) {
        return Err(format!(
            "{flag} is for collectives: it needs --exchange funnel, concom or depcha, not {exchange}"
        ));
    }
    Ok(())
}

/// Finds out in this one process what all workers would stumble over: data that cannot be read, a network it does not
/// fit, settings that no hub takes.
pub(in crate::cli) fn rehearse(section: &TrainSection) -> anyhow::Result<()> {
    let data = section.data.load()?;
    let network = Network::new(section.net, data.train.geometry(), section.seed)?;
    section.settings(&network)?;
    let (found, needed) = (data.train.len(), section.workers() as usize * section.batch);
    if needed == 0 || needed > found {
        let (workers, batch) = (section.workers(), section.batch);
        return Err(Usage(format!(
            "{workers} workers with a batch of {batch} take {needed} examples a step, the training set has {found}: \
             choose a --batch from 1 to {}",
            found / workers as usize
        ))
        .into());
    }
    Ok(())
}

/// Minutes of training are a poor way to find out that a folder does not exist.
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
