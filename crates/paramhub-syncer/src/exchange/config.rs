//! The configuration and the counters of an exchange of factors.

use std::sync::Arc;
use std::time::Duration;

use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_kernels::Optimizer;
use paramhub_mesh::Mesh;
use paramhub_worker::AbortHandle;

/// The configuration of a [`FactorExchange`](super::FactorExchange).
pub struct FactorConfig {
    /// A mesh of all workers of the job, for this exchange alone.
    pub mesh: Mesh,
    /// The kernel of the job's optimizer.
    pub optimizer: Arc<dyn Optimizer>,
    /// The hyperparameters at step 0 of each group of the optimizer. The optimizer has accepted them.
    pub hyperparameters: Vec<Hyperparameters>,
    /// The number of threads that multiply; by default as many as there are processors.
    pub threads: usize,
    /// The host of each rank, by any numbers that all ranks agree on: factors cross to another host once, and
    /// a rank there passes them on. By default each rank is on a host of its own.
    pub hosts: Vec<u32>,
    /// `true` to fail, with an error that names rank and key, where factors hold a NaN or an infinity; by
    /// default they pass.
    pub reject_non_finite: bool,
    /// A handle of the job that the exchange belongs to. If this worker's factors are at fault, it ends the
    /// job with the reason.
    pub abort_handle: Option<AbortHandle>,
}

impl FactorConfig {
    /// A configuration with one group and a thread for each processor.
    pub fn new(mesh: Mesh, optimizer: Arc<dyn Optimizer>, hyperparameters: Hyperparameters) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let hosts = (0..mesh.size()).collect();
        let hyperparameters = vec![hyperparameters];
        let (reject_non_finite, abort_handle) = (false, None);
        FactorConfig { mesh, optimizer, hyperparameters, threads, hosts, reject_non_finite, abort_handle }
    }
}

/// The counters of an exchange since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FactorStatistics {
    /// Bytes of factors sent: to the peers on this host, to one on each other host, and of other ranks'
    /// factors that were passed on.
    pub bytes_sent: u64,
    /// Bytes of factors received, of all peers.
    pub bytes_received: u64,
    /// The time spent multiplying and updating, summed over all layers.
    pub rebuilding: Duration,
    /// The number of updates, summed over all layers.
    pub updates: u64,
}
