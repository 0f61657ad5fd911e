//! The job that is simulated.

use std::sync::Arc;
use std::time::Duration;

use paramhub_core::auth::{Incarnation, Namespace};
use paramhub_core::chunk::ChunkMap;
use paramhub_core::composition::{Composed, Composition};
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::placement::{HubShape, InterfaceShape, RouteId};
use paramhub_core::wire::{Attempt, CHALLENGE_BYTES, Caller, Capabilities, Hello};

use crate::scenario::Scenario;

/// The job's name on the wire.
pub(crate) const NAMESPACE: Namespace = Namespace([1; 16]);
/// The job's epoch.
pub(crate) const EPOCH: u64 = 1;
/// Bytes of a chunk.
const CHUNK_BYTES: u32 = 1024;
/// Elements of a key: two chunks and a part of one.
const KEY_ELEMENTS: u64 = 600;

/// What every process of the job knows.
pub(crate) struct JobPlan {
    pub(crate) workers: u32,
    pub(crate) keys: u32,
    pub(crate) steps: u32,
    pub(crate) map: ChunkMap,
    pub(crate) composed: Arc<Composed>,
    pub(crate) continues: bool,
    pub(crate) reproducible: bool,
    pub(crate) dead_after: Duration,
    pub(crate) rendezvous: Duration,
}

impl JobPlan {
    /// What the process of this number among those that ever had a rank says first on a stream.
    pub(crate) fn hello(&self, rank: u32, incarnation: u8, route: RouteId, attempt: u32) -> Hello {
        let placement = &self.composed.placements[0];
        let place = placement.routes()[usize::from(route)];
        Hello {
            caller: Caller::Worker { rank, shares_parameters: false },
            interface: place.interface,
            core: place.core,
            offered: Capabilities::default(),
            required: Capabilities::default(),
            attempt: Attempt::Numbered { epoch: EPOCH, number: attempt },
            namespace: NAMESPACE,
            incarnation: Incarnation([incarnation; 16]),
            placement: *placement.hash().as_bytes(),
            challenge: [0; CHALLENGE_BYTES],
        }
    }

    pub(crate) fn new(scenario: &Scenario) -> JobPlan {
        let keys = (0..scenario.keys).map(|key| Key::new(format!("k{key}"), [KEY_ELEMENTS]));
        let table = KeyTable::new(keys.collect()).expect("good keys");
        let map = ChunkMap::new(&table, CHUNK_BYTES).expect("few chunks");
        let hub = |number: u16| HubShape {
            interfaces: (0..scenario.routes_per_hub)
                .map(|interface| InterfaceShape {
                    address: format!("10.0.{number}.{interface}:1"),
                    cores: vec![interface],
                    weight: 1,
                })
                .collect(),
            local: None,
        };
        let composition = Composition::flat((0..scenario.hubs).map(hub).collect(), scenario.workers);
        let composed = Composed::new(&table, &map, composition).expect("a composition");
        JobPlan {
            workers: scenario.workers,
            keys: scenario.keys,
            steps: scenario.steps,
            map,
            composed: Arc::new(composed),
            continues: scenario.continues,
            reproducible: scenario.reproducible,
            dead_after: scenario.dead_after,
            rendezvous: Duration::from_secs(30),
        }
    }
}
