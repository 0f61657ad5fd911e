//! A small layer-wise trainer that exchanges its gradients through a hub or by collectives.
//!
//! [`data`] gives every rank its shard of the global batch, [`net`] computes gradients one layer at a time,
//! [`exchange`] turns them into the next parameters key by key, and [`trainer`] overlaps the two: *wait-free
//! backpropagation* (Poseidon, section 3.1). A layer's gradient is sent as soon as it exists, while the
//! layers below still compute, and the next forward pass waits for each layer's parameters only when it gets
//! there.
//!
//! [`dataflow`] overlaps them in another way, and layers with each other: every layer's forward pass,
//! backward pass and update is an operation of a dependency engine, and a key-value store sums the gradients
//! (MPI collectives in DAGs).
//!
//! The matrix products are those of `paramhub-kernels`.
//!
//! # Threads
//! A worker computes in one thread: workers share a machine and their exchange needs the other cores. With an
//! engine, layers compute in its threads ([`dataflow::engine_config`]). The results are the same bits with
//! any number of threads; only the speed differs.
#![forbid(unsafe_code)]

pub mod data;
pub mod dataflow;
pub mod exchange;
pub mod hub;
pub mod local;
pub mod net;
pub mod random;
pub mod trainer;
