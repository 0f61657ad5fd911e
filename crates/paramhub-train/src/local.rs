//! Training without a hub: all workers' shards in one process, one after the other.

use std::ops::Range;
use std::sync::Arc;

use paramhub_core::key::Key;
use paramhub_kernels::{Aggregator, Hyperparameters, Optimizer, Step};

use crate::exchange::{Exchange, ExchangeError, ExchangeStatistics};

/// An [`Exchange`] with itself.
///
/// It sums the gradients of all ranks in rank order and applies the optimizer with the hub's own kernels. A hub in reproducible
/// mode does the same operations on the same numbers in the same order, so both end at the same bits.
pub struct LocalExchange {
    workers: usize,
    aggregator: Arc<dyn Aggregator>,
    optimizer: Arc<dyn Optimizer>,
    hyperparameters: Hyperparameters,
    keys: Vec<LocalKey>,
}

struct LocalKey {
    sum: Vec<f32>,
    state: Vec<f32>,
    /// Gradients in the sum, at most one for each worker.
    contributions: usize,
    /// The number of updates so far.
    updates: u64,
}

impl LocalExchange {
    /// An exchange between `workers` ranks that exist here only.
    ///
    /// The kernels come from a [`Registry`](paramhub_kernels::Registry); the optimizer must have accepted the
    /// hyperparameters ([`Optimizer::check`]).
    ///
    /// # Panics
    /// If there is no worker, or more than 2^32.
    pub fn new(
        keys: &[Key],
        workers: usize,
        aggregator: Arc<dyn Aggregator>,
        optimizer: Arc<dyn Optimizer>,
        hyperparameters: Hyperparameters,
    ) -> Self {
        assert!(workers > 0 && u32::try_from(workers).is_ok(), "{workers} workers");
        let slots = optimizer.state_slots(&hyperparameters);
        let keys = keys.iter().map(|key| {
            let elements = key.elements().expect("a network's keys fit in memory") as usize;
            LocalKey {
                sum: vec![0.0; elements],
                state: vec![0.0; slots * elements],
                contributions: 0,
                updates: 0,
            }
        });
        LocalExchange { workers, aggregator, optimizer, hyperparameters, keys: keys.collect() }
    }

    /// Changes the hyperparameters from the next update on.
    pub fn set_hyperparameters(&mut self, hyperparameters: Hyperparameters) {
        self.hyperparameters = hyperparameters;
    }
}

impl Exchange for LocalExchange {
    fn workers(&self) -> usize {
        self.workers
    }

    fn ranks(&self) -> Range<usize> {
        0..self.workers
    }

    fn push(&mut self, key: usize, gradient: Vec<f32>) -> Result<(), ExchangeError> {
        let workers = self.workers;
        let local = entry(&mut self.keys, key, gradient.len())?;
        match local.contributions {
            0 => self.aggregator.assign_f32(&mut local.sum, &gradient),
            n if n < workers => self.aggregator.add_f32(&mut local.sum, &gradient),
            _ => {
                return Err(ExchangeError::Sequence { key, reason: "more gradients in a step than workers" });
            }
        }
        local.contributions += 1;
        Ok(())
    }

    fn parameters(&mut self, key: usize, parameters: &mut Vec<f32>) -> Result<(), ExchangeError> {
        let workers = self.workers;
        let local = entry(&mut self.keys, key, parameters.len())?;
        if local.contributions == 0 {
            return Ok(());
        }
        if local.contributions < workers {
            return Err(ExchangeError::Sequence { key, reason: "fewer gradients in a step than workers" });
        }
        local.updates += 1;
        let step = Step {
            hyperparameters: &self.hyperparameters,
            number: local.updates,
            contributions: workers as u32,
            factor: 1.0,
            tensor: None,
        };
        self.optimizer.apply_to_tensor(&step, parameters, &local.sum, &mut local.state);
        local.contributions = 0;
        Ok(())
    }

    fn statistics(&self) -> ExchangeStatistics {
        ExchangeStatistics::default()
    }
}

fn entry(keys: &mut [LocalKey], key: usize, found: usize) -> Result<&mut LocalKey, ExchangeError> {
    match keys.get_mut(key) {
        Some(local) if local.sum.len() == found => Ok(local),
        Some(local) => Err(ExchangeError::Length { key, expected: local.sum.len(), found }),
        None => Err(ExchangeError::Sequence { key, reason: "the network has no such key" }),
    }
}
