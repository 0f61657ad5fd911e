//! A small process that outlives a killed launcher just long enough to end its workers.

use std::collections::HashSet;
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use paramhub_control::ManagerClient;
use paramhub_core::auth::Namespace;
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use serde::{Deserialize, Serialize};

use super::program::this_program_command;

/// The time that groups get to end by themselves.
const GRACE: Duration = Duration::from_secs(2);

/// The time that the job's hubs may take for a last checkpoint before the groups are signalled.
const LAST_CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(7);
/// The reason why a job is over whose launcher was killed.
const KILLED: &str = "its launcher was killed";

/// The job of a launcher's workers, at a connection manager that outlives the launcher.
#[derive(Debug, Serialize, Deserialize)]
pub struct SupervisedJob {
    /// The manager's URL.
    pub url: String,
    /// The admin token, if the manager asks for one.
    pub token: Option<String>,
    /// The job's namespace.
    pub job: Namespace,
}

/// The launcher's side: reports each group to the supervisor when it starts and when it ends. If the pipe
/// closes while no group is left, the supervisor has nothing to do.
pub(super) struct WorkerSupervisor {
    process: Child,
    pipe: Option<ChildStdin>,
}

impl WorkerSupervisor {
    /// Starts a supervisor in a group of its own, so that Ctrl-C does not end it.
    pub(super) fn start() -> std::io::Result<WorkerSupervisor> {
        let mut process = this_program_command()?
            .arg("worker-supervisor")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let pipe = process.stdin.take();
        Ok(WorkerSupervisor { process, pipe })
    }

    /// Sets the job whose connection manager the supervisor notifies if the launcher is killed.
    pub(super) fn set_job(&mut self, supervised_job: &SupervisedJob) -> std::io::Result<()> {
        self.write(&format!("={}\n", serde_json::to_string(supervised_job)?))
    }

    pub(super) fn add(&mut self, group: Pid) -> std::io::Result<()> {
        self.write_group('+', group)
    }

    pub(super) fn remove(&mut self, group: Pid) {
        // A supervisor that is gone has nothing to forget.
        let _ = self.write_group('-', group);
    }

    fn write_group(&mut self, sign: char, group: Pid) -> std::io::Result<()> {
        self.write(&format!("{sign}{}\n", group.as_raw_nonzero()))
    }

    fn write(&mut self, line: &str) -> std::io::Result<()> {
        // The pipe takes so few bytes in one write: lines are never torn.
        self.pipe.as_mut().expect("open until dropped").write_all(line.as_bytes())
    }
}

impl Drop for WorkerSupervisor {
    fn drop(&mut self) {
        // A launcher that runs this was not killed, and reports to the manager itself how the job ended.
        let _ = self.write("=\n");
        drop(self.pipe.take());
        let _ = self.process.wait();
    }
}

/// The supervisor's process: tracks the launcher's groups until the pipe closes, then ends those that are
/// left.
pub fn supervise_groups(launcher: impl BufRead) {
    let mut groups = HashSet::new();
    let mut supervised_job: Option<SupervisedJob> = None;
    for line in launcher.lines().map_while(Result::ok) {
        let (sign, number) = line.split_at_checked(1).unwrap_or_default();
        if sign == "=" {
            supervised_job = serde_json::from_str(number).ok();
            continue;
        }
        let Some(group) = number.parse().ok().and_then(Pid::from_raw) else { continue };
        match sign {
            "+" => groups.insert(group),
            _ => groups.remove(&group),
        };
    }
    // The manager is notified before the ranks are lost one after the other.
    let supervised_job =
        supervised_job.filter(|_| !groups.is_empty()).and_then(|SupervisedJob { url, token, job }| {
            Some((ManagerClient::new(&url, token).ok()?, job.to_string()))
        });
    if let Some((client, job)) = supervised_job.clone() {
        let (is_running, ended) = channel::<()>();
        let announce = move || {
            // The workers end even if the manager does not answer.
            let _ = client.announce_workers_end(&job, KILLED);
            drop(is_running);
        };
        if std::thread::Builder::new().spawn(announce).is_ok() {
            let _ = ended.recv_timeout(LAST_CHECKPOINT_TIMEOUT);
        }
    }
    signal(&groups, Signal::TERM);
    let deadline = Instant::now() + GRACE;
    while Instant::now() < deadline && groups.iter().any(|&group| test_kill_process_group(group).is_ok()) {
        std::thread::sleep(Duration::from_millis(20));
    }
    signal(&groups, Signal::KILL);
    if let Some((client, job)) = supervised_job {
        let _ = client.workers_have_ended(&job, KILLED);
    }
}

fn signal(groups: &HashSet<Pid>, signal: Signal) {
    for &group in groups {
        // A group that is already gone is as wanted.
        let _ = kill_process_group(group, signal);
    }
}
