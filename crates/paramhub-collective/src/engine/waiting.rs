//! Waits of a thread or a closure for a variable: each is an operation in the variable's queue that ends the
//! wait.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, Thread};
use std::time::Duration;

use super::failure::Failure;
use super::graph::{Dependencies, QueueAccess};
use super::operation::{
    Operation, OperationBody, OperationHead, OperationRole, Outcome, discard, forget, taken,
};
use super::shared::Shared;
use super::spin::spin;

pub(super) struct WaitOperation {
    head: OperationHead,
    waiter: Thread,
    is_over: AtomicBool,
    failure: Mutex<Option<Arc<Failure>>>,
}

impl WaitOperation {
    /// A wait of the calling thread.
    pub(super) fn new(queue_access: QueueAccess<Operation>) -> Arc<WaitOperation> {
        let (is_over, failure) = (AtomicBool::new(false), Mutex::new(None));
        Arc::new(WaitOperation { head: head(queue_access), waiter: thread::current(), is_over, failure })
    }

    pub(super) fn wait(&self, limit: Duration) -> Option<Arc<Failure>> {
        spin(limit, || self.is_over.load(Ordering::Acquire));
        while !self.is_over.load(Ordering::Acquire) {
            thread::park();
        }
        self.failure.lock().expect("nothing panics under this lock").take()
    }
}

impl OperationBody for WaitOperation {
    fn head(&self) -> &OperationHead {
        &self.head
    }

    fn run(&self, _operation: &Operation, _shared: &Arc<Shared>) -> Option<Outcome> {
        unreachable!("waits are in no ready queue")
    }

    /// Ends the wait; there is no closure to drop.
    fn discard(&self) {
        *self.failure.lock().expect("nothing panics under this lock") = self.head.dependencies.poison();
        self.is_over.store(true, Ordering::Release);
        self.waiter.unpark();
    }
}

/// A wait whose end calls a closure.
pub(super) struct WaitCallback<F> {
    head: OperationHead,
    callback: Mutex<Option<F>>,
    shared: Arc<Shared>,
}

impl<F> WaitCallback<F> {
    pub(super) fn new(
        queue_access: QueueAccess<Operation>,
        shared: Arc<Shared>,
        callback: F,
    ) -> Arc<WaitCallback<F>> {
        Arc::new(WaitCallback { head: head(queue_access), callback: Mutex::new(Some(callback)), shared })
    }
}

impl<F: FnOnce(Result<(), Arc<Failure>>) + Send> OperationBody for WaitCallback<F> {
    fn head(&self) -> &OperationHead {
        &self.head
    }

    fn run(&self, _operation: &Operation, _shared: &Arc<Shared>) -> Option<Outcome> {
        unreachable!("waits are in no ready queue")
    }

    /// The operations that it waited for have ended, or were dropped with the engine: then the closure is not
    /// called.
    fn discard(&self) {
        if self.shared.is_closed() {
            return discard(&self.callback);
        }
        let failure = self.head.dependencies.poison();
        if let Some(failure) = &failure {
            self.shared.reported(failure);
        }
        let callback = taken(&self.callback);
        let outcome = catch_unwind(AssertUnwindSafe(|| callback(failure.map_or(Ok(()), Err))));
        outcome.unwrap_or_else(forget);
    }
}

fn head(queue_access: QueueAccess<Operation>) -> OperationHead {
    let dependencies = Dependencies::new([queue_access].into_iter().collect(), true);
    OperationHead {
        dependencies,
        name: Cow::Borrowed("wait"),
        role: OperationRole::Wait,
        priority: 0,
        number: AtomicU64::new(0),
    }
}
