//! `paramhub bench exchange`, and the flags, processes and messages that other benchmarks share with it.

pub mod driver;
mod extension;
pub mod hosts;
mod hub;
pub mod messages;
pub mod numbers;
mod peer;
pub mod processes;
mod raw;
pub mod report;
pub mod spec;
pub mod statistics;
pub mod usage;

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum, value_parser};
use paramhub::composition::BetweenSites;
use paramhub::limits::{CHUNK_BYTES_DEFAULT, CORES_MAX, INTERFACES_MAX, REWIND_EVERY_MAX};
use paramhub::{Codec, Registry};
use serde::Serialize;

use driver::Program;
use hosts::HostsFlags;
use processes::{Run, interrupted, run};
use report::{Summary, megabytes, write_json};
use spec::{Optimizer, Spec, Transport};

pub use extension::{CoreServer, Extension};
pub use peer::{PeerFlags, run_process};

use crate::launch::Signals;
use crate::models::{Model, element_type};
use crate::values::{Bytes, Deployment};
use crate::{ExitCode, Usage};

/// Exchange a model's gradients through a hub, with nothing computed in between
///
/// Worker processes and a hub's process are started here. At the start of an iteration every worker has all gradients
/// ready; it pushes them back to front and waits for all parameters. An iteration takes as long as its slowest worker.
/// After the last, one more exchange is compared with the kernels, number by number.
///
/// With --hosts, workers and hubs run where --enter puts them: on hosts of a testbed (docs/rack.md), or behind any other
/// command that starts a process in a network namespace of this machine.
#[derive(Args)]
pub struct ExchangeCommand {
    #[command(flatten)]
    exchange: ExchangeFlags,
    #[command(flatten)]
    hosts: HostsFlags,
}

/// What is exchanged, and how.
#[derive(Args, Clone)]
pub struct ExchangeFlags {
    /// Whose tensors: cifar-quick, alexnet, vgg11, vgg19, googlenet, inception_v3, inception-bn, resnet18, resnet50, resnet152, vgg19-22k
    /// or transformer-1.1b
    #[arg(long, value_name = "NAME", required_unless_present = "keys", conflicts_with = "keys")]
    model: Option<String>,
    /// A JSON file of tensors: {"model", "tensors": [{"name", "shape"}, ..]} or the bare list
    #[arg(long, value_name = "FILE")]
    keys: Option<PathBuf>,
    /// Divide every tensor's number of elements by this
    #[arg(long, value_name = "S", default_value_t = 1, value_parser = value_parser!(u64).range(1..))]
    pub scale: u64,
    /// Worker processes
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = value_parser!(u32).range(1..=1024))]
    pub workers: u32,
    /// How bytes travel
    #[arg(long, value_enum, default_value_t = Transport::Tcp)]
    pub transport: Transport,
    /// Encrypt the streams over TCP
    #[arg(long)]
    encrypt: bool,
    /// The hub keeps a copy of the model from before every Nth step, to which the job could go back; not with the mean
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=i64::from(REWIND_EVERY_MAX)))]
    rewind_every: Option<u32>,
    /// Workers read parameters from one copy that the hub writes, instead of receiving one each; not over TCP
    #[arg(long)]
    shared_parameters: bool,
    /// What the hub does with the gradients
    #[arg(long, value_enum, default_value_t = Optimizer::Mean)]
    optimizer: Optimizer,
    /// Cores of each hub
    #[arg(long, value_name = "C", default_value_t = 1, value_parser = value_parser!(u16).range(1..=CORES_MAX as i64))]
    pub cores: u16,
    /// Streams of each worker to each of them
    #[arg(long, value_name = "S", default_value_t = 1, value_parser = value_parser!(u16).range(1..=INTERFACES_MAX as i64))]
    pub streams: u16,
    /// The unit of exchange, as in 32K
    #[arg(long, value_name = "BYTES", default_value_t = Bytes(CHUNK_BYTES_DEFAULT.into()))]
    pub chunk: Bytes,
    /// Element type of gradients and parameters: f32, bf16 or f16
    #[arg(long, default_value_t = Codec::F32)]
    pub dtype: Codec,
    /// How gradients travel: f32, bf16, f16, int8, or one-bit or two-bit for matrices, which come back so as well and are summed in
    /// rank order [default: as they lie in memory]
    #[arg(long)]
    pub codec: Option<Codec>,
    /// Iterations that count
    #[arg(long, value_name = "K", default_value_t = 20, value_parser = value_parser!(u32).range(1..=1_000_000))]
    pub iters: u32,
    /// Iterations before them
    #[arg(long, value_name = "W", default_value_t = 2, value_parser = value_parser!(u32).range(..=1_000_000))]
    pub warmup: u32,
    /// In turn with the exchanges, also measure the bound: as many bytes over as many bare TCP streams, or one pass over
    /// as much shared memory
    #[arg(long)]
    pub raw: bool,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The settings on which a result depends, beside the machine.
#[derive(Clone, Serialize)]
pub struct Settings {
    /// Worker processes.
    #[serde(skip)]
    pub workers: u32,
    keys: usize,
    elements: u64,
    optimizer: Optimizer,
    /// Null if all processes are on this machine's loopback.
    deployment: Option<Deployment>,
    /// Hub processes.
    pub hubs: usize,
    /// Interfaces of the hub that has most.
    interfaces: usize,
    /// How sums cross between racks.
    between_sites: BetweenSites,
    /// Cores of each hub.
    pub cores: usize,
    /// Streams of each worker to each core.
    streams: usize,
    chunk_bytes: u32,
    dtype: Codec,
    /// Null if gradients travel as they are in memory.
    codec: Option<Codec>,
    iters: u32,
    warmup: u32,
    scale: u64,
    raw: bool,
    shared_parameters: bool,
}

/// Runs `paramhub bench exchange`.
///
/// # Errors
/// [`Usage`] for flags that contradict each other, wrong numbers, or why the processes failed.
pub fn exchange(command: &ExchangeCommand) -> anyhow::Result<ExitCode> {
    let flags = &command.exchange;
    let signals = Signals::catch()?;
    let (model, spec) = flags.spec()?;
    let hosts = command.hosts.hosts(spec.workers)?;
    if spec.is_raw && hosts.deployment().is_some() {
        let why = "--raw measures loopback: on hosts of a testbed its own probe measures what links carry";
        return Err(Usage(why.into()).into());
    }
    check_destination("--json", flags.json.as_deref())?;
    check_memory(&spec, 1)?;
    let bytes_per_worker = spec.keys.bytes();
    let settings = Settings {
        deployment: hosts.deployment(),
        hubs: hosts.hubs().len(),
        interfaces: hosts.interfaces(),
        between_sites: hosts.options.between_sites,
        ..flags.settings(&spec)
    };
    println!("{}", headline(&model, bytes_per_worker, &settings));
    let label = "exchanges".into();
    let program = Program { spec, hosts, warmup: flags.warmup, iterations: flags.iters, label };
    let measured = match run(&program, &signals)? {
        Run::Measured(measured) => measured,
        Run::Interrupted(signal) => return Ok(interrupted(signal)),
    };
    let summary = Summary::new(model, flags.transport, bytes_per_worker, settings, &measured);
    println!("{}", summary.table(&measured));
    if let Some(path) = &flags.json {
        write_json(&summary, path)?;
    }
    // What quantised sums lose between sites is not computed here.
    if !summary.settings.between_sites.is_quantised() {
        measured.verdict.require_right()?;
    }
    Ok(ExitCode::SUCCESS)
}

impl ExchangeFlags {
    /// The name of the model, and the exchange of its tensors.
    ///
    /// # Errors
    /// [`Usage`] for an unknown model, an unusable file or flags that contradict each other.
    pub fn spec(&self) -> anyhow::Result<(String, Spec)> {
        let model = match (&self.model, &self.keys) {
            (Some(name), _) => Model::named(name)?,
            (None, Some(path)) => Model::read(path)?,
            (None, None) => unreachable!("clap requires one of them"),
        };
        if self.shared_parameters && self.transport == Transport::Tcp {
            let why = "--shared-parameters needs shared memory: give --transport shm or auto with it";
            return Err(Usage(why.into()).into());
        }
        let name = model.name.clone();
        let keys = model.keys(element_type(self.dtype)?, self.codec, self.scale)?;
        let spec = Spec {
            optimizer: self.optimizer,
            streams: self.streams.into(),
            chunk_bytes: u32::try_from(self.chunk.0).unwrap_or(u32::MAX),
            is_raw: self.raw,
            transport: self.transport,
            encrypt: self.encrypt,
            rewind_every: self.rewind_every,
            shares_parameters: self.shared_parameters,
            ..Spec::new(keys, self.workers, self.cores.into())
        };
        spec.settings()?.check().map_err(|error| Usage(error.to_string()))?;
        Ok((name, spec))
    }

    /// The settings of this exchange with one hub on this machine.
    pub fn settings(&self, spec: &Spec) -> Settings {
        Settings {
            workers: spec.workers,
            keys: spec.keys.len(),
            elements: spec.keys.elements(),
            optimizer: spec.optimizer,
            deployment: None,
            hubs: 1,
            interfaces: 1,
            between_sites: BetweenSites::default(),
            cores: spec.cores,
            streams: spec.streams,
            chunk_bytes: spec.chunk_bytes,
            dtype: self.dtype,
            codec: self.codec,
            iters: self.iters,
            warmup: self.warmup,
            scale: self.scale,
            raw: self.raw,
            shared_parameters: self.shared_parameters,
        }
    }
}

/// Describes the tensors and the way of their exchange in two lines above the results.
pub fn headline(model: &str, bytes_per_worker: u64, settings: &Settings) -> String {
    let Settings { keys, elements, dtype, codec, iters, warmup, scale, .. } = settings;
    let coded = codec.map_or(String::new(), |codec| match codec.is_for_shape(&[]) {
        true => format!(", sent as {codec}"),
        false => format!(", matrices as {codec}"),
    });
    let scaled = if *scale > 1 { format!(", every tensor divided by {scale}") } else { String::new() };
    let deployed = settings.deployment.map(|deployment| {
        let name = deployment.to_possible_value().expect("none is skipped");
        let (hubs, interfaces) = (count(settings.hubs, "hub"), count(settings.interfaces, "interface"));
        format!("{}: {hubs} with up to {interfaces}", name.get_name())
    });
    let scenery: Vec<String> =
        deployed.into_iter().chain(scenery(settings).into_iter().map(|(_, text)| text)).collect();
    format!(
        "{model}{scaled}: {}, {elements} elements, {} of {dtype} a worker and way{coded}\n{}, {iters} iterations after {warmup} to \
         warm up",
        count(*keys, "key"),
        megabytes(bytes_per_worker),
        scenery.join(", "),
    )
}

/// The hardware and the settings of an exchange, each with its name.
fn scenery(settings: &Settings) -> [(&'static str, String); 5] {
    let optimizer = settings.optimizer.to_possible_value().expect("none is skipped");
    let hub = if settings.hubs == 1 { "the hub" } else { "each hub" };
    [
        ("workers", count(settings.workers as usize, "worker")),
        ("cores", format!("{} at {hub}", count(settings.cores, "core"))),
        ("streams", format!("{} a worker and core", count(settings.streams, "stream"))),
        ("chunk size", format!("chunks of {}", Bytes(settings.chunk_bytes.into()))),
        ("optimizer", format!("optimizer {}", optimizer.get_name())),
    ]
}

/// A line of these settings, except those that vary.
pub fn place(
    model: &str,
    bytes_per_worker: u64,
    transport: Transport,
    settings: &Settings,
    varied: Option<&str>,
) -> String {
    let scaled = if settings.scale > 1 { format!(" ÷ {}", settings.scale) } else { String::new() };
    let size = megabytes(bytes_per_worker);
    let coded = settings.codec.map_or(String::new(), |codec| format!(" as {codec}"));
    let first = format!("{model}{scaled} ({size} of {}{coded}) over {}", settings.dtype, transport.name());
    let fixed = scenery(settings).into_iter().filter(|(name, _)| Some(*name) != varied).map(|(_, text)| text);
    [first].into_iter().chain(fixed).collect::<Vec<_>>().join(", ")
}

/// Checks that all workers of so many jobs and the hub fit into this machine together.
///
/// # Errors
/// [`Usage`] if they do not.
pub fn check_memory(spec: &Spec, jobs: u32) -> anyhow::Result<()> {
    let optimizer = spec.settings()?.optimizer;
    let registry = Registry::with_builtins();
    let kernel = registry.optimizer(&optimizer.name)?;
    let slots = kernel.state_slots(&optimizer.hyperparameters.unwrap_or_else(|| kernel.defaults()));
    let of_workers = u64::from(spec.workers) * 2 * spec.keys.bytes();
    // The memory of quantised keys. Every worker keeps the gradients' losses and the parameters. The hub
    // keeps what it sent and, because sums have rank order, contributions that come too early.
    let matrices = spec.keys.keys().iter().filter(|key| key.codec.is_some_and(Codec::is_quantised));
    let quantised: u64 = matrices.filter_map(|key| key.elements()).sum::<u64>() * 4;
    let parked = if quantised > 0 { spec.keys.elements() * 4 * u64::from(spec.workers - 1) } else { 0 };
    let quantised = quantised * (2 * u64::from(spec.workers) + 1) + parked;
    let of_hub = spec.keys.elements() * 4 * (2 + slots as u64);
    let needed = u64::from(jobs) * (of_workers + of_hub + quantised);
    match usage::available_bytes() {
        Some(available) if needed > available => Err(Usage(format!(
            "{} workers and their hub need {} of memory, {} are free: choose a larger --scale or fewer --workers",
            jobs * spec.workers,
            megabytes(needed),
            megabytes(available)
        ))
        .into()),
        _ => Ok(()),
    }
}

/// Refuses a folder that does not exist before a long benchmark begins.
///
/// # Errors
/// [`Usage`], which names the flag.
pub fn check_destination(flag: &str, file: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = file else { return Ok(()) };
    let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        let (path, parent) = (path.display(), parent.display());
        return Err(Usage(format!("{flag} {path}: there is no folder {parent}")).into());
    }
    Ok(())
}

/// A number with what it counts, in the plural if need be.
pub fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}
