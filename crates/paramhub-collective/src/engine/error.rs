//! Errors of the engine.

use thiserror::Error;

use super::config::{IN_FLIGHT_MAX, THREADS_MAX};
use super::operation::Kind;

/// The reason why the engine refused an operation.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PushError {
    /// The operation was pushed from inside another, which cannot wait for room.
    #[error(
        "operation {operation}: the engine holds {limit} operations, twice what EngineConfig::in_flight allows, and one \
         that is pushed from inside another cannot wait for room; push fewer from inside, or raise in_flight"
    )]
    Full {
        /// The operation's name.
        operation: String,
        /// The number of operations in flight.
        limit: u64,
    },
    /// The engine has been dropped; only a [`Pusher`](super::Pusher) can see this.
    #[error("operation {operation}: the engine has been dropped")]
    Closed {
        /// The operation's name.
        operation: String,
    },
    /// A variable was made by another engine, whose order this one does not know.
    #[error(
        "operation {operation}: one of its variables belongs to another engine; make it with this one's variable()"
    )]
    Foreign {
        /// The operation's name.
        operation: String,
    },
}

/// The reason why an engine cannot be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The number of threads is out of bounds.
    #[error("{threads} threads for {kind} operations: expected 1 to {THREADS_MAX}")]
    Threads {
        /// The pool's kind.
        kind: Kind,
        /// The number of threads asked for.
        threads: usize,
    },
    /// There is no room for operations, or more than memory may hold.
    #[error("{0} operations in flight: expected 1 to {IN_FLIGHT_MAX}")]
    InFlight(u64),
    /// The operating system cannot start a thread.
    #[error("cannot start a thread for {kind} operations: {error}")]
    Spawn {
        /// The pool's kind.
        kind: Kind,
        /// The system's error.
        error: std::io::Error,
    },
}
