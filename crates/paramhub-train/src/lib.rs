//! A small layer-wise trainer on candle that exchanges its gradients through a hub or by collectives.
//!
//! [`data`] gives every rank its shard of the global batch, [`net`] computes gradients one layer at a time,
//! [`exchange`] turns them into the next parameters key by key, and [`trainer`] overlaps the two: *wait-free
//! backpropagation* (Poseidon, section 3.1). A layer's gradient leaves as soon as it exists, while the layers below
//! still compute, and the next forward pass waits for each layer's parameters only when it gets there.
//!
//! [`dataflow`] overlaps them by other means, and layers with each other: every layer's forward, backward and update is an operation
//! of a dependency engine, and a key-value store sums the gradients (MPI collectives in DAGs).
//!
//! Candle does the matrix products and holds the tensors; everything else works on plain slices of them.
//!
//! # Threads
//! A worker computes in one thread: workers share a machine and their exchange needs the other cores. Candle reads
//! its number of threads from the environment at every product, so whoever starts a worker sets [`THREADS_VARIABLE`]
//! to `1`. An engine's threads come on top of that ([`dataflow::engine_config`]). The results are the same bits with any
//! number of threads; only the speed differs.
#![forbid(unsafe_code)]

pub mod data;
pub mod dataflow;
pub mod exchange;
pub mod hub;
pub mod local;
pub mod net;
pub mod random;
pub mod trainer;

/// The environment variable with candle's number of compute threads; set it to `1` for each worker process.
pub const THREADS_VARIABLE: &str = "RAYON_NUM_THREADS";

/// The compute threads that candle takes in this process, from [`THREADS_VARIABLE`] or the machine.
pub fn compute_threads() -> usize {
    candle_core::utils::get_num_threads()
}
