//! Starts the real program without this machine's configuration, and ends it whatever happens.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

pub mod cluster;
pub mod hosts;
pub mod namespace;
pub mod parameters;
pub mod rails;
pub mod testbed;

use std::io::Read;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use namespace::Namespace;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Far above what any healthy step takes on two busy cores, far below the harness's own limit.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// The time that a whole program may take: some train and compare for half a minute on two idle cores, and
/// other tests run beside them. nextest ends a test after 300 s.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(240);

/// A program to be started, in a folder of its own.
pub struct Program {
    command: Command,
    folder: Arc<TempDir>,
}

/// A started program. It is killed, by its id, when it is dropped.
pub struct Process {
    child: Child,
    exit: Option<ExitStatus>,
    stdout: Pipe,
    stderr: Pipe,
    folder: Arc<TempDir>,
}

/// A program that has ended.
#[derive(Debug)]
pub struct Finished {
    /// The exit code as a shell reports it.
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
    folder: Arc<TempDir>,
}

struct Pipe {
    text: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

/// `paramhub` with these arguments.
pub fn paramhub<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Program {
    program(Path::new(env!("CARGO_BIN_EXE_paramhub")), arguments)
}

/// One of this crate's examples with these arguments.
pub fn example<'a>(name: &str, arguments: impl IntoIterator<Item = &'a str>) -> Program {
    let example = Path::new(env!("CARGO_BIN_EXE_paramhub")).with_file_name("examples").join(name);
    assert!(example.exists(), "{} is missing: build it with `cargo build --examples`", example.display());
    program(&example, arguments)
}

pub fn program<'a>(path: &Path, arguments: impl IntoIterator<Item = &'a str>) -> Program {
    let folder = Arc::new(tempfile::tempdir().expect("a temporary folder"));
    let mut command = Command::new(path);
    command.args(arguments).current_dir(folder.path());
    for (name, _) in std::env::vars_os() {
        // PARAMHUB_ISA stays, so that all tests can run with a lesser processor's instructions.
        if name.to_string_lossy().starts_with("PARAMHUB_") && name != "PARAMHUB_ISA" {
            command.env_remove(name);
        }
    }
    Program { command, folder }
}

/// A hub with its manager on free loopback ports, ready for jobs. Returns the manager's URL, too.
pub fn hub<'a>(more: impl IntoIterator<Item = &'a str>) -> (Process, String) {
    let arguments = ["hub", "--listen", "127.0.0.1:0", "--manager", "127.0.0.1:0"];
    let hub = paramhub(arguments.into_iter().chain(more)).start();
    let ready = hub.wait_for("hub ready: ");
    let url = ready.split_whitespace().find(|word| word.starts_with("http://")).expect("a URL").to_owned();
    (hub, url)
}

/// An address on which no process listens. If another process takes it meanwhile, the one that wanted it
/// reports that.
pub fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// Returns whether a process exists and is more than a zombie.
pub fn is_alive(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// The worker processes of `train`, or of a `run` that starts it: the launcher's children that train.
pub fn workers_of(launcher: Pid) -> Vec<i32> {
    let pid = launcher.as_raw_nonzero();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let is_worker = |pid: &i32| {
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&command).contains("train")
    };
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).filter(is_worker).collect()
}

/// The rank that a worker's environment names.
pub fn rank_of(worker: i32) -> u32 {
    let environment = std::fs::read(format!("/proc/{worker}/environ")).unwrap();
    let environment = String::from_utf8_lossy(&environment);
    let rank = environment.split('\0').find_map(|entry| entry.strip_prefix("RANK="));
    rank.expect("a rank").parse().expect("a number")
}

/// Waits until `holds` is true.
#[track_caller]
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "waited {WAIT_TIMEOUT:?} in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Program {
    /// Starts the program by a command that replaces itself with it, as `nsenter` does.
    pub fn within(mut self, entry: &[String]) -> Self {
        let mut command = Command::new(&entry[0]);
        command.args(&entry[1..]).arg(self.command.get_program()).args(self.command.get_args());
        command.current_dir(self.folder.path());
        for (name, value) in self.command.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        self.command = command;
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Runs it in a network namespace.
    pub fn inside(self, namespace: &Namespace) -> Self {
        self.within(&namespace.entry())
    }

    /// Puts a file into the program's folder.
    pub fn file(self, name: &str, contents: impl AsRef<[u8]>) -> Self {
        std::fs::write(self.folder.path().join(name), contents).unwrap();
        self
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn start(mut self) -> Process {
        let mut child = self
            .command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let stdout = Pipe::read(child.stdout.take().expect("piped"));
        let stderr = Pipe::read(child.stderr.take().expect("piped"));
        Process { child, exit: None, stdout, stderr, folder: self.folder }
    }

    /// Starts the program and waits for its end.
    #[track_caller]
    pub fn finish(self) -> Finished {
        self.start().finish()
    }
}

impl Process {
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("the process is there");
    }

    /// The text that the program has written to stdout so far.
    pub fn stdout(&self) -> String {
        self.stdout.text()
    }

    /// The text that the program has written to stderr so far.
    pub fn stderr(&self) -> String {
        self.stderr.text()
    }

    /// Waits for a line of stdout that contains `part`.
    #[track_caller]
    pub fn wait_for(&self, part: &str) -> String {
        let mut found = None;
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while found.is_none() {
            let text = self.stdout();
            let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
            found = whole.lines().find(|line| line.contains(part)).map(str::to_owned);
            let (stdout, stderr) = (self.stdout(), self.stderr());
            assert!(Instant::now() < deadline, "no `{part}` in\n{stdout}\nstderr:\n{stderr}");
            std::thread::sleep(Duration::from_millis(10));
        }
        found.expect("just found")
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("it can be waited for").is_some()
    }

    /// Waits for the program's end.
    #[track_caller]
    pub fn finish(mut self) -> Finished {
        let deadline = Instant::now() + PROGRAM_TIMEOUT;
        let exit = loop {
            if let Some(exit) = self.child.try_wait().expect("it can be waited for") {
                break exit;
            }
            let (stdout, stderr) = (self.stdout(), self.stderr());
            assert!(
                Instant::now() < deadline,
                "no end after {PROGRAM_TIMEOUT:?}:\n{stdout}\nstderr:\n{stderr}"
            );
            std::thread::sleep(Duration::from_millis(10));
        };
        self.exit = Some(exit);
        Finished {
            code: exit.code().unwrap_or_else(|| 128 + exit.signal().unwrap_or(0)),
            stdout: self.stdout.read_to_end(),
            stderr: self.stderr.read_to_end(),
            folder: self.folder.clone(),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.exit.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Finished {
    #[track_caller]
    pub fn expect_code(self, code: i32) -> Self {
        assert_eq!(self.code, code, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// A file that the program wrote into its folder.
    #[track_caller]
    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.folder.path().join(name)).expect("the program wrote the file")
    }

    /// Fails unless stderr is one line of this program that contains every part.
    #[track_caller]
    pub fn expect_error(self, parts: &[&str]) -> Self {
        let lines: Vec<&str> = self.stderr.lines().collect();
        assert!(lines.len() == 1 && lines[0].starts_with("paramhub: "), "{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "no `{part}` in: {}", self.stderr);
        }
        self
    }
}

impl Pipe {
    fn read(mut source: impl Read + Send + 'static) -> Pipe {
        let text = Arc::new(Mutex::new(Vec::new()));
        let into = text.clone();
        let reader = std::thread::spawn(move || {
            let mut block = [0; 4096];
            while let Ok(bytes @ 1..) = source.read(&mut block) {
                into.lock().unwrap().extend_from_slice(&block[..bytes]);
            }
        });
        Pipe { text, reader: Some(reader) }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.text.lock().unwrap()).into_owned()
    }

    /// All of the output. A process that the program left running could hold the pipe open, so this waits for
    /// a limited time.
    fn read_to_end(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            let deadline = Instant::now() + WAIT_TIMEOUT;
            while !reader.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            assert!(reader.is_finished(), "the program has ended, but something still holds its output open");
        }
        self.text()
    }
}
