//! Errors of the manager itself ([`ManagerError`]) and of a request ([`Refusal`]).

use std::net::SocketAddr;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
pub(crate) use paramhub_core::service::refusal;
use paramhub_core::service::{ErrorCode, ServiceError};
use paramhub_trust::TrustError;
use thiserror::Error;

/// The reason why a connection manager cannot start.
#[derive(Debug, Error)]
pub enum ManagerError {
    /// The address cannot be listened on.
    #[error("the connection manager cannot listen on {address}: {cause}. {advice}")]
    Listen {
        /// The configured address.
        address: SocketAddr,
        /// The operating system's answer.
        cause: std::io::Error,
        /// The remedy.
        advice: &'static str,
    },
    /// Any host on the network could create and stop jobs.
    #[error(
        "the connection manager would listen on {address}, which other machines can reach, without an admin token. Give \
         one with --admin-token-file, --admin-token or PARAMHUB_ADMIN_TOKEN, for instance from `openssl rand -hex 32`, or \
         listen on 127.0.0.1"
    )]
    TokenNeeded {
        /// The configured address.
        address: SocketAddr,
    },
    /// The token cannot travel in a header.
    #[error("the admin token is unusable: it must have 1 to 4096 visible ASCII characters without spaces")]
    TokenUnusable,
    /// A number in the configuration is out of bounds.
    #[error("{setting} is {value}, but must be {expected}")]
    Setting {
        /// The setting's name.
        setting: &'static str,
        /// The setting's value.
        value: String,
        /// The accepted values.
        expected: &'static str,
    },
    /// The place of the state cannot be used.
    #[error("the connection manager cannot keep its state in {place}: {cause}. {advice}")]
    State {
        /// The directory, the file in it, or the address of etcd without its password.
        place: String,
        /// The message of the operating system or of the store.
        cause: String,
        /// The remedy.
        advice: &'static str,
    },
    /// The program was built without the feature that the state needs.
    #[error(
        "the connection manager cannot keep its state in etcd: this program was built without the feature `etcd`. Build it with \
         `cargo build --release --features etcd`, or name a directory with --state"
    )]
    EtcdMissing,
    /// A backup cannot be restored.
    #[error("this is no backup of a connection manager's state: {cause}")]
    Backup {
        /// The fault.
        cause: String,
    },
    /// The certificates cannot be made or read.
    #[error("the connection manager cannot speak TLS: {0}")]
    Trust(#[from] TrustError),
    /// The system has no threads or no random numbers.
    #[error("the connection manager cannot start: {0}")]
    System(std::io::Error),
}

/// An answer that is not a success: a [`ServiceError`] with its status.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    error: ServiceError,
}

impl Refusal {
    /// A refusal whose status is more precise than its code.
    pub(crate) fn with_status(status: StatusCode, code: ErrorCode, message: impl Into<String>) -> Self {
        Refusal { status, error: refusal(code, message) }
    }
}

impl From<ServiceError> for Refusal {
    fn from(error: ServiceError) -> Self {
        let status = StatusCode::from_u16(error.code.status()).expect("codes carry valid statuses");
        Refusal { status, error }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, Json(self.error)).into_response()
    }
}
