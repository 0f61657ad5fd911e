//! The reason why a call to the connection manager failed.

use paramhub_core::service::{ErrorCode, ServiceError};
use thiserror::Error;

/// The reason why a call to the connection manager failed.
#[derive(Clone, Debug, Error)]
pub enum ControlError {
    /// No manager answers there, or the connection broke.
    #[error(
        "no connection manager answers at {url}: {cause}. Is `paramhub hub` or `paramhub manager` running there?"
    )]
    Unreachable {
        /// The URL that was dialled.
        url: String,
        /// The message of the operating system or of the HTTP library.
        cause: String,
    },
    /// Managers answer there, of which none leads.
    #[error("none of the connection managers at {url} leads: {cause}.")]
    NoLeader {
        /// The URLs that were dialled.
        url: String,
        /// The reason that one of them gives.
        cause: String,
    },
    /// The manager has not answered in time.
    #[error(
        "the connection manager at {url} has not answered {path} within {seconds} s: {}",
        why_silent(path)
    )]
    Silent {
        /// The manager's URL.
        url: String,
        /// The path of the call.
        path: String,
        /// The seconds waited.
        seconds: f64,
    },
    /// The manager refused the call.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// A server answers, but not as a connection manager does.
    #[error(
        "{url} does not answer like a paramhub connection manager: {cause}. Is this the manager's address?"
    )]
    Protocol {
        /// The URL of that server.
        url: String,
        /// The fault of the answer.
        cause: String,
    },
    /// The program that answers is not recognised as the manager.
    #[error("{url} is not recognised as the connection manager: {cause}")]
    Unrecognised {
        /// The URL that was dialled.
        url: String,
        /// The fault.
        cause: String,
    },
    /// The request cannot be sent as it is.
    #[error("the request to {url} cannot be sent: {cause}")]
    Request {
        /// The manager's URL.
        url: String,
        /// The fault.
        cause: String,
    },
    /// The URL names no manager.
    #[error(
        "`{url}` is no connection manager's URL: {cause}. Expected https://host:port or http://host:port, as in {}, or several \
         of them, separated by commas",
        crate::DEFAULT_URL
    )]
    Url {
        /// The text given as a URL.
        url: String,
        /// The fault.
        cause: String,
    },
}

/// The hint for a call without an answer: only workers' calls wait for other ranks.
fn why_silent(path: &str) -> &'static str {
    if path.ends_with("/connect") || path.ends_with("/init") {
        "it may be waiting for other ranks, or be overloaded or cut off"
    } else {
        "it may be stopped, overloaded or cut off"
    }
}

impl ControlError {
    /// Whether no manager serves for now: none answers, or none leads.
    pub fn is_away(&self) -> bool {
        matches!(self, ControlError::Unreachable { .. } | ControlError::NoLeader { .. })
    }

    /// The manager's code, if the manager refused the call.
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            ControlError::Service(refusal) => Some(refusal.code),
            _ => None,
        }
    }
}
