//! Routes of the information book: Query and BestScheme.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use paramhub_core::membership::Job;
use paramhub_core::scheme::{BestScheme, InformationBook, InformationBookError};
use paramhub_core::service::{AskBestScheme, AskInformationBook, ErrorCode, ServiceError};
use paramhub_core::tokens::TokenBearer;

use super::{PathSegment, QueryParameters};
use crate::auth::JobReader;
use crate::error::{Refusal, refusal};
use crate::registry::Registry;

/// Query: the information book of a job, or some of its properties. It exists from the moment at which every
/// rank has called InitService until the end of the job.
#[utoipa::path(
    get, path = "/v1/jobs/{job}/book", tag = "jobs", operation_id = "query_book",
    params(
        ("job" = String, Path, description = "The job's name, with `/` written as `%2F`, or its namespace."),
        ("properties" = Option<String>, Query, description = "Up to 64 names separated by commas: `workers`, `hubs`, \
         `place`, `layers`, `layers.NAME`, or `layers.NAME.FIELD` with the FIELD type, outputs, inputs, samples, parameters, \
         keys, scheme or why. The answer is then an object of these names and their values."),
    ),
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The whole book, where no properties are asked for.", body = InformationBook),
        (status = 400, description = "The path or the query is malformed.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 404, description = "There is no such job, layer or property.", body = ServiceError),
        (status = 408, description = "The job has no book yet: not every rank has called InitService.", body = ServiceError),
        (status = 410, description = "The job has ended.", body = ServiceError),
    )
)]
pub(crate) async fn query(
    JobReader(by): JobReader,
    State(registry): State<Arc<Registry>>,
    PathSegment(job): PathSegment<String>,
    QueryParameters(ask): QueryParameters<AskInformationBook>,
) -> Result<Response, Refusal> {
    let information_book = find(&registry, &by, &job)?;
    let Some(properties) = ask.properties else { return Ok(Json(&*information_book).into_response()) };
    let properties: Vec<&str> = properties.split(',').collect();
    let found = information_book.query(&properties).map_err(not_there)?;
    Ok(Json(found).into_response())
}

/// BestScheme: how a layer of a job is exchanged, and what the other schemes would move.
#[utoipa::path(
    get, path = "/v1/jobs/{job}/best-scheme", tag = "jobs", operation_id = "best_scheme",
    params(
        ("job" = String, Path, description = "The job's name, with `/` written as `%2F`, or its namespace."),
        ("layer" = String, Query, description = "The layer's name."),
    ),
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The layer's scheme.", body = BestScheme),
        (status = 400, description = "The path or the query is malformed.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 404, description = "There is no such job or layer.", body = ServiceError),
        (status = 408, description = "The job has no book yet: not every rank has called InitService.", body = ServiceError),
        (status = 410, description = "The job has ended.", body = ServiceError),
    )
)]
pub(crate) async fn best_scheme(
    JobReader(by): JobReader,
    State(registry): State<Arc<Registry>>,
    PathSegment(job): PathSegment<String>,
    QueryParameters(ask): QueryParameters<AskBestScheme>,
) -> Result<Json<BestScheme>, Refusal> {
    Ok(Json(find(&registry, &by, &job)?.best_scheme(&ask.layer).map_err(not_there)?))
}

fn find(registry: &Registry, by: &TokenBearer, job: &str) -> Result<Arc<InformationBook>, ServiceError> {
    registry.with(|state| state.membership.find_for(by.team.as_deref(), job).and_then(Job::information_book))
}

fn not_there(wrong: InformationBookError) -> ServiceError {
    let code = match wrong {
        InformationBookError::Layer { .. } | InformationBookError::Property(_) => ErrorCode::NotFound,
        InformationBookError::TooMany(_) => ErrorCode::BadRequest,
    };
    refusal(code, wrong.to_string())
}
