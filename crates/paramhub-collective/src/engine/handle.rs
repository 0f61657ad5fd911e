//! The handles of callers: the engine, pushers, and variables.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::builder::OperationBuilder;
use super::config::{EngineConfig, EngineError};

use super::failure::Failure;
use super::graph::{QueueAccess, VariableQueue};
use super::kind::Kind;
use super::operation::Operation;
use super::queue::Access;
use super::shared::Shared;
use super::waiting::{WaitCallback, WaitOperation};

/// Runs operations when their variables are ready.
///
/// When an engine is dropped, it waits for operations that its threads are running and drops those that have
/// not begun, with their closures. To let them end, wait first; a wait also reports failures. Deferred
/// operations that have begun end when their completion does; the engine does not wait for that.
pub struct Engine {
    pusher: Pusher,
    threads: Vec<JoinHandle<()>>,
    /// The number of threads of each kind, by the kind's number.
    counts: [usize; Kind::ALL.len()],
    spin: Duration,
}

/// Pushes operations, also from inside one and from other threads. It does not keep the engine alive.
#[derive(Clone)]
pub struct Pusher {
    shared: Arc<Shared>,
}

/// A variable that operations read and mutate: it stands for anything they share, and has a queue of the
/// operations that want it.
///
/// It is a handle; after the last one is dropped the engine keeps what it needs.
///
/// An operation that fails poisons all that it mutates. The engine does not run operations that read or
/// mutate a poisoned variable; they poison what they mutate in turn. A wait for the variable reports the
/// failure and makes this variable usable again, for all that is pushed after the wait;
/// [`Engine::wait_for_all`] does so for all variables. The data behind the variable is then as the failed
/// operations have left it.
#[derive(Clone)]
pub struct Variable {
    pub(super) engine: u64,
    pub(super) queue: Arc<VariableQueue<Operation>>,
}

impl Engine {
    /// Starts the threads, named after their kind: `compute 0`.
    ///
    /// # Errors
    /// If the configuration is out of bounds or the system gives no threads.
    pub fn new(config: EngineConfig) -> Result<Engine, EngineError> {
        config.check()?;
        let shared = Arc::new(Shared::new(&config));
        let pusher = Pusher { shared: Arc::clone(&shared) };
        let counts = Kind::ALL.map(|kind| config.threads(kind));
        let mut engine = Engine { pusher, threads: Vec::new(), counts, spin: config.spin };
        for kind in Kind::ALL {
            for number in 0..config.threads(kind) {
                let shared = Arc::clone(&shared);
                let thread = thread::Builder::new().name(format!("{kind} {number}"));
                let thread = thread.spawn(move || shared.work(kind));
                engine.threads.push(thread.map_err(|error| EngineError::Spawn { kind, error })?);
            }
        }
        Ok(engine)
    }

    /// A new variable of this engine.
    pub fn variable(&self) -> Variable {
        self.pusher.variable()
    }

    /// Builds an operation to push. Names are for people: failures and timelines show them.
    pub fn operation(&self, name: impl Into<Cow<'static, str>>, kind: Kind) -> OperationBuilder<'_> {
        self.pusher.operation(name, kind)
    }

    /// A handle for threads and operations that only push.
    pub fn pusher(&self) -> Pusher {
        self.pusher.clone()
    }

    /// The number of threads for operations of a kind.
    pub fn threads(&self, kind: Kind) -> usize {
        self.counts[kind as usize]
    }

    /// The number of operations that have been pushed and have not ended.
    pub fn in_flight(&self) -> u64 {
        self.pusher.shared.in_flight_limit.in_flight()
    }

    /// The number of operations that have been pushed since the engine was made.
    pub fn pushed(&self) -> u64 {
        self.pusher.shared.in_flight_limit.pushed()
    }

    /// Waits until all operations that were pushed before and mutate the variable have ended. Its data may
    /// then be read, until another operation that mutates it is pushed.
    ///
    /// # Errors
    /// The failure that the variable depends on. The variable is usable again.
    ///
    /// # Panics
    /// On a thread of this engine, where it might wait for itself, and if the variable belongs to another
    /// engine.
    pub fn wait_for_var(&self, variable: &Variable) -> Result<(), Arc<Failure>> {
        self.wait(variable, Access::Read)
    }

    /// Waits until all operations that were pushed before and read or mutate the variable have ended. Its
    /// data may then be mutated, until another operation that touches it is pushed.
    ///
    /// # Errors
    /// See [`wait_for_var`](Self::wait_for_var).
    ///
    /// # Panics
    /// See [`wait_for_var`](Self::wait_for_var).
    pub fn wait_to_mutate(&self, variable: &Variable) -> Result<(), Arc<Failure>> {
        self.wait(variable, Access::Mutate)
    }

    /// [`wait_for_var`](Self::wait_for_var) for threads that cannot wait: calls `callback` with the result of
    /// the wait, on this thread or on the one that ends the last of the operations. The callback must be
    /// quick, and must not wait for the engine; its panics are ignored. If the engine is dropped before, the
    /// callback is dropped without a call.
    ///
    /// # Panics
    /// If the variable belongs to another engine.
    pub fn when_readable<F>(&self, variable: &Variable, callback: F)
    where
        F: FnOnce(Result<(), Arc<Failure>>) + Send + 'static,
    {
        self.callback(variable, Access::Read, callback);
    }

    /// [`wait_to_mutate`](Self::wait_to_mutate) for threads that cannot wait; see
    /// [`when_readable`](Self::when_readable).
    ///
    /// # Panics
    /// If the variable belongs to another engine.
    pub fn when_mutable<F>(&self, variable: &Variable, callback: F)
    where
        F: FnOnce(Result<(), Arc<Failure>>) + Send + 'static,
    {
        self.callback(variable, Access::Mutate, callback);
    }

    /// Waits until no operation is in flight. While other threads go on pushing, it may never return.
    ///
    /// # Errors
    /// The failure that was pushed first, among those that no wait has reported and those of variables that
    /// are still poisoned. All count as reported, and all variables are usable again.
    ///
    /// # Panics
    /// On a thread of this engine.
    pub fn wait_for_all(&self) -> Result<(), Arc<Failure>> {
        let shared = &self.pusher.shared;
        assert!(!shared.is_own_thread(), "wait_for_all on a thread of the engine would wait for itself");
        shared.in_flight_limit.wait_for_fewer_than(1);
        shared.report_all().map_or(Ok(()), Err)
    }

    fn callback<F>(&self, variable: &Variable, access: Access, callback: F)
    where
        F: FnOnce(Result<(), Arc<Failure>>) + Send + 'static,
    {
        let shared = &self.pusher.shared;
        assert_eq!(variable.engine, shared.id, "a variable of another engine");
        let queue_access = QueueAccess { queue: Arc::clone(&variable.queue), access };
        shared.push_wait(Operation(WaitCallback::new(queue_access, Arc::clone(shared), callback)));
    }

    fn wait(&self, variable: &Variable, access: Access) -> Result<(), Arc<Failure>> {
        let shared = &self.pusher.shared;
        assert!(!shared.is_own_thread(), "a wait on a thread of the engine might wait for itself");
        assert_eq!(variable.engine, shared.id, "a variable of another engine");
        let failure = variable.queue.take_outcome_if_idle(access).unwrap_or_else(|| {
            let waiting = WaitOperation::new(QueueAccess { queue: Arc::clone(&variable.queue), access });
            shared.push_wait(Operation(Arc::clone(&waiting) as _));
            waiting.wait(self.spin)
        });
        failure.map_or(Ok(()), |failure| {
            shared.reported(&failure);
            Err(failure)
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.pusher.shared.close();
        // The engine may be dropped inside an operation. Its thread cannot wait for itself, nor for threads
        // that may wait for it.
        if !self.pusher.shared.is_own_thread() {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("threads", &self.threads.len())
            .field("in_flight", &self.in_flight())
            .finish()
    }
}

impl Pusher {
    /// A new variable of the engine.
    pub fn variable(&self) -> Variable {
        Variable { engine: self.shared.id, queue: Arc::new(VariableQueue::new()) }
    }

    /// Builds an operation to push.
    pub fn operation(&self, name: impl Into<Cow<'static, str>>, kind: Kind) -> OperationBuilder<'_> {
        OperationBuilder::new(&self.shared, name.into(), kind)
    }
}

impl fmt::Debug for Pusher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pusher").field("engine", &self.shared.id).finish()
    }
}

impl fmt::Debug for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Variable").field("engine", &self.engine).finish_non_exhaustive()
    }
}
