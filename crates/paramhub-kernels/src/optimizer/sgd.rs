use paramhub_core::hyperparameters::{HyperparameterError, Hyperparameters};

use super::{Optimizer, Step, assert_step, descent_factor, slots_mut};
use crate::dispatch::{Isa, kernel};

/// Stochastic gradient descent as torch.optim.SGD defines it, registered as `sgd`.
///
/// With `g` the mean gradient, `p` the parameter and `b` the momentum buffer (state slot 0), in this order:
///
/// ```text
/// g = g + weight_decay * p                        if weight_decay != 0
/// b = g at step 1, momentum * b + (1 - dampening) * g later
/// g = g + momentum * b with nesterov, b without   if momentum != 0
/// p = p - learning_rate * g
/// ```
///
/// A step with a momentum of 0 leaves the buffer unchanged. Where torch's CPU kernels fuse a multiplication
/// with an addition, this rounds twice (see the crate's rounding rule), so results agree to a few units in
/// the last place, not to the bit.
#[derive(Clone, Copy, Debug)]
pub struct Sgd {
    isa: Isa,
}

impl Sgd {
    /// SGD with the widest instruction set of this CPU.
    pub fn new() -> Self {
        Self::with_isa(Isa::best())
    }

    /// SGD with the bodies for `isa`.
    pub fn with_isa(isa: Isa) -> Self {
        Self { isa }
    }
}

impl Default for Sgd {
    fn default() -> Self {
        Self::new()
    }
}

impl Optimizer for Sgd {
    fn state_slots(&self, hyperparameters: &Hyperparameters) -> usize {
        usize::from(hyperparameters.momentum != 0.0)
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        assert_step(step, model, sum);
        let h = step.hyperparameters;
        let coefficients = Coefficients {
            factor: descent_factor(step),
            learning_rate: h.learning_rate as f32,
            weight_decay: h.weight_decay as f32,
            momentum: h.momentum as f32,
            gradient_share: (1.0 - h.dampening) as f32,
        };
        if h.momentum == 0.0 {
            return descend(self.isa, coefficients, h.weight_decay != 0.0, model, sum);
        }
        let [buffer] = slots_mut(state, model.len());
        let form = Form { decay: h.weight_decay != 0.0, first: step.number == 1, nesterov: h.nesterov };
        descend_with_momentum(self.isa, coefficients, form, model, sum, buffer);
    }

    fn check(&self, h: &Hyperparameters) -> Result<(), HyperparameterError> {
        h.check_not_negative(&["learning_rate", "momentum", "weight_decay"])?;
        h.check_finite(&["dampening"])?;
        if h.nesterov && (h.momentum <= 0.0 || h.dampening != 0.0) {
            return Err(HyperparameterError::Nesterov { momentum: h.momentum, dampening: h.dampening });
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct Coefficients {
    factor: f32,
    learning_rate: f32,
    weight_decay: f32,
    momentum: f32,
    gradient_share: f32,
}

impl Coefficients {
    #[inline(always)]
    fn gradient<const DECAY: bool>(&self, parameter: f32, total: f32) -> f32 {
        let mean = total * self.factor;
        if DECAY { mean + self.weight_decay * parameter } else { mean }
    }
}

#[derive(Clone, Copy)]
struct Form {
    decay: bool,
    first: bool,
    nesterov: bool,
}

kernel! {
    fn descend(c: Coefficients, decay: bool, model: &mut [f32], sum: &[f32]) {
        if decay { plain::<true>(c, model, sum) } else { plain::<false>(c, model, sum) }
    }
}

kernel! {
    fn descend_with_momentum(
        c: Coefficients,
        form: Form,
        model: &mut [f32],
        sum: &[f32],
        buffer: &mut [f32],
    ) {
        match (form.decay, form.first, form.nesterov) {
            (false, false, false) => momentum::<false, false, false>(c, model, sum, buffer),
            (false, false, true) => momentum::<false, false, true>(c, model, sum, buffer),
            (false, true, false) => momentum::<false, true, false>(c, model, sum, buffer),
            (false, true, true) => momentum::<false, true, true>(c, model, sum, buffer),
            (true, false, false) => momentum::<true, false, false>(c, model, sum, buffer),
            (true, false, true) => momentum::<true, false, true>(c, model, sum, buffer),
            (true, true, false) => momentum::<true, true, false>(c, model, sum, buffer),
            (true, true, true) => momentum::<true, true, true>(c, model, sum, buffer),
        }
    }
}

#[inline(always)]
fn plain<const DECAY: bool>(c: Coefficients, model: &mut [f32], sum: &[f32]) {
    for (parameter, total) in model.iter_mut().zip(sum) {
        *parameter -= c.learning_rate * c.gradient::<DECAY>(*parameter, *total);
    }
}

#[inline(always)]
fn momentum<const DECAY: bool, const FIRST: bool, const NESTEROV: bool>(
    c: Coefficients,
    model: &mut [f32],
    sum: &[f32],
    buffer: &mut [f32],
) {
    for ((parameter, total), velocity) in model.iter_mut().zip(sum).zip(buffer) {
        let gradient = c.gradient::<DECAY>(*parameter, *total);
        *velocity = if FIRST { gradient } else { c.momentum * *velocity + c.gradient_share * gradient };
        let direction = if NESTEROV { gradient + c.momentum * *velocity } else { *velocity };
        *parameter -= c.learning_rate * direction;
    }
}
