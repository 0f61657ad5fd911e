//! An operation before it is pushed.

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use super::error::PushError;
use super::few::Few;
use super::graph::{Link, Links};
use super::handle::Variable;
use super::operation::{Body, Completion, Deferred, Head, Kind, Operation, Role, Task};
use super::queue::Access;
use super::shared::Shared;

/// Says what an operation reads and mutates, and pushes it. See [`Engine::operation`](super::Engine::operation).
#[must_use = "nothing happens before it is pushed"]
pub struct OperationBuilder<'a> {
    shared: &'a Shared,
    name: Cow<'static, str>,
    kind: Kind,
    priority: i32,
    places: Few<Link<Operation>>,
    is_foreign: bool,
}

impl<'a> OperationBuilder<'a> {
    pub(super) fn new(shared: &'a Shared, name: Cow<'static, str>, kind: Kind) -> OperationBuilder<'a> {
        OperationBuilder { shared, name, kind, priority: 0, places: Few::new(), is_foreign: false }
    }

    /// Variables that stay as they are: other operations may read them at the same time. A variable that is named several
    /// times counts once, and as mutated if it is mutated as well.
    pub fn reads<'v>(self, variables: impl IntoIterator<Item = &'v Variable>) -> Self {
        self.with(variables, Access::Read)
    }

    /// Variables that the operation has for itself.
    pub fn mutates<'v>(self, variables: impl IntoIterator<Item = &'v Variable>) -> Self {
        self.with(variables, Access::Mutate)
    }

    /// Of those operations of a kind that are ready, the highest priority begins first, and among equals the one that was
    /// ready first. 0 unless said otherwise.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Hands the operation to the engine, which runs it once all that was pushed before and touches the same variables has
    /// ended. An error that it returns, or a panic, is told at a wait.
    ///
    /// Where the engine has no room, a thread that is not its own waits for some. It must therefore not hold anything that
    /// operations in flight need: a lock they take, a completion.
    ///
    /// # Errors
    /// If the engine is gone, a variable is another engine's, or one of its own threads pushes more than fits.
    pub fn push<F, E>(self, work: F) -> Result<(), PushError>
    where
        F: FnOnce() -> Result<(), E> + Send + 'static,
        E: fmt::Display + 'static,
    {
        self.submit(|head| Arc::new(Task { head, work: Mutex::new(Some(work)) }))
    }

    /// As [`push`](Self::push), but the operation ends when its [`Completion`] says so: after the closure has returned, if
    /// it gave that to somebody else. The thread that ran the closure is free until then.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn push_deferred<F>(self, work: F) -> Result<(), PushError>
    where
        F: FnOnce(Completion) + Send + 'static,
    {
        self.submit(|head| {
            Arc::new(Deferred { head, work: Mutex::new(Some(work)), runner: Mutex::default() })
        })
    }

    fn with<'v>(mut self, variables: impl IntoIterator<Item = &'v Variable>, access: Access) -> Self {
        for variable in variables {
            self.is_foreign |= variable.engine != self.shared.id;
            self.places.push(Link { place: Arc::clone(&variable.place), access });
        }
        self
    }

    fn submit<B: Body + 'static>(self, body: impl FnOnce(Head) -> Arc<B>) -> Result<(), PushError> {
        if self.is_foreign {
            return Err(PushError::Foreign { operation: self.name.into_owned() });
        }
        let links = Links::new(self.places, false);
        let (role, number) = (Role::Run(self.kind), AtomicU64::new(0));
        let head = Head { links, name: self.name, role, priority: self.priority, number };
        self.shared.push(Operation(body(head)))
    }
}

impl fmt::Debug for OperationBuilder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperationBuilder")
            .field("name", &self.name)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}
