//! The training loop, the same with and without a hub.

use std::ops::AddAssign;
use std::time::{Duration, Instant};

use paramhub_collective::kvstore::StoreError;
use thiserror::Error;

use crate::data::{Data, DataError, EpochOrder};
use crate::exchange::{Exchange, ExchangeError, ExchangeStatistics};
use crate::net::{LayerGradient, NetError, Network};

/// The configuration of a training run. Network, data, optimizer and number of workers come with the other
/// arguments of [`train`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainConfig {
    /// Passes over the training set.
    pub epochs: usize,
    /// Examples per worker and step.
    pub batch: usize,
    /// Decides the order of the examples. Every rank must have the same.
    pub seed: u64,
    /// The times at which accuracy on the test set is measured.
    pub evaluate: Evaluate,
}

/// The times at which accuracy on the test set is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evaluate {
    /// Never by this process.
    Never,
    /// At the end, with the final parameters.
    AtEnd,
    /// At the end and after every so many epochs, for which it waits for all parameters of the step.
    Every(usize),
}

/// The results of an epoch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Epoch {
    /// The number of the epoch, from 1.
    pub epoch: usize,
    /// The step of the run at which the epoch ended.
    pub step: usize,
    /// Mean loss of this process's shards.
    pub loss: f64,
    /// Share of the test set that is classified correctly afterwards, if it was measured.
    pub accuracy: Option<f64>,
}

/// The progress of a run, after each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Steps done, from 1.
    pub step: usize,
    /// Steps in all.
    pub of: usize,
    /// The epoch of this step, from 1.
    pub epoch: usize,
    /// Mean loss of this process's shards in this step.
    pub loss: f64,
    /// Examples of this process per second, since the beginning.
    pub examples_per_second: f64,
    /// Share of the test set that is classified correctly after this step, if it was measured.
    pub accuracy: Option<f64>,
}

/// The results of a run. Times are those of this process.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Steps taken. Fewer than the run has if others went on without this process.
    pub steps: usize,
    /// Seconds of all steps, without measuring the test set.
    pub seconds: f64,
    /// Mean loss of this process's shards over the last epoch, over the steps that it took; 0 if it took
    /// none.
    pub loss: f64,
    /// Share of the test set that is classified correctly, if it was measured.
    pub accuracy: Option<f64>,
    /// The epochs whose end this process reached.
    pub epochs: Vec<Epoch>,
    /// Seconds spent on anything but the exchange.
    pub compute_seconds: f64,
    /// Seconds spent inside the exchange: handing over gradients and waiting for parameters.
    pub wait_seconds: f64,
    /// Seconds during which at least one key was under way.
    pub exchange_seconds: f64,
    /// The share of `exchange_seconds` during which this process computed; 0 if nothing was under way.
    pub hidden_fraction: f64,
    /// Bytes that left this process.
    pub bytes_sent: u64,
    /// Bytes that came back.
    pub bytes_received: u64,
    /// The final parameters, one vector per key.
    pub parameters: Vec<Vec<f32>>,
}

/// The reason why a run stopped.
#[derive(Debug, Error)]
pub enum TrainError {
    /// The data set cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The network cannot be built, or its parameters not be changed.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The exchange failed.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// The key-value store or an operation of the engine failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The training set is smaller than one global batch.
    #[error(
        "{workers} workers with a batch of {batch} need {needed} examples for one step: the training set has {found}"
    )]
    TooFewExamples {
        /// Workers of the job.
        workers: usize,
        /// Examples per worker and step.
        batch: usize,
        /// Examples of one step: the product of both.
        needed: usize,
        /// Examples in the training set.
        found: usize,
    },
    /// The batch is empty.
    #[error("a batch needs at least one example")]
    EmptyBatch,
    /// The network was built for other images.
    #[error("the network is for images of {network}, the data has {data}")]
    Geometry {
        /// The images for which the network was built.
        network: crate::data::Geometry,
        /// The images of the data set.
        data: crate::data::Geometry,
    },
}

/// Trains a network. The gradients of each layer are sent while the layers below it compute, and each layer
/// waits for its own new parameters only when the next forward pass reaches it.
///
/// The training begins at the exchange's [first step](Exchange::first_step), in the middle of an epoch if
/// need be.
///
/// A process computes the shards of the exchange's ranks, one after the other, on the same parameters.
///
/// # Errors
/// The first thing that fails, in data, network or exchange.
pub fn train(
    config: &TrainConfig,
    data: &Data,
    network: &mut Network,
    exchange: &mut dyn Exchange,
    on_progress: &mut dyn FnMut(&Progress),
) -> Result<Report, TrainError> {
    let (workers, ranks) = (exchange.workers(), exchange.ranks());
    let steps_per_epoch = check(config, data, network, workers)?;
    let of = config.epochs * steps_per_epoch;
    let started = Instant::now();
    let mut run = Run { network, exchange, waited: Duration::ZERO, labels: Vec::new() };
    let mut loss = Mean::default();
    let (mut epochs, mut evaluating) = (Vec::new(), Duration::ZERO);
    let (mut next, mut taken, mut current) = (run.exchange.first_step(), 0, None);
    while next < of {
        let (epoch, step) = (next / steps_per_epoch, next % steps_per_epoch);
        let order = match current.take() {
            Some((of_epoch, order)) if of_epoch == epoch => order,
            _ => {
                loss = Mean::default();
                EpochOrder::new(&data.train, config.seed, epoch, workers, config.batch)
            }
        };
        let mut step_loss = Mean::default();
        for rank in ranks.clone() {
            step_loss += run.shard(data, order.shard(step, rank), rank == ranks.start)?;
        }
        current = Some((epoch, order));
        loss += step_loss.value();
        taken += 1;
        next = run.exchange.next_step(next + 1);
        let mut accuracy = None;
        if next / steps_per_epoch > epoch {
            accuracy = match config.evaluate {
                Evaluate::Every(every) if (epoch + 1) % every.max(1) == 0 => {
                    run.collect()?;
                    Some(timed(&mut evaluating, || run.network.accuracy(&data.test)))
                }
                _ => None,
            };
            epochs.push(Epoch { epoch: epoch + 1, step: next.min(of), loss: loss.value(), accuracy });
        }
        let examples = taken * ranks.len() * config.batch;
        let seconds = started.elapsed().saturating_sub(evaluating).as_secs_f64();
        on_progress(&Progress {
            step: next.min(of),
            of,
            epoch: epoch + 1,
            loss: step_loss.value(),
            examples_per_second: examples as f64 / seconds,
            accuracy,
        });
    }
    run.collect()?;
    let (elapsed, waited) = (started.elapsed().saturating_sub(evaluating), run.waited);
    let statistics = exchange.statistics();
    Ok(Report {
        steps: taken,
        seconds: elapsed.as_secs_f64(),
        loss: loss.value(),
        accuracy: match config.evaluate {
            Evaluate::Never => None,
            Evaluate::AtEnd | Evaluate::Every(_) => Some(network.accuracy(&data.test)),
        },
        epochs,
        compute_seconds: elapsed.saturating_sub(waited).as_secs_f64(),
        wait_seconds: waited.as_secs_f64(),
        exchange_seconds: statistics.in_flight.as_secs_f64(),
        hidden_fraction: hidden_fraction(&statistics),
        bytes_sent: statistics.bytes_sent,
        bytes_received: statistics.bytes_received,
        parameters: network.all_parameters(),
    })
}

/// Checks that configuration, data and network fit together. Returns the steps of an epoch.
pub(crate) fn check(
    config: &TrainConfig,
    data: &Data,
    network: &Network,
    workers: usize,
) -> Result<usize, TrainError> {
    let (batch, found) = (config.batch, data.train.len());
    if batch == 0 {
        return Err(TrainError::EmptyBatch);
    }
    if network.geometry() != data.train.geometry() {
        return Err(TrainError::Geometry { network: network.geometry(), data: data.train.geometry() });
    }
    let needed = workers.saturating_mul(batch);
    if needed > found {
        return Err(TrainError::TooFewExamples { workers, batch, needed, found });
    }
    Ok(found / needed)
}

/// The share of the time with keys under way in which this process computed. After the arrival of parameters
/// a process may wait for a processor to run on; that is no part of the exchange.
fn hidden_fraction(statistics: &ExchangeStatistics) -> f64 {
    if statistics.in_flight.is_zero() {
        return 0.0;
    }
    let hidden = statistics.in_flight.saturating_sub(statistics.exposed);
    hidden.as_secs_f64() / statistics.in_flight.as_secs_f64()
}

struct Run<'a> {
    network: &'a mut Network,
    exchange: &'a mut dyn Exchange,
    waited: Duration,
    labels: Vec<u8>,
}

impl Run<'_> {
    /// The forward and backward pass on one rank's shard. With `first` it takes new parameters.
    fn shard(
        &mut self,
        data: &Data,
        examples: impl Iterator<Item = usize>,
        first: bool,
    ) -> Result<f64, TrainError> {
        let Run { network, exchange, waited, labels } = self;
        let mut images = Vec::new();
        data.train.batch(examples, &mut images, labels);
        let logits = network.forward(images, |key, parameters| -> Result<(), TrainError> {
            if first {
                timed(waited, || exchange.parameters(key, parameters))?;
            }
            Ok(())
        })?;
        let (loss, gradient) = network.loss(logits, labels);
        // The answers do not change during a run. They are collected here because the exchange is borrowed
        // below.
        let by_factors: Vec<usize> = network.fully_connected().map(|(weight, _)| weight).collect();
        let by_factors: Vec<usize> =
            by_factors.into_iter().filter(|&weight| exchange.takes_factors(weight)).collect();
        network.backward(
            gradient,
            |weight| by_factors.contains(&weight),
            |weight, gradient| {
                timed(waited, || match gradient {
                    LayerGradient::Dense([of_weight, of_bias]) => {
                        exchange.push(weight, of_weight)?;
                        exchange.push(weight + 1, of_bias)
                    }
                    LayerGradient::Factors { inputs, output_gradients } => {
                        exchange.push_factors(weight, &inputs, &output_gradients)
                    }
                })
                .map_err(TrainError::from)
            },
        )?;
        Ok(loss)
    }

    /// Takes the parameters after the last step.
    fn collect(&mut self) -> Result<(), TrainError> {
        for key in 0..self.network.keys().len() {
            let Run { network, exchange, waited, .. } = self;
            network.lend_parameters(key, |values| timed(waited, || exchange.parameters(key, values)))??;
        }
        Ok(())
    }
}

fn timed<R>(total: &mut Duration, action: impl FnOnce() -> R) -> R {
    let started = Instant::now();
    let result = action();
    *total += started.elapsed();
    result
}

/// A running mean.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mean {
    sum: f64,
    count: usize,
}

impl Mean {
    pub(crate) fn value(&self) -> f64 {
        self.sum / self.count.max(1) as f64
    }
}

impl AddAssign<f64> for Mean {
    fn add_assign(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
    }
}
