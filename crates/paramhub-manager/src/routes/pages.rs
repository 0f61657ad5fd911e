//! Routes that concern no job: the manager's name, its health, its metrics and its interface.

use std::sync::{Arc, OnceLock};

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::IntoResponse;
use paramhub_core::service::{ErrorCode, ServiceError};
use utoipa::OpenApi;

use crate::auth::{Admin, Reader};
use crate::error::{Refusal, refusal};
use crate::log::audit;
use crate::metrics::{CONTENT_TYPE, Detail};
use crate::openapi::ApiDocument;
use crate::registry::Registry;

/// One line that names the server.
#[utoipa::path(
    get, path = "/", tag = "manager", operation_id = "index",
    responses((status = 200, description = "What answers here.", body = String, content_type = "text/plain"))
)]
pub(crate) async fn index() -> &'static str {
    concat!(
        "paramhub connection manager ",
        env!("CARGO_PKG_VERSION"),
        ": see /openapi.json, /metrics and /health, or run `paramhub jobs list`\n"
    )
}

/// Returns whether the manager answers and, if several share one store, whether it leads.
#[utoipa::path(
    get, path = "/health", tag = "manager", operation_id = "health",
    responses((
        status = 200,
        description = "It does. The text is `ok` alone, or `ok, leads`, `ok, follows URL` or `ok, follows nobody` with the reason.",
        body = String, content_type = "text/plain",
    ))
)]
pub(crate) async fn health(State(registry): State<Arc<Registry>>) -> &'static str {
    match (registry.term.is_shared(), registry.term.leads()) {
        (false, _) => "ok\n",
        (true, true) => "ok, leads\n",
        (true, false) => "ok, follows nobody\n",
    }
}

/// Metrics for Prometheus, in the OpenMetrics text format. With the admin token or a reader's, or if the manager
/// asks for none, they include those of each job and rack by name; without it only totals. A manager that does not lead
/// has those of itself alone.
#[utoipa::path(
    get, path = "/metrics", tag = "manager", operation_id = "metrics",
    security((), ("admin_token" = [])),
    responses(
        (status = 200, description = "OpenMetrics text.", body = String, content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        (status = 401, description = "The token is wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
    )
)]
pub(crate) async fn metrics(
    reader: Result<Reader, Refusal>,
    headers: HeaderMap,
    State(registry): State<Arc<Registry>>,
) -> Result<impl IntoResponse, Refusal> {
    let detail = match reader {
        Ok(Reader) => Detail::Everything,
        // A scrape with a wrong token is refused: it was meant to have everything and should not go on with
        // less.
        Err(refusal) if headers.contains_key(header::AUTHORIZATION) => return Err(refusal),
        Err(_) => Detail::Totals,
    };
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], crate::metrics::render(&registry, detail)))
}

/// All that the manager keeps, for `paramhub state restore`: the records of jobs, tokens, teams and authorities, with
/// the secrets in them.
#[utoipa::path(
    get, path = "/v1/state", tag = "manager", operation_id = "state",
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The state. Its form is of this release.", body = Object, content_type = "application/json"),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role, or the manager asks for none.", body = ServiceError),
        (status = 500, description = "The store cannot be read.", body = ServiceError),
    )
)]
pub(crate) async fn state(
    Admin(by): Admin,
    State(registry): State<Arc<Registry>>,
) -> Result<impl IntoResponse, Refusal> {
    if by.token.is_none() {
        let message = "this connection manager admits every caller without a token, and its state has every secret: start it \
                       with --admin-token-file, or copy its --state directory while it does not run";
        return Err(refusal(ErrorCode::Forbidden, message).into());
    }
    let state = registry.backup().await?;
    audit(&by, format_args!("saved the manager's state, with its secrets"));
    Ok(([(header::CONTENT_TYPE, "application/json")], state))
}

/// The interface, as an OpenAPI document.
#[utoipa::path(
    get, path = "/openapi.json", tag = "manager", operation_id = "openapi",
    responses((status = 200, description = "This document.", body = Object, content_type = "application/json"))
)]
pub(crate) async fn openapi() -> impl IntoResponse {
    static DOCUMENT: OnceLock<String> = OnceLock::new();
    let document =
        DOCUMENT.get_or_init(|| ApiDocument::openapi().to_pretty_json().expect("the document is plain data"));
    ([(header::CONTENT_TYPE, "application/json")], document.as_str())
}
