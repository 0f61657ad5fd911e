//! Training as a graph of operations: every node's forward and backward pass and every key's exchange and
//! update is pushed to a dependency engine and runs when its data is ready (MPI collectives in DAGs, sections
//! 3 and 4).
//!
//! The thread that calls [`train`] computes nothing. It pushes one step after the other, in the same order at
//! all ranks, and is at most one step ahead of the losses that it receives. The variables decide what
//! overlaps: the branches of a network, if there are threads for that; gradients of the layers above under
//! way while those below compute; updates of one key while another is summed; and the forward pass of the
//! next step, of which each layer waits for its own parameters alone.

mod keys;
mod meter;
mod passes;
mod variable_cell;

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_collective::engine::EngineConfig;
use paramhub_collective::kvstore::{KvStore, StoreError, StoreKind};
use paramhub_kernels::{Hyperparameters, Optimizer};

use crate::data::{Data, EpochOrder};
use crate::net::Network;
use crate::trainer::{Epoch, Evaluate, Mean, Progress, Report, TrainConfig, TrainError, check};
use keys::{Keys, Updater};
pub use meter::{Meter, Times};
use passes::Passes;
use variable_cell::VariableCell;

/// Steps that may be pushed beside the newest before their losses have come.
const STEPS_AHEAD: usize = 1;

/// The way in which gradients are summed, and how parameters are computed from the sums.
pub struct Learner<'a> {
    /// The store that sums what all ranks push. It has no optimizer, and no keys of the network yet.
    pub store: &'a dyn KvStore,
    /// Workers whose shards each rank computes, one after the other on the same parameters: 1, or all workers
    /// of a local store.
    pub workers_per_rank: NonZeroUsize,
    /// Computes parameters from the sums, in the same way at every rank.
    pub optimizer: Arc<dyn Optimizer>,
    /// Hyperparameters that the optimizer has [accepted](Optimizer::check).
    pub hyperparameters: Hyperparameters,
}

/// The configuration of an engine for a trainer with this many compute threads: one, unless the worker has a
/// machine to itself.
pub fn engine_config(compute_threads: NonZeroUsize) -> EngineConfig {
    EngineConfig { compute_threads: compute_threads.get(), ..EngineConfig::default() }
}

/// Trains a network through a store, in whose engine all operations run.
///
/// All ranks have the same configuration and data, and begin with rank 0's parameters. The report is this
/// process's. Its bytes are those of the gradients pushed to the store and of the sums pulled from it,
/// however often the store sends them. Its waiting time is that in which nothing computed. No operation is in
/// flight when this returns.
///
/// # Errors
/// The first thing that fails; of operations, the first that was pushed. The network's parameters are then of no step.
pub fn train(
    config: &TrainConfig,
    data: &Arc<Data>,
    network: &mut Network,
    learner: &Learner<'_>,
    on_progress: &mut dyn FnMut(&Progress),
) -> Result<Report, TrainError> {
    let store = learner.store;
    let shards = learner.workers_per_rank.get();
    let workers = store.size() as usize * shards;
    let steps_per_epoch = check(config, data, network, workers)?;
    let meter = Arc::new(Meter::new());
    let updater = Updater {
        optimizer: Arc::clone(&learner.optimizer),
        hyperparameters: learner.hyperparameters,
        workers: u32::try_from(workers).expect("there is an example for each worker"),
    };
    let keys = Keys::new(network, store, shards, &updater, Arc::clone(&meter))?;
    let passes = Passes::new(store.engine(), network, Arc::clone(&meter));
    let first = store.rank() as usize * shards;
    let mut run = Run {
        config,
        data,
        network,
        store,
        workers,
        ranks: first..first + shards,
        steps: config.epochs * steps_per_epoch,
        steps_per_epoch,
        updater,
        keys,
        passes,
        meter,
        started: Instant::now(),
        evaluating: Duration::ZERO,
        pending: VecDeque::new(),
        settled: 0,
        loss: Mean::default(),
        epochs: Vec::new(),
    };
    let done = run.all_steps(on_progress).and_then(|()| run.finish());
    if done.is_err() {
        // The error is returned already, and operations that depend on the failed one do not run.
        let _ = store.engine().wait_for_all();
    }
    done
}

struct Run<'a> {
    config: &'a TrainConfig,
    data: &'a Arc<Data>,
    network: &'a mut Network,
    store: &'a dyn KvStore,
    workers: usize,
    /// The ranks whose shards are computed here.
    ranks: Range<usize>,
    steps: usize,
    steps_per_epoch: usize,
    updater: Updater,
    keys: Keys,
    passes: Passes,
    meter: Arc<Meter>,
    started: Instant,
    evaluating: Duration,
    /// The losses that have yet to come: for each step those of its shards.
    pending: VecDeque<Vec<VariableCell<f64>>>,
    /// Steps whose losses have come.
    settled: usize,
    /// The mean loss of the epoch in which the last of these steps is.
    loss: Mean,
    epochs: Vec<Epoch>,
}

impl Run<'_> {
    fn all_steps(&mut self, on_progress: &mut dyn FnMut(&Progress)) -> Result<(), TrainError> {
        for epoch in 0..self.config.epochs {
            let (seed, batch) = (self.config.seed, self.config.batch);
            let order = EpochOrder::new(&self.data.train, seed, epoch, self.workers, batch);
            for step in 0..self.steps_per_epoch {
                self.push_step(&order, step)?;
                self.settle(STEPS_AHEAD, on_progress)?;
            }
            if let Evaluate::Every(every) = self.config.evaluate
                && (epoch + 1) % every.max(1) == 0
            {
                self.settle(0, on_progress)?;
                let accuracy = self.accuracy()?;
                let ended = self.epochs.last_mut().expect("an epoch has steps");
                ended.accuracy = Some(accuracy);
                // The progress of this step was reported when its loss came; it is reported again with the
                // accuracy.
                let (epoch, loss) = (ended.epoch, ended.loss);
                on_progress(&self.progress(epoch, loss, Some(accuracy)));
            }
        }
        self.settle(0, on_progress)
    }

    fn push_step(&mut self, order: &EpochOrder, step: usize) -> Result<(), TrainError> {
        let Run { store, keys, passes, .. } = self;
        let engine = store.engine();
        let mut losses = Vec::new();
        for (shard, rank) in self.ranks.clone().enumerate() {
            let examples = order.shard(step, rank).collect();
            let pushed = passes.push_forward(engine, self.data, examples, keys.variables());
            losses.push(pushed.map_err(StoreError::from)?);
            let count_as_sent = rank + 1 == self.ranks.end && store.kind() != StoreKind::Local;
            passes
                .push_backward(engine, keys.variables(), keys.gradients(shard), count_as_sent)
                .map_err(StoreError::from)?;
        }
        keys.push_exchange(*store, &self.updater)?;
        self.pending.push_back(losses);
        Ok(())
    }

    /// The progress after the last step whose loss has come.
    fn progress(&self, epoch: usize, loss: f64, accuracy: Option<f64>) -> Progress {
        let examples = self.settled * self.ranks.len() * self.config.batch;
        let seconds = self.started.elapsed().saturating_sub(self.evaluating).as_secs_f64();
        let examples_per_second = examples as f64 / seconds;
        Progress { step: self.settled, of: self.steps, epoch, loss, examples_per_second, accuracy }
    }

    /// Waits until the losses of all but `but` steps have come.
    fn settle(&mut self, but: usize, on_progress: &mut dyn FnMut(&Progress)) -> Result<(), TrainError> {
        while self.pending.len() > but {
            let losses = self.pending.pop_front().expect("there are more than none");
            let mut step_loss = Mean::default();
            for loss in losses {
                self.store.engine().wait_for_var(loss.variable()).map_err(StoreError::from)?;
                step_loss += loss.take();
            }
            let epoch = self.settled / self.steps_per_epoch + 1;
            if self.settled.is_multiple_of(self.steps_per_epoch) {
                self.loss = Mean::default();
            }
            self.loss += step_loss.value();
            self.settled += 1;
            on_progress(&self.progress(epoch, step_loss.value(), None));
            if self.settled.is_multiple_of(self.steps_per_epoch) {
                let (step, loss) = (self.settled, self.loss.value());
                self.epochs.push(Epoch { epoch, step, loss, accuracy: None });
            }
        }
        Ok(())
    }

    /// Waits for the parameters of the last step that was pushed, and measures their accuracy.
    fn accuracy(&mut self) -> Result<f64, TrainError> {
        self.store.engine().wait_for_all().map_err(StoreError::from)?;
        let started = Instant::now();
        let accuracy = self.network.accuracy(&self.data.test);
        self.evaluating += started.elapsed();
        Ok(accuracy)
    }

    fn finish(&mut self) -> Result<Report, TrainError> {
        self.store.engine().wait_for_all().map_err(StoreError::from)?;
        let elapsed = self.started.elapsed().saturating_sub(self.evaluating);
        let times = self.meter.times();
        let bytes = match self.store.kind() {
            StoreKind::Local => 0,
            _ => (self.keys.bytes() * self.settled) as u64,
        };
        let accuracy = match (self.config.evaluate, self.epochs.last()) {
            (Evaluate::Never, _) => None,
            (Evaluate::Every(_), Some(Epoch { accuracy: Some(accuracy), .. })) => Some(*accuracy),
            _ => Some(self.accuracy()?),
        };
        Ok(Report {
            steps: self.settled,
            seconds: elapsed.as_secs_f64(),
            loss: self.loss.value(),
            accuracy,
            epochs: std::mem::take(&mut self.epochs),
            compute_seconds: times.computing.as_secs_f64(),
            wait_seconds: elapsed.saturating_sub(times.computing).as_secs_f64(),
            exchange_seconds: times.in_flight.as_secs_f64(),
            hidden_fraction: match times.in_flight.is_zero() {
                true => 0.0,
                false => times.hidden.as_secs_f64() / times.in_flight.as_secs_f64(),
            },
            bytes_sent: bytes,
            bytes_received: bytes,
            parameters: self.network.all_parameters(),
        })
    }
}
