use paramhub_core::hyperparameters::{HyperparameterError, Hyperparameters};

use super::{Optimizer, Step, assert_step, descent_factor, slots_mut};
use crate::dispatch::{Isa, kernel};

/// Adagrad as torch.optim.Adagrad defines it, registered as `adagrad`.
///
/// With `g` the mean gradient, `p` the parameter, `s` the sum of squares (state slot 0) and `t` the step's number, in this
/// order. `lr_decay` and `initial_accumulator` are extra hyperparameters, by default 0:
///
/// ```text
/// g = g + weight_decay * p                        if weight_decay != 0
/// s = s + g * g                                   s is initial_accumulator before step 1
/// p = p - learning_rate / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + epsilon)
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Adagrad {
    isa: Isa,
}

impl Adagrad {
    /// Adagrad with the widest instruction set of this CPU.
    pub fn new() -> Self {
        Self::with_isa(Isa::best())
    }

    /// Adagrad with the bodies for `isa`.
    pub fn with_isa(isa: Isa) -> Self {
        Self { isa }
    }
}

impl Default for Adagrad {
    fn default() -> Self {
        Self::new()
    }
}

impl Optimizer for Adagrad {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        1
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        assert_step(step, model, sum);
        let h = step.hyperparameters;
        let slowed = 1.0 + (step.number - 1) as f64 * h.value("lr_decay").unwrap_or(0.0);
        let coefficients = Coefficients {
            factor: descent_factor(step),
            weight_decay: h.weight_decay as f32,
            step_size: (-h.learning_rate / slowed) as f32,
            epsilon: h.epsilon as f32,
        };
        let [squares] = slots_mut(state, model.len());
        if step.number == 1 {
            squares.fill(h.value("initial_accumulator").unwrap_or(0.0) as f32);
        }
        descend(self.isa, coefficients, h.weight_decay != 0.0, model, sum, squares);
    }

    fn defaults(&self) -> Hyperparameters {
        Hyperparameters { learning_rate: 1e-2, epsilon: 1e-10, ..Hyperparameters::default() }
    }

    fn check(&self, h: &Hyperparameters) -> Result<(), HyperparameterError> {
        h.check_not_negative(&["learning_rate", "weight_decay", "epsilon"])?;
        h.check_given_not_negative(&["lr_decay", "initial_accumulator"])
    }
}

#[derive(Clone, Copy)]
struct Coefficients {
    factor: f32,
    weight_decay: f32,
    step_size: f32,
    epsilon: f32,
}

kernel! {
    fn descend(c: Coefficients, decay: bool, model: &mut [f32], sum: &[f32], squares: &mut [f32]) {
        if decay { update::<true>(c, model, sum, squares) } else { update::<false>(c, model, sum, squares) }
    }
}

#[inline(always)]
fn update<const DECAY: bool>(c: Coefficients, model: &mut [f32], sum: &[f32], squares: &mut [f32]) {
    for ((parameter, total), s) in model.iter_mut().zip(sum).zip(squares) {
        let mut gradient = total * c.factor;
        if DECAY {
            gradient += c.weight_decay * *parameter;
        }
        *s += gradient * gradient;
        *parameter += c.step_size * gradient / (s.sqrt() + c.epsilon);
    }
}
