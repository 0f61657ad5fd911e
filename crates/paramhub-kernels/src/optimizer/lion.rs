use paramhub_core::hyperparameters::{HyperparameterError, Hyperparameters};

use super::{Optimizer, Step, assert_step, descent_factor, slots_mut};
use crate::dispatch::{Isa, kernel};

/// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, program 1), registered as `lion`.
///
/// With `g` the mean gradient, `p` the parameter and `m` the momentum (state slot 0), in this order; the sign of 0 is 0:
///
/// ```text
/// p = p * (1 - learning_rate * weight_decay)
/// p = p - learning_rate * sign(beta1 * m + (1 - beta1) * g)
/// m = beta2 * m + (1 - beta2) * g
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Lion {
    isa: Isa,
}

impl Lion {
    /// Lion with the widest instruction set of this CPU.
    pub fn new() -> Self {
        Self::with_isa(Isa::best())
    }

    /// Lion with the bodies for `isa`.
    pub fn with_isa(isa: Isa) -> Self {
        Self { isa }
    }
}

impl Default for Lion {
    fn default() -> Self {
        Self::new()
    }
}

impl Optimizer for Lion {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        1
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        assert_step(step, model, sum);
        let h = step.hyperparameters;
        let coefficients = Coefficients {
            factor: descent_factor(step),
            shrink: (1.0 - h.learning_rate * h.weight_decay) as f32,
            beta1: h.beta1 as f32,
            rest1: (1.0 - h.beta1) as f32,
            beta2: h.beta2 as f32,
            rest2: (1.0 - h.beta2) as f32,
            learning_rate: h.learning_rate as f32,
        };
        let [momentum] = slots_mut(state, model.len());
        descend(self.isa, coefficients, model, sum, momentum);
    }

    fn defaults(&self) -> Hyperparameters {
        Hyperparameters { learning_rate: 1e-4, beta2: 0.99, ..Hyperparameters::default() }
    }

    fn check(&self, h: &Hyperparameters) -> Result<(), HyperparameterError> {
        h.check_not_negative(&["learning_rate", "weight_decay"])?;
        h.check_fraction(&["beta1", "beta2"])
    }
}

#[derive(Clone, Copy)]
struct Coefficients {
    factor: f32,
    shrink: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    learning_rate: f32,
}

kernel! {
    fn descend(c: Coefficients, model: &mut [f32], sum: &[f32], momentum: &mut [f32]) {
        for ((parameter, total), m) in model.iter_mut().zip(sum).zip(momentum) {
            let gradient = total * c.factor;
            let direction = c.beta1 * *m + c.rest1 * gradient;
            // The comparisons are false for NaN, which must not be lost.
            let sign = if direction > 0.0 { 1.0 } else if direction < 0.0 { -1.0 } else { direction };
            *parameter = *parameter * c.shrink - c.learning_rate * sign;
            *m = c.beta2 * *m + c.rest2 * gradient;
        }
    }
}
