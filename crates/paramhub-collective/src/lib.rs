//! Collectives in a dependency engine (MPI collectives in DAGs): the [`engine`], and [communicators](communicator) whose collectives
//! its operations call.
#![forbid(unsafe_code)]

pub mod communicator;
pub mod engine;
