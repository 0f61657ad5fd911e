//! A router with a hub's host and two workers' hosts around it, each with two interfaces in subnets of their own, made of network
//! namespaces:
//!
//! ```text
//! worker 0: eth0 10.77.0.1 ─┐            ┌─ 10.77.8.100 eth0
//!           eth1 10.77.1.1 ─┤            │                    hub, and a bridge docker0
//! worker 1: eth0 10.77.2.1 ─┼── router ──┴─ 10.77.9.100 eth1
//!           eth1 10.77.3.1 ─┘
//! ```
//! Routes go by the first interface. Packets with the second interface's address leave by that one, as on
//! hosts with several rails. The router isolates one end from the other end's loss of carrier, as a switch
//! does.

use super::namespace::Namespace;

/// Hosts with a worker.
pub const WORKERS: usize = 2;

pub struct Rails {
    hub: Namespace,
    workers: [Namespace; WORKERS],
    router: Namespace,
}

impl Rails {
    /// `None`, after a line that says why, if namespaces are not permitted.
    pub fn lay() -> Option<Rails> {
        let router = Namespace::first()?;
        router.ip(&["link set lo up"]);
        router.run(&["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]);
        let rails = Rails {
            hub: Namespace::another(),
            workers: [(); WORKERS].map(|()| Namespace::another()),
            router,
        };
        let [first, second] = &rails.workers;
        for (host, subnets, last) in [(&rails.hub, [8, 9], 100), (first, [0, 1], 1), (second, [2, 3], 1)] {
            rails.connect(host, subnets, last);
        }
        rails.hub.ip(&[
            "link add docker0 type bridge",
            "link add box0 type veth peer name box1",
            "link set box0 master docker0",
            "link set box0 up",
            "link set box1 up",
            "address add 172.17.0.1/16 dev docker0",
            "link set docker0 up",
        ]);
        Some(rails)
    }

    fn connect(&self, host: &Namespace, subnets: [u32; 2], last: u32) {
        host.ip(&["link set lo up"]);
        for (number, subnet) in subnets.into_iter().enumerate() {
            host.ip(&[
                format!("link add eth{number} type veth peer name port{subnet} netns {}", self.router.id()),
                format!("address add 10.77.{subnet}.{last}/24 dev eth{number}"),
                format!("link set eth{number} up"),
            ]);
            self.router.ip(&[
                format!("address add 10.77.{subnet}.254/24 dev port{subnet}"),
                format!("link set port{subnet} up"),
            ]);
        }
        let [first, second] = subnets;
        host.ip(&[
            format!("route add default via 10.77.{first}.254 dev eth0"),
            format!("route add default via 10.77.{second}.254 dev eth1 table 101"),
            format!("rule add from 10.77.{second}.{last} lookup 101"),
        ]);
    }

    /// The hub's host.
    pub fn hub(&self) -> &Namespace {
        &self.hub
    }

    /// A worker's host.
    pub fn worker(&self, rank: usize) -> &Namespace {
        &self.workers[rank]
    }

    /// Bytes that a worker's host has sent by each of its interfaces.
    pub fn sent_by(&self, rank: usize) -> [u64; 2] {
        ["eth0", "eth1"].map(|interface| self.workers[rank].sent_by(interface))
    }

    /// Switches an interface of the hub's host `up` or `down`.
    pub fn switch_hub(&self, interface: &str, to: &str) {
        self.hub.ip(&[format!("link set {interface} {to}")]);
        if to == "up" && interface == "eth1" {
            // The route was removed with the interface.
            self.hub.ip(&["route add default via 10.77.9.254 dev eth1 table 101"]);
        }
        if to == "up" && interface == "eth0" {
            self.hub.ip(&["route add default via 10.77.8.254 dev eth0"]);
        }
    }

    /// Takes the cable out at the router's end.
    pub fn unplug_worker(&self, rank: usize, interface: &str) {
        self.switch_port_of_worker(rank, interface, "down");
    }

    /// Switches the router's end of a worker's cable `up` or `down`.
    pub fn switch_port_of_worker(&self, rank: usize, interface: &str, to: &str) {
        let number = if interface == "eth0" { 0 } else { 1 };
        self.router.ip(&[format!("link set port{} {to}", 2 * rank + number)]);
    }
}
