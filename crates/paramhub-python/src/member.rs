use std::sync::Mutex;
use std::time::Duration;

use paramhub::{Membership, Options, Selector, Sharing, Transport};
use pyo3::prelude::*;

use crate::errors;
use crate::fork::refuse_in_child;
use crate::job::Job;
use crate::waiting::interruptible;

/// A worker whose job is complete but has no settings yet.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Member {
    /// None once it became a job.
    member: Mutex<Option<paramhub::Member>>,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    workers: u32,
    #[pyo3(get)]
    name: String,
}

/// ConnectService: returns when every rank has called it.
#[pyfunction]
#[pyo3(signature = (
    url, namespace, secret, rank, *, transport = None, interfaces = None, shared_parameters = "never", spin_us = 0,
    rendezvous_timeout = None, rack = None, host = None
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
) -> PyResult<Member> {
    refuse_in_child(py)?;
    let unreadable =
        |what: &str, problem: String| errors::misuse(py, &format!("{what} cannot be read: {problem}"));
    let membership = Membership {
        url,
        namespace: namespace.parse().map_err(|problem| unreadable("the job's namespace", problem))?,
        // The problem never repeats the value.
        nonce: secret.parse().map_err(|problem| unreadable("the job's secret", problem))?,
        rank,
    };
    let mut options = Options::from_env().map_err(|error| errors::worker(py, &error))?;
    if let Some(transport) = transport {
        options.transport = transport.parse::<Transport>().map_err(|problem| errors::misuse(py, &problem))?;
    }
    if let Some(interfaces) = interfaces {
        options.interfaces =
            interfaces.parse::<Selector>().map_err(|problem| errors::misuse(py, &problem))?;
    }
    options.shared_parameters = match shared_parameters {
        "never" => Sharing::Never,
        "where possible" => Sharing::WherePossible,
        "always" => Sharing::Always,
        other => {
            let problem = format!("shared_parameters is never, where possible or always, not {other}");
            return Err(errors::misuse(py, &problem));
        }
    };
    options.rack = rack.or(options.rack);
    options.host = host.or(options.host);
    options.spin = Duration::from_micros(spin_us);
    if let Some(timeout) = crate::waiting::seconds(py, rendezvous_timeout)? {
        options.rendezvous_timeout = timeout;
    }
    let connected = interruptible(py, move || paramhub::Member::connect_with(membership, options))?;
    let member = connected.map_err(|error| errors::worker(py, &error))?;
    let (rank, workers, name) = (member.rank(), member.workers(), member.job_name().to_owned());
    Ok(Member { member: Mutex::new(Some(member)), rank, workers, name })
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
        let job = interruptible(py, move || member.init(settings))?;
        job.map(Job::new).map_err(|error| errors::worker(py, &error))
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
