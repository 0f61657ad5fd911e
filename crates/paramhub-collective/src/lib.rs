//! Collectives in a dependency engine (MPI collectives in DAGs): the [`engine`], and [communicators](communicator) whose collectives
//! its operations call, and [key-value stores](kvstore) in the three designs that put these together.
#![forbid(unsafe_code)]

pub mod communicator;
pub mod engine;
pub mod kvstore;
