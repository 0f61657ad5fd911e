//! A small process that outlives the launcher just long enough to end its workers.

use std::collections::HashSet;
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};

use super::program::this_program;

/// How long groups get to end by themselves.
const GRACE: Duration = Duration::from_secs(2);

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

    pub(super) fn add(&mut self, group: Pid) -> std::io::Result<()> {
        self.tell('+', group)
    }

    pub(super) fn remove(&mut self, group: Pid) {
        // Without a warden there is nothing to forget.
        let _ = self.tell('-', group);
    }

    fn tell(&mut self, sign: char, group: Pid) -> std::io::Result<()> {
        let pipe = self.pipe.as_mut().expect("open until dropped");
        // One write of a few bytes: never torn.
        pipe.write_all(format!("{sign}{}\n", group.as_raw_nonzero()).as_bytes())
    }
}

impl Drop for Warden {
    fn drop(&mut self) {
        drop(self.pipe.take());
        let _ = self.process.wait();
    }
}

/// The warden itself: follows the launcher's groups until the pipe closes, then ends those that are left.
pub(crate) fn watch_over(launcher: impl BufRead) {
    let mut groups = HashSet::new();
    for line in launcher.lines().map_while(Result::ok) {
        let (sign, number) = line.split_at_checked(1).unwrap_or_default();
        let Some(group) = number.parse().ok().and_then(Pid::from_raw) else { continue };
        match sign {
            "+" => groups.insert(group),
            _ => groups.remove(&group),
        };
    }
    signal(&groups, Signal::TERM);
    let deadline = Instant::now() + GRACE;
    while Instant::now() < deadline && groups.iter().any(|&group| test_kill_process_group(group).is_ok()) {
        std::thread::sleep(Duration::from_millis(20));
    }
    signal(&groups, Signal::KILL);
}

fn signal(groups: &HashSet<Pid>, signal: Signal) {
    for &group in groups {
        // Gone already is what is wanted.
        let _ = kill_process_group(group, signal);
    }
}
