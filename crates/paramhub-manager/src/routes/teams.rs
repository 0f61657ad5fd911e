//! Routes of teams: naming them, setting their quotas, listing and removing them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use paramhub_core::service::{ServiceError, TeamQuotas, TeamStatus};

use super::PathSegment;
use crate::auth::{Admin, Reader};
use crate::body::{JsonBody, SMALL};
use crate::error::Refusal;
use crate::log::audit;
use crate::registry::Registry;

/// Adds a team, or replaces all of its quotas. Jobs that live go on, even if they have more than the new quotas.
#[utoipa::path(
    put, path = "/v1/teams/{team}", tag = "teams", operation_id = "set_team",
    params(("team" = String, Path, description = "The team's name: 1 to 32 lower-case letters, digits, `_` and `-`.")),
    request_body = TeamQuotas,
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The team.", body = TeamStatus),
        (status = 400, description = "The body is malformed or the name unusable.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 408, description = "The body did not arrive in time.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
        (status = 500, description = "The store cannot be written.", body = ServiceError),
        (status = 507, description = "There are too many teams.", body = ServiceError),
    )
)]
pub(crate) async fn set(
    Admin(by): Admin,
    State(registry): State<Arc<Registry>>,
    PathSegment(team): PathSegment<String>,
    JsonBody(quotas): JsonBody<TeamQuotas, SMALL>,
) -> Result<Json<TeamStatus>, Refusal> {
    let set = registry.set_team(team, quotas).await?;
    audit(&by, format_args!("set the quotas of team `{}`: {}", set.name, set.quotas));
    Ok(Json(set))
}

/// Every team with its quotas and what its living jobs have of them.
#[utoipa::path(
    get, path = "/v1/teams", tag = "teams", operation_id = "list_teams",
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "By name.", body = Vec<TeamStatus>),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
    )
)]
pub(crate) async fn list(_: Reader, State(registry): State<Arc<Registry>>) -> Json<Vec<TeamStatus>> {
    Json(registry.with(|state| state.membership.teams()))
}

/// Removes a team. Its jobs that have ended, and its checkpoints, stay, and belong to the next team of this name.
#[utoipa::path(
    delete, path = "/v1/teams/{team}", tag = "teams", operation_id = "remove_team",
    params(("team" = String, Path, description = "The team's name.")),
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The team as it was.", body = TeamStatus),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 404, description = "There is no such team.", body = ServiceError),
        (status = 409, description = "It has jobs that live, or valid tokens.", body = ServiceError),
        (status = 500, description = "The store cannot be written.", body = ServiceError),
    )
)]
pub(crate) async fn remove(
    Admin(by): Admin,
    State(registry): State<Arc<Registry>>,
    PathSegment(team): PathSegment<String>,
) -> Result<Json<TeamStatus>, Refusal> {
    let removed = registry.remove_team(team).await?;
    audit(&by, format_args!("removed team `{}`", removed.name));
    Ok(Json(removed))
}
