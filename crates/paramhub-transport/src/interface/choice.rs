//! The interfaces that a selector selects, and why others are left out.

use std::net::IpAddr;

use thiserror::Error;

use super::selector::Pattern;
use super::{Interface, Selector, Subnet, Sysfs};

/// The result of a selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceChoice {
    /// The interfaces to use, in the order in which they were found.
    pub usable: Vec<UsableInterface>,
    /// The interfaces not to use, among those that have an address.
    pub left_out: Vec<ExcludedInterface>,
}

/// An interface that was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsableInterface {
    /// The interface's name.
    pub name: String,
    /// Those of its addresses that a peer on another host could dial, best first; at least one.
    pub networks: Vec<Subnet>,
}

/// An interface that was not chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExcludedInterface {
    /// The interface's name.
    pub name: String,
    /// The reason, for people.
    pub why: &'static str,
}

/// Why a selector cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ChoiceError {
    /// A pattern of the list that matches no interface.
    #[error("`{pattern}` means no interface with an address here: there are {present}")]
    NoSuch {
        /// The pattern as written.
        pattern: String,
        /// The existing interfaces, with their addresses.
        present: String,
    },
    /// A pattern of the list that matches only an unusable interface.
    #[error("`{pattern}` means {name}, which cannot be used: {why}")]
    Unusable {
        /// The pattern as written.
        pattern: String,
        /// The interface.
        name: String,
        /// The reason, for people.
        why: &'static str,
    },
    /// The selector has no pattern that must match, and no interface is usable.
    #[error("no interface leads to other hosts{why}")]
    Nothing {
        /// The interfaces that were left out, and why.
        why: String,
    },
}

const DOWN: &str = "it is down, or has no carrier";
const NOT_ASKED_FOR: &str = "not asked for";

/// Applies a selector to the interfaces that were found.
///
/// # Errors
/// If a pattern of a list matches nothing usable, or nothing at all is usable.
pub fn choose(
    found: &[Interface],
    selector: &Selector,
    sysfs: &Sysfs,
) -> Result<InterfaceChoice, ChoiceError> {
    let mut choice = InterfaceChoice { usable: Vec::new(), left_out: Vec::new() };
    for interface in found.iter().filter(|interface| !interface.networks.is_empty()) {
        let judged = match selector {
            Selector::Auto => by_route(interface, &[], sysfs),
            Selector::Except(patterns) => by_route(interface, patterns, sysfs),
            Selector::Only(patterns) => as_asked(interface, patterns),
        };
        let name = interface.name.clone();
        match judged {
            Ok(networks) => choice.usable.push(UsableInterface { name, networks }),
            Err(why) => choice.left_out.push(ExcludedInterface { name, why }),
        }
    }
    if let Selector::Only(patterns) = selector {
        patterns.iter().try_for_each(|pattern| check(pattern, found, &choice))?;
    }
    match choice.usable.is_empty() {
        true => Err(ChoiceError::Nothing { why: reasons(&choice) }),
        false => Ok(choice),
    }
}

/// The addresses of an interface that a worker on another host could reach.
fn by_route(interface: &Interface, except: &[Pattern], sysfs: &Sysfs) -> Result<Vec<Subnet>, &'static str> {
    if interface.is_loopback {
        return Err("loopback never leaves this host");
    }
    if except.iter().any(|pattern| pattern.matches_name(&interface.name)) {
        return Err("excluded");
    }
    if !interface.is_running() {
        return Err(DOWN);
    }
    if interface.is_point_to_point {
        return Err("it is a tunnel; name it if it is meant");
    }
    if sysfs.is_private_bridge(&interface.name) {
        return Err("it is a bridge of this host's own containers or virtual machines");
    }
    let routable = |network: &&Subnet| !is_link_local(network.address());
    let usable: Vec<Subnet> = interface.networks.iter().filter(routable).copied().collect();
    if usable.is_empty() {
        return Err("its addresses are link-local, which other links do not know");
    }
    let kept = |network: &Subnet| !except.iter().any(|p| p.matches(&interface.name, network.address()));
    let usable: Vec<Subnet> = usable.into_iter().filter(kept).collect();
    if usable.is_empty() { Err("excluded") } else { Ok(best_first(usable)) }
}

/// The addresses of an interface that the operator named by name or network; the operator knows best.
fn as_asked(interface: &Interface, patterns: &[Pattern]) -> Result<Vec<Subnet>, &'static str> {
    let asked = |network: &&Subnet| patterns.iter().any(|p| p.matches(&interface.name, network.address()));
    let asked: Vec<Subnet> = interface.networks.iter().filter(asked).copied().collect();
    if asked.is_empty() {
        return Err(NOT_ASKED_FOR);
    }
    if !interface.is_running() {
        return Err(DOWN);
    }
    // To dial such an address, the dialler must add the name of its own interface, which a hub cannot
    // advertise.
    let diallable = |network: &Subnet| !(network.address().is_ipv6() && is_link_local(network.address()));
    let usable: Vec<Subnet> = asked.into_iter().filter(diallable).collect();
    match usable.is_empty() {
        true => Err("its only address is a link-local one of IPv6, which no other host can dial"),
        false => Ok(best_first(usable)),
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// Addresses that routes reach before those that only the link knows; otherwise in the kernel's order, the
/// primary address first.
fn best_first(mut networks: Vec<Subnet>) -> Vec<Subnet> {
    networks.sort_by_key(|network| is_link_local(network.address()));
    networks
}

/// Whether a pattern of a list has matched something usable.
fn check(pattern: &Pattern, found: &[Interface], choice: &InterfaceChoice) -> Result<(), ChoiceError> {
    let matches =
        |name: &str, networks: &[Subnet]| networks.iter().any(|n| pattern.matches(name, n.address()));
    if choice.usable.iter().any(|usable| matches(&usable.name, &usable.networks)) {
        return Ok(());
    }
    let meant = found.iter().find(|interface| matches(&interface.name, &interface.networks));
    let unusable = meant.and_then(|meant| choice.left_out.iter().find(|left| left.name == meant.name));
    Err(match unusable {
        Some(ExcludedInterface { name, why }) => {
            ChoiceError::Unusable { pattern: pattern.to_string(), name: name.clone(), why }
        }
        // One list of networks serves many hosts, each of which is in some of them.
        None if matches!(pattern, Pattern::Network(_)) && !choice.usable.is_empty() => return Ok(()),
        None => ChoiceError::NoSuch { pattern: pattern.to_string(), present: present(found) },
    })
}

fn present(found: &[Interface]) -> String {
    let with_addresses = found.iter().filter_map(|interface| {
        let addresses: Vec<String> = interface.networks.iter().map(|n| n.address().to_string()).collect();
        (!addresses.is_empty()).then(|| format!("{} ({})", interface.name, addresses.join(", ")))
    });
    let present: Vec<String> = with_addresses.collect();
    if present.is_empty() { "none".into() } else { present.join(", ") }
}

fn reasons(choice: &InterfaceChoice) -> String {
    let reasons: Vec<String> =
        choice.left_out.iter().map(|left| format!("{}: {}", left.name, left.why)).collect();
    if reasons.is_empty() { String::new() } else { format!(" ({})", reasons.join("; ")) }
}

impl ExcludedInterface {
    /// Whether the exclusion would surprise a person: loopback, and interfaces that were not asked for, do
    /// not.
    pub fn is_worth_saying(&self, found: &[Interface]) -> bool {
        let is_loopback = found.iter().any(|interface| interface.is_loopback && interface.name == self.name);
        !is_loopback && self.why != NOT_ASKED_FOR
    }
}
