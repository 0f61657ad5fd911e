//! Hosts at one switch, each a network namespace with one interface.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use super::namespace::Namespace;
use super::{Program, example, paramhub};

/// The prefix of the hosts' addresses, 10.77.0.1 and so on. They exist in these namespaces only.
const SUBNET: &str = "10.77.0";

/// A switch, and the number of hosts at it.
pub struct Network {
    switch: Namespace,
    hosts: u32,
}

/// A host with one interface, eth0.
pub struct Host {
    namespace: Namespace,
    /// The address without a port.
    pub address: String,
}

impl Network {
    /// `None`, after a line that says why, if namespaces are not permitted.
    pub fn new() -> Option<Network> {
        let switch = Namespace::first()?;
        switch.ip(&["link add name rack type bridge", "link set rack up"]);
        Some(Network { switch, hosts: 0 })
    }

    pub fn host(&mut self) -> Host {
        self.hosts += 1;
        let number = self.hosts;
        let namespace = Namespace::another();
        self.switch.ip(&[
            format!("link add name port{number} type veth peer name eth0 netns {}", namespace.id()),
            format!("link set port{number} master rack up"),
        ]);
        let address = format!("{SUBNET}.{number}");
        namespace.ip(&[&format!("addr add {address}/24 dev eth0"), "link set eth0 up", "link set lo up"]);
        Host { namespace, address }
    }
}

/// Every byte that has passed the switch since [`Network::listen`].
pub struct Listener {
    quit: Arc<AtomicBool>,
    thread: JoinHandle<Vec<u8>>,
}

impl Network {
    /// Listens to all that passes the switch, as anybody could who has it.
    pub fn listen(&self) -> Listener {
        const EVERY_PROTOCOL: u16 = 3;
        let socket = self.switch.within(|| {
            let protocol = Protocol::from(i32::from(EVERY_PROTOCOL.to_be()));
            let socket = Socket::new(Domain::PACKET, Type::RAW, Some(protocol)).expect("root may");
            // It must not lose packets while this machine is busy.
            socket.set_recv_buffer_size(64 << 20).expect("a socket takes buffers");
            socket.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket takes times");
            socket
        });
        let quit = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let quit = quit.clone();
            move || record(socket, &quit)
        });
        Listener { quit, thread }
    }
}

/// The bytes of all packets, until it is asked to quit and no more come.
fn record(mut socket: Socket, quit: &AtomicBool) -> Vec<u8> {
    let (mut recorded, mut packet) = (Vec::new(), vec![0; 1 << 17]);
    loop {
        match socket.read(&mut packet) {
            Ok(bytes) => recorded.extend_from_slice(&packet[..bytes]),
            Err(_) if quit.load(Ordering::Relaxed) => return recorded,
            Err(_) => {}
        }
    }
}

impl Listener {
    /// What was heard.
    pub fn stop(self) -> Vec<u8> {
        self.quit.store(true, Ordering::Relaxed);
        self.thread.join().expect("it only reads")
    }
}

impl Host {
    /// The program of this project, on this host.
    pub fn paramhub<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Program {
        paramhub(arguments).inside(&self.namespace)
    }

    /// One of the examples, on this host.
    pub fn example<'a>(&self, name: &str, arguments: impl IntoIterator<Item = &'a str>) -> Program {
        example(name, arguments).inside(&self.namespace)
    }

    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The sockets that listen here, over TCP or for datagrams, as `IP:PORT`.
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

    /// The addresses that processes of this host have dialled: the other ends of connections at ports on
    /// which no process here listens.
    pub fn dialled(&self) -> Vec<String> {
        let listening = self.listening();
        let own = |(local, _): &(String, String)| !listening.contains(local);
        self.connected().into_iter().filter(own).map(|(_, remote)| remote).collect()
    }

    /// Takes the interface down.
    pub fn pull_the_cable(&self) {
        self.namespace.ip(&["link set eth0 down"]);
    }

    /// Limits the rate at which the host sends. False, after a line that says why, if that is not permitted.
    pub fn shape(&self, rate: &str) -> bool {
        let shape = format!("qdisc add dev eth0 root tbf rate {rate} burst 64k latency 100ms");
        let shaped = self.namespace.try_tool("tc", &[shape]);
        shaped.inspect_err(|why| println!("skipped: links cannot be shaped here: {why}")).is_ok()
    }

    fn connected(&self) -> Vec<(String, String)> {
        ["tcp", "tcp6"].map(|table| self.sockets(table, |state| state == 0x01)).concat()
    }

    /// Local and remote addresses of the sockets in a state, from the kernel's table for this namespace.
    fn sockets(&self, table: &str, wanted: impl Fn(u8) -> bool) -> Vec<(String, String)> {
        let socket = |line: &str| {
            let mut words = line.split_whitespace().skip(1);
            let [local, remote, state] = [words.next()?, words.next()?, words.next()?];
            wanted(u8::from_str_radix(state, 16).ok()?).then(|| (readable(local), readable(remote)))
        };
        self.namespace.table(table).lines().skip(1).filter_map(socket).collect()
    }
}

/// `0100007F:1E5A` is `127.0.0.1:7770`. IPv6 addresses stay as they are: no socket here has one.
fn readable(hexadecimal: &str) -> String {
    let parsed = hexadecimal.split_once(':').and_then(|(address, port)| {
        let address = u32::from_str_radix(address, 16).ok()?;
        Some((std::net::Ipv4Addr::from(address.to_ne_bytes()), u16::from_str_radix(port, 16).ok()?))
    });
    parsed.map_or_else(|| hexadecimal.to_owned(), |(address, port)| format!("{address}:{port}"))
}
