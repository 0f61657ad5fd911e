//! One worker process.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::SyncSender;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::lines::{OutputStream, PipeLine, forward};

pub(super) struct Worker {
    child: Child,
    pub(super) exit: Option<ExitStatus>,
}

impl Worker {
    /// Starts the command as the leader of its own process group and sends its output to the channel.
    pub(super) fn spawn(
        command: &mut Command,
        rank: usize,
        to: &SyncSender<PipeLine>,
    ) -> std::io::Result<Worker> {
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut worker = Worker { child: command.spawn()?, exit: None };
        let (stdout, stderr) = (worker.child.stdout.take(), worker.child.stderr.take());
        let forwarded = forward(stdout.expect("piped above"), rank, OutputStream::Output, to.clone())
            .and_then(|()| forward(stderr.expect("piped above"), rank, OutputStream::Error, to.clone()));
        if let Err(error) = forwarded {
            worker.end();
            return Err(error);
        }
        Ok(worker)
    }

    /// The id of the worker's process, which is also that of its group.
    pub(super) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Signals the worker and all processes that it started. The worker must not have been reaped: its number
    /// could be another process's by then.
    pub(super) fn signal(&self, signal: Signal) {
        if self.exit.is_none() {
            // The worker may have just ended.
            let _ = kill_process_group(self.pid(), signal);
        }
    }

    /// The worker's exit status if it has ended since the last call. Processes that it left running are ended
    /// with it.
    pub(super) fn reap(&mut self) -> Option<ExitStatus> {
        if self.exit.is_some() {
            return None;
        }
        let peek = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if !matches!(waitid(WaitId::Pid(self.pid()), peek), Ok(Some(_))) {
            return None;
        }
        self.signal(Signal::KILL);
        self.exit = self.child.wait().ok();
        self.exit
    }

    /// Ends the worker and its group at once.
    pub(super) fn end(&mut self) {
        self.signal(Signal::KILL);
        if self.exit.is_none() {
            self.exit = self.child.wait().ok();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

/// The exit code as a shell reports it: the process's own, or 128 and the signal.
pub(super) fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(u8::MAX)
}

/// Returns a text that says how a process ended, such as "exited with 1".
pub fn describe_exit(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with {code}"),
        (None, Some(signal)) => match signal_hook::low_level::signal_name(signal) {
            Some(name) => format!("was killed by {name}"),
            None => format!("was killed by signal {signal}"),
        },
        (None, None) => "ended".into(),
    }
}
