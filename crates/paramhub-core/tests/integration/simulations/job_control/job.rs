//! A job as the rest of its hub knows it: its streams, what its cores hold, and its checkpoint writer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use paramhub_core::auth::Namespace;
use paramhub_core::chunk::ChunkMap;
use paramhub_core::composition::{Composed, Composition, Neighbour};
use paramhub_core::job_control::{JobTerms, RouteTerms};
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::placement::{HubShape, InterfaceShape, RouteId};
use paramhub_core::stragglers::Stragglers;

use super::RENDEZVOUS;

const WORKERS: u32 = 2;

/// What a core holds of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// The core was not asked to open it.
    Planned,
    Opening,
    Open,
    Gone,
}

/// The thread that writes a job's checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writer {
    None,
    Running,
    Stopped,
}

pub(super) struct SimulatedJob {
    pub(super) terms: JobTerms,
    pub(super) is_loading: bool,
    /// When its checkpoint began to be read.
    pub(super) loading_since: Option<Duration>,
    /// Whether it was refused because that took too long.
    pub(super) is_refused: bool,
    pub(super) routes: Vec<Route>,
    /// When streams were first admitted.
    pub(super) admitted: Option<Duration>,
    /// Whether streams are no longer admitted.
    pub(super) is_refusing: bool,
    /// The interface of each stream.
    pub(super) streams: BTreeMap<(RouteId, u32), u16>,
    pub(super) left: BTreeSet<(RouteId, u32)>,
    pub(super) writer: Writer,
    /// The requests for a last checkpoint that are not answered, and whether the job goes on after each.
    pub(super) last_asked: VecDeque<bool>,
    /// When the last checkpoint after which the job ends was asked for.
    pub(super) finishing_since: Option<Duration>,
    /// Whether a last checkpoint after which the job ends was taken.
    pub(super) last_taken: bool,
    /// The reason of the launcher that ends the workers.
    pub(super) announced: Option<String>,
    /// When the workers had ended, and the reason.
    pub(super) concluding: Option<(Duration, String)>,
    /// The reason of the first cause of its end; empty if it has finished.
    pub(super) first_cause: Option<String>,
    /// Whether the cores were asked to free it.
    pub(super) is_freeing: bool,
    /// Whether the hub has forgotten it.
    pub(super) is_over: bool,
    /// Reports that it was refused or has ended.
    pub(super) ends: u32,
}

impl SimulatedJob {
    pub(super) fn new(
        namespace: Namespace,
        routes: u16,
        continues: bool,
        writes: bool,
        resumes: bool,
    ) -> SimulatedJob {
        let interface = InterfaceShape { address: "10.0.0.1:1".into(), cores: vec![0], weight: 1 };
        let hub = HubShape { interfaces: vec![interface], local: None, between_hubs: None };
        let keys = KeyTable::new(vec![Key::new("w", [4])]).unwrap();
        let map = ChunkMap::new(&keys, 4096).unwrap();
        let route =
            |id| RouteTerms { id, core: id, interface: id, share: 0, streams: WORKERS, memory_bytes: 1 };
        let terms = JobTerms {
            namespace,
            name: format!("job {}", namespace.0[0]),
            composed: Arc::new(Composed::new(&keys, &map, Composition::flat(vec![hub], WORKERS)).unwrap()),
            site: 0,
            routes: (0..routes).map(route).collect(),
            rendezvous: RENDEZVOUS,
            dead_after: Duration::from_secs(15),
            progress_timeout: None,
            continues,
            first_workers: WORKERS,
            min_workers: None,
            shares: Vec::new(),
            hub: 0,
            rewinds: false,
            begins_again: false,
            epoch: 1,
            stragglers: Stragglers::Wait,
            weight: 1,
            team: Default::default(),
            resumes,
            writes_checkpoints: writes,
            checkpoint_folder: "/data".into(),
        };
        SimulatedJob {
            terms,
            is_loading: false,
            loading_since: None,
            is_refused: false,
            routes: vec![Route::Planned; usize::from(routes)],
            admitted: None,
            is_refusing: false,
            streams: BTreeMap::new(),
            left: BTreeSet::new(),
            writer: Writer::None,
            last_asked: VecDeque::new(),
            finishing_since: None,
            last_taken: false,
            announced: None,
            concluding: None,
            first_cause: None,
            is_freeing: false,
            is_over: false,
            ends: 0,
        }
    }

    /// All ports of its routes.
    pub(super) fn ports(&self) -> impl Iterator<Item = (RouteId, u32)> + use<> {
        let routes = self.terms.routes.clone();
        routes.into_iter().flat_map(|route| (0..route.streams).map(move |port| (route.id, port)))
    }

    /// The workers that lack a stream.
    pub(super) fn missing(&self) -> Vec<Neighbour> {
        let missing = self.ports().filter(|port| !self.streams.contains_key(port));
        missing.map(|(_, port)| Neighbour::Worker(port)).collect::<BTreeSet<_>>().into_iter().collect()
    }

    pub(super) fn have_all_left(&self) -> bool {
        self.left.len() == self.ports().count()
    }

    /// Whether the job is here and its end is not decided.
    pub(super) fn is_living(&self) -> bool {
        !self.is_over && !self.is_refusing && !self.is_refused
    }

    /// Whether the cores hold nothing of it.
    pub(super) fn is_free(&self) -> bool {
        self.routes.iter().all(|route| matches!(route, Route::Planned | Route::Gone))
    }
}
