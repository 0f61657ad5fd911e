//! Why the engine refuses an operation.

use thiserror::Error;

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
