//! The seam between the trainer and whoever turns gradients into parameters.

use std::error::Error;
use std::ops::Range;
use std::time::Duration;

use thiserror::Error;

/// How one step's gradients become the next parameters, key by key.
///
/// Keys are counted from the front of the network, so that a smaller key is needed sooner: it is more urgent.
///
/// In each step the trainer asks for the [`parameters`](Self::parameters) of every key, front layers first, and then pushes the
/// gradients of every key once for each rank in [`ranks`](Self::ranks), in rank order, last layers first. After the
/// last step it asks for all parameters once more.
pub trait Exchange {
    /// Workers that share the job, here or elsewhere.
    fn workers(&self) -> usize;

    /// The ranks whose shards this process computes: one of many, or all of them.
    fn ranks(&self) -> Range<usize>;

    /// The step that the parameters to start from are of: what was learnt before it need not be learnt again.
    fn first_step(&self) -> usize {
        0
    }

    /// Takes the gradient of one key as soon as it exists, averaged over the rank's shard. Must not wait for the network.
    ///
    /// The memory is the exchange's from here on; the trainer has a fresh result in every step.
    ///
    /// # Errors
    /// Whatever makes the exchange fail, now or before.
    fn push(&mut self, key: usize, gradient: Vec<f32>) -> Result<(), ExchangeError>;

    /// Whether the gradient of this weight, and of the bias that follows it, is to come as its factors.
    fn takes_factors(&self, weight: usize) -> bool {
        let _ = weight;
        false
    }

    /// Takes the factors of a fully connected layer in place of the gradients of its weight and bias. Must not wait for the
    /// network.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    fn push_factors(
        &mut self,
        weight: usize,
        inputs: &[f32],
        output_gradients: &[f32],
    ) -> Result<(), ExchangeError> {
        let _ = (inputs, output_gradients);
        Err(ExchangeError::Sequence { key: weight, reason: "factors of a key that takes none" })
    }

    /// Waits for the newest parameters of one key and puts them into `parameters`, which holds those of the last step; or
    /// the network's initial ones on the first call for a key, when nothing has been pushed yet and the initial
    /// parameters of the job are put there. Memory of the same length may be exchanged instead of copied.
    ///
    /// # Errors
    /// Whatever makes the exchange fail.
    fn parameters(&mut self, key: usize, parameters: &mut Vec<f32>) -> Result<(), ExchangeError>;

    /// The step to take after `done` of them: a later one where the others went on without this process, which was late.
    fn next_step(&self, done: usize) -> usize {
        done
    }

    /// What has been exchanged since the beginning.
    fn statistics(&self) -> ExchangeStatistics;
}

/// What an exchange has done since its beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExchangeStatistics {
    /// Time during which at least one key was under way, from its push to the arrival of its parameters.
    pub in_flight: Duration,
    /// The part of `in_flight` that this process spent waiting for parameters; it computed in the rest.
    pub exposed: Duration,
    /// Bytes that left this process.
    pub bytes_sent: u64,
    /// Bytes that came back.
    pub bytes_received: u64,
}

/// Why an exchange cannot go on.
#[derive(Debug, Error)]
pub enum ExchangeError {
    /// The network is not the one that the exchange was made for.
    #[error("key {key} has {expected} elements, but {found} were given")]
    Length {
        /// Which key.
        key: usize,
        /// Its elements.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// More keys, pushes or requests than agreed.
    #[error("key {key}: {reason}")]
    Sequence {
        /// Which key.
        key: usize,
        /// What is out of order.
        reason: &'static str,
    },
    /// The transport, the hub or another worker.
    #[error(transparent)]
    Remote(Box<dyn Error + Send + Sync>),
}
