//! A store of one process.

use std::sync::Arc;

use paramhub_kernels::{Hyperparameters, Registry};

use super::shelf::Shelf;
use super::{Array, Key, KvStore, StoreError, StoreKind};
use crate::engine::Engine;

pub(super) struct Local {
    shelf: Shelf,
}

impl Local {
    pub(super) fn new(engine: Arc<Engine>, registry: Registry) -> Local {
        Local { shelf: Shelf::new(engine, registry, 1) }
    }
}

impl KvStore for Local {
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
        &self.shelf.engine
    }

    fn init(&self, key: &Key, value: &Array) -> Result<(), StoreError> {
        let entry = self.shelf.add(key, value)?;
        self.shelf.begin(&entry)
    }

    fn push(&self, key: &Key, values: &[Array], priority: i32) -> Result<(), StoreError> {
        let entry = self.shelf.entry(key, values)?;
        self.shelf.copy_in(&entry, values, priority)?;
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
        Ok(self.shelf.engine.wait_for_all()?)
    }

    fn leave(&self) -> Result<(), StoreError> {
        self.barrier()
    }

    fn abort(&self, _reason: &str) {}

    fn failure(&self) -> Option<StoreError> {
        None
    }
}
