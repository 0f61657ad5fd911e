//! Hosts that are network namespaces, joined by a bridge in one more.
//!
//! Each namespace lives as long as a process that does nothing but read a pipe of this test's. However the test ends, the
//! pipe closes, that process ends, and namespace, addresses and links are gone. Nothing is done to this machine's own network.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::io::{Error, ErrorKind};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{self, Program};

/// The hosts' addresses are 10.77.0.1 and so on: they exist in these namespaces only.
const SUBNET: &str = "10.77.0";

/// A switch, and how many hosts there are at it.
pub struct Network {
    switch: Namespace,
    hosts: u32,
}

/// A host with one interface.
pub struct Host {
    namespace: Namespace,
    pub address: String,
}

impl Network {
    /// Fails where namespaces or links cannot be made.
    pub fn new() -> Result<Network, Error> {
        let switch = Namespace::new()?;
        switch.ip("link add name rack type bridge")?;
        switch.ip("link set rack up")?;
        Ok(Network { switch, hosts: 0 })
    }

    pub fn host(&mut self) -> Host {
        self.hosts += 1;
        let number = self.hosts;
        let namespace = Namespace::new().expect("the first one could be made");
        let pid = namespace.holder.id();
        let wire = |command: String| self.switch.ip(&command).expect("the switch takes it");
        wire(format!("link add name port{number} type veth peer name eth0 netns {pid}"));
        wire(format!("link set port{number} master rack up"));
        let address = format!("{SUBNET}.{number}");
        for command in
            [format!("addr add {address}/24 dev eth0"), "link set eth0 up".into(), "link set lo up".into()]
        {
            namespace.ip(&command).expect("the host takes it");
        }
        Host { namespace, address }
    }
}

impl Host {
    /// The program of this project, on this host.
    pub fn paramhub<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Program {
        common::paramhub(arguments).within(&self.namespace.entry())
    }

    /// One of the examples, on this host.
    pub fn example<'a>(&self, name: &str, arguments: impl IntoIterator<Item = &'a str>) -> Program {
        common::example(name, arguments).within(&self.namespace.entry())
    }

    /// What listens here, over TCP or for datagrams, as `IP:PORT`.
    pub fn listening(&self) -> Vec<String> {
        let sockets = ["tcp", "tcp6", "udp", "udp6"]
            .map(|table| self.sockets(table, |state| matches!(state, 0x0A | 0x07)));
        sockets.concat().into_iter().map(|(local, _)| local).collect()
    }

    /// The addresses that have a connection to this port.
    pub fn peers(&self, port: u16) -> Vec<String> {
        let here = format!("{}:{port}", self.address);
        let connected = self.connected().into_iter().filter(|(local, _)| *local == here);
        connected.filter_map(|(_, remote)| Some(remote.rsplit_once(':')?.0.to_owned())).collect()
    }

    /// Whom processes of this host have dialled: the other ends of connections at ports that nobody listens on.
    pub fn dialled(&self) -> Vec<String> {
        let listening = self.listening();
        let own = |(local, _): &(String, String)| !listening.contains(local);
        self.connected().into_iter().filter(own).map(|(_, remote)| remote).collect()
    }

    /// Takes the interface down.
    pub fn pull_the_cable(&self) {
        self.namespace.ip("link set eth0 down").expect("the host takes it");
    }

    fn connected(&self) -> Vec<(String, String)> {
        ["tcp", "tcp6"].map(|table| self.sockets(table, |state| state == 0x01)).concat()
    }

    /// Local and remote address of the sockets in a state, from the kernel's own table of this namespace.
    fn sockets(&self, table: &str, wanted: impl Fn(u8) -> bool) -> Vec<(String, String)> {
        let path = format!("/proc/{}/net/{table}", self.namespace.holder.id());
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound && table.ends_with('6') => return Vec::new(),
            read => read.unwrap_or_else(|error| panic!("{path}: {error}")),
        };
        let socket = |line: &str| {
            let mut words = line.split_whitespace().skip(1);
            let [local, remote, state] = [words.next()?, words.next()?, words.next()?];
            wanted(u8::from_str_radix(state, 16).ok()?).then(|| (readable(local), readable(remote)))
        };
        text.lines().skip(1).filter_map(socket).collect()
    }
}

/// `0100007F:1E5A` is `127.0.0.1:7770`. What is no such address, of IPv6, stays as it is: nothing here has one.
fn readable(hexadecimal: &str) -> String {
    let parsed = hexadecimal.split_once(':').and_then(|(address, port)| {
        let address = u32::from_str_radix(address, 16).ok()?;
        Some((std::net::Ipv4Addr::from(address.to_ne_bytes()), u16::from_str_radix(port, 16).ok()?))
    });
    parsed.map_or_else(|| hexadecimal.to_owned(), |(address, port)| format!("{address}:{port}"))
}

/// A network namespace and the process that keeps it.
struct Namespace {
    holder: Child,
}

impl Namespace {
    fn new() -> Result<Namespace, Error> {
        let mut holder = Command::new("unshare")
            .args(["--net", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let own = std::fs::read_link("/proc/self/ns/net")?;
        let path = format!("/proc/{}/ns/net", holder.id());
        let deadline = Instant::now() + common::PATIENCE;
        loop {
            if let Some(exit) = holder.try_wait()? {
                return Err(Error::other(format!("`unshare --net` has failed: {exit}")));
            }
            match std::fs::read_link(&path) {
                Ok(entered) if entered != own => return Ok(Namespace { holder }),
                _ => assert!(Instant::now() < deadline, "`unshare --net` does nothing"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What starts a command in here.
    fn entry(&self) -> [String; 3] {
        ["nsenter".into(), format!("--net=/proc/{}/ns/net", self.holder.id()), "--".into()]
    }

    fn ip(&self, arguments: &str) -> Result<(), Error> {
        let [program, namespace, dashes] = self.entry();
        let ran =
            Command::new(program).args([&namespace, &dashes, "ip"]).args(arguments.split(' ')).output()?;
        if ran.status.success() {
            return Ok(());
        }
        Err(Error::other(format!("`ip {arguments}`: {}", String::from_utf8_lossy(&ran.stderr).trim())))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // It ends by itself when its pipe closes; this only waits for that.
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}
