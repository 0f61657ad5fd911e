//! The errors of the connection manager.

use serde::{Deserialize, Serialize};

/// The body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ServiceError {
    /// The code, for programs.
    pub code: ErrorCode,
    /// The text for people: which rank or hub, what happened, and what to do.
    pub message: String,
    /// With `not_leader`: the URL under which the leader calls itself, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
}

/// The kind of error, for programs.
///
/// - `bad_request` (400, also 408, 413, 415, 421): the request is malformed or out of bounds; its body is too
///   slow, too long or not declared as JSON; its `Host` is no name of loopback, and the manager has no token.
/// - `unauthorized` (401): the admin token or hub token is missing or wrong.
/// - `forbidden` (403): the token is for something else.
/// - `wrong_nonce` (403): no job of this namespace has the nonce that the proof was made with.
/// - `not_found` (404, also 405): no such job, hub or route, or the route does not take the method.
/// - `missing` (408): ranks or hubs, which the message names, did not arrive in time.
/// - `name_taken` (409): the name belongs to a job that has not ended.
/// - `rank_taken` (409): the rank belongs to another process.
/// - `disagreement` (409): the ranks want different things.
/// - `busy` (409): the request would harm jobs that run.
/// - `job_ended` (410): the job has ended.
/// - `does_not_fit` (507): a hub cannot hold the job, a quota of its team leaves no room for it, or the manager
///   has too many jobs or hubs.
/// - `internal` (500, also 503): the manager itself failed or is shutting down. With 503 it had no place for
///   the call and has done nothing: try again.
/// - `not_leader` (503): of several managers that share one store another one leads, or none does for now: call the
///   others, and this one again. If the manager has lost the lead during the call, the call may have had its effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request is malformed or out of bounds (400).
    BadRequest,
    /// The admin token or hub token is missing or wrong (401).
    Unauthorized,
    /// The token is for something else (403).
    Forbidden,
    /// The proof does not match the job's nonce (403).
    WrongNonce,
    /// No such job, hub or route (404).
    NotFound,
    /// The job's name belongs to a living job (409).
    NameTaken,
    /// The rank belongs to another process (409).
    RankTaken,
    /// The ranks disagree on their settings (409).
    Disagreement,
    /// The request would harm jobs that run (409).
    Busy,
    /// Ranks or hubs did not arrive in time (408).
    Missing,
    /// The job has ended (410).
    JobEnded,
    /// A hub cannot hold the job, or a quota of its team leaves no room for it (507).
    DoesNotFit,
    /// The manager itself failed, for example to write its store (500).
    Internal,
    /// Another manager leads, or none does for now (503).
    NotLeader,
}

impl ErrorCode {
    /// The HTTP status that carries this code.
    pub const fn status(self) -> u16 {
        match self {
            ErrorCode::BadRequest => 400,
            ErrorCode::Unauthorized => 401,
            ErrorCode::Forbidden | ErrorCode::WrongNonce => 403,
            ErrorCode::NotFound => 404,
            ErrorCode::NameTaken | ErrorCode::RankTaken | ErrorCode::Disagreement | ErrorCode::Busy => 409,
            ErrorCode::Missing => 408,
            ErrorCode::JobEnded => 410,
            ErrorCode::DoesNotFit => 507,
            ErrorCode::Internal => 500,
            ErrorCode::NotLeader => 503,
        }
    }
}

impl std::fmt::Display for ServiceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ServiceError {}

/// Shorthand for a [`ServiceError`].
pub fn refusal(code: ErrorCode, message: impl Into<String>) -> ServiceError {
    ServiceError { code, message: message.into(), leader: None }
}
