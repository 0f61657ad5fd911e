//! Request bodies: bounded in bytes and time before anything looks at them.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Bytes, to_bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use paramhub_core::limits::REQUEST_BYTES_MAX;
use paramhub_core::service::{ErrorCode, ServiceError};
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use crate::error::{Refusal, refusal};
use crate::registry::{BODY_BUDGET_KIB, Registry, blocking};

/// Bytes of most bodies.
pub(crate) const SMALL: usize = 64 << 10;
/// Bytes of a hub's shape: 64 interfaces that each list 1,024 cores fit.
pub(crate) const SHAPE: usize = 1 << 20;
/// Bytes of a hub's report.
pub(crate) const REPORT: usize = 4 << 20;
/// How long a small body may take.
const SMALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a key table may take, with the wait for its turn; half a gigabyte at 10 MB/s.
const LARGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Bodies above this are parsed beside the executor's threads.
const PARSED_AT_ONCE: usize = 64 << 10;

/// A JSON body of at most `LIMIT` bytes.
pub(crate) struct JsonBody<T, const LIMIT: usize>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned + Send + 'static, const LIMIT: usize> FromRequest<S>
    for JsonBody<T, LIMIT>
{
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refusal> {
        let bytes = read(request, LIMIT, Instant::now(), SMALL_TIMEOUT).await?;
        let parsed =
            if bytes.len() > PARSED_AT_ONCE { blocking(move || parse(&bytes)).await? } else { parse(&bytes) };
        Ok(JsonBody(parsed?))
    }
}

/// An InitService body, not yet parsed, with its place in the budget that all such bodies share.
pub(crate) struct HeavyBody {
    bytes: Bytes,
    _permit: OwnedSemaphorePermit,
}

impl HeavyBody {
    /// Waits for a place in the budget and then for the body, for both together no longer than `patience` after `begun`.
    async fn receive(
        request: Request,
        budget: Arc<Semaphore>,
        begun: Instant,
        patience: Duration,
    ) -> Result<Self, Refusal> {
        let declared = declared_bytes(&request).unwrap_or(REQUEST_BYTES_MAX);
        // What is too long is refused by the read; here it only must not ask for more than there is.
        let share = (declared / 1024 + 1).min(BODY_BUDGET_KIB) as u32;
        let Ok(Ok(permit)) = timeout_at(begun + patience, budget.acquire_many_owned(share)).await else {
            let message = "too many key tables are on their way to the connection manager: try again";
            return Err(Refusal::with_status(StatusCode::SERVICE_UNAVAILABLE, ErrorCode::Internal, message));
        };
        Ok(HeavyBody { bytes: read(request, REQUEST_BYTES_MAX, begun, patience).await?, _permit: permit })
    }

    /// Parses the body and frees its bytes; what was parsed still counts against the budget.
    pub(crate) fn parse<T: DeserializeOwned>(&mut self) -> Result<T, ServiceError> {
        parse(&std::mem::take(&mut self.bytes))
    }
}

impl FromRequest<Arc<Registry>> for HeavyBody {
    type Rejection = Refusal;

    async fn from_request(request: Request, registry: &Arc<Registry>) -> Result<Self, Refusal> {
        HeavyBody::receive(request, registry.body_budget.clone(), Instant::now(), LARGE_TIMEOUT).await
    }
}

async fn read(request: Request, limit: usize, begun: Instant, patience: Duration) -> Result<Bytes, Refusal> {
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    // Browsers cannot send this type to another site unasked, so no web page can create jobs on a loopback manager.
    if !content_type.is_some_and(|value| value.trim_start().starts_with("application/json")) {
        let message = "the body must be JSON with `content-type: application/json`";
        return Err(Refusal::with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE, ErrorCode::BadRequest, message));
    }
    let declared = declared_bytes(&request);
    let too_long = || {
        let message = format!("the body is longer than the {limit} bytes this route takes");
        Refusal::with_status(StatusCode::PAYLOAD_TOO_LARGE, ErrorCode::BadRequest, message)
    };
    if declared.is_some_and(|bytes| bytes > limit) {
        return Err(too_long());
    }
    match timeout_at(begun + patience, to_bytes(request.into_body(), limit)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(cause)) if declared.is_some() => {
            Err(refusal(ErrorCode::BadRequest, format!("the body broke off: {cause}")).into())
        }
        Ok(Err(_)) => Err(too_long()),
        Err(_) => {
            let message = format!("the body did not arrive within {} s", patience.as_secs());
            Err(Refusal::with_status(StatusCode::REQUEST_TIMEOUT, ErrorCode::BadRequest, message))
        }
    }
}

fn declared_bytes(request: &Request) -> Option<usize> {
    request.headers().get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ServiceError> {
    serde_json::from_slice(bytes)
        .map_err(|cause| refusal(ErrorCode::BadRequest, format!("the body cannot be read: {cause}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::{Body, HttpBody};
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    /// A body that is promised and never sent.
    struct Promised;

    impl HttpBody for Promised {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context,
        ) -> Poll<Option<Result<hyper::body::Frame<Bytes>, Infallible>>> {
            Poll::Pending
        }
    }

    #[tokio::test]
    async fn the_wait_for_its_turn_counts_against_the_time_of_a_large_body() {
        let hour = Duration::from_secs(3600);
        let status = async |budget: usize| {
            let head = Request::builder().header("content-type", "application/json");
            let request = head.header("content-length", "2048").body(Body::new(Promised)).unwrap();
            let begun = Instant::now().checked_sub(hour).unwrap();
            let received = HeavyBody::receive(request, Arc::new(Semaphore::new(budget)), begun, hour);
            let received = tokio::time::timeout(Duration::from_secs(30), received).await;
            received.expect("it gives up when its time is over").err().unwrap().status
        };
        assert_eq!(status(0).await, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(status(3).await, StatusCode::REQUEST_TIMEOUT);
    }
}
