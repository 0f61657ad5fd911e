//! This host's network interfaces: which exist, which of them a peer on another host could use, and their
//! devices.
//!
//! Hubs use them to choose where to listen and what to advertise, workers to choose where their streams
//! leave. The rules are functions of what was found: only [`interfaces`], [`Sysfs`] and [`leaves_by`] query
//! the system.

mod choice;
mod rate;
mod route;
mod selector;
mod sysfs;
mod watch;

use std::io;
use std::net::IpAddr;

use nix::net::if_::InterfaceFlags;
use nix::sys::socket::SockaddrStorage;

pub use choice::{ChoiceError, ExcludedInterface, InterfaceChoice, UsableInterface, choose};
pub use rate::Rate;
pub use route::leaves_by;
pub use selector::{Pattern, Selector, Subnet};
pub use sysfs::Sysfs;
pub use watch::{DOWN_GRACE, InterfaceChange, InterfaceMonitor, LOOK_INTERVAL};

/// A network interface of this host, in the process's own network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The name that `ip link` shows.
    pub name: String,
    /// Whether an operator has switched it on.
    pub is_up: bool,
    /// Whether it has a carrier: a cable with a device at the other end.
    pub has_carrier: bool,
    /// Whether it never leaves this host.
    pub is_loopback: bool,
    /// Whether it is a tunnel or similar, which has one peer and no neighbours.
    pub is_point_to_point: bool,
    /// Its addresses and the subnets they are in, in the kernel's order.
    pub networks: Vec<Subnet>,
}

/// All interfaces in the kernel's order, including those without an address.
///
/// # Errors
/// The error of the operating system.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let mut found: Vec<Interface> = Vec::new();
    for entry in nix::ifaddrs::getifaddrs().map_err(io::Error::from)? {
        // An alias is listed as eth0:1, but it is an address of eth0.
        let name = entry.interface_name.split(':').next().unwrap_or_default();
        let index = match found.iter().position(|interface| interface.name == name) {
            Some(index) => index,
            None => {
                let has = |flag| entry.flags.contains(flag);
                found.push(Interface {
                    name: name.to_owned(),
                    is_up: has(InterfaceFlags::IFF_UP),
                    has_carrier: has(InterfaceFlags::IFF_RUNNING),
                    is_loopback: has(InterfaceFlags::IFF_LOOPBACK),
                    is_point_to_point: has(InterfaceFlags::IFF_POINTOPOINT),
                    networks: Vec::new(),
                });
                found.len() - 1
            }
        };
        if let Some(address) = entry.address.as_ref().and_then(ip_of) {
            let bits = entry.netmask.as_ref().and_then(ip_of).map_or(u32::MAX, leading_ones);
            found[index].networks.push(Subnet::new(address, bits));
        }
    }
    Ok(found)
}

fn ip_of(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
}

fn leading_ones(mask: IpAddr) -> u32 {
    match mask {
        IpAddr::V4(mask) => mask.to_bits().leading_ones(),
        IpAddr::V6(mask) => mask.to_bits().leading_ones(),
    }
}

impl Interface {
    /// Whether frames can leave and arrive.
    pub fn is_running(&self) -> bool {
        self.is_up && self.has_carrier
    }

    /// Whether this is one of its addresses; loopback has all of its block.
    pub fn has(&self, ip: IpAddr) -> bool {
        self.networks
            .iter()
            .any(|network| network.address() == ip || (self.is_loopback && network.contains(ip)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_found_with_its_addresses() {
        let found = interfaces().unwrap();
        let loopback = found.iter().find(|interface| interface.is_loopback).unwrap();
        assert!(loopback.has("127.0.0.1".parse().unwrap()) && loopback.has("127.0.0.2".parse().unwrap()));
        assert!(!loopback.has("10.0.0.1".parse().unwrap()));
        let mut names: Vec<&str> = found.iter().map(|interface| interface.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), found.len(), "one entry an interface");
    }
}
