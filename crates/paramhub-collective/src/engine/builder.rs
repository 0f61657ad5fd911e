//! An operation before it is pushed.

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use super::error::PushError;
use super::graph::{Dependencies, QueueAccess};
use super::handle::Variable;
use super::kind::Kind;
use super::operation::{Completion, Deferred, Operation, OperationBody, OperationHead, OperationRole, Task};
use super::queue::Access;
use super::shared::Shared;
use super::small_list::SmallList;

/// Collects the variables that an operation reads and mutates, and pushes it. See
/// [`Engine::operation`](super::Engine::operation).
#[must_use = "nothing happens before it is pushed"]
pub struct OperationBuilder<'a> {
    shared: &'a Shared,
    name: Cow<'static, str>,
    kind: Kind,
    priority: i32,
    accesses: SmallList<QueueAccess<Operation>>,
    is_foreign: bool,
}

impl<'a> OperationBuilder<'a> {
    pub(super) fn new(shared: &'a Shared, name: Cow<'static, str>, kind: Kind) -> OperationBuilder<'a> {
        OperationBuilder { shared, name, kind, priority: 0, accesses: SmallList::new(), is_foreign: false }
    }

    /// Adds variables that the operation reads: other operations may read them at the same time. A variable
    /// that is named several times counts once, and as mutated if it is mutated as well.
    pub fn reads<'v>(self, variables: impl IntoIterator<Item = &'v Variable>) -> Self {
        self.with(variables, Access::Read)
    }

    /// Adds variables that the operation mutates: no other operation has them at the same time.
    pub fn mutates<'v>(self, variables: impl IntoIterator<Item = &'v Variable>) -> Self {
        self.with(variables, Access::Mutate)
    }

    /// The ready operation with the highest priority begins first among those of its kind; with equal
    /// priorities the one that was ready first. The default is 0.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Pushes the operation to the engine, which runs it once all operations that were pushed before and
    /// touch the same variables have ended. A later wait reports an error that `work` returns, or its panic.
    ///
    /// Where the engine is full, a thread that is not the engine's own waits for room. Such a thread must not
    /// hold anything that operations in flight need: a lock that they take, a completion.
    ///
    /// # Errors
    /// If the engine is gone, a variable belongs to another engine, or one of the engine's own threads pushes
    /// more than it has room for.
    pub fn push<F, E>(self, work: F) -> Result<(), PushError>
    where
        F: FnOnce() -> Result<(), E> + Send + 'static,
        E: fmt::Display + 'static,
    {
        self.submit(|head| Arc::new(Task { head, work: Mutex::new(Some(work)) }))
    }

    /// Does the same as [`push`](Self::push), but the operation ends when its [`Completion`] does, which may
    /// be after the closure has returned, if it gave the completion away. The thread that ran the closure is
    /// free until then.
    ///
    /// # Errors
    /// See [`push`](Self::push).
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
            self.accesses.push(QueueAccess { queue: Arc::clone(&variable.queue), access });
        }
        self
    }

    fn submit<B: OperationBody + 'static>(
        self,
        body: impl FnOnce(OperationHead) -> Arc<B>,
    ) -> Result<(), PushError> {
        if self.is_foreign {
            return Err(PushError::Foreign { operation: self.name.into_owned() });
        }
        let dependencies = Dependencies::new(self.accesses, false);
        let (role, number) = (OperationRole::Run(self.kind), AtomicU64::new(0));
        let head = OperationHead { dependencies, name: self.name, role, priority: self.priority, number };
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
