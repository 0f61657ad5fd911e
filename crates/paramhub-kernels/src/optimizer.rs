//! The processing of a chunk's complete sum: the mean and the update in one pass, while the chunk is in cache
//! (PHub section 3.2.2).

mod adadelta;
mod adagrad;
mod adam;
mod averaged;
mod lamb;
mod lars;
mod lion;
mod mean;
mod nadam;
mod powers;
mod rmsprop;
mod sgd;
mod undivided;

pub use adadelta::Adadelta;
pub use adagrad::Adagrad;
pub use adam::Adam;
pub use averaged::Averaged;
pub use lamb::Lamb;
pub use lars::Lars;
pub use lion::Lion;
pub use mean::Mean;
pub use nadam::NAdam;
pub use rmsprop::RmsProp;
pub use sgd::Sgd;
pub use undivided::Undivided;

use std::sync::Arc;

use paramhub_core::hyperparameters::{HyperparameterError, Hyperparameters};
pub use paramhub_core::norms::TensorSquares;

/// One update of one chunk.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The hyperparameters of this step.
    pub hyperparameters: &'a Hyperparameters,
    /// The number of this update of the chunk, from 1. Adam's `t`.
    pub number: u64,
    /// Number of contributions in the sum, at least 1.
    pub contributions: u32,
    /// The factor for the mean gradient: 1, unless the job clips or scales it.
    pub factor: f32,
    /// The [sums of squares](Optimizer::squares) of the tensor that the chunk belongs to, for an optimizer that
    /// [needs](Optimizer::needs_tensor_norms) them.
    pub tensor: Option<TensorSquares>,
}

/// The factor that makes a mean of a sum of this many contributions: the quotient, rounded to f32.
pub fn mean_factor(contributions: u32) -> f32 {
    1.0 / contributions as f32
}

impl Step<'_> {
    /// The factor that makes this step's gradient of a sum: `1 / contributions`, rounded to f32, times
    /// `factor`, rounded again; a factor of 1 changes no bit.
    ///
    /// An optimizer that takes the mean does so as `sum[i] * step.mean_factor()`, a multiplication, so that a
    /// repetition of the step elsewhere gives the same bits.
    pub fn mean_factor(&self) -> f32 {
        mean_factor(self.contributions) * self.factor
    }
}

/// An update rule. A rule that takes the mean fuses the division by the number of contributions.
///
/// A rule is elementwise: element `i` of the new model and state depends on elements `i` alone, because a hub
/// cuts tensors into chunks and calls each chunk's owner by itself. Implementations have no state of their
/// own: `state` holds what they must keep, and the hub allocates, zeroes, saves and restores it. The calls
/// are on the data path: do not allocate, lock or log.
///
/// ```
/// use paramhub_kernels::{Hyperparameters, Optimizer, Step};
///
/// /// Moves each parameter by a fixed amount against its gradient's sign.
/// struct SignDescent;
///
/// impl Optimizer for SignDescent {
///     fn state_slots(&self, _: &Hyperparameters) -> usize {
///         0
///     }
///
///     fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], _: &mut [f32]) {
///         let rate = step.hyperparameters.learning_rate as f32;
///         for (parameter, total) in model.iter_mut().zip(sum) {
///             *parameter -= rate * (total * step.mean_factor()).signum();
///         }
///     }
/// }
/// ```
pub trait Optimizer: Send + Sync {
    /// State values per parameter of a job that starts with `hyperparameters`: 1 for SGD with momentum, 0
    /// without, 2 for Adam.
    fn state_slots(&self, hyperparameters: &Hyperparameters) -> usize;

    /// Updates one chunk. `model` and `sum` have its length. `state` has its slots back to back: slot `k` is
    /// `state[k * model.len()..(k + 1) * model.len()]`, see [`slots_mut`]. There are as many slots as
    /// [`state_slots`](Self::state_slots) returned when the job began, zeroed before step 1. In a job with
    /// groups of keys there are as many as the most demanding group needs.
    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]);

    /// Updates a whole tensor at once: takes its sums of squares first, if this optimizer needs them. The arguments are as for
    /// [`apply`](Self::apply).
    fn apply_to_tensor(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        let norms = Step { factor: 1.0, ..*step };
        let tensor = self.needs_tensor_norms().then(|| self.squares(&norms, model, sum, state));
        self.apply(&Step { tensor, ..*step }, model, sum, state);
    }

    /// The hyperparameters of a job that sets none.
    fn defaults(&self) -> Hyperparameters {
        Hyperparameters::default()
    }

    /// Returns whether each call must have a whole chunk of the job. By default a hub may cut chunks further,
    /// into blocks that stay in the first cache between several passes.
    fn needs_whole_chunks(&self) -> bool {
        false
    }

    /// Returns whether the update of a chunk needs the norms of the tensor to which it belongs, as those of LARS and LAMB do. A step
    /// then has two phases: when the sums of all chunks are complete, the hub asks for the [squares](Self::squares) of
    /// each chunk, and calls [`apply`](Self::apply) when it has those of all tensors. By default it needs none.
    fn needs_tensor_norms(&self) -> bool {
        false
    }

    /// The chunk's part of its tensor's sums of squares. `step.factor` is 1 here whatever it is in `apply`. The other arguments
    /// are as there.
    fn squares(&self, step: &Step<'_>, model: &[f32], sum: &[f32], state: &[f32]) -> TensorSquares {
        let _ = (step, model, sum, state);
        TensorSquares::default()
    }

    /// Returns whether this optimizer can run with `hyperparameters`. By default it can run with any.
    ///
    /// # Errors
    /// Names the value at fault and what it must be.
    fn check(&self, hyperparameters: &Hyperparameters) -> Result<(), HyperparameterError> {
        let _ = hyperparameters;
        Ok(())
    }

    /// Returns whether a job that began with `initial` can continue with `next`: `next` passes
    /// [`check`](Self::check) and needs no more state than was allocated.
    ///
    /// # Errors
    /// As `check`, and [`HyperparameterError::MoreState`].
    fn check_change(
        &self,
        initial: &Hyperparameters,
        next: &Hyperparameters,
    ) -> Result<(), HyperparameterError> {
        self.check(next)?;
        let (needed, allocated) = (self.state_slots(next), self.state_slots(initial));
        if needed > allocated {
            return Err(HyperparameterError::MoreState { needed, allocated });
        }
        Ok(())
    }
}

impl<O: Optimizer + ?Sized> Optimizer for Arc<O> {
    fn state_slots(&self, hyperparameters: &Hyperparameters) -> usize {
        (**self).state_slots(hyperparameters)
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        (**self).apply(step, model, sum, state);
    }

    fn defaults(&self) -> Hyperparameters {
        (**self).defaults()
    }

    fn needs_whole_chunks(&self) -> bool {
        (**self).needs_whole_chunks()
    }

    fn needs_tensor_norms(&self) -> bool {
        (**self).needs_tensor_norms()
    }

    fn squares(&self, step: &Step<'_>, model: &[f32], sum: &[f32], state: &[f32]) -> TensorSquares {
        (**self).squares(step, model, sum, state)
    }

    fn check(&self, hyperparameters: &Hyperparameters) -> Result<(), HyperparameterError> {
        (**self).check(hyperparameters)
    }

    fn check_change(
        &self,
        initial: &Hyperparameters,
        next: &Hyperparameters,
    ) -> Result<(), HyperparameterError> {
        (**self).check_change(initial, next)
    }
}

/// The first `N` slots of a chunk of `len` parameters.
///
/// # Panics
/// If `state` holds fewer.
pub fn slots_mut<const N: usize>(state: &mut [f32], len: usize) -> [&mut [f32]; N] {
    assert!(
        len.checked_mul(N).is_some_and(|needed| needed <= state.len()),
        "{} state values do not hold {N} slots of {len}",
        state.len()
    );
    let mut rest = state;
    std::array::from_fn(|_| {
        let (slot, tail) = std::mem::take(&mut rest).split_at_mut(len);
        rest = tail;
        slot
    })
}

/// The extra hyperparameter of optimizers that scale the updates of a tensor by the ratio of its norms.
const TRUST_COEFFICIENT: &str = "trust_coefficient";

/// The ratio by which an optimizer scales the updates of a tensor whose parameters and update have these norms: 1 if either is
/// 0, as for a tensor that begins with zeros, or if the coefficient is, which turns the scaling off.
fn trust_ratio(coefficient: f64, parameters: f64, update: f64) -> f64 {
    let is_scaled = coefficient > 0.0 && parameters > 0.0 && update > 0.0;
    if is_scaled { coefficient * parameters / update } else { 1.0 }
}

/// The sums of squares that an optimizer which needs them was given.
#[track_caller]
fn tensor_squares(step: &Step<'_>) -> TensorSquares {
    step.tensor.expect("an optimizer that needs the sums of a tensor is given them")
}

/// Whether an extra hyperparameter is there and not 0.
fn is_set(hyperparameters: &Hyperparameters, name: &str) -> bool {
    hyperparameters.value(name).is_some_and(|value| value != 0.0)
}

/// How a rule of Adam's family decays weights.
#[derive(Clone, Copy)]
enum Decay {
    None,
    /// The gradient grows by a share of the parameter.
    L2,
    /// The parameter shrinks by itself.
    Decoupled,
}

impl Decay {
    fn of(hyperparameters: &Hyperparameters, is_decoupled: bool) -> Decay {
        match (is_decoupled, hyperparameters.weight_decay != 0.0) {
            (_, false) => Decay::None,
            (false, true) => Decay::L2,
            (true, true) => Decay::Decoupled,
        }
    }
}

/// [`Step::mean_factor`], with the other sign if the extra hyperparameter `maximize` is set: the objective then grows along
/// the gradient.
fn descent_factor(step: &Step<'_>) -> f32 {
    let factor = step.mean_factor();
    if is_set(step.hyperparameters, "maximize") { -factor } else { factor }
}

#[track_caller]
fn assert_step(step: &Step<'_>, model: &[f32], sum: &[f32]) {
    assert_eq!(model.len(), sum.len(), "a sum is as long as its model");
    assert!(step.contributions > 0, "an update needs a contribution");
    assert!(step.number > 0, "updates are counted from 1");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_lie_back_to_back() {
        let mut state = [1.0, 2.0, 3.0, 4.0, 5.0];
        let [first, second] = slots_mut::<2>(&mut state, 2);
        assert_eq!((first, second), (&mut [1.0, 2.0][..], &mut [3.0, 4.0][..]));
        let [empty] = slots_mut::<1>(&mut state, 0);
        assert!(empty.is_empty());
    }

    #[test]
    #[should_panic(expected = "do not hold 2 slots of 3")]
    fn missing_state_is_a_bug_of_the_caller() {
        slots_mut::<2>(&mut [0.0; 5], 3);
    }
}
