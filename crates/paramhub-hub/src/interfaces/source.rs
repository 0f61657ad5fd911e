//! The addresses from which this hub dials other hubs: that of the link between hubs, if it has one. Otherwise each route's sums
//! leave by the interface at which its workers come.

use std::net::IpAddr;

use paramhub_transport::interface::{Interface, leaves_by};

use super::Listening;

/// An address of this hub, and the interface that has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SourceAddress {
    /// The address.
    pub(crate) ip: IpAddr,
    interface: String,
}

impl SourceAddress {
    /// For each position in the hub's shape, which lists an interface once for each of its `streams`, the address from which to
    /// dial; `None` leaves the choice to the kernel, as where there is only one.
    pub(crate) fn of_shape(listening: &[Listening], streams: usize) -> Vec<Option<SourceAddress>> {
        let source = |listening: &Listening| {
            let (ip, interface) = (listening.address.ip(), listening.name.clone());
            interface.filter(|_| !ip.is_unspecified()).map(|interface| SourceAddress { ip, interface })
        };
        let is_choice = listening.len() > 1;
        let sources = listening.iter().map(|listening| source(listening).filter(|_| is_choice));
        sources.flat_map(|source| std::iter::repeat_n(source, streams)).collect()
    }

    /// The address `ip`, which one of the host's interfaces has; `None` if none is known to have it.
    pub(crate) fn of(ip: IpAddr, found: &[Interface]) -> Option<SourceAddress> {
        let interface = found.iter().find(|interface| interface.has(ip))?;
        Some(SourceAddress { ip, interface: interface.name.clone() })
    }

    /// Whether packets from this address to another host leave by its interface. Where the system cannot say, the kernel chooses.
    pub(crate) fn leads_to(&self, there: IpAddr) -> bool {
        let leaves = || leaves_by(self.ip, there).is_ok_and(|by| by.as_deref() == Some(&self.interface));
        self.ip.is_ipv4() == there.is_ipv4() && leaves()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listening(address: &str, name: Option<&str>) -> Listening {
        let address = address.parse().unwrap();
        Listening { address, name: name.map(str::to_owned), rate: None, weight: 1, node: None }
    }

    #[test]
    fn each_position_of_the_shape_has_the_address_of_its_interface() {
        let both = [listening("10.0.0.1:7771", Some("eth0")), listening("10.0.1.1:7771", Some("eth1"))];
        let sources = SourceAddress::of_shape(&both, 2);
        let ips: Vec<String> = sources.iter().flatten().map(|source| source.ip.to_string()).collect();
        assert_eq!(ips, ["10.0.0.1", "10.0.0.1", "10.0.1.1", "10.0.1.1"]);
        assert_eq!(SourceAddress::of_shape(&both[..1], 3), [None, None, None], "there is no choice");
        let unknown = [listening("0.0.0.0:7771", Some("eth0")), listening("10.0.1.1:7771", None)];
        assert_eq!(SourceAddress::of_shape(&unknown, 1), [None, None]);
    }

    #[test]
    fn the_route_decides_whether_an_address_leads_there() {
        let loopback = SourceAddress { ip: "127.0.0.1".parse().unwrap(), interface: "lo".into() };
        assert!(loopback.leads_to("127.0.0.2".parse().unwrap()));
        assert!(!loopback.leads_to("::1".parse().unwrap()), "it is of the other family");
        let elsewhere = SourceAddress { interface: "eth7".into(), ..loopback };
        assert!(!elsewhere.leads_to("127.0.0.2".parse().unwrap()));
    }
}
