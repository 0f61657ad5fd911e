//! A worker's membership and options, from Python's arguments.

use paramhub::{Membership, Options, Selector, Transport};
use pyo3::prelude::*;

use crate::errors;
use crate::waiting::seconds;

/// The membership of a rank in a job.
pub(crate) fn membership(
    py: Python<'_>,
    url: String,
    namespace: &str,
    secret: &str,
    rank: u32,
) -> PyResult<Membership> {
    let unreadable =
        |what: &str, problem: String| errors::misuse(py, &format!("{what} cannot be read: {problem}"));
    Ok(Membership {
        url,
        namespace: namespace.parse().map_err(|problem| unreadable("the job's namespace", problem))?,
        // The problem never repeats the value.
        secret: secret.parse().map_err(|problem| unreadable("the job's secret", problem))?,
        rank,
    })
}

/// The options from the environment, overridden by the caller's.
pub(crate) fn options(
    py: Python<'_>,
    transport: Option<&str>,
    interfaces: Option<&str>,
    rendezvous_timeout: Option<f64>,
    rack: Option<String>,
    host: Option<String>,
) -> PyResult<Options> {
    let mut options = Options::from_env().map_err(|error| errors::worker(py, &error))?;
    if let Some(transport) = transport {
        options.transport = transport.parse::<Transport>().map_err(|problem| errors::misuse(py, &problem))?;
    }
    if let Some(interfaces) = interfaces {
        options.interfaces =
            interfaces.parse::<Selector>().map_err(|problem| errors::misuse(py, &problem))?;
    }
    options.rack = rack.or(options.rack);
    options.host = host.or(options.host);
    if let Some(timeout) = seconds(py, rendezvous_timeout)? {
        options.rendezvous_timeout = timeout;
    }
    Ok(options)
}
