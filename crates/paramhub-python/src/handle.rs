//! Requests under way, as Python sees them.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;

use crate::callbacks;
use crate::errors::Failure;
use crate::waiting::{SIGNAL_INTERVAL, now_ns, seconds};

/// One request or several that end together.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Handle {
    shared: Arc<Shared>,
}

struct Shared {
    /// The number of requests that have not ended.
    left: AtomicUsize,
    submitted_ns: u64,
    finished_ns: AtomicU64,
    /// The mesh's operation, if the handle stands for one.
    operation: OnceLock<paramhub_mesh::Handle>,
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    is_done: bool,
    /// The failure, or the first of several.
    failure: Option<Failure>,
    callbacks: Vec<Py<PyAny>>,
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits with the GIL released, at most until `deadline`; returns whether all requests have ended.
    fn wait(&self, deadline: Option<Instant>) -> bool {
        if let Some(operation) = self.operation.get() {
            operation.advance(deadline);
        }
        let mut state = self.lock();
        while !state.is_done {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            state = match left {
                Some(Duration::ZERO) => return false,
                Some(left) => self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.ended.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        true
    }

    /// Counts a request that has ended; the last one ends the handle. Runs on an I/O thread and must not take
    /// the GIL.
    fn count(self: &Arc<Self>, failure: Option<Failure>) {
        if let Some(failure) = failure {
            self.lock().failure.get_or_insert(failure);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.end(None);
        }
    }

    /// Ends the handle if it has not ended.
    fn end(self: &Arc<Self>, failure: Option<Failure>) {
        let mut state = self.lock();
        if state.is_done {
            return;
        }
        if let Some(failure) = failure {
            state.failure.get_or_insert(failure);
        }
        self.finished_ns.store(now_ns(), Ordering::Relaxed);
        state.is_done = true;
        let has_callbacks = !state.callbacks.is_empty();
        drop(state);
        self.ended.notify_all();
        if has_callbacks {
            let ended = Arc::clone(self);
            callbacks::hand_over(Box::new(move |py| call_back(py, &ended)));
        }
    }
}

/// Counts the ends of a handle's requests.
#[derive(Clone)]
pub(crate) struct CompletionCounter {
    shared: Arc<Shared>,
}

impl CompletionCounter {
    /// A handle for `requests` requests, which ends at once if there are none.
    pub(crate) fn new(requests: usize) -> (CompletionCounter, Handle) {
        let shared = Arc::new(Shared {
            left: AtomicUsize::new(requests),
            submitted_ns: now_ns(),
            finished_ns: AtomicU64::new(0),
            operation: OnceLock::new(),
            state: Mutex::default(),
            ended: Condvar::new(),
        });
        if requests == 0 {
            shared.finished_ns.store(shared.submitted_ns, Ordering::Relaxed);
            shared.lock().is_done = true;
        }
        (CompletionCounter { shared: Arc::clone(&shared) }, Handle { shared })
    }

    /// Counts a request that was submitted.
    pub(crate) fn follow(&self, request: &paramhub_worker::Handle<(), ()>) {
        let counter = self.clone();
        request.on_complete(move |outcome| counter.count(outcome.as_ref().err().map(Failure::from)));
    }

    /// Counts an operation of a mesh, which is the handle's only one.
    pub(crate) fn follow_mesh(&self, operation: paramhub_mesh::Handle) {
        let counter = self.clone();
        operation.on_complete(move |outcome| counter.count(outcome.as_ref().err().map(Failure::from)));
        // It is set only once, for the counter was made for this operation.
        let _ = self.shared.operation.set(operation);
    }

    /// Counts a request that has ended.
    pub(crate) fn count(&self, failure: Option<Failure>) {
        self.shared.count(failure);
    }
}

#[pymethods]
impl Handle {
    /// Waits for the end. Raises TimeoutError after `timeout` seconds, and the job's error if the request
    /// failed.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        crate::fork::refuse_in_child(py)?;
        let limit = seconds(py, timeout)?;
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            if self.shared.lock().is_done {
                return self.outcome(py);
            }
            let slice = Instant::now() + SIGNAL_INTERVAL;
            let until = deadline.map_or(slice, |deadline| deadline.min(slice));
            let has_ended = py.detach(|| self.shared.wait(Some(until)));
            if has_ended {
                return self.outcome(py);
            }
            py.check_signals()?;
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Err(PyTimeoutError::new_err(format!(
                    "the exchange has not ended within {} s",
                    timeout.unwrap_or_default()
                )));
            }
        }
    }

    /// Returns whether the request has ended, well or not.
    fn done(&self) -> bool {
        self.shared.lock().is_done
    }

    /// The exception that the request ended with, or None if it ended well or has not ended.
    fn exception(&self, py: Python<'_>) -> Option<PyErr> {
        let failure = self.shared.lock().failure.clone();
        failure.map(|failure| failure.raise(py))
    }

    /// Fails the handle with JobFailedError if it has not ended. Its requests go on, and keep their memory
    /// until they end.
    #[pyo3(signature = (message, culprit = None))]
    fn fail(&self, message: String, culprit: Option<u32>) {
        self.shared.end(Some(Failure::GivenUp { message: message.into(), culprit }));
    }

    /// Calls `callback(handle)` once the handle has ended: on a thread of the library, or here if it has
    /// ended already. An exception in it is printed and goes no further.
    fn add_done_callback(slf: Bound<'_, Self>, callback: Py<PyAny>) -> PyResult<()> {
        let mut state = slf.get().shared.lock();
        if !state.is_done {
            state.callbacks.push(callback);
            return Ok(());
        }
        drop(state);
        callback.call1(slf.py(), (slf,)).map(drop)
    }

    /// The ranks that the operation waits for, as far as a mesh knows; none once it has ended.
    fn awaited_ranks(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        crate::fork::refuse_in_child(py)?;
        let awaited =
            || self.shared.operation.get().map(paramhub_mesh::Handle::awaited_ranks).unwrap_or_default();
        Ok(py.detach(awaited))
    }

    /// The rank that a receive got its bytes from, once it has ended.
    #[getter]
    fn source(&self) -> Option<u32> {
        self.shared.operation.get()?.source()
    }

    /// Returns the time at which the request was submitted, in nanoseconds of the monotonic clock.
    #[getter]
    fn submitted_ns(&self) -> u64 {
        self.shared.submitted_ns
    }

    /// Returns the time at which the request ended; 0 while it has not.
    #[getter]
    fn finished_ns(&self) -> u64 {
        self.shared.finished_ns.load(Ordering::Relaxed)
    }

    fn __await__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        let module = slf.py().import("paramhub._awaiting")?;
        module.getattr("ended")?.call1((slf,))?.call_method0("__await__")
    }
}

impl Handle {
    fn outcome(&self, py: Python<'_>) -> PyResult<()> {
        // This runs without the lock: making an exception may give the GIL to another thread, which may then
        // wait for this lock.
        let failure = self.shared.lock().failure.clone();
        failure.map_or(Ok(()), |failure| Err(failure.raise(py)))
    }
}

fn call_back(py: Python<'_>, ended: &Arc<Shared>) {
    let callbacks = std::mem::take(&mut ended.lock().callbacks);
    let Ok(handle) = Bound::new(py, Handle { shared: Arc::clone(ended) }) else { return };
    for callback in callbacks {
        if let Err(error) = callback.call1(py, (&handle,)) {
            error.write_unraisable(py, Some(callback.bind(py)));
        }
    }
}
