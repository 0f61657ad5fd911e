use super::*;
use crate::connection_slots::ConnectionSlots;
use axum::body::Bytes;
use std::convert::Infallible;
use std::task::{Context, Poll};

/// A body that begins with these bytes and never ends.
struct Promised(Option<Bytes>);

impl HttpBody for Promised {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context,
    ) -> Poll<Option<Result<hyper::body::Frame<Bytes>, Infallible>>> {
        match self.0.take() {
            Some(bytes) => Poll::Ready(Some(Ok(hyper::body::Frame::data(bytes)))),
            None => Poll::Pending,
        }
    }
}

fn claim() -> String {
    format!(r#"{{"rank":3,"incarnation":"{}","proof":"{}","#, "0a".repeat(16), "0b".repeat(32))
}

fn incoming(beginning: String, timeout: Duration) -> IncomingBody {
    let slot = Arc::new(ConnectionSlots::new(8, 8).accept([127, 0, 0, 1].into()));
    let head = Request::builder().header("content-type", "application/json").extension(slot);
    let body = Body::new(Promised(Some(beginning.into())));
    let request = head.header("content-length", "8192").body(body).unwrap();
    IncomingBody::begin(request, REQUEST_BYTES_MAX, Instant::now(), timeout).unwrap()
}

fn proved(claim: &Claim) -> Result<CallingRank, Refusal> {
    let namespace = paramhub_core::auth::Namespace([0; 16]);
    Ok(CallingRank { namespace, rank: claim.rank, incarnation: claim.incarnation })
}

async fn status(
    beginning: String,
    tables: &KeyTableBudgets,
    prove: impl Fn(&Claim) -> Result<CallingRank, Refusal>,
) -> StatusCode {
    let body = incoming(beginning, Duration::from_millis(50));
    let received = TableBody::receive(body, tables, prove);
    let received = tokio::time::timeout(Duration::from_secs(30), received).await;
    received.expect("it gives up when its time is over").err().unwrap().status
}

#[tokio::test]
async fn a_key_table_takes_of_the_budget_only_once_its_job_is_proved() {
    let none = KeyTableBudgets::new(0, 0);
    let begun = || claim() + r#""settings":{"keys":["#;
    // With a valid proof it waits for its turn, which does not come.
    assert_eq!(status(begun(), &none, proved).await, StatusCode::SERVICE_UNAVAILABLE);
    // Without a valid proof it never reaches the budget.
    let unproved = |_: &Claim| Err(crate::registry::wrong_nonce().into());
    assert_eq!(status(begun(), &none, unproved).await, StatusCode::FORBIDDEN);
    assert_eq!(status(r#"{"rank":"#.into(), &none, proved).await, StatusCode::REQUEST_TIMEOUT);
    let settings_first = r#"{"settings":{"keys":["#.to_string() + &" ".repeat(SMALL);
    assert_eq!(status(settings_first, &none, proved).await, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn the_wait_for_its_turn_counts_against_the_time_of_a_key_table() {
    let some = KeyTableBudgets::new(64, 0);
    let begun = claim() + r#""settings":{"keys":["#;
    assert_eq!(status(begun, &some, proved).await, StatusCode::REQUEST_TIMEOUT);
}

#[tokio::test]
async fn a_key_table_that_does_not_keep_its_pace_is_given_up() {
    let stretch = Duration::from_millis(20);
    let mut body = incoming(claim(), Duration::from_secs(3600));
    assert!(body.more().await.unwrap());
    // Enough bytes have come in this interval: another begins.
    body.bytes.resize(2 * PACE_BYTES, b' ');
    body.pace = Some(Pace { until: Instant::now() + stretch, bytes: PACE_BYTES });
    assert!(body.more().await.unwrap());
    let pace = body.pace.as_mut().unwrap();
    assert_eq!(pace.bytes, 2 * PACE_BYTES);
    pace.until = Instant::now() + stretch;
    assert_eq!(body.more().await.unwrap_err().status, StatusCode::REQUEST_TIMEOUT);
}

#[test]
fn a_claim_is_what_comes_before_the_settings() {
    let found = |body: &str| Claim::at_the_beginning_of(body.as_bytes());
    assert_eq!(found(&(claim() + r#""settings":{"#)).unwrap().rank, 3);
    assert_eq!(found(&(claim() + " \"settings\" : {")).unwrap().rank, 3);
    assert!(found(&claim()).is_none());
    assert!(found(r#"{"settings":{}}"#).is_none());
    assert!(found(r#"{"rank":1,"settings":{}}"#).is_none());
}
