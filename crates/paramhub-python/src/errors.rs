//! Converts Rust's errors to the exceptions of `paramhub.errors`.

use std::sync::Arc;

use paramhub::collective::communicator::CommunicatorError;
use paramhub::collective::kvstore::StoreError;
use paramhub_core::wire::Refusal;
use paramhub_mesh::MeshError;
use paramhub_syncer::SyncError;
use paramhub_worker::WorkerError;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

static KINDS: PyOnceLock<[Py<PyType>; 4]> = PyOnceLock::new();

#[derive(Clone, Copy)]
enum Kind {
    Misuse,
    Connect,
    JobFailed,
    Rewound,
}

/// The caller's request cannot work.
pub(crate) fn misuse(py: Python<'_>, message: &str) -> PyErr {
    raise(py, Kind::Misuse, message, None)
}

/// A connection manager or a hub cannot be reached or refuses.
pub(crate) fn connect(py: Python<'_>, message: &str) -> PyErr {
    raise(py, Kind::Connect, message, None)
}

/// The error that a request failed with.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// An error of the job.
    Worker(WorkerError),
    /// An error of the mesh.
    Mesh(MeshError),
    /// An error of the exchange of factors.
    Factors(SyncError),
    /// An error of a key-value store.
    Store(Arc<StoreFailure>),
    /// The caller that waited for the request has given up.
    GivenUp { message: Arc<str>, culprit: Option<u32> },
}

/// The failure of a call to a key-value store.
#[derive(Debug)]
pub(crate) struct StoreFailure {
    /// The prefix that names the store, and the key if there is one.
    pub(crate) prefix: String,
    pub(crate) error: StoreError,
    /// The rank at fault, where the store knows it.
    pub(crate) culprit: Option<u32>,
}

impl Failure {
    pub(crate) fn given_up(message: &str) -> Self {
        Failure::GivenUp { message: message.into(), culprit: None }
    }

    pub(crate) fn raise(&self, py: Python<'_>) -> PyErr {
        match self {
            Failure::Worker(error) => worker(py, error),
            Failure::Mesh(error) => mesh(py, error),
            Failure::Factors(error) => factors(py, error),
            Failure::Store(failure) => store(py, &failure.prefix, &failure.error, failure.culprit),
            Failure::GivenUp { message, culprit } => raise(py, Kind::JobFailed, message, *culprit),
        }
    }
}

impl From<&WorkerError> for Failure {
    fn from(error: &WorkerError) -> Self {
        Failure::Worker(error.clone())
    }
}

impl From<&MeshError> for Failure {
    fn from(error: &MeshError) -> Self {
        Failure::Mesh(error.clone())
    }
}

/// Raises a worker's error with its own message.
pub(crate) fn worker(py: Python<'_>, error: &WorkerError) -> PyErr {
    raise(py, worker_kind(error), &error.to_string(), error.culprit())
}

fn worker_kind(error: &WorkerError) -> Kind {
    match error {
        // The job failed while this rank was still dialling.
        WorkerError::Refused { refusal: Refusal::JobEnded, .. } => Kind::JobFailed,
        WorkerError::Settings { .. }
        | WorkerError::NoSuchKey { .. }
        | WorkerError::Length { .. }
        | WorkerError::KeyBusy { .. }
        | WorkerError::Environment { .. }
        | WorkerError::Interfaces { .. }
        | WorkerError::Left { .. }
        | WorkerError::Misused { .. } => Kind::Misuse,
        WorkerError::Manager { .. }
        | WorkerError::Placement { .. }
        | WorkerError::Dial { .. }
        | WorkerError::Refused { .. }
        | WorkerError::System { .. } => Kind::Connect,
        WorkerError::Rewound { .. } => Kind::Rewound,
        _ => Kind::JobFailed,
    }
}

/// Raises a mesh's error with its own message.
pub(crate) fn mesh(py: Python<'_>, error: &MeshError) -> PyErr {
    raise(py, mesh_kind(error), &error.to_string(), error.rank())
}

fn mesh_kind(error: &MeshError) -> Kind {
    match error {
        MeshError::Configuration { .. }
        | MeshError::Misused { .. }
        | MeshError::Congested { .. }
        | MeshError::Left { .. } => Kind::Misuse,
        MeshError::System { .. }
        | MeshError::Join { .. }
        | MeshError::Refused { .. }
        | MeshError::Interrupted { .. } => Kind::Connect,
        _ => Kind::JobFailed,
    }
}

/// Raises an error of the exchange of factors with its own message.
pub(crate) fn factors(py: Python<'_>, error: &SyncError) -> PyErr {
    let (kind, culprit) = factors_kind(error);
    raise(py, kind, &error.to_string(), culprit)
}

fn factors_kind(error: &SyncError) -> (Kind, Option<u32>) {
    match error {
        SyncError::Mesh(error) => (mesh_kind(error), error.rank()),
        SyncError::Misused { .. } => (Kind::Misuse, None),
        SyncError::Rendezvous { .. } | SyncError::Threads { .. } => (Kind::Connect, None),
        SyncError::Rounding { peer, .. } => (Kind::Connect, Some(*peer)),
        SyncError::Disagreement { peer, .. } => (Kind::JobFailed, Some(*peer)),
        SyncError::NonFinite { rank, .. } => (Kind::JobFailed, Some(*rank)),
        _ => (Kind::JobFailed, None),
    }
}

/// Raises a store's error with its own message behind `prefix`.
pub(crate) fn store(py: Python<'_>, prefix: &str, error: &StoreError, culprit: Option<u32>) -> PyErr {
    let (kind, known) = match error {
        StoreError::Hub(error) | StoreError::Communicator(CommunicatorError::Job(error)) => {
            (worker_kind(error), error.culprit())
        }
        StoreError::Ranks(error) => factors_kind(error),
        StoreError::Communicator(CommunicatorError::Rendezvous(error)) => factors_kind(error),
        StoreError::Communicator(CommunicatorError::Mesh(error)) => (mesh_kind(error), error.rank()),
        StoreError::Communicator(CommunicatorError::System { .. }) => (Kind::Connect, None),
        StoreError::Options(_) | StoreError::Key { .. } | StoreError::Sequence(_) => (Kind::Misuse, None),
        _ => (Kind::JobFailed, error.culprit()),
    };
    raise(py, kind, &format!("{prefix}{error}"), known.or(culprit))
}

fn raise(py: Python<'_>, kind: Kind, message: &str, culprit: Option<u32>) -> PyErr {
    let made = kinds(py).and_then(|kinds| {
        let error = kinds[kind as usize].bind(py).call1((message,))?;
        if let Some(rank) = culprit {
            error.setattr("culprit", rank)?;
        }
        Ok(PyErr::from_value(error))
    });
    // Where the package lacks its own module, still report the error.
    made.unwrap_or_else(|_| PyRuntimeError::new_err(message.to_owned()))
}

fn kinds(py: Python<'_>) -> PyResult<&[Py<PyType>; 4]> {
    KINDS.get_or_try_init(py, || {
        let module = py.import("paramhub.errors")?;
        let kind =
            |name| -> PyResult<Py<PyType>> { Ok(module.getattr(name)?.cast_into::<PyType>()?.unbind()) };
        Ok([kind("MisuseError")?, kind("ConnectError")?, kind("JobFailedError")?, kind("Rewound")?])
    })
}
