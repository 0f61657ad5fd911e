//! Collectives in a dependency engine (MPI collectives in DAGs): the [`engine`],
//! [communicators](communicator) whose collectives the engine's operations call, and [key-value
//! stores](kvstore) in the three designs that combine the two.
#![forbid(unsafe_code)]

pub mod communicator;
pub mod engine;
pub mod kvstore;
