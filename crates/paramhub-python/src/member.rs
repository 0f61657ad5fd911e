use std::sync::Mutex;
use std::time::Duration;

use paramhub::Sharing;
use paramhub_syncer::{Meeting, Peers, Ports, SyncError};
use pyo3::prelude::*;

use crate::errors;
use crate::factors::FactorLayers;
use crate::fork::refuse_in_child;
use crate::job::Job;
use crate::seat;
use crate::waiting::interruptible;

/// A worker whose job is complete but has no settings yet.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Member {
    /// None once it became a job.
    member: Mutex<Option<Connected>>,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    workers: u32,
    #[pyo3(get)]
    name: String,
}

/// A member, and where it listens for the other workers if it does.
struct Connected {
    member: paramhub::Member,
    meeting: Option<Meeting>,
}

/// Why a member has become no job.
enum Failed {
    Worker(paramhub_worker::WorkerError),
    Factors(SyncError),
}

impl Failed {
    fn raise(&self, py: Python<'_>) -> PyErr {
        match self {
            Failed::Worker(error) => errors::worker(py, error),
            Failed::Factors(error) => errors::factors(py, error),
        }
    }
}

impl Connected {
    fn init(self, settings: paramhub::settings::Settings) -> Result<Job, Failed> {
        let Connected { member, meeting } = self;
        let peers = Peers::of(&member);
        let job = member.init(settings).map_err(Failed::Worker)?;
        // Not through Python: the interpreter may be held by the very code that a notice says is stuck.
        job.on_notice(|notice| eprintln!("paramhub: {notice}"));
        let factors = match meeting {
            Some(meeting) => FactorLayers::open(&job, meeting, &peers).map_err(Failed::Factors)?,
            None => None,
        };
        Ok(Job::new(job, factors))
    }
}

/// ConnectService: returns when every rank has called it. With `peers` this worker listens for the others, for layers that go
/// by factors. `hub_rank` is the rank in whose process all hubs run, if they do.
#[pyfunction]
#[pyo3(signature = (
    url, namespace, secret, rank, *, transport = None, interfaces = None, shared_parameters = "never", spin_us = 0,
    rendezvous_timeout = None, rack = None, host = None, peers = false, hub_rank = None
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
) -> PyResult<Member> {
    refuse_in_child(py)?;
    let membership = seat::membership(py, url, namespace, secret, rank)?;
    let mut options = seat::options(py, transport, interfaces, rendezvous_timeout, rack, host)?;
    options.shared_parameters = match shared_parameters {
        "never" => Sharing::Never,
        "where possible" => Sharing::WherePossible,
        "always" => Sharing::Always,
        other => {
            let problem = format!("shared_parameters is never, where possible or always, not {other}");
            return Err(errors::misuse(py, &problem));
        }
    };
    options.hub_rank = hub_rank;
    options.spin = Duration::from_micros(spin_us);
    let meeting = peers.then(|| Meeting::listen(&membership, Ports::ANY)).transpose();
    let meeting = meeting.map_err(|error| errors::factors(py, &error))?;
    options.peer_address = meeting.as_ref().map(Meeting::address);
    let connected = interruptible(py, move || paramhub::Member::connect_with(membership, options))?;
    let member = connected.map_err(|error| errors::worker(py, &error))?;
    let (rank, workers, name) = (member.rank(), member.workers(), member.job_name().to_owned());
    Ok(Member { member: Mutex::new(Some(Connected { member, meeting })), rank, workers, name })
}

#[pymethods]
impl Member {
    /// InitService with settings in JSON (see `paramhub_core::settings::Settings`): returns when every rank has called it with
    /// the same.
    fn init(&self, py: Python<'_>, settings: &str) -> PyResult<Job> {
        refuse_in_child(py)?;
        let settings = serde_json::from_str(settings)
            .map_err(|error| errors::misuse(py, &format!("the job's settings cannot be used: {error}")))?;
        let member = self.member.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        let member = member.ok_or_else(|| errors::misuse(py, "the job has its settings already"))?;
        interruptible(py, move || member.init(settings))?.map_err(|failed| failed.raise(py))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let member = self.member.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if crate::fork::is_forked_child() {
            // Giving up the rank would be the parent's to do.
            std::mem::forget(member);
        } else if let Some(member) = member {
            Python::attach(|py| py.detach(move || drop(member)));
        }
    }
}
