//! A pushed operation: its closure, and all that the engine has to know about it.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use super::config::Event;
use super::graph::{Dependencies, QueuedOperation};
use super::kind::Kind;
use super::shared::Shared;

/// A counted handle.
#[derive(Clone)]
pub(super) struct Operation(pub(super) Arc<dyn OperationBody>);

impl QueuedOperation for Operation {
    fn dependencies(&self) -> &Dependencies<Operation> {
        &self.0.head().dependencies
    }
}

impl Operation {
    /// The operation as observers see it.
    pub(super) fn event(&self) -> Event<'_> {
        let head = self.0.head();
        let kind = match head.role {
            OperationRole::Run(kind) => kind,
            OperationRole::Wait => unreachable!("observers do not see waits"),
        };
        Event { number: head.number(), name: &head.name, kind, priority: head.priority }
    }
}

/// The engine's view of an operation, which is one allocation with its closure.
pub(super) trait OperationBody: Send + Sync {
    fn head(&self) -> &OperationHead;

    /// Runs the closure. `None` if the operation ends later, through its [`Completion`].
    fn run(&self, operation: &Operation, shared: &Arc<Shared>) -> Option<Outcome>;

    /// Drops the closure.
    fn discard(&self);

    /// Handles a completion that is dropped while the calling thread panics. True if the panic is the
    /// closure's own, whose message will end the operation.
    fn lose_completion(&self) -> bool {
        false
    }
}

/// The result of an operation; the error is the reason of its failure.
pub(super) type Outcome = Result<(), String>;

pub(super) struct OperationHead {
    pub(super) dependencies: Dependencies<Operation>,
    pub(super) name: Cow<'static, str>,
    pub(super) role: OperationRole,
    pub(super) priority: i32,
    /// The number of the operation, known when it is pushed.
    pub(super) number: AtomicU64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum OperationRole {
    Run(Kind),
    /// Wakes a waiting thread; it runs on the thread that makes it ready.
    Wait,
}

/// An operation that ends with its closure.
pub(super) struct Task<F> {
    pub(super) head: OperationHead,
    pub(super) work: Mutex<Option<F>>,
}

impl<F, E> OperationBody for Task<F>
where
    F: FnOnce() -> Result<(), E> + Send,
    E: fmt::Display,
{
    fn head(&self) -> &OperationHead {
        &self.head
    }

    fn run(&self, _operation: &Operation, _shared: &Arc<Shared>) -> Option<Outcome> {
        let work = taken(&self.work);
        let ran = catch_unwind(AssertUnwindSafe(|| work().map_err(|error| error.to_string())));
        Some(ran.unwrap_or_else(|payload| Err(panicked(payload))))
    }

    fn discard(&self) {
        discard(&self.work);
    }
}

/// An operation that ends when its [`Completion`] does.
pub(super) struct Deferred<F> {
    pub(super) head: OperationHead,
    pub(super) work: Mutex<Option<F>>,
    /// The thread that runs the closure, while it runs.
    pub(super) runner: Mutex<Runner>,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Runner {
    thread: Option<ThreadId>,
    /// `true` if the closure's panic dropped the completion.
    lost: bool,
}

impl<F: FnOnce(Completion) + Send> OperationBody for Deferred<F> {
    fn head(&self) -> &OperationHead {
        &self.head
    }

    fn run(&self, operation: &Operation, shared: &Arc<Shared>) -> Option<Outcome> {
        let work = taken(&self.work);
        let completion = Completion { operation: Some(operation.clone()), shared: Arc::clone(shared) };
        let runner = |thread| {
            let mut runner = self.runner.lock().expect("nothing panics under this lock");
            std::mem::replace(&mut *runner, Runner { thread, lost: false }).lost
        };
        runner(Some(thread::current().id()));
        let ran = catch_unwind(AssertUnwindSafe(|| work(completion)));
        let lost = runner(None);
        let message = panicked(ran.err()?);
        if lost {
            return Some(Err(message));
        }
        shared.record(operation, message);
        None
    }

    fn discard(&self) {
        discard(&self.work);
    }

    fn lose_completion(&self) -> bool {
        let mut runner = self.runner.lock().expect("nothing panics under this lock");
        runner.lost = runner.thread == Some(thread::current().id());
        runner.lost
    }
}

/// Ends an operation that was pushed with [`push_deferred`](super::OperationBuilder::push_deferred), on any
/// thread.
///
/// If it is dropped unused, the operation has failed. All that depends on the operation waits until then, so
/// the holder of a completion must not wait for the engine, nor push more than it has room for.
#[must_use = "an operation whose completion is dropped has failed"]
pub struct Completion {
    operation: Option<Operation>,
    shared: Arc<Shared>,
}

impl Completion {
    /// Ends the operation with success.
    pub fn complete(mut self) {
        self.end(Ok(()));
    }

    /// Ends the operation with a failure.
    pub fn fail(mut self, reason: impl fmt::Display) {
        self.end(Err(reason.to_string()));
    }

    /// Ends the operation by [`complete`](Self::complete) or [`fail`](Self::fail).
    pub fn end_with<E: fmt::Display>(mut self, result: Result<(), E>) {
        self.end(result.map_err(|error| error.to_string()));
    }

    fn end(&mut self, outcome: Outcome) {
        if let Some(operation) = self.operation.take() {
            self.shared.end_elsewhere(&operation, outcome);
        }
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        let Some(operation) = &self.operation else { return };
        let how = match thread::panicking() {
            true if operation.0.lose_completion() => return,
            true => "in a panic",
            false => "without a word",
        };
        self.end(Err(format!("its completion was dropped {how}")));
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.operation.as_ref().map(|operation| operation.0.head().name.as_ref());
        f.debug_struct("Completion").field("operation", &name).finish_non_exhaustive()
    }
}

impl OperationHead {
    pub(super) fn number(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }
}

pub(super) fn taken<F>(work: &Mutex<Option<F>>) -> F {
    let work = work.lock().expect("nothing panics under this lock").take();
    work.expect("an operation is ready once")
}

pub(super) fn discard<F>(work: &Mutex<Option<F>>) {
    let work = work.lock().expect("nothing panics under this lock").take();
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(work))) {
        forget(payload);
    }
}

fn panicked(payload: Box<dyn Any + Send>) -> String {
    let message = payload.downcast_ref::<&str>().map(|message| (*message).to_owned());
    let message = message.or_else(|| payload.downcast_ref::<String>().cloned());
    forget(payload);
    message.map_or_else(|| "it panicked".to_owned(), |message| format!("it panicked: {message}"))
}

/// Drops the payload of a panic, whose own drop may panic, too.
pub(super) fn forget(payload: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(again);
    }
}
