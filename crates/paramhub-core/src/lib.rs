//! The vocabulary and the rules of paramhub.
//!
//! Everything that a worker, a hub and the connection manager must agree on is here: keys and their chunks,
//! the placement of chunks on hub cores, the frames on the wire, the proofs of identity, the manager's
//! requests and answers, and the state machines that decide what may happen next to a chunk, a job or a hub.
//! Nothing here opens a socket, reads a clock or spawns a thread, so the hub, the worker, the manager, the tests
//! and a simulator run the same rules.
//!
//! The way of a gradient through these modules: [`key`] names the tensor, [`chunk`] cuts it, [`placement`]
//! gives each chunk a [`Route`](placement::Route), [`wire`] frames it, [`exchange`] decides what the hub does
//! with it, and [`requests`] decides what the worker does with the answer. [`cost`] predicts what an exchange
//! costs the network. [`membership`] decides for the manager which processes and hubs are in a job,
//! [`job_control`] decides for a hub when a job opens, goes on and ends, and [`worker_job`] for a worker when its
//! job ends and how.
#![forbid(unsafe_code)]

pub mod arena;
pub mod auth;
pub mod between_sites;
pub mod checkpoint;
pub mod chunk;
pub mod codec;
pub mod combinations;
pub mod composition;
pub mod consistency;
pub mod cost;
pub mod exchange;
pub mod factors;
pub mod hyperparameters;
pub mod job_control;
pub mod key;
pub mod lateness;
pub mod leadership;
pub mod lease;
pub mod limits;
pub mod liveness;
pub mod membership;
pub mod norms;
pub mod pairs;
pub mod placement;
pub mod ports;
pub mod program_states;
pub mod ready_set;
pub mod requests;
pub mod resuming;
pub mod scheme;
pub mod service;
pub mod settings;
pub mod standbys;
pub mod stragglers;
pub mod stream_admission;
pub mod teams;
pub mod tokens;
pub mod wire;
pub mod worker_job;

/// Tensor data is sent as it is in memory, and the wire format is little-endian.
#[cfg(not(target_endian = "little"))]
compile_error!("paramhub supports little-endian machines only: parameters are sent as they lie in memory");
