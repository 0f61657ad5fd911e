//! What is switched on, stage by stage, and how the hub does without the rest.

use std::sync::Arc;

use paramhub_kernels::{HyperparameterError, Step};
use serde::{Deserialize, Serialize};

use crate::cli::bench::ablate::{NoSum, NoUpdate};
use crate::{Aggregator, Codec, Consistency, Hyperparameters, Optimizer, Registry};

/// Each stage does what those before it do, and one thing more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::cli::bench) enum Stage {
    /// Forward and backward passes of every worker, all at once; gradients are thrown away.
    Compute,
    /// Gradients go to the hub and parameters come back, to each worker for itself: nobody waits for another one's.
    Copy,
    /// Every gradient is added to a sum.
    Aggregation,
    /// Once for as many gradients as there are workers, the optimizer runs.
    Optimisation,
    /// The real thing: an answer needs every worker's gradient.
    Whole,
}

impl Stage {
    pub(super) const ALL: [Stage; 5] =
        [Stage::Compute, Stage::Copy, Stage::Aggregation, Stage::Optimisation, Stage::Whole];

    /// What this stage adds to the one before it.
    pub(super) fn adds(self) -> &'static str {
        match self {
            Stage::Compute => "compute",
            Stage::Copy => "data copy and communication",
            Stage::Aggregation => "aggregation",
            Stage::Optimisation => "optimisation",
            Stage::Whole => "synchronisation and other",
        }
    }

    pub(super) fn consistency(self) -> Consistency {
        match self {
            Stage::Whole => Consistency::Synchronous,
            _ => Consistency::Asynchronous,
        }
    }

    /// What the hub has under the usual names.
    pub(super) fn registry(self, workers: u32) -> anyhow::Result<Registry> {
        let normal = Registry::with_builtins();
        let sum = normal.aggregator("sum")?;
        let sum: Arc<dyn Aggregator> = match self {
            Stage::Compute | Stage::Copy => Arc::new(NoSum),
            Stage::Aggregation | Stage::Optimisation => Arc::new(AlwaysAdd(sum)),
            Stage::Whole => return Ok(normal),
        };
        let mut registry = Registry::empty();
        registry.register_aggregator("sum", sum)?;
        for name in normal.optimizer_names() {
            let update = normal.optimizer(name)?;
            let update: Arc<dyn Optimizer> = match self {
                Stage::Optimisation => Arc::new(OnceAStep { rule: update, workers: workers.into() }),
                _ => Arc::new(NoUpdate(update)),
            };
            registry.register_optimizer(name, update)?;
        }
        Ok(registry)
    }
}

/// Adds every contribution, the first of a step, too: where nobody waits for anybody every contribution is a first one, and
/// to take it as that would be less work than most have in a step of all workers.
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

/// Updates once for as many contributions as a step of all workers has, where every contribution is a step of its own.
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

    /// A sum of 3 and a model of 1 after so many lonely contributions of 1, as a hub that waits for nobody makes them.
    fn after(stage: Stage, contributions: u64) -> (f32, f32) {
        let registry = stage.registry(2).unwrap();
        let (sum_rule, rule) = (registry.aggregator("sum").unwrap(), registry.optimizer("sgd").unwrap());
        let hyperparameters = Hyperparameters { learning_rate: 0.5, ..rule.defaults() };
        let (mut sum, mut model) = ([3.0], [1.0]);
        for number in 1..=contributions {
            sum_rule.assign(&mut sum, &1.0_f32.to_le_bytes(), Codec::F32);
            let step = Step { hyperparameters: &hyperparameters, number, contributions: 1, factor: 1.0 };
            rule.apply(&step, &mut model, &sum, &mut []);
        }
        (sum[0], model[0])
    }

    #[test]
    fn every_stage_does_one_thing_more() {
        assert_eq!(after(Stage::Copy, 2), (3.0, 1.0));
        assert_eq!(after(Stage::Aggregation, 2), (5.0, 1.0));
        assert_eq!(after(Stage::Optimisation, 1), (4.0, 1.0));
        // Of two workers' contributions, the second completes the step.
        assert_eq!(after(Stage::Optimisation, 2), (5.0, 1.0 - 0.5 * 5.0));
        assert_eq!(after(Stage::Whole, 2), (1.0, 0.0), "two updates by 0.5");
    }
}
