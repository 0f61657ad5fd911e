//! Keys between the network and a store: gradients are pushed, sums are pulled, and new parameters are
//! computed from the sums.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use paramhub_collective::engine::{Engine, Kind, PushError, Variable};
use paramhub_collective::kvstore::{Array, Key, KvStore, StoreError, StoreKind};
use paramhub_kernels::{Hyperparameters, Optimizer, Step};

use super::meter::Meter;
use crate::net::{Network, SharedParameters};
use crate::trainer::TrainError;

/// All keys of a network.
pub(super) struct Keys {
    keys: Vec<Parameter>,
    /// The variable of each key's parameters in the network.
    variables: Vec<Variable>,
    /// The gradients of each key, for each of this process's shards. Those of the first shard also receive
    /// the sums.
    gradients: Vec<Vec<Array>>,
    meter: Arc<Meter>,
}

/// The way in which sums become parameters.
#[derive(Clone)]
pub(super) struct Updater {
    pub(super) optimizer: Arc<dyn Optimizer>,
    pub(super) hyperparameters: Hyperparameters,
    /// Shards in a sum.
    pub(super) workers: u32,
}

struct Parameter {
    key: Key,
    parameters: SharedParameters,
    state: Arc<Mutex<ParameterState>>,
}

/// The optimizer's state for one key.
struct ParameterState {
    values: Vec<f32>,
    updates: u64,
}

impl Keys {
    /// Gives every key rank 0's value, in the store and in the network.
    pub(super) fn new(
        network: &mut Network,
        store: &dyn KvStore,
        shards: usize,
        updater: &Updater,
        meter: Arc<Meter>,
    ) -> Result<Keys, TrainError> {
        let engine = store.engine();
        let slots = updater.optimizer.state_slots(&updater.hyperparameters);
        let arrays = |network: &Network| -> Vec<Array> {
            network.all_parameters().into_iter().map(|values| Array::new(engine, values)).collect()
        };
        let (mut keys, initial) = (Vec::new(), arrays(network));
        for (at, value) in initial.iter().enumerate() {
            let key = Key::from(network.keys()[at].name.as_str());
            store.init(&key, value)?;
            store.pull(&key, std::slice::from_ref(value), 0)?;
            let state = ParameterState { values: vec![0.0; slots * value.elements()], updates: 0 };
            let parameters = network.shared_parameters(at);
            keys.push(Parameter { key, parameters, state: Arc::new(Mutex::new(state)) });
        }
        for (at, value) in initial.iter().enumerate() {
            let values = value.to_vec(engine).map_err(StoreError::from)?;
            network.lend_parameters(at, |parameters| *parameters = values)?;
        }
        Ok(Keys {
            variables: keys.iter().map(|_| engine.variable()).collect(),
            gradients: (0..shards).map(|_| arrays(network)).collect(),
            keys,
            meter,
        })
    }

    pub(super) fn variables(&self) -> &[Variable] {
        &self.variables
    }

    /// The gradients of a shard, counted from this process's first.
    pub(super) fn gradients(&self, shard: usize) -> &[Array] {
        &self.gradients[shard]
    }

    /// Bytes of all gradients.
    pub(super) fn bytes(&self) -> usize {
        self.gradients[0].iter().map(Array::bytes).sum()
    }

    /// Pushes the reduction of all keys' gradients, and the updates with the sums, in the order in which
    /// gradients come: last layers first.
    pub(super) fn push_exchange(&self, store: &dyn KvStore, updater: &Updater) -> Result<(), StoreError> {
        let order = || (0..self.keys.len()).rev();
        // With depcha all pulls come after all pushes, so that no copy waits behind a collective. In the
        // other stores a pull is only the copy back.
        let is_apart = store.kind() == StoreKind::DepCha;
        for at in order() {
            let own: Vec<Array> = self.gradients.iter().map(|shard| shard[at].clone()).collect();
            store.push(&self.keys[at].key, &own, at as i32)?;
            if !is_apart {
                self.push_pull(store, at, updater)?;
            }
        }
        for at in order().filter(|_| is_apart) {
            self.push_pull(store, at, updater)?;
        }
        Ok(())
    }

    fn push_pull(&self, store: &dyn KvStore, at: usize, updater: &Updater) -> Result<(), StoreError> {
        let sum = &self.gradients[0][at];
        store.pull(&self.keys[at].key, std::slice::from_ref(sum), at as i32)?;
        if store.kind() != StoreKind::Local {
            self.push_arrival(store.engine(), at, sum)?;
        }
        Ok(self.push_update(store.engine(), at, sum, updater)?)
    }

    /// Pushes an operation that records the arrival of a sum. The update would record it too late, since it
    /// waits for a compute thread.
    fn push_arrival(&self, engine: &Engine, at: usize, sum: &Array) -> Result<(), PushError> {
        let meter = Arc::clone(&self.meter);
        engine
            .operation(format!("arrival {}", self.keys[at].key), Kind::Copy)
            .reads([sum.variable()])
            .priority(i32::MAX)
            .push(move || -> Result<(), Infallible> {
                meter.arrive();
                Ok(())
            })
    }

    fn push_update(
        &self,
        engine: &Engine,
        at: usize,
        sum: &Array,
        updater: &Updater,
    ) -> Result<(), PushError> {
        let Parameter { key, parameters, state } = &self.keys[at];
        let (parameters, state, meter) = (parameters.clone(), Arc::clone(state), Arc::clone(&self.meter));
        let (from, updater) = (sum.clone(), updater.clone());
        engine
            .operation(format!("update {key}"), Kind::Compute)
            .reads([sum.variable()])
            .mutates([&self.variables[at]])
            .push(move || -> Result<(), Infallible> {
                meter.computes(|| {
                    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
                    let ParameterState { values, updates } = &mut *state;
                    *updates += 1;
                    let step = Step {
                        hyperparameters: &updater.hyperparameters,
                        number: *updates,
                        contributions: updater.workers,
                        factor: 1.0,
                        tensor: None,
                    };
                    from.read(|bytes| {
                        let sum = bytemuck::cast_slice(bytes);
                        parameters.update(|parameters| {
                            updater.optimizer.apply_to_tensor(&step, parameters, sum, values);
                        });
                    });
                });
                Ok(())
            })
    }
}
