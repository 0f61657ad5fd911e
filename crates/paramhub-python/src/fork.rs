//! Keeps a forked child from using what its parent made. The child has copies of our handles but none of our
//! threads, and its sockets are its parent's: a request would wait for ever, and leaving a job would end the
//! parent's part in it.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;

use crate::errors;

/// `true` if this process has done anything that starts threads or opens connections.
static HAS_STARTED: AtomicBool = AtomicBool::new(false);
static IS_FORKED_CHILD: AtomicBool = AtomicBool::new(false);

/// Called in every forked child, before any other code. If the parent had only imported the package, there is
/// nothing that the child could harm or lack.
#[pyfunction]
pub(crate) fn after_fork_in_child() {
    IS_FORKED_CHILD.fetch_or(HAS_STARTED.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Returns whether this process is a forked child, whose handles belong to its parent.
pub(crate) fn is_forked_child() -> bool {
    IS_FORKED_CHILD.load(Ordering::Relaxed)
}

/// Raises in a forked child. In any other process it notes that threads or connections begin: every function
/// that starts threads or opens connections calls this first.
pub(crate) fn refuse_in_child(py: Python<'_>) -> PyResult<()> {
    if !is_forked_child() {
        HAS_STARTED.store(true, Ordering::Relaxed);
        return Ok(());
    }
    Err(errors::misuse(
        py,
        "this process was forked after paramhub had started threads and connections, which stay with its parent: start \
         processes first, or start them with the `spawn` or `forkserver` method",
    ))
}
