//! The router, and the connections it serves.
//!
//! A connection carries one request, so there are no idle connections. Each step of a connection, head, body,
//! wait and answer, has its own bound, so every connection ends. How many there may be is up to their
//! [slots](crate::connection_slots): every connection is accepted at once, and unauthenticated ones are
//! evicted.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::HttpBody;
use axum::routing::{delete, get, post, put};
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use paramhub_core::service::ErrorCode;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::server::TlsStream;

use crate::connection_slots::{ConnectionSlot, ConnectionSlots};
use crate::error::{Refusal, refusal};
use crate::frontend::Frontend;
use crate::host::guard;
use crate::metered_stream::MeteredStream;
use crate::metrics::count;
use crate::registry::Registry;
use crate::routes::{
    authority, hubs, information_book, jobs, pages, teams, tokens, unknown_method, unknown_route,
};
use crate::term::fence;
use crate::tls;

/// The time that the first byte, a handshake, and the head of a request may take, each.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// The time that a client may take to receive its answer. The largest is a hub's plan.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// The same for a caller that has proved nothing.
const UNAUTHENTICATED_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The most bytes of a request's head. The longest has 64 properties of an information book.
const HEAD_BYTES_MAX: usize = 128 << 10;
/// The pause between two attempts to evict an unauthenticated connection.
const EVICTION_PAUSE: Duration = Duration::from_millis(2);
/// The number of attempts for one connection: until every connection is old enough to be evicted.
const EVICTION_ATTEMPTS: u32 = 30;
/// The least time between two log lines about connections that cannot be accepted.
const ACCEPT_WARNING_INTERVAL: Duration = Duration::from_secs(60);
/// The pause when the system has no file descriptor left for a new connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The time that answers may still take when the manager stops.
const STOP_GRACE: Duration = Duration::from_millis(300);

/// All routes of a manager that leads.
pub(crate) fn router(registry: Arc<Registry>) -> Router {
    Router::new()
        .route("/", get(pages::index))
        .route("/health", get(pages::health))
        .route("/metrics", get(pages::metrics))
        .route("/openapi.json", get(pages::openapi))
        .route("/v1/jobs", get(jobs::list).post(jobs::create))
        .route("/v1/jobs/{job}", get(jobs::show).delete(jobs::stop))
        .route("/v1/jobs/{job}/membership", get(jobs::membership))
        .route("/v1/jobs/{job}/secret", post(jobs::replace_secret))
        .route("/v1/jobs/{job}/move", get(jobs::move_status).post(jobs::move_job))
        .route("/v1/jobs/{job}/book", get(information_book::query))
        .route("/v1/jobs/{job}/best-scheme", get(information_book::best_scheme))
        .route("/v1/jobs/{job}/connect", post(jobs::connect))
        .route("/v1/jobs/{job}/init", post(jobs::init))
        .route("/v1/jobs/{job}/leave", post(jobs::leave))
        .route("/v1/hubs", get(hubs::list).post(hubs::register))
        .route("/v1/hubs/{hub}/drain", get(hubs::drain_status).post(hubs::drain))
        .route("/v1/hubs/{hub}/poll", post(hubs::poll))
        .route("/v1/hubs/{hub}/events", post(hubs::events))
        .route("/v1/state", get(pages::state))
        .route("/v1/authority", get(authority::show).post(authority::replace))
        .route("/v1/teams", get(teams::list))
        .route("/v1/teams/{team}", put(teams::set).delete(teams::remove))
        .route("/v1/tokens", get(tokens::list).post(tokens::create))
        .route("/v1/tokens/{token}", delete(tokens::revoke))
        .route("/v1/links", get(hubs::links).post(hubs::probe))
        .fallback(unknown_route)
        .method_not_allowed_fallback(unknown_method)
        .layer(axum::middleware::from_fn_with_state(registry.clone(), fence))
        .layer(axum::middleware::from_fn_with_state(registry.access.clone(), guard))
        .layer(axum::middleware::from_fn_with_state(registry.access.clone(), count))
        .with_state(registry)
}

/// Serves connections until the manager stops. Handshakes are computed on `handshakes`.
pub(crate) async fn serve(listener: TcpListener, frontend: Arc<Frontend>, handshakes: Handle) {
    let slots = frontend.access.slots.clone();
    let server = Server { frontend: frontend.clone(), refusing: refusing_router(), handshakes };
    let mut accept_warning = AcceptWarning::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = frontend.stopped() => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                let slot = Arc::new(slots.accept(peer.ip()));
                tokio::spawn(serve_connection(stream, peer.ip(), slot, server.clone()));
                evict_excess(&slots).await;
            }
            Err(cause) => {
                accept_warning.warn(&cause);
                // A hub may need the descriptor that an unauthenticated caller holds.
                sleep(if slots.evict_one() { EVICTION_PAUSE } else { ACCEPT_PAUSE }).await;
            }
        }
    }
    drop(listener);
    // Every call that waits is being answered. This waits for the last answers to leave.
    let last_answers = async {
        while !slots.are_empty() {
            sleep(EVICTION_PAUSE).await;
        }
    };
    let _ = timeout(STOP_GRACE, last_answers).await;
}

/// Evicts unauthenticated connections beyond the limit. Those that are too young, or that the manager has not
/// begun to serve, get a moment first, in which no connection is accepted: callers who come faster than they
/// are served wait in the system's queue. Those that are being answered stay, so there may be more than slots
/// for a while.
async fn evict_excess(slots: &ConnectionSlots) {
    for _ in 0..EVICTION_ATTEMPTS {
        if slots.evict_excess() {
            return;
        }
        sleep(EVICTION_PAUSE).await;
    }
}

/// What every connection needs.
#[derive(Clone)]
struct Server {
    frontend: Arc<Frontend>,
    /// The routes for callers who must use TLS and do not.
    refusing: Router,
    handshakes: Handle,
}

/// Refuses every request because it came in clear.
fn refusing_router() -> Router {
    async fn refuse() -> Refusal {
        let message = "this connection manager is called over TLS from other machines: give its URL as https://HOST:PORT \
                       (curl needs --cacert with what `paramhub ca` prints). Or start the manager with --plain-http, if \
                       nobody on the network may listen who must not learn every job's secret";
        refusal(ErrorCode::BadRequest, message).into()
    }
    Router::new().fallback(refuse)
}

/// Serves one connection. A caller that sends nothing takes no more memory than this.
async fn serve_connection(stream: TcpStream, peer: IpAddr, slot: Arc<ConnectionSlot>, server: Server) {
    slot.begin_service();
    let speaks_http = !server.frontend.access.needs_tls || peer.to_canonical().is_loopback();
    let mut first = [0];
    tokio::select! {
        peeked = timeout(HEAD_TIMEOUT, stream.peek(&mut first)) => {
            if !matches!(peeked, Ok(Ok(1))) {
                return;
            }
        }
        // Nobody knows yet whether the caller would read an answer in clear or inside TLS.
        () = slot.evicted() => return,
        () = server.frontend.stopped() => return,
    }
    // An answer is written at once. Without this its last bytes could wait for an acknowledgement.
    let _ = stream.set_nodelay(true);
    // What follows is boxed, so that it takes no memory before bytes arrive.
    if first[0] == tls::HANDSHAKE {
        return Box::pin(serve_encrypted(stream, &slot, &server.frontend, server.handshakes)).await;
    }
    let router = if speaks_http { server.frontend.answering() } else { server.refusing };
    let stream = MeteredStream::new(stream, slot.clone());
    let evicted = |stream: MeteredStream| send_evicted(&stream.into_stream());
    Box::pin(serve_request(stream, &slot, router, &server.frontend, evicted)).await;
}

/// Makes the handshake, and serves the request that follows. An evicted caller only loses its connection.
async fn serve_encrypted(
    stream: TcpStream,
    slot: &Arc<ConnectionSlot>,
    frontend: &Frontend,
    handshakes: Handle,
) {
    let stream = MeteredStream::new(stream, slot.clone());
    let accepting = {
        let access = frontend.access.clone();
        async move { tls::accept(stream, &access.identity, &access.tokens()).await }
    };
    let mut handshake = Handshake(handshakes.spawn(accepting));
    let accepted = tokio::select! {
        accepted = timeout(HEAD_TIMEOUT, &mut handshake.0) => accepted,
        () = slot.evicted() => return,
        () = frontend.stopped() => return,
    };
    // Errors here are the client's: bytes that are no handshake, or came too slowly, or a certificate that it does
    // not take.
    if let Ok(Ok(Ok(stream))) = accepted {
        serve_request(stream, slot, frontend.answering(), frontend, drop).await;
    }
}

/// A handshake that ends when nobody waits for it any more.
struct Handshake(JoinHandle<std::io::Result<TlsStream<MeteredStream>>>);

impl Drop for Handshake {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Serves one request over `stream`. An evicted caller that has got no answer yet is told so by `evicted`.
async fn serve_request<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    slot: &Arc<ConnectionSlot>,
    router: Router,
    frontend: &Frontend,
    evicted: impl FnOnce(S),
) {
    let answered = Arc::new(Notify::new());
    let service = TowerToHyperService::new(router);
    let service = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(slot.clone());
        let (answer, answered, slot) = (service.call(request), answered.clone(), slot.clone());
        async move {
            let answer = answer.await;
            if let Ok(answer) = &answer {
                slot.begin_answer(usize::try_from(answer.body().size_hint().lower()).unwrap_or(0));
            }
            answered.notify_one();
            answer
        }
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    let answer_read = async {
        answered.notified().await;
        sleep(if slot.is_proven() { ANSWER_TIMEOUT } else { UNAUTHENTICATED_ANSWER_TIMEOUT }).await;
    };
    tokio::select! {
        // Errors here are the client's: bytes that are no HTTP, a head that came too slowly, a connection
        // that broke.
        _ = &mut connection => {}
        () = slot.evicted() => {
            if !slot.is_answering() {
                evicted(connection.into_parts().io.into_inner());
            }
        }
        () = answer_read => {}
        () = async { frontend.stopped().await; sleep(STOP_GRACE).await } => {}
    }
}

/// Answers an evicted caller that the call had no effect, as far as the system takes the bytes at once.
fn send_evicted(stream: &TcpStream) {
    let body = r#"{"code":"internal","message":"this call had to make room for others at the connection manager: try again"}"#;
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: \
         close\r\n\r\n{body}",
        body.len()
    );
    // If this fails, an unauthenticated caller loses nothing but the message.
    let _ = stream.try_write(answer.as_bytes());
}

/// Logs now and then that connections cannot be accepted.
#[derive(Default)]
struct AcceptWarning {
    last_warning: Option<Instant>,
}

impl AcceptWarning {
    fn warn(&mut self, cause: &std::io::Error) {
        if self.last_warning.is_none_or(|at| at.elapsed() >= ACCEPT_WARNING_INTERVAL) {
            self.last_warning = Some(Instant::now());
            tracing::warn!("cannot accept a connection: {cause}; callers who have proved nothing make room");
        }
    }
}
