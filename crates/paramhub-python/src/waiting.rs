//! Waits that Ctrl-C ends.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use pyo3::prelude::*;

use crate::errors;

/// The time that a wait goes on without a check for signals, which bounds the delay of Ctrl-C.
pub(crate) const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Runs `work`, which may take long, on a thread of its own, and waits for it with the GIL released. A signal
/// whose Python handler raises ends the wait; `work` then goes on, and its result is dropped.
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (done, result) = sync_channel(1);
    let started = std::thread::Builder::new().name("paramhub-call".into()).spawn(move || {
        // After a signal no thread receives the result.
        let _ = done.send(work());
    });
    if let Err(error) = started {
        return Err(errors::connect(py, &format!("cannot start a thread: {error}")));
    }
    // The lock is needed only because the GIL may move between threads while it is released.
    let result = std::sync::Mutex::new(result);
    loop {
        let waited = py.detach(|| {
            result.lock().unwrap_or_else(std::sync::PoisonError::into_inner).recv_timeout(SIGNAL_INTERVAL)
        });
        match waited {
            Ok(value) => return Ok(value),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(errors::misuse(py, "a call failed inside the library: please report this"));
            }
        }
    }
}

/// Nanoseconds of the system's monotonic clock, which all processes of one host share.
#[pyfunction]
pub(crate) fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A timeout as Python callers pass it: seconds, or `None` for a wait without end.
pub(crate) fn seconds(py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Duration>> {
    timeout
        .map(|seconds| {
            Duration::try_from_secs_f64(seconds)
                .map_err(|_| errors::misuse(py, &format!("a timeout is 0 or more seconds, not {seconds}")))
        })
        .transpose()
}
