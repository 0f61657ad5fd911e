//! The addresses on which a hub listens. This file makes addresses that workers can dial out of the
//! configured ones, and finds the interface, the rate and the share of the load of each.

use std::net::SocketAddr;

use paramhub_core::combinations::{self, Feature, Features};
use paramhub_transport::interface::{ExcludedInterface, Interface, Rate, Selector, Subnet, Sysfs, choose};

use crate::config::{HubConfig, HubError};

/// The rate in Mbit/s that stands for an unknown one if no other rate is known either. Hubs of one job are
/// weighed against each other, so this must be a plausible rate and not an arbitrary number.
const UNKNOWN_MBIT: u32 = 10_000;

/// An address on which the hub listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listening {
    pub(crate) address: SocketAddr,
    /// The name of the interface that has the address; `None` if none has it, as with an unspecified address,
    /// which stands for all.
    pub(crate) name: Option<String>,
    /// The rate of the interface in one direction.
    pub(crate) rate: Option<Rate>,
    /// The share of the load that this address takes: the rate of its interface in Mbit/s, divided by the
    /// number of addresses at which the hub listens on that interface. In place of an unknown rate stands the
    /// slowest known one, or else [`UNKNOWN_MBIT`].
    pub(crate) weight: u32,
    /// The NUMA node of the interface's device; `None` if the interface has no device or the machine one
    /// node.
    pub(crate) node: Option<u32>,
}

/// Returns the addresses to listen on, and the interfaces that were left out. The addresses of the chosen
/// interfaces replace an unspecified address, unless the configuration says what to advertise for it.
pub(crate) fn addresses_of(
    config: &HubConfig,
    found: &[Interface],
    sysfs: &Sysfs,
) -> Result<(Vec<SocketAddr>, Vec<ExcludedInterface>), HubError> {
    let has_wildcard = config.listen.iter().any(|address| address.ip().is_unspecified());
    if !config.advertise.is_empty() || !has_wildcard {
        let requested = Features::of([
            (Feature::FixedAddresses, true),
            (Feature::HubInterfaces, config.interfaces != Selector::Auto),
        ]);
        combinations::check(requested).map_err(|conflict| HubError::Config(conflict.to_string()))?;
        return Ok((config.listen.clone(), Vec::new()));
    }
    let choice = choose(found, &config.interfaces, sysfs).map_err(|error| {
        HubError::Config(format!(
            "{error}. Give --interfaces NAME, or with --listen an address that workers can dial"
        ))
    })?;
    let mut left_out = choice.left_out;
    let mut addresses = Vec::new();
    for &listen in &config.listen {
        if !listen.ip().is_unspecified() {
            addresses.push(listen);
            continue;
        }
        for usable in &choice.usable {
            let of_family = |network: &&Subnet| network.address().is_ipv4() == listen.is_ipv4();
            match usable.networks.iter().find(of_family) {
                Some(network) => addresses.push(SocketAddr::new(network.address(), listen.port())),
                None if listen.is_ipv4() => left_out.push(ExcludedInterface {
                    name: usable.name.clone(),
                    why: "it has no address of IPv4; listen on [::] for those of IPv6",
                }),
                None => left_out
                    .push(ExcludedInterface { name: usable.name.clone(), why: "it has no address of IPv6" }),
            }
        }
    }
    match addresses.is_empty() {
        true => Err(HubError::Config(format!(
            "none of the interfaces has an address of the family of {}: listen on 0.0.0.0 or [::] accordingly",
            config.listen[0]
        ))),
        false => Ok((addresses, left_out)),
    }
}

impl Listening {
    /// The name of the address in messages.
    pub(crate) fn called(&self) -> String {
        match &self.name {
            Some(name) => format!("{name} ({})", self.address),
            None => self.address.to_string(),
        }
    }

    /// Finds the interface, the rate and the NUMA node of each address, and then the weights of all.
    pub(crate) fn all(
        addresses: &[SocketAddr],
        config: &HubConfig,
        found: &[Interface],
        sysfs: &Sysfs,
    ) -> Result<Vec<Listening>, HubError> {
        let mut all: Vec<Listening> = addresses
            .iter()
            .map(|&address| {
                let interface = found.iter().find(|interface| interface.has(address.ip()));
                let name = interface.map(|interface| interface.name.clone());
                let configured =
                    config.interface_rates.iter().find(|(given, _)| Some(given) == name.as_ref());
                let from_driver = name.as_deref().and_then(|name| sysfs.rate(name));
                let node = name.as_deref().and_then(|name| sysfs.node(name));
                Listening {
                    address,
                    name,
                    rate: configured.map(|&(_, rate)| rate).or(from_driver),
                    weight: 0,
                    node,
                }
            })
            .collect();
        if let Some((name, _)) = config
            .interface_rates
            .iter()
            .find(|(given, _)| all.iter().all(|listening| listening.name.as_ref() != Some(given)))
        {
            let mut listening_names: Vec<String> =
                all.iter().filter_map(|listening| listening.name.clone()).collect();
            listening_names.dedup();
            return Err(HubError::Config(format!(
                "a rate is given for `{name}`, on which this hub does not listen: it listens on {}",
                listening_names.join(", ")
            )));
        }
        let slowest = all.iter().filter_map(|listening| listening.rate).min();
        let mbit_if_unknown = slowest.map_or(UNKNOWN_MBIT, Rate::mbit);
        let names: Vec<Option<String>> = all.iter().map(|listening| listening.name.clone()).collect();
        for listening in &mut all {
            let addresses_of_interface =
                names.iter().filter(|name| **name == listening.name && name.is_some()).count();
            let mbit = listening.rate.map_or(mbit_if_unknown, Rate::mbit);
            listening.weight = (mbit / addresses_of_interface.max(1) as u32).max(1);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A machine with two nodes, as in the transport's tests.
    fn sysfs() -> Sysfs {
        Sysfs::at(Path::new(env!("CARGO_MANIFEST_DIR")).join("../paramhub-transport/tests/sysfs/two-nodes"))
    }

    fn found() -> Vec<Interface> {
        let interface = |name: &str, addresses: &[(&str, u32)]| Interface {
            name: name.into(),
            is_up: true,
            has_carrier: true,
            is_loopback: name == "lo",
            is_point_to_point: false,
            networks: addresses.iter().map(|&(ip, bits)| Subnet::new(ip.parse().unwrap(), bits)).collect(),
        };
        vec![
            interface("lo", &[("127.0.0.1", 8)]),
            interface("eth0", &[("10.0.0.7", 24), ("10.0.9.7", 24), ("fd00::7", 64)]),
            interface("eth1", &[("10.0.1.7", 24)]),
            interface("eth2", &[("10.0.2.7", 24)]),
            interface("docker0", &[("172.17.0.1", 16)]),
            interface("plain", &[("10.0.3.7", 24)]),
        ]
    }

    fn config(listen: &[&str], interfaces: &str) -> HubConfig {
        let listen = listen.iter().map(|address| address.parse().unwrap()).collect();
        HubConfig { listen, interfaces: interfaces.parse().unwrap(), ..HubConfig::default() }
    }

    fn addresses(listen: &[&str], interfaces: &str) -> Result<Vec<String>, String> {
        let config = config(listen, interfaces);
        let addresses = addresses_of(&config, &found(), &sysfs()).map_err(|error| error.to_string())?.0;
        Ok(addresses.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn the_unspecified_address_becomes_those_that_workers_can_dial() {
        let v4 = ["10.0.0.7:7771", "10.0.1.7:7771", "10.0.2.7:7771", "10.0.3.7:7771"];
        assert_eq!(addresses(&["0.0.0.0:7771"], "auto").unwrap(), v4);
        assert_eq!(addresses(&["0.0.0.0:1"], "eth0,10.0.2.0/24").unwrap(), ["10.0.0.7:1", "10.0.2.7:1"]);
        assert_eq!(addresses(&["[::]:1"], "auto").unwrap(), ["[fd00::7]:1"]);
        assert_eq!(addresses(&["127.0.0.1:1", "0.0.0.0:2"], "eth1").unwrap(), ["127.0.0.1:1", "10.0.1.7:2"]);
        assert_eq!(
            addresses(&["127.0.0.1:1"], "auto").unwrap(),
            ["127.0.0.1:1"],
            "nothing is chosen unasked"
        );
        let (_, left_out) = addresses_of(&config(&["0.0.0.0:1"], "auto"), &found(), &sysfs()).unwrap();
        let left_out: Vec<&str> = left_out.iter().map(|left| left.name.as_str()).collect();
        assert_eq!(left_out, ["lo", "docker0"]);
    }

    #[test]
    fn an_address_that_cannot_be_advertised_is_refused() {
        for (listen, interfaces, part) in [
            (&["127.0.0.1:1"][..], "eth0", "listen on one of these"),
            (&["[::]:1"], "eth1", "no address of IPv6"),
            (&["0.0.0.0:1"], "eth7", "`eth7` means no interface"),
            (&["0.0.0.0:1"], "^eth,plain", "no interface leads to other hosts"),
        ] {
            let refused = addresses(listen, interfaces).map(|found| found.join(", "));
            match refused {
                Err(refused) => assert!(refused.contains(part) || refused.contains("family"), "{refused}"),
                Ok(found) => panic!("{listen:?} {interfaces}: {found}"),
            }
        }
    }

    #[test]
    fn an_advertised_wildcard_stays_one_listener() {
        let config = HubConfig { advertise: vec!["hub:1".into()], ..config(&["0.0.0.0:1"], "auto") };
        assert_eq!(addresses_of(&config, &found(), &sysfs()).unwrap().0, ["0.0.0.0:1".parse().unwrap()]);
    }

    #[test]
    fn interfaces_weigh_what_they_carry() {
        let weights = |listen: &[&str], rates: &[(&str, &str)]| {
            let rates = rates.iter().map(|&(name, rate)| (name.to_owned(), rate.parse().unwrap())).collect();
            let config = HubConfig { interface_rates: rates, ..config(listen, "auto") };
            let (found, sysfs) = (found(), sysfs());
            let addresses = addresses_of(&config, &found, &sysfs).unwrap().0;
            let all = Listening::all(&addresses, &config, &found, &sysfs)?;
            Ok(all.iter().map(|listening| (listening.weight, listening.node)).collect())
        };
        let fine = |listen: &[&str], rates: &[(&str, &str)]| -> Vec<(u32, Option<u32>)> {
            weights(listen, rates).map_err(|error: HubError| error.to_string()).unwrap()
        };
        let known = [(25_000, Some(0)), (25_000, Some(1)), (100_000, Some(1))];
        assert_eq!(fine(&["0.0.0.0:1"], &[])[..3], known);
        assert_eq!(fine(&["0.0.0.0:1"], &[])[3], (25_000, None), "unknown counts as the slowest known");
        assert_eq!(
            fine(&["0.0.0.0:1"], &[("plain", "40gbit"), ("eth2", "50gbit")])[2..],
            [(50_000, Some(1)), (40_000, None)]
        );
        assert_eq!(fine(&["10.0.0.7:1", "10.0.9.7:1"], &[]), [(12_500, Some(0)); 2], "one card, twice");
        assert_eq!(fine(&["127.0.0.1:1", "127.0.0.2:1"], &[])[0].0, fine(&["10.0.3.7:1"], &[])[0].0 / 2);
        let refused = weights(&["10.0.0.7:1"], &[("eth9", "1gbit")]).unwrap_err().to_string();
        assert!(refused.contains("`eth9`") && refused.contains("it listens on eth0"), "{refused}");
    }
}
