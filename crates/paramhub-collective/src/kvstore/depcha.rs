//! Dependency chaining (MPI collectives in DAGs, section 4.3): a push copies, a pull reduces, and every
//! collective mutates a dummy variable, which keeps the collectives in the order of the pulls.

use std::sync::Arc;

use paramhub_kernels::{Hyperparameters, Registry};

use super::entry::Entry;
use super::entry_table::EntryTable;
use super::{Array, Key, KvStore, OptimizerState, StoreError, StoreKind};
use crate::communicator::{Communicator, CommunicatorError};
use crate::engine::{Engine, Kind, Variable};

pub(super) struct DepCha {
    table: EntryTable,
    communicator: Arc<dyn Communicator>,
    /// The variable that all collectives mutate: it stands for no data, and runs them one after the other.
    dummy: Variable,
}

impl DepCha {
    pub(super) fn new(
        engine: Arc<Engine>,
        registry: Registry,
        communicator: Box<dyn Communicator>,
    ) -> DepCha {
        let (ranks, dummy) = (communicator.size(), engine.variable());
        DepCha {
            table: EntryTable::new(engine, registry, ranks),
            communicator: Arc::from(communicator),
            dummy,
        }
    }

    /// Pushes a collective that works in a key's buffer and then, where the sum itself is pulled, copies it
    /// to `outs`.
    fn chain(
        &self,
        what: &str,
        entry: &Arc<Entry>,
        outs: &[Array],
        call: impl FnOnce(&dyn Communicator, &Entry, &mut [u8]) -> Result<(), CommunicatorError> + Send + 'static,
    ) -> Result<(), StoreError> {
        let (communicator, here, theirs) = (Arc::clone(&self.communicator), Arc::clone(entry), outs.to_vec());
        let mutated = [entry.buffer.variable(), &self.dummy];
        self.table
            .engine
            .operation(format!("{what} {}", entry.key), Kind::Communicate)
            .mutates(mutated.into_iter().chain(outs.iter().map(Array::variable)))
            .push(move || -> Result<(), CommunicatorError> {
                here.buffer.write(|bytes| call(&*communicator, &here, bytes))?;
                here.buffer.copy_to(&theirs);
                Ok(())
            })?;
        Ok(())
    }

    /// Pushes the reduction of a key's last push.
    fn reduce(&self, entry: &Arc<Entry>, outs: &[Array]) -> Result<(), StoreError> {
        self.chain("allreduce", entry, outs, |communicator, entry, bytes| {
            communicator.allreduce(&entry.key.to_string(), bytes, entry.buffer.dtype())
        })
    }

    /// Pushes the reductions of all keys that were pushed and not pulled.
    fn reduce_pending(&self) -> Result<(), StoreError> {
        for entry in self.table.entries().iter().filter(|entry| entry.set_pending(false)) {
            self.reduce(entry, &[])?;
            self.table.update(entry, 0)?;
        }
        Ok(())
    }

    /// Pushes a collective without memory.
    fn call(
        &self,
        what: &'static str,
        call: impl FnOnce(&dyn Communicator) -> Result<(), CommunicatorError> + Send + 'static,
    ) -> Result<(), StoreError> {
        let communicator = Arc::clone(&self.communicator);
        self.table
            .engine
            .operation(what, Kind::Communicate)
            .mutates([&self.dummy])
            .push(move || call(&*communicator))?;
        Ok(self.table.engine.wait_for_all()?)
    }
}

impl KvStore for DepCha {
    fn kind(&self) -> StoreKind {
        StoreKind::DepCha
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
        self.chain("broadcast", &entry, &[], |communicator, entry, bytes| {
            communicator.broadcast(&entry.key.to_string(), bytes, 0)
        })?;
        self.table.set_initial_value(&entry)
    }

    fn push(&self, key: &Key, values: &[Array], priority: i32) -> Result<(), StoreError> {
        let entry = self.table.entry(key, values)?;
        if entry.set_pending(true) {
            // The previous push was never pulled, but it counts.
            self.reduce(&entry, &[])?;
            self.table.update(&entry, priority)?;
        }
        self.table.sum_into_buffer(&entry, values, priority)
    }

    fn pull(&self, key: &Key, outs: &[Array], priority: i32) -> Result<(), StoreError> {
        let entry = self.table.entry(key, outs)?;
        if !entry.set_pending(false) {
            return self.table.copy_out(&entry, outs, priority);
        }
        if self.table.has_optimizer() {
            self.reduce(&entry, &[])?;
            self.table.update(&entry, priority)?;
            return self.table.copy_out(&entry, outs, priority);
        }
        // As in the paper, one operation reduces and copies back.
        self.reduce(&entry, outs)?;
        self.table.update(&entry, priority)
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
        self.reduce_pending()?;
        self.call("barrier", |communicator| communicator.barrier())
    }

    fn leave(&self) -> Result<(), StoreError> {
        self.reduce_pending()?;
        self.call("leave", |communicator| communicator.leave())
    }

    fn abort(&self, reason: &str) {
        self.communicator.abort(reason);
    }

    fn failure(&self) -> Option<StoreError> {
        self.communicator.failure().map(StoreError::from)
    }
}
