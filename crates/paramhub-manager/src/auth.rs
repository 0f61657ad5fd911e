//! Checks that a caller is authorised. Operators and hubs show a token in the head of a request, so that it
//! is checked before any body is read. Workers prove a job's nonce in their bodies instead.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::{Method, header, request::Parts};
use paramhub_core::service::ErrorCode;
use subtle::ConstantTimeEq;

use crate::clock::now;
use crate::connection_slots::ConnectionSlot;
use crate::error::{Refusal, refusal};
use crate::registry::Registry;
use crate::routes::PathSegment;

/// Witness that the caller has the admin token, or that the manager needs none.
pub(crate) struct Admin;

impl FromRequestParts<Arc<Registry>> for Admin {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, registry: &Arc<Registry>) -> Result<Self, Refusal> {
        let slot = CallerSlot::of(parts);
        let Some(expected) = &registry.admin_token else {
            // Without a token every caller is admitted. A call without a body is complete.
            if parts.method != Method::POST {
                slot.0.complete_request();
            }
            return Ok(Admin);
        };
        let message = match bearer(parts) {
            Some(token) if token.as_bytes().ct_eq(expected.as_bytes()).into() => {
                slot.0.prove_operator()?;
                return Ok(Admin);
            }
            Some(_) => "this is not the connection manager's admin token",
            None => "this call needs the connection manager's admin token, as `authorization: Bearer TOKEN`",
        };
        Err(refusal(
            ErrorCode::Unauthorized,
            format!("{message}: give it with --admin-token-file, --admin-token or PARAMHUB_ADMIN_TOKEN"),
        )
        .into())
    }
}

/// Witness that the caller is this hub.
pub(crate) struct FromHub {
    pub(crate) hub: u32,
    pub(crate) token: String,
}

impl FromRequestParts<Arc<Registry>> for FromHub {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, registry: &Arc<Registry>) -> Result<Self, Refusal> {
        let PathSegment(hub) = PathSegment::<u32>::from_request_parts(parts, registry).await?;
        let token = bearer(parts).map(str::to_string);
        registry.with(|state| state.membership.admit_hub(hub, token.as_deref(), now()))?;
        CallerSlot::of(parts).0.prove_hub(hub)?;
        Ok(FromHub { hub, token: token.expect("a hub without one is not admitted") })
    }
}

/// The slot of the caller's connection, which knows what the caller has proved.
pub(crate) struct CallerSlot(pub(crate) Arc<ConnectionSlot>);

impl CallerSlot {
    pub(crate) fn of(parts: &Parts) -> Self {
        let slot = parts.extensions.get::<Arc<ConnectionSlot>>();
        CallerSlot(slot.expect("the server gives every request its connection's slot").clone())
    }
}

impl<S: Send + Sync> FromRequestParts<S> for CallerSlot {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(CallerSlot::of(parts))
    }
}

fn bearer(parts: &Parts) -> Option<&str> {
    let (scheme, token) = parts.headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}
