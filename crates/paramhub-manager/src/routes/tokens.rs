//! Routes of tokens: making, listing and revoking them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use paramhub_core::service::{CreateToken, ServiceError, TokenCreated, TokenStatus};

use super::PathSegment;
use crate::auth::Admin;
use crate::body::{JsonBody, SMALL};
use crate::error::Refusal;
use crate::log::audit;
use crate::registry::Registry;

/// Makes a token. It is valid once it is in the store.
#[utoipa::path(
    post, path = "/v1/tokens", tag = "tokens", operation_id = "create_token",
    request_body = CreateToken,
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The token, which no other answer shows.", body = TokenCreated),
        (status = 400, description = "The body is malformed or the name unusable, or the manager asks for no token.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 408, description = "The body did not arrive in time.", body = ServiceError),
        (status = 409, description = "A valid token has this name.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
        (status = 500, description = "The store cannot be written.", body = ServiceError),
        (status = 507, description = "There are too many tokens.", body = ServiceError),
    )
)]
pub(crate) async fn create(
    Admin(by): Admin,
    State(registry): State<Arc<Registry>>,
    JsonBody(request): JsonBody<CreateToken, SMALL>,
) -> Result<Json<TokenCreated>, Refusal> {
    let created = registry.create_token(request, by.clone()).await?;
    audit(&by, format_args!("made the token {}", described(&created.status)));
    Ok(Json(created))
}

/// Every token, without its text.
#[utoipa::path(
    get, path = "/v1/tokens", tag = "tokens", operation_id = "list_tokens",
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The configured one, then the others, oldest first.", body = Vec<TokenStatus>),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
    )
)]
pub(crate) async fn list(_: Admin, State(registry): State<Arc<Registry>>) -> Json<Vec<TokenStatus>> {
    Json(registry.tokens().statuses())
}

/// Revokes a token. Jobs that run, and hubs that have joined with it, go on.
#[utoipa::path(
    delete, path = "/v1/tokens/{token}", tag = "tokens", operation_id = "revoke_token",
    params(("token" = String, Path, description = "The token's name.")),
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "It is revoked.", body = TokenStatus),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 404, description = "No valid token has this name.", body = ServiceError),
        (status = 409, description = "It is the last with which tokens can be made.", body = ServiceError),
        (status = 500, description = "The store cannot be written.", body = ServiceError),
    )
)]
pub(crate) async fn revoke(
    Admin(by): Admin,
    State(registry): State<Arc<Registry>>,
    PathSegment(token): PathSegment<String>,
) -> Result<Json<TokenStatus>, Refusal> {
    let revoked = registry.revoke_token(token).await?;
    audit(&by, format_args!("revoked the token {}", described(&revoked)));
    Ok(Json(revoked))
}

fn described(token: &TokenStatus) -> String {
    match &token.team {
        Some(team) => format!("`{}` (team `{team}`)", token.name),
        None => format!("`{}` ({})", token.name, token.role),
    }
}
