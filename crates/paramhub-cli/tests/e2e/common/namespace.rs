//! Network namespaces, from which tests make hosts of their own if `cargo xtask testbed` does not have the
//! shape that they need.
//!
//! Each namespace lives as long as a process that only reads a pipe of this test. However the test ends, the
//! pipe closes, that process ends, and namespace, addresses and links are gone. This machine's own network is
//! not changed.

use std::fs::{File, read_link, read_to_string};
use std::io::{Error, ErrorKind, Write};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::WAIT_TIMEOUT;

/// Shows a program the interfaces of its own namespace at /sys, as `ip netns exec` does.
const WITH_OWN_SYS: [&str; 5] =
    ["unshare", "--mount", "sh", "-c", "mount -t sysfs sysfs /sys && exec \"$0\" \"$@\""];
/// A command that checks whether a test can have a namespace.
const TRIAL: [&str; 3] =
    ["link set lo up", "link add name bridge0 type bridge", "link add name veth0 type veth peer name veth1"];

/// A network namespace and the process that keeps it.
pub struct Namespace {
    holder: Child,
}

impl Namespace {
    /// `None`, after a line that says so, if namespaces are not permitted.
    pub fn first() -> Option<Namespace> {
        let tried = Namespace::try_new().and_then(|trial| {
            trial.try_tool("ip", &TRIAL)?;
            trial.try_run(&["true"])?;
            Namespace::try_new()
        });
        tried.inspect_err(|why| println!("skipped: network namespaces are not permitted here: {why}")).ok()
    }

    /// A further namespace, once there is a first one.
    pub fn another() -> Namespace {
        Namespace::try_new().expect("the first one could be made")
    }

    fn try_new() -> Result<Namespace, Error> {
        let mut holder = Command::new("unshare")
            .args(["--net", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let own = read_link("/proc/self/ns/net")?;
        let path = format!("/proc/{}/ns/net", holder.id());
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some(exit) = holder.try_wait()? {
                return Err(Error::other(format!("`unshare --net` has failed: {exit}")));
            }
            match read_link(&path) {
                Ok(entered) if entered != own => return Ok(Namespace { holder }),
                _ => assert!(Instant::now() < deadline, "`unshare --net` does nothing"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The number by which `ip link` knows the namespace.
    pub fn id(&self) -> u32 {
        self.holder.id()
    }

    /// The words before a command that is to run in the namespace. The process that is started remains the
    /// command's.
    pub fn entry(&self) -> Vec<String> {
        self.door().into_iter().chain(WITH_OWN_SYS.map(str::to_owned)).collect()
    }

    /// The same for commands that look at no interface: it is quicker, and fits into a shell's line.
    pub fn door(&self) -> [String; 3] {
        ["nsenter".into(), format!("--net=/proc/{}/ns/net", self.id()), "--".into()]
    }

    /// Runs commands of `ip`.
    #[track_caller]
    pub fn ip<S: AsRef<str>>(&self, lines: &[S]) {
        self.try_tool("ip", lines).unwrap_or_else(|error| {
            let lines: Vec<&str> = lines.iter().map(AsRef::as_ref).collect();
            panic!("{error} (of: {})", lines.join("; "))
        });
    }

    /// The output of a command.
    #[track_caller]
    pub fn run(&self, command: &[&str]) -> String {
        self.try_run(command).unwrap_or_else(|error| panic!("`{}`: {error}", command.join(" ")))
    }

    /// Runs `work` on a thread inside the namespace.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/proc/{}/ns/net", self.id())).expect("it is there");
        std::thread::scope(|scope| {
            let there = scope.spawn(|| {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                    .expect("root may");
                work()
            });
            there.join().expect("its own assertions hold")
        })
    }

    /// One of the kernel's tables for this namespace, such as `dev` or `tcp`. The tables of IPv6 are empty if
    /// IPv6 is switched off.
    pub fn table(&self, name: &str) -> String {
        let path = format!("/proc/{}/net/{name}", self.id());
        match read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound && name.ends_with('6') => String::new(),
            read => read.unwrap_or_else(|error| panic!("{path}: {error}")),
        }
    }

    /// Bytes that an interface has sent so far.
    pub fn sent_by(&self, interface: &str) -> u64 {
        let counters = self.table("dev");
        let of_interface =
            |line: &str| line.trim().strip_prefix(interface)?.strip_prefix(':').map(str::to_owned);
        let found =
            counters.lines().find_map(of_interface).unwrap_or_else(|| panic!("no {interface}: {counters}"));
        // Eight columns of received bytes and packets come first.
        found.split_whitespace().nth(8).and_then(|bytes| bytes.parse().ok()).expect("a number")
    }

    /// Runs commands of `ip` or `tc`.
    pub fn try_tool<S: AsRef<str>>(&self, name: &str, lines: &[S]) -> Result<(), Error> {
        let [program, namespace, dashes] = self.door();
        let mut child = Command::new(program)
            .args([&namespace, &dashes, name, "-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let lines: Vec<&str> = lines.iter().map(AsRef::as_ref).collect();
        child.stdin.take().expect("piped").write_all(lines.join("\n").as_bytes())?;
        success(&child.wait_with_output()?).map(drop)
    }

    fn try_run(&self, command: &[&str]) -> Result<String, Error> {
        let entry = self.entry();
        success(&Command::new(&entry[0]).args(&entry[1..]).args(command).output()?)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The process ends by itself when its pipe closes; this only waits for that.
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

fn success(output: &std::process::Output) -> Result<String, Error> {
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}
