use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use paramhub::embedded::{EmbeddedConfig, EmbeddedHub};
use paramhub::service::{CreateService, ErrorCode, JobState};
use paramhub::{CheckpointConfig, ManagerClient, RunningHub};
use paramhub_core::combinations::{self, Feature, Features};
use pyo3::prelude::*;

use crate::errors;
use crate::fork::{is_forked_child, refuse_in_child};
use crate::waiting::interruptible;

/// How long a job may be between its ranks' settings and its first step, when it takes nobody.
const FIND_PATIENCE: Duration = Duration::from_secs(60);

/// A hub inside this process, with its own connection manager unless it has joined another.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Hub {
    /// None after it was stopped.
    hub: Mutex<Option<HubHandle>>,
    #[pyo3(get)]
    url: String,
    #[pyo3(get)]
    addresses: Vec<String>,
}

enum HubHandle {
    Embedded(Box<EmbeddedHub>),
    Joined(RunningHub),
}

impl HubHandle {
    fn start(config: EmbeddedConfig, join: Option<ManagerClient>) -> Result<HubHandle, String> {
        match join {
            None => EmbeddedHub::start(config)
                .map(|hub| HubHandle::Embedded(Box::new(hub)))
                .map_err(|error| error.to_string()),
            Some(manager) => RunningHub::start(manager, config.hub)
                .map(HubHandle::Joined)
                .map_err(|error| error.to_string()),
        }
    }

    fn addresses(&self) -> &[SocketAddr] {
        match self {
            HubHandle::Embedded(hub) => hub.addresses(),
            HubHandle::Joined(hub) => hub.addresses(),
        }
    }

    fn failure(&self) -> Option<String> {
        match self {
            HubHandle::Embedded(hub) => hub.failure(),
            HubHandle::Joined(hub) => hub.failure(),
        }
    }

    fn memory_bytes(&self) -> u64 {
        match self {
            HubHandle::Embedded(hub) => hub.memory_bytes(),
            HubHandle::Joined(hub) => hub.memory_bytes(),
        }
    }

    fn stop(self) {
        match self {
            HubHandle::Embedded(hub) => hub.stop(),
            HubHandle::Joined(hub) => hub.stop(),
        }
    }
}

#[pymethods]
impl Hub {
    #[new]
    #[pyo3(signature = (
        *, listen = None, manager = None, join = None, rack = None, host = None, cores = 1, admin_token = None, memory = None,
        shared_memory = true, checkpoints = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
    fn new(
        py: Python<'_>,
        listen: Option<Vec<String>>,
        manager: Option<String>,
        join: Option<String>,
        rack: Option<String>,
        host: Option<String>,
        cores: usize,
        admin_token: Option<String>,
        memory: Option<u64>,
        shared_memory: bool,
        checkpoints: Option<PathBuf>,
    ) -> PyResult<Self> {
        refuse_in_child(py)?;
        let asked = Features::of([
            (Feature::JoinedManager, join.is_some()),
            (Feature::ManagerAddress, manager.is_some()),
        ]);
        combinations::check(asked).map_err(|conflict| errors::misuse(py, &conflict.to_string()))?;
        let address = |text: &str| {
            text.parse::<SocketAddr>().map_err(|_| {
                errors::misuse(py, &format!("`{text}` is no address: give IP:PORT, with port 0 for any"))
            })
        };
        let mut config = EmbeddedConfig::with_cores(cores);
        if let Some(listen) = listen {
            config.hub.listen = listen.iter().map(|text| address(text)).collect::<PyResult<_>>()?;
        }
        if let Some(manager) = manager {
            config.manager.listen = address(&manager)?;
        }
        (config.hub.rack, config.hub.host) = (rack, host);
        let join = match join {
            Some(url) => Some(client(py, &url, admin_token.clone(), 0.0)?),
            None => None,
        };
        config.manager.admin_token = admin_token;
        config.hub.shared_memory = shared_memory;
        config.hub.checkpoints =
            checkpoints.map(|folder| CheckpointConfig { folder, keep: CheckpointConfig::KEPT });
        if memory.is_some() {
            config.hub.memory_bytes = memory;
        }
        let joined = join.as_ref().map(|manager| manager.url().to_owned());
        let started = interruptible(py, move || HubHandle::start(config, join))?;
        let hub = started.map_err(|error| errors::connect(py, &format!("the hub cannot start: {error}")))?;
        let url = match (&hub, joined) {
            (HubHandle::Embedded(hub), _) => hub.url().to_owned(),
            (HubHandle::Joined(_), url) => url.expect("it joined one"),
        };
        let addresses = hub.addresses().iter().map(ToString::to_string).collect();
        Ok(Hub { hub: Mutex::new(Some(hub)), url, addresses })
    }

    /// Ends the hub within a second; its jobs fail. A second call does nothing.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        refuse_in_child(py)?;
        let hub = self.hub.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        py.detach(move || hub.map(HubHandle::stop));
        Ok(())
    }

    /// Bytes of the buffers of all jobs at this hub; 0 while there is no job.
    fn memory_bytes(&self) -> u64 {
        let hub = self.hub.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        hub.as_ref().map_or(0, HubHandle::memory_bytes)
    }

    /// Returns the reason why the hub cannot go on, if it cannot.
    fn failure(&self) -> Option<String> {
        self.hub.lock().unwrap_or_else(std::sync::PoisonError::into_inner).as_ref()?.failure()
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        let hub = self.hub.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if is_forked_child() {
            std::mem::forget(hub);
        } else if let Some(hub) = hub {
            Python::attach(|py| py.detach(move || drop(hub)));
        }
    }
}

/// CreateService at the manager at `url`: returns the manager's URL for workers, the job's namespace and its secret.
/// `options` are its waits and lifetimes, in JSON. With `find` a living job of this name, which
/// takes workers, is taken instead.
#[pyfunction]
#[pyo3(signature = (url, name, workers, *, admin_token = None, options = "{}", patience = 0.0, find = false))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
pub(crate) fn create_job(
    py: Python<'_>,
    url: &str,
    name: String,
    workers: u32,
    admin_token: Option<String>,
    options: &str,
    patience: f64,
    find: bool,
) -> PyResult<(String, String, String)> {
    let client = client(py, url, admin_token, patience)?;
    let options = serde_json::from_str(options)
        .map_err(|error| errors::misuse(py, &format!("the job's options cannot be used: {error}")))?;
    let request = CreateService { name, workers, options };
    let caller = client.clone();
    let created = interruptible(py, move || match find {
        true => caller.find_or_create(&request, FIND_PATIENCE),
        false => caller.create_service(&request).map(|created| (created, true)),
    })?;
    let (created, is_new) = created.map_err(|error| errors::connect(py, &error.to_string()))?;
    if !is_new {
        let caller = client.clone();
        let status = interruptible(py, move || caller.job(&created.namespace.to_string()))?;
        let status = status.map_err(|error| errors::connect(py, &error.to_string()))?;
        if status.workers != workers {
            let (name, found) = (status.name, status.workers);
            let message =
                format!("job `{name}` has {found} ranks, not {workers}: start as many ranks as before");
            return Err(errors::connect(py, &message));
        }
    }
    let url = client.url_for_workers(&created);
    Ok((url, created.namespace.to_string(), String::from(created.secret())))
}

/// How the newest job of this name ended, if it has: whether it finished, the steps that it had made, and why it failed.
/// `None` if there is no such job, or it lives.
#[pyfunction]
#[pyo3(signature = (url, name, *, admin_token = None, patience = 0.0))]
pub(crate) fn ended_job(
    py: Python<'_>,
    url: &str,
    name: String,
    admin_token: Option<String>,
    patience: f64,
) -> PyResult<Option<(bool, u64, String)>> {
    let client = client(py, url, admin_token, patience)?;
    match interruptible(py, move || client.job(&name))? {
        Ok(job) if job.state.has_ended() => {
            Ok(Some((job.state == JobState::Finished, job.counters.steps, job.message)))
        }
        Ok(_) => Ok(None),
        Err(error) if error.code() == Some(ErrorCode::NotFound) => Ok(None),
        Err(error) => Err(errors::connect(py, &error.to_string())),
    }
}

/// Ends a job, by name or namespace. Its workers receive the reason.
#[pyfunction]
#[pyo3(signature = (url, job, reason, *, admin_token = None))]
pub(crate) fn stop_job(
    py: Python<'_>,
    url: &str,
    job: String,
    reason: String,
    admin_token: Option<String>,
) -> PyResult<()> {
    let client = client(py, url, admin_token, 0.0)?;
    let stopped = interruptible(py, move || client.stop_job_because(&job, &reason))?;
    stopped.map(drop).map_err(|error| errors::connect(py, &error.to_string()))
}

/// An identifier of this host and its network namespace, unlike any other's.
#[pyfunction]
pub(crate) fn host_identity() -> String {
    paramhub::host_identity()
}

fn client(py: Python<'_>, url: &str, admin_token: Option<String>, patience: f64) -> PyResult<ManagerClient> {
    refuse_in_child(py)?;
    let patience = crate::waiting::seconds(py, Some(patience))?.unwrap_or_default();
    let client =
        ManagerClient::new(url, admin_token).map_err(|error| errors::misuse(py, &error.to_string()))?;
    Ok(if patience.is_zero() { client } else { client.with_retry_timeout(patience) })
}
