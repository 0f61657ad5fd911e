//! The interface between the trainer and what turns gradients into parameters.

use std::error::Error;
use std::ops::Range;
use std::time::Duration;

use thiserror::Error;

/// The way in which one step's gradients become the next parameters, key by key.
///
/// Keys are counted from the front of the network, so that a smaller key is needed sooner: it is more urgent.
///
/// In each step the trainer asks for the [`parameters`](Self::parameters) of every key, front layers first, and then pushes the
/// gradients of every key once for each rank in [`ranks`](Self::ranks), in rank order, last layers first. After the
/// last step it asks for all parameters once more.
pub trait Exchange {
    /// The number of workers that share the job, here or elsewhere.
    fn workers(&self) -> usize;

    /// The ranks whose shards this process computes: one of many, or all of them.
    fn ranks(&self) -> Range<usize>;

    /// The step whose parameters the training starts from; earlier steps need not be learnt again.
    fn first_step(&self) -> usize {
        0
    }

    /// Takes the gradient of one key as soon as it exists, averaged over the rank's shard. It must not wait
    /// for the network.
    ///
    /// The exchange keeps the memory; the trainer allocates a new result in every step.
    ///
    /// # Errors
    /// When the exchange fails, now or before.
    fn push(&mut self, key: usize, gradient: Vec<f32>) -> Result<(), ExchangeError>;

    /// Returns whether this weight, and the bias that follows it, need the factors of their gradients in
    /// place of the gradients.
    fn takes_factors(&self, weight: usize) -> bool {
        let _ = weight;
        false
    }

    /// Takes the factors of a fully connected layer in place of the gradients of its weight and bias. It must
    /// not wait for the network.
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

    /// Waits for the newest parameters of one key and puts them into `parameters`, which holds those of the
    /// last step. On the first call for a key nothing has been pushed yet: `parameters` then holds the
    /// network's initial ones, and receives the job's. Memory of the same length may be exchanged instead of
    /// copied.
    ///
    /// # Errors
    /// When the exchange fails.
    fn parameters(&mut self, key: usize, parameters: &mut Vec<f32>) -> Result<(), ExchangeError>;

    /// The step to take after `done` steps. It is a later one if the other workers went on without this
    /// process because it was late.
    fn next_step(&self, done: usize) -> usize {
        done
    }

    /// The statistics of the exchange since the beginning.
    fn statistics(&self) -> ExchangeStatistics;
}

/// The counters of an exchange since its beginning.
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

/// The reason why an exchange cannot go on.
#[derive(Debug, Error)]
pub enum ExchangeError {
    /// The network is not the one for which the exchange was made.
    #[error("key {key} has {expected} elements, but {found} were given")]
    Length {
        /// The key.
        key: usize,
        /// Elements that the exchange expects.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// More keys, pushes or requests than agreed.
    #[error("key {key}: {reason}")]
    Sequence {
        /// The key.
        key: usize,
        /// The call that is out of order.
        reason: &'static str,
    },
    /// The transport, the hub or another worker failed.
    #[error(transparent)]
    Remote(Box<dyn Error + Send + Sync>),
}
