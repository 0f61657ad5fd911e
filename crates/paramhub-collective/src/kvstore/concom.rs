//! Concurrent communicators (MPI collectives in DAGs, section 4.2): keys are dealt to communicators, threads of the engine call the
//! collectives, and every few keys all ranks wait for one another.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paramhub_kernels::{Hyperparameters, Registry};

use super::entry::Entry;
use super::shelf::Shelf;
use super::{Array, Key, KvStore, StoreError, StoreKind};
use crate::communicator::{Communicator, CommunicatorError};
use crate::engine::{Engine, Kind, Variable};

pub(super) struct ConCom {
    shelf: Shelf,
    /// The one all others are copies of: for barriers and first values.
    communicator: Box<dyn Communicator>,
    /// Keys are dealt to these. An allreduce mutates its communicator, so that those of one come in order.
    lines: Vec<(Arc<dyn Communicator>, Variable)>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Keys so far.
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
        // All that are outstanding at one rank may have to run for one of them to end at another.
        if outstanding == 0 || outstanding > threads {
            return Err(StoreError::Options(format!(
                "{outstanding} keys at a time need as many threads that communicate, and the engine has {threads}: choose 1 to {threads}, \
                 or give the engine more"
            )));
        }
        communicator.check_threads()?;
        let lines = (0..outstanding).map(|_| Ok((Arc::from(communicator.duplicate()?), engine.variable())));
        let lines = lines.collect::<Result<_, CommunicatorError>>()?;
        let shelf = Shelf::new(engine, registry, communicator.size());
        Ok(ConCom { shelf, communicator, lines, state: Mutex::default() })
    }

    /// Waits until nothing is outstanding here.
    fn settle(&self, state: &mut State) -> Result<(), StoreError> {
        for entry in state.outstanding.drain(..) {
            self.shelf.engine.wait_for_var(entry.buffer.variable())?;
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
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
        &self.shelf.engine
    }

    fn init(&self, key: &Key, value: &Array) -> Result<(), StoreError> {
        let entry = self.shelf.add(key, value)?;
        entry.set_line({
            let mut state = self.state();
            state.keys += 1;
            (state.keys - 1) % self.lines.len()
        });
        self.shelf.engine.wait_to_mutate(entry.buffer.variable())?;
        entry.buffer.write(|bytes| self.communicator.broadcast(&key.to_string(), bytes, 0))?;
        self.shelf.begin(&entry)
    }

    fn push(&self, key: &Key, values: &[Array], priority: i32) -> Result<(), StoreError> {
        let entry = self.shelf.entry(key, values)?;
        let mut state = self.state();
        if state.outstanding.len() == self.lines.len() {
            self.settle(&mut state)?;
            self.communicator.barrier()?;
        }
        self.shelf.copy_in(&entry, values, priority)?;
        self.shelf.engine.wait_to_mutate(entry.buffer.variable())?;
        let (communicator, line) = &self.lines[entry.line()];
        let (communicator, here) = (Arc::clone(communicator), Arc::clone(&entry));
        self.shelf
            .engine
            .operation(format!("allreduce {key}"), Kind::Communicate)
            .mutates([entry.buffer.variable(), line])
            .push(move || {
                let (key, dtype) = (here.key.to_string(), here.buffer.dtype());
                here.buffer.write(|bytes| communicator.allreduce(&key, bytes, dtype))
            })?;
        state.outstanding.push(Arc::clone(&entry));
        drop(state);
        self.shelf.update(&entry, priority)
    }

    fn pull(&self, key: &Key, outs: &[Array], priority: i32) -> Result<(), StoreError> {
        let entry = self.shelf.entry(key, outs)?;
        self.shelf.copy_out(&entry, outs, priority)
    }

    fn set_optimizer(&self, name: &str, hyperparameters: Hyperparameters) -> Result<(), StoreError> {
        self.shelf.set_optimizer(name, hyperparameters)
    }

    fn set_hyperparameters(&self, hyperparameters: Hyperparameters) -> Result<(), StoreError> {
        self.shelf.set_hyperparameters(hyperparameters)
    }

    fn barrier(&self) -> Result<(), StoreError> {
        self.settle(&mut self.state())?;
        self.shelf.engine.wait_for_all()?;
        Ok(self.communicator.barrier()?)
    }

    fn leave(&self) -> Result<(), StoreError> {
        self.settle(&mut self.state())?;
        self.shelf.engine.wait_for_all()?;
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
