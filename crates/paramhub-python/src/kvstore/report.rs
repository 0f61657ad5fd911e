//! How what was asked of a store has ended, for the handle that Python has of it.

use std::sync::Arc;

use paramhub::collective::kvstore::{Array, Key, KvStore, StoreError};

use super::lent::Lease;
use crate::errors::{Failure, StoreFailure};
use crate::handle::Counter;

/// One of the ends that a handle waits for. Dropped without a word, it has failed.
pub(super) struct Report {
    who: Arc<str>,
    counter: Option<Counter>,
}

/// A report that only has to be told.
pub(super) struct Ended {
    report: Report,
    failure: Option<Failure>,
}

impl Report {
    pub(super) fn new(who: &Arc<str>, counter: &Counter) -> Report {
        Report { who: Arc::clone(who), counter: Some(counter.clone()) }
    }

    /// Says how it has ended, of which key if of any; the rank at fault is asked for where the error does not know it.
    pub(super) fn prepare(
        self,
        key: Option<&Key>,
        outcome: Result<(), StoreError>,
        culprit: impl FnOnce() -> Option<u32>,
    ) -> Ended {
        let failure = outcome.err().map(|error| {
            let whose = match (&error, key) {
                // These name it themselves.
                (StoreError::Key { .. } | StoreError::Failed(_) | StoreError::Push(_), _) | (_, None) => {
                    format!("{}: ", self.who)
                }
                (_, Some(key)) => format!("{}: key {key}: ", self.who),
            };
            let culprit = error.culprit().or_else(culprit);
            Failure::Store(Arc::new(StoreFailure { whose, error, culprit }))
        });
        Ended { report: self, failure }
    }

    /// Tells how a call has ended.
    pub(super) fn end(self, store: &dyn KvStore, outcome: Result<(), StoreError>) {
        self.prepare(None, outcome, || store.failure()?.culprit()).tell();
    }
}

impl Ended {
    pub(super) fn tell(mut self) {
        if let Some(counter) = self.report.counter.take() {
            counter.count(self.failure.take());
        }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        if let Some(counter) = self.counter.take() {
            let message = format!("{}: the store was given up before this was done", self.who);
            counter.count(Some(Failure::given_up(&message)));
        }
    }
}

/// Memory that a call has, and who hears when the call has it no more.
pub(super) struct Part {
    pub(super) lease: Lease,
    pub(super) report: Report,
}

/// What a call does with a part's memory.
#[derive(Clone, Copy)]
pub(super) enum Use {
    Reads,
    Writes,
}

impl Part {
    /// The call that was made with it has been `made`; reports when the engine is done with the memory, too.
    pub(super) fn follow(self, store: &Arc<dyn KvStore>, key: &Key, made: Result<(), StoreError>, used: Use) {
        let (Part { lease, report }, key) = (self, key.clone());
        let (variable, here) = (lease.array().variable().clone(), Arc::downgrade(store));
        let tell = move |waited: Result<(), Arc<_>>| {
            let outcome = made.and_then(|()| Ok(waited?));
            let ended = report.prepare(Some(&key), outcome, || here.upgrade()?.failure()?.culprit());
            // First, so that who hears of the end finds the memory free.
            drop(lease);
            ended.tell();
        };
        match used {
            // Others may read it still, and who waits wants to change it.
            Use::Reads => store.engine().when_mutable(&variable, tell),
            Use::Writes => store.engine().when_readable(&variable, tell),
        }
    }
}

/// The arrays of parts.
pub(super) fn arrays(parts: &[Part]) -> Vec<Array> {
    parts.iter().map(|part| part.lease.array().clone()).collect()
}
