//! What happens to a chunk once its contributions are summed: the mean and the update in one pass, while
//! the chunk is in cache (PHub section 3.2.2).

mod adam;
mod mean;
mod sgd;
mod undivided;

pub use adam::Adam;
pub use mean::Mean;
pub use sgd::Sgd;
pub use undivided::Undivided;

use std::sync::Arc;

use paramhub_core::hyperparameters::{HyperparameterError, Hyperparameters};

/// One update of one chunk.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The values in force for this step.
    pub hyperparameters: &'a Hyperparameters,
    /// How many updates this chunk has had, this one included: 1 or more. Adam's `t`.
    pub number: u64,
    /// How many contributions are in the sum: 1 or more.
    pub contributions: u32,
    /// What the mean gradient is multiplied with: 1, unless the job clips it or scales it otherwise.
    pub factor: f32,
}

/// What a sum of so many contributions is multiplied with to become their mean: the quotient, rounded to f32.
pub fn mean_factor(contributions: u32) -> f32 {
    1.0 / contributions as f32
}

impl Step<'_> {
    /// What a sum is multiplied with to become the gradient of this step: `1 / contributions`, rounded to f32, times
    /// `factor`, rounded again; a factor of 1 changes no bit.
    ///
    /// An optimizer that takes the mean does so as `sum[i] * step.mean_factor()`, a multiplication, so that whoever
    /// repeats a step elsewhere gets the same bits.
    pub fn mean_factor(&self) -> f32 {
        mean_factor(self.contributions) * self.factor
    }
}

/// An update rule, fused with the division by the number of contributions where it takes the mean.
///
/// A rule is elementwise: element `i` of the new model and state depends on elements `i` alone, because a
/// hub cuts tensors into chunks and calls each chunk's owner by itself. Implementations hold no state of
/// their own; what they must remember lives in `state`, which the hub allocates, zeroes, saves and restores.
/// Calls happen on the data path: do not allocate, lock or log.
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
    /// State values per parameter that a job needs which starts with `hyperparameters`: 1 for SGD with
    /// momentum, 0 without, 2 for Adam.
    fn state_slots(&self, hyperparameters: &Hyperparameters) -> usize;

    /// Updates one chunk: `model` and `sum` have its length, `state` holds its slots back to back (slot `k`
    /// is `state[k * model.len()..(k + 1) * model.len()]`, see [`slots_mut`]), as many as
    /// [`state_slots`](Self::state_slots) said when the job began, zeroed before step 1. Where the job has groups of keys it
    /// holds as many as the most demanding of them needs.
    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]);

    /// The values a job gets that names none.
    fn defaults(&self) -> Hyperparameters {
        Hyperparameters::default()
    }

    /// Whether every call must bring a whole chunk as the job cut it. By default a hub may cut chunks smaller still, into
    /// blocks that stay in the first cache while other things happen to them.
    fn needs_whole_chunks(&self) -> bool {
        false
    }

    /// Whether this optimizer can run on `hyperparameters`. By default it can on any.
    ///
    /// # Errors
    /// Names the value at fault and what it must be.
    fn check(&self, hyperparameters: &Hyperparameters) -> Result<(), HyperparameterError> {
        let _ = hyperparameters;
        Ok(())
    }

    /// Whether a job that began with `initial` can go on with `next`: `next` passes
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
