//! The specification of an exchange, and the messages between launcher and processes: a line of JSON each.

use paramhub::limits::CHUNK_BYTES_DEFAULT;
use paramhub::settings::{OptimizerChoice, Settings};
use paramhub::{Hyperparameters, KeyTable, Registry};
use serde::{Deserialize, Serialize};

/// The aggregator or optimizer that the hub applies to the gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// Nothing but their mean
    Mean,
    /// SGD without momentum
    Sgd,
    /// SGD with Nesterov's momentum
    Nesterov,
    /// Adam
    Adam,
}

/// The way in which bytes travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Loopback TCP
    Tcp,
    /// Memory that workers and hub share
    Shm,
    /// What workers choose by themselves: shared memory, since all are on one host
    Auto,
}

impl Transport {
    /// The name in words.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "TCP",
            Transport::Shm | Transport::Auto => "shared memory",
        }
    }

    /// The bound that `--raw` measures for it.
    pub fn bound(self) -> &'static str {
        match self {
            Transport::Tcp => "bare TCP streams",
            Transport::Shm | Transport::Auto => "one pass over shared memory",
        }
    }
}

/// One exchange, as all processes need it.
#[derive(Clone, Serialize, Deserialize)]
pub struct Spec {
    /// The tensors.
    pub keys: KeyTable,
    /// Worker processes.
    pub workers: u32,
    /// The aggregator or optimizer that the hub applies to the gradients.
    pub optimizer: Optimizer,
    /// Cores of each hub.
    pub cores: usize,
    /// Streams of each worker to each core.
    pub streams: usize,
    /// The unit of exchange.
    pub chunk_bytes: u32,
    /// `true` if the bound is measured, too.
    pub is_raw: bool,
    /// The way in which bytes travel.
    pub transport: Transport,
    /// `true` if workers read parameters from one copy.
    pub shares_parameters: bool,
    /// `true` if streams over TCP are encrypted.
    pub encrypt: bool,
    /// The number of steps from one copy of the model to the next at the hub, if the job goes back when a worker is lost.
    pub rewind_every: Option<u32>,
    /// `true` if Push and Pull of a key are one request.
    pub is_fused: bool,
    /// `true` if the parameters must be those that the kernels compute from the gradients, so that they are
    /// checked.
    pub is_exact: bool,
    /// The variant of an [`Extension`](super::Extension); `None` for the hub as it is.
    pub variant: Option<String>,
}

impl Spec {
    /// The means of gradients, over one stream of each worker to each of this many cores, by the hub as it is.
    pub fn new(keys: KeyTable, workers: u32, cores: usize) -> Spec {
        Spec {
            keys,
            workers,
            optimizer: Optimizer::Mean,
            cores,
            streams: 1,
            chunk_bytes: CHUNK_BYTES_DEFAULT,
            is_raw: false,
            transport: Transport::Tcp,
            shares_parameters: false,
            encrypt: false,
            rewind_every: None,
            is_fused: true,
            is_exact: true,
            variant: None,
        }
    }

    /// The settings on which the workers agree with the hub.
    ///
    /// # Errors
    /// If there is no such optimizer.
    pub fn settings(&self) -> anyhow::Result<Settings> {
        let name = match self.optimizer {
            Optimizer::Mean => "mean",
            Optimizer::Sgd | Optimizer::Nesterov => "sgd",
            Optimizer::Adam => "adam",
        };
        let is_nesterov = self.optimizer == Optimizer::Nesterov;
        let defaults = Registry::with_builtins().optimizer(name)?.defaults();
        let hyperparameters = Hyperparameters {
            learning_rate: 0.01,
            momentum: if is_nesterov { 0.9 } else { 0.0 },
            nesterov: is_nesterov,
            ..defaults
        };
        let optimizer =
            OptimizerChoice { hyperparameters: Some(hyperparameters), ..OptimizerChoice::named(name) };
        let settings =
            Settings { optimizer, chunk_bytes: self.chunk_bytes, ..Settings::new(self.keys.clone()) };
        // A sum of levels depends on the order, and the last exchange is compared bit by bit.
        let sums_levels = settings.quantises() && self.transport == Transport::Tcp;
        Ok(Settings { reproducible: sums_levels, ..settings })
    }

    /// Raw bytes of each stream, one way: a worker's gradients, spread evenly over as many streams as the
    /// worker has to the hub, core by core.
    pub fn raw_bytes(&self) -> Vec<usize> {
        let (bytes, streams) = (self.keys.bytes() as usize, self.cores * self.streams);
        (0..streams).map(|stream| bytes * (stream + 1) / streams - bytes * stream / streams).collect()
    }
}

#[cfg(test)]
mod tests {
    use paramhub::Key;

    use super::*;

    #[test]
    fn raw_streams_share_all_bytes_evenly() {
        let keys = KeyTable::new(vec![Key::new("k", [1001])]).unwrap();
        let spec = Spec::new(keys, 2, 3);
        assert_eq!(spec.raw_bytes(), [1334, 1335, 1335]);
        let twice = Spec { streams: 2, ..spec };
        assert_eq!(twice.raw_bytes(), [667, 667, 668, 667, 667, 668]);
    }
}
