//! Detects interfaces that have gone down.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::Interface;

/// How often to look, with two system calls each time, on a thread of the control plane.
pub const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// How long an interface may be down before it counts: a cable that is plugged in again, or a link that is
/// negotiated again, must cause a pause but not end a job. With the time of a look and of the report this
/// stays below five seconds.
pub const DOWN_GRACE: Duration = Duration::from_secs(2);

/// Watches some addresses of this host. It asks the system nothing: its owner looks, and passes in what was
/// found and when.
#[derive(Debug)]
pub struct InterfaceMonitor {
    watched: Vec<MonitoredInterface>,
}

#[derive(Debug)]
struct MonitoredInterface {
    name: String,
    address: IpAddr,
    down_since: Option<Instant>,
    is_told: bool,
}

/// An address that went down, or is up again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceChange {
    /// Its position among the watched addresses.
    pub position: usize,
    /// Why it went down, for people: the interface, the address and what happened. `None` if it is up again.
    pub down: Option<String>,
}

impl InterfaceMonitor {
    /// Watches each of these interfaces for its address.
    pub fn new(watched: impl IntoIterator<Item = (String, IpAddr)>) -> Self {
        let watched = watched.into_iter().map(|(name, address)| MonitoredInterface {
            name,
            address,
            down_since: None,
            is_told: false,
        });
        InterfaceMonitor { watched: watched.collect() }
    }

    /// Compares with what was found at `now`, and returns the changes: what has been down for [`DOWN_GRACE`],
    /// and what is up again after that was reported.
    pub fn look(&mut self, found: &[Interface], now: Instant) -> Vec<InterfaceChange> {
        let mut changes = Vec::new();
        for (position, watched) in self.watched.iter_mut().enumerate() {
            match trouble(watched, found) {
                None => {
                    watched.down_since = None;
                    if std::mem::take(&mut watched.is_told) {
                        changes.push(InterfaceChange { position, down: None });
                    }
                }
                Some(trouble) => {
                    let since = *watched.down_since.get_or_insert(now);
                    if !watched.is_told && now.saturating_duration_since(since) >= DOWN_GRACE {
                        watched.is_told = true;
                        let down = format!("interface {} ({}) {trouble}", watched.name, watched.address);
                        changes.push(InterfaceChange { position, down: Some(down) });
                    }
                }
            }
        }
        changes
    }
}

fn trouble(watched: &MonitoredInterface, found: &[Interface]) -> Option<&'static str> {
    match found.iter().find(|interface| interface.name == watched.name) {
        None => Some("is gone"),
        Some(interface) if !interface.is_up => Some("is down: it was switched off"),
        Some(interface) if !interface.has_carrier => Some("is down: it has lost its carrier"),
        Some(interface) if !interface.has(watched.address) => Some("has lost its address"),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::Subnet;
    use super::*;

    fn interface(name: &str, address: &str) -> Interface {
        Interface {
            name: name.into(),
            is_up: true,
            has_carrier: true,
            is_loopback: false,
            is_point_to_point: false,
            networks: vec![Subnet::new(address.parse().unwrap(), 24)],
        }
    }

    #[test]
    fn what_stays_down_is_told_once_and_what_comes_back_too() {
        let all = [interface("eth0", "10.0.0.7"), interface("eth1", "10.0.1.7")];
        let mut watch = InterfaceMonitor::new(all.iter().map(|i| (i.name.clone(), i.networks[0].address())));
        let start = Instant::now();
        let at = |looks: u32| start + LOOK_INTERVAL * looks;
        let off = Interface { is_up: false, ..all[1].clone() };
        let cut = Interface { has_carrier: false, ..all[1].clone() };
        let moved = interface("eth1", "10.0.9.7");
        let mut looks = 0;
        for (second, part) in [
            (Some(off), "eth1 (10.0.1.7) is down: it was switched off"),
            (Some(cut), "eth1 (10.0.1.7) is down: it has lost its carrier"),
            (Some(moved), "eth1 (10.0.1.7) has lost its address"),
            (None, "eth1 (10.0.1.7) is gone"),
        ] {
            let found: Vec<Interface> = std::iter::once(all[0].clone()).chain(second).collect();
            for _ in 0..4 {
                assert_eq!(watch.look(&found, at(looks)), [], "a moment without is no news");
                looks += 1;
            }
            let told = watch.look(&found, at(looks));
            assert!(told[0].position == 1 && told[0].down.as_ref().unwrap().contains(part), "{told:?}");
            assert_eq!(watch.look(&found, at(looks + 1)), [], "told once");
            assert_eq!(watch.look(&all, at(looks + 2)), [InterfaceChange { position: 1, down: None }]);
            assert_eq!(watch.look(&all, at(looks + 3)), []);
            looks += 4;
        }
    }

    #[test]
    fn an_interface_that_comes_back_in_time_was_never_down() {
        let up = [interface("eth0", "10.0.0.7")];
        let down = [Interface { has_carrier: false, ..up[0].clone() }];
        let mut watch = InterfaceMonitor::new([("eth0".to_owned(), "10.0.0.7".parse().unwrap())]);
        let start = Instant::now();
        for look in 0..40 {
            let found = if look % 4 == 3 { &up } else { &down };
            assert_eq!(watch.look(found, start + LOOK_INTERVAL * look), []);
        }
    }
}
