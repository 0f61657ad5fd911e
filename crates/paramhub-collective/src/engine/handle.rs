//! What callers hold: the engine, those who push, and variables.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::builder::OperationBuilder;
use super::config::EngineConfig;
use super::error::EngineError;
use super::failure::Failure;
use super::graph::{Link, Place};
use super::operation::{Kind, Operation};
use super::queue::Access;
use super::shared::Shared;
use super::waiting::{Telling, Waiting};

/// Runs operations when their variables are ready.
///
/// Dropped, it waits for operations that its threads are running and drops those that have not begun, closures and all.
/// Whoever wants them to end waits first, which is also where failures are told. Deferred operations that have begun end
/// when their completion says so; nothing waits for that.
pub struct Engine {
    pusher: Pusher,
    threads: Vec<JoinHandle<()>>,
    /// Of each kind, by its number.
    counts: [usize; Kind::ALL.len()],
    spin: Duration,
}

/// Pushes operations, also from inside one and from other threads, and does not keep the engine alive.
#[derive(Clone)]
pub struct Pusher {
    shared: Arc<Shared>,
}

/// What operations read and mutate: a name for anything they share, with a queue of those who want it.
///
/// A handle; the engine keeps what it needs when the last is dropped.
///
/// An operation that fails poisons all that it mutates. Operations that read or mutate a poisoned variable are not run, and
/// poison what they mutate in turn. A wait for the variable tells of the failure and makes this variable usable again, for
/// all that is pushed after the wait; [`Engine::wait_for_all`] does so for all. What the variable stands for is then as
/// the failed operations have left it.
#[derive(Clone)]
pub struct Variable {
    pub(super) engine: u64,
    pub(super) place: Arc<Place<Operation>>,
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

    /// An operation to be pushed. Names are for people: failures and timelines show them.
    pub fn operation(&self, name: impl Into<Cow<'static, str>>, kind: Kind) -> OperationBuilder<'_> {
        self.pusher.operation(name, kind)
    }

    /// For threads and operations that only push.
    pub fn pusher(&self) -> Pusher {
        self.pusher.clone()
    }

    /// Threads for operations of a kind.
    pub fn threads(&self, kind: Kind) -> usize {
        self.counts[kind as usize]
    }

    /// Operations that have been pushed and have not ended.
    pub fn in_flight(&self) -> u64 {
        self.pusher.shared.progress.in_flight()
    }

    /// Operations that have been pushed since the engine was made.
    pub fn pushed(&self) -> u64 {
        self.pusher.shared.progress.pushed()
    }

    /// Waits until all operations that were pushed before and mutate the variable have ended: it may then be read, until
    /// somebody pushes another that mutates it.
    ///
    /// # Errors
    /// The failure that the variable depends on. The variable is usable again.
    ///
    /// # Panics
    /// On a thread of this engine, where it might wait for itself, and if the variable is another engine's.
    pub fn wait_for_var(&self, variable: &Variable) -> Result<(), Arc<Failure>> {
        self.wait(variable, Access::Read)
    }

    /// Waits until all operations that were pushed before and read or mutate the variable have ended: it may then be
    /// mutated, until somebody pushes another.
    ///
    /// # Errors
    /// As [`wait_for_var`](Self::wait_for_var).
    ///
    /// # Panics
    /// As [`wait_for_var`](Self::wait_for_var).
    pub fn wait_to_mutate(&self, variable: &Variable) -> Result<(), Arc<Failure>> {
        self.wait(variable, Access::Mutate)
    }

    /// [`wait_for_var`](Self::wait_for_var) for those who cannot wait: calls `tell` with what the wait would have returned, on this
    /// thread or on the one that ends the last of the operations. It must be quick, and must not wait for the engine; a panic of
    /// its own is lost. Of an engine that is dropped before, it is dropped without having been called.
    ///
    /// # Panics
    /// If the variable is another engine's.
    pub fn when_readable<F>(&self, variable: &Variable, tell: F)
    where
        F: FnOnce(Result<(), Arc<Failure>>) + Send + 'static,
    {
        self.tell(variable, Access::Read, tell);
    }

    /// [`wait_to_mutate`](Self::wait_to_mutate) for those who cannot wait, as [`when_readable`](Self::when_readable).
    ///
    /// # Panics
    /// If the variable is another engine's.
    pub fn when_mutable<F>(&self, variable: &Variable, tell: F)
    where
        F: FnOnce(Result<(), Arc<Failure>>) + Send + 'static,
    {
        self.tell(variable, Access::Mutate, tell);
    }

    /// Waits until nothing is in flight. While other threads go on pushing, that may never be.
    ///
    /// # Errors
    /// Of all failures that no wait has told of, and those of variables that are still poisoned, the one that was pushed
    /// first. All count as told, and all variables are usable again.
    ///
    /// # Panics
    /// On a thread of this engine.
    pub fn wait_for_all(&self) -> Result<(), Arc<Failure>> {
        let shared = &self.pusher.shared;
        assert!(!shared.is_own_thread(), "wait_for_all on a thread of the engine would wait for itself");
        shared.progress.wait_for_fewer_than(1);
        shared.tell_all().map_or(Ok(()), Err)
    }

    fn tell<F>(&self, variable: &Variable, access: Access, tell: F)
    where
        F: FnOnce(Result<(), Arc<Failure>>) + Send + 'static,
    {
        let shared = &self.pusher.shared;
        assert_eq!(variable.engine, shared.id, "a variable of another engine");
        let link = Link { place: Arc::clone(&variable.place), access };
        shared.push_wait(Operation(Telling::new(link, Arc::clone(shared), tell)));
    }

    fn wait(&self, variable: &Variable, access: Access) -> Result<(), Arc<Failure>> {
        let shared = &self.pusher.shared;
        assert!(!shared.is_own_thread(), "a wait on a thread of the engine might wait for itself");
        assert_eq!(variable.engine, shared.id, "a variable of another engine");
        let failure = variable.place.tell(access).unwrap_or_else(|| {
            let waiting = Waiting::new(Link { place: Arc::clone(&variable.place), access });
            shared.push_wait(Operation(Arc::clone(&waiting) as _));
            waiting.wait(self.spin)
        });
        failure.map_or(Ok(()), |failure| {
            shared.told(&failure);
            Err(failure)
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.pusher.shared.close();
        // An operation may own the engine. Its thread cannot wait for itself, nor for those that may wait for it.
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
        Variable { engine: self.shared.id, place: Arc::new(Place::new()) }
    }

    /// An operation to be pushed.
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
