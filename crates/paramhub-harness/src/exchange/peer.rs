//! The processes of a benchmark, and those that are workers. Hubs are in [`super::hub`].

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use paramhub::{
    Job, Member, Membership, Options, ParameterSharing, SharedTensor, Tensor, Transport, WorkerError,
};

use super::extension::Extension;
use super::messages::{JobEndpoints, JsonConnection, LauncherCommand, ProcessReport, Turn};
use super::numbers::{self, START, Verdict};
use super::raw::Raw;
use super::spec::{self, Spec};
use super::{hub, usage};
use crate::ExitCode;

/// Fills parameters that have not been received: a NaN in any dtype.
const POISON: u8 = 0xff;

/// The variables in which OpenMPI and MPICH pass a rank its number.
const RANKS: [&str; 3] = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];

/// The identity of this process of a benchmark.
#[derive(Args)]
pub struct PeerFlags {
    /// The launcher's socket.
    socket: PathBuf,
    /// The number of this process; see `by_mpi`.
    process: usize,
    /// `mpirun` has started this process: the number is that of rank 0, and every rank adds its own rank to it.
    #[arg(long)]
    by_mpi: bool,
}

/// Runs a process of a benchmark, until its launcher hangs up.
///
/// # Errors
/// Whatever its part in the benchmark fails with.
pub fn run_process(flags: &PeerFlags, extension: &dyn Extension) -> anyhow::Result<ExitCode> {
    let socket = UnixStream::connect(&flags.socket).context("cannot reach the launcher")?;
    let mut connection = JsonConnection::new(socket);
    let process = if flags.by_mpi { flags.process + rank_of_mpi()? } else { flags.process };
    connection.send(&ProcessReport::Here { process })?;
    match connection.receive()? {
        Some(LauncherCommand::Host { spec, settings }) => {
            hub::host(&spec, settings, extension, &mut connection)?
        }
        Some(LauncherCommand::Join { spec, rank, rack, at }) => {
            Worker::join(spec, rank, rack, at, extension)?.work(&mut connection)?
        }
        Some(LauncherCommand::Scenario { name, command }) => {
            extension.run_scenario(&name, command, &mut connection)?
        }
        Some(_) => bail!("the launcher sent a command out of turn"),
        None => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// This process's rank among those that `mpirun` started.
fn rank_of_mpi() -> anyhow::Result<usize> {
    let rank = RANKS.iter().find_map(|name| std::env::var(name).ok());
    let rank = rank.context("mpirun has not given this process a rank")?;
    rank.parse().with_context(|| format!("mpirun has given this process the rank `{rank}`"))
}

/// One rank. Its gradients are always ready.
struct Worker {
    spec: Spec,
    job: Job,
    /// The connection to the raw server, which moves the same bytes and does nothing with them; `None` if that
    /// is not measured.
    raw: Option<Raw>,
    gradients: Vec<Tensor>,
    parameters: Parameters,
}

/// The memory in which parameters are received, key by key.
enum Parameters {
    Own(Vec<Tensor>),
    /// The copy that all workers read.
    Shared(Vec<SharedTensor>),
}

impl Worker {
    fn join(
        spec: Spec,
        rank: u32,
        rack: Option<String>,
        at: JobEndpoints,
        extension: &dyn Extension,
    ) -> anyhow::Result<Worker> {
        let JobEndpoints { url, job, cores, raw } = at;
        let raw = Raw::connect(&raw, &spec, rank)?;
        let transport = match spec.transport {
            spec::Transport::Tcp => Transport::Tcp,
            spec::Transport::Shm => Transport::Shm,
            spec::Transport::Auto => Transport::Auto,
        };
        let shared_parameters = spec.shares_parameters;
        let job = match extension.join(&spec, rank, &job, &cores)? {
            Some(job) => job,
            None => {
                let membership = Membership::of_job(url, &job, rank);
                let sharing =
                    if shared_parameters { ParameterSharing::Always } else { ParameterSharing::Never };
                let options = Options { transport, rack, shared_parameters: sharing, ..Default::default() };
                Member::connect_with(membership, options)?.init(spec.settings()?)?
            }
        };
        let keys = 0..spec.keys.len() as u32;
        let mut gradients: Vec<Tensor> =
            keys.clone().map(|key| job.gradient_tensor(key)).collect::<Result<_, _>>()?;
        numbers::fill(job.rank(), spec.keys.keys(), bytes_mut(&mut gradients));
        let mut parameters = match shared_parameters {
            true => Parameters::Shared(keys.map(|key| job.shared_parameters(key)).collect::<Result<_, _>>()?),
            false => Parameters::Own(keys.map(|key| job.parameter_tensor(key)).collect::<Result<_, _>>()?),
        };
        parameters.poison();
        if job.settings().has_parameters() {
            start(&job, &spec, &mut parameters)?;
        }
        Ok(Worker { spec, job, raw, gradients, parameters })
    }

    fn work(mut self, connection: &mut JsonConnection) -> anyhow::Result<()> {
        connection.send(&ProcessReport::Joined)?;
        while let Some(command) = connection.receive()? {
            let report = match command {
                LauncherCommand::Turn { turn, start } => self.turn(turn, start)?,
                LauncherCommand::Check { exchanges } => ProcessReport::Checked(self.check(exchanges)?),
                _ => bail!("the launcher gave a worker a hub's command"),
            };
            connection.send(&report)?;
        }
        Ok(self.job.leave()?)
    }

    fn turn(&mut self, turn: Turn, start: Duration) -> anyhow::Result<ProcessReport> {
        let before = self.job.statistics();
        let (seconds, cpu_seconds) = match turn {
            Turn::Exchange => self.exchange(start)?,
            Turn::Raw => {
                let raw = self.raw.as_mut().context("this run has no raw server")?;
                let clock = Clock::start_at(start);
                raw.exchange()?;
                clock.read()
            }
        };
        let after = self.job.statistics();
        Ok(ProcessReport::Done {
            seconds,
            bytes_sent: after.bytes_sent - before.bytes_sent,
            bytes_received: after.bytes_received - before.bytes_received,
            cpu_seconds,
            peak_bytes: usage::peak_bytes(),
        })
    }

    /// Exchanges all keys: by one request, or each with a push and then a pull, back to front as a backward pass would. Returns
    /// wall and processor seconds.
    fn exchange(&mut self, start: Duration) -> Result<(f64, f64), WorkerError> {
        let gradients: Vec<&[u8]> = self.gradients.iter().map(Tensor::elements).collect();
        let gradients = (0..self.spec.keys.len() as u32).rev().zip(gradients.into_iter().rev());
        match &mut self.parameters {
            Parameters::Own(parameters) => {
                let parameters = bytes_mut(parameters);
                let clock = Clock::start_at(start);
                if !self.spec.is_fused {
                    push_then_pull(&self.job, gradients.collect(), parameters)?;
                    return Ok(clock.read());
                }
                self.job.scope(|scope| {
                    let exchanges = gradients
                        .zip(parameters.into_iter().rev())
                        .map(|((key, gradient), parameters)| (key, gradient, parameters));
                    scope.push_pull_many(exchanges)?.wait().map(drop)
                })?;
                Ok(clock.read())
            }
            Parameters::Shared(_) => {
                let clock = Clock::start_at(start);
                self.job.scope(|scope| scope.push_pull_shared_many(gradients)?.wait().map(drop))?;
                Ok(clock.read())
            }
        }
    }

    fn check(&mut self, exchanges: u64) -> anyhow::Result<Verdict> {
        self.parameters.poison();
        self.exchange(Duration::ZERO)?;
        match &self.parameters {
            Parameters::Own(parameters) => {
                let parameters: Vec<&[u8]> = parameters.iter().map(Tensor::elements).collect();
                numbers::check(&self.spec, exchanges + 1, &parameters)
            }
            Parameters::Shared(parameters) => {
                let copies = parameters.iter().map(|parameters| {
                    let mut copy = vec![POISON; parameters.len()];
                    parameters.read(&mut copy);
                    copy
                });
                let copies: Vec<Vec<u8>> = copies.collect();
                let copies: Vec<&[u8]> = copies.iter().map(Vec::as_slice).collect();
                numbers::check(&self.spec, exchanges + 1, &copies)
            }
        }
    }
}

impl Parameters {
    /// Poisons the parameters. At the beginning this touches all memory, so that no exchange pays for pages
    /// that the kernel has only promised; before the check it makes missing parameters visible. Parameters
    /// that the hub writes for all workers cannot be written here.
    fn poison(&mut self) {
        if let Parameters::Own(parameters) = self {
            bytes_mut(parameters).into_iter().for_each(|bytes| bytes.fill(POISON));
        }
    }
}

/// Rank 0 sends the initial parameters, the others receive them.
fn start(job: &Job, spec: &Spec, parameters: &mut Parameters) -> anyhow::Result<()> {
    match parameters {
        Parameters::Own(parameters) => {
            let mut parameters = bytes_mut(parameters);
            if job.rank() == 0 {
                numbers::fill(
                    START,
                    spec.keys.keys(),
                    parameters.iter_mut().map(|bytes| &mut **bytes).collect(),
                );
            }
            job.broadcast(&mut parameters, 0)?;
        }
        Parameters::Shared(shared) => {
            let mut own: Vec<Vec<u8>> = shared.iter().map(|tensor| vec![POISON; tensor.len()]).collect();
            if job.rank() == 0 {
                numbers::fill(START, spec.keys.keys(), own.iter_mut().map(Vec::as_mut_slice).collect());
            }
            job.broadcast(&mut own, 0)?;
        }
    }
    Ok(())
}

fn bytes_mut(tensors: &mut [Tensor]) -> Vec<&mut [u8]> {
    tensors.iter_mut().map(Tensor::elements_mut).collect()
}

/// Exchanges with two requests for each key: the pull follows once this key's push and those before it are
/// answered, since a step must be pushed before it is pulled.
fn push_then_pull(
    job: &Job,
    gradients: Vec<(u32, &[u8])>,
    parameters: Vec<&mut [u8]>,
) -> Result<(), WorkerError> {
    job.scope(|scope| {
        let pushes: Vec<_> = gradients
            .into_iter()
            .map(|(key, gradient)| Ok((key, scope.push(key, gradient)?)))
            .collect::<Result<_, WorkerError>>()?;
        let mut pulls = Vec::with_capacity(pushes.len());
        for ((key, push), parameters) in pushes.into_iter().zip(parameters.into_iter().rev()) {
            push.wait()?;
            pulls.push(scope.pull(key, parameters)?);
        }
        pulls.into_iter().try_for_each(|pull| pull.wait().map(drop))
    })
}

/// The wall and processor time of one turn.
struct Clock {
    started: Instant,
    cpu_seconds: f64,
}

impl Clock {
    /// Sleeps until the instant in all workers' commands, so that no command is under way while a worker is
    /// timed.
    fn start_at(start: Duration) -> Clock {
        std::thread::sleep(start.saturating_sub(usage::monotonic()));
        Clock { cpu_seconds: usage::cpu_seconds(), started: Instant::now() }
    }

    fn read(self) -> (f64, f64) {
        (self.started.elapsed().as_secs_f64(), usage::cpu_seconds() - self.cpu_seconds)
    }
}
