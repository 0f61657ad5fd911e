//! Ranks, each on a thread, and their trainings.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;

use paramhub_collective::communicator::{
    CheckedCommunicator, Collective, Communicator, CommunicatorError, MeshCommunicator,
};
use paramhub_collective::engine::{Engine, EngineConfig};
use paramhub_collective::kvstore::{KvStore, StoreKind, StoreOptions, create};
use paramhub_kernels::{Hyperparameters, Optimizer, Registry};
use paramhub_mesh::{MeshConfig, MeshListener, Nonce};
use paramhub_train::data::{Data, DataSource};
use paramhub_train::dataflow::{Learner, engine_config, train};
use paramhub_train::net::{NetKind, Network};
use paramhub_train::trainer::{Evaluate, Progress, Report, TrainConfig, TrainError};

pub(crate) const SEED: u64 = 7;

/// An epoch of the smallest network.
pub(crate) const RUN: Run =
    Run { kind: NetKind::Mlp, epochs: 1, batch: 16, per_rank: 1, threads: 1, learning_rate: 0.02 };

/// The parameters of one training, whichever store exchanges.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    pub(crate) kind: NetKind,
    pub(crate) epochs: usize,
    pub(crate) batch: usize,
    pub(crate) per_rank: usize,
    pub(crate) threads: usize,
    pub(crate) learning_rate: f64,
}

impl Run {
    pub(crate) fn config(&self) -> TrainConfig {
        TrainConfig { epochs: self.epochs, batch: self.batch, seed: SEED, evaluate: Evaluate::Every(2) }
    }

    pub(crate) fn engine(&self) -> EngineConfig {
        engine_config(NonZeroUsize::new(self.threads).unwrap())
    }

    pub(crate) fn hyperparameters(&self, optimizer: &dyn Optimizer) -> Hyperparameters {
        Hyperparameters { learning_rate: self.learning_rate, momentum: 0.9, ..optimizer.defaults() }
    }

    /// Every rank begins with parameters of its own; rank 0's must replace them.
    pub(crate) fn network(&self, data: &Data, rank: u32) -> Network {
        Network::new(self.kind, data.train.geometry(), SEED + u64::from(rank)).unwrap()
    }

    pub(crate) fn through(
        &self,
        data: &Arc<Data>,
        store: &dyn KvStore,
        optimizer: Arc<dyn Optimizer>,
        on_progress: &mut dyn FnMut(&Progress),
    ) -> Result<Report, TrainError> {
        let hyperparameters = self.hyperparameters(&*optimizer);
        let workers_per_rank = NonZeroUsize::new(self.per_rank).unwrap();
        let learner = Learner { store, workers_per_rank, optimizer, hyperparameters };
        let mut network = self.network(data, store.rank());
        train(&self.config(), data, &mut network, &learner, on_progress)
    }

    /// Trains in one process without a communicator.
    pub(crate) fn alone(&self, data: &Arc<Data>) -> Report {
        self.through(data, &*local(self.engine()), sgd(), &mut |_| {}).unwrap()
    }

    /// Trains at all ranks with a store of this kind. The ranks' calls are checked.
    pub(crate) fn together(&self, data: &Arc<Data>, kind: StoreKind, size: u32) -> Vec<Report> {
        at_all(size, |native| {
            let store = store(kind, self.engine(), CheckedCommunicator::new(native));
            let report = self.through(data, &*store, sgd(), &mut |_| {}).unwrap();
            store.leave().unwrap();
            report
        })
    }
}

pub(crate) fn digits() -> Arc<Data> {
    Arc::new(DataSource::Digits.load().unwrap())
}

pub(crate) fn sgd() -> Arc<dyn Optimizer> {
    Registry::with_builtins().optimizer("sgd").unwrap()
}

pub(crate) fn local(config: EngineConfig) -> Box<dyn KvStore> {
    let engine = Arc::new(Engine::new(config).unwrap());
    create(StoreKind::Local, StoreOptions::new(engine)).unwrap()
}

pub(crate) fn store(
    kind: StoreKind,
    config: EngineConfig,
    communicator: impl Communicator + 'static,
) -> Box<dyn KvStore> {
    let engine = Arc::new(Engine::new(config).unwrap());
    create(kind, StoreOptions::over(engine, communicator)).unwrap()
}

/// Gives every rank its end of a communicator, and returns each rank's result.
pub(crate) fn at_all<T: Send>(size: u32, work: impl Fn(MeshCommunicator) -> T + Sync) -> Vec<T> {
    let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
    let listeners: Vec<MeshListener> = (0..size).map(|_| MeshListener::bind(loopback).unwrap()).collect();
    let addresses: Vec<SocketAddr> = listeners.iter().map(MeshListener::address).collect();
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..)
            .zip(listeners)
            .map(|(rank, listener)| {
                let config = MeshConfig::new(rank, Nonce([9; 32]), addresses.clone());
                let work = &work;
                scope.spawn(move || work(MeshCommunicator::join(listener, config).unwrap()))
            })
            .collect();
        let made = ranks.into_iter().map(|rank| rank.join());
        made.map(|made| made.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// A communicator that runs an action before each allreduce.
pub(crate) struct Before<F> {
    pub(crate) inner: MeshCommunicator,
    pub(crate) before: F,
}

impl<F> Communicator for Before<F>
where
    F: Fn(&MeshCommunicator, &str) -> Result<(), CommunicatorError> + Send + Sync,
{
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn size(&self) -> u32 {
        self.inner.size()
    }

    fn transport(&self) -> &'static str {
        self.inner.transport()
    }

    fn call(&self, name: &str, collective: Collective<'_>) -> Result<(), CommunicatorError> {
        if let Collective::Allreduce { .. } = collective {
            (self.before)(&self.inner, name)?;
        }
        self.inner.call(name, collective)
    }

    fn duplicate(&self) -> Result<Box<dyn Communicator>, CommunicatorError> {
        self.inner.duplicate()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn leave(&self) -> Result<(), CommunicatorError> {
        self.inner.leave()
    }
}
