//! What the engine refuses.

use thiserror::Error;

use super::config::{IN_FLIGHT_MAX, THREADS_MAX};
use super::operation::Kind;

/// Why an operation was not taken.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PushError {
    /// Pushed from inside an operation, which cannot wait for room.
    #[error(
        "operation {operation}: the engine holds {limit} operations, twice what EngineConfig::in_flight allows, and one \
         that is pushed from inside another cannot wait for room; push fewer from inside, or raise in_flight"
    )]
    Full {
        /// The operation's name.
        operation: String,
        /// Operations that were in flight.
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

/// Why there is no engine.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A pool of no threads never runs anything.
    #[error("{threads} threads for {kind} operations: expected 1 to {THREADS_MAX}")]
    Threads {
        /// The pool's kind.
        kind: Kind,
        /// What was asked for.
        threads: usize,
    },
    /// No room for operations, or more than memory should be bet on.
    #[error("{0} operations in flight: expected 1 to {IN_FLIGHT_MAX}")]
    InFlight(u64),
    /// The operating system gives no more threads.
    #[error("cannot start a thread for {kind} operations: {error}")]
    Spawn {
        /// The pool's kind.
        kind: Kind,
        /// What the system said.
        error: std::io::Error,
    },
}
