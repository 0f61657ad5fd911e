//! A job as a hub has planned it: what the job control is told of it, its routes, and which streams are admitted.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use paramhub_core::auth::Namespace;
use paramhub_core::chunk::ChunkId;
use paramhub_core::composition::{Composed, Neighbour, SiteId};
use paramhub_core::job_control::{AdmittedStreams, JobTerms, RouteTerms};
use paramhub_core::placement::Route as PlacedRoute;
use paramhub_core::placement::{HubShape, RouteId};
use paramhub_core::ports::{Ports, Side};
use paramhub_core::service;
use paramhub_core::standbys::{Role, Share, route_at};
use paramhub_core::stream_admission::{JobStreams, StreamSecrets, StreamTerms};

use super::dialling::Link;
use super::route::{Port, Route};
use crate::job::{JobPlan, RENDEZVOUS};
use crate::network::{Arrival, StreamId};

/// A job at a hub.
pub(super) struct HubJob {
    pub(super) composed: Arc<Composed>,
    /// The hub's site.
    pub(super) site: SiteId,
    pub(super) epoch: u64,
    /// The routes that lead here.
    pub(super) routes: BTreeMap<RouteId, Route>,
    /// The streams that the hub opens to others.
    pub(super) links: Vec<Link>,
    /// The position of the hub in the job.
    pub(super) hub: u16,
    /// The hubs of each share, if chunks have standbys, and those that the job has got since it began.
    pub(super) shares: Vec<Share>,
    pub(super) later_hubs: Vec<HubShape>,
    /// Which streams the acceptor admits, once it admits any.
    pub(super) streams: JobStreams,
    pub(super) is_open: bool,
    /// What has come on streams that were admitted and not passed on yet: it waits in their sockets.
    pub(super) admitted: BTreeMap<StreamId, Vec<Arrival>>,
    /// Streams that came to a hub with a planted fault.
    pub(super) planted: u32,
    /// The ranks that have joined while chunks of their core were about to go back, each with its core and epoch.
    pub(super) joins: Vec<(u16, u32, u64)>,
    /// Nothing of the job is left here.
    pub(super) is_forgotten: bool,
    /// The routes of further shares that are planned, until the job control accepts them.
    pub(super) further: BTreeMap<RouteId, Route>,
}

/// A route that leads to a hub.
struct OwnRoute {
    id: RouteId,
    /// The interface, and the core of the same number.
    interface: u16,
    /// The hub of the placement, by its position.
    share: u16,
    role: Role,
    ports: Arc<Ports>,
}

impl OwnRoute {
    /// The route of the placement, if this hub serves it or is its standby.
    fn of(
        (id, placed): (RouteId, &PlacedRoute),
        composed: &Composed,
        ordered: &service::JobPlan,
    ) -> Option<OwnRoute> {
        let (hub, share) = (ordered.hub as u16, placed.hub);
        let role = match ordered.shares.get(usize::from(share)) {
            Some(held) => held.role(hub),
            None if share == hub => Role::Serves { has_standby: false },
            None => Role::None,
        };
        let ports = Ports::new(composed, ordered.site, id);
        let ports = match role {
            Role::Serves { has_standby: false } => ports,
            Role::Serves { has_standby: true } => ports.with_counterpart(Side::Standby, ordered.site, id),
            Role::StandsBy => ports.with_counterpart(Side::Serving, ordered.site, id),
            Role::None => return None,
        };
        let hubs = &composed.composition.sites[usize::from(ordered.site)].hubs;
        let (interface, _) = match share == hub {
            true => (placed.interface, placed.core),
            false => {
                let here = ordered.hub_at(usize::from(hub)).expect("a hub of the job");
                route_at(placed, &hubs[usize::from(share)], here)
            }
        };
        Some(OwnRoute { id, interface, share, role, ports: Arc::new(ports) })
    }
}

/// What is admitted at a hub that may have no job.
pub(super) struct Admitted<'a>(pub(super) Option<&'a HubJob>);

impl AdmittedStreams for Admitted<'_> {
    fn missing(&self, _: Namespace) -> Vec<Neighbour> {
        self.0.map(|job| job.streams.missing()).unwrap_or_default()
    }

    fn through(&self, _: Namespace, interface: u16) -> Vec<(RouteId, u32, Neighbour)> {
        self.0.map(|job| job.streams.through(interface)).unwrap_or_default()
    }
}

impl HubJob {
    /// Plans a job that the manager wants allocated. Also returns what the job control is told of it.
    pub(super) fn plan(plan: &Arc<JobPlan>, ordered: &service::JobPlan) -> (HubJob, JobTerms) {
        let composed = plan.compose(ordered.composition.clone());
        let placement = &composed.placements[usize::from(ordered.site)];
        let placed = (0..).zip(placement.routes()).filter(|&(id, _)| !placement.chunks(id).is_empty());
        let own = placed.filter_map(|route| OwnRoute::of(route, &composed, ordered));
        let is_asked = |own: &OwnRoute| {
            ordered.further.as_ref().is_none_or(|further| further.shares.contains(&own.share))
        };
        let own: Vec<OwnRoute> = own.filter(is_asked).collect();
        // A start with another number of workers may have come before the job began.
        let first_workers = ordered.options.first_workers(plan.workers);
        let has_standbys = !ordered.shares.is_empty();
        // Each hub's copy of a chunk has its own versions.
        let copy = if has_standbys { ordered.hub as SiteId } else { ordered.site };
        let route = |own: &OwnRoute| {
            let place = (ordered.site, own.id);
            let mut route = Route::new(plan, &composed, place, &own.ports, first_workers, own.interface);
            let share = ordered.shares.get(usize::from(own.share));
            let serves = matches!(own.role, Role::Serves { .. });
            route.begin_as(own.role, copy, share.and_then(|share| share.standby).filter(|_| serves));
            (own.id, route)
        };
        let held_by = (&ordered.shares[..], &ordered.later_hubs[..]);
        let links = own.iter().flat_map(|own| Link::of(own.id, &own.ports, &composed, held_by));
        let links = links.collect();
        let is_standby = |own: &&OwnRoute| own.role == Role::StandsBy;
        let streams = StreamTerms {
            name: ordered.name.clone(),
            secrets: StreamSecrets {
                nonce: ordered.nonce,
                epoch: ordered.epoch,
                newest_epoch: ordered.epoch.number,
                version_1_ranks: ordered.version_1_ranks.clone(),
            },
            composed: composed.clone(),
            first_workers,
            site: ordered.site,
            position: ordered.hub as u16,
            ports: own.iter().map(|own| (own.id, own.ports.clone())).collect(),
            routes: own
                .iter()
                .filter(|own| !is_standby(own))
                .map(|own| ((own.interface, own.interface), own.id))
                .collect(),
            standby_routes: own
                .iter()
                .filter(is_standby)
                .map(|own| (own.id, (own.interface, own.interface)))
                .collect(),
            roles: match has_standbys {
                true => own.iter().map(|own| (own.id, own.role)).collect(),
                false => HashMap::new(),
            },
            resumes: plan.resuming.resumes(),
            encrypts: ordered.options.encrypt,
        };
        let terms = JobTerms {
            namespace: ordered.namespace,
            name: ordered.name.clone(),
            composed: composed.clone(),
            site: ordered.site,
            routes: own
                .iter()
                .map(|own| RouteTerms {
                    id: own.id,
                    core: own.interface,
                    interface: own.interface,
                    share: own.share,
                    streams: own.ports.len(),
                    memory_bytes: 1 << 20,
                })
                .collect(),
            rendezvous: RENDEZVOUS,
            dead_after: plan.dead_after,
            progress_timeout: None,
            continues: ordered.options.continues(),
            min_workers: ordered.options.least_workers(plan.workers),
            first_workers,
            shares: ordered.shares.clone(),
            hub: ordered.hub as u16,
            rewinds: ordered.options.keeps_copies(!ordered.composition.is_flat()),
            begins_again: false,
            epoch: ordered.epoch.number,
            stragglers: ordered.options.stragglers,
            weight: ordered.options.weight,
            team: ordered.team.clone(),
            resumes: false,
            writes_checkpoints: false,
            checkpoint_folder: String::new(),
        };
        let job = HubJob {
            epoch: ordered.epoch.number,
            composed: composed.clone(),
            site: ordered.site,
            routes: own.iter().map(route).collect(),
            links,
            hub: ordered.hub as u16,
            shares: ordered.shares.clone(),
            later_hubs: ordered.later_hubs.clone(),
            streams: JobStreams::new(streams),
            is_open: false,
            admitted: BTreeMap::new(),
            planted: 0,
            joins: Vec::new(),
            is_forgotten: false,
            further: BTreeMap::new(),
        };
        (job, terms)
    }

    /// The place of the stream of a port.
    pub(super) fn port(&mut self, route: RouteId, port: u32) -> &mut Port {
        &mut self.route(route).ports[port as usize]
    }

    pub(super) fn route(&mut self, route: RouteId) -> &mut Route {
        self.routes.get_mut(&route).expect("an own route")
    }

    /// The slot of a chunk among those of its route.
    pub(super) fn slot(&self, chunk: ChunkId) -> u32 {
        self.composed.placements[usize::from(self.site)].locate(chunk).expect("a chunk of the job").1
    }

    pub(super) fn port_of(&self, stream: StreamId) -> Option<(RouteId, u32)> {
        self.routes.iter().find_map(|(&id, route)| {
            let port = route.ports.iter().position(|port| port.stream == Some(stream))?;
            Some((id, port as u32))
        })
    }
}
