use paramhub_core::hyperparameters::{HyperparameterError, Hyperparameters};

use super::{Optimizer, Step, assert_step, descent_factor, slots_mut};
use crate::dispatch::{Isa, kernel};

/// Adadelta as torch.optim.Adadelta defines it, registered as `adadelta`.
///
/// With `g` the mean gradient, `p` the parameter, `v` the mean of squared gradients and `u` that of squared updates (state
/// slots 0 and 1), in this order. `rho` (0.9) is an extra hyperparameter:
///
/// ```text
/// g = g + weight_decay * p                        if weight_decay != 0
/// v = rho * v + (1 - rho) * g * g
/// d = sqrt(u + epsilon) / sqrt(v + epsilon) * g
/// u = rho * u + (1 - rho) * d * d
/// p = p - learning_rate * d
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Adadelta {
    isa: Isa,
}

impl Adadelta {
    /// Adadelta with the widest instruction set of this CPU.
    pub fn new() -> Self {
        Self::with_isa(Isa::best())
    }

    /// Adadelta with the bodies for `isa`.
    pub fn with_isa(isa: Isa) -> Self {
        Self { isa }
    }
}

impl Default for Adadelta {
    fn default() -> Self {
        Self::new()
    }
}

impl Optimizer for Adadelta {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        2
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        assert_step(step, model, sum);
        let h = step.hyperparameters;
        let rho = h.value("rho").unwrap_or(0.9);
        let coefficients = Coefficients {
            factor: descent_factor(step),
            weight_decay: h.weight_decay as f32,
            rho: rho as f32,
            rest: (1.0 - rho) as f32,
            step_size: -h.learning_rate as f32,
            epsilon: h.epsilon as f32,
        };
        let [squares, updates] = slots_mut(state, model.len());
        descend(self.isa, coefficients, h.weight_decay != 0.0, model, sum, squares, updates);
    }

    fn defaults(&self) -> Hyperparameters {
        Hyperparameters { learning_rate: 1.0, epsilon: 1e-6, ..Hyperparameters::default() }
    }

    fn check(&self, h: &Hyperparameters) -> Result<(), HyperparameterError> {
        h.check_not_negative(&["learning_rate", "weight_decay", "epsilon"])?;
        h.check_given_fraction(&["rho"])
    }
}

#[derive(Clone, Copy)]
struct Coefficients {
    factor: f32,
    weight_decay: f32,
    rho: f32,
    rest: f32,
    step_size: f32,
    epsilon: f32,
}

kernel! {
    fn descend(
        c: Coefficients,
        decay: bool,
        model: &mut [f32],
        sum: &[f32],
        squares: &mut [f32],
        updates: &mut [f32],
    ) {
        match decay {
            true => update::<true>(c, model, sum, squares, updates),
            false => update::<false>(c, model, sum, squares, updates),
        }
    }
}

#[inline(always)]
fn update<const DECAY: bool>(
    c: Coefficients,
    model: &mut [f32],
    sum: &[f32],
    squares: &mut [f32],
    updates: &mut [f32],
) {
    for (((parameter, total), v), u) in model.iter_mut().zip(sum).zip(squares).zip(updates) {
        let mut gradient = total * c.factor;
        if DECAY {
            gradient += c.weight_decay * *parameter;
        }
        *v = c.rho * *v + c.rest * gradient * gradient;
        let delta = (*u + c.epsilon).sqrt() / (*v + c.epsilon).sqrt() * gradient;
        *u = c.rho * *u + c.rest * delta * delta;
        *parameter += c.step_size * delta;
    }
}
