use paramhub_core::hyperparameters::{HyperparameterError, Hyperparameters};

use super::powers::power;
use super::{
    Optimizer, Step, TRUST_COEFFICIENT, TensorSquares, assert_step, descent_factor, slots_mut,
    tensor_squares, trust_ratio,
};
use crate::dispatch::{Isa, kernel};
use crate::squares::squares_with;

/// LAMB, registered as `lamb`: Adam whose update each tensor scales by the ratio of its norms (You et al., "Large batch
/// optimization for deep learning: training BERT in 76 minutes", 2020, algorithm 2, with the identity for phi).
///
/// With `g` the mean gradient, `p` the parameter, `m` and `v` the moments (state slots 0 and 1), `t` the step's number, and norms
/// over the whole tensor, in this order. `trust_coefficient` (1) is an extra hyperparameter; groups of biases and norms mostly
/// have 0:
///
/// ```text
/// m = beta1 * m + (1 - beta1) * g
/// v = beta2 * v + (1 - beta2) * g * g
/// u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * p
/// r = trust_coefficient * norm(p) / norm(u)           1 if norm(p), norm(u) or trust_coefficient is 0
/// p = p - learning_rate * r * u
/// ```
///
/// The norm of `u` is taken before any factor for the gradient is known, so a job with LAMB can neither clip nor scale.
#[derive(Clone, Copy, Debug)]
pub struct Lamb {
    isa: Isa,
}

impl Lamb {
    /// LAMB with the widest instruction set of this CPU.
    pub fn new() -> Self {
        Self::with_isa(Isa::best())
    }

    /// LAMB with the bodies for `isa`.
    pub fn with_isa(isa: Isa) -> Self {
        Self { isa }
    }
}

impl Default for Lamb {
    fn default() -> Self {
        Self::new()
    }
}

impl Optimizer for Lamb {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        2
    }

    fn needs_tensor_norms(&self) -> bool {
        true
    }

    fn squares(&self, step: &Step<'_>, model: &[f32], sum: &[f32], state: &[f32]) -> TensorSquares {
        assert_step(step, model, sum);
        let (first, rest) = state.split_at(model.len());
        TensorSquares {
            parameters: squares_with(self.isa, model, 1.0),
            update: update_squares(self.isa, Coefficients::of(step), model, sum, first, &rest[..model.len()]),
        }
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        assert_step(step, model, sum);
        let squares = tensor_squares(step);
        let coefficient = step.hyperparameters.value(TRUST_COEFFICIENT).unwrap_or(1.0);
        let ratio = trust_ratio(coefficient, squares.parameters.sqrt(), squares.update.sqrt());
        let rate = (step.hyperparameters.learning_rate * ratio) as f32;
        let [first, second] = slots_mut(state, model.len());
        descend(self.isa, Coefficients::of(step), rate, model, sum, first, second);
    }

    fn defaults(&self) -> Hyperparameters {
        Hyperparameters { epsilon: 1e-6, weight_decay: 1e-2, ..Hyperparameters::default() }
    }

    fn check(&self, h: &Hyperparameters) -> Result<(), HyperparameterError> {
        h.check_not_negative(&["learning_rate", "weight_decay", "epsilon"])?;
        h.check_given_not_negative(&[TRUST_COEFFICIENT])?;
        h.check_fraction(&["beta1", "beta2"])
    }
}

#[derive(Clone, Copy)]
struct Coefficients {
    factor: f32,
    weight_decay: f32,
    beta1: f32,
    first_weight: f32,
    beta2: f32,
    second_weight: f32,
    first_correction: f32,
    second_correction: f32,
    epsilon: f32,
}

impl Coefficients {
    fn of(step: &Step<'_>) -> Coefficients {
        let h = step.hyperparameters;
        Coefficients {
            factor: descent_factor(step),
            weight_decay: h.weight_decay as f32,
            beta1: h.beta1 as f32,
            first_weight: (1.0 - h.beta1) as f32,
            beta2: h.beta2 as f32,
            second_weight: (1.0 - h.beta2) as f32,
            first_correction: (1.0 - power(h.beta1, step.number)) as f32,
            second_correction: (1.0 - power(h.beta2, step.number)) as f32,
            epsilon: h.epsilon as f32,
        }
    }

    /// The moments and the update of one element.
    #[inline(always)]
    fn next(&self, parameter: f32, total: f32, first: f32, second: f32) -> (f32, f32, f32) {
        let gradient = total * self.factor;
        let first = self.beta1 * first + self.first_weight * gradient;
        let second = self.beta2 * second + self.second_weight * gradient * gradient;
        let denominator = (second / self.second_correction).sqrt() + self.epsilon;
        (first, second, first / self.first_correction / denominator + self.weight_decay * parameter)
    }
}

/// The number of running sums, so that additions do not wait for one another.
const LANES: usize = 16;

kernel! {
    fn update_squares(c: Coefficients, model: &[f32], sum: &[f32], first: &[f32], second: &[f32]) -> f64 {
        let mut sums = [0.0_f64; LANES];
        let elements = model.iter().zip(sum).zip(first.iter().zip(second));
        for (index, ((parameter, total), (first, second))) in elements.enumerate() {
            let (_, _, update) = c.next(*parameter, *total, *first, *second);
            sums[index % LANES] += f64::from(update) * f64::from(update);
        }
        sums.iter().sum()
    }
}

kernel! {
    fn descend(
        c: Coefficients,
        rate: f32,
        model: &mut [f32],
        sum: &[f32],
        first: &mut [f32],
        second: &mut [f32],
    ) {
        for ((parameter, total), (first, second)) in model.iter_mut().zip(sum).zip(first.iter_mut().zip(second)) {
            let update;
            (*first, *second, update) = c.next(*parameter, *total, *first, *second);
            *parameter -= rate * update;
        }
    }
}
