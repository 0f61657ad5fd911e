//! A core whose turns are taken one by one, for tests and fuzzing.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::chunk::ChunkMap;
use paramhub_core::composition::{Composed, Composition, SiteId};
use paramhub_core::factors::FactorBlock;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::placement::{HubShape, InterfaceShape, RouteId};
use paramhub_core::ports::Ports;
use paramhub_core::resuming::ResumeTerms;
use paramhub_core::scheme::{Cluster, Plan};
use paramhub_core::settings::Settings;
use paramhub_core::standbys::Role;
use paramhub_core::stragglers::Stragglers;
use paramhub_kernels::Registry;
use paramhub_transport::Events;

use super::{Core, CoreCommand, CoreEvent, CoreHandle, EVENTS, ShardPlan, mailbox};

/// Turns within which a core must have done its work; a hang takes more.
pub(super) const TURNS_MAX: u32 = 100_000;

/// The plan of a job of one hub with one core.
pub(crate) fn plan_with(
    workers: u32,
    keys: Vec<Key>,
    stragglers: Stragglers,
    change: impl FnOnce(&mut Settings),
) -> ShardPlan {
    let mut settings = Settings::new(KeyTable::new(keys).expect("good keys"));
    settings.chunk_bytes = 1024;
    change(&mut settings);
    settings.check().expect("good settings");
    plan_at(Composition::flat(vec![one_core()], workers), 0, stragglers, settings)
}

/// A hub with one core.
pub(crate) fn one_core() -> HubShape {
    with_cores(1)
}

/// A hub with so many cores, each of which is a route.
pub(crate) fn with_cores(cores: u16) -> HubShape {
    let interface = InterfaceShape { address: "127.0.0.1:1".into(), cores: (0..cores).collect(), weight: 1 };
    HubShape { interfaces: vec![interface], local: None, between_hubs: None }
}

/// The plan of a site whose only hub has one core.
pub(crate) fn plan_at(
    composition: Composition,
    site: SiteId,
    stragglers: Stragglers,
    settings: Settings,
) -> ShardPlan {
    plan_of_route(composition, (site, 0), stragglers, settings)
}

/// The plan of a route of a site.
pub(crate) fn plan_of_route(
    composition: Composition,
    (site, route): (SiteId, RouteId),
    stragglers: Stragglers,
    settings: Settings,
) -> ShardPlan {
    let workers = composition.workers();
    let registry = Registry::with_builtins();
    let optimizer = registry.optimizer(&settings.optimizer.name).expect("a built-in optimizer");
    let map = ChunkMap::new(&settings.keys, settings.chunk_bytes).expect("chunks");
    let schemes = Plan::new(&settings, &Cluster::beside_workers(workers));
    let factor_blocks = FactorBlock::planned(&settings, &map, &schemes).into();
    let composed = Composed::new(&settings.keys, &map, composition).expect("a composition");
    let ports = Ports::new(&composed, site, route);
    let groups = settings.optimizer.of_groups(optimizer.defaults()).into();
    ShardPlan {
        name: "test".into(),
        namespace: Namespace([1; 16]),
        dead_after: Duration::from_secs(30),
        resuming: ResumeTerms::default(),
        stragglers,
        quorum: stragglers.quorum(workers),
        first_workers: workers,
        rewind_every: None,
        outlives_hubs: false,
        program_state_bytes: 0,
        progress_timeout: None,
        weight: 1,
        encrypts: false,
        aggregator: registry.aggregator(&settings.aggregator).expect("a built-in aggregator"),
        settings: Arc::new(settings),
        map: Arc::new(map),
        factor_blocks,
        composed: Arc::new(composed),
        site,
        route,
        ports: Arc::new(ports),
        role: Role::Serves { has_standby: false },
        standby: None,
        counterpart: String::new(),
        optimizer,
        groups,
        checkpoints: false,
    }
}

/// A core whose turns are taken one by one.
pub(super) struct SteppedHub {
    core: Core,
    pub(super) handle: CoreHandle,
    pub(super) core_events: Receiver<CoreEvent>,
    events: Events,
    ended: Instant,
}

impl SteppedHub {
    pub(super) fn new() -> SteppedHub {
        let (sender, core_events) = channel();
        let send_event = Box::new(move |event| {
            // If a core outlives its receiver, it is about to end.
            let _ = sender.send(event);
            None
        });
        let (handle, mailbox) = mailbox(send_event).expect("a mailbox");
        let core = Core::new(0, mailbox, Duration::ZERO).expect("a core");
        SteppedHub { core, handle, core_events, events: Events::with_capacity(EVENTS), ended: Instant::now() }
    }

    pub(super) fn turn(&mut self) {
        let turned = self.core.turn(&mut self.events, self.ended, Duration::ZERO);
        self.ended = turned.expect("the poller works").expect("nothing has stopped it");
    }

    /// Takes turns until the core sends a wanted event.
    pub(super) fn await_event<T>(&mut self, wanted: impl Fn(&CoreEvent) -> Option<T>) -> T {
        for _ in 0..TURNS_MAX {
            if let Some(found) = self.core_events.try_iter().find_map(|event| wanted(&event)) {
                return found;
            }
            self.turn();
        }
        panic!("the core hangs");
    }

    pub(super) fn open(&mut self, plan: ShardPlan) {
        let job = plan.namespace;
        self.handle.send(CoreCommand::Open { plan: Box::new(plan), restored: None });
        self.await_event(|event| is_opened(event, job).then_some(()));
    }
}

/// The numbers of a payload, at any alignment.
pub(super) fn floats(payload: &[u8]) -> Vec<f32> {
    payload
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        .collect()
}

pub(super) fn is_opened(event: &CoreEvent, job: Namespace) -> bool {
    matches!(event, CoreEvent::Opened { namespace, missing_bytes: None, .. } if *namespace == job)
}
