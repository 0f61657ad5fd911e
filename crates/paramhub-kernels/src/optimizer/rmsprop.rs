use paramhub_core::hyperparameters::{HyperparameterError, Hyperparameters};

use super::{Optimizer, Step, assert_step, descent_factor, is_set, slots_mut};
use crate::dispatch::{Isa, kernel};

/// RMSprop as torch.optim.RMSprop defines it, registered as `rmsprop`.
///
/// With `g` the mean gradient, `p` the parameter, `v` the mean of squares (state slot 0), `a` the mean of gradients (the
/// next slot, if `centered`) and `b` the momentum buffer (the last slot, if `momentum != 0`), in this order. `alpha` (0.99),
/// `centered` and `epsilon_in_root` (0 or 1) are extra hyperparameters. The last one is not torch's: MXNet and TensorFlow add
/// epsilon under the root.
///
/// ```text
/// g = g + weight_decay * p                        if weight_decay != 0
/// v = alpha * v + (1 - alpha) * g * g
/// a = a + (1 - alpha) * (g - a)                   centered; torch's lerp: g - alpha * (g - a) if alpha <= 0.5
/// w = v, or v - a * a if centered
/// d = sqrt(w) + epsilon, or sqrt(w + epsilon) if epsilon_in_root
/// b = momentum * b + g / d                        if momentum != 0
/// p = p - learning_rate * b, or p - learning_rate * g / d without momentum
/// ```
#[derive(Clone, Copy, Debug)]
pub struct RmsProp {
    isa: Isa,
}

impl RmsProp {
    /// RMSprop with the widest instruction set of this CPU.
    pub fn new() -> Self {
        Self::with_isa(Isa::best())
    }

    /// RMSprop with the bodies for `isa`.
    pub fn with_isa(isa: Isa) -> Self {
        Self { isa }
    }
}

impl Default for RmsProp {
    fn default() -> Self {
        Self::new()
    }
}

fn alpha(h: &Hyperparameters) -> f64 {
    h.value("alpha").unwrap_or(0.99)
}

impl Optimizer for RmsProp {
    fn state_slots(&self, h: &Hyperparameters) -> usize {
        1 + usize::from(h.momentum != 0.0) + usize::from(is_set(h, "centered"))
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        assert_step(step, model, sum);
        let h = step.hyperparameters;
        let first_weight = 1.0 - alpha(h);
        let coefficients = Coefficients {
            factor: descent_factor(step),
            weight_decay: h.weight_decay as f32,
            alpha: alpha(h) as f32,
            first_weight: first_weight as f32,
            first_rest: 1.0 - first_weight as f32,
            momentum: h.momentum as f32,
            step_size: -h.learning_rate as f32,
            epsilon: h.epsilon as f32,
        };
        let len = model.len();
        let form = Form {
            decay: h.weight_decay != 0.0,
            near: coefficients.first_weight < 0.5,
            in_root: is_set(h, "epsilon_in_root"),
        };
        match (h.momentum != 0.0, is_set(h, "centered")) {
            (false, false) => {
                let [squares] = slots_mut(state, len);
                plain(self.isa, coefficients, form, model, sum, squares);
            }
            (true, false) => {
                let [squares, buffer] = slots_mut(state, len);
                with_momentum(self.isa, coefficients, form, model, sum, squares, buffer);
            }
            (false, true) => {
                let [squares, means] = slots_mut(state, len);
                centered(self.isa, coefficients, form, model, sum, squares, means);
            }
            (true, true) => {
                centered_with_momentum(self.isa, coefficients, form, model, sum, slots_mut(state, len));
            }
        }
    }

    fn defaults(&self) -> Hyperparameters {
        Hyperparameters { learning_rate: 1e-2, ..Hyperparameters::default() }
    }

    fn check(&self, h: &Hyperparameters) -> Result<(), HyperparameterError> {
        h.check_not_negative(&["learning_rate", "weight_decay", "epsilon", "momentum"])?;
        h.check_given_not_negative(&["alpha"])
    }
}

#[derive(Clone, Copy)]
struct Coefficients {
    factor: f32,
    weight_decay: f32,
    alpha: f32,
    first_weight: f32,
    first_rest: f32,
    momentum: f32,
    step_size: f32,
    epsilon: f32,
}

#[derive(Clone, Copy)]
struct Form {
    decay: bool,
    near: bool,
    in_root: bool,
}

impl Coefficients {
    #[inline(always)]
    fn gradient(&self, form: Form, parameter: f32, total: f32) -> f32 {
        let mean = total * self.factor;
        if form.decay { mean + self.weight_decay * parameter } else { mean }
    }

    #[inline(always)]
    fn average_square(&self, v: f32, gradient: f32) -> f32 {
        self.alpha * v + self.first_weight * gradient * gradient
    }

    #[inline(always)]
    fn average(&self, form: Form, a: f32, gradient: f32) -> f32 {
        let distance = gradient - a;
        if form.near { a + self.first_weight * distance } else { gradient - self.first_rest * distance }
    }

    #[inline(always)]
    fn denominator(&self, form: Form, variance: f32) -> f32 {
        if form.in_root { (variance + self.epsilon).sqrt() } else { variance.sqrt() + self.epsilon }
    }
}

kernel! {
    fn plain(c: Coefficients, form: Form, model: &mut [f32], sum: &[f32], squares: &mut [f32]) {
        for ((parameter, total), v) in model.iter_mut().zip(sum).zip(squares) {
            let gradient = c.gradient(form, *parameter, *total);
            *v = c.average_square(*v, gradient);
            *parameter += c.step_size * gradient / c.denominator(form, *v);
        }
    }
}

kernel! {
    fn with_momentum(
        c: Coefficients,
        form: Form,
        model: &mut [f32],
        sum: &[f32],
        squares: &mut [f32],
        buffer: &mut [f32],
    ) {
        for (((parameter, total), v), b) in model.iter_mut().zip(sum).zip(squares).zip(buffer) {
            let gradient = c.gradient(form, *parameter, *total);
            *v = c.average_square(*v, gradient);
            *b = c.momentum * *b + gradient / c.denominator(form, *v);
            *parameter += c.step_size * *b;
        }
    }
}

kernel! {
    fn centered(
        c: Coefficients,
        form: Form,
        model: &mut [f32],
        sum: &[f32],
        squares: &mut [f32],
        means: &mut [f32],
    ) {
        for (((parameter, total), v), a) in model.iter_mut().zip(sum).zip(squares).zip(means) {
            let gradient = c.gradient(form, *parameter, *total);
            *v = c.average_square(*v, gradient);
            *a = c.average(form, *a, gradient);
            *parameter += c.step_size * gradient / c.denominator(form, *v - *a * *a);
        }
    }
}

kernel! {
    fn centered_with_momentum(
        c: Coefficients,
        form: Form,
        model: &mut [f32],
        sum: &[f32],
        state: [&mut [f32]; 3],
    ) {
        let [squares, means, buffer] = state;
        let state = squares.iter_mut().zip(means).zip(buffer);
        for ((parameter, total), ((v, a), b)) in model.iter_mut().zip(sum).zip(state) {
            let gradient = c.gradient(form, *parameter, *total);
            *v = c.average_square(*v, gradient);
            *a = c.average(form, *a, gradient);
            *b = c.momentum * *b + gradient / c.denominator(form, *v - *a * *a);
            *parameter += c.step_size * *b;
        }
    }
}
