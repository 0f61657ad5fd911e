//! The streams that a hub opens to other hubs: those of the sites above, and of standbys. Each is opened once the
//! manager calls for it, and opened again when it is cut, as the product's `parent_dialler` does.

use std::time::{Duration, Instant};

use paramhub_core::auth::Incarnation;
use paramhub_core::composition::{Composed, SiteId};
use paramhub_core::job_control::Event;
use paramhub_core::placement::{HubShape, RouteId};
use paramhub_core::ports::{Ports, Side};
use paramhub_core::resuming::{AfterRound, Attempts, Cuts, HANDSHAKE};
use paramhub_core::standbys::{Share, route_at};
use paramhub_core::stream_admission::StreamPlace;
use paramhub_core::wire::{Attempt, CHALLENGE_BYTES, Caller, Capabilities, Hello};

use super::job::HubJob;
use super::{Hub, PASSING};
use crate::job::{NAMESPACE, hub_at};
use crate::message::Message;
use crate::network::{Arrival, Process, StreamId};
use crate::world::{Context, Wake};

/// A stream that the hub opens to another hub.
pub(super) struct Link {
    route: RouteId,
    port: u32,
    /// The other hub, its site and, of the route there, interface and core.
    to: Process,
    site: SiteId,
    interface: u16,
    core: u16,
    /// The position of the other hub in the job, if it is the route's standby.
    standby: Option<u16>,
    /// How often the stream was cut and opened again.
    cuts: Cuts,
    dialling: Option<Dialling>,
}

/// A stream that is being opened.
#[derive(Clone, Copy)]
struct Dialling {
    attempt: u32,
    /// `None` while a pause lasts.
    stream: Option<StreamId>,
    until: Instant,
    /// The number behind the last of the links that are opened one after the other.
    end: usize,
    /// Whether it leads to a hub that becomes a standby while the job runs.
    is_new_standby: bool,
    /// The attempts to open a stream again; `None` for the first stream.
    again: Option<Attempts>,
}

impl Link {
    /// The streams to sites above, or to the standby, for a route with these neighbours.
    pub(super) fn of(
        route: RouteId,
        neighbours: &Ports,
        composed: &Composed,
        (shares, later_hubs): (&[Share], &[HubShape]),
    ) -> Vec<Link> {
        let above = neighbours.to_sites().filter(|(_, there)| there.side.takes_sums());
        let link = above.filter_map(|(port, there)| {
            let place = composed.placements[usize::from(there.site)].routes()[usize::from(there.route)];
            let hubs = &composed.composition.sites[usize::from(there.site)].hubs;
            let own = &hubs[usize::from(place.hub)];
            let (hub, (interface, core), standby) = match there.side {
                Side::Standby => {
                    // It may be lost.
                    let standby = shares[usize::from(place.hub)].standby?;
                    let hub = hubs.iter().chain(later_hubs).nth(usize::from(standby));
                    let hub = hub.expect("a standby is one of the job's hubs");
                    (hub, route_at(&place, own, hub), Some(standby))
                }
                _ => (own, (place.interface, place.core), None),
            };
            Some(Link {
                route,
                port,
                to: Process::Hub(hub_at(hub)),
                site: there.site,
                interface,
                core,
                standby,
                cuts: Cuts::default(),
                dialling: None,
            })
        });
        link.collect()
    }
}

impl HubJob {
    /// Whether all streams that the hub opens have been opened once.
    pub(super) fn is_linked(&self) -> bool {
        let is_open = |link: &Link| self.routes[&link.route].ports[link.port as usize].newest.is_some();
        self.links.iter().all(is_open)
    }

    fn hello(&self, link: &Link, attempt: u32) -> Hello {
        Hello {
            caller: Caller::Hub { site: self.site, route: link.route },
            interface: link.interface,
            core: link.core,
            standby_route: link.standby.map(|_| link.route),
            offered: Capabilities::default(),
            required: Capabilities::default(),
            attempt: Attempt::Numbered { epoch: self.epoch, number: attempt },
            namespace: NAMESPACE,
            incarnation: link.standby.map_or(Incarnation::NONE, Incarnation::of_standby),
            placement: *self.composed.hash().as_bytes(),
            challenge: [0; CHALLENGE_BYTES],
        }
    }
}

impl Hub {
    /// The manager calls for the streams to other hubs. They are opened one after the other until a time.
    pub(super) fn link(&mut self, until: Duration, context: &mut Context<'_>) {
        let until = context.begun + until;
        let end = self.job.as_ref().map_or(0, |job| job.links.len());
        let first = Dialling { attempt: 0, stream: None, until, end, is_new_standby: false, again: None };
        self.open_link(0, first, context);
    }

    /// Opens the streams of these routes to their new standbys, one after the other until a time.
    pub(super) fn link_standbys(&mut self, routes: &[RouteId], until: Duration, context: &mut Context<'_>) {
        let until = context.begun + until;
        let Some(job) = &mut self.job else { return };
        let index = job.links.len();
        for route in routes {
            let noted = (&job.shares[..], &job.later_hubs[..]);
            let links = Link::of(*route, &job.routes[route].neighbours, &job.composed, noted);
            job.links.extend(links);
        }
        let end = job.links.len();
        let first = Dialling { attempt: 0, stream: None, until, end, is_new_standby: true, again: None };
        self.open_link(index, first, context);
    }

    fn open_link(&mut self, index: usize, first: Dialling, context: &mut Context<'_>) {
        if index < first.end {
            self.dial(index, Dialling { stream: None, ..first }, context);
        }
    }

    /// The stream of a port to another hub was cut: the hub opens another in its place, for as long as it waits for that.
    pub(super) fn dial_again(
        &mut self,
        route: RouteId,
        port: u32,
        grace: Duration,
        context: &mut Context<'_>,
    ) {
        let now = context.instant();
        let Some(job) = &mut self.job else { return };
        let attempt = job.port(route, port).newest.map_or(0, |(_, attempt)| attempt) + 1;
        // The last of several leads to the present standby.
        let found = job.links.iter().rposition(|link| (link.route, link.port) == (route, port));
        let Some(index) = found else { return };
        let cuts = &mut job.links[index].cuts;
        if cuts.may_retry(now, grace) {
            cuts.reopened(now);
            let (again, until) = (Some(Attempts::new(now, grace)), now + grace);
            let dialling = Dialling { attempt, stream: None, until, end: 0, is_new_standby: false, again };
            self.dial(index, dialling, context);
        }
    }

    fn dial(&mut self, index: usize, dialling: Dialling, context: &mut Context<'_>) {
        let now = context.instant();
        let (process, allocation) = (self.process, self.allocations);
        let Some(job) = &mut self.job else { return };
        let (to, hello) = (job.links[index].to, job.hello(&job.links[index], dialling.attempt));
        let stream = context.network.open(process, to);
        context.trace(|| format!("{process:?} dials {stream:?} to {to:?} as attempt {}", dialling.attempt));
        context.send(stream, process, Message::Hello(Box::new(hello)));
        job.links[index].dialling = Some(Dialling { stream: Some(stream), ..dialling });
        let by = dialling
            .again
            .map_or(dialling.until, |attempts| attempts.by(now, attempts.connect_timeout() + HANDSHAKE));
        let patience = by.saturating_duration_since(now);
        context.wake_in(process, patience, Wake::LinkTimeout { allocation, link: index, stream });
    }

    /// The stream that is being opened for a link, with the link's number.
    fn dialled(&self, stream: StreamId) -> Option<(usize, Dialling)> {
        let mut links = self.job.iter().flat_map(|job| job.links.iter().enumerate());
        links.find_map(|(index, link)| {
            let dialling = link.dialling.filter(|dialling| dialling.stream == Some(stream))?;
            Some((index, dialling))
        })
    }

    /// Another hub answers the Hello of a stream. Returns what has arrived if the stream is not one that is being opened.
    pub(super) fn link_arrived(
        &mut self,
        stream: StreamId,
        arrival: Arrival,
        context: &mut Context<'_>,
    ) -> Option<Arrival> {
        let Some((index, dialling)) = self.dialled(stream) else { return Some(arrival) };
        match arrival {
            Arrival::Message(Message::Welcome) => self.link_opened(index, stream, dialling, context),
            Arrival::Message(Message::Refused(_, why)) => self.dialled_in_vain(index, &why, context),
            Arrival::Message(other) => {
                context.ledger.violate(|| format!("{:?} is greeted with {other:?}", self.process));
            }
            Arrival::Closed | Arrival::Broken | Arrival::Reset => {
                self.dialled_in_vain(index, "the connection broke", context);
            }
            Arrival::Refused => self.dialled_in_vain(index, "nobody listens", context),
        }
        None
    }

    fn link_opened(&mut self, index: usize, stream: StreamId, dialling: Dialling, context: &mut Context<'_>) {
        let Some(job) = &mut self.job else { return };
        let (epoch, attempt) = (job.epoch, dialling.attempt);
        let link = &mut job.links[index];
        link.dialling = None;
        let place = StreamPlace {
            route: link.route,
            port: link.port,
            attempt,
            epoch,
            resumed_by: (attempt > 0).then_some(link.interface),
        };
        job.admitted.insert(stream, Vec::new());
        let passing = context.random.time(&PASSING);
        let standby = link.standby;
        context.wake_in(self.process, passing, Wake::Adopt { stream, place, standby });
        self.open_link(index + 1, dialling, context);
    }

    /// A stream to another hub could not be opened.
    fn dialled_in_vain(&mut self, index: usize, why: &str, context: &mut Context<'_>) {
        let Some(job) = &mut self.job else { return };
        let name = job.composed.composition.name(job.links[index].site);
        let Some(dialling) = job.links[index].dialling.take() else { return };
        if let Some(stream) = dialling.stream {
            context.close(stream, self.process);
        }
        let Some(attempts) = dialling.again else {
            let reason = format!("{name} cannot be reached to bring sums there: {why}");
            if let Some(standby) = job.links[index].standby.filter(|_| dialling.is_new_standby) {
                let route = job.links[index].route;
                let reason = format!(
                    "the standby of some chunks at {:?} cannot be reached: {why}",
                    job.links[index].to
                );
                let event = Event::StandbyUnreachable { namespace: NAMESPACE, route, standby, reason };
                self.open_link(index + 1, dialling, context);
                return self.handle(event, context);
            }
            return self.handle(Event::SitesUnreachable { namespace: NAMESPACE, reason }, context);
        };
        if let AfterRound::Again(pause) = attempts.after_round(context.instant(), false, false) {
            let attempt = dialling.attempt + 1;
            job.links[index].dialling = Some(Dialling { attempt, stream: None, ..dialling });
            let wake = Wake::DialLink { allocation: self.allocations, link: index };
            context.wake_in(self.process, pause, wake);
        }
    }

    /// A pause is over after which a stream is dialled once more.
    pub(super) fn link_paused(&mut self, index: usize, context: &mut Context<'_>) {
        let dialling = self.job.as_ref().and_then(|job| job.links[index].dialling);
        if let Some(dialling) = dialling.filter(|dialling| dialling.stream.is_none()) {
            self.dial(index, dialling, context);
        }
    }

    /// A stream has been dialled long enough.
    pub(super) fn link_timed_out(&mut self, index: usize, stream: StreamId, context: &mut Context<'_>) {
        if self.dialled(stream).is_some() {
            self.dialled_in_vain(index, "it did not answer in time", context);
        }
    }

    /// The standby of a route is lost: no further stream is opened to it.
    pub(super) fn stop_dialling_standby(&mut self, route: RouteId, context: &mut Context<'_>) {
        let links = self.job.iter_mut().flat_map(|job| &mut job.links);
        // The thread that opens streams to new standbys goes on with the others, and what it opens too late is dropped.
        let may_stop = |dialling: &mut Dialling| !dialling.is_new_standby;
        let of_route = links.filter(|link| link.standby.is_some() && link.route == route);
        let dialled: Vec<Dialling> = of_route.filter_map(|link| link.dialling.take_if(may_stop)).collect();
        for stream in dialled.into_iter().filter_map(|dialling| dialling.stream) {
            context.close(stream, self.process);
        }
    }

    /// The job is over: no further stream is opened.
    pub(super) fn stop_dialling(&mut self, context: &mut Context<'_>) {
        let links = self.job.iter_mut().flat_map(|job| &mut job.links);
        let dialled: Vec<Dialling> = links.filter_map(|link| link.dialling.take()).collect();
        for stream in dialled.into_iter().filter_map(|dialling| dialling.stream) {
            context.close(stream, self.process);
        }
    }
}
