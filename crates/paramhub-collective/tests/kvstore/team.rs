//! Stores of one kind, a rank each.

use std::sync::Arc;

use paramhub_collective::communicator::{Checking, Communicator};
use paramhub_collective::engine::{Engine, EngineConfig};
use paramhub_collective::kvstore::{KvStore, StoreKind, StoreOptions, create};

use crate::group::at_all;

/// The kinds that exchange.
pub(crate) const DESIGNS: [StoreKind; 3] = [StoreKind::Funnel, StoreKind::ConCom, StoreKind::DepCha];

pub(crate) fn engine(config: EngineConfig) -> Arc<Engine> {
    Arc::new(Engine::new(config).unwrap())
}

pub(crate) fn local() -> Box<dyn KvStore> {
    let options =
        StoreOptions { engine: engine(EngineConfig::default()), communicator: None, outstanding: None };
    create(StoreKind::Local, options).unwrap()
}

/// Runs `work` with every rank's store, whose calls are checked, and returns what each came to. Who has done its work leaves.
pub(crate) fn stores<T: Send>(kind: StoreKind, size: u32, work: impl Fn(&dyn KvStore) -> T + Sync) -> Vec<T> {
    at_all(
        size,
        |config| config,
        |native| {
            let communicator: Box<dyn Communicator> = Box::new(Checking::new(native));
            let engine = engine(EngineConfig { compute_threads: 2, ..Default::default() });
            let options = StoreOptions { engine, communicator: Some(communicator), outstanding: None };
            let store = create(kind, options).unwrap();
            let made = work(&*store);
            store.leave().unwrap();
            made
        },
    )
}
