//! The processes of a benchmark, started and supervised.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};

use super::driver::{Measured, Program, drive};
use super::hosts::Hosts;
use crate::ExitCode;
use crate::launch::{Launch, LaunchEnd, LaunchObserver, Line, OnWorkerFailure, Signals, describe_exit};

/// The outcome of starting them.
pub enum Run<M> {
    /// The measurements.
    Measured(M),
    /// The signal that ended them first.
    Interrupted(i32),
}

/// Measures an exchange.
///
/// # Errors
/// If a process fails.
pub fn run(program: &Program, signals: &Signals) -> anyhow::Result<Run<Measured>> {
    launch(&program.hosts, program.spec.workers, signals, |listener, is_over| {
        drive(program, listener, is_over)
    })
}

/// A command that starts one or several processes of a benchmark.
pub struct NamedCommand {
    /// The name in messages.
    pub name: String,
    /// The command itself.
    pub command: Command,
}

/// Starts the processes of the workers and of the hubs, each at its site. One thread drives them while this
/// one supervises them.
///
/// # Errors
/// If a process fails, or what drives them.
pub fn launch<M: Send>(
    hosts: &Hosts,
    workers: u32,
    signals: &Signals,
    drive: impl FnOnce(&UnixListener, &AtomicBool) -> anyhow::Result<M> + Send,
) -> anyhow::Result<Run<M>> {
    launch_all(|socket| commands(hosts, workers, socket), signals, drive)
}

/// The commands that start the processes of the workers and of the hubs, for the launcher's socket.
///
/// # Errors
/// If this program's own file cannot be found.
pub fn commands(hosts: &Hosts, workers: u32, socket: &Path) -> anyhow::Result<Vec<NamedCommand>> {
    let workers = workers as usize;
    let processes = 0..workers + hosts.hubs().len();
    let named = processes.map(|process| {
        let mut command = hosts.command(process, workers)?;
        add_process_arguments(&mut command, socket, process);
        Ok(NamedCommand { name: hosts.name(process, workers), command })
    });
    named.collect()
}

/// Adds the arguments by which a command of this program knows which process of the benchmark it is.
pub fn add_process_arguments(command: &mut Command, socket: &Path, process: usize) {
    command.arg("bench-peer").arg(socket).arg(process.to_string());
    command.env_remove("PARAMHUB_ADMIN_TOKEN").env_remove("PARAMHUB_ADMIN_TOKEN_FILE");
}

/// Runs the commands for a socket, and drives and supervises their processes in the same way.
///
/// # Errors
/// If a process fails, or what drives them.
pub fn launch_all<M: Send>(
    commands: impl FnOnce(&Path) -> anyhow::Result<Vec<NamedCommand>>,
    signals: &Signals,
    drive: impl FnOnce(&UnixListener, &AtomicBool) -> anyhow::Result<M> + Send,
) -> anyhow::Result<Run<M>> {
    // Only this user may enter the folder, so no other user can pose as a worker.
    let scratch = tempfile::Builder::new()
        .prefix("paramhub-bench-")
        .tempdir()
        .context("cannot create a folder for the benchmark's socket")?;
    let socket = scratch.path().join("launcher");
    let listener = UnixListener::bind(&socket).context("cannot listen for the processes to start")?;
    let (names, commands): (Vec<String>, Vec<Command>) =
        commands(&socket)?.into_iter().map(|NamedCommand { name, command }| (name, command)).unzip();
    let launch = Launch::start(commands, OnWorkerFailure::EndAll, None)?;
    let is_over = AtomicBool::new(false);
    let (ended, measured) = std::thread::scope(|threads| {
        let driver = threads.spawn(|| drive(&listener, &is_over));
        let ended = launch.supervise(signals, &mut ErrorPrinter { names: &names });
        is_over.store(true, Ordering::Release);
        (ended, driver.join().expect("the driver does not panic"))
    });
    evaluate(&ended, measured, &names)
}

/// Prints that the benchmark was interrupted. Returns the exit code.
pub fn interrupted(signal: i32) -> ExitCode {
    let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
    eprintln!("paramhub: the benchmark was interrupted by {name}; workers and hub have ended");
    ExitCode::from(128 + u8::try_from(signal).unwrap_or(0))
}

fn evaluate<M>(ended: &LaunchEnd, measured: anyhow::Result<M>, names: &[String]) -> anyhow::Result<Run<M>> {
    if let Some(signal) = ended.signal {
        return Ok(Run::Interrupted(signal));
    }
    // A process that was killed explains the errors of the others.
    let name = |process: usize| &names[process];
    let killed = ended.failed.iter().find(|&&process| ended.exits[process].code().is_none());
    if let Some(&process) = killed {
        bail!("the benchmark failed: {} {}", name(process), describe_exit(ended.exits[process]));
    }
    let measured = measured.context("the benchmark failed")?;
    if let Some(&process) = ended.failed.first() {
        bail!("the benchmark failed: {} {}", name(process), describe_exit(ended.exits[process]));
    }
    Ok(Run::Measured(measured))
}

/// Prints the output of the processes, which is errors only.
struct ErrorPrinter<'a> {
    names: &'a [String],
}

impl LaunchObserver for ErrorPrinter<'_> {
    fn line(&mut self, line: Line) {
        eprintln!("[{}] {}", self.names[line.rank], String::from_utf8_lossy(&line.bytes));
    }
}
