//! Those who wait for a variable, a thread or a closure: an operation that tells them, in the variable's queue.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, Thread};
use std::time::Duration;

use super::failure::Failure;
use super::graph::{Link, Links};
use super::operation::{Body, Head, Operation, Outcome, Role, discard, forget, taken};
use super::shared::Shared;
use super::spin::spin;

pub(super) struct Waiting {
    head: Head,
    waiter: Thread,
    is_told: AtomicBool,
    failure: Mutex<Option<Arc<Failure>>>,
}

impl Waiting {
    /// For the calling thread.
    pub(super) fn new(link: Link<Operation>) -> Arc<Waiting> {
        let (is_told, failure) = (AtomicBool::new(false), Mutex::new(None));
        Arc::new(Waiting { head: head(link), waiter: thread::current(), is_told, failure })
    }

    pub(super) fn wait(&self, limit: Duration) -> Option<Arc<Failure>> {
        spin(limit, || self.is_told.load(Ordering::Acquire));
        while !self.is_told.load(Ordering::Acquire) {
            thread::park();
        }
        self.failure.lock().expect("nothing panics under this lock").take()
    }
}

impl Body for Waiting {
    fn head(&self) -> &Head {
        &self.head
    }

    fn run(&self, _operation: &Operation, _shared: &Arc<Shared>) -> Option<Outcome> {
        unreachable!("waits are in no pool")
    }

    /// There is nothing to drop: the wait is over.
    fn discard(&self) {
        *self.failure.lock().expect("nothing panics under this lock") = self.head.links.poison();
        self.is_told.store(true, Ordering::Release);
        self.waiter.unpark();
    }
}

/// Calls a closure when a wait would be over.
pub(super) struct Telling<F> {
    head: Head,
    tell: Mutex<Option<F>>,
    shared: Arc<Shared>,
}

impl<F> Telling<F> {
    pub(super) fn new(link: Link<Operation>, shared: Arc<Shared>, tell: F) -> Arc<Telling<F>> {
        Arc::new(Telling { head: head(link), tell: Mutex::new(Some(tell)), shared })
    }
}

impl<F: FnOnce(Result<(), Arc<Failure>>) + Send> Body for Telling<F> {
    fn head(&self) -> &Head {
        &self.head
    }

    fn run(&self, _operation: &Operation, _shared: &Arc<Shared>) -> Option<Outcome> {
        unreachable!("waits are in no pool")
    }

    /// What it waited for has ended, or was dropped with the engine: then nobody is told.
    fn discard(&self) {
        if self.shared.is_closed() {
            return discard(&self.tell);
        }
        let failure = self.head.links.poison();
        if let Some(failure) = &failure {
            self.shared.told(failure);
        }
        let tell = taken(&self.tell);
        let told = catch_unwind(AssertUnwindSafe(|| tell(failure.map_or(Ok(()), Err))));
        told.unwrap_or_else(forget);
    }
}

fn head(link: Link<Operation>) -> Head {
    let links = Links::new([link].into_iter().collect(), true);
    Head { links, name: Cow::Borrowed("wait"), role: Role::Wait, priority: 0, number: AtomicU64::new(0) }
}
