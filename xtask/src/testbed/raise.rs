//! Builds a testbed and takes it down.

use std::net::Ipv4Addr;

use super::Problem;
use super::relay;
use super::shape::{Host, Link, PREFIX_BITS, Shape, interface, prefix};
use super::system::{batch, call, namespaces, remove};

/// The bytes that may leave at once: a packet of 64 KB as the stack hands it to a virtual interface, with the
/// headers of all its frames. With a smaller bucket the kernel would cut every packet into frames, at several
/// times the processor time.
const BURST_BYTES_MIN: u64 = 72 << 10;
const BURST_SECONDS: f64 = 0.001;
/// The usual queue of a port of a rack's switch: some packets of 64 KB from each of many hosts that send to
/// one.
const QUEUE_BYTES: u64 = 2 << 20;
/// The time that a packet may wait for its turn, at least and at most: the queue of a fast link is longer,
/// that of a slow one shorter.
const QUEUE_SECONDS: (f64, f64) = (0.02, 0.1);
/// Each interface of a host with several has a routing table, numbered from here.
const TABLE_FIRST: usize = 100;

/// Creates one namespace with all that a testbed needs, and removes it. That separates what is not permitted
/// from what fails.
pub(super) fn try_out(shape: &Shape) -> Result<(), Problem> {
    let namespace = shape.namespace("try");
    let forbidden = |what: &'static str| {
        move |reason: String| Problem::NotPermitted(format!("{what} cannot be created here: {reason}"))
    };
    call("ip", &["netns", "add", &namespace], "").map_err(forbidden("network namespaces"))?;
    let inside = || {
        let ip =
            |what, line: &str| call("ip", &["-n", &namespace, "-batch", "-"], line).map_err(forbidden(what));
        ip("veth interfaces", "link add name left type veth peer name right")?;
        if shape.delay.is_some() {
            ip("macvtap interfaces", "link add link left name tap type macvtap mode passthru")?;
        }
        ip("bridges", "link add name br0 type bridge")?;
        ip("routing rules", "rule add from 10.64.0.1 lookup 100")?;
        let tc = ["-n", &namespace, "qdisc", "add", "dev", "left", "root", "tbf", "rate", "1mbit"];
        let tc = [&tc[..], &["burst", "128kb", "limit", "1mb"]].concat();
        call("tc", &tc, "").map_err(forbidden("tbf queues"))
    };
    let tried = inside();
    remove(&[namespace])?;
    tried.map(drop)
}

pub(super) fn build(shape: &Shape) -> Result<(), Problem> {
    let (hosts, links, switches) = (shape.hosts(), shape.links(), shape.switches());
    let of_hosts = hosts.iter().map(|host| shape.namespace(&host.name));
    let relay = shape.delay.is_some().then(|| shape.relay());
    let all: Vec<String> = switches.iter().cloned().chain(of_hosts).chain(relay.clone()).collect();
    let lines: Vec<String> = all.iter().map(|name| format!("netns add {name}")).collect();
    call("ip", &["-batch", "-"], &lines.join("\n")).map_err(Problem::Failed)?;
    for namespace in &all {
        configure(namespace, shape.congestion.as_deref())?;
    }
    for switch in &switches {
        batch(
            "ip",
            switch,
            &["link add name br0 type bridge stp_state 0 mcast_snooping 0".into(), up("br0")],
        )?;
    }
    for switch in &switches {
        let here = || links.iter().enumerate().filter(|(_, link)| link.switch.0 == *switch);
        let plugged = here().flat_map(|(number, link)| plug(link, number, relay.as_deref()));
        batch("ip", switch, &plugged.collect::<Vec<_>>())?;
        let shaped: Vec<String> = here().map(|(_, link)| limit(&link.switch.1, link)).collect();
        batch("tc", switch, &shaped)?;
    }
    for link in links.iter().filter(|link| link.is_trunk) {
        let (namespace, port) = &link.end;
        batch("ip", namespace, &[format!("link set dev {port} master br0"), up(port)])?;
        batch("tc", namespace, &[limit(port, link)])?;
    }
    for host in &hosts {
        let namespace = shape.namespace(&host.name);
        batch("ip", &namespace, &address(host))?;
        let own = links.iter().filter(|link| link.end.0 == namespace);
        batch("tc", &namespace, &own.map(|link| limit(&link.end.1, link)).collect::<Vec<_>>())?;
    }
    shape.delay.map_or(Ok(()), |delay| relay::start(shape, delay))
}

/// Takes a testbed down, whole or in parts. Returns how many namespaces there were.
pub(super) fn take_down(name: &str) -> Result<usize, Problem> {
    let found = namespaces(&prefix(name))?;
    if !found.is_empty() {
        remove(&found)?;
    }
    Ok(found.len())
}

/// Configures a namespace. A host with several interfaces in one network answers for each address on its own
/// interface alone. IPv6 is off: the packets that it sends by itself would be counted with the bytes of an
/// exchange.
fn configure(namespace: &str, congestion: Option<&str>) -> Result<(), Problem> {
    let script = "cd /proc/sys/net && \
        for kind in all default; do \
            echo 1 > ipv4/conf/$kind/arp_ignore && echo 2 > ipv4/conf/$kind/arp_announce && \
            echo 0 > ipv4/conf/$kind/rp_filter && \
            { [ ! -e ipv6/conf/$kind ] || echo 1 > ipv6/conf/$kind/disable_ipv6; } || exit 1; \
        done";
    call("ip", &["netns", "exec", namespace, "sh", "-c", script], "").map_err(Problem::Failed)?;
    let Some(name) = congestion else { return Ok(()) };
    let script = format!("echo {name} > /proc/sys/net/ipv4/tcp_congestion_control");
    let chosen = call("ip", &["netns", "exec", namespace, "sh", "-c", &script], "");
    chosen.map(drop).map_err(|error| {
        Problem::Failed(format!(
            "--congestion {name}: {error}; namespaces may use what `sysctl net.ipv4.tcp_allowed_congestion_control` lists"
        ))
    })
}

/// Lays a link and plugs it into its switch. A link with a delay is two pairs of interfaces, between which the relay passes
/// packets on.
fn plug(link: &Link, number: usize, relay: Option<&str>) -> Vec<String> {
    let (port, (namespace, end)) = (&link.switch.1, &link.end);
    let mut lines = match relay {
        None => vec![format!("link add name {port} type veth peer name {end} netns {namespace}")],
        Some(relay) => {
            let [to_switch, to_end] = relay::cut_ends(number);
            vec![
                format!("link add name {port} type veth peer name {to_switch} netns {relay}"),
                format!("link add name {to_end} netns {relay} type veth peer name {end} netns {namespace}"),
            ]
        }
    };
    lines.extend([format!("link set dev {port} master br0"), up(port)]);
    lines
}

fn up(interface: &str) -> String {
    format!("link set dev {interface} up")
}

fn address(host: &Host) -> Vec<String> {
    let mut lines = vec![up("lo")];
    for (number, address) in host.addresses.iter().enumerate() {
        let interface = interface(number);
        lines.push(format!("address add {address}/{PREFIX_BITS} dev {interface}"));
        lines.push(up(&interface));
        if host.addresses.len() > 1 {
            lines.extend(route_by_source(number, *address));
        }
    }
    lines
}

/// Routes by the source address. Otherwise all packets would leave through the first of several interfaces in
/// one network.
fn route_by_source(number: usize, address: Ipv4Addr) -> [String; 2] {
    let (interface, table) = (interface(number), TABLE_FIRST + number);
    let [a, b, ..] = address.octets();
    [
        format!("rule add from {address} lookup {table}"),
        format!("route add {a}.{b}.0.0/{PREFIX_BITS} dev {interface} src {address} table {table}"),
    ]
}

fn limit(interface: &str, link: &Link) -> String {
    let rate = link.rate;
    let bytes = |seconds| (rate.bytes_per_second() * seconds) as u64;
    let burst = bytes(BURST_SECONDS).max(BURST_BYTES_MIN);
    let queue = QUEUE_BYTES.clamp(bytes(QUEUE_SECONDS.0), bytes(QUEUE_SECONDS.1)).max(2 * burst);
    format!("qdisc add dev {interface} root tbf rate {rate} burst {burst} limit {queue}")
}
