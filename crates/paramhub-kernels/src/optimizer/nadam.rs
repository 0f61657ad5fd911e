use paramhub_core::hyperparameters::{HyperparameterError, Hyperparameters};

use super::powers::{exponential, power};
use super::{Decay, Optimizer, Step, assert_step, descent_factor, is_set, slots_mut};
use crate::dispatch::{Isa, kernel};

/// The natural logarithm of 0.96, the base of torch's momentum schedule.
const LN_0_96: f64 = -0.040_821_994_520_255_166;

/// A product of momenta below which one minus it is 1 in f64.
const NEGLIGIBLE: f64 = 1e-17;

/// NAdam as torch.optim.NAdam defines it, registered as `nadam`: Adam with Nesterov's momentum (Dozat, 2016).
///
/// With `g` the mean gradient, `p` the parameter, `m` and `v` the moments (state slots 0 and 1) and `t` the step's number,
/// in this order. `momentum_decay` (0.004) and `decoupled` (0 or 1) are extra hyperparameters:
///
/// ```text
/// g = g + weight_decay * p                        unless decoupled
/// p = p * (1 - learning_rate * weight_decay)      if decoupled
/// mu(i) = beta1 * (1 - 0.5 * 0.96^(i * momentum_decay))
/// M = mu(1) * mu(2) * ... * mu(t)
/// m = m + (1 - beta1) * (g - m)
/// v = beta2 * v + (1 - beta2) * g * g
/// d = sqrt(v / (1 - beta2^t)) + epsilon
/// p = p - learning_rate * (1 - mu(t)) / (1 - M) * g / d
///       - learning_rate * mu(t + 1) / (1 - M * mu(t + 1)) * m / d
/// ```
///
/// torch keeps `M` in its state. Here it follows from `t`, with the `beta1` and `momentum_decay` of the step.
#[derive(Clone, Copy, Debug)]
pub struct NAdam {
    isa: Isa,
}

impl NAdam {
    /// NAdam with the widest instruction set of this CPU.
    pub fn new() -> Self {
        Self::with_isa(Isa::best())
    }

    /// NAdam with the bodies for `isa`.
    pub fn with_isa(isa: Isa) -> Self {
        Self { isa }
    }
}

impl Default for NAdam {
    fn default() -> Self {
        Self::new()
    }
}

impl Optimizer for NAdam {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        2
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        assert_step(step, model, sum);
        let h = step.hyperparameters;
        let momenta = Momenta::at(step.number, h.beta1, h.value("momentum_decay").unwrap_or(0.004));
        let first_weight = 1.0 - h.beta1;
        let coefficients = Coefficients {
            factor: descent_factor(step),
            weight_decay: h.weight_decay as f32,
            shrink: (1.0 - h.learning_rate * h.weight_decay) as f32,
            first_weight: first_weight as f32,
            first_rest: 1.0 - first_weight as f32,
            beta2: h.beta2 as f32,
            second_weight: (1.0 - h.beta2) as f32,
            second_correction: (1.0 - power(h.beta2, step.number)) as f32,
            gradient_rate: (-h.learning_rate * (1.0 - momenta.now) / (1.0 - momenta.product)) as f32,
            moment_rate: (-h.learning_rate * momenta.next / (1.0 - momenta.product * momenta.next)) as f32,
            epsilon: h.epsilon as f32,
        };
        let decay = Decay::of(h, is_set(h, "decoupled"));
        let [first, second] = slots_mut(state, model.len());
        descend(self.isa, coefficients, decay, model, sum, first, second);
    }

    fn defaults(&self) -> Hyperparameters {
        Hyperparameters { learning_rate: 2e-3, ..Hyperparameters::default() }
    }

    fn check(&self, h: &Hyperparameters) -> Result<(), HyperparameterError> {
        h.check_not_negative(&["learning_rate", "weight_decay", "epsilon"])?;
        h.check_given_not_negative(&["momentum_decay"])?;
        h.check_fraction(&["beta1", "beta2"])
    }
}

/// The momenta of a step.
struct Momenta {
    now: f64,
    next: f64,
    /// The product of those of all steps up to this one.
    product: f64,
}

impl Momenta {
    fn at(step: u64, beta1: f64, decay: f64) -> Momenta {
        let base = exponential(decay * LN_0_96);
        let momentum = |scale: f64| beta1 * (1.0 - 0.5 * scale);
        // Each momentum is less than beta1, so after some hundred steps the product is 0 for all purposes.
        let mut product = if power(beta1, step) < NEGLIGIBLE { 0.0 } else { 1.0 };
        let (mut number, mut scale) = (0, 1.0);
        while product > 0.0 && number < step {
            number += 1;
            scale *= base;
            product *= momentum(scale);
            if product < NEGLIGIBLE {
                product = 0.0;
            }
        }
        let scale = power(base, step);
        Momenta { now: momentum(scale), next: momentum(scale * base), product }
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
    second_correction: f32,
    gradient_rate: f32,
    moment_rate: f32,
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
        match (decay, c.first_weight < 0.5) {
            (Decay::None, true) => update::<false, false, true>(c, model, sum, first, second),
            (Decay::None, false) => update::<false, false, false>(c, model, sum, first, second),
            (Decay::L2, true) => update::<true, false, true>(c, model, sum, first, second),
            (Decay::L2, false) => update::<true, false, false>(c, model, sum, first, second),
            (Decay::Decoupled, true) => update::<false, true, true>(c, model, sum, first, second),
            (Decay::Decoupled, false) => update::<false, true, false>(c, model, sum, first, second),
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
        let denominator = (*v / c.second_correction).sqrt() + c.epsilon;
        *parameter = value + c.gradient_rate * gradient / denominator + c.moment_rate * *m / denominator;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn momenta_follow_their_definition() {
        for (beta1, decay) in [(0.9, 0.004), (0.99, 0.0), (0.5, 1.0), (0.0, 0.004)] {
            let mut product = 1.0;
            let momentum = |step: u64| beta1 * (1.0 - 0.5 * f64::powf(0.96, step as f64 * decay));
            for step in 1..6000 {
                product *= momentum(step);
                let found = Momenta::at(step, beta1, decay);
                assert!((found.now - momentum(step)).abs() < 1e-12, "{beta1}, {decay}, {step}");
                assert!((found.next - momentum(step + 1)).abs() < 1e-12, "{beta1}, {decay}, {step}");
                assert!((found.product - product).abs() < 1e-12, "{beta1}, {decay}, {step}");
            }
        }
    }
}
