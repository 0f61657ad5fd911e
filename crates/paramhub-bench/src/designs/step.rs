//! A step of a simulated model, as operations: a forward and a backward pass of every layer, and every key's exchange and update.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use paramhub_collective::engine::{Kind, PushError};
use paramhub_collective::kvstore::{StoreError, StoreKind};
use paramhub_train::dataflow::Meter;

use super::scenario::KeyOrder;
use super::simulated_model::{SimulatedKey, SimulatedModel, StepMarks};

/// As in a training, gradients have to travel, and a forward pass waits for its own updates anyway.
const BACKWARD: i32 = 2;
const FORWARD: i32 = 1;

pub(super) struct Step<'a> {
    pub(super) model: &'a SimulatedModel<'a>,
    pub(super) order: KeyOrder,
    /// The factor on the workload's times.
    pub(super) stretch: f64,
    /// The number of the step in its turn.
    pub(super) number: usize,
    pub(super) meter: &'a Arc<Meter>,
    pub(super) marks: &'a Arc<StepMarks>,
}

impl Step<'_> {
    /// Pushes the whole step. In some designs that waits for gradients or for other ranks.
    pub(super) fn push(&self) -> Result<(), StoreError> {
        for layer in 0..self.model.workload.layers.len() {
            self.push_forward(layer)?;
        }
        for layer in (0..self.model.workload.layers.len()).rev() {
            self.push_backward(layer)?;
        }
        self.push_exchange()
    }

    fn push_forward(&self, number: usize) -> Result<(), PushError> {
        let Step { model, marks, .. } = self;
        let layer = &model.workload.layers[number];
        let is_last = number + 1 == model.workload.layers.len();
        let loss = is_last.then(|| &model.losses[self.number % 2]);
        let (gpu, ready) = (Arc::clone(&model.gpu), Arc::clone(&model.ready[number]));
        let (meter, marks) = (Arc::clone(self.meter), Arc::clone(marks));
        let (seconds, pushed) = (self.stretch * layer.passes.forward_seconds, Instant::now());
        model
            .runtime
            .engine
            .operation(format!("forward {}", layer.name), Kind::Compute)
            .reads(self.keys_of(number).map(|key| &key.variable))
            .mutates([&model.stream].into_iter().chain(loss))
            .priority(FORWARD)
            .push(move || -> Result<(), String> {
                if number == 0 {
                    marks.begins.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
                }
                meter.computes(|| gpu.compute(ready.read().max(pushed), seconds));
                Ok(())
            })
    }

    fn push_backward(&self, number: usize) -> Result<(), PushError> {
        let Step { model, marks, .. } = self;
        let layer = &model.workload.layers[number];
        let (gpu, meter, marks) = (Arc::clone(&model.gpu), Arc::clone(self.meter), Arc::clone(marks));
        let (seconds, pushed) = (self.stretch * layer.passes.backward_seconds, Instant::now());
        let keys = layer.keys.len() as u32;
        let gradients = self.keys_of(number).map(|key| key.gradient.variable());
        model
            .runtime
            .engine
            .operation(format!("backward {}", layer.name), Kind::Compute)
            .mutates([&model.stream].into_iter().chain(gradients))
            .priority(BACKWARD)
            .push(move || -> Result<(), String> {
                let end = meter.computes(|| gpu.compute(pushed, seconds));
                meter.leave(keys);
                if number == 0 {
                    marks.end(end, meter.times());
                }
                Ok(())
            })
    }

    /// Pushes the exchange key by key. With depcha all pushes come before the first pull, so that no copy
    /// waits behind a collective.
    fn push_exchange(&self) -> Result<(), StoreError> {
        let (store, keys) = (&self.model.runtime.store, &self.model.keys);
        let is_apart = store.kind() == StoreKind::DepCha;
        let bytes: Vec<usize> = keys.iter().map(|key| key.sum.bytes()).collect();
        let order = self.order.keys(&bytes);
        for (place, &at) in (0..).zip(&order) {
            // Copies have the order of the pushes.
            store.push(&keys[at].key, std::slice::from_ref(&keys[at].gradient), -place)?;
            if !is_apart {
                self.push_pull(at, -place)?;
            }
        }
        for (place, at) in (0..).zip(order).filter(|_| is_apart) {
            self.push_pull(at, -place)?;
        }
        Ok(())
    }

    fn push_pull(&self, at: usize, priority: i32) -> Result<(), StoreError> {
        let key = &self.model.keys[at];
        let store = &self.model.runtime.store;
        store.pull(&key.key, std::slice::from_ref(&key.sum), priority)?;
        let meter = Arc::clone(self.meter);
        // An operation of its own, since the update waits for the compute thread.
        store
            .engine()
            .operation(format!("arrival {}", key.key), Kind::Copy)
            .reads([key.sum.variable()])
            .priority(i32::MAX)
            .push(move || -> Result<(), String> {
                meter.arrive();
                Ok(())
            })?;
        Ok(self.push_update(key)?)
    }

    fn push_update(&self, key: &SimulatedKey) -> Result<(), PushError> {
        let model = self.model;
        let (updater, meter) = (model.updater.clone(), Arc::clone(self.meter));
        let (sum, parameters) = (key.sum.clone(), Arc::clone(&key.parameters));
        let (ready, number) = (Arc::clone(&model.ready[key.layer]), self.number as u64 + 1);
        model
            .runtime
            .engine
            .operation(format!("update {}", key.key), Kind::Compute)
            .reads([key.sum.variable()])
            .mutates([&key.variable])
            .push(move || -> Result<(), String> {
                meter.computes(|| {
                    let mut parameters = parameters.lock().unwrap_or_else(PoisonError::into_inner);
                    let step = paramhub_kernels::Step {
                        hyperparameters: &updater.hyperparameters,
                        number,
                        contributions: updater.ranks,
                        factor: 1.0,
                        tensor: None,
                    };
                    sum.read(|bytes| {
                        updater.optimizer.apply(&step, &mut parameters, bytemuck::cast_slice(bytes), &mut [])
                    });
                });
                ready.note();
                Ok(())
            })
    }

    fn keys_of(&self, layer: usize) -> impl Iterator<Item = &SimulatedKey> {
        self.model.workload.layers[layer].keys.iter().map(|&key| &self.model.keys[key as usize])
    }
}
