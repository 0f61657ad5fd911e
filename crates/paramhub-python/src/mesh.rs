//! Connections between the ranks themselves, for exchanges that do not go through a hub.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use paramhub_mesh::{ElementType, MeshConfig, MeshError, Nonce, Noted, ReceiveRegion, ReduceOp, SendRegion};
use pyo3::prelude::*;

use crate::errors;
use crate::fork::{is_forked_child, refuse_in_child};
use crate::handle::{CompletionCounter, Handle};
use crate::memory::Borrowed;
use crate::waiting::{interruptible, seconds};

/// A range of memory: address and bytes.
type Range = (usize, usize);

/// Listens for the peers of a mesh that is about to be joined.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct MeshListener {
    /// None after the mesh was joined.
    listener: Mutex<Option<paramhub_mesh::MeshListener>>,
    #[pyo3(get)]
    address: String,
}

#[pymethods]
impl MeshListener {
    /// Listens on an IP address, at any port.
    #[new]
    fn new(py: Python<'_>, ip: &str) -> PyResult<Self> {
        refuse_in_child(py)?;
        let ip: IpAddr =
            ip.parse().map_err(|_| errors::misuse(py, &format!("`{ip}` is no IP address to listen on")))?;
        let listener = paramhub_mesh::MeshListener::bind(ip)
            .map_err(|error| errors::connect(py, &format!("cannot listen on {ip}: {error}")))?;
        let address = listener.address().to_string();
        Ok(MeshListener { listener: Mutex::new(Some(listener)), address })
    }

    /// Connects to every other rank; returns once all connections are established. `check(missing)`, called about ten times a
    /// second with the ranks that are not connected yet, may raise an error to end that. Ranks of one host may share memory if
    /// all pass `shares_memory`.
    #[pyo3(signature = (name, rank, addresses, secret, *, timeout, dead_after, shares_memory, encrypts, check))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
    fn join(
        &self,
        py: Python<'_>,
        name: &str,
        rank: u32,
        addresses: Vec<String>,
        secret: &str,
        timeout: f64,
        dead_after: f64,
        shares_memory: bool,
        encrypts: bool,
        check: Py<PyAny>,
    ) -> PyResult<Mesh> {
        refuse_in_child(py)?;
        let unreadable =
            |what: &str, problem: String| errors::misuse(py, &format!("{what} cannot be read: {problem}"));
        let addresses = addresses
            .iter()
            .map(|text| text.parse::<SocketAddr>().map_err(|problem| unreadable(text, problem.to_string())))
            .collect::<PyResult<Vec<_>>>()?;
        // The problem never repeats the value.
        let secret: Nonce = secret.parse().map_err(|problem| unreadable("the mesh's secret", problem))?;
        let mut config = MeshConfig::new(rank, secret, addresses);
        config.name = name.into();
        config.shares_memory = shares_memory;
        config.encrypts = encrypts;
        config.join_timeout = seconds(py, Some(timeout))?.unwrap_or(config.join_timeout);
        config.dead_after = seconds(py, Some(dead_after))?.unwrap_or(config.dead_after);
        let listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner).take();
        let listener = listener.ok_or_else(|| errors::misuse(py, "the mesh was joined already"))?;
        let mut raised = None;
        let mut goes_on = |missing: &[u32]| {
            let checked = Python::attach(|py| {
                py.check_signals()?;
                check.call1(py, (missing.to_vec(),))
            });
            raised = checked.err();
            raised.is_none()
        };
        let joined = py.detach(|| listener.join_while(config, &mut goes_on));
        match (raised, joined) {
            (Some(raised), _) => Err(raised),
            (None, Ok(mesh)) => Ok(Mesh::new(name, mesh)),
            (None, Err(error)) => Err(errors::mesh(py, &error)),
        }
    }
}

/// Connections to all other ranks. Memory is passed as in [`crate::job::Job`].
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Mesh {
    /// None after the mesh was left.
    mesh: Mutex<Option<Arc<paramhub_mesh::Mesh>>>,
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    size: u32,
}

impl Mesh {
    fn new(name: &str, mesh: paramhub_mesh::Mesh) -> Self {
        let (rank, size) = (mesh.rank(), mesh.size());
        Mesh { mesh: Mutex::new(Some(Arc::new(mesh))), name: name.to_owned(), rank, size }
    }

    /// Issues one operation.
    fn issue(
        &self,
        py: Python<'_>,
        operation: impl FnOnce(&paramhub_mesh::Mesh) -> Result<paramhub_mesh::Handle, MeshError>,
    ) -> PyResult<Handle> {
        refuse_in_child(py)?;
        let mesh = self.mesh.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mesh = mesh.ok_or_else(|| {
            errors::misuse(py, &format!("mesh `{}`, rank {}: the mesh was left", self.name, self.rank))
        })?;
        let operation = operation(&mesh).map_err(|error| errors::mesh(py, &error))?;
        let (counter, handle) = CompletionCounter::new(1);
        counter.follow_mesh(operation);
        Ok(handle)
    }
}

/// Memory to send from.
fn source(py: Python<'_>, owner: &Py<PyAny>, (address, bytes): Range) -> SendRegion {
    // SAFETY: the package keeps `owner`, and with it the range, alive and unchanged until the handle has
    // ended.
    unsafe { Borrowed::new(owner.clone_ref(py), address, bytes) }.into_send()
}

/// Memory to receive into.
fn target(py: Python<'_>, owner: &Py<PyAny>, (address, bytes): Range) -> ReceiveRegion {
    // SAFETY: the package keeps `owner`, and no code reads or writes the range until the handle has ended.
    unsafe { Borrowed::new(owner.clone_ref(py), address, bytes) }.into_receive()
}

fn sources(py: Python<'_>, owner: &Py<PyAny>, ranges: Vec<Range>) -> Vec<SendRegion> {
    ranges.into_iter().map(|range| source(py, owner, range)).collect()
}

fn targets(py: Python<'_>, owner: &Py<PyAny>, ranges: Vec<Range>) -> Vec<ReceiveRegion> {
    ranges.into_iter().map(|range| target(py, owner, range)).collect()
}

fn element(py: Python<'_>, name: &str) -> PyResult<ElementType> {
    ElementType::ALL
        .into_iter()
        .find(|element| element.to_string() == name)
        .ok_or_else(|| errors::misuse(py, &format!("there is no element type `{name}`")))
}

fn operator(py: Python<'_>, name: &str) -> PyResult<ReduceOp> {
    Ok(match name {
        "sum" => ReduceOp::Sum,
        "product" => ReduceOp::Product,
        "min" => ReduceOp::Min,
        "max" => ReduceOp::Max,
        "average" => ReduceOp::Average,
        "band" => ReduceOp::BitAnd,
        "bor" => ReduceOp::BitOr,
        "bxor" => ReduceOp::BitXor,
        _ => return Err(errors::misuse(py, &format!("there is no operator `{name}`"))),
    })
}

#[pymethods]
impl Mesh {
    /// Sends to a rank, which receives with the same tag and length.
    fn send(&self, py: Python<'_>, peer: u32, tag: u64, range: Range, owner: Py<PyAny>) -> PyResult<Handle> {
        self.issue(py, |mesh| mesh.send(peer, tag, source(py, &owner, range)))
    }

    /// Receives from a rank, or with None from the first that sends, with the same tag.
    fn receive(
        &self,
        py: Python<'_>,
        peer: Option<u32>,
        tag: u64,
        range: Range,
        owner: Py<PyAny>,
    ) -> PyResult<Handle> {
        self.issue(py, |mesh| {
            let into = target(py, &owner, range);
            match peer {
                Some(peer) => mesh.receive(peer, tag, into),
                None => mesh.receive_any(tag, into),
            }
        })
    }

    fn barrier(&self, py: Python<'_>) -> PyResult<Handle> {
        self.issue(py, |mesh| mesh.barrier())
    }

    /// Gives the root's bytes to every rank, in place. With a `dtype` ranks must have the same.
    #[pyo3(signature = (range, root, owner, dtype = None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        range: Range,
        root: u32,
        owner: Py<PyAny>,
        dtype: Option<&str>,
    ) -> PyResult<Handle> {
        let element = dtype.map(|dtype| element(py, dtype)).transpose()?;
        self.issue(py, |mesh| {
            let buffer = target(py, &owner, range);
            match element {
                Some(element) => mesh.broadcast_of(buffer, element, root),
                None => mesh.broadcast(buffer, root),
            }
        })
    }

    /// Reduces in place, at every rank.
    fn allreduce(
        &self,
        py: Python<'_>,
        range: Range,
        dtype: &str,
        op: &str,
        owner: Py<PyAny>,
    ) -> PyResult<Handle> {
        let (dtype, op) = (element(py, dtype)?, operator(py, op)?);
        self.issue(py, |mesh| mesh.allreduce(target(py, &owner, range), dtype, op))
    }

    /// Declares a collective that takes place elsewhere or in several operations, for the ranks to compare. `lengths` are those
    /// of all ranks' parts, or the one that all ranks have.
    #[pyo3(signature = (name, lengths, *, dtype = None, op = None, root = 0))]
    fn note(
        &self,
        py: Python<'_>,
        name: &str,
        lengths: Vec<usize>,
        dtype: Option<&str>,
        op: Option<&str>,
        root: u32,
    ) -> PyResult<Handle> {
        let of = dtype.map(|dtype| element(py, dtype)).transpose()?;
        let by = op.map(|op| operator(py, op)).transpose()?;
        let noted = match (name, lengths.as_slice(), of, by) {
            ("allreduce", &[bytes], Some(element), Some(op)) => Noted::AllReduce { bytes, element, op },
            ("reduce", &[bytes], Some(element), Some(op)) => Noted::Reduce { bytes, element, op, root },
            ("broadcast", &[bytes], element, None) => Noted::Broadcast { bytes, element, root },
            ("allgather", lengths, None, None) => Noted::AllGather { lengths },
            ("reduce_scatter", lengths, Some(element), Some(op)) => {
                Noted::ReduceScatter { lengths, element, op }
            }
            _ => return Err(errors::misuse(py, &format!("`{name}` has no such arguments"))),
        };
        self.issue(py, |mesh| mesh.note(noted))
    }

    /// Reduces into the root's memory; the contents of the other ranks' memory are unspecified afterwards.
    fn reduce(
        &self,
        py: Python<'_>,
        range: Range,
        root: u32,
        dtype: &str,
        op: &str,
        owner: Py<PyAny>,
    ) -> PyResult<Handle> {
        let (dtype, op) = (element(py, dtype)?, operator(py, op)?);
        self.issue(py, |mesh| mesh.reduce(target(py, &owner, range), dtype, op, root))
    }

    /// Gives every rank's `send` to every rank: `receives` has one range for each. Without `send` this rank's
    /// own block is in its place already.
    fn allgather(
        &self,
        py: Python<'_>,
        send: Option<Range>,
        receives: Vec<Range>,
        owner: Py<PyAny>,
    ) -> PyResult<Handle> {
        self.issue(py, |mesh| {
            mesh.allgather(send.map(|send| source(py, &owner, send)), targets(py, &owner, receives))
        })
    }

    /// Reduces all ranks' `sends[i]` into rank i's `receive`.
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        sends: Vec<Range>,
        receive: Range,
        dtype: &str,
        op: &str,
        owner: Py<PyAny>,
    ) -> PyResult<Handle> {
        let (dtype, op) = (element(py, dtype)?, operator(py, op)?);
        self.issue(py, |mesh| {
            let (sends, receive) = (sources(py, &owner, sends), target(py, &owner, receive));
            mesh.reduce_scatter(sends, receive, false, dtype, op)
        })
    }

    /// Gives every rank's `send` to the root, where `receives` has one range for each; elsewhere it has none.
    fn gather(
        &self,
        py: Python<'_>,
        send: Range,
        receives: Vec<Range>,
        root: u32,
        owner: Py<PyAny>,
    ) -> PyResult<Handle> {
        self.issue(py, |mesh| {
            mesh.gather(Some(source(py, &owner, send)), targets(py, &owner, receives), root)
        })
    }

    /// Gives each rank its block of the root's `sends`, which are empty elsewhere.
    fn scatter(
        &self,
        py: Python<'_>,
        sends: Vec<Range>,
        receive: Range,
        root: u32,
        owner: Py<PyAny>,
    ) -> PyResult<Handle> {
        self.issue(py, |mesh| {
            mesh.scatter(sources(py, &owner, sends), Some(target(py, &owner, receive)), root)
        })
    }

    /// Gives `sends[i]` to rank i and receives `receives[i]` from it.
    fn all_to_all(
        &self,
        py: Python<'_>,
        sends: Vec<Range>,
        receives: Vec<Range>,
        owner: Py<PyAny>,
    ) -> PyResult<Handle> {
        self.issue(py, |mesh| mesh.all_to_all(sources(py, &owner, sends), targets(py, &owner, receives)))
    }

    /// Whether the ranks reduce in memory that they share, as they do if all are on one host.
    #[getter]
    fn shares_memory(&self) -> bool {
        let mesh = self.mesh.lock().unwrap_or_else(PoisonError::into_inner);
        mesh.as_ref().is_some_and(|mesh| mesh.shares_memory().is_ok())
    }

    /// The exception that the mesh has failed with, or None.
    fn failure(&self, py: Python<'_>) -> Option<PyErr> {
        let mesh = self.mesh.lock().unwrap_or_else(PoisonError::into_inner).clone();
        mesh.and_then(|mesh| mesh.failure()).map(|error| errors::mesh(py, &error))
    }

    /// Leaves in order, when the operations under way have ended. Does nothing if the mesh was left before.
    fn leave(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        refuse_in_child(py)?;
        let timeout = seconds(py, Some(timeout))?.unwrap_or_default();
        let Some(mesh) = self.take() else { return Ok(()) };
        interruptible(py, move || mesh.leave(timeout))?.map_err(|error| errors::mesh(py, &error))
    }

    /// Ends the mesh at once for all ranks: every operation under way fails, at the other ranks with
    /// `reason`.
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        refuse_in_child(py)?;
        if let Some(mesh) = self.take() {
            mesh.abort(reason);
        }
        Ok(())
    }
}

impl Mesh {
    fn take(&self) -> Option<Arc<paramhub_mesh::Mesh>> {
        self.mesh.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        let mesh = self.take();
        if is_forked_child() {
            // The thread is the parent's, and so are the connections.
            std::mem::forget(mesh);
        }
    }
}
