//! `paramhub bench`: how fast gradients are exchanged here, how fast bare bytes are, and how fast the kernels.

mod ablate;
mod breakdown;
mod conductor;
mod kernels;
mod models;
mod numbers;
mod peer;
mod plot;
mod raw;
mod report;
mod rounds;
mod spec;
mod statistics;
mod sweep;
mod usage;

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum, value_parser};
use paramhub::limits::{CHUNK_BYTES_DEFAULT, CORES_MAX, INTERFACES_MAX};
use paramhub::{Codec, Dtype, Registry};
use paramhub_train::THREADS_VARIABLE;
use serde::Serialize;

use super::Usage;
use crate::config::Bytes;
use crate::launch::{Ended, Launch, Line, Signals, Watch, describe};
use ablate::Variant;
use conductor::{Measured, Program, conduct};
use models::Model;
use report::{Summary, megabytes, write_json};
use spec::{Optimizer, Spec, Transport};

pub(super) use peer::{PeerFlags, take_part};

#[derive(Args)]
pub(super) struct BenchFlags {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Exchange a model's gradients through a hub, with nothing computed in between
    ///
    /// Worker processes and a hub's process are started here. At the start of an iteration every worker has all gradients
    /// ready; it pushes them back to front and waits for all parameters. An iteration takes as long as its slowest worker.
    /// After the last, one more exchange is compared with the kernels, number by number.
    Exchange(ExchangeFlags),
    Sweep(sweep::SweepFlags),
    Ablate(ablate::AblateFlags),
    Breakdown(breakdown::BreakdownFlags),
    /// Run every sum, conversion and optimizer with every instruction set of this machine, beside a triad
    Kernels(kernels::KernelsFlags),
}

#[derive(Args, Clone)]
struct ExchangeFlags {
    /// Whose tensors: alexnet, vgg11, vgg19, googlenet, inception_v3, resnet18, resnet50, resnet152, vgg19-22k or
    /// transformer-1.1b
    #[arg(long, value_name = "NAME", required_unless_present = "keys", conflicts_with = "keys")]
    model: Option<String>,
    /// A JSON file of tensors: {"model", "tensors": [{"name", "shape"}, ..]} or the bare list
    #[arg(long, value_name = "FILE")]
    keys: Option<PathBuf>,
    /// Divide every tensor's number of elements by this
    #[arg(long, value_name = "S", default_value_t = 1, value_parser = value_parser!(u64).range(1..))]
    scale: u64,
    /// Worker processes
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = value_parser!(u32).range(1..=1024))]
    workers: u32,
    /// How bytes travel
    #[arg(long, value_enum, default_value_t = Transport::Tcp)]
    transport: Transport,
    /// Workers read parameters from one copy that the hub writes, instead of receiving one each; not over TCP
    #[arg(long)]
    shared_parameters: bool,
    /// What the hub does with the gradients
    #[arg(long, value_enum, default_value_t = Optimizer::Mean)]
    optimizer: Optimizer,
    /// Cores of the hub
    #[arg(long, value_name = "C", default_value_t = 1, value_parser = value_parser!(u16).range(1..=CORES_MAX as i64))]
    cores: u16,
    /// Streams of each worker to each of them
    #[arg(long, value_name = "S", default_value_t = 1, value_parser = value_parser!(u16).range(1..=INTERFACES_MAX as i64))]
    streams: u16,
    /// The unit of exchange, as in 32K
    #[arg(long, value_name = "BYTES", default_value_t = Bytes(CHUNK_BYTES_DEFAULT.into()))]
    chunk: Bytes,
    /// Element type of gradients and parameters: f32, bf16 or f16
    #[arg(long, default_value_t = Codec::F32)]
    dtype: Codec,
    /// Iterations that count
    #[arg(long, value_name = "K", default_value_t = 20, value_parser = value_parser!(u32).range(1..=1_000_000))]
    iters: u32,
    /// Iterations before them
    #[arg(long, value_name = "W", default_value_t = 2, value_parser = value_parser!(u32).range(..=1_000_000))]
    warmup: u32,
    /// In turn with the exchanges, also measure the bound: as many bytes over as many bare TCP streams, or one pass over
    /// as much shared memory
    #[arg(long)]
    raw: bool,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What a result depends on, beside the machine.
#[derive(Clone, Serialize)]
struct Settings {
    #[serde(skip)]
    workers: u32,
    keys: usize,
    elements: u64,
    optimizer: Optimizer,
    cores: usize,
    /// A worker's to each core.
    streams: usize,
    chunk_bytes: u32,
    dtype: Codec,
    iters: u32,
    warmup: u32,
    scale: u64,
    raw: bool,
    shared_parameters: bool,
}

pub(super) fn bench(flags: BenchFlags) -> anyhow::Result<ExitCode> {
    match flags.what {
        What::Exchange(flags) => exchange(&flags),
        What::Sweep(flags) => sweep::sweep(&flags),
        What::Ablate(flags) => ablate::ablate(&flags),
        What::Breakdown(flags) => breakdown::breakdown(&flags),
        What::Kernels(flags) => kernels::kernels(&flags),
    }
}

fn exchange(flags: &ExchangeFlags) -> anyhow::Result<ExitCode> {
    let signals = Signals::catch()?;
    let (model, spec) = flags.spec()?;
    check_destination("--json", flags.json.as_deref())?;
    check_memory(&spec)?;
    let bytes_per_worker = spec.keys.bytes();
    let settings = flags.settings(&spec);
    println!("{}", headline(&model, bytes_per_worker, &settings));
    let label = "exchanges".into();
    let program = Program { spec, warmup: flags.warmup, iterations: flags.iters, label };
    let measured = match run(&program, &signals)? {
        Run::Measured(measured) => measured,
        Run::Interrupted(signal) => return Ok(interrupted(signal)),
    };
    let summary = Summary::new(model, flags.transport, bytes_per_worker, settings, &measured);
    println!("{}", summary.table(&measured));
    if let Some(path) = &flags.json {
        write_json(&summary, path)?;
    }
    measured.verdict.demand()?;
    Ok(ExitCode::SUCCESS)
}

fn interrupted(signal: i32) -> ExitCode {
    let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
    eprintln!("paramhub: the benchmark was interrupted by {name}; workers and hub have ended");
    ExitCode::from(128 + u8::try_from(signal).unwrap_or(0))
}

impl ExchangeFlags {
    fn spec(&self) -> anyhow::Result<(String, Spec)> {
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
        let dtype = match self.dtype {
            Codec::F32 => Dtype::F32,
            Codec::F16 => Dtype::F16,
            Codec::BF16 => Dtype::BF16,
        };
        let spec = Spec {
            keys: model.keys(dtype, self.scale)?,
            workers: self.workers,
            optimizer: self.optimizer,
            cores: self.cores.into(),
            streams: self.streams.into(),
            chunk_bytes: u32::try_from(self.chunk.0).unwrap_or(u32::MAX),
            is_raw: self.raw,
            transport: self.transport,
            shares_parameters: self.shared_parameters,
            variant: Variant::Normal,
        };
        spec.settings()?.check().map_err(|error| Usage(error.to_string()))?;
        Ok((name, spec))
    }

    fn settings(&self, spec: &Spec) -> Settings {
        Settings {
            workers: spec.workers,
            keys: spec.keys.len(),
            elements: spec.keys.elements(),
            optimizer: spec.optimizer,
            cores: spec.cores,
            streams: spec.streams,
            chunk_bytes: spec.chunk_bytes,
            dtype: self.dtype,
            iters: self.iters,
            warmup: self.warmup,
            scale: self.scale,
            raw: self.raw,
            shared_parameters: self.shared_parameters,
        }
    }
}

fn headline(model: &str, bytes_per_worker: u64, settings: &Settings) -> String {
    let Settings { keys, elements, dtype, iters, warmup, scale, .. } = settings;
    let scaled = if *scale > 1 { format!(", every tensor divided by {scale}") } else { String::new() };
    let scenery: Vec<String> = scenery(settings).into_iter().map(|(_, text)| text).collect();
    format!(
        "{model}{scaled}: {}, {elements} elements, {} of {dtype} a worker and way\n{}, {iters} iterations after {warmup} to \
         warm up",
        count(*keys, "key"),
        megabytes(bytes_per_worker),
        scenery.join(", "),
    )
}

/// What an exchange runs on, each with its name.
fn scenery(settings: &Settings) -> [(&'static str, String); 5] {
    let optimizer = settings.optimizer.to_possible_value().expect("none is skipped");
    [
        ("workers", count(settings.workers as usize, "worker")),
        ("cores", format!("{} at the hub", count(settings.cores, "core"))),
        ("streams", format!("{} a worker and core", count(settings.streams, "stream"))),
        ("chunk size", format!("chunks of {}", Bytes(settings.chunk_bytes.into()))),
        ("optimizer", format!("optimizer {}", optimizer.get_name())),
    ]
}

/// All of that in a line, but for what is not fixed.
fn place(
    model: &str,
    bytes_per_worker: u64,
    transport: Transport,
    settings: &Settings,
    varied: Option<&str>,
) -> String {
    let scaled = if settings.scale > 1 { format!(" ÷ {}", settings.scale) } else { String::new() };
    let size = megabytes(bytes_per_worker);
    let first = format!("{model}{scaled} ({size} of {}) over {}", settings.dtype, transport.name());
    let fixed = scenery(settings).into_iter().filter(|(name, _)| Some(*name) != varied).map(|(_, text)| text);
    [first].into_iter().chain(fixed).collect::<Vec<_>>().join(", ")
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// A long benchmark is a poor way to find out that a folder does not exist.
fn check_destination(flag: &str, file: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = file else { return Ok(()) };
    let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        let (path, parent) = (path.display(), parent.display());
        return Err(Usage(format!("{flag} {path}: there is no folder {parent}")).into());
    }
    Ok(())
}

/// All workers and the hub must fit into this machine together.
fn check_memory(spec: &Spec) -> anyhow::Result<()> {
    let optimizer = spec.settings()?.optimizer;
    let registry = Registry::with_builtins();
    let kernel = registry.optimizer(&optimizer.name)?;
    let slots = kernel.state_slots(&optimizer.hyperparameters.unwrap_or_else(|| kernel.defaults()));
    let of_workers = u64::from(spec.workers) * 2 * spec.keys.bytes();
    let needed = of_workers + spec.keys.elements() * 4 * (2 + slots as u64);
    match usage::available_bytes() {
        Some(available) if needed > available => Err(Usage(format!(
            "{} workers and their hub need {} of memory, {} are free: choose a larger --scale or fewer --workers",
            spec.workers,
            megabytes(needed),
            megabytes(available)
        ))
        .into()),
        _ => Ok(()),
    }
}

enum Run<M> {
    Measured(M),
    Interrupted(i32),
}

/// Runs a program.
fn run(program: &Program, signals: &Signals) -> anyhow::Result<Run<Measured>> {
    launch(program.spec.workers, signals, |listener, is_over| conduct(program, listener, is_over))
}

/// Starts so many workers' processes and a hub's, and conducts them on a thread of its own while this one watches over
/// them.
fn launch<M: Send>(
    workers: u32,
    signals: &Signals,
    conduct: impl FnOnce(&UnixListener, &AtomicBool) -> anyhow::Result<M> + Send,
) -> anyhow::Result<Run<M>> {
    // Only this user may enter it, so nobody else can speak for a worker.
    let scratch = tempfile::Builder::new()
        .prefix("paramhub-bench-")
        .tempdir()
        .context("cannot create a folder for the benchmark's socket")?;
    let socket = scratch.path().join("launcher");
    let listener = UnixListener::bind(&socket).context("cannot listen for the processes to start")?;
    let executable = std::env::current_exe().context("cannot find this program's own file")?;
    let workers = workers as usize;
    let commands = (0..=workers).map(|seat| {
        let mut command = Command::new(&executable);
        command.arg("bench-peer").arg(&socket).arg(seat.to_string()).env_remove("PARAMHUB_ADMIN_TOKEN");
        command.env(THREADS_VARIABLE, "1");
        command
    });
    let launch = Launch::start(commands.collect())?;
    let is_over = AtomicBool::new(false);
    let (ended, measured) = std::thread::scope(|threads| {
        let conductor = threads.spawn(|| conduct(&listener, &is_over));
        let ended = launch.supervise(signals, &mut Lines { workers });
        is_over.store(true, Ordering::Release);
        (ended, conductor.join().expect("the conductor does not panic"))
    });
    judge(&ended, measured, workers)
}

fn judge<M>(ended: &Ended, measured: anyhow::Result<M>, workers: usize) -> anyhow::Result<Run<M>> {
    if let Some(signal) = ended.signal {
        return Ok(Run::Interrupted(signal));
    }
    // One that was killed explains what the others say.
    let killed = ended.failed.iter().find(|&&seat| ended.exits[seat].code().is_none());
    if let Some(&seat) = killed {
        bail!("the benchmark failed: {} {}", name(seat, workers), describe(ended.exits[seat]));
    }
    let measured = measured.context("the benchmark failed")?;
    if let Some(&seat) = ended.failed.first() {
        bail!("the benchmark failed: {} {}", name(seat, workers), describe(ended.exits[seat]));
    }
    Ok(Run::Measured(measured))
}

fn name(seat: usize, workers: usize) -> String {
    if seat == workers { "the hub".into() } else { format!("worker {seat}") }
}

/// Whatever the processes print is a complaint.
struct Lines {
    workers: usize,
}

impl Watch for Lines {
    fn line(&mut self, line: Line) {
        eprintln!("[{}] {}", name(line.rank, self.workers), String::from_utf8_lossy(&line.bytes));
    }
}
