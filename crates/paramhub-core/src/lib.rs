//! The vocabulary and the rules of paramhub.
//!
//! Everything that a worker, a hub and the connection manager must agree on lives here: keys and their chunks,
//! the placement of chunks on hub cores, the frames on the wire, the proofs of identity, the manager's requests and
//! answers, and the state machines that say what may happen to a chunk next. Nothing here opens a socket, reads a
//! clock or spawns a thread, so that the hub, the worker, the tests and a simulator run the very same rules.
//!
//! A gradient's way through these modules: [`key`] names the tensor, [`chunk`] cuts it, [`placement`] gives each chunk a
//! [`Route`](placement::Route), [`wire`] frames it, [`exchange`] decides what the hub does with it, and
//! [`requests`] what the worker makes of the answer. [`cost`] says beforehand what an exchange costs the network.
#![forbid(unsafe_code)]

pub mod arena;
pub mod auth;
pub mod checkpoint;
pub mod chunk;
pub mod codec;
pub mod composition;
pub mod consistency;
pub mod cost;
pub mod exchange;
pub mod factors;
pub mod hyperparameters;
pub mod key;
pub mod lateness;
pub mod limits;
pub mod norms;
pub mod pairs;
pub mod placement;
pub mod ready_set;
pub mod requests;
pub mod scheme;
pub mod service;
pub mod settings;
pub mod stragglers;
pub mod wire;

/// Data is sent as it lies in memory, and the wire is little-endian.
#[cfg(not(target_endian = "little"))]
compile_error!("paramhub supports little-endian machines only: parameters are sent as they lie in memory");
