use paramhub_core::hyperparameters::Hyperparameters;

use super::{Optimizer, Step, assert_step};
use crate::dispatch::{Isa, kernel};

/// No optimizer, registered as `mean`: the model becomes the mean of the contributions, as after an
/// all-reduce. It uses no hyperparameter and no state.
#[derive(Clone, Copy, Debug)]
pub struct Mean {
    isa: Isa,
}

impl Mean {
    /// The mean with the widest instruction set of this CPU.
    pub fn new() -> Self {
        Self::with_isa(Isa::best())
    }

    /// The mean with the body for `isa`.
    pub fn with_isa(isa: Isa) -> Self {
        Self { isa }
    }
}

impl Default for Mean {
    fn default() -> Self {
        Self::new()
    }
}

impl Optimizer for Mean {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        0
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], _: &mut [f32]) {
        assert_step(step, model, sum);
        mean(self.isa, step.mean_factor(), model, sum);
    }
}

kernel! {
    fn mean(factor: f32, model: &mut [f32], sum: &[f32]) {
        for (parameter, total) in model.iter_mut().zip(sum) {
            *parameter = total * factor;
        }
    }
}
