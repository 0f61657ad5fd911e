//! The dependency engine: operations run when their data is ready (MPI collectives in DAGs, section 3.1;
//! MXNet's threaded engine).
//!
//! The caller pushes an operation with the [`Variable`]s that it reads and those that it mutates. The effect
//! is as if all operations ran one by one in order of push, but the engine runs them at the same time
//! wherever that makes no difference: reads of one variable run together, mutations one at a time. A variable
//! stands for anything that operations share: a gradient, a buffer, a communicator. The engine itself does
//! not touch it.
//!
//! ```
//! use paramhub_collective::engine::{Engine, EngineConfig, Kind};
//! use std::sync::{Arc, Mutex};
//!
//! let engine = Engine::new(EngineConfig::default())?;
//! let value = Arc::new(Mutex::new(1));
//! let variable = engine.variable();
//! for factor in [2, 3, 7] {
//!     let value = Arc::clone(&value);
//!     engine.operation("multiply", Kind::Compute).mutates([&variable]).push(move || {
//!         *value.lock().unwrap() *= factor;
//!         Ok::<(), String>(())
//!     })?;
//! }
//! engine.wait_for_var(&variable)?;
//! assert_eq!(*value.lock().unwrap(), 42);
//!
//! engine.operation("divide", Kind::Compute).mutates([&variable]).push(|| Err("by zero"))?;
//! engine.operation("print", Kind::Compute).reads([&variable]).push(|| Err("this is not run"))?;
//! let failed = engine.wait_for_var(&variable).unwrap_err();
//! assert_eq!(failed.to_string(), "operation divide failed: by zero");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod builder;
mod chrome;
mod config;
mod error;
mod failure;
mod graph;
mod handle;
mod in_flight_limit;
mod kind;
mod operation;
mod queue;
mod ready;
mod shared;
mod small_list;
mod spin;
mod sync;
#[cfg(test)]
mod tests;
mod trace;
mod waiting;

pub use builder::OperationBuilder;
pub use chrome::write_chrome;
pub use config::{EngineConfig, EngineError, Event, Observer};
pub use error::PushError;
pub use failure::Failure;
pub use handle::{Engine, Pusher, Variable};
pub use kind::Kind;
pub use operation::Completion;
pub use trace::{Span, Trace};
