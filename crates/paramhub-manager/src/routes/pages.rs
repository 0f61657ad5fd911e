//! Routes that concern no job: what this is, whether it is well, its numbers and its interface.

use std::sync::{Arc, OnceLock};

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::IntoResponse;
use paramhub_core::service::ServiceError;
use utoipa::OpenApi;

use crate::auth::Admin;
use crate::error::Refusal;
use crate::metrics::Detail;
use crate::openapi::Interface;
use crate::registry::Registry;

/// One line that says what answers here.
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

/// Whether the manager answers.
#[utoipa::path(
    get, path = "/health", tag = "manager", operation_id = "health",
    responses((status = 200, description = "It does.", body = String, content_type = "text/plain"))
)]
pub(crate) async fn health() -> &'static str {
    "ok\n"
}

/// Numbers for Prometheus, in the OpenMetrics text format: with the admin token, or where the manager has none, those of each job and
/// rack by their names, and without it those of all together.
#[utoipa::path(
    get, path = "/metrics", tag = "manager", operation_id = "metrics",
    security((), ("admin_token" = [])),
    responses(
        (status = 200, description = "OpenMetrics text.", body = String, content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        (status = 401, description = "The admin token is wrong.", body = ServiceError),
    )
)]
pub(crate) async fn metrics(
    admin: Result<Admin, Refusal>,
    headers: HeaderMap,
    State(registry): State<Arc<Registry>>,
) -> Result<impl IntoResponse, Refusal> {
    let detail = match admin {
        Ok(Admin) => Detail::Everything,
        // A scrape that was meant to have everything should not go on with less.
        Err(refusal) if headers.contains_key(header::AUTHORIZATION) => return Err(refusal),
        Err(_) => Detail::Totals,
    };
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, content_type)], crate::metrics::render(&registry, detail)))
}

/// The interface, as an OpenAPI document.
#[utoipa::path(
    get, path = "/openapi.json", tag = "manager", operation_id = "openapi",
    responses((status = 200, description = "This document.", body = Object, content_type = "application/json"))
)]
pub(crate) async fn openapi() -> impl IntoResponse {
    static DOCUMENT: OnceLock<String> = OnceLock::new();
    let document =
        DOCUMENT.get_or_init(|| Interface::openapi().to_pretty_json().expect("the document is plain data"));
    ([(header::CONTENT_TYPE, "application/json")], document.as_str())
}
