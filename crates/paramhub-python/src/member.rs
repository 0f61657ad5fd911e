use std::sync::Mutex;
use std::time::Duration;

use paramhub::ParameterSharing;
use paramhub_core::settings::Settings;
use paramhub_syncer::{PeerAddresses, PeerListener, PortRange, SyncError};
use pyo3::prelude::*;

use crate::combinations::check_schemes;
use crate::errors;
use crate::factors::FactorLayers;
use crate::fork::refuse_in_child;
use crate::job::Job;
use crate::join_options;
use crate::waiting::{interruptible, seconds};

/// A worker whose job is complete but has no settings yet.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Member {
    /// None after it became a job.
    member: Mutex<Option<Connected>>,
    /// `true` if it listens for the other workers.
    listens: bool,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    workers: u32,
    #[pyo3(get)]
    name: String,
}

/// A member, and its listener for the other workers if it has one.
struct Connected {
    member: paramhub::Member,
    peer_listener: Option<PeerListener>,
}

/// The reason why a member could not become a job.
enum InitError {
    Worker(paramhub_worker::WorkerError),
    Factors(SyncError),
}

impl InitError {
    fn raise(&self, py: Python<'_>) -> PyErr {
        match self {
            InitError::Worker(error) => errors::worker(py, error),
            InitError::Factors(error) => errors::factors(py, error),
        }
    }
}

impl Connected {
    fn init(self, settings: Settings) -> Result<Job, InitError> {
        let Connected { member, peer_listener } = self;
        let peers = PeerAddresses::of(&member);
        let job = member.init(settings).map_err(InitError::Worker)?;
        // This does not go through Python: the code that a notice reports as stuck may hold the GIL.
        job.on_notice(|notice| eprintln!("paramhub: {notice}"));
        let factors = match peer_listener {
            Some(peer_listener) => {
                FactorLayers::open(&job, peer_listener, &peers).map_err(InitError::Factors)?
            }
            None => None,
        };
        Ok(Job::new(job, factors))
    }
}

/// ConnectService: returns when every rank has called it. With `peers` this worker listens for the others,
/// for layers that are exchanged by factors. `hub_rank` is the rank in whose process all hubs run, if they
/// do. `workers` is the number of ranks that have been started together, if a later start may have another.
/// `manager_patience` is how long a manager that is away is called, in seconds.
#[pyfunction]
#[pyo3(signature = (
    url, namespace, secret, rank, *, transport = None, interfaces = None, shared_parameters = "never", spin_us = 0,
    rendezvous_timeout = None, rack = None, host = None, peers = false, hub_rank = None,
    workers = None, manager_patience = None
))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
pub(crate) fn connect(
    py: Python<'_>,
    url: String,
    namespace: &str,
    secret: &str,
    rank: u32,
    transport: Option<&str>,
    interfaces: Option<&str>,
    shared_parameters: &str,
    spin_us: u64,
    rendezvous_timeout: Option<f64>,
    rack: Option<String>,
    host: Option<String>,
    peers: bool,
    hub_rank: Option<u32>,
    workers: Option<u32>,
    manager_patience: Option<f64>,
) -> PyResult<Member> {
    refuse_in_child(py)?;
    let membership = join_options::membership(py, url, namespace, secret, rank)?;
    let mut options = join_options::options(py, transport, interfaces, rendezvous_timeout, rack, host)?;
    options.shared_parameters = match shared_parameters {
        "never" => ParameterSharing::Never,
        "where possible" => ParameterSharing::WherePossible,
        "always" => ParameterSharing::Always,
        other => {
            let problem = format!("shared_parameters is never, where possible or always, not {other}");
            return Err(errors::misuse(py, &problem));
        }
    };
    options.hub_rank = hub_rank;
    options.started_workers = workers;
    if let Some(patience) = seconds(py, manager_patience)? {
        options.manager_retry_timeout = patience;
    }
    options.spin = Duration::from_micros(spin_us);
    let peer_listener = peers.then(|| PeerListener::listen(&membership, PortRange::ANY)).transpose();
    let peer_listener = peer_listener.map_err(|error| errors::factors(py, &error))?;
    options.peer_address = peer_listener.as_ref().map(PeerListener::address);
    let connected = interruptible(py, move || paramhub::Member::connect_with(membership, options))?;
    let member = connected.map_err(|error| errors::worker(py, &error))?;
    let (rank, workers, name) = (member.rank(), member.workers(), member.job_name().to_owned());
    let listens = peer_listener.is_some();
    Ok(Member { member: Mutex::new(Some(Connected { member, peer_listener })), listens, rank, workers, name })
}

#[pymethods]
impl Member {
    /// InitService with settings in JSON (see `paramhub_core::settings::Settings`): returns when every rank
    /// has called it with the same settings.
    fn init(&self, py: Python<'_>, settings: &str) -> PyResult<Job> {
        refuse_in_child(py)?;
        let settings: Settings = serde_json::from_str(settings)
            .map_err(|error| errors::misuse(py, &format!("the job's settings cannot be used: {error}")))?;
        check_schemes(&settings, self.listens).map_err(|conflict| {
            errors::misuse(py, &format!("job `{}`, rank {}: {conflict}", self.name, self.rank))
        })?;
        let member = self.member.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        let member = member.ok_or_else(|| errors::misuse(py, "the job has its settings already"))?;
        interruptible(py, move || member.init(settings))?.map_err(|failed| failed.raise(py))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let member = self.member.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if crate::fork::is_forked_child() {
            // Only the parent may give up the rank.
            std::mem::forget(member);
        } else if let Some(member) = member {
            Python::attach(|py| py.detach(move || drop(member)));
        }
    }
}
