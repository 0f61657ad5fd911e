//! Reports the outcomes of a store's calls to the handles that Python holds.

use std::sync::Arc;

use paramhub::collective::kvstore::{Array, Key, KvStore, StoreError};

use super::leases::ArrayLease;
use crate::errors::{Failure, StoreFailure};
use crate::handle::CompletionCounter;

/// One of the outcomes that a handle waits for. A report dropped undelivered is a failure.
pub(super) struct CallReport {
    store_name: Arc<str>,
    counter: Option<CompletionCounter>,
}

/// The outcome of a call, ready to be delivered to the handle.
pub(super) struct CallOutcome {
    report: CallReport,
    failure: Option<Failure>,
}

impl CallReport {
    pub(super) fn new(store_name: &Arc<str>, counter: &CompletionCounter) -> CallReport {
        CallReport { store_name: Arc::clone(store_name), counter: Some(counter.clone()) }
    }

    /// Prepares the outcome, with its key if it has one. `culprit` finds the rank at fault where the error
    /// does not know it.
    pub(super) fn prepare(
        self,
        key: Option<&Key>,
        outcome: Result<(), StoreError>,
        culprit: impl FnOnce() -> Option<u32>,
    ) -> CallOutcome {
        let failure = outcome.err().map(|error| {
            let prefix = match (&error, key) {
                // These errors name the key themselves.
                (StoreError::Key { .. } | StoreError::Failed(_) | StoreError::Push(_), _) | (_, None) => {
                    format!("{}: ", self.store_name)
                }
                (_, Some(key)) => format!("{}: key {key}: ", self.store_name),
            };
            let culprit = error.culprit().or_else(culprit);
            Failure::Store(Arc::new(StoreFailure { prefix, error, culprit }))
        });
        CallOutcome { report: self, failure }
    }

    /// Delivers the outcome of a call.
    pub(super) fn end(self, store: &dyn KvStore, outcome: Result<(), StoreError>) {
        self.prepare(None, outcome, || store.failure()?.culprit()).deliver();
    }
}

impl CallOutcome {
    pub(super) fn deliver(mut self) {
        if let Some(counter) = self.report.counter.take() {
            counter.count(self.failure.take());
        }
    }
}

impl Drop for CallReport {
    fn drop(&mut self) {
        if let Some(counter) = self.counter.take() {
            let message = format!("{}: the store was given up before this was done", self.store_name);
            counter.count(Some(Failure::given_up(&message)));
        }
    }
}

/// Memory leased for a call, and the report for the end of its use.
pub(super) struct LeasedPart {
    pub(super) lease: ArrayLease,
    pub(super) report: CallReport,
}

/// The way in which a call uses a part's memory.
#[derive(Clone, Copy)]
pub(super) enum MemoryUse {
    Reads,
    Writes,
}

impl LeasedPart {
    /// Reports, after the call returned `made`, when the engine no longer uses the memory.
    pub(super) fn follow(
        self,
        store: &Arc<dyn KvStore>,
        key: &Key,
        made: Result<(), StoreError>,
        used: MemoryUse,
    ) {
        let (LeasedPart { lease, report }, key) = (self, key.clone());
        let (variable, here) = (lease.array().variable().clone(), Arc::downgrade(store));
        let report_end = move |waited: Result<(), Arc<_>>| {
            let outcome = made.and_then(|()| Ok(waited?));
            let ended = report.prepare(Some(&key), outcome, || here.upgrade()?.failure()?.culprit());
            // Drop the lease first, so that a caller that sees the end finds the memory free.
            drop(lease);
            ended.deliver();
        };
        match used {
            // Other operations may still read the memory, and the waiting caller wants to change it.
            MemoryUse::Reads => store.engine().when_mutable(&variable, report_end),
            MemoryUse::Writes => store.engine().when_readable(&variable, report_end),
        }
    }
}

/// The arrays of the parts.
pub(super) fn arrays(parts: &[LeasedPart]) -> Vec<Array> {
    parts.iter().map(|part| part.lease.array().clone()).collect()
}
