//! The thread that calls Python when requests end, so that I/O threads never wait for the GIL; and the end of
//! that thread.
//!
//! The thread must have ended before the interpreter shuts down. From then on a thread that asks for the GIL
//! never gets it: Python 3.13 and older end such a thread in the middle of its call, which aborts the process
//! if C++ frames are among its callers, as those of torch's futures are.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;

use crate::fork;

/// Calls one request's callbacks.
type Call = Box<dyn FnOnce(Python<'_>) + Send>;

/// The time that the end of the process waits for a callback, the user's code, that does not return.
const END_TIMEOUT: Duration = Duration::from_secs(5);

enum CallbackThread {
    NotStarted,
    Running { calls: Sender<Call>, ended: Receiver<()> },
    Ended,
}

static THREAD: Mutex<CallbackThread> = Mutex::new(CallbackThread::NotStarted);

fn thread() -> MutexGuard<'static, CallbackThread> {
    THREAD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Passes a call to the thread. After [`end_callbacks`] the call is dropped.
pub(crate) fn hand_over(call: Call) {
    let mut thread = thread();
    if matches!(*thread, CallbackThread::NotStarted) {
        // If the thread cannot be started, callbacks are lost; `wait` still works, and the next request fails
        // for want of threads.
        let Ok(started) = start() else { return };
        *thread = started;
    }
    if let CallbackThread::Running { calls, .. } = &*thread {
        let _ = calls.send(call);
    }
}

fn start() -> std::io::Result<CallbackThread> {
    let (calls, received) = channel::<Call>();
    let (ends, ended) = channel::<()>();
    let make_all = move || {
        let _ends = ends;
        for call in received {
            // `None`: the interpreter is shutting down, and this thread still runs because a callback did not
            // return in time.
            if Python::try_attach(call).is_none() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("paramhub-callbacks".into()).spawn(make_all)?;
    Ok(CallbackThread::Running { calls, ended })
}

/// Waits until the callbacks of all requests that have ended were called, and ends the thread that calls
/// them. The package calls it at the end of the process, before the interpreter shuts down.
#[pyfunction]
pub(crate) fn end_callbacks(py: Python<'_>) {
    // A forked child has its parent's variables but not its thread.
    if fork::is_forked_child() {
        return;
    }
    let before = std::mem::replace(&mut *thread(), CallbackThread::Ended);
    if let CallbackThread::Running { calls, ended } = before {
        drop(calls);
        // The wait ends when the thread drops its sender.
        let ended = Mutex::new(ended);
        py.detach(|| ended.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(END_TIMEOUT).err());
    }
}
