//! A router with a hub's host and two workers' hosts around it, each with two interfaces in subnets of their own, made of network
//! namespaces:
//!
//! ```text
//! worker 0: eth0 10.77.0.1 ─┐            ┌─ 10.77.8.100 eth0
//!           eth1 10.77.1.1 ─┤            │                    hub, and a bridge docker0
//! worker 1: eth0 10.77.2.1 ─┼── router ──┴─ 10.77.9.100 eth1
//!           eth1 10.77.3.1 ─┘
//! ```
//! Routes go by the first interface; what has the second one's address leaves by that, as on hosts with several rails. The
//! router keeps one end's trouble from the other's carrier, as a switch does.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::io::Write;
use std::process::{Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Hosts with a worker.
pub(crate) const WORKERS: usize = 2;

/// The namespaces, removed when it is dropped: hub, workers, router.
pub(crate) struct Network {
    names: Vec<String>,
}

impl Network {
    /// None where namespaces are not permitted, which is said in one line.
    pub(crate) fn raise(test: &str) -> Option<Network> {
        remove_stale();
        let name = |host: &str| format!("paramhub-{}-{test}-{host}", std::process::id());
        let names: Vec<String> = ["hub", "w0", "w1", "router"].map(name).to_vec();
        if let Err(error) = call("ip", &["netns", "add", &names[0]], "") {
            println!("skipped: network namespaces are not permitted here ({error})");
            return None;
        }
        // From here on it is removed whatever happens.
        let network = Network { names };
        let lines: Vec<String> = network.names[1..].iter().map(|name| format!("netns add {name}")).collect();
        batch(None, &lines);
        let router = network.names[3].as_str();
        let inside = ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"];
        call("ip", &[&["netns", "exec", router][..], &inside].concat(), "").expect("it forwards");
        batch(Some(router), &["link set lo up".into()]);
        for (host, subnets, last) in [(0, [8, 9], 100), (1, [0, 1], 1), (2, [2, 3], 1)] {
            network.connect(&network.names[host], router, subnets, last);
        }
        let containers = [
            "link add docker0 type bridge",
            "link add box0 type veth peer name box1",
            "link set box0 master docker0",
            "link set box0 up",
            "link set box1 up",
            "address add 172.17.0.1/16 dev docker0",
            "link set docker0 up",
        ];
        batch(Some(network.hub()), &containers.map(String::from));
        Some(network)
    }

    fn connect(&self, host: &str, router: &str, subnets: [u32; 2], last: u32) {
        batch(Some(host), &["link set lo up".into()]);
        for (number, subnet) in subnets.into_iter().enumerate() {
            let lines = [
                format!("link add eth{number} type veth peer name port{subnet} netns {router}"),
                format!("address add 10.77.{subnet}.{last}/24 dev eth{number}"),
                format!("link set eth{number} up"),
            ];
            batch(Some(host), &lines);
            let lines = [
                format!("address add 10.77.{subnet}.254/24 dev port{subnet}"),
                format!("link set port{subnet} up"),
            ];
            batch(Some(router), &lines);
        }
        let [first, second] = subnets;
        let lines = [
            format!("route add default via 10.77.{first}.254 dev eth0"),
            format!("route add default via 10.77.{second}.254 dev eth1 table 101"),
            format!("rule add from 10.77.{second}.{last} lookup 101"),
        ];
        batch(Some(host), &lines);
    }

    /// The namespace of the hub's host.
    pub(crate) fn hub(&self) -> &str {
        &self.names[0]
    }

    /// The namespace of a worker's host.
    pub(crate) fn worker(&self, rank: usize) -> &str {
        &self.names[1 + rank]
    }

    /// Bytes that a worker's host has sent by each of its interfaces.
    pub(crate) fn sent_by(&self, rank: usize) -> [u64; 2] {
        ["eth0", "eth1"].map(|interface| {
            let path = format!("/sys/class/net/{interface}/statistics/tx_bytes");
            let text =
                call("ip", &["netns", "exec", self.worker(rank), "cat", &path], "").expect("it is there");
            text.trim().parse().expect("a number")
        })
    }

    /// Switches an interface of the hub's host `up` or `down`.
    pub(crate) fn switch_hub(&self, interface: &str, to: &str) {
        batch(Some(self.hub()), &[format!("link set {interface} {to}")]);
        if to == "up" && interface == "eth1" {
            // Which went with it.
            batch(Some(self.hub()), &["route add default via 10.77.9.254 dev eth1 table 101".into()]);
        }
        if to == "up" && interface == "eth0" {
            batch(Some(self.hub()), &["route add default via 10.77.8.254 dev eth0".into()]);
        }
    }

    /// Takes the cable out at the router's end.
    pub(crate) fn unplug_worker(&self, rank: usize, interface: &str) {
        self.switch_port_of_worker(rank, interface, "down");
    }

    /// Switches the router's end of a worker's cable `up` or `down`.
    pub(crate) fn switch_port_of_worker(&self, rank: usize, interface: &str, to: &str) {
        let number = if interface == "eth0" { 0 } else { 1 };
        batch(Some(&self.names[3]), &[format!("link set port{} {to}", 2 * rank + number)]);
    }

    /// Does something with the hub host's network, on a thread that is there.
    pub(crate) fn within_hub<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let namespace = std::fs::File::open(format!("/run/netns/{}", self.hub())).expect("it was added");
        std::thread::scope(|scope| {
            let there = scope.spawn(|| {
                use std::os::fd::AsFd;
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                    .expect("root may");
                work()
            });
            there.join().expect("its own assertions hold")
        })
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // Their processes have ended: tests hold them in variables that are dropped before this one.
        for name in &self.names {
            let _ = call("ip", &["netns", "delete", name], "");
        }
    }
}

/// What a test that was killed has left behind.
fn remove_stale() {
    let listed = call("ip", &["netns", "list"], "").unwrap_or_default();
    for name in listed.lines().filter_map(|line| line.split_whitespace().next()) {
        let process = name.strip_prefix("paramhub-").and_then(|rest| rest.split('-').next());
        let is_stale = process.and_then(|id| id.parse::<u32>().ok()).is_some_and(|id| {
            id != std::process::id() && !std::path::Path::new(&format!("/proc/{id}")).exists()
        });
        if is_stale {
            let _ = call("ip", &["netns", "delete", name], "");
        }
    }
}

/// Commands of `ip`, one a line, inside a namespace if one is named.
#[track_caller]
fn batch(namespace: Option<&str>, lines: &[String]) {
    let inside: Vec<&str> = namespace.map_or(vec![], |namespace| vec!["-n", namespace]);
    let done = call("ip", &[&inside[..], &["-batch", "-"]].concat(), &lines.join("\n"));
    done.unwrap_or_else(|error| panic!("{error} (of: {})", lines.join("; ")));
}

fn call(program: &str, arguments: &[&str], input: &str) -> Result<String, String> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cannot start {program}: {error}"))?;
    let written = child.stdin.take().expect("it is piped").write_all(input.as_bytes());
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    match output.status.success() && (written.is_ok() || input.is_empty()) {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}
