//! Routes of the authority that signs the manager's certificates.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use paramhub_core::service::{AuthorityStatus, ReplaceAuthority, ServiceError};

use crate::auth::Admin;
use crate::body::{JsonBody, SMALL};
use crate::error::Refusal;
use crate::log::audit;
use crate::registry::Registry;

/// The authority that signs the manager's certificates. It is no secret.
#[utoipa::path(
    get, path = "/v1/authority", tag = "manager", operation_id = "show_authority",
    responses((status = 200, description = "Its certificate.", body = AuthorityStatus))
)]
pub(crate) async fn show(State(registry): State<Arc<Registry>>) -> Json<AuthorityStatus> {
    Json(registry.authority())
}

/// Makes a new authority. Workers of older jobs recognise the manager by the former ones, unless these are
/// revoked; callers with a token learn the new one by themselves.
#[utoipa::path(
    post, path = "/v1/authority", tag = "manager", operation_id = "replace_authority",
    request_body = ReplaceAuthority,
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The new authority.", body = AuthorityStatus),
        (status = 400, description = "The body is malformed.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 408, description = "The body did not arrive in time.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
        (status = 500, description = "The store cannot be written.", body = ServiceError),
    )
)]
pub(crate) async fn replace(
    Admin(by): Admin,
    State(registry): State<Arc<Registry>>,
    JsonBody(request): JsonBody<ReplaceAuthority, SMALL>,
) -> Result<Json<AuthorityStatus>, Refusal> {
    let revokes = if request.revoke_former { " and revoked the former ones" } else { "" };
    let status = registry.replace_authority(request).await?;
    audit(&by, format_args!("made the authority {}{revokes}", status.fingerprint));
    Ok(Json(status))
}
