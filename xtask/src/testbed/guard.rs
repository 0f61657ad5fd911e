//! Ensures that only one process changes a testbed at a time, and that no testbed is left in parts.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use super::raise::take_down;
use super::shape::Shape;
use super::{Problem, options};

/// Like the namespaces, the folder is gone after a restart.
const FOLDER: &str = "/run/paramhub-testbed";
/// The time that a process waits for the lock: a guard may be taking an interrupted testbed down.
const LOCK_TIMEOUT: Duration = Duration::from_secs(15);
/// The time that a guard tries to take a testbed down.
const GUARD_TIMEOUT: Duration = Duration::from_secs(10);
/// A testbed is down if nothing was added to it for so long.
const QUIET: Duration = Duration::from_millis(300);
/// The text that the builder writes to its guard when it has succeeded.
const ALL_IS_WELL: &[u8] = b"well";

/// The right to change a testbed.
pub(super) struct Lock {
    name: String,
    /// The lock file. Its content is the flags that ask for the testbed, once the testbed is there.
    file: File,
}

impl Lock {
    pub(super) fn take(name: &str) -> Result<Lock, Problem> {
        let path = path(name);
        let denied = |error| Problem::NotPermitted(format!("{}: {error}", path.display()));
        std::fs::create_dir_all(FOLDER).map_err(denied)?;
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = open.map_err(denied)?;
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Lock { name: name.to_owned(), file }),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Err(TryLockError::WouldBlock) => {
                    let why = format!(
                        "another `testbed` command is at work on {name}: end it, or use another --name"
                    );
                    return Err(Problem::Failed(why));
                }
                Err(TryLockError::Error(error)) => return Err(denied(error)),
            }
        }
    }

    /// Records the testbed that is there, or that there is none.
    pub(super) fn write(&mut self, shape: Option<&Shape>) -> Result<(), Problem> {
        let text = shape.map(Shape::to_string).unwrap_or_default();
        let written = self.file.set_len(0).and_then(|()| std::fs::write(path(&self.name), text));
        written.map_err(|error| Problem::Failed(format!("{}: {error}", path(&self.name).display())))
    }
}

/// The testbed of this name, if it is up.
pub(super) fn known(name: &str) -> Option<Shape> {
    let text = std::fs::read_to_string(path(name)).ok()?;
    options::shape(text.split_whitespace().map(str::to_owned)).ok()
}

fn path(name: &str) -> PathBuf {
    PathBuf::from(format!("{FOLDER}/{name}"))
}

/// A process that takes the testbed down if this one ends before it reports success: by Ctrl-C, a panic or a
/// kill that cannot be caught.
pub(super) struct Guard {
    process: Child,
    pipe: ChildStdin,
}

impl Guard {
    pub(super) fn post(lock: &Lock) -> Result<Guard, Problem> {
        let unable = |error| Problem::Failed(format!("cannot start a guard of the testbed: {error}"));
        let program = std::env::current_exe().map_err(unable)?;
        let mut process = Command::new(program)
            .args(["testbed-guard", &lock.name])
            // The guard must not receive Ctrl-C.
            .process_group(0)
            .stdin(Stdio::piped())
            // The guard prints nothing there. It inherits the file only to hold the lock as long as it lives.
            .stdout(lock.file.try_clone().map_err(unable)?)
            .spawn()
            .map_err(unable)?;
        let pipe = process.stdin.take().expect("it is piped");
        Ok(Guard { process, pipe })
    }

    pub(super) fn dismiss(mut self) {
        // The guard may be gone already.
        let _ = self.pipe.write_all(ALL_IS_WELL);
        drop(self.pipe);
        let _ = self.process.wait();
    }
}

/// The guard's own process.
pub(crate) fn stand(name: &str) -> ExitCode {
    let mut received = Vec::new();
    let _ = std::io::stdin().lock().read_to_end(&mut received);
    if received == ALL_IS_WELL {
        return ExitCode::SUCCESS;
    }
    let result = take_down_behind(name);
    let _ = std::fs::write(path(name), "");
    match result {
        Ok(()) => {
            eprintln!("testbed: interrupted; {name} was taken down");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("testbed: {problem}; try `cargo xtask testbed down --name {name}`");
            ExitCode::FAILURE
        }
    }
}

/// Processes that the dead process started last may still be creating namespaces, or deleting them.
fn take_down_behind(name: &str) -> Result<(), Problem> {
    let deadline = Instant::now() + GUARD_TIMEOUT;
    loop {
        let found = take_down(name);
        std::thread::sleep(QUIET);
        match (found, take_down(name)) {
            (Ok(_), Ok(0)) => return Ok(()),
            (_, Err(problem)) if Instant::now() > deadline => return Err(problem),
            _ if Instant::now() > deadline => {
                return Err(Problem::Failed(format!("processes keep being added to {name}")));
            }
            _ => {}
        }
    }
}
