//! This crate has what the command line and the benchmarks share: processes that are started and
//! supervised, the standard streams, values as people write them, models whose tensors are exchanged, and
//! the exchange that `paramhub bench exchange` measures.
#![forbid(unsafe_code)]

// This module is first because its `println!` and the like replace those of std in all modules that follow.
#[macro_use]
pub mod output;

pub mod exchange;
mod exit;
pub mod launch;
pub mod models;
pub mod values;

pub use exit::{ExitCode, Usage};
