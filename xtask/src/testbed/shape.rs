//! The parts of a testbed: hosts, switches and links, by name and address. Nothing here touches the system.

use std::fmt;
use std::net::Ipv4Addr;

use super::delay::Delay;
use super::rate::Rate;

pub(crate) const NAME_DEFAULT: &str = "phub";
/// All testbeds have the same addresses, since testbeds side by side cannot reach each other.
pub(crate) const PREFIX_BITS: u8 = 16;
const RACKS_MAX: usize = 16;
const WORKERS_MAX: usize = 64;
const INTERFACES_MAX: usize = 64;
/// The first number of hub interfaces in each rack: above those of all workers.
const FIRST_OF_HUB: usize = 101;
/// The most bytes that may be under way on a link, which are in memory.
const UNDER_WAY_MAX: u64 = 256 << 20;
/// The room for packets under way on a link, however slow the link and short the delay: for what leaves at once, and for
/// packets that are passed on late on a busy machine.
const UNDER_WAY_ROOM: u64 = 4 << 20;

/// A testbed as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// The beginning of every namespace's name.
    pub(crate) name: String,
    pub(crate) racks: usize,
    /// Workers in each rack.
    pub(crate) workers: usize,
    /// The rate of each host's links, each way.
    pub(crate) rate: Rate,
    /// Interfaces of each rack's hub host.
    pub(crate) hub_interfaces: usize,
    /// The rate between each rack and the core, each way.
    pub(crate) core_rate: Rate,
    /// The congestion control of TCP on all hosts; `None` is that of the system.
    pub(crate) congestion: Option<String>,
    /// The delay of every link, each way.
    pub(crate) delay: Option<Delay>,
}

/// A namespace with addresses.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Host {
    /// The name, such as r0w3 or r0hub.
    pub(crate) name: String,
    pub(crate) rack: usize,
    /// The addresses of eth0, eth1, and so on.
    pub(crate) addresses: Vec<Ipv4Addr>,
}

/// A pair of interfaces, each in a namespace. Both ends send at most at the rate.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Link {
    /// The namespace of a bridge, and its port.
    pub(crate) switch: (String, String),
    /// The namespace of a host or of another switch, and its interface.
    pub(crate) end: (String, String),
    pub(crate) rate: Rate,
    /// `true` if both ends are ports of bridges.
    pub(crate) is_trunk: bool,
}

impl Shape {
    /// A shape whose hubs have as many interfaces as a rack has workers, and whose core carries all that they
    /// send.
    pub(crate) fn new(name: &str, racks: usize, workers: usize, rate: Rate) -> Shape {
        let core_rate = Rate(rate.0 * workers as u64);
        Shape {
            name: name.to_owned(),
            racks,
            workers,
            rate,
            hub_interfaces: workers,
            core_rate,
            congestion: None,
            delay: None,
        }
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        check_name(&self.name)?;
        for (flag, number, most) in [
            ("--racks", self.racks, RACKS_MAX),
            ("--workers", self.workers, WORKERS_MAX),
            ("--hub-interfaces", self.hub_interfaces, INTERFACES_MAX),
        ] {
            if !(1..=most).contains(&number) {
                return Err(format!("{flag} {number}: it must be from 1 to {most}"));
            }
        }
        if let Some(delay) = self.delay {
            let rate = Rate(self.rate.0.max(self.core_rate.0));
            let bytes = (rate.bytes_per_second() * delay.as_duration().as_secs_f64()) as u64;
            if bytes > UNDER_WAY_MAX {
                let (needed, most) = (bytes >> 20, UNDER_WAY_MAX >> 20);
                return Err(format!(
                    "--delay {delay}: at {rate} a link would hold {needed} MB each way; it may hold {most}"
                ));
            }
        }
        match &self.congestion {
            // The name becomes part of a shell's line.
            Some(name) if name.is_empty() || name.bytes().any(|byte| !byte.is_ascii_alphanumeric()) => {
                Err(format!("--congestion {name}: give a name such as cubic"))
            }
            _ => Ok(()),
        }
    }

    /// The hosts, rack by rack, workers first.
    pub(crate) fn hosts(&self) -> Vec<Host> {
        let of_rack = |rack: usize| {
            let worker = move |worker| Host {
                name: format!("r{rack}w{worker}"),
                rack,
                addresses: vec![address(rack, 1 + worker)],
            };
            let addresses =
                (0..self.hub_interfaces).map(|number| address(rack, FIRST_OF_HUB + number)).collect();
            let hub = Host { name: format!("r{rack}hub"), rack, addresses };
            (0..self.workers).map(worker).chain([hub])
        };
        (0..self.racks).flat_map(of_rack).collect()
    }

    /// The namespaces of bridges: each rack's, and the core's if there is more than one rack.
    pub(crate) fn switches(&self) -> Vec<String> {
        let racks = (0..self.racks).map(|rack| self.namespace(&switch(rack)));
        racks.chain((self.racks > 1).then(|| self.namespace("core"))).collect()
    }

    /// The links of hosts, then those between racks and core.
    pub(crate) fn links(&self) -> Vec<Link> {
        let mut links = Vec::new();
        for host in self.hosts() {
            for number in 0..host.addresses.len() {
                let port = match host.addresses.len() {
                    1 => host.name.clone(),
                    _ => format!("{}.{number}", host.name),
                };
                links.push(Link {
                    switch: (self.namespace(&switch(host.rack)), port),
                    end: (self.namespace(&host.name), interface(number)),
                    rate: self.rate,
                    is_trunk: false,
                });
            }
        }
        if self.racks > 1 {
            links.extend((0..self.racks).map(|rack| Link {
                switch: (self.namespace("core"), format!("r{rack}")),
                end: (self.namespace(&switch(rack)), "core".to_owned()),
                rate: self.core_rate,
                is_trunk: true,
            }));
        }
        links
    }

    /// The namespace of the process that delays packets.
    pub(crate) fn relay(&self) -> String {
        self.namespace("relay")
    }

    /// The most bytes of memory for packets that are under way on a link, one way. The smallest packets need three times
    /// their own size.
    pub(crate) fn bytes_under_way_max(&self, delay: Delay) -> u64 {
        let rate = Rate(self.rate.0.max(self.core_rate.0));
        UNDER_WAY_ROOM + (4.0 * rate.bytes_per_second() * delay.as_duration().as_secs_f64()) as u64
    }

    pub(crate) fn namespace(&self, host: &str) -> String {
        format!("{}{host}", prefix(&self.name))
    }
}

/// The flags that ask for this shape.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { name, racks, workers, rate, hub_interfaces, core_rate, congestion, delay } = self;
        write!(f, "--name {name} --racks {racks} --workers {workers} --rate {rate} ")?;
        write!(f, "--hub-interfaces {hub_interfaces} --core-rate {core_rate}")?;
        congestion.iter().try_for_each(|name| write!(f, " --congestion {name}"))?;
        delay.iter().try_for_each(|delay| write!(f, " --delay {delay}"))
    }
}

/// Checks a name. Names hold no hyphen, so that none of one testbed's begins with another's prefix.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let is_plain = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    match (1..=16).contains(&name.len()) && is_plain {
        true => Ok(()),
        false => Err(format!("--name {name}: give up to 16 small letters and digits")),
    }
}

/// The beginning of the names of all namespaces of a testbed.
pub(crate) fn prefix(name: &str) -> String {
    format!("{name}-")
}

/// The name of a host's interface, the same on all hosts, as on machines of one kind.
pub(crate) fn interface(number: usize) -> String {
    format!("eth{number}")
}

fn switch(rack: usize) -> String {
    format!("r{rack}switch")
}

/// An address. All hosts are in one network, so that nothing has to be routed between racks.
fn address(rack: usize, number: usize) -> Ipv4Addr {
    let octet = |number: usize| u8::try_from(number).expect("numbers are checked");
    Ipv4Addr::new(10, 64, octet(rack), octet(number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn shape(racks: usize, workers: usize) -> Shape {
        Shape::new("bed", racks, workers, Rate(500_000_000))
    }

    #[test]
    fn every_host_has_links_of_its_own_and_every_address_is_one_host_s() {
        let shape = Shape { hub_interfaces: 2, ..shape(RACKS_MAX, WORKERS_MAX) };
        shape.check().unwrap();
        let (hosts, links) = (shape.hosts(), shape.links());
        assert_eq!(hosts.len(), RACKS_MAX * (WORKERS_MAX + 1));
        assert_eq!(links.len(), RACKS_MAX * (WORKERS_MAX + 2) + RACKS_MAX);
        let addresses: Vec<_> = hosts.iter().flat_map(|host| &host.addresses).collect();
        assert_eq!(addresses.iter().collect::<HashSet<_>>().len(), addresses.len());
        assert!(addresses.iter().all(|address| address.is_private()));
        let ends: Vec<_> = links.iter().flat_map(|link| [&link.switch, &link.end]).collect();
        assert_eq!(ends.iter().collect::<HashSet<_>>().len(), ends.len());
        // The kernel's limit without the final zero.
        assert!(ends.iter().all(|(_, interface)| interface.len() <= 15), "{ends:?}");
    }

    #[test]
    fn one_rack_needs_no_core() {
        assert_eq!(shape(1, 2).switches(), ["bed-r0switch"]);
        assert!(shape(1, 2).links().iter().all(|link| !link.is_trunk));
        assert_eq!(shape(2, 2).switches(), ["bed-r0switch", "bed-r1switch", "bed-core"]);
        assert_eq!(shape(2, 2).links().iter().filter(|link| link.is_trunk).count(), 2);
    }

    #[test]
    fn names_and_numbers_have_limits() {
        for name in ["", "a-b", "A", "a b", "../x", "elevenelevenelev"] {
            let wrong = Shape { name: name.into(), ..shape(1, 1) };
            assert_eq!(wrong.check().is_ok(), name == "elevenelevenelev", "{name}");
        }
        for (wrong, flag) in [
            (shape(0, 1), "--racks 0"),
            (shape(17, 1), "--racks 17"),
            (shape(1, 65), "--workers 65"),
            (Shape { hub_interfaces: 0, ..shape(1, 1) }, "--hub-interfaces 0"),
            (
                Shape { core_rate: Rate(5_000_000_000), delay: Delay::parse("500ms").ok(), ..shape(2, 1) },
                "--delay 500ms: at 5gbit",
            ),
        ] {
            let problem = wrong.check().expect_err(flag);
            assert!(problem.contains(flag), "{problem}");
        }
    }
}
