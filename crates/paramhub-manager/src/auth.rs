//! Who may call: operators and hubs by token, which the head of a request shows, so that no body is read before. Workers prove
//! a job's nonce instead, in their bodies.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::{Method, header, request::Parts};
use paramhub_core::service::ErrorCode;
use subtle::ConstantTimeEq;

use crate::clock::Now;
use crate::error::{Refusal, refusal};
use crate::places::Guest;
use crate::registry::Registry;
use crate::routes::Segment;

/// Witness that the caller has the admin token, or that the manager needs none.
pub(crate) struct Admin;

impl FromRequestParts<Arc<Registry>> for Admin {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, registry: &Arc<Registry>) -> Result<Self, Refusal> {
        let guest = Caller::of(parts);
        let Some(expected) = &registry.admin_token else {
            // Everybody may; a call that takes no body is complete.
            if parts.method != Method::POST {
                guest.0.complete();
            }
            return Ok(Admin);
        };
        let message = match bearer(parts) {
            Some(token) if token.as_bytes().ct_eq(expected.as_bytes()).into() => {
                guest.0.prove_operator()?;
                return Ok(Admin);
            }
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

/// Witness that the caller is this hub.
pub(crate) struct FromHub {
    pub(crate) hub: u32,
    pub(crate) token: String,
}

impl FromRequestParts<Arc<Registry>> for FromHub {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, registry: &Arc<Registry>) -> Result<Self, Refusal> {
        let Segment(hub) = Segment::<u32>::from_request_parts(parts, registry).await?;
        let token = bearer(parts).map(str::to_string);
        registry.with(|world| world.hubs.admit(hub, token.as_deref(), Now::read()).map(drop))?;
        Caller::of(parts).0.prove_hub(hub)?;
        Ok(FromHub { hub, token: token.expect("a hub without one is not admitted") })
    }
}

/// Who calls, as far as that is known.
pub(crate) struct Caller(pub(crate) Arc<Guest>);

impl Caller {
    pub(crate) fn of(parts: &Parts) -> Self {
        let guest = parts.extensions.get::<Arc<Guest>>();
        Caller(guest.expect("the server gives every request its caller's place").clone())
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Caller::of(parts))
    }
}

fn bearer(parts: &Parts) -> Option<&str> {
    let (scheme, token) = parts.headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}
