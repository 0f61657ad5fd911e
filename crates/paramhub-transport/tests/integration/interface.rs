//! These tests choose interfaces on a machine with two NUMA nodes, bridges and a bond: `sysfs/two-nodes`
//! has the relevant files of such a machine's `/sys`.

use std::net::IpAddr;
use std::path::Path;

use paramhub_transport::interface::{ChoiceError, Interface, InterfaceChoice, Rate, Subnet, Sysfs, choose};

fn sysfs() -> Sysfs {
    Sysfs::at(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sysfs/two-nodes"))
}

fn interface(name: &str, addresses: &[&str]) -> Interface {
    let network = |text: &&str| {
        let (address, bits) = text.split_once('/').unwrap();
        Subnet::new(address.parse().unwrap(), bits.parse().unwrap())
    };
    Interface {
        name: name.into(),
        is_up: true,
        has_carrier: true,
        is_loopback: name == "lo",
        is_point_to_point: name.starts_with("tun"),
        networks: addresses.iter().map(network).collect(),
    }
}

/// The interfaces of such a machine.
fn found() -> Vec<Interface> {
    vec![
        interface("lo", &["127.0.0.1/8", "::1/128"]),
        interface("eth0", &["10.0.0.7/24", "fe80::1/64"]),
        interface("eth1", &["169.254.3.4/16", "10.0.1.7/24", "fd00:1::7/64"]),
        Interface { has_carrier: false, ..interface("eth2", &["10.0.2.7/24"]) },
        interface("eth3", &["169.254.7.8/16", "fe80::3/64"]),
        interface("eth4", &[]),
        interface("br0", &["192.168.5.7/24"]),
        interface("docker0", &["172.17.0.1/16"]),
        interface("virbr0", &["192.168.122.1/24"]),
        interface("tun0", &["10.8.0.2/24"]),
        interface("eth10", &["10.0.10.7/24"]),
    ]
}

fn chosen(selector: &str) -> Result<InterfaceChoice, ChoiceError> {
    choose(&found(), &selector.parse().unwrap(), &sysfs())
}

fn names(selector: &str) -> Vec<String> {
    chosen(selector).unwrap().usable.into_iter().map(|usable| usable.name).collect()
}

#[test]
fn unasked_it_is_what_another_host_could_reach() {
    let choice = chosen("auto").unwrap();
    let names: Vec<&str> = choice.usable.iter().map(|usable| usable.name.as_str()).collect();
    assert_eq!(
        names,
        ["eth0", "eth1", "br0", "eth10"],
        "the bridge with a cable in it, not that of containers"
    );
    let why = |name: &str| choice.left_out.iter().find(|left| left.name == name).unwrap().why;
    for (name, part) in [
        ("lo", "loopback"),
        ("eth2", "no carrier"),
        ("eth3", "link-local"),
        ("docker0", "containers"),
        ("virbr0", "containers"),
        ("tun0", "tunnel"),
    ] {
        assert!(why(name).contains(part), "{name}: {}", why(name));
    }
    let worth_saying = choice.left_out.iter().filter(|left| left.is_worth_saying(&found())).count();
    assert_eq!(worth_saying, choice.left_out.len() - 1, "all but loopback");
}

#[test]
fn names_networks_and_exclusions_choose() {
    assert_eq!(names("eth0,eth1"), ["eth0", "eth1"]);
    assert_eq!(names("10.0.0.0/16"), ["eth0", "eth1", "eth10"]);
    assert_eq!(
        names("10.0.0.0/24,10.200.0.0/16"),
        ["eth0"],
        "a list for hosts of which each is in some network"
    );
    assert_eq!(names("^eth"), ["br0"]);
    assert_eq!(names("^docker,lo,192.168.0.0/16,eth1"), ["eth0", "eth10"]);
    assert_eq!(names("docker"), ["docker0"], "an interface that is named is taken");
    assert_eq!(names("eth3,tun0,lo"), ["lo", "eth3", "tun0"]);
}

#[test]
fn the_address_is_one_that_others_can_dial() {
    let addresses = |selector: &str| -> Vec<IpAddr> {
        chosen(selector).unwrap().usable[0].networks.iter().map(Subnet::address).collect()
    };
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    assert_eq!(addresses("eth0"), [ip("10.0.0.7")], "IPv6's link-local ones never");
    assert_eq!(
        addresses("eth1"),
        [ip("10.0.1.7"), ip("fd00:1::7"), ip("169.254.3.4")],
        "link-local ones last"
    );
    assert_eq!(addresses("^eth0"), [ip("10.0.1.7"), ip("fd00:1::7")]);
    assert_eq!(addresses("eth3"), [ip("169.254.7.8")]);
}

#[test]
fn a_selector_that_cannot_be_met_is_named() {
    for (selector, parts) in [
        ("eth0,eth5", &["`eth5` means no interface", "eth0 (10.0.0.7, fe80::1)", "docker0"][..]),
        ("eth0,eth2", &["`eth2` means eth2", "no carrier"]),
        ("eth4", &["`eth4` means no interface with an address"]),
        ("10.200.0.0/16,10.201.0.0/16", &["`10.200.0.0/16` means no interface with an address"]),
        ("fe80::/10", &["`fe80::/10` means eth0", "link-local"]),
        ("^eth,br", &["no interface leads to other hosts", "docker0: it is a bridge", "eth0: excluded"]),
    ] {
        let refused = chosen(selector).unwrap_err().to_string();
        assert!(parts.iter().all(|part| refused.contains(part)), "{selector}: {refused}");
    }
}

#[test]
fn speeds_nodes_and_processors_are_read_where_there_are_any() {
    let sysfs = sysfs();
    let known = |name| (sysfs.rate(name).map(Rate::mbit), sysfs.node(name));
    assert_eq!(known("eth0"), (Some(25_000), Some(0)));
    assert_eq!(known("eth2"), (Some(100_000), Some(1)));
    assert_eq!(known("eth3"), (None, None), "-1 is no speed and no node");
    assert_eq!(known("veth1"), (Some(10_000), None), "no device, so no node");
    assert_eq!(known("absent"), (None, None));
    assert_eq!(
        sysfs.nodes(),
        [(0, vec![0, 1, 2, 3, 8, 9, 10, 11]), (1, vec![4, 5, 6, 7, 12, 13, 14, 15]), (2, vec![])]
    );
    assert_eq!(Sysfs::at("/nonexistent").nodes(), []);
    assert!(!sysfs.is_private_bridge("br1"), "a bond in it leads outside");
    assert!(!sysfs.is_private_bridge("eth0"), "no bridge at all");
}
