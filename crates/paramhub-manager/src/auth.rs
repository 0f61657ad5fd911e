//! Checks that a caller is authorised. Operators and hubs show a token in the head of a request, so that it
//! is checked before any body is read. Workers prove a job's nonce in their bodies instead.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::{Method, header, request::Parts};
use paramhub_core::service::{ErrorCode, TokenRole};
use paramhub_core::tokens::TokenBearer;

use crate::clock::now;
use crate::connection_slots::ConnectionSlot;
use crate::error::{Refusal, refusal};
use crate::registry::Registry;
use crate::routes::PathSegment;

/// Witness that the caller may do everything: it has a token for that, or the manager needs none.
pub(crate) struct Admin(pub(crate) TokenBearer);

/// Witness that the caller may let hubs join.
pub(crate) struct HubOwner(pub(crate) TokenBearer);

/// Witness that the caller may create and stop jobs: all, or those of its team.
pub(crate) struct JobOwner(pub(crate) TokenBearer);

/// Witness that the caller may read all jobs, hubs and metrics.
pub(crate) struct Reader;

/// Witness that the caller may read hubs and jobs: all, or those of its team.
pub(crate) struct JobReader(pub(crate) TokenBearer);

impl FromRequestParts<Arc<Registry>> for Admin {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, registry: &Arc<Registry>) -> Result<Self, Refusal> {
        operator(parts, registry, &[TokenRole::Admin]).map(Admin)
    }
}

impl FromRequestParts<Arc<Registry>> for HubOwner {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, registry: &Arc<Registry>) -> Result<Self, Refusal> {
        operator(parts, registry, &[TokenRole::Admin, TokenRole::Hub]).map(HubOwner)
    }
}

impl FromRequestParts<Arc<Registry>> for Reader {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, registry: &Arc<Registry>) -> Result<Self, Refusal> {
        operator(parts, registry, &[TokenRole::Admin, TokenRole::Reader]).map(|_| Reader)
    }
}

impl FromRequestParts<Arc<Registry>> for JobOwner {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, registry: &Arc<Registry>) -> Result<Self, Refusal> {
        operator(parts, registry, &[TokenRole::Admin, TokenRole::Team]).map(JobOwner)
    }
}

impl FromRequestParts<Arc<Registry>> for JobReader {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, registry: &Arc<Registry>) -> Result<Self, Refusal> {
        operator(parts, registry, &[TokenRole::Admin, TokenRole::Reader, TokenRole::Team]).map(JobReader)
    }
}

/// The caller, if its token has one of these roles.
fn operator(parts: &Parts, registry: &Registry, allowed: &[TokenRole]) -> Result<TokenBearer, Refusal> {
    let slot = CallerSlot::of(parts);
    let bearer = registry.tokens().check(bearer(parts))?;
    let Some(token) = &bearer.token else {
        // Without a token every caller is admitted. A call without a body is complete.
        if ![Method::POST, Method::PUT].contains(&parts.method) {
            slot.0.complete_request();
        }
        return Ok(bearer);
    };
    if !allowed.contains(&bearer.role) {
        let roles: Vec<String> = allowed.iter().map(TokenRole::to_string).collect();
        let message = format!(
            "the token `{token}` has the role {}, and this call needs {}",
            bearer.role,
            roles.join(" or ")
        );
        return Err(refusal(ErrorCode::Forbidden, message).into());
    }
    match &bearer.team {
        Some(team) => slot.0.prove_team(team)?,
        None => slot.0.prove_operator()?,
    }
    Ok(bearer)
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
