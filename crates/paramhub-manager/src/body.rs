//! Request bodies: bounded in bytes and time before anything looks at them. Of a caller who has proved nothing a body is read
//! among what all such callers may send; a key table's budget is for ranks that have proved their job's nonce.

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
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use crate::auth::Caller;
use crate::error::{Refusal, refusal};
use crate::places::{Guest, busy};
use crate::registry::{Registry, blocking};
use crate::routes::{Segment, namespace};
use crate::world::Rank;

/// Bytes of most bodies.
pub(crate) const SMALL: usize = 64 << 10;
/// Bytes of a hub's shape: 64 interfaces that each list 1,024 cores fit.
pub(crate) const SHAPE: usize = 1 << 20;
/// Bytes of a hub's report.
pub(crate) const REPORT: usize = 4 << 20;
/// How long a small body may take.
const SMALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a key table may take, with the wait for its turn; half a gigabyte at 10 MB/s.
const TABLE_TIMEOUT: Duration = Duration::from_secs(60);
/// In each of these times of its own a key table must get on by [`PACE_BYTES`].
const PACE: Duration = Duration::from_secs(5);
const PACE_BYTES: usize = 256 << 10;
/// Bytes within which InitService says who calls, so that a key table is read of ranks alone.
const CLAIM_BYTES: usize = 4 << 10;
/// Up to here a key table is small, and waits for no large one.
const SMALL_TABLE: usize = 4 << 20;
/// KiB of small key tables that are read and compared at a time.
const SMALL_TABLES_KIB: usize = 128 << 10;
/// KiB of all others, two of the largest; further ones wait.
const LARGE_TABLES_KIB: usize = 2 * REQUEST_BYTES_MAX / 1024;
/// Bodies above this are parsed beside the executor's threads.
const PARSED_AT_ONCE: usize = 64 << 10;

/// A JSON body of at most `LIMIT` bytes.
pub(crate) struct JsonBody<T, const LIMIT: usize>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned + Send + 'static, const LIMIT: usize> FromRequest<S>
    for JsonBody<T, LIMIT>
{
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refusal> {
        let mut body = Arriving::begin(request, LIMIT, Instant::now(), SMALL_TIMEOUT)?;
        while body.more().await? {}
        let Arriving { bytes, guest, .. } = body;
        guest.complete();
        let parsed =
            if bytes.len() > PARSED_AT_ONCE { blocking(move || parse(&bytes)).await? } else { parse(&bytes) };
        Ok(JsonBody(parsed?))
    }
}

/// The budgets of key tables that are in hand.
pub(crate) struct Tables {
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
}

impl Default for Tables {
    fn default() -> Self {
        Tables::new(SMALL_TABLES_KIB, LARGE_TABLES_KIB)
    }
}

impl Tables {
    fn new(small_kib: usize, large_kib: usize) -> Self {
        Tables { small: Arc::new(Semaphore::new(small_kib)), large: Arc::new(Semaphore::new(large_kib)) }
    }

    /// Waits for a place for a table of so many bytes.
    async fn admit(&self, declared: usize, deadline: Instant) -> Result<OwnedSemaphorePermit, Refusal> {
        let (budget, most) = match declared <= SMALL_TABLE {
            true => (&self.small, SMALL_TABLES_KIB),
            false => (&self.large, LARGE_TABLES_KIB),
        };
        // What is too long is refused elsewhere; here it only must not ask for more than there is.
        let share = (declared / 1024 + 1).min(most) as u32;
        match timeout_at(deadline, budget.clone().acquire_many_owned(share)).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => {
                Err(busy("too many key tables are on their way to the connection manager: try again".into()))
            }
        }
    }
}

/// An InitService body of a caller who has proved the job's nonce, not yet parsed, with its place in the budget of such bodies.
pub(crate) struct TableBody {
    pub(crate) caller: Rank,
    bytes: Vec<u8>,
    _permit: OwnedSemaphorePermit,
}

impl TableBody {
    /// Reads who calls, checks that, waits for a place in the budget and then for the rest, for all together no longer than
    /// `patience` after `begun`.
    async fn receive(
        mut body: Arriving,
        tables: &Tables,
        prove: impl Fn(&Claim) -> Result<Rank, Refusal>,
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
        body.guest.complete();
        Ok(TableBody { caller, bytes: body.bytes, _permit: permit })
    }

    /// Parses the body and frees its bytes; what was parsed still counts against the budget.
    pub(crate) fn parse<T: DeserializeOwned>(&mut self) -> Result<T, ServiceError> {
        parse(&std::mem::take(&mut self.bytes))
    }
}

impl FromRequest<Arc<Registry>> for TableBody {
    type Rejection = Refusal;

    async fn from_request(request: Request, registry: &Arc<Registry>) -> Result<Self, Refusal> {
        let (mut parts, body) = request.into_parts();
        let Segment(text) = Segment::<String>::from_request_parts(&mut parts, registry).await?;
        let namespace = namespace(&text)?;
        let guest = Caller::of(&parts).0;
        let request = Request::from_parts(parts, body);
        let body = Arriving::begin(request, REQUEST_BYTES_MAX, Instant::now(), TABLE_TIMEOUT)?;
        let prove = |claim: &Claim| {
            let caller = Rank { namespace, rank: claim.rank, incarnation: claim.incarnation };
            registry.check_proof(caller, Purpose::Init, &claim.proof)?;
            registry.seat(&guest, namespace)?;
            Ok(caller)
        };
        TableBody::receive(body, &registry.tables, prove).await
    }
}

/// What InitService says before the settings.
#[derive(Deserialize)]
struct Claim {
    rank: u32,
    incarnation: Incarnation,
    proof: Proof,
}

impl Claim {
    /// Who calls, if the body begins with that: all that comes before the settings is made an object of its own.
    fn at_the_beginning_of(body: &[u8]) -> Option<Claim> {
        let settings = b"\"settings\"";
        let before = body.windows(settings.len()).take(CLAIM_BYTES).position(|window| window == settings)?;
        let before = body[..before].trim_ascii_end().strip_suffix(b",")?;
        serde_json::from_slice(&[before, b"}"].concat()).ok()
    }
}

/// A body, as far as it has come.
struct Arriving {
    body: Body,
    bytes: Vec<u8>,
    guest: Arc<Guest>,
    declared: Option<usize>,
    limit: usize,
    begun: Instant,
    deadline: Instant,
    pace: Option<Pace>,
}

/// By when a body must have more bytes than it had.
struct Pace {
    until: Instant,
    bytes: usize,
}

impl Arriving {
    fn begin(request: Request, limit: usize, begun: Instant, patience: Duration) -> Result<Self, Refusal> {
        let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        // Browsers cannot send this type to another site unasked, so no web page can create jobs on a loopback manager.
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
        let guest = Caller::of(&parts).0;
        let deadline = begun + patience;
        let arriving =
            Arriving { body, bytes: Vec::new(), guest, declared, limit, begun, deadline, pace: None };
        if declared.is_some_and(|bytes| bytes > limit) { Err(arriving.too_long()) } else { Ok(arriving) }
    }

    /// Takes the next bytes; false where there are no more.
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
        // A body that always has a byte to read would never be late.
        if Instant::now() >= deadline {
            self.late()?;
        }
        Ok(true)
    }

    /// Begins the next stretch of a body that keeps its pace; refuses every other.
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
