//! The launcher's side of a benchmark: sends the commands, collects the numbers.

use std::io::ErrorKind;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};
use paramhub::service::{JobOptions, OnWorkerLoss};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::hosts::Hosts;
use super::messages::{
    HubProcessSettings, HubUse, JobEndpoints, JsonConnection, LauncherCommand, ProcessReport, Turn,
};
use super::numbers::Verdict;
use super::spec::Spec;
use super::statistics::mean;
use super::usage;

/// The time that processes may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// The time that one answer may take: for a very large exchange, or for the check of its numbers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(600);
/// The time from the first command of a turn to its start. All workers have their commands by then.
pub const LEAD: Duration = Duration::from_millis(5);

/// The measurements to make.
pub struct Program {
    /// The exchange.
    pub spec: Spec,
    /// The place where its processes run.
    pub hosts: Hosts,
    /// Iterations that do not count, before the others.
    pub warmup: u32,
    /// Iterations that count.
    pub iterations: u32,
    /// The label of the progress bar.
    pub label: String,
}

/// The results.
#[derive(Default)]
pub struct Measured {
    /// The exchanges that count.
    pub exchanges: Vec<Timed>,
    /// The raw turns, interleaved with the exchanges; empty without `--raw`.
    pub raw: Vec<Timed>,
    /// The peak of the largest worker.
    pub worker_peak_bytes: u64,
    /// The peak of the largest hub.
    pub hub_peak_bytes: u64,
    /// The comparison of the numbers of the last exchange with the expected ones.
    pub verdict: Verdict,
}

/// One turn of all workers.
pub struct Timed {
    /// The seconds of the slowest worker.
    pub seconds: f64,
    /// Bytes of frames that a worker sent and received, as a mean over all workers.
    pub frame_bytes: [f64; 2],
    /// The mean of the workers.
    pub cpu_seconds_worker: f64,
    /// Processor seconds of the whole processes of all hubs together.
    pub cpu_seconds_hub: f64,
    /// Processor seconds of each hub core, hub after hub.
    pub core_seconds: Vec<f64>,
}

/// Runs the program with the processes that connect to the listener; `is_over` is set when no more will.
pub(super) fn drive(
    program: &Program,
    listener: &UnixListener,
    is_over: &AtomicBool,
) -> anyhow::Result<Measured> {
    let mut processes = BenchProcesses::connect(program, listener, is_over)?;
    let mut measured = Measured::default();
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}").expect("a valid template");
    let progress = ProgressBar::new(u64::from(program.warmup + program.iterations)).with_style(style);
    progress.set_message(program.label.clone());
    for iteration in 0..program.warmup + program.iterations {
        let mut turns = vec![Turn::Exchange];
        if program.spec.is_raw {
            turns.push(Turn::Raw);
        }
        // Each comes first as often as second, so that neither always finds the caches as the other left
        // them.
        if !iteration.is_multiple_of(2) {
            turns.reverse();
        }
        for turn in turns {
            let timed = processes.take_turn(turn, &mut measured)?;
            match turn {
                _ if iteration < program.warmup => {}
                Turn::Exchange => measured.exchanges.push(timed),
                Turn::Raw => measured.raw.push(timed),
            }
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    let exchanges = u64::from(program.warmup + program.iterations);
    if program.spec.is_exact {
        measured.verdict = processes.check(exchanges)?;
    }
    processes.shut_down();
    Ok(measured)
}

/// The connections to all processes, by role.
pub struct BenchProcesses {
    /// By rank.
    pub workers: Vec<JsonConnection>,
    /// The first has the connection manager.
    pub hubs: Vec<JsonConnection>,
}

impl BenchProcesses {
    fn connect(
        program: &Program,
        listener: &UnixListener,
        is_over: &AtomicBool,
    ) -> anyhow::Result<BenchProcesses> {
        let spec = &program.spec;
        let workers = spec.workers as usize;
        let mut connections = accept(listener, workers + program.hosts.hubs().len(), is_over)?;
        let mut hubs = connections.split_off(workers);
        open(spec, &program.hosts, workers, &mut hubs)?;
        let mut options = JobOptions { encrypt: program.spec.encrypt, ..program.hosts.options };
        if let Some(rewind_every) = program.spec.rewind_every {
            (options.on_worker_loss, options.rewind_every) = (OnWorkerLoss::Rewind, rewind_every);
        }
        let at = create(&mut hubs[0], "bench", options)?;
        let mut processes = BenchProcesses { workers: connections, hubs };
        for (rank, connection) in (0..).zip(&mut processes.workers) {
            let rack = program.hosts.rack(rank);
            connection.send(&LauncherCommand::Join { spec: spec.clone(), rank, rack, at: at.clone() })?;
        }
        for report in processes.reports() {
            let ProcessReport::Joined = report? else { bail!("a worker answered out of turn") };
        }
        Ok(processes)
    }

    fn take_turn(&mut self, turn: Turn, measured: &mut Measured) -> anyhow::Result<Timed> {
        let before = self.hub_use()?;
        let order = LauncherCommand::Turn { turn, start: usage::monotonic() + LEAD };
        self.order_workers(&order)?;
        let (mut workers, mut frame_bytes) = (Vec::new(), Vec::new());
        for report in self.reports() {
            let ProcessReport::Done { seconds, bytes_sent, bytes_received, cpu_seconds, peak_bytes } =
                report?
            else {
                bail!("a worker answered out of turn")
            };
            workers.push((seconds, cpu_seconds));
            frame_bytes.push([bytes_sent as f64, bytes_received as f64]);
            measured.worker_peak_bytes = measured.worker_peak_bytes.max(peak_bytes);
        }
        let after = self.hub_use()?;
        measured.hub_peak_bytes = after.peak_bytes;
        let cores = after.core_seconds.iter().zip(&before.core_seconds);
        Ok(Timed {
            seconds: workers.iter().map(|&(seconds, _)| seconds).fold(0.0, f64::max),
            frame_bytes: [0, 1].map(|way| mean(frame_bytes.iter().map(|bytes| bytes[way]))),
            cpu_seconds_worker: mean(workers.iter().map(|&(_, cpu_seconds)| cpu_seconds)),
            cpu_seconds_hub: after.cpu_seconds - before.cpu_seconds,
            core_seconds: cores.map(|(after, before)| after - before).collect(),
        })
    }

    fn check(&mut self, exchanges: u64) -> anyhow::Result<Verdict> {
        self.order_workers(&LauncherCommand::Check { exchanges })?;
        let mut verdict = Verdict::default();
        for report in self.reports() {
            let ProcessReport::Checked(of_one) = report? else { bail!("a worker answered out of turn") };
            verdict = verdict.and(of_one);
        }
        Ok(verdict)
    }

    /// Lets the workers leave before the hub ends.
    pub fn shut_down(mut self) {
        for worker in &mut self.workers {
            worker.close_write();
        }
        for worker in &mut self.workers {
            // The worker sends nothing more and hangs up.
            let _ = worker.receive::<ProcessReport>();
        }
    }

    /// Sends one command to all workers.
    ///
    /// # Errors
    /// If a worker is gone.
    pub fn order_workers(&mut self, order: &impl Serialize) -> anyhow::Result<()> {
        for (rank, connection) in self.workers.iter_mut().enumerate() {
            connection.send(order).with_context(|| format!("worker {rank}"))?;
        }
        Ok(())
    }

    /// Every worker's next report, by rank.
    pub fn reports<R: DeserializeOwned>(&mut self) -> impl Iterator<Item = anyhow::Result<R>> {
        self.workers
            .iter_mut()
            .enumerate()
            .map(|(rank, connection)| receive(&format!("worker {rank}"), connection))
    }

    /// The use of all hubs together.
    fn hub_use(&mut self) -> anyhow::Result<HubUse> {
        hub_use(&mut self.hubs)
    }
}

/// The use of all these hubs together.
///
/// # Errors
/// If a hub is gone.
pub fn hub_use(hubs: &mut [JsonConnection]) -> anyhow::Result<HubUse> {
    let mut all = HubUse::default();
    for hub in hubs {
        match ask("a hub", hub, &LauncherCommand::ReportUse)? {
            ProcessReport::Used(used) => all = all.and(used),
            other => bail!("a hub answered {other:?}"),
        }
    }
    Ok(all)
}

/// Has hubs join the manager of the first, one after the other, so that their numbers have the order of their
/// processes, which follow the workers'. Returns the manager's URL.
///
/// # Errors
/// If a hub cannot start.
pub fn open(
    spec: &Spec,
    hosts: &Hosts,
    workers: usize,
    hubs: &mut [JsonConnection],
) -> anyhow::Result<String> {
    let token = token()?;
    let mut joins = None;
    for (number, (hub, host)) in hubs.iter_mut().zip(hosts.hubs()).enumerate() {
        let settings = HubProcessSettings {
            listen: host.listen.clone(),
            between_hubs: host.between_hubs,
            joins: joins.clone(),
            rack: host.rack.clone(),
            token: token.clone(),
        };
        let name = hosts.name(workers + number, workers);
        match ask(&name, hub, &LauncherCommand::Host { spec: spec.clone(), settings })? {
            ProcessReport::Ready { url } => joins = joins.or(Some(url)),
            other => bail!("{name} answered {other:?}"),
        }
    }
    joins.context("there is a hub")
}

/// Creates a job at hubs that have joined.
///
/// # Errors
/// If the manager refuses it.
pub fn create(
    first_hub: &mut JsonConnection,
    job: &str,
    options: JobOptions,
) -> anyhow::Result<JobEndpoints> {
    match ask("the first hub", first_hub, &LauncherCommand::Open { job: job.to_owned(), options })? {
        ProcessReport::Hosting(at) => Ok(at),
        other => bail!("the first hub answered {other:?}"),
    }
}

/// A token for the manager of a run, which other users must not reach, wherever it listens.
fn token() -> anyhow::Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).context("the system has no random numbers")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Sends a command to the process of this name and returns its report.
///
/// # Errors
/// If the process is gone or reports something else.
pub fn ask<R: DeserializeOwned>(
    name: &str,
    connection: &mut JsonConnection,
    order: &impl Serialize,
) -> anyhow::Result<R> {
    connection.send(order).with_context(|| name.to_owned())?;
    receive(name, connection)
}

/// The next report of the process of this name.
///
/// # Errors
/// If the process is gone or reports something else.
pub fn receive<R: DeserializeOwned>(name: &str, connection: &mut JsonConnection) -> anyhow::Result<R> {
    connection.receive().with_context(|| name.to_owned())?.with_context(|| format!("{name} ended too early"))
}

/// Accepts the connections of `count` processes, by number. `is_over` is set when no more will come.
///
/// # Errors
/// If some do not come.
pub fn accept(
    listener: &UnixListener,
    count: usize,
    is_over: &AtomicBool,
) -> anyhow::Result<Vec<JsonConnection>> {
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + START_TIMEOUT;
    let mut connections: Vec<Option<JsonConnection>> = (0..count).map(|_| None).collect();
    while connections.iter().any(Option::is_none) {
        match listener.accept() {
            Ok((socket, _)) => {
                let (process, connection) = identify(socket)?;
                *connections.get_mut(process).context("a process came that was not started")? =
                    Some(connection);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if is_over.load(Ordering::Acquire) || Instant::now() > deadline {
                    let missing = connections.iter().filter(|connection| connection.is_none()).count();
                    bail!("{missing} of {count} processes did not start");
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(error).context("cannot read the reports of the processes"),
        }
    }
    Ok(connections.into_iter().flatten().collect())
}

fn identify(socket: UnixStream) -> anyhow::Result<(usize, JsonConnection)> {
    socket.set_nonblocking(false)?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    let mut connection = JsonConnection::new(socket);
    match receive("a process", &mut connection)? {
        ProcessReport::Here { process } => Ok((process, connection)),
        other => bail!("a process began with {other:?}"),
    }
}
