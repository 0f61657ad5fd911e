//! A small process that outlives the launcher just long enough to end its workers.

use std::collections::HashSet;
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use serde::{Deserialize, Serialize};

use super::program::this_program;
use crate::ManagerClient;

/// How long groups get to end by themselves.
const GRACE: Duration = Duration::from_secs(2);

/// How long the job's hubs may take for a last checkpoint before that.
const FAREWELL: Duration = Duration::from_secs(7);
/// Why a job is over whose launcher was killed.
const KILLED: &str = "its launcher was killed";

/// The job of a launcher's workers, at a connection manager that outlives the launcher.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Charge {
    pub(crate) url: String,
    pub(crate) token: Option<String>,
    pub(crate) job: Namespace,
}

/// The launcher's side: tells the warden of every group, and that all is well by having told of none that is left.
pub(super) struct Warden {
    process: Child,
    pipe: Option<ChildStdin>,
}

impl Warden {
    /// Starts one, in a group of its own so that Ctrl-C does not end it.
    pub(super) fn start() -> std::io::Result<Warden> {
        let mut process = this_program()?
            .arg("warden")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let pipe = process.stdin.take();
        Ok(Warden { process, pipe })
    }

    /// Has the warden tell the job's connection manager should the launcher be killed.
    pub(super) fn entrust(&mut self, charge: &Charge) -> std::io::Result<()> {
        self.write(&format!("={}\n", serde_json::to_string(charge)?))
    }

    pub(super) fn add(&mut self, group: Pid) -> std::io::Result<()> {
        self.tell('+', group)
    }

    pub(super) fn remove(&mut self, group: Pid) {
        // Without a warden there is nothing to forget.
        let _ = self.tell('-', group);
    }

    fn tell(&mut self, sign: char, group: Pid) -> std::io::Result<()> {
        self.write(&format!("{sign}{}\n", group.as_raw_nonzero()))
    }

    fn write(&mut self, line: &str) -> std::io::Result<()> {
        // One write of a few bytes: never torn.
        self.pipe.as_mut().expect("open until dropped").write_all(line.as_bytes())
    }
}

impl Drop for Warden {
    fn drop(&mut self) {
        // A launcher that comes here was not killed, and tells the manager itself how the job ended.
        let _ = self.write("=\n");
        drop(self.pipe.take());
        let _ = self.process.wait();
    }
}

/// The warden itself: follows the launcher's groups until the pipe closes, then ends those that are left.
pub(crate) fn watch_over(launcher: impl BufRead) {
    let mut groups = HashSet::new();
    let mut charge: Option<Charge> = None;
    for line in launcher.lines().map_while(Result::ok) {
        let (sign, number) = line.split_at_checked(1).unwrap_or_default();
        if sign == "=" {
            charge = serde_json::from_str(number).ok();
            continue;
        }
        let Some(group) = number.parse().ok().and_then(Pid::from_raw) else { continue };
        match sign {
            "+" => groups.insert(group),
            _ => groups.remove(&group),
        };
    }
    // Before its ranks are lost, one after the other.
    let charge = charge.filter(|_| !groups.is_empty()).and_then(|Charge { url, token, job }| {
        Some((ManagerClient::new(&url, token).ok()?, job.to_string()))
    });
    if let Some((client, job)) = charge.clone() {
        let (told, is_told) = channel::<()>();
        let tell = move || {
            // A manager that does not answer is told nothing.
            let _ = client.announce_workers_end(&job, KILLED);
            drop(told);
        };
        if std::thread::Builder::new().spawn(tell).is_ok() {
            let _ = is_told.recv_timeout(FAREWELL);
        }
    }
    signal(&groups, Signal::TERM);
    let deadline = Instant::now() + GRACE;
    while Instant::now() < deadline && groups.iter().any(|&group| test_kill_process_group(group).is_ok()) {
        std::thread::sleep(Duration::from_millis(20));
    }
    signal(&groups, Signal::KILL);
    if let Some((client, job)) = charge {
        let _ = client.workers_have_ended(&job, KILLED);
    }
}

fn signal(groups: &HashSet<Pid>, signal: Signal) {
    for &group in groups {
        // Gone already is what is wanted.
        let _ = kill_process_group(group, signal);
    }
}
