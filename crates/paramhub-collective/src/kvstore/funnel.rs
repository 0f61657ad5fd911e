//! The funneled design (MPI collectives in DAGs, section 4.1): the caller's thread does all the
//! communication, in the order of its calls.

use std::sync::Arc;

use paramhub_kernels::{Hyperparameters, Registry};

use super::entry_table::EntryTable;
use super::{Array, Key, KvStore, OptimizerState, StoreError, StoreKind};
use crate::communicator::Communicator;
use crate::engine::Engine;

pub(super) struct Funnel {
    table: EntryTable,
    communicator: Box<dyn Communicator>,
}

impl Funnel {
    pub(super) fn new(
        engine: Arc<Engine>,
        registry: Registry,
        communicator: Box<dyn Communicator>,
    ) -> Funnel {
        Funnel { table: EntryTable::new(engine, registry, communicator.size()), communicator }
    }
}

impl KvStore for Funnel {
    fn kind(&self) -> StoreKind {
        StoreKind::Funnel
    }

    fn rank(&self) -> u32 {
        self.communicator.rank()
    }

    fn size(&self) -> u32 {
        self.communicator.size()
    }

    fn engine(&self) -> &Arc<Engine> {
        &self.table.engine
    }

    fn init(&self, key: &Key, value: &Array) -> Result<(), StoreError> {
        let entry = self.table.add(key, value)?;
        self.table.engine.wait_to_mutate(entry.buffer.variable())?;
        entry.buffer.write(|bytes| self.communicator.broadcast(&key.to_string(), bytes, 0))?;
        self.table.set_initial_value(&entry)
    }

    fn push(&self, key: &Key, values: &[Array], priority: i32) -> Result<(), StoreError> {
        let entry = self.table.entry(key, values)?;
        self.table.sum_into_buffer(&entry, values, priority)?;
        // The engine's threads go on meanwhile.
        self.table.engine.wait_to_mutate(entry.buffer.variable())?;
        let dtype = entry.buffer.dtype();
        entry.buffer.write(|bytes| self.communicator.allreduce(&key.to_string(), bytes, dtype))?;
        self.table.update(&entry, priority)
    }

    fn pull(&self, key: &Key, outs: &[Array], priority: i32) -> Result<(), StoreError> {
        let entry = self.table.entry(key, outs)?;
        self.table.copy_out(&entry, outs, priority)
    }

    fn set_optimizer(&self, name: &str, hyperparameters: Hyperparameters) -> Result<(), StoreError> {
        self.table.set_optimizer(name, hyperparameters)
    }

    fn add_group(&self, keys: &[Key], hyperparameters: Hyperparameters) -> Result<u16, StoreError> {
        self.table.add_group(keys, hyperparameters)
    }

    fn set_hyperparameters(&self, group: u16, hyperparameters: Hyperparameters) -> Result<(), StoreError> {
        self.table.set_hyperparameters(group, hyperparameters)
    }

    fn optimizer_state(&self, key: &Key) -> Result<OptimizerState, StoreError> {
        self.table.optimizer_state(key)
    }

    fn set_optimizer_state(&self, key: &Key, state: OptimizerState) -> Result<(), StoreError> {
        self.table.set_optimizer_state(key, state)
    }

    fn barrier(&self) -> Result<(), StoreError> {
        self.table.engine.wait_for_all()?;
        Ok(self.communicator.barrier()?)
    }

    fn leave(&self) -> Result<(), StoreError> {
        self.table.engine.wait_for_all()?;
        Ok(self.communicator.leave()?)
    }

    fn abort(&self, reason: &str) {
        self.communicator.abort(reason);
    }

    fn failure(&self) -> Option<StoreError> {
        self.communicator.failure().map(StoreError::from)
    }
}
