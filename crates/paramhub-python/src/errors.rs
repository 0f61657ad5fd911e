//! Rust's errors as the exceptions of `paramhub.errors`.

use paramhub_worker::WorkerError;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

static KINDS: PyOnceLock<[Py<PyType>; 3]> = PyOnceLock::new();

#[derive(Clone, Copy)]
enum Kind {
    Misuse,
    Connect,
    JobFailed,
}

/// Something the caller did that cannot work.
pub(crate) fn misuse(py: Python<'_>, message: &str) -> PyErr {
    raise(py, Kind::Misuse, message, None)
}

/// A connection manager or a hub that cannot be reached or refuses.
pub(crate) fn connect(py: Python<'_>, message: &str) -> PyErr {
    raise(py, Kind::Connect, message, None)
}

/// A worker's error with its own message.
pub(crate) fn worker(py: Python<'_>, error: &WorkerError) -> PyErr {
    let kind = match error {
        WorkerError::Settings { .. }
        | WorkerError::NoSuchKey { .. }
        | WorkerError::Length { .. }
        | WorkerError::Unfinished { .. }
        | WorkerError::Environment { .. }
        | WorkerError::Left { .. }
        | WorkerError::Misplaced { .. } => Kind::Misuse,
        WorkerError::Manager { .. }
        | WorkerError::Placement { .. }
        | WorkerError::Dial { .. }
        | WorkerError::Refused { .. }
        | WorkerError::System { .. } => Kind::Connect,
        _ => Kind::JobFailed,
    };
    raise(py, kind, &error.to_string(), error.culprit())
}

fn raise(py: Python<'_>, kind: Kind, message: &str, culprit: Option<u32>) -> PyErr {
    let made = kinds(py).and_then(|kinds| {
        let error = kinds[kind as usize].bind(py).call1((message,))?;
        if let Some(rank) = culprit {
            error.setattr("culprit", rank)?;
        }
        Ok(PyErr::from_value(error))
    });
    // The package lacks its own module; what happened is still worth more than that.
    made.unwrap_or_else(|_| PyRuntimeError::new_err(message.to_owned()))
}

fn kinds(py: Python<'_>) -> PyResult<&[Py<PyType>; 3]> {
    KINDS.get_or_try_init(py, || {
        let module = py.import("paramhub.errors")?;
        let kind =
            |name| -> PyResult<Py<PyType>> { Ok(module.getattr(name)?.cast_into::<PyType>()?.unbind()) };
        Ok([kind("MisuseError")?, kind("ConnectError")?, kind("JobFailedError")?])
    })
}
