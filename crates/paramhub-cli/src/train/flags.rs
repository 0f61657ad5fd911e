//! The flags of `paramhub train`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use paramhub::service::{HubLabel, OnInterfaceDown};
use paramhub::{Codec, Consistency, Stragglers, Transport};
use paramhub_core::checkpoint::{Every, ResumeChoice};
use paramhub_core::composition::Reduction;
use paramhub_core::scheme::SchemeChoice;
use paramhub_train::data::DataSource;
use paramhub_train::net::NetKind;

use crate::config::{Bytes, Config, Deployment, ExchangeKind, TrainOptimizer};
use crate::{ManagerUrl, overlay};

#[derive(Args)]
#[command(args_override_self = true)]
pub(crate) struct TrainFlags {
    /// The network: mlp, lenet, cifar-quick or inception [default: lenet]
    #[arg(long, env = "PARAMHUB_TRAIN_NET")]
    net: Option<NetKind>,
    /// What to learn: digits, idx:DIR (MNIST's files) or cifar10:DIR (the binary version) [default: digits]
    #[arg(long, env = "PARAMHUB_TRAIN_DATA")]
    data: Option<DataSource>,
    /// Worker processes [default: 4]
    #[arg(long, value_name = "N", env = "PARAMHUB_TRAIN_WORKERS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    workers: Option<u32>,
    /// Passes over the training set [default: 40]
    #[arg(long, value_name = "N", env = "PARAMHUB_TRAIN_EPOCHS")]
    epochs: Option<usize>,
    /// Examples per worker and step [default: 16]
    #[arg(long, value_name = "N", env = "PARAMHUB_TRAIN_BATCH")]
    batch: Option<usize>,
    /// Learning rate [default: 0.02; 0.002 for adam and adamw]
    #[arg(long, value_name = "RATE", env = "PARAMHUB_TRAIN_LR")]
    lr: Option<f64>,
    /// Momentum of sgd and nesterov [default: 0.9]
    #[arg(long, value_name = "SHARE", env = "PARAMHUB_TRAIN_MOMENTUM")]
    momentum: Option<f64>,
    /// What the hub does with the gradients: sgd, nesterov, adam or adamw [default: sgd]
    #[arg(long, env = "PARAMHUB_TRAIN_OPTIMIZER")]
    optimizer: Option<TrainOptimizer>,
    /// Weight decay [default: the optimizer's: 0, for adamw 0.01]
    #[arg(long, value_name = "DECAY", env = "PARAMHUB_TRAIN_WEIGHT_DECAY")]
    weight_decay: Option<f64>,
    /// Decides the initial parameters and the order of the examples [default: 1]
    #[arg(long, env = "PARAMHUB_TRAIN_SEED")]
    seed: Option<u64>,
    #[command(flatten)]
    url: ManagerUrl,
    /// What sums the gradients: hub; local, one process in place of all workers; or the workers by collectives: funnel, where each
    /// one's main thread calls them key by key, concom, over several communicators at once, or depcha, in a chain of dependencies
    /// [default: hub]
    #[arg(
        long,
        value_enum,
        hide_possible_values = true,
        value_name = "HOW",
        env = "PARAMHUB_TRAIN_EXCHANGE"
    )]
    exchange: Option<ExchangeKind>,
    /// Threads of each worker that compute, with collectives: branches of a network then run side by side [default: 1]
    #[arg(long, value_name = "N", env = "PARAMHUB_TRAIN_COMPUTE_THREADS")]
    compute_threads: Option<NonZeroUsize>,
    /// Compare what workers call before each collective, and name the first call in which they differ; it takes time
    #[arg(long, env = "PARAMHUB_TRAIN_CHECK_COLLECTIVES")]
    check_collectives: Option<bool>,
    /// Write what rank 0 ran when, with collectives, for chrome://tracing and Perfetto: the newest 131,072 operations
    #[arg(long, value_name = "FILE", env = "PARAMHUB_TRAIN_TRACE")]
    trace: Option<PathBuf>,
    /// How tensors travel: auto, tcp or shm; auto is shared memory where hub and workers, or with collectives all workers, share a
    /// host [default: auto]
    #[arg(long, env = "PARAMHUB_TRAIN_TRANSPORT")]
    transport: Option<Transport>,
    /// Sum in rank order, so that two runs, and hub and local, end at the same bits
    #[arg(long, env = "PARAMHUB_TRAIN_REPRODUCIBLE")]
    reproducible: Option<bool>,
    /// When workers see each other's gradients: sync, async or staleness:N [default: sync]
    #[arg(long, env = "PARAMHUB_TRAIN_CONSISTENCY")]
    consistency: Option<Consistency>,
    /// How sums become those of all workers where hubs serve racks or hosts: auto, flat, tree, ring, sharded or line
    /// [default: auto]
    #[arg(long, value_name = "HOW", env = "PARAMHUB_TRAIN_REDUCTION")]
    reduction: Option<Reduction>,
    /// Encrypt the streams between hosts: of workers to hubs, of hubs to one another, and of collectives [default: false]
    #[arg(long, env = "PARAMHUB_TRAIN_ENCRYPT")]
    encrypt: Option<bool>,
    /// What becomes of the run when a network interface goes down: fail, or continue over those that are left [default: fail]
    #[arg(long, value_name = "WHAT", env = "PARAMHUB_TRAIN_ON_INTERFACE_DOWN")]
    on_interface_down: Option<OnInterfaceDown>,
    /// Where the hubs are: cc or cs, here, beside the workers; ncc or ncs, one or several dedicated ones that have joined the
    /// connection manager at --hub [default: one here, or with --hub whichever have joined]
    #[arg(long, value_enum, hide_possible_values = true, env = "PARAMHUB_DEPLOYMENT")]
    deployment: Option<Deployment>,
    /// How many hubs must have joined the connection manager at --hub before training begins [default: the first is enough]
    #[arg(long, value_name = "N", env = "PARAMHUB_TRAIN_HUBS")]
    hubs: Option<u32>,
    /// The most hubs that serve the job when it begins, those with the fewest jobs; hubs of racks and hosts do not count [default:
    /// all that have joined]
    #[arg(long, value_name = "N", env = "PARAMHUB_TRAIN_MAX_HUBS")]
    max_hubs: Option<u32>,
    /// The label that hubs must have to serve the job, as `paramhub hub --label` gives it [default: any hub will do]
    #[arg(long, value_name = "LABEL", env = "PARAMHUB_TRAIN_HUB_LABEL")]
    hub_label: Option<HubLabel>,
    /// The number of standbys of each chunk, 0 or 1: with 1 another hub has all that workers were answered, and takes over when
    /// the hub is lost; it takes two hubs or more [default: 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1), env = "PARAMHUB_TRAIN_REPLICAS")]
    replicas: Option<u32>,
    /// What becomes of workers that come late to a step: wait for them; drop:FRACTION, those later than this fraction of the
    /// time that the median took; or backup:N, the last N [default: wait]
    #[arg(long, value_name = "HOW", env = "PARAMHUB_TRAIN_STRAGGLERS")]
    stragglers: Option<Stragglers>,
    /// End the job, naming the rank, when others have waited so long for one of them [default: never]
    #[arg(long, value_name = "SECONDS", env = "PARAMHUB_TRAIN_PROGRESS_TIMEOUT")]
    progress_timeout: Option<f64>,
    /// Show that training goes on while workers die: kill a random worker process, rank 0's too, with SIGKILL every so many
    /// seconds, and start another in its place. The kills end shortly before the training, so that all are back; --log warn
    /// adds what hub and manager say [default: never; without a number: 1]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "1", value_name = "SECONDS",
        env = "PARAMHUB_TRAIN_CHAOS")]
    chaos: Option<f64>,
    /// Decides which workers --chaos kills, one after the other [default: random, and printed]
    #[arg(long, value_name = "SEED", env = "PARAMHUB_TRAIN_CHAOS_SEED")]
    chaos_seed: Option<u64>,
    /// How fully connected layers are exchanged: hub; by factors between the workers; factors-to-hub, where one hub makes a
    /// layer's gradient of them; or auto, whichever of the first two moves less [default: hub]
    #[arg(long, value_name = "SCHEME", env = "PARAMHUB_TRAIN_SCHEME")]
    scheme: Option<SchemeChoice>,
    /// How gradients travel: f32, f16, bf16, int8, or one-bit or two-bit for the weights of fully connected layers, whose changes
    /// come back so as well [default: f32]
    #[arg(long, env = "PARAMHUB_TRAIN_CODEC")]
    codec: Option<Codec>,
    /// The unit of exchange, as in 32K [default: 32K]
    #[arg(long, value_name = "SIZE", env = "PARAMHUB_TRAIN_CHUNK_BYTES")]
    chunk_bytes: Option<Bytes>,
    /// Cores of the hub started for the run [default: 1]
    #[arg(long, value_name = "N", env = "PARAMHUB_TRAIN_CORES")]
    cores: Option<usize>,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE", env = "PARAMHUB_TRAIN_JSON")]
    json: Option<PathBuf>,
    /// Measure the test set after every so many epochs, and at the end [default: eight times on the way; only at the end where
    /// --stragglers leaves workers out]
    #[arg(long, value_name = "N", env = "PARAMHUB_TRAIN_TEST_EVERY")]
    test_every: Option<NonZeroUsize>,
    /// Save the final parameters as safetensors
    #[arg(long, value_name = "FILE", env = "PARAMHUB_TRAIN_SAVE")]
    save: Option<PathBuf>,
    /// The job's name, by which checkpoints are found again [default: train with checkpoints, else train- and eight random
    /// digits]
    #[arg(long, value_name = "JOB", env = "PARAMHUB_TRAIN_NAME")]
    name: Option<String>,
    /// Directory for checkpoints of the hub that is started where none is given; a hub that runs has its own [default: none]
    #[arg(long, value_name = "DIR", env = "PARAMHUB_TRAIN_CHECKPOINTS")]
    checkpoints: Option<PathBuf>,
    /// How often the hubs write a checkpoint: a number of steps, as in 1000, or of seconds, as in 30s [default: 30s with
    /// --checkpoints, else never]
    #[arg(long, value_name = "N|Ns", env = "PARAMHUB_TRAIN_CHECKPOINT_EVERY")]
    checkpoint_every: Option<Every>,
    /// Go on from a checkpoint of the job of this name: the newest, that of a step, with auto the newest of its last run
    /// unless that has finished, or never [default: auto with --name and --checkpoints, else never]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "latest", value_name = "latest|STEP|auto|never",
        env = "PARAMHUB_TRAIN_RESUME")]
    resume: Option<ResumeChoice>,
}

impl TrainFlags {
    pub(crate) fn apply(self, config: &mut Config) {
        self.url.apply(config);
        let section = &mut config.train;
        section.progress_timeout_s = self.progress_timeout.or(section.progress_timeout_s);
        section.chaos_s = self.chaos.or(section.chaos_s);
        overlay!(self => config.train;
            net, data, epochs, batch, momentum, optimizer, seed, exchange, compute_threads, check_collectives, transport, reproducible, consistency,
            reduction, encrypt, on_interface_down, replicas, stragglers, scheme, codec, chunk_bytes, cores;
            workers, lr, weight_decay, deployment, hubs, max_hubs, hub_label, chaos_seed, test_every, trace, json, save, name, checkpoints, checkpoint_every, resume);
    }
}
