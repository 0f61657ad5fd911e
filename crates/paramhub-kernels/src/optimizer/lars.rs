use paramhub_core::hyperparameters::{HyperparameterError, Hyperparameters};

use super::{
    Optimizer, Step, TRUST_COEFFICIENT, TensorSquares, assert_step, descent_factor, slots_mut,
    tensor_squares, trust_ratio,
};
use crate::dispatch::{Isa, kernel};
use crate::squares::squares_with;

/// LARS, registered as `lars`: SGD with momentum whose rate each tensor scales by the ratio of its norms (You, Gitman, Ginsburg,
/// "Large batch training of convolutional networks", 2017, algorithm 1).
///
/// With `g` the mean gradient, `p` the parameter, `b` the momentum buffer (state slot 0), and norms over the whole tensor, in this
/// order. `trust_coefficient` (0.001) is an extra hyperparameter; groups of biases and norms mostly have 0:
///
/// ```text
/// r = trust_coefficient * norm(p) / (norm(g) + weight_decay * norm(p))
/// r = 1                                               if norm(p), norm(g) or trust_coefficient is 0
/// b = momentum * b + learning_rate * r * (g + weight_decay * p)
/// p = p - b
/// ```
///
/// It has no Nesterov momentum, and no dampening.
#[derive(Clone, Copy, Debug)]
pub struct Lars {
    isa: Isa,
}

impl Lars {
    /// LARS with the widest instruction set of this CPU.
    pub fn new() -> Self {
        Self::with_isa(Isa::best())
    }

    /// LARS with the bodies for `isa`.
    pub fn with_isa(isa: Isa) -> Self {
        Self { isa }
    }
}

impl Default for Lars {
    fn default() -> Self {
        Self::new()
    }
}

impl Optimizer for Lars {
    fn state_slots(&self, hyperparameters: &Hyperparameters) -> usize {
        usize::from(hyperparameters.momentum != 0.0)
    }

    fn needs_tensor_norms(&self) -> bool {
        true
    }

    fn squares(&self, step: &Step<'_>, model: &[f32], sum: &[f32], _: &[f32]) -> TensorSquares {
        assert_step(step, model, sum);
        TensorSquares {
            parameters: squares_with(self.isa, model, 1.0),
            update: squares_with(self.isa, sum, step.mean_factor()),
        }
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        assert_step(step, model, sum);
        let h = step.hyperparameters;
        let squares = tensor_squares(step);
        let norm = squares.parameters.sqrt();
        // The sums of squares are those of the mean without the factor.
        let gradient = squares.update.sqrt() * f64::from(step.factor.abs());
        let whole = if gradient > 0.0 { gradient + h.weight_decay * norm } else { 0.0 };
        let ratio = trust_ratio(h.value(TRUST_COEFFICIENT).unwrap_or(0.001), norm, whole);
        let coefficients = Coefficients {
            factor: descent_factor(step),
            weight_decay: h.weight_decay as f32,
            rate: (h.learning_rate * ratio) as f32,
            momentum: h.momentum as f32,
        };
        if h.momentum == 0.0 {
            return descend(self.isa, coefficients, model, sum);
        }
        let [buffer] = slots_mut(state, model.len());
        descend_with_momentum(self.isa, coefficients, model, sum, buffer);
    }

    fn defaults(&self) -> Hyperparameters {
        Hyperparameters { momentum: 0.9, ..Hyperparameters::default() }
    }

    fn check(&self, h: &Hyperparameters) -> Result<(), HyperparameterError> {
        h.check_not_negative(&["learning_rate", "momentum", "weight_decay"])?;
        h.check_given_not_negative(&[TRUST_COEFFICIENT])?;
        let is_of_sgd = [("nesterov", f64::from(u8::from(h.nesterov))), ("dampening", h.dampening)];
        match is_of_sgd.into_iter().find(|&(_, value)| value != 0.0) {
            Some((name, value)) => Err(HyperparameterError::OutOfRange {
                name: name.into(),
                value,
                expected: "0, for LARS has none",
            }),
            None => Ok(()),
        }
    }
}

#[derive(Clone, Copy)]
struct Coefficients {
    factor: f32,
    weight_decay: f32,
    rate: f32,
    momentum: f32,
}

kernel! {
    fn descend(c: Coefficients, model: &mut [f32], sum: &[f32]) {
        for (parameter, total) in model.iter_mut().zip(sum) {
            *parameter -= c.rate * (total * c.factor + c.weight_decay * *parameter);
        }
    }
}

kernel! {
    fn descend_with_momentum(c: Coefficients, model: &mut [f32], sum: &[f32], buffer: &mut [f32]) {
        for ((parameter, total), velocity) in model.iter_mut().zip(sum).zip(buffer) {
            let gradient = total * c.factor + c.weight_decay * *parameter;
            *velocity = c.momentum * *velocity + c.rate * gradient;
            *parameter -= *velocity;
        }
    }
}
