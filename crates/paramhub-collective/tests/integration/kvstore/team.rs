//! Stores of one kind, one for each rank.

use std::sync::Arc;

use paramhub_collective::communicator::CheckedCommunicator;
use paramhub_collective::engine::{Engine, EngineConfig};
use paramhub_collective::kvstore::{KvStore, StoreKind, StoreOptions, create};

use super::group::at_all;

/// The kinds that exchange by collectives.
pub(crate) const DESIGNS: [StoreKind; 3] = [StoreKind::Funnel, StoreKind::ConCom, StoreKind::DepCha];

pub(crate) fn engine(config: EngineConfig) -> Arc<Engine> {
    Arc::new(Engine::new(config).unwrap())
}

pub(crate) fn local() -> Box<dyn KvStore> {
    create(StoreKind::Local, StoreOptions::new(engine(EngineConfig::default()))).unwrap()
}

/// Runs `work` with every rank's store, whose calls are checked, and returns each rank's result. Each rank
/// leaves after its work.
pub(crate) fn stores<T: Send>(kind: StoreKind, size: u32, work: impl Fn(&dyn KvStore) -> T + Sync) -> Vec<T> {
    at_all(
        size,
        |config| config,
        |native| {
            let engine = engine(EngineConfig { compute_threads: 2, ..Default::default() });
            let options = StoreOptions::over(engine, CheckedCommunicator::new(native));
            let store = create(kind, options).unwrap();
            let made = work(&*store);
            store.leave().unwrap();
            made
        },
    )
}
