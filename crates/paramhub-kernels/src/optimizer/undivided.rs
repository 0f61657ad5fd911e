use paramhub_core::hyperparameters::Hyperparameters;

use super::{Optimizer, Step, assert_step};

/// No optimizer and no division, registered as `sum`: the model becomes the sum of the contributions. It uses
/// no hyperparameter and no state.
#[derive(Clone, Copy, Debug, Default)]
pub struct Undivided;

impl Undivided {
    /// There is one body: a copy has the same bits with every instruction set.
    pub fn new() -> Self {
        Self
    }
}

impl Optimizer for Undivided {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        0
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], _: &mut [f32]) {
        assert_step(step, model, sum);
        model.copy_from_slice(sum);
    }
}
