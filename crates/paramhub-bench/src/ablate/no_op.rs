//! An aggregator and an optimizer that do nothing, to measure the time of all else.

use paramhub::{Aggregator, Codec, Hyperparameters, Optimizer};
use paramhub_kernels::shared::Floats;
use paramhub_kernels::{HyperparameterError, Step};

/// Accepts every contribution and sums none.
pub(crate) struct NoSum;

impl Aggregator for NoSum {
    fn assign_f32(&self, _: &mut [f32], _: &[f32]) {}

    fn add_f32(&self, _: &mut [f32], _: &[f32]) {}

    fn assign(&self, _: &mut [f32], _: &[u8], _: Codec) {}

    fn add(&self, _: &mut [f32], _: &[u8], _: Codec) {}

    fn gather(&self, _: &mut [f32], _: bool, _: &[Floats<'_>]) {}
}

/// Leaves the parameters unchanged. Accepts the hyperparameters, and takes the memory, of the optimizer that
/// it replaces.
pub(crate) struct NoUpdate<O>(pub(crate) O);

impl<O: Optimizer> Optimizer for NoUpdate<O> {
    fn state_slots(&self, hyperparameters: &Hyperparameters) -> usize {
        self.0.state_slots(hyperparameters)
    }

    fn apply(&self, _: &Step<'_>, _: &mut [f32], _: &[f32], _: &mut [f32]) {}

    fn defaults(&self) -> Hyperparameters {
        self.0.defaults()
    }

    fn check(&self, hyperparameters: &Hyperparameters) -> Result<(), HyperparameterError> {
        self.0.check(hyperparameters)
    }
}
