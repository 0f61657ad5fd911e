//! Opens a job's streams to the sites above and to standbys, and opens those again that were cut: dials their hubs as workers
//! do, and passes each stream to the core whose sums it carries.

use std::collections::{HashMap, HashSet};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::auth::{Incarnation, Namespace};
use paramhub_core::composition::{Composed, SiteId};
use paramhub_core::placement::{HubShape, RouteId};
use paramhub_core::ports::{Ports, Side};
use paramhub_core::resuming::{AfterRound, Attempts, HANDSHAKE};
use paramhub_core::standbys::{Share, route_at};
use paramhub_core::stream_admission::StreamSecrets;
use paramhub_core::wire::{Attempt, CHALLENGE_BYTES, Caller, Capabilities, Hello};
use paramhub_transport::dialling::{DialError, dial_first, dial_from};
use paramhub_transport::greeting::greet;
use tracing::warn;

use crate::core::{AcceptedStream, Carrier, CoreCommand, CoreHandle};
use crate::interfaces::SourceAddress;

/// How long a hub may take to answer over the link between hubs before its interface is dialled.
const LINK_TIMEOUT: Duration = Duration::from_secs(2);

/// One stream to open.
#[derive(Clone, Debug)]
pub(crate) struct ParentStream {
    route: RouteId,
    port: u32,
    site: SiteId,
    /// The address of the hub's interface there, as `host:port`.
    address: String,
    /// The address of that hub on the link that hubs have for themselves, if it has one.
    between_hubs: Option<String>,
    interface: u16,
    core: u16,
    /// The position of the hub there in the job, if it is the standby of the route.
    standby: Option<u16>,
}

impl ParentStream {
    /// The streams for the ports of a hub's routes.
    pub(crate) fn of<'a>(
        routes: impl Iterator<Item = (RouteId, &'a Ports)>,
        composed: &Composed,
        (shares, later_hubs): (&[Share], &[HubShape]),
    ) -> Vec<ParentStream> {
        let mut above = Vec::new();
        for (route, ports) in routes {
            for (port, there) in ports.to_sites().filter(|(_, there)| there.side.takes_sums()) {
                let at = composed.placements[usize::from(there.site)].routes()[usize::from(there.route)];
                let hubs = &composed.composition.sites[usize::from(there.site)].hubs;
                let own = &hubs[usize::from(at.hub)];
                let standby = shares.get(usize::from(at.hub)).and_then(|share| share.standby);
                let (hub, (interface, core), standby) = match (there.side, standby) {
                    (Side::Standby, Some(standby)) => {
                        let hub = hubs.iter().chain(later_hubs).nth(usize::from(standby));
                        let hub = hub.expect("a standby is one of the job's hubs");
                        (hub, route_at(&at, own, hub), Some(standby))
                    }
                    // It is lost.
                    (Side::Standby, None) => continue,
                    _ => (own, (at.interface, at.core), None),
                };
                above.push(ParentStream {
                    route,
                    port,
                    site: there.site,
                    address: hub.interfaces[usize::from(interface)].address.clone(),
                    between_hubs: hub.between_hubs.clone(),
                    interface,
                    core,
                    standby,
                });
            }
        }
        above
    }

    /// The route.
    pub(crate) fn route(&self) -> RouteId {
        self.route
    }

    /// The position of the hub there in the job, if it is a standby.
    pub(crate) fn standby(&self) -> Option<u16> {
        self.standby
    }

    /// Returns whether this is the stream of a port of a route.
    pub(crate) fn is_at(&self, route: RouteId, port: u32) -> bool {
        (self.route, self.port) == (route, port)
    }
}

/// How a stream leads to a hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Over the link that hubs have for themselves.
    Link,
    /// By the interface that workers dial.
    Interface,
}

/// The data that opens them.
pub(crate) struct ParentDialler {
    pub(crate) namespace: Namespace,
    pub(crate) secrets: StreamSecrets,
    pub(crate) site: SiteId,
    pub(crate) composed: Arc<Composed>,
    pub(crate) state_slots: u8,
    /// Whether they are encrypted.
    pub(crate) encrypts: bool,
    /// The deadline for all of them together.
    pub(crate) deadline: Instant,
    /// The core of each of this hub's routes.
    pub(crate) cores: HashMap<RouteId, CoreHandle>,
    /// The address of this hub from which the streams of a route leave, unless the kernel chooses.
    pub(crate) sources: HashMap<RouteId, SourceAddress>,
    /// The address of this hub on the link that hubs have for themselves, if it has one.
    pub(crate) between_hubs: Option<SourceAddress>,
}

impl ParentDialler {
    /// Opens all streams, or returns the route of one that cannot be opened, and why not.
    pub(crate) fn dial_all(&self, above: &[ParentStream]) -> Result<(), (RouteId, String)> {
        let mut without_link = HashSet::new();
        for above in above {
            let tries_link = !without_link.contains(&above.between_hubs);
            let opened = self.open(above, 0, tries_link, [self.deadline; 2]).map_err(|reason| {
                let name = match above.standby {
                    Some(_) => "the standby of some chunks".to_owned(),
                    None => self.composed.composition.name(above.site),
                };
                let why =
                    format!("{name} cannot be reached at {} to bring sums there: {reason}", above.address);
                (above.route, why)
            });
            let (stream, way) = opened?;
            if way == Way::Interface {
                without_link.insert(&above.between_hubs);
            }
            self.pass_on(above, stream, 0);
        }
        Ok(())
    }

    /// Opens a stream again that was cut, with this number and, if that fails, the next ones. It gives up at the deadline.
    pub(crate) fn dial_again(&self, above: &ParentStream, first_attempt: u32) {
        let begun = Instant::now();
        let attempts = Attempts::new(begun, self.deadline.saturating_duration_since(begun));
        for attempt in first_attempt.. {
            let (now, connecting) = (Instant::now(), attempts.connect_timeout());
            // A handshake whose answer is lost must not take all the time that there is.
            let by = [connecting, connecting + HANDSHAKE].map(|patience| attempts.by(now, patience));
            // The link between hubs may connect, and still lose what is sent.
            let tries_link = (attempt - first_attempt).is_multiple_of(2);
            if let Ok((stream, _)) = self.open(above, attempt, tries_link, by) {
                return self.pass_on(above, stream, attempt);
            }
            match attempts.after_round(Instant::now(), false, false) {
                AfterRound::Again(pause) => std::thread::sleep(pause),
                AfterRound::GiveUp => return,
            }
        }
    }

    fn pass_on(&self, above: &ParentStream, stream: AcceptedStream, attempt: u32) {
        self.cores[&above.route].send(CoreCommand::Adopt {
            namespace: self.namespace,
            route: above.route,
            port: above.port,
            stream,
            epoch: self.secrets.epoch.number,
            attempt,
            resumed_by: (attempt > 0).then_some(above.interface),
            standby: above.standby,
        });
    }

    fn open(
        &self,
        above: &ParentStream,
        attempt: u32,
        tries_link: bool,
        [connected_by, greeted_by]: [Instant; 2],
    ) -> Result<(AcceptedStream, Way), String> {
        let (mut socket, way) = self.connect(above, tries_link, connected_by)?;
        let hello = Hello {
            caller: Caller::Hub { site: self.site, route: above.route },
            interface: above.interface,
            core: above.core,
            standby_route: above.standby.map(|_| above.route),
            offered: Capabilities::default(),
            required: Capabilities::default(),
            attempt: Attempt::Numbered { epoch: self.secrets.epoch.number, number: attempt },
            namespace: self.namespace,
            incarnation: above.standby.map_or(Incarnation::NONE, Incarnation::of_standby),
            placement: *self.composed.hash().as_bytes(),
            challenge: [0; CHALLENGE_BYTES],
        };
        let secret = self.secrets.epoch.secret.of_hubs();
        let (welcome, keys) = greet(&mut socket, &secret, hello, self.encrypts, greeted_by)
            .map_err(|error| error.to_string())?;
        let state_slots = welcome.state_slots;
        if state_slots != self.state_slots {
            return Err(format!(
                "its optimizer keeps {state_slots} values of state a parameter, this hub's {}: register the same one \
                 at all hubs",
                self.state_slots
            ));
        }
        Ok((AcceptedStream { socket: socket.into(), carrier: Carrier::Tcp(keys) }, way))
    }

    /// Connects to a hub, over the link that hubs have for themselves if that is tried and leads there, and otherwise at its
    /// interface.
    fn connect(
        &self,
        above: &ParentStream,
        tries_link: bool,
        by: Instant,
    ) -> Result<(TcpStream, Way), String> {
        let own = self.sources.get(&above.route);
        if let Some(address) = above.between_hubs.as_ref().filter(|_| tries_link) {
            let now = Instant::now();
            let patience = (by.saturating_duration_since(now) / 2).min(LINK_TIMEOUT);
            match connect_from(&[self.between_hubs.as_ref(), own], address, now + patience) {
                Ok(socket) => return Ok((socket, Way::Link)),
                Err(error) => warn!(
                    "the hub at {} cannot be reached over the link between hubs, and its interface is taken: {error}",
                    above.address
                ),
            }
        }
        let socket = connect_from(&[own], &above.address, by).map_err(|error| error.to_string())?;
        Ok((socket, Way::Interface))
    }
}

/// Connects from the first of these addresses that leads there, or from the one that the kernel chooses.
fn connect_from(
    sources: &[Option<&SourceAddress>],
    address: &str,
    by: Instant,
) -> Result<TcpStream, DialError> {
    dial_first(address, by, |address, timeout| {
        let from = sources.iter().flatten().find(|source| source.leads_to(address.ip()));
        dial_from(from.map(|source| source.ip), address, timeout)
    })
}
