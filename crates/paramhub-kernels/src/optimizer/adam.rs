use paramhub_core::hyperparameters::{HyperparameterError, Hyperparameters};

use super::powers::power;
use super::{Decay, Optimizer, Step, assert_step, descent_factor, is_set, slots_mut};
use crate::dispatch::{Isa, kernel};

/// Adam as torch.optim defines it: [`Adam::new`] is torch.optim.Adam, registered as `adam`;
/// [`Adam::decoupled`] is torch.optim.AdamW, registered as `adamw`.
///
/// With `g` the mean gradient, `p` the parameter, `m` and `v` the moments (state slots 0 and 1) and `t`
/// the step's number, in this order:
///
/// ```text
/// g = g + weight_decay * p                        adam, if weight_decay != 0
/// p = p * (1 - learning_rate * weight_decay)      adamw
/// m = m + (1 - beta1) * (g - m)                   torch's lerp; g - beta1 * (g - m) if beta1 <= 0.5
/// v = beta2 * v + (1 - beta2) * g * g
/// x = max(x, v)                                   amsgrad; x is state slot 2, and takes v's place below
/// p = p - learning_rate / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
/// ```
///
/// `amsgrad` (0 or 1) is an extra hyperparameter.
///
/// As in torch, values that depend on no element are computed in f64 and rounded to f32 once. Where torch's
/// CPU kernels fuse a multiplication with an addition, this rounds twice (see the crate's rounding rule), so
/// results agree to a few units in the last place, not to the bit.
#[derive(Clone, Copy, Debug)]
pub struct Adam {
    isa: Isa,
    decoupled: bool,
}

impl Adam {
    /// torch.optim.Adam, with the widest instruction set of this CPU.
    pub fn new() -> Self {
        Self { isa: Isa::best(), decoupled: false }
    }

    /// torch.optim.AdamW, with the widest instruction set of this CPU.
    pub fn decoupled() -> Self {
        Self { isa: Isa::best(), decoupled: true }
    }

    /// The same with the bodies for `isa`.
    pub fn with_isa(self, isa: Isa) -> Self {
        Self { isa, ..self }
    }
}

impl Default for Adam {
    fn default() -> Self {
        Self::new()
    }
}

impl Optimizer for Adam {
    fn state_slots(&self, h: &Hyperparameters) -> usize {
        2 + usize::from(is_set(h, "amsgrad"))
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        assert_step(step, model, sum);
        let h = step.hyperparameters;
        let first_weight = 1.0 - h.beta1;
        let coefficients = Coefficients {
            factor: descent_factor(step),
            weight_decay: h.weight_decay as f32,
            shrink: (1.0 - h.learning_rate * h.weight_decay) as f32,
            first_weight: first_weight as f32,
            first_rest: 1.0 - first_weight as f32,
            beta2: h.beta2 as f32,
            second_weight: (1.0 - h.beta2) as f32,
            step_size: (-h.learning_rate / (1.0 - power(h.beta1, step.number))) as f32,
            second_correction: (1.0 - power(h.beta2, step.number)).sqrt() as f32,
            epsilon: h.epsilon as f32,
        };
        let decay = Decay::of(h, self.decoupled);
        if is_set(h, "amsgrad") {
            let slots = slots_mut(state, model.len());
            descend_by_largest(self.isa, coefficients, decay, model, sum, slots);
        } else {
            let [first, second] = slots_mut(state, model.len());
            descend(self.isa, coefficients, decay, model, sum, first, second);
        }
    }

    fn defaults(&self) -> Hyperparameters {
        let weight_decay = if self.decoupled { 1e-2 } else { 0.0 };
        Hyperparameters { weight_decay, ..Hyperparameters::default() }
    }

    fn check(&self, h: &Hyperparameters) -> Result<(), HyperparameterError> {
        h.check_not_negative(&["learning_rate", "weight_decay", "epsilon"])?;
        h.check_fraction(&["beta1", "beta2"])
    }
}

#[derive(Clone, Copy)]
struct Coefficients {
    factor: f32,
    weight_decay: f32,
    shrink: f32,
    first_weight: f32,
    first_rest: f32,
    beta2: f32,
    second_weight: f32,
    step_size: f32,
    second_correction: f32,
    epsilon: f32,
}

kernel! {
    fn descend(
        c: Coefficients,
        decay: Decay,
        model: &mut [f32],
        sum: &[f32],
        first: &mut [f32],
        second: &mut [f32],
    ) {
        let near = c.first_weight < 0.5;
        match (decay, near) {
            (Decay::None, true) => update::<false, false, true>(c, model, sum, first, second),
            (Decay::None, false) => update::<false, false, false>(c, model, sum, first, second),
            (Decay::L2, true) => update::<true, false, true>(c, model, sum, first, second),
            (Decay::L2, false) => update::<true, false, false>(c, model, sum, first, second),
            (Decay::Decoupled, true) => update::<false, true, true>(c, model, sum, first, second),
            (Decay::Decoupled, false) => update::<false, true, false>(c, model, sum, first, second),
        }
    }
}

kernel! {
    fn descend_by_largest(
        c: Coefficients,
        decay: Decay,
        model: &mut [f32],
        sum: &[f32],
        state: [&mut [f32]; 3],
    ) {
        let near = c.first_weight < 0.5;
        let [first, second, largest] = state;
        let state = first.iter_mut().zip(second).zip(largest);
        for ((parameter, total), ((m, v), x)) in model.iter_mut().zip(sum).zip(state) {
            let (gradient, value) = match decay {
                Decay::None => (total * c.factor, *parameter),
                Decay::L2 => (total * c.factor + c.weight_decay * *parameter, *parameter),
                Decay::Decoupled => (total * c.factor, *parameter * c.shrink),
            };
            let distance = gradient - *m;
            *m = if near { *m + c.first_weight * distance } else { gradient - c.first_rest * distance };
            *v = c.beta2 * *v + c.second_weight * gradient * gradient;
            // As torch.maximum, this keeps NaN.
            *x = if *v > *x || v.is_nan() { *v } else { *x };
            *parameter = value + c.step_size * *m / (x.sqrt() / c.second_correction + c.epsilon);
        }
    }
}

#[inline(always)]
fn update<const L2: bool, const DECOUPLED: bool, const NEAR: bool>(
    c: Coefficients,
    model: &mut [f32],
    sum: &[f32],
    first: &mut [f32],
    second: &mut [f32],
) {
    for (((parameter, total), m), v) in model.iter_mut().zip(sum).zip(first).zip(second) {
        let mut gradient = total * c.factor;
        let mut value = *parameter;
        if L2 {
            gradient += c.weight_decay * value;
        }
        if DECOUPLED {
            value *= c.shrink;
        }
        let distance = gradient - *m;
        *m = if NEAR { *m + c.first_weight * distance } else { gradient - c.first_rest * distance };
        *v = c.beta2 * *v + c.second_weight * gradient * gradient;
        let denominator = v.sqrt() / c.second_correction + c.epsilon;
        *parameter = value + c.step_size * *m / denominator;
    }
}
