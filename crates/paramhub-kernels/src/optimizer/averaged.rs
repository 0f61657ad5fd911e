use paramhub_core::hyperparameters::{HyperparameterError, Hyperparameters};

use super::{Optimizer, Step, TensorSquares};
use crate::dispatch::{Isa, kernel};

/// An optimizer that also keeps an exponential moving average of each parameter, if the extra hyperparameter `ema_decay` is given.
///
/// With `p` the parameter after the update and `a` the average, which is the last state slot:
///
/// ```text
/// a = p                               at the first update
/// a = a + (1 - ema_decay) * (p - a)   at each later one
/// ```
///
/// That is `torch.optim.swa_utils.get_ema_multi_avg_fn(ema_decay)`, called after each step. The average is made while the chunk
/// is in cache. All built-in optimizers with parameters are registered with it.
#[derive(Clone, Copy, Debug)]
pub struct Averaged<O> {
    optimizer: O,
    isa: Isa,
}

impl<O: Optimizer> Averaged<O> {
    /// The optimizer with an average, which is made by the widest instruction set of this CPU.
    pub fn new(optimizer: O) -> Self {
        Self { optimizer, isa: Isa::best() }
    }

    /// The same with the bodies for `isa`.
    pub fn with_isa(self, isa: Isa) -> Self {
        Self { isa, ..self }
    }
}

impl<O: Optimizer> Optimizer for Averaged<O> {
    fn state_slots(&self, h: &Hyperparameters) -> usize {
        self.optimizer.state_slots(h) + usize::from(h.value("ema_decay").is_some())
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        self.optimizer.apply(step, model, sum, state);
        let Some(decay) = step.hyperparameters.value("ema_decay") else { return };
        // The last slot is the same one also where another group needs more slots, or this one needs fewer than at first.
        let begin = state.len() - model.len();
        let average = &mut state[begin..];
        if step.number == 1 || decay == 0.0 {
            average.copy_from_slice(model);
        } else {
            approach(self.isa, (1.0 - decay) as f32, average, model);
        }
    }

    fn defaults(&self) -> Hyperparameters {
        self.optimizer.defaults()
    }

    fn needs_whole_chunks(&self) -> bool {
        self.optimizer.needs_whole_chunks()
    }

    fn needs_tensor_norms(&self) -> bool {
        self.optimizer.needs_tensor_norms()
    }

    fn squares(&self, step: &Step<'_>, model: &[f32], sum: &[f32], state: &[f32]) -> TensorSquares {
        self.optimizer.squares(step, model, sum, state)
    }

    fn check(&self, h: &Hyperparameters) -> Result<(), HyperparameterError> {
        h.check_given_fraction(&["ema_decay"])?;
        self.optimizer.check(h)
    }
}

kernel! {
    fn approach(weight: f32, average: &mut [f32], model: &[f32]) {
        for (average, parameter) in average.iter_mut().zip(model) {
            *average += weight * (parameter - *average);
        }
    }
}
