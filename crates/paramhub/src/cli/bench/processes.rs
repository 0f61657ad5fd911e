//! The processes of a benchmark, started and watched over.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};
use paramhub_train::THREADS_VARIABLE;

use super::conductor::{Measured, Program, conduct};
use super::hosts::Hosts;
use crate::cli::ExitCode;
use crate::launch::{Ended, Launch, Line, Signals, Watch, describe};

/// What came of starting them.
pub(super) enum Run<M> {
    Measured(M),
    Interrupted(i32),
}

/// Runs a program.
pub(super) fn run(program: &Program, signals: &Signals) -> anyhow::Result<Run<Measured>> {
    launch(&program.hosts, program.spec.workers, signals, |listener, is_over| {
        conduct(program, listener, is_over)
    })
}

/// A command that starts a process of a benchmark, or several.
pub(super) struct Named {
    /// In messages.
    pub(super) name: String,
    pub(super) command: Command,
}

/// Starts so many workers' processes and the hubs', each at its site, and conducts them on a thread of its own while this one watches over
/// them.
pub(super) fn launch<M: Send>(
    hosts: &Hosts,
    workers: u32,
    signals: &Signals,
    conduct: impl FnOnce(&UnixListener, &AtomicBool) -> anyhow::Result<M> + Send,
) -> anyhow::Result<Run<M>> {
    let workers = workers as usize;
    let commands = |socket: &Path| {
        let seats = 0..workers + hosts.hubs().len();
        let named = seats.map(|seat| {
            let mut command = hosts.command(seat, workers)?;
            take_part(&mut command, socket, seat);
            Ok(Named { name: hosts.name(seat, workers), command })
        });
        named.collect()
    };
    launch_all(commands, signals, conduct)
}

/// Says to a command of this program which process of the benchmark it is.
pub(super) fn take_part(command: &mut Command, socket: &Path, seat: usize) {
    command.arg("bench-peer").arg(socket).arg(seat.to_string()).env_remove("PARAMHUB_ADMIN_TOKEN");
    // As of `train`'s workers.
    command.env(THREADS_VARIABLE, "1");
}

/// Starts what the commands for a socket start, and does the same.
pub(super) fn launch_all<M: Send>(
    commands: impl FnOnce(&Path) -> anyhow::Result<Vec<Named>>,
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
    let (names, commands): (Vec<String>, Vec<Command>) =
        commands(&socket)?.into_iter().map(|Named { name, command }| (name, command)).unzip();
    let launch = Launch::start(commands, None)?;
    let is_over = AtomicBool::new(false);
    let (ended, measured) = std::thread::scope(|threads| {
        let conductor = threads.spawn(|| conduct(&listener, &is_over));
        let ended = launch.supervise(signals, &mut Lines { names: &names });
        is_over.store(true, Ordering::Release);
        (ended, conductor.join().expect("the conductor does not panic"))
    });
    judge(&ended, measured, &names)
}

/// Says so, and how to end.
pub(super) fn interrupted(signal: i32) -> ExitCode {
    let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
    eprintln!("paramhub: the benchmark was interrupted by {name}; workers and hub have ended");
    ExitCode::from(128 + u8::try_from(signal).unwrap_or(0))
}

fn judge<M>(ended: &Ended, measured: anyhow::Result<M>, names: &[String]) -> anyhow::Result<Run<M>> {
    if let Some(signal) = ended.signal {
        return Ok(Run::Interrupted(signal));
    }
    // One that was killed explains what the others say.
    let name = |seat: usize| &names[seat];
    let killed = ended.failed.iter().find(|&&seat| ended.exits[seat].code().is_none());
    if let Some(&seat) = killed {
        bail!("the benchmark failed: {} {}", name(seat), describe(ended.exits[seat]));
    }
    let measured = measured.context("the benchmark failed")?;
    if let Some(&seat) = ended.failed.first() {
        bail!("the benchmark failed: {} {}", name(seat), describe(ended.exits[seat]));
    }
    Ok(Run::Measured(measured))
}

/// Whatever the processes print is a complaint.
struct Lines<'a> {
    names: &'a [String],
}

impl Watch for Lines<'_> {
    fn line(&mut self, line: Line) {
        eprintln!("[{}] {}", self.names[line.rank], String::from_utf8_lossy(&line.bytes));
    }
}
