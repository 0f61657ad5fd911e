//! A training: its options, which a configuration file can set as well, and what follows from them.

mod values;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use paramhub::settings::{OptimizerChoice, Settings};
use paramhub::{Hyperparameters, KeyTable, Registry, Stragglers, Transport};
use paramhub_core::checkpoint::{Every, ResumeChoice};
use paramhub_core::codec::Codec;
use paramhub_core::composition::Reduction;
use paramhub_core::consistency::Consistency;
use paramhub_core::limits::CHUNK_BYTES_DEFAULT;
use paramhub_core::scheme::{LayerSettings, SchemeChoice};
use paramhub_core::service::{HubLabel, OnInterfaceDown};
use paramhub_harness::Usage;
use paramhub_harness::values::{Bytes, Deployment, text};
use paramhub_train::data::DataSource;
use paramhub_train::net::{NetKind, Network};
use paramhub_train::trainer::{Evaluate, TrainConfig};
use serde::{Deserialize, Serialize};

pub use values::{ExchangeKind, TrainOptimizer};

/// The interval at which a training measures the test set by default.
const TESTS: usize = 8;

/// `[train]`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is the flag of its name of `paramhub train`, whose --help explains it")]
#[serde(deny_unknown_fields, default)]
pub struct TrainSection {
    #[serde(with = "text")]
    pub net: NetKind,
    #[serde(with = "text")]
    pub data: DataSource,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    pub epochs: usize,
    pub batch: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    pub momentum: f64,
    #[serde(with = "text")]
    pub optimizer: TrainOptimizer,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    pub seed: u64,
    pub exchange: ExchangeKind,
    pub compute_threads: NonZeroUsize,
    pub check_collectives: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<PathBuf>,
    #[serde(with = "text")]
    pub transport: Transport,
    pub reproducible: bool,
    #[serde(with = "text")]
    pub consistency: Consistency,
    #[serde(with = "text")]
    pub reduction: Reduction,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deployment: Option<Deployment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hubs: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_hubs: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hub_label: Option<HubLabel>,
    pub encrypt: bool,
    #[serde(with = "text")]
    pub on_interface_down: OnInterfaceDown,
    pub replicas: u32,
    pub stragglers: Stragglers,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress_timeout_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chaos_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chaos_seed: Option<u64>,
    #[serde(with = "text")]
    pub scheme: SchemeChoice,
    #[serde(with = "text")]
    pub codec: Codec,
    pub chunk_bytes: Bytes,
    pub cores: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_every: Option<NonZeroUsize>,
    pub json: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoints: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_every: Option<Every>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<ResumeChoice>,
}

impl Default for TrainSection {
    fn default() -> Self {
        TrainSection {
            net: NetKind::Lenet,
            data: DataSource::Digits,
            workers: None,
            epochs: 40,
            batch: 16,
            lr: None,
            momentum: 0.9,
            optimizer: TrainOptimizer::Sgd,
            weight_decay: None,
            seed: 1,
            exchange: ExchangeKind::Hub,
            compute_threads: NonZeroUsize::MIN,
            check_collectives: false,
            trace: None,
            transport: Transport::Auto,
            reproducible: false,
            consistency: Consistency::Synchronous,
            reduction: Reduction::Auto,
            encrypt: false,
            on_interface_down: OnInterfaceDown::Fail,
            deployment: None,
            hubs: None,
            max_hubs: None,
            hub_label: None,
            replicas: 0,
            stragglers: Stragglers::Wait,
            progress_timeout_s: None,
            chaos_s: None,
            chaos_seed: None,
            scheme: SchemeChoice::default(),
            codec: Codec::F32,
            chunk_bytes: Bytes(u64::from(CHUNK_BYTES_DEFAULT)),
            cores: 1,
            test_every: None,
            json: None,
            save: None,
            name: None,
            checkpoints: None,
            checkpoint_every: None,
            resume: None,
        }
    }
}

/// The default number of workers of a training.
const TRAIN_WORKERS: u32 = 4;

impl TrainSection {
    /// The number of workers asked for, or the default.
    pub fn workers(&self) -> u32 {
        self.workers.unwrap_or(TRAIN_WORKERS)
    }

    /// The learning rate asked for, or the default of the optimizer.
    pub fn learning_rate(&self) -> f64 {
        self.lr.unwrap_or(self.optimizer.default_learning_rate())
    }

    /// The section with the values that hold where none was asked for.
    pub fn with_defaults(&self) -> TrainSection {
        let (lr, workers) = (Some(self.learning_rate()), Some(self.workers()));
        TrainSection { lr, workers, ..self.clone() }
    }

    /// The trainer's configuration of a worker; `evaluate` says whether it measures the test set.
    pub fn trainer(&self, evaluate: bool) -> TrainConfig {
        let usual = || match self.stragglers.leaves_out() {
            // The rank that measures would be late and be left out.
            true => Evaluate::AtEnd,
            false => Evaluate::Every(self.epochs.div_ceil(TESTS)),
        };
        let evaluate = match evaluate {
            false => Evaluate::Never,
            true => self.test_every.map_or_else(usual, |every| Evaluate::Every(every.get())),
        };
        TrainConfig { epochs: self.epochs, batch: self.batch, seed: self.seed, evaluate }
    }

    /// The optimizer's hyperparameters.
    ///
    /// # Errors
    /// [`Usage`] if the optimizer refuses them.
    pub fn hyperparameters(&self, registry: &Registry) -> anyhow::Result<Hyperparameters> {
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

    /// The settings that all ranks request from the hub.
    ///
    /// # Errors
    /// [`Usage`] if no hub would accept them.
    pub fn settings(&self, network: &Network) -> anyhow::Result<Settings> {
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

/// Checks in this one process what would fail in every worker: data that cannot be read, a network that does
/// not fit them, settings that no hub accepts.
///
/// # Errors
/// [`Usage`] for options that do not fit the data, or why the data cannot be read.
pub fn rehearse(section: &TrainSection) -> anyhow::Result<()> {
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
