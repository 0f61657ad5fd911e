//! The parts of a step that each stage includes, and how the hub leaves out the rest.

use std::sync::Arc;

use paramhub::{Aggregator, Codec, Consistency, Hyperparameters, Optimizer, Registry};
use paramhub_kernels::{HyperparameterError, Step};
use serde::{Deserialize, Serialize};

use crate::ablate::{NoSum, NoUpdate};

/// Each stage does what those before it do, and one thing more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum BreakdownStage {
    /// Forward and backward passes of every worker, all at once; gradients are thrown away.
    Compute,
    /// Gradients go to the hub and parameters come back. No worker waits for another one's gradients.
    Copy,
    /// Every gradient is added to a sum.
    Aggregation,
    /// The optimizer runs once for as many gradients as there are workers.
    Optimisation,
    /// The normal exchange: an answer needs every worker's gradient.
    Whole,
}

impl BreakdownStage {
    pub(super) const ALL: [BreakdownStage; 5] = [
        BreakdownStage::Compute,
        BreakdownStage::Copy,
        BreakdownStage::Aggregation,
        BreakdownStage::Optimisation,
        BreakdownStage::Whole,
    ];

    /// The part that this stage adds to the one before it.
    pub(super) fn adds(self) -> &'static str {
        match self {
            BreakdownStage::Compute => "compute",
            BreakdownStage::Copy => "data copy and communication",
            BreakdownStage::Aggregation => "aggregation",
            BreakdownStage::Optimisation => "optimisation",
            BreakdownStage::Whole => "synchronisation and other",
        }
    }

    pub(super) fn consistency(self) -> Consistency {
        match self {
            BreakdownStage::Whole => Consistency::Synchronous,
            _ => Consistency::Asynchronous,
        }
    }

    /// The hub's registry in this stage, with the usual names.
    pub(super) fn registry(self, workers: u32) -> anyhow::Result<Registry> {
        let normal = Registry::with_builtins();
        let sum = normal.aggregator("sum")?;
        let sum: Arc<dyn Aggregator> = match self {
            BreakdownStage::Compute | BreakdownStage::Copy => Arc::new(NoSum),
            BreakdownStage::Aggregation | BreakdownStage::Optimisation => Arc::new(AlwaysAdd(sum)),
            BreakdownStage::Whole => return Ok(normal),
        };
        let mut registry = Registry::empty();
        registry.register_aggregator("sum", sum)?;
        for name in normal.optimizer_names() {
            let update = normal.optimizer(name)?;
            let update: Arc<dyn Optimizer> = match self {
                BreakdownStage::Optimisation => Arc::new(OnceAStep { rule: update, workers: workers.into() }),
                _ => Arc::new(NoUpdate(update)),
            };
            registry.register_optimizer(name, update)?;
        }
        Ok(registry)
    }
}

/// Adds every contribution, even the first of a step. Where no worker waits for another, every contribution
/// is the first of its step, and assigning it would be less work than the adding in a step of all workers.
struct AlwaysAdd<A>(A);

impl<A: Aggregator> Aggregator for AlwaysAdd<A> {
    fn assign_f32(&self, sum: &mut [f32], contribution: &[f32]) {
        self.0.add_f32(sum, contribution);
    }

    fn add_f32(&self, sum: &mut [f32], contribution: &[f32]) {
        self.0.add_f32(sum, contribution);
    }

    fn assign(&self, sum: &mut [f32], wire: &[u8], codec: Codec) {
        self.0.add(sum, wire, codec);
    }

    fn add(&self, sum: &mut [f32], wire: &[u8], codec: Codec) {
        self.0.add(sum, wire, codec);
    }
}

/// Updates once for as many contributions as a step of all workers has, although every contribution is a step
/// of its own.
struct OnceAStep<O> {
    rule: O,
    workers: u64,
}

impl<O: Optimizer> Optimizer for OnceAStep<O> {
    fn state_slots(&self, hyperparameters: &Hyperparameters) -> usize {
        self.rule.state_slots(hyperparameters)
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        if step.number.is_multiple_of(self.workers) {
            let step = Step { number: step.number / self.workers, ..*step };
            self.rule.apply(&step, model, sum, state);
        }
    }

    fn defaults(&self) -> Hyperparameters {
        self.rule.defaults()
    }

    fn needs_whole_chunks(&self) -> bool {
        self.rule.needs_whole_chunks()
    }

    fn check(&self, hyperparameters: &Hyperparameters) -> Result<(), HyperparameterError> {
        self.rule.check(hyperparameters)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum, initially 3, and the model, initially 1, after `contributions` contributions of 1, each a
    /// step of its own.
    fn after(stage: BreakdownStage, contributions: u64) -> (f32, f32) {
        let registry = stage.registry(2).unwrap();
        let (sum_rule, rule) = (registry.aggregator("sum").unwrap(), registry.optimizer("sgd").unwrap());
        let hyperparameters = Hyperparameters { learning_rate: 0.5, ..rule.defaults() };
        let (mut sum, mut model) = ([3.0], [1.0]);
        for number in 1..=contributions {
            sum_rule.assign(&mut sum, &1.0_f32.to_le_bytes(), Codec::F32);
            let step = Step {
                hyperparameters: &hyperparameters,
                number,
                contributions: 1,
                factor: 1.0,
                tensor: None,
            };
            rule.apply(&step, &mut model, &sum, &mut []);
        }
        (sum[0], model[0])
    }

    #[test]
    fn every_stage_does_one_thing_more() {
        assert_eq!(after(BreakdownStage::Copy, 2), (3.0, 1.0));
        assert_eq!(after(BreakdownStage::Aggregation, 2), (5.0, 1.0));
        assert_eq!(after(BreakdownStage::Optimisation, 1), (4.0, 1.0));
        // The second contribution of two workers completes the step.
        assert_eq!(after(BreakdownStage::Optimisation, 2), (5.0, 1.0 - 0.5 * 5.0));
        assert_eq!(after(BreakdownStage::Whole, 2), (1.0, 0.0), "two updates by 0.5");
    }
}
