//! Chooses the interface of this host that each stream leaves by, and watches those interfaces.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Weak;
use std::time::Instant;

use paramhub_core::wire::Failure;
use paramhub_transport::interface::{
    Interface, InterfaceMonitor, LOOK_INTERVAL, Selector, Subnet, Sysfs, UsableInterface, choose, interfaces,
    leaves_by,
};

use crate::command::JobCommand;
use crate::error::WorkerError;
use crate::job::Shared;
use crate::resume::{StreamEvent, StreamEventSender};

/// The interfaces that streams may leave by.
pub(crate) struct Interfaces {
    found: Vec<Interface>,
    usable: Vec<UsableInterface>,
    selector: Selector,
}

impl Interfaces {
    /// The interfaces of this host that `selector` selects.
    ///
    /// # Errors
    /// A message for people that names what was asked for and does not exist.
    pub(crate) fn learn(selector: &Selector) -> Result<Self, String> {
        let found = match interfaces() {
            Ok(found) => found,
            // Without a selector the kernel can choose, and the worker need not know the interfaces.
            Err(_) if *selector == Selector::Auto => Vec::new(),
            Err(error) => return Err(format!("this host's interfaces cannot be listed: {error}")),
        };
        let usable = match choose(&found, selector, &Sysfs::default()) {
            Ok(choice) => choice.usable,
            // A host without a network has only hubs of its own.
            Err(_) if *selector == Selector::Auto => Vec::new(),
            Err(error) => return Err(error.to_string()),
        };
        Ok(Interfaces { found, usable, selector: selector.clone() })
    }

    /// The interfaces of this host that `selector` selects and that work now; none where they cannot be
    /// listed.
    pub(crate) fn learn_running(selector: &Selector) -> Self {
        let mut found = interfaces().unwrap_or_default();
        found.retain(Interface::is_running);
        let usable = choose(&found, selector, &Sysfs::default()).map_or(Vec::new(), |choice| choice.usable);
        Interfaces { found, usable, selector: selector.clone() }
    }

    /// Every address from which to dial a hub; `None` among them means that the kernel chooses.
    pub(crate) fn sources(&self, hub: SocketAddr) -> Vec<Option<IpAddr>> {
        if self.found.iter().any(|interface| interface.has(hub.ip())) {
            return vec![None];
        }
        let sources = sources(&self.usable, hub.ip(), leads_to(hub.ip()));
        match sources.is_empty() && self.selector == Selector::Auto && !self.usable.is_empty() {
            true => vec![None],
            false => sources.into_iter().map(Some).collect(),
        }
    }

    /// All addresses that streams may leave from, each with its interface.
    pub(crate) fn usable(&self) -> impl Iterator<Item = (String, IpAddr)> + '_ {
        let addresses = |usable: &UsableInterface| {
            let name = usable.name.clone();
            usable.networks.iter().map(|network| (name.clone(), network.address())).collect::<Vec<_>>()
        };
        self.usable.iter().flat_map(addresses)
    }

    /// The address from which to dial the interface at `position` of a hub; `None` leaves the choice to the
    /// kernel, also where there is only one.
    ///
    /// # Errors
    /// A message for people: none of the selected interfaces leads to the hub.
    pub(crate) fn source(&self, hub: SocketAddr, position: usize) -> Result<Option<IpAddr>, String> {
        if self.found.iter().any(|interface| interface.has(hub.ip())) {
            // The hub has an address of this host: the stream leaves through no interface.
            return Ok(None);
        }
        if self.selector == Selector::Auto && self.usable.len() < 2 {
            return Ok(None);
        }
        let sources = sources(&self.usable, hub.ip(), leads_to(hub.ip()));
        match (&self.selector, sources.len()) {
            (Selector::Auto, 0 | 1) => Ok(None),
            (selector, 0) => Err(format!(
                "none of this worker's interfaces that `{selector}` means leads there: `ip route get {} from ADDRESS` says \
                 where the kernel would send it",
                hub.ip()
            )),
            (_, count) => Ok(Some(sources[position % count])),
        }
    }

    /// The interface that has an address, unless it is loopback, which never goes down.
    pub(crate) fn name_of(&self, ip: IpAddr) -> Option<&str> {
        let interface = self.found.iter().find(|interface| interface.has(ip))?;
        (!interface.is_loopback).then_some(interface.name.as_str())
    }
}

fn leads_to(hub: IpAddr) -> impl Fn(&IpAddr, &str) -> bool {
    // Where the system cannot name the interface that a route leaves by, the kernel chooses.
    move |from, name| leaves_by(*from, hub).is_ok_and(|leaves_by| leaves_by.as_deref() == Some(name))
}

/// The addresses from which to dial a hub, one of each interface: of the interfaces in the hub's own subnet
/// if there are any, else of those whose route leads there. The route decides in the subnet, too: of two
/// interfaces there the kernel uses only one, whatever the source, unless routing rules say otherwise.
fn sources(
    usable: &[UsableInterface],
    hub: IpAddr,
    leads_there: impl Fn(&IpAddr, &str) -> bool,
) -> Vec<IpAddr> {
    let is_same_subnet = |network: &&Subnet| network.contains(hub);
    let is_any = |network: &&Subnet| network.address().is_ipv4() == hub.is_ipv4();
    let among = |fits: &dyn Fn(&&Subnet) -> bool| -> Vec<IpAddr> {
        let first = |usable: &UsableInterface| {
            let mut fitting = usable.networks.iter().filter(|network| fits(network)).map(Subnet::address);
            fitting.find(|address| leads_there(address, &usable.name))
        };
        usable.iter().filter_map(first).collect()
    };
    let near = among(&is_same_subnet);
    if near.is_empty() { among(&is_any) } else { near }
}

/// Watches the interfaces of these addresses until the job is over, on a thread of its own, which starts only
/// if streams leave this host. An interface that goes down ends the job or, in a job that goes on, becomes a
/// stream event.
pub(crate) fn watch(
    shared: Weak<Shared>,
    used: BTreeSet<(String, IpAddr)>,
    event_sender: Option<StreamEventSender>,
) -> std::io::Result<()> {
    if used.is_empty() {
        return Ok(());
    }
    std::thread::Builder::new()
        .name("paramhub-watch".into())
        .spawn(move || watch_until_over(&shared, used, event_sender.as_ref()))
        .map(drop)
}

fn watch_until_over(
    shared: &Weak<Shared>,
    used: BTreeSet<(String, IpAddr)>,
    event_sender: Option<&StreamEventSender>,
) {
    let addresses: Vec<IpAddr> = used.iter().map(|&(_, address)| address).collect();
    let mut watch = InterfaceMonitor::new(used);
    loop {
        std::thread::sleep(LOOK_INTERVAL);
        // Held for a moment only, so that this thread does not keep the memory of a finished job alive.
        let Some(shared) = shared.upgrade() else { return };
        if shared.inbox.closed().is_some() {
            return;
        }
        // The list may fail for a moment; the next round asks again.
        let Ok(found) = interfaces() else { continue };
        let changes = watch.look(&found, Instant::now());
        if let Some(event_sender) = event_sender {
            let down = changes.into_iter().filter_map(|change| Some((change.position, change.down?)));
            for (position, what) in down {
                event_sender.send(StreamEvent::InterfaceDown { address: addresses[position], what });
            }
            continue;
        }
        if let Some(down) = changes.into_iter().find_map(|change| change.down) {
            let announced = Failure { rank: Some(shared.who.rank), message: format!("its {down}") };
            let error = WorkerError::InterfaceDown { who: shared.who.clone(), what: down.into() };
            // The inbox refuses this only if the job is over.
            let _ = shared.inbox.put(JobCommand::GiveUp { error, announced });
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usable(name: &str, networks: &[(&str, u32)]) -> UsableInterface {
        let networks = networks.iter().map(|&(ip, bits)| Subnet::new(ip.parse().unwrap(), bits)).collect();
        UsableInterface { name: name.into(), networks }
    }

    #[test]
    fn the_subnet_comes_first_and_the_route_decides() {
        let own = [
            usable("eth0", &[("10.0.0.1", 24), ("fd00::1", 64)]),
            usable("eth1", &[("10.0.1.1", 24)]),
            usable("eth2", &[("10.0.1.2", 24)]),
        ];
        let ask = |hub: &str, routed: &[&str]| -> Vec<String> {
            let leads = |_: &IpAddr, name: &str| routed.contains(&name);
            sources(&own, hub.parse().unwrap(), leads).iter().map(ToString::to_string).collect()
        };
        let all = ["eth0", "eth1", "eth2"];
        assert_eq!(ask("10.0.0.9", &all), ["10.0.0.1"], "the subnet's own interface and no other");
        assert_eq!(ask("10.0.1.9", &all), ["10.0.1.1", "10.0.1.2"]);
        assert_eq!(
            ask("10.0.1.9", &["eth0", "eth1"]),
            ["10.0.1.1"],
            "without rules the kernel uses the first"
        );
        assert_eq!(ask("192.168.7.9", &all), ["10.0.0.1", "10.0.1.1", "10.0.1.2"], "rails by routes");
        assert_eq!(ask("192.168.7.9", &["eth1"]), ["10.0.1.1"]);
        assert_eq!(ask("192.168.7.9", &[]), [""; 0]);
        assert_eq!(ask("fd00::9", &all), ["fd00::1"], "of the hub's family");
    }
}
