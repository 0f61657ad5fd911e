//! The job that is simulated, and the hubs that serve it.

use std::sync::Arc;
use std::time::Duration;

use paramhub_core::auth::{Epoch, EpochSecret, Incarnation, Namespace, Nonce};
use paramhub_core::chunk::ChunkMap;
use paramhub_core::composition::{Composed, Composition, Place};
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::placement::{HubShape, InterfaceShape};
use paramhub_core::resuming::ResumeTerms;
use paramhub_core::service::{CreateService, JobOptions, OnInterfaceDown, OnWorkerLoss};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_core::stragglers::Quorum;

use crate::scenario::{Racks, Scenario};

/// The job's name on the wire.
pub(crate) const NAMESPACE: Namespace = Namespace([1; 16]);
/// The job's secret.
pub(crate) const NONCE: Nonce = Nonce([2; 32]);
/// The job's first epoch.
pub(crate) const FIRST_EPOCH: Epoch = Epoch { number: 1, secret: EpochSecret([3; 32]) };
/// How long ranks wait for one another in each call, and hubs for their streams.
pub(crate) const RENDEZVOUS: Duration = Duration::from_secs(30);
/// How long a job that does not run yet may be without a sign of life.
pub(crate) const LEASE: Duration = Duration::from_secs(40);
/// How long a job that outlives its workers waits for others.
pub(crate) const LINGER: Duration = Duration::from_secs(90);
/// Bytes of a chunk.
const CHUNK_BYTES: u32 = 1024;

/// What is settled before the job begins.
pub(crate) struct JobPlan {
    pub(crate) workers: u32,
    pub(crate) keys: u32,
    pub(crate) steps: u32,
    pub(crate) map: ChunkMap,
    /// The settings that every rank hands in.
    pub(crate) settings: Arc<Settings>,
    /// How the job is created.
    pub(crate) request: CreateService,
    /// Which streams are opened again when they are cut.
    pub(crate) resuming: ResumeTerms,
    pub(crate) reproducible: bool,
    /// The condition that ends steps without some workers, if the job outlives them.
    pub(crate) quorum: Option<Quorum>,
    /// The number of updates from one copy of a chunk to the next, if the job goes back when a worker is lost.
    pub(crate) rewind_every: Option<u32>,
    pub(crate) dead_after: Duration,
    /// The racks of its workers, if it has several sites.
    pub(crate) racks: Option<Racks>,
}

impl JobPlan {
    pub(crate) fn new(scenario: &Scenario) -> JobPlan {
        let keys = (0..scenario.keys).map(|key| Key::new(format!("k{key}"), [scenario.elements]));
        let table = KeyTable::new(keys.collect()).expect("good keys");
        let map = ChunkMap::new(&table, CHUNK_BYTES).expect("few chunks");
        let options = JobOptions {
            rendezvous_timeout_s: RENDEZVOUS.as_secs_f64(),
            lease_s: LEASE.as_secs_f64(),
            dead_after_s: scenario.dead_after.as_secs_f64(),
            hubs: Some(scenario.hubs.into()),
            on_worker_loss: match (scenario.min_workers, scenario.rewind_every) {
                (Some(_), _) => OnWorkerLoss::Continue,
                (None, Some(_)) => OnWorkerLoss::Rewind,
                (None, None) => OnWorkerLoss::Fail,
            },
            min_workers: scenario.min_workers.unwrap_or(1),
            start_workers: scenario.start_workers,
            rewind_every: scenario.rewind_every.unwrap_or(1),
            linger_s: LINGER.as_secs_f64(),
            on_interface_down: match scenario.continues {
                true => OnInterfaceDown::Continue,
                false => OnInterfaceDown::Fail,
            },
            redial_grace_s: scenario.redial_grace.as_secs_f64(),
            replicas: u32::from(scenario.replicas),
            reduction: scenario.racks.map(|racks| racks.reduction).unwrap_or_default(),
            optimize_at: scenario.racks.map(|racks| racks.optimize_at).unwrap_or_default(),
            ..JobOptions::default()
        };
        let settings = Settings {
            optimizer: OptimizerChoice::named("sgd"),
            chunk_bytes: CHUNK_BYTES,
            reproducible: scenario.reproducible,
            ..Settings::new(table)
        };
        JobPlan {
            workers: scenario.workers,
            keys: scenario.keys,
            steps: scenario.steps,
            map,
            settings: Arc::new(settings),
            request: CreateService { name: "job".into(), workers: scenario.workers, options },
            resuming: ResumeTerms {
                redial_grace: scenario.redial_grace,
                moves: scenario.continues,
                has_standbys: scenario.replicas,
            },
            reproducible: scenario.reproducible,
            quorum: options.quorum(scenario.workers),
            rewind_every: scenario.rewind_every,
            dead_after: scenario.dead_after,
            racks: scenario.racks,
        }
    }

    /// The place of a worker.
    pub(crate) fn place_of(&self, rank: u32) -> Place {
        self.racks.map(|racks| racks.place(rank)).unwrap_or_default()
    }

    /// The placement of the job's chunks, as every process computes it.
    pub(crate) fn compose(&self, composition: Composition) -> Arc<Composed> {
        Arc::new(Composed::new(&self.settings.keys, &self.map, composition).expect("a composition"))
    }
}

/// The address of an interface of the hub of a number.
pub(crate) fn address_of_hub(number: u16, interface: u16) -> String {
    format!("10.0.{number}.{interface}:1")
}

/// What the hub of a number offers.
pub(crate) fn hub_shape(number: u16, routes: u16) -> HubShape {
    let interface = |interface| InterfaceShape {
        address: address_of_hub(number, interface),
        cores: vec![interface],
        weight: 1,
    };
    HubShape { interfaces: (0..routes).map(interface).collect(), local: None, between_hubs: None }
}

/// The number of the hub that offers this.
pub(crate) fn hub_at(shape: &HubShape) -> u16 {
    let address = &shape.interfaces[0].address;
    let number = address.split('.').nth(2).and_then(|number| number.parse().ok());
    number.expect("the address of a simulated hub")
}

/// The incarnation of the process of this number among those that were started for a rank, when it has begun again so often.
pub(crate) fn incarnation(number: u8, again: u8) -> Incarnation {
    let mut bytes = [1 + number; 16];
    bytes[15] = bytes[15].wrapping_add(again);
    Incarnation(bytes)
}
