use std::net::SocketAddr;
use std::sync::Mutex;

use paramhub::embedded::{EmbeddedConfig, EmbeddedHub};
use paramhub::service::CreateService;
use paramhub::{ManagerClient, RunningHub};
use pyo3::prelude::*;

use crate::errors;
use crate::fork::{is_forked_child, refuse_in_child};
use crate::waiting::interruptible;

/// A hub inside this process, with its connection manager unless it has joined another.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Hub {
    /// None once it was stopped.
    hub: Mutex<Option<Serving>>,
    #[pyo3(get)]
    url: String,
    #[pyo3(get)]
    addresses: Vec<String>,
}

enum Serving {
    Embedded(EmbeddedHub),
    Joined(RunningHub),
}

impl Serving {
    fn start(config: EmbeddedConfig, join: Option<ManagerClient>) -> Result<Serving, String> {
        match join {
            None => EmbeddedHub::start(config).map(Serving::Embedded).map_err(|error| error.to_string()),
            Some(manager) => {
                RunningHub::start(manager, config.hub).map(Serving::Joined).map_err(|error| error.to_string())
            }
        }
    }

    fn addresses(&self) -> &[SocketAddr] {
        match self {
            Serving::Embedded(hub) => hub.addresses(),
            Serving::Joined(hub) => hub.addresses(),
        }
    }

    fn has_failed(&self) -> Option<String> {
        match self {
            Serving::Embedded(hub) => hub.has_failed(),
            Serving::Joined(hub) => hub.has_failed(),
        }
    }

    fn memory_bytes(&self) -> u64 {
        match self {
            Serving::Embedded(hub) => hub.memory_bytes(),
            Serving::Joined(hub) => hub.memory_bytes(),
        }
    }

    fn stop(self) {
        match self {
            Serving::Embedded(hub) => hub.stop(),
            Serving::Joined(hub) => hub.stop(),
        }
    }
}

#[pymethods]
impl Hub {
    #[new]
    #[pyo3(signature = (
        *, listen = None, manager = None, join = None, rack = None, host = None, cores = 1, admin_token = None, memory = None,
        shared_memory = true
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
    ) -> PyResult<Self> {
        refuse_in_child(py)?;
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
        if memory.is_some() {
            config.hub.memory_bytes = memory;
        }
        let joined = join.as_ref().map(|manager| manager.url().to_owned());
        let started = interruptible(py, move || Serving::start(config, join))?;
        let hub = started.map_err(|error| errors::connect(py, &format!("the hub cannot start: {error}")))?;
        let url = match (&hub, joined) {
            (Serving::Embedded(hub), _) => hub.url().to_owned(),
            (Serving::Joined(_), url) => url.expect("it joined one"),
        };
        let addresses = hub.addresses().iter().map(ToString::to_string).collect();
        Ok(Hub { hub: Mutex::new(Some(hub)), url, addresses })
    }

    /// Ends it within a second; its jobs fail. Again it does nothing.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        refuse_in_child(py)?;
        let hub = self.hub.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        py.detach(move || hub.map(Serving::stop));
        Ok(())
    }

    /// Bytes of the buffers of all jobs here; none while there is no job.
    fn memory_bytes(&self) -> u64 {
        let hub = self.hub.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        hub.as_ref().map_or(0, Serving::memory_bytes)
    }

    /// Why it cannot go on, if it cannot.
    fn failure(&self) -> Option<String> {
        self.hub.lock().unwrap_or_else(std::sync::PoisonError::into_inner).as_ref()?.has_failed()
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

/// CreateService at the manager at `url`: the job's namespace and secret. `options` are its waits and lifetimes, in JSON.
#[pyfunction]
#[pyo3(signature = (url, name, workers, *, admin_token = None, options = "{}", patience = 0.0))]
pub(crate) fn create_job(
    py: Python<'_>,
    url: &str,
    name: String,
    workers: u32,
    admin_token: Option<String>,
    options: &str,
    patience: f64,
) -> PyResult<(String, String)> {
    let client = client(py, url, admin_token, patience)?;
    let options = serde_json::from_str(options)
        .map_err(|error| errors::misuse(py, &format!("the job's options cannot be used: {error}")))?;
    let request = CreateService { name, workers, options };
    let created = interruptible(py, move || client.create_service(&request))?;
    let created = created.map_err(|error| errors::connect(py, &error.to_string()))?;
    Ok((created.namespace.to_string(), String::from(created.nonce)))
}

/// Ends a job, by name or namespace, for a reason its workers are told.
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

/// What tells this host, and its network namespace, from all others.
#[pyfunction]
pub(crate) fn host_identity() -> String {
    paramhub::host_identity()
}

fn client(py: Python<'_>, url: &str, admin_token: Option<String>, patience: f64) -> PyResult<ManagerClient> {
    refuse_in_child(py)?;
    let patience = crate::waiting::seconds(py, Some(patience))?.unwrap_or_default();
    let client =
        ManagerClient::new(url, admin_token).map_err(|error| errors::misuse(py, &error.to_string()))?;
    Ok(client.with_patience(patience))
}
