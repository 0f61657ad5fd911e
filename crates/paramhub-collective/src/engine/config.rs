//! The configuration of an engine.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, thread};

use thiserror::Error;

use super::kind::Kind;

/// The maximum of threads in a pool.
pub(super) const THREADS_MAX: usize = 256;
/// The maximum of operations in flight: they take some 250 bytes each and what their closures own.
pub(super) const IN_FLIGHT_MAX: u64 = 1 << 24;

/// The number of threads of each kind, bounds, and an observer.
#[derive(Clone)]
pub struct EngineConfig {
    /// The number of threads for [`Kind::Compute`]: by default as many as there are processors. 1 to 256, as
    /// for all kinds.
    pub compute_threads: usize,
    /// The number of threads for [`Kind::Copy`]: by default 1, since one saturates the memory of most
    /// machines.
    pub copy_threads: usize,
    /// The number of threads for [`Kind::Communicate`]: by default 2. Operations that wait for operations of
    /// other ranks need a thread for each of them that is under way at a time.
    pub communicate_threads: usize,
    /// The maximum of operations in flight, which have been pushed and have not ended: by default 65,536, at
    /// most 2^24. A thread that pushes more waits until a quarter has ended; from inside an operation twice
    /// as many may be pushed.
    pub in_flight: u64,
    /// The time that an idle thread polls for work before it sleeps, one thread of each pool at a time, and
    /// how long a waiting thread polls before it sleeps: by default 20 µs, less than waking up takes.
    pub spin: Duration,
    /// The observer of operations. Without one, observing costs nothing.
    pub observer: Option<Arc<dyn Observer>>,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig {
            compute_threads: thread::available_parallelism().map_or(1, NonZeroUsize::get).min(THREADS_MAX),
            copy_threads: 1,
            communicate_threads: 2,
            in_flight: 1 << 16,
            spin: Duration::from_micros(20),
            observer: None,
        }
    }
}

impl EngineConfig {
    pub(super) fn threads(&self, kind: Kind) -> usize {
        match kind {
            Kind::Compute => self.compute_threads,
            Kind::Copy => self.copy_threads,
            Kind::Communicate => self.communicate_threads,
        }
    }

    pub(super) fn check(&self) -> Result<(), EngineError> {
        for kind in Kind::ALL {
            let threads = self.threads(kind);
            if !(1..=THREADS_MAX).contains(&threads) {
                return Err(EngineError::Threads { kind, threads });
            }
        }
        match (1..=IN_FLIGHT_MAX).contains(&self.in_flight) {
            true => Ok(()),
            false => Err(EngineError::InFlight(self.in_flight)),
        }
    }
}

impl fmt::Debug for EngineConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineConfig")
            .field("compute_threads", &self.compute_threads)
            .field("copy_threads", &self.copy_threads)
            .field("communicate_threads", &self.communicate_threads)
            .field("in_flight", &self.in_flight)
            .field("spin", &self.spin)
            .field("observer", &self.observer.is_some())
            .finish()
    }
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

/// Observes operations, for a timeline. The engine calls it on the thread that runs or ends the operation,
/// before any operation that depends on it begins. It must be quick, and its panics are ignored. It does not
/// see operations that are not run because of a failure.
pub trait Observer: Send + Sync {
    /// The calling thread begins the operation.
    fn begin(&self, operation: &Event<'_>);

    /// The operation has ended. For a deferred operation the call comes from the thread that ended it.
    fn end(&self, operation: &Event<'_>, succeeded: bool);
}

/// An operation, as observers see it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Event<'a> {
    /// The number of the operation, counted in pushes from 0 on; the same at begin and end.
    pub number: u64,
    /// The name it was pushed with.
    pub name: &'a str,
    /// The kind of threads that run it.
    pub kind: Kind,
    /// The priority it was pushed with.
    pub priority: i32,
}
