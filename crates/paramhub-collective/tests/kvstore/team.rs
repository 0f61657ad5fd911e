//! Stores of one kind, a rank each.

use std::sync::Arc;

use paramhub_collective::communicator::Checking;
use paramhub_collective::engine::{Engine, EngineConfig};
use paramhub_collective::kvstore::{KvStore, StoreKind, StoreOptions, create};

use crate::group::at_all;

/// The kinds that exchange.
pub(crate) const DESIGNS: [StoreKind; 3] = [StoreKind::Funnel, StoreKind::ConCom, StoreKind::DepCha];

pub(crate) fn engine(config: EngineConfig) -> Arc<Engine> {
    Arc::new(Engine::new(config).unwrap())
}

pub(crate) fn local() -> Box<dyn KvStore> {
    create(StoreKind::Local, StoreOptions::new(engine(EngineConfig::default()))).unwrap()
}

/// Runs `work` with every rank's store, whose calls are checked, and returns what each came to. Who has done its work leaves.
pub(crate) fn stores<T: Send>(kind: StoreKind, size: u32, work: impl Fn(&dyn KvStore) -> T + Sync) -> Vec<T> {
    at_all(
        size,
        |config| config,
        |native| {
            let engine = engine(EngineConfig { compute_threads: 2, ..Default::default() });
            let options = StoreOptions::over(engine, Checking::new(native));
            let store = create(kind, options).unwrap();
            let made = work(&*store);
            store.leave().unwrap();
            made
        },
    )
}
