//! The model that a rank simulates: its keys in the store, and the variables that order its operations.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use paramhub_collective::engine::Variable;
use paramhub_collective::kvstore::{Array, Key};
use paramhub_harness::exchange::{numbers, usage};
use paramhub_kernels::{Hyperparameters, Optimizer, Registry};
use paramhub_train::dataflow::Times;

use super::messages::Workload;
use super::rank_runtime::RankRuntime;
use super::simulated_gpu::{Latest, SimulatedGpu};

pub(super) struct SimulatedModel<'a> {
    pub(super) runtime: RankRuntime,
    pub(super) workload: &'a Workload,
    pub(super) keys: Vec<SimulatedKey>,
    /// For each layer, when its newest parameters were there.
    pub(super) ready: Vec<Arc<Latest>>,
    pub(super) gpu: Arc<SimulatedGpu>,
    /// The variable that the passes of all layers mutate, so that they run one after the other.
    pub(super) stream: Variable,
    /// The variables that the end of a step's forward pass mutates, in turn.
    pub(super) losses: [Variable; 2],
    pub(super) updater: Updater,
}

/// How sums become parameters.
#[derive(Clone)]
pub(super) struct Updater {
    pub(super) optimizer: Arc<dyn Optimizer>,
    pub(super) hyperparameters: Hyperparameters,
    pub(super) ranks: u32,
}

/// A key between the layer that makes its gradient and the store.
pub(super) struct SimulatedKey {
    pub(super) key: Key,
    pub(super) gradient: Array,
    pub(super) sum: Array,
    pub(super) parameters: Arc<Mutex<Vec<f32>>>,
    pub(super) variable: Variable,
    pub(super) layer: usize,
}

/// The times that a turn records of its steps.
#[derive(Default)]
pub(super) struct StepMarks {
    /// The time at which each step's forward pass began.
    pub(super) begins: Mutex<Vec<Instant>>,
    /// The end of each step's backward pass.
    pub(super) ends: Mutex<Vec<StepEnd>>,
}

/// What a turn records at the end of a step's backward pass.
pub(super) struct StepEnd {
    pub(super) at: Instant,
    /// The times since the turn began.
    pub(super) times: Times,
    /// The processor time of this process since it was started.
    pub(super) cpu_seconds: f64,
}

impl StepMarks {
    pub(super) fn end(&self, at: Instant, times: Times) {
        let end = StepEnd { at, times, cpu_seconds: usage::cpu_seconds() };
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).push(end);
    }
}

impl<'a> SimulatedModel<'a> {
    pub(super) fn new(
        runtime: RankRuntime,
        workload: &'a Workload,
        rank: u32,
        ranks: u32,
    ) -> anyhow::Result<SimulatedModel<'a>> {
        let engine = &runtime.engine;
        let mut layer_of = vec![0; workload.keys.len()];
        for (number, layer) in workload.layers.iter().enumerate() {
            layer.keys.iter().for_each(|&key| layer_of[key as usize] = number);
        }
        let mut keys = Vec::with_capacity(workload.keys.len());
        for (number, key) in workload.keys.keys().iter().enumerate() {
            let elements = key.elements().unwrap_or(0) as usize;
            let values = (0..elements).map(|at| numbers::small(rank, number, at)).collect();
            keys.push(SimulatedKey {
                key: Key::from(key.name.as_str()),
                gradient: Array::new(engine, values),
                sum: Array::new(engine, vec![0.0; elements]),
                parameters: Arc::new(Mutex::new(vec![0.0; elements])),
                variable: engine.variable(),
                layer: layer_of[number],
            });
        }
        for key in &keys {
            runtime.store.init(&key.key, &key.sum)?;
        }
        let optimizer = Registry::with_builtins().optimizer("sgd")?;
        let hyperparameters = optimizer.defaults();
        Ok(SimulatedModel {
            workload,
            keys,
            ready: workload.layers.iter().map(|_| Arc::new(Latest::new())).collect(),
            gpu: Arc::new(SimulatedGpu::new()),
            stream: engine.variable(),
            losses: [engine.variable(), engine.variable()],
            updater: Updater { optimizer, hyperparameters, ranks },
            runtime,
        })
    }
}
