//! A key-value store of a process that is its only rank: it sums only the arrays of this process.

use std::sync::Arc;

use paramhub_kernels::{Hyperparameters, Registry};

use super::entry_table::EntryTable;
use super::{Array, Key, KvStore, OptimizerState, StoreError, StoreKind};
use crate::engine::Engine;

/// A store without an exchange: the sum of this process's arrays is the sum of all ranks.
pub(super) struct LocalStore {
    table: EntryTable,
}

impl LocalStore {
    pub(super) fn new(engine: Arc<Engine>, registry: Registry) -> LocalStore {
        let ranks = 1;
        LocalStore { table: EntryTable::new(engine, registry, ranks) }
    }
}

impl KvStore for LocalStore {
    fn kind(&self) -> StoreKind {
        StoreKind::Local
    }

    fn rank(&self) -> u32 {
        0
    }

    fn size(&self) -> u32 {
        1
    }

    fn engine(&self) -> &Arc<Engine> {
        &self.table.engine
    }

    fn init(&self, key: &Key, value: &Array) -> Result<(), StoreError> {
        let entry = self.table.add(key, value)?;
        self.table.set_initial_value(&entry)
    }

    fn push(&self, key: &Key, values: &[Array], priority: i32) -> Result<(), StoreError> {
        let entry = self.table.entry(key, values)?;
        self.table.sum_into_buffer(&entry, values, priority)?;
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
        Ok(self.table.engine.wait_for_all()?)
    }

    fn leave(&self) -> Result<(), StoreError> {
        self.barrier()
    }

    /// Does nothing: there is no other rank to receive the reason, and no call that waits for another rank.
    fn abort(&self, _reason: &str) {}

    /// Returns `None`: there is no exchange between ranks that could fail.
    fn failure(&self) -> Option<StoreError> {
        None
    }
}
