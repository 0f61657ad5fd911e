//! Which interfaces a selector means, and why others are left out.

use std::net::IpAddr;

use thiserror::Error;

use super::selector::Pattern;
use super::{Interface, Network, Selector, Sysfs};

/// What a selector came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// To be used, in the order they were found.
    pub usable: Vec<Usable>,
    /// Not to be used, of those that have an address at all.
    pub left_out: Vec<LeftOut>,
}

/// An interface that was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usable {
    /// The interface's name.
    pub name: String,
    /// Those of its addresses that a peer on another host could dial, best first; at least one.
    pub networks: Vec<Network>,
}

/// An interface that was not chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// The interface's name.
    pub name: String,
    /// For people.
    pub why: &'static str,
}

/// Why a selector cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ChoiceError {
    /// Something was asked for that is not there.
    #[error("`{pattern}` means no interface with an address here: there are {present}")]
    NoSuch {
        /// As it was written.
        pattern: String,
        /// The interfaces there are, with their addresses.
        present: String,
    },
    /// Something was asked for that cannot be used.
    #[error("`{pattern}` means {name}, which cannot be used: {why}")]
    Unusable {
        /// As it was written.
        pattern: String,
        /// The interface.
        name: String,
        /// For people.
        why: &'static str,
    },
    /// Nothing was asked for by name, and nothing is fit.
    #[error("no interface leads to other hosts{why}")]
    Nothing {
        /// Which were left out, and why.
        why: String,
    },
}

const DOWN: &str = "it is down, or has no carrier";
const NOT_ASKED_FOR: &str = "not asked for";

/// Follows a selector over what was found.
///
/// # Errors
/// If a part of a list means nothing that can be used, or nothing at all can be.
pub fn choose(found: &[Interface], selector: &Selector, sysfs: &Sysfs) -> Result<Choice, ChoiceError> {
    let mut choice = Choice { usable: Vec::new(), left_out: Vec::new() };
    for interface in found.iter().filter(|interface| !interface.networks.is_empty()) {
        let judged = match selector {
            Selector::Auto => by_route(interface, &[], sysfs),
            Selector::Except(patterns) => by_route(interface, patterns, sysfs),
            Selector::Only(patterns) => as_asked(interface, patterns),
        };
        let name = interface.name.clone();
        match judged {
            Ok(networks) => choice.usable.push(Usable { name, networks }),
            Err(why) => choice.left_out.push(LeftOut { name, why }),
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

/// What a worker elsewhere could reach.
fn by_route(interface: &Interface, except: &[Pattern], sysfs: &Sysfs) -> Result<Vec<Network>, &'static str> {
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
    let routable = |network: &&Network| !is_link_local(network.address());
    let usable: Vec<Network> = interface.networks.iter().filter(routable).copied().collect();
    if usable.is_empty() {
        return Err("its addresses are link-local, which other links do not know");
    }
    let kept = |network: &Network| !except.iter().any(|p| p.matches(&interface.name, network.address()));
    let usable: Vec<Network> = usable.into_iter().filter(kept).collect();
    if usable.is_empty() { Err("excluded") } else { Ok(best_first(usable)) }
}

/// What somebody asked for by name or network, who knows best.
fn as_asked(interface: &Interface, patterns: &[Pattern]) -> Result<Vec<Network>, &'static str> {
    let asked = |network: &&Network| patterns.iter().any(|p| p.matches(&interface.name, network.address()));
    let asked: Vec<Network> = interface.networks.iter().filter(asked).copied().collect();
    if asked.is_empty() {
        return Err(NOT_ASKED_FOR);
    }
    if !interface.is_running() {
        return Err(DOWN);
    }
    // To dial such an address takes the name of the dialler's own interface, which no hub can advertise.
    let diallable = |network: &Network| !(network.address().is_ipv6() && is_link_local(network.address()));
    let usable: Vec<Network> = asked.into_iter().filter(diallable).collect();
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

/// What routes reach before what only the link knows; else as the kernel has them, the primary address first.
fn best_first(mut networks: Vec<Network>) -> Vec<Network> {
    networks.sort_by_key(|network| is_link_local(network.address()));
    networks
}

/// Whether a part of a list came to something.
fn check(pattern: &Pattern, found: &[Interface], choice: &Choice) -> Result<(), ChoiceError> {
    let matches =
        |name: &str, networks: &[Network]| networks.iter().any(|n| pattern.matches(name, n.address()));
    if choice.usable.iter().any(|usable| matches(&usable.name, &usable.networks)) {
        return Ok(());
    }
    let meant = found.iter().find(|interface| matches(&interface.name, &interface.networks));
    let unusable = meant.and_then(|meant| choice.left_out.iter().find(|left| left.name == meant.name));
    Err(match unusable {
        Some(LeftOut { name, why }) => {
            ChoiceError::Unusable { pattern: pattern.to_string(), name: name.clone(), why }
        }
        // One list of networks serves hosts of which each is in some.
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

fn reasons(choice: &Choice) -> String {
    let reasons: Vec<String> =
        choice.left_out.iter().map(|left| format!("{}: {}", left.name, left.why)).collect();
    if reasons.is_empty() { String::new() } else { format!(" ({})", reasons.join("; ")) }
}

impl LeftOut {
    /// Whether a person would wonder: nobody expects loopback, or what they did not ask for.
    pub fn is_worth_saying(&self, found: &[Interface]) -> bool {
        let is_loopback = found.iter().any(|interface| interface.is_loopback && interface.name == self.name);
        !is_loopback && self.why != NOT_ASKED_FOR
    }
}
