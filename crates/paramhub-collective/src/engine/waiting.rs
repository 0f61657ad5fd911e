//! A thread that waits for a variable: an operation that tells it, in the variable's queue.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, Thread};
use std::time::Duration;

use super::failure::Failure;
use super::graph::{Link, Links};
use super::operation::{Body, Head, Operation, Outcome, Role};
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
        let links = Links::new([link].into_iter().collect(), true);
        let name = Cow::Borrowed("wait");
        let head = Head { links, name, role: Role::Wait, priority: 0, number: AtomicU64::new(0) };
        let (is_told, failure) = (AtomicBool::new(false), Mutex::new(None));
        Arc::new(Waiting { head, waiter: thread::current(), is_told, failure })
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
