use std::net::SocketAddr;
use std::sync::Mutex;

use paramhub::ManagerClient;
use paramhub::embedded::{EmbeddedConfig, EmbeddedHub};
use paramhub::service::CreateService;
use pyo3::prelude::*;

use crate::errors;
use crate::fork::{is_forked_child, refuse_in_child};
use crate::waiting::interruptible;

/// A hub with its connection manager, inside this process.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Hub {
    /// None once it was stopped.
    hub: Mutex<Option<EmbeddedHub>>,
    #[pyo3(get)]
    url: String,
    #[pyo3(get)]
    addresses: Vec<String>,
}

#[pymethods]
impl Hub {
    #[new]
    #[pyo3(signature = (*, listen = None, manager = None, cores = 1, admin_token = None, memory = None, shared_memory = true))]
    fn new(
        py: Python<'_>,
        listen: Option<Vec<String>>,
        manager: Option<String>,
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
        config.manager.admin_token = admin_token;
        config.hub.shared_memory = shared_memory;
        if memory.is_some() {
            config.hub.memory_bytes = memory;
        }
        let started = interruptible(py, move || EmbeddedHub::start(config))?;
        let hub = started.map_err(|error| errors::connect(py, &format!("the hub cannot start: {error}")))?;
        let (url, addresses) =
            (hub.url().to_owned(), hub.addresses().iter().map(ToString::to_string).collect());
        Ok(Hub { hub: Mutex::new(Some(hub)), url, addresses })
    }

    /// Ends it within a second; its jobs fail. Again it does nothing.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        refuse_in_child(py)?;
        let hub = self.hub.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        py.detach(move || hub.map(EmbeddedHub::stop));
        Ok(())
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

fn client(py: Python<'_>, url: &str, admin_token: Option<String>, patience: f64) -> PyResult<ManagerClient> {
    refuse_in_child(py)?;
    let patience = crate::waiting::seconds(py, Some(patience))?.unwrap_or_default();
    let client =
        ManagerClient::new(url, admin_token).map_err(|error| errors::misuse(py, &error.to_string()))?;
    Ok(client.with_patience(patience))
}
