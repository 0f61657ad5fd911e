//! Concurrent communicators (MPI collectives in DAGs, section 4.2): the store distributes keys over
//! communicators, threads of the engine call the collectives, and every few keys all ranks wait for one
//! another.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paramhub_kernels::{Hyperparameters, Registry};

use super::entry::Entry;
use super::entry_table::EntryTable;
use super::{Array, Key, KvStore, OptimizerState, StoreError, StoreKind};
use crate::communicator::{Communicator, CommunicatorError};
use crate::engine::{Engine, Kind, Variable};

pub(super) struct ConCom {
    table: EntryTable,
    /// The communicator that all others duplicate: for barriers and initial values.
    communicator: Box<dyn Communicator>,
    /// The communicators for the keys. An allreduce mutates its communicator's variable, so that those of one
    /// communicator come in order.
    lines: Vec<(Arc<dyn Communicator>, Variable)>,
    state: Mutex<ConComState>,
}

#[derive(Default)]
struct ConComState {
    /// The number of keys so far.
    keys: usize,
    /// Allreduces pushed since the last barrier (the paper's `mpi_outstanding`).
    outstanding: Vec<Arc<Entry>>,
}

impl ConCom {
    pub(super) fn new(
        engine: Arc<Engine>,
        registry: Registry,
        communicator: Box<dyn Communicator>,
        outstanding: Option<usize>,
    ) -> Result<ConCom, StoreError> {
        let threads = engine.threads(Kind::Communicate);
        let outstanding = outstanding.unwrap_or(threads);
        // All outstanding collectives of one rank may have to run for one of them to end at another.
        if outstanding == 0 || outstanding > threads {
            return Err(StoreError::Options(format!(
                "{outstanding} keys at a time need as many threads that communicate, and the engine has {threads}: choose 1 to {threads}, \
                 or give the engine more"
            )));
        }
        communicator.check_threads()?;
        let lines = (0..outstanding).map(|_| Ok((Arc::from(communicator.duplicate()?), engine.variable())));
        let lines = lines.collect::<Result<_, CommunicatorError>>()?;
        let table = EntryTable::new(engine, registry, communicator.size());
        Ok(ConCom { table, communicator, lines, state: Mutex::default() })
    }

    /// Waits until no allreduce is outstanding here.
    fn settle(&self, state: &mut ConComState) -> Result<(), StoreError> {
        for entry in state.outstanding.drain(..) {
            self.table.engine.wait_for_var(entry.buffer.variable())?;
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, ConComState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KvStore for ConCom {
    fn kind(&self) -> StoreKind {
        StoreKind::ConCom
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
        entry.set_line({
            let mut state = self.state();
            state.keys += 1;
            (state.keys - 1) % self.lines.len()
        });
        self.table.engine.wait_to_mutate(entry.buffer.variable())?;
        entry.buffer.write(|bytes| self.communicator.broadcast(&key.to_string(), bytes, 0))?;
        self.table.set_initial_value(&entry)
    }

    fn push(&self, key: &Key, values: &[Array], priority: i32) -> Result<(), StoreError> {
        let entry = self.table.entry(key, values)?;
        let mut state = self.state();
        if state.outstanding.len() == self.lines.len() {
            self.settle(&mut state)?;
            self.communicator.barrier()?;
        }
        self.table.sum_into_buffer(&entry, values, priority)?;
        self.table.engine.wait_to_mutate(entry.buffer.variable())?;
        let (communicator, line) = &self.lines[entry.line()];
        let (communicator, here) = (Arc::clone(communicator), Arc::clone(&entry));
        self.table
            .engine
            .operation(format!("allreduce {key}"), Kind::Communicate)
            .mutates([entry.buffer.variable(), line])
            .push(move || {
                let (key, dtype) = (here.key.to_string(), here.buffer.dtype());
                here.buffer.write(|bytes| communicator.allreduce(&key, bytes, dtype))
            })?;
        state.outstanding.push(Arc::clone(&entry));
        drop(state);
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
        self.settle(&mut self.state())?;
        self.table.engine.wait_for_all()?;
        Ok(self.communicator.barrier()?)
    }

    fn leave(&self) -> Result<(), StoreError> {
        self.settle(&mut self.state())?;
        self.table.engine.wait_for_all()?;
        for (communicator, _) in &self.lines {
            communicator.leave()?;
        }
        Ok(self.communicator.leave()?)
    }

    fn abort(&self, reason: &str) {
        self.lines.iter().for_each(|(communicator, _)| communicator.abort(reason));
        self.communicator.abort(reason);
    }

    fn failure(&self) -> Option<StoreError> {
        let lines = self.lines.iter().find_map(|(communicator, _)| communicator.failure());
        lines.or_else(|| self.communicator.failure()).map(StoreError::from)
    }
}
