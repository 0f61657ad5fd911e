//! A job as a hub has planned it: what the job control is told of it, its routes, and which streams are admitted.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use paramhub_core::auth::Namespace;
use paramhub_core::chunk::ChunkId;
use paramhub_core::composition::{Composed, Neighbour, SiteId};
use paramhub_core::job_control::{AdmittedStreams, JobTerms, RouteTerms};
use paramhub_core::placement::RouteId;
use paramhub_core::ports::Ports;
use paramhub_core::service;
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
        let own = (0..).zip(placement.routes());
        let own = own
            .filter(|&(id, route)| u32::from(route.hub) == ordered.hub && !placement.chunks(id).is_empty());
        let own: Vec<(RouteId, u16)> = own.map(|(id, route)| (id, route.interface)).collect();
        // A start with another number of workers may have come before the job began.
        let first_workers = ordered.options.first_workers(plan.workers);
        let ports = own.iter().map(|&(id, _)| (id, Arc::new(Ports::new(&composed, ordered.site, id))));
        let ports: HashMap<RouteId, Arc<Ports>> = ports.collect();
        let route = |&(id, interface): &(RouteId, u16)| {
            let place = (ordered.site, id);
            (id, Route::new(plan, &composed, place, &ports[&id], first_workers, interface))
        };
        let links = own.iter().flat_map(|(id, _)| Link::of(*id, &ports[id], &composed)).collect();
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
            ports: ports.clone(),
            routes: own.iter().map(|&(id, interface)| ((interface, interface), id)).collect(),
            standby_routes: HashMap::new(),
            roles: HashMap::new(),
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
                .map(|&(id, interface)| RouteTerms {
                    id,
                    core: interface,
                    interface,
                    share: 0,
                    streams: ports[&id].len(),
                })
                .collect(),
            rendezvous: RENDEZVOUS,
            dead_after: plan.dead_after,
            progress_timeout: None,
            continues: ordered.options.continues(),
            min_workers: ordered.options.least_workers(plan.workers),
            first_workers,
            shares: Vec::new(),
            hub: ordered.hub as u16,
            rewinds: ordered.options.rewinds(),
            epoch: ordered.epoch.number,
            stragglers: ordered.options.stragglers,
            weight: ordered.options.weight,
            memory_bytes: 1 << 20,
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
            streams: JobStreams::new(streams),
            is_open: false,
            admitted: BTreeMap::new(),
            planted: 0,
            joins: Vec::new(),
            is_forgotten: false,
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
