//! Who may call: operators and hubs by token. Workers prove a job's nonce instead, in their bodies.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::{header, request::Parts};
use paramhub_core::service::ErrorCode;
use subtle::ConstantTimeEq;

use crate::error::{Refusal, refusal};
use crate::registry::Registry;

/// Witness that the caller has the admin token, or that the manager needs none.
pub(crate) struct Admin;

impl FromRequestParts<Arc<Registry>> for Admin {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, registry: &Arc<Registry>) -> Result<Self, Refusal> {
        let Some(expected) = &registry.admin_token else { return Ok(Admin) };
        let message = match bearer(parts) {
            Some(token) if token.as_bytes().ct_eq(expected.as_bytes()).into() => return Ok(Admin),
            Some(_) => "this is not the connection manager's admin token",
            None => "this call needs the connection manager's admin token, as `authorization: Bearer TOKEN`",
        };
        Err(refusal(
            ErrorCode::Unauthorized,
            format!("{message}: give it with --admin-token or PARAMHUB_ADMIN_TOKEN"),
        )
        .into())
    }
}

/// The bearer token of a call, for whoever knows what it should be.
pub(crate) struct Bearer(pub(crate) Option<String>);

impl<S: Send + Sync> FromRequestParts<S> for Bearer {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        Ok(Bearer(bearer(parts).map(str::to_string)))
    }
}

fn bearer(parts: &Parts) -> Option<&str> {
    let (scheme, token) = parts.headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}
