//! Why a call to the connection manager failed.

use paramhub_core::service::{ErrorCode, ServiceError};
use thiserror::Error;

/// Why a call to the connection manager failed.
#[derive(Debug, Error)]
pub enum ControlError {
    /// Nobody answers there, or the connection broke.
    #[error(
        "no connection manager answers at {url}: {cause}. Is `paramhub hub` or `paramhub manager` running there?"
    )]
    Unreachable {
        /// Where it was sought.
        url: String,
        /// What the operating system or the HTTP library says.
        cause: String,
    },
    /// The manager takes longer than the caller waits.
    #[error(
        "the connection manager at {url} has not answered {path} within {seconds} s: {}",
        why_silent(path)
    )]
    Silent {
        /// Whose answer was waited for.
        url: String,
        /// What it was asked.
        path: String,
        /// For how long.
        seconds: f64,
    },
    /// The manager refused.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// Something answers, but not as a connection manager does.
    #[error(
        "{url} does not answer like a paramhub connection manager: {cause}. Is this the manager's address?"
    )]
    Protocol {
        /// Who answered.
        url: String,
        /// What is wrong with the answer.
        cause: String,
    },
    /// The request cannot be sent as it is.
    #[error("the request to {url} cannot be sent: {cause}")]
    Request {
        /// Where it was meant to go.
        url: String,
        /// What is wrong with it.
        cause: String,
    },
    /// The URL names no manager.
    #[error(
        "`{url}` is no connection manager's URL: {cause}. Expected http://host:port, as in {}",
        crate::DEFAULT_URL
    )]
    Url {
        /// As given.
        url: String,
        /// What is wrong with it.
        cause: String,
    },
}

/// Only workers' calls wait for other ranks.
fn why_silent(path: &str) -> &'static str {
    if path.ends_with("/connect") || path.ends_with("/init") {
        "it may be waiting for other ranks, or be overloaded or cut off"
    } else {
        "it may be stopped, overloaded or cut off"
    }
}

impl ControlError {
    /// The manager's code, where it was the manager that refused.
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            ControlError::Service(refusal) => Some(refusal.code),
            _ => None,
        }
    }
}
