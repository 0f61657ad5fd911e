//! A store's calls in the order in which Python made them, for the one thread that makes them at the store.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use paramhub::collective::kvstore::KvStore;

use super::report::Report;

/// Calls that wait for the thread; whoever makes more waits until it has come to some.
const CALLS_MAX: usize = 4096;

/// What a call does at the store.
pub(super) type Make = Box<dyn FnOnce(&Arc<dyn KvStore>) + Send>;

/// What the thread is to do.
pub(super) enum Call {
    Make(Make),
    /// The last one.
    Leave(Report),
}

pub(super) struct Calls {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Call>,
    is_closed: bool,
    /// The thread has ended, and the store is gone.
    is_over: bool,
}

/// Why a call was not taken.
pub(super) enum Refusal {
    /// There was no room for it until the time was up.
    Full(Call),
    Closed,
}

impl Calls {
    pub(super) fn new() -> Calls {
        Calls { state: Mutex::default(), changed: Condvar::new() }
    }

    pub(super) fn put(&self, call: Call, deadline: Instant) -> Result<(), Refusal> {
        let mut state = self.lock();
        while state.waiting.len() >= CALLS_MAX && !state.is_closed {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Refusal::Full(call));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.is_closed {
            return Err(Refusal::Closed);
        }
        state.waiting.push_back(call);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Makes calls until the store is left or nobody wants it any more.
    pub(super) fn make(&self, store: Arc<dyn KvStore>) {
        // Also when a call panics: whoever waits for others must not wait for ever.
        let _over = Over(self);
        while let Some(call) = self.take() {
            match call {
                Call::Make(call) => call(&store),
                Call::Leave(report) => {
                    let left = store.leave();
                    if let Err(error) = &left {
                        store.abort(&format!("rank {} could not leave: {error}", store.rank()));
                    }
                    let culprit = || store.failure().and_then(|failure| failure.culprit());
                    let ended = report.prepare(None, left, culprit);
                    drop(store);
                    self.close();
                    return ended.tell();
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
        // Not under the lock: what they report may lead back here.
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

    fn take(&self) -> Option<Call> {
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Over<'a>(&'a Calls);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.close();
        self.0.lock().is_over = true;
        self.0.changed.notify_all();
    }
}
