//! Request bodies, bounded in bytes and time before they are parsed. The bodies of all callers that have
//! proved nothing are bounded together. Key tables have a budget of their own, for ranks that have proved
//! their job's nonce.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::{StatusCode, header};
use paramhub_core::auth::{Incarnation, Proof, Purpose};
use paramhub_core::limits::REQUEST_BYTES_MAX;
use paramhub_core::service::{ErrorCode, ServiceError};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};

use crate::auth::CallerSlot;
use crate::blocking::blocking;
use crate::connection_slots::ConnectionSlot;
use crate::error::{Refusal, refusal};
use crate::key_table_budgets::KeyTableBudgets;
use crate::registry::Registry;
use crate::routes::{PathSegment, namespace};
use crate::state::CallingRank;

/// The most bytes of most bodies.
pub(crate) const SMALL: usize = 64 << 10;
/// The most bytes of a hub's shape: 64 interfaces that each list 1,024 cores fit.
pub(crate) const SHAPE: usize = 1 << 20;
/// The most bytes of a hub's report.
pub(crate) const REPORT: usize = 4 << 20;
/// The time that a small body may take.
const SMALL_TIMEOUT: Duration = Duration::from_secs(10);
/// The time that a key table may take, including the wait for its turn; enough for half a gigabyte at 10
/// MB/s.
const TABLE_TIMEOUT: Duration = Duration::from_secs(60);
/// At least [`PACE_BYTES`] of a key table must arrive in each interval of this length.
const PACE: Duration = Duration::from_secs(5);
const PACE_BYTES: usize = 256 << 10;
/// The bytes in which InitService must name the calling rank and its proof, so that a key table is read from
/// ranks alone.
const CLAIM_BYTES: usize = 4 << 10;
/// Bodies above this many bytes are parsed beside the executor's threads.
const PARSED_AT_ONCE: usize = 64 << 10;

/// A JSON body of at most `LIMIT` bytes.
pub(crate) struct JsonBody<T, const LIMIT: usize>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned + Send + 'static, const LIMIT: usize> FromRequest<S>
    for JsonBody<T, LIMIT>
{
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refusal> {
        let mut body = IncomingBody::begin(request, LIMIT, Instant::now(), SMALL_TIMEOUT)?;
        while body.more().await? {}
        let IncomingBody { bytes, slot, .. } = body;
        slot.complete_request();
        let parsed =
            if bytes.len() > PARSED_AT_ONCE { blocking(move || parse(&bytes)).await? } else { parse(&bytes) };
        Ok(JsonBody(parsed?))
    }
}

/// An InitService body of a caller that has proved the job's nonce, not yet parsed. It holds its share of the
/// budget of such bodies.
pub(crate) struct TableBody {
    pub(crate) caller: CallingRank,
    bytes: Vec<u8>,
    _permit: OwnedSemaphorePermit,
}

impl TableBody {
    /// Reads the caller's claim and checks it, waits for room in the budget and then reads the rest. All this
    /// must end before the body's deadline.
    async fn receive(
        mut body: IncomingBody,
        tables: &KeyTableBudgets,
        prove: impl Fn(&Claim) -> Result<CallingRank, Refusal>,
    ) -> Result<Self, Refusal> {
        let declared = body.declared.unwrap_or(REQUEST_BYTES_MAX);
        let claim = loop {
            if let Some(claim) = Claim::at_the_beginning_of(&body.bytes) {
                break claim;
            }
            if body.bytes.len() > SMALL {
                let message = format!(
                    "InitService must say `rank`, `incarnation` and `proof` before `settings`: of a caller who has not, no more than \
                     {SMALL} bytes are read"
                );
                return Err(refusal(ErrorCode::BadRequest, message).into());
            }
            if !body.more().await? {
                break parse(&body.bytes)?;
            }
        };
        let caller = prove(&claim)?;
        let permit = tables.admit(declared, body.deadline).await?;
        body.bytes.reserve_exact(body.declared.unwrap_or(0).saturating_sub(body.bytes.len()));
        body.pace = Some(Pace { until: Instant::now() + PACE, bytes: body.bytes.len() });
        while body.more().await? {}
        body.slot.complete_request();
        Ok(TableBody { caller, bytes: body.bytes, _permit: permit })
    }

    /// Parses the body and frees its bytes. The parsed table still counts against the budget.
    pub(crate) fn parse<T: DeserializeOwned>(&mut self) -> Result<T, ServiceError> {
        parse(&std::mem::take(&mut self.bytes))
    }
}

impl FromRequest<Arc<Registry>> for TableBody {
    type Rejection = Refusal;

    async fn from_request(request: Request, registry: &Arc<Registry>) -> Result<Self, Refusal> {
        let (mut parts, body) = request.into_parts();
        let PathSegment(text) = PathSegment::<String>::from_request_parts(&mut parts, registry).await?;
        let namespace = namespace(&text)?;
        let slot = CallerSlot::of(&parts).0;
        let request = Request::from_parts(parts, body);
        let body = IncomingBody::begin(request, REQUEST_BYTES_MAX, Instant::now(), TABLE_TIMEOUT)?;
        let prove = |claim: &Claim| {
            let caller = CallingRank { namespace, rank: claim.rank, incarnation: claim.incarnation };
            registry.check_proof(caller, Purpose::Init, &claim.proof)?;
            registry.admit_rank(&slot, namespace)?;
            Ok(caller)
        };
        TableBody::receive(body, &registry.tables, prove).await
    }
}

/// The fields of InitService that come before the settings.
#[derive(Deserialize)]
struct Claim {
    rank: u32,
    incarnation: Incarnation,
    proof: Proof,
}

impl Claim {
    /// The claim, if the body begins with it: the fields before the settings are parsed as an object of their
    /// own.
    fn at_the_beginning_of(body: &[u8]) -> Option<Claim> {
        let settings = b"\"settings\"";
        let before = body.windows(settings.len()).take(CLAIM_BYTES).position(|window| window == settings)?;
        let before = body[..before].trim_ascii_end().strip_suffix(b",")?;
        serde_json::from_slice(&[before, b"}"].concat()).ok()
    }
}

/// A body that is being read.
struct IncomingBody {
    body: Body,
    bytes: Vec<u8>,
    slot: Arc<ConnectionSlot>,
    declared: Option<usize>,
    limit: usize,
    begun: Instant,
    deadline: Instant,
    pace: Option<Pace>,
}

/// The time at which the next [`PACE_BYTES`] of a body are due.
struct Pace {
    until: Instant,
    bytes: usize,
}

impl IncomingBody {
    fn begin(request: Request, limit: usize, begun: Instant, timeout: Duration) -> Result<Self, Refusal> {
        let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        // Browsers do not send this type to another site unless that allows it, so no web page can create
        // jobs on a loopback manager.
        if !content_type.is_some_and(|value| value.trim_start().starts_with("application/json")) {
            let message = "the body must be JSON with `content-type: application/json`";
            return Err(Refusal::with_status(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                ErrorCode::BadRequest,
                message,
            ));
        }
        let declared = declared_bytes(&request);
        let (parts, body) = request.into_parts();
        let slot = CallerSlot::of(&parts).0;
        let deadline = begun + timeout;
        let incoming =
            IncomingBody { body, bytes: Vec::new(), slot, declared, limit, begun, deadline, pace: None };
        if declared.is_some_and(|bytes| bytes > limit) { Err(incoming.too_long()) } else { Ok(incoming) }
    }

    /// Appends the next bytes; false at the end of the body.
    async fn more(&mut self) -> Result<bool, Refusal> {
        let deadline = self.pace.as_ref().map_or(self.deadline, |pace| pace.until.min(self.deadline));
        let frame = poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx));
        let Ok(frame) = timeout_at(deadline, frame).await else { return self.late().map(|()| true) };
        let frame = match frame {
            None => return Ok(false),
            Some(Ok(frame)) => frame,
            Some(Err(cause)) => {
                return Err(refusal(ErrorCode::BadRequest, format!("the body broke off: {cause}")).into());
            }
        };
        let Ok(bytes) = frame.into_data() else { return Ok(true) };
        if self.bytes.len() + bytes.len() > self.limit {
            return Err(self.too_long());
        }
        self.bytes.extend_from_slice(&bytes);
        // A body that always has a byte ready never times out above, so the deadline is checked here, too.
        if Instant::now() >= deadline {
            self.late()?;
        }
        Ok(true)
    }

    /// Begins the next interval if the body keeps its pace; otherwise refuses the body.
    fn late(&mut self) -> Result<(), Refusal> {
        let now = Instant::now();
        if let Some(pace) = &mut self.pace
            && now < self.deadline
            && self.bytes.len() >= pace.bytes + PACE_BYTES
        {
            *pace = Pace { until: now + PACE, bytes: self.bytes.len() };
            return Ok(());
        }
        let seconds = now.duration_since(self.begun).as_secs_f64().ceil();
        let message = format!("the body did not arrive within {seconds} s: {} bytes came", self.bytes.len());
        Err(Refusal::with_status(StatusCode::REQUEST_TIMEOUT, ErrorCode::BadRequest, message))
    }

    fn too_long(&self) -> Refusal {
        let message = format!("the body is longer than the {} bytes this route takes", self.limit);
        Refusal::with_status(StatusCode::PAYLOAD_TOO_LARGE, ErrorCode::BadRequest, message)
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
mod tests;
