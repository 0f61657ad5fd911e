//! Hosts of network namespaces, as `cargo xtask testbed` makes them, where this machine permits it.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// The exit code of xtask if namespaces are not permitted.
const NOT_PERMITTED: i32 = 3;

/// A testbed that is gone when this is dropped, and even when the test is killed.
pub struct Testbed {
    name: String,
    /// Holds the testbed as long as its stdin is open.
    holder: Child,
    /// The hosts as `bench exchange` takes them: HOST=IP+IP.
    hosts: Vec<String>,
}

impl Testbed {
    /// Brings a testbed up with these flags of `testbed up`, which must not contain its name. `None`, after a
    /// line that says why, if there can be no testbeds.
    pub fn up(flags: &str) -> Option<Testbed> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("t{}n{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let mut up = xtask(&format!("up --hold --name {name} {flags}"));
        let mut holder =
            up.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(holder.stdout.take().expect("piped")).read_line(&mut ready).unwrap();
        if !ready.contains("is up") {
            let mut why = String::new();
            holder.stderr.take().expect("piped").read_to_string(&mut why).unwrap();
            let code = holder.wait().unwrap().code();
            assert_eq!(code, Some(NOT_PERMITTED), "no testbed {flags}: {why}");
            println!("skipped: {}", why.trim());
            return None;
        }
        let listed = xtask(&format!("hosts --name {name}")).output().unwrap();
        let listed = String::from_utf8(listed.stdout).unwrap();
        let hosts = listed.lines().map(|line| line.replace(' ', "=")).collect();
        Some(Testbed { name, holder, hosts })
    }

    /// The command that runs another on a host.
    pub fn enter(&self) -> String {
        format!("ip netns exec {}-{{host}}", self.name)
    }

    /// These hosts with their addresses, separated by commas.
    pub fn hosts(&self, names: &[&str]) -> String {
        let find = |name: &&str| {
            let host = self.hosts.iter().find(|host| host.starts_with(&format!("{name}=")));
            host.unwrap_or_else(|| panic!("there is no {name} among {:?}", self.hosts)).as_str()
        };
        names.iter().map(find).collect::<Vec<_>>().join(",")
    }

    /// A command to be run on a host.
    pub fn command(&self, host: &str, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &format!("{}-{host}", self.name), program]);
        command
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

/// `cargo xtask testbed`, which cargo builds if necessary.
pub fn xtask(arguments: &str) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command.args(["run", "--quiet", "--package", "xtask", "--", "testbed"]).args(arguments.split(' '));
    command
}
