//! Training with other workers: one rank of a job.

use std::ops::Range;

use paramhub_syncer::{LayerFactors, SyncError, Syncers};

use crate::exchange::{Exchange, ExchangeError, ExchangeStatistics};

/// An [`Exchange`] with the other ranks of a job, whose keys are those of the network, in the same order.
/// Each of the job's layers is exchanged by the scheme that the job's plan gives it. Parameters arrive in
/// memory that is exchanged for the network's, so that nothing is copied and nothing is allocated per step.
pub struct HubExchange {
    syncers: Syncers,
}

impl HubExchange {
    /// An exchange through a job that all ranks have joined with the network's keys and an optimizer.
    pub fn new(syncers: Syncers) -> Self {
        HubExchange { syncers }
    }

    /// Leaves the job when all requests under way have ended.
    ///
    /// # Errors
    /// If the job failed before.
    pub fn leave(self) -> Result<(), ExchangeError> {
        self.syncers.leave().map_err(remote)
    }

    fn check(&self, key: usize) -> Result<u32, ExchangeError> {
        match u32::try_from(key) {
            Ok(number) if key < self.syncers.job().settings().keys.len() => Ok(number),
            _ => Err(ExchangeError::Sequence { key, reason: "the network has no such key" }),
        }
    }
}

impl Exchange for HubExchange {
    fn workers(&self) -> usize {
        self.syncers.job().workers() as usize
    }

    fn ranks(&self) -> Range<usize> {
        let rank = self.syncers.job().rank() as usize;
        rank..rank + 1
    }

    fn first_step(&self) -> usize {
        self.syncers.job().resumed_step().unwrap_or(0) as usize
    }

    fn push(&mut self, key: usize, gradient: Vec<f32>) -> Result<(), ExchangeError> {
        let number = self.check(key)?;
        self.syncers.send(number, gradient).map_err(remote)
    }

    fn takes_factors(&self, weight: usize) -> bool {
        self.check(weight).is_ok_and(|weight| self.syncers.takes_factors(self.syncers.of_key(weight)))
    }

    fn push_factors(
        &mut self,
        weight: usize,
        inputs: &[f32],
        output_gradients: &[f32],
    ) -> Result<(), ExchangeError> {
        let layer = self.syncers.of_key(self.check(weight)?);
        let factors = LayerFactors::of_f32(inputs, output_gradients);
        self.syncers.send_factors(layer, factors).map_err(remote)
    }

    fn parameters(&mut self, key: usize, parameters: &mut Vec<f32>) -> Result<(), ExchangeError> {
        let number = self.check(key)?;
        if !self.syncers.has_begun(number) {
            return self.syncers.begin(number, parameters).map_err(remote);
        }
        self.syncers.receive(self.syncers.of_key(number)).map_err(remote)?;
        // The trainer computes each step's gradient into new memory.
        drop(self.syncers.move_out(number, parameters));
        Ok(())
    }

    fn next_step(&self, done: usize) -> usize {
        self.syncers.next_step(u32::try_from(done).unwrap_or(u32::MAX)) as usize
    }

    fn statistics(&self) -> ExchangeStatistics {
        let statistics = self.syncers.statistics();
        ExchangeStatistics {
            in_flight: statistics.in_flight,
            exposed: statistics.exposed,
            bytes_sent: statistics.bytes_sent,
            bytes_received: statistics.bytes_received,
        }
    }
}

fn remote(error: SyncError) -> ExchangeError {
    ExchangeError::Remote(Box::new(error))
}
