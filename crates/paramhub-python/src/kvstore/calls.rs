//! A store's calls in the order in which Python made them, for the one thread that makes them at the store.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use paramhub::collective::kvstore::KvStore;

use super::report::CallReport;

/// The maximum of calls that wait for the thread; a caller that makes more waits until the thread has made
/// some.
const CALLS_MAX: usize = 4096;

/// The closure of a call, which the thread runs.
pub(super) type Make = Box<dyn FnOnce(&Arc<dyn KvStore>) + Send>;

/// One command for the thread.
pub(super) enum StoreCall {
    Make(Make),
    /// Leaves the store: the last command.
    Leave(CallReport),
}

pub(super) struct StoreCalls {
    state: Mutex<CallsState>,
    changed: Condvar,
}

#[derive(Default)]
struct CallsState {
    waiting: VecDeque<StoreCall>,
    is_closed: bool,
    /// `true` if the thread has ended, and the store is gone.
    is_over: bool,
}

/// The reason why a call was refused.
pub(super) enum CallRefusal {
    /// No room became free before the deadline.
    Full(StoreCall),
    Closed,
}

impl StoreCalls {
    pub(super) fn new() -> StoreCalls {
        StoreCalls { state: Mutex::default(), changed: Condvar::new() }
    }

    pub(super) fn put(&self, call: StoreCall, deadline: Instant) -> Result<(), CallRefusal> {
        let mut state = self.lock();
        while state.waiting.len() >= CALLS_MAX && !state.is_closed {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(CallRefusal::Full(call));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.is_closed {
            return Err(CallRefusal::Closed);
        }
        state.waiting.push_back(call);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Makes calls until the store is left or the handle is dropped.
    pub(super) fn make(&self, store: Arc<dyn KvStore>) {
        // Close also when a call panics: no caller must wait for ever.
        let _over = CloseOnDrop(self);
        while let Some(call) = self.take() {
            match call {
                StoreCall::Make(call) => call(&store),
                StoreCall::Leave(report) => {
                    let left = store.leave();
                    if let Err(error) = &left {
                        store.abort(&format!("rank {} could not leave: {error}", store.rank()));
                    }
                    let culprit = || store.failure().and_then(|failure| failure.culprit());
                    let ended = report.prepare(None, left, culprit);
                    drop(store);
                    self.close();
                    return ended.deliver();
                }
            }
        }
    }

    /// Takes no more calls, and drops those that wait.
    pub(super) fn close(&self) {
        let waiting = {
            let mut state = self.lock();
            state.is_closed = true;
            std::mem::take(&mut state.waiting)
        };
        self.changed.notify_all();
        // This runs without the lock: their reports may lead back here.
        drop(waiting);
    }

    /// Waits until the store is gone.
    pub(super) fn await_end(&self, deadline: Instant) {
        let mut state = self.lock();
        while !state.is_over {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn take(&self) -> Option<StoreCall> {
        let mut state = self.lock();
        loop {
            if let Some(call) = state.waiting.pop_front() {
                let was_full = state.waiting.len() + 1 == CALLS_MAX;
                drop(state);
                if was_full {
                    self.changed.notify_all();
                }
                return Some(call);
            }
            if state.is_closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, CallsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct CloseOnDrop<'a>(&'a StoreCalls);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close();
        self.0.lock().is_over = true;
        self.0.changed.notify_all();
    }
}
