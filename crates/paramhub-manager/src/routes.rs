//! The HTTP routes: the arguments of each, its callers, and its answer.

pub(crate) mod authority;
pub(crate) mod hubs;
pub(crate) mod information_book;
pub(crate) mod jobs;
pub(crate) mod pages;
pub(crate) mod teams;
pub(crate) mod tokens;

use axum::extract::{FromRequestParts, Path, Query};
use axum::http::StatusCode;
use axum::http::request::Parts;
use paramhub_core::auth::Namespace;
use paramhub_core::service::ErrorCode;
use serde::de::DeserializeOwned;

use crate::error::{Refusal, refusal};

/// The variable part of a path.
pub(crate) struct PathSegment<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for PathSegment<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        match Path::<T>::from_request_parts(parts, state).await {
            Ok(Path(value)) => Ok(PathSegment(value)),
            Err(wrong) => Err(refusal(ErrorCode::BadRequest, wrong.body_text()).into()),
        }
    }
}

/// The arguments in the query.
pub(crate) struct QueryParameters<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for QueryParameters<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(value)) => Ok(QueryParameters(value)),
            Err(wrong) => Err(refusal(ErrorCode::BadRequest, wrong.body_text()).into()),
        }
    }
}

/// Answers a request for an unknown route.
pub(crate) async fn unknown_route(uri: axum::http::Uri) -> Refusal {
    let message = format!("there is no {} here: GET /openapi.json lists every route", uri.path());
    refusal(ErrorCode::NotFound, message).into()
}

/// Answers a request with a method that the route does not have.
pub(crate) async fn unknown_method(method: axum::http::Method, uri: axum::http::Uri) -> Refusal {
    let message = format!("{} does not take {method}: GET /openapi.json lists every route", uri.path());
    Refusal::with_status(StatusCode::METHOD_NOT_ALLOWED, ErrorCode::NotFound, message)
}

/// The namespace in a worker's path.
pub(crate) fn namespace(text: &str) -> Result<Namespace, Refusal> {
    text.parse().map_err(|wrong: String| refusal(ErrorCode::BadRequest, wrong).into())
}
