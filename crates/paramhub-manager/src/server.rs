//! The router, and the connections it serves.
//!
//! A connection carries one request. So there are no idle connections, and each of the steps a connection goes through,
//! head, body, wait, answer, has its own bound: what a client does with a connection ends. How many there may be is a matter
//! of their [places](crate::places): every connection is accepted at once, and it is strangers who make room.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::HttpBody;
use axum::routing::{get, post};
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use crate::host::guard;
use crate::line::Line;
use crate::metrics::count;
use crate::places::{Guest, Places};
use crate::registry::Registry;
use crate::routes::{book, hubs, jobs, pages, unknown_method, unknown_route};

/// How long the head of a request may take.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client may take to receive its answer, the largest of which is a hub's plan.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// As long for one who has proved nothing.
const STRANGER_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a request's head: the longest has 64 properties of an information book.
const HEAD_BYTES_MAX: usize = 128 << 10;
/// Between two attempts to have a stranger make room.
const ROOM_PAUSE: Duration = Duration::from_millis(2);
/// How often that is tried for one connection: until nobody is young any more.
const ROOM_ATTEMPTS: u32 = 30;
/// Between two lines that say that no connection can be accepted.
const COMPLAINT_PAUSE: Duration = Duration::from_secs(60);
/// Pause when the system has no file descriptor left for a new connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long answers may still take when the manager stops.
const STOP_GRACE: Duration = Duration::from_millis(300);

/// All routes.
pub(crate) fn router(registry: Arc<Registry>) -> Router {
    Router::new()
        .route("/", get(pages::index))
        .route("/health", get(pages::health))
        .route("/metrics", get(pages::metrics))
        .route("/openapi.json", get(pages::openapi))
        .route("/v1/jobs", get(jobs::list).post(jobs::create))
        .route("/v1/jobs/{job}", get(jobs::show).delete(jobs::stop))
        .route("/v1/jobs/{job}/membership", get(jobs::membership))
        .route("/v1/jobs/{job}/book", get(book::query))
        .route("/v1/jobs/{job}/best-scheme", get(book::best_scheme))
        .route("/v1/jobs/{job}/connect", post(jobs::connect))
        .route("/v1/jobs/{job}/init", post(jobs::init))
        .route("/v1/jobs/{job}/leave", post(jobs::leave))
        .route("/v1/hubs", get(hubs::list).post(hubs::register))
        .route("/v1/hubs/{hub}/poll", post(hubs::poll))
        .route("/v1/hubs/{hub}/events", post(hubs::events))
        .route("/v1/links", get(hubs::links).post(hubs::probe))
        .fallback(unknown_route)
        .method_not_allowed_fallback(unknown_method)
        .layer(axum::middleware::from_fn_with_state(registry.clone(), guard))
        .layer(axum::middleware::from_fn_with_state(registry.clone(), count))
        .with_state(registry)
}

/// Serves connections until the manager stops.
pub(crate) async fn serve(listener: TcpListener, registry: Arc<Registry>) {
    let router = router(registry.clone());
    let mut complaint = Complaint::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = registry.stopped() => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                let guest = Arc::new(registry.places.enter(peer.ip()));
                tokio::spawn(serve_connection(stream, guest, router.clone(), registry.clone()));
                make_room(&registry.places).await;
            }
            Err(cause) => {
                complaint.utter(&cause);
                // A descriptor that no stranger holds may be needed by a hub.
                sleep(if registry.places.free_one() { ROOM_PAUSE } else { ACCEPT_PAUSE }).await;
            }
        }
    }
    drop(listener);
    // Everyone who waits is being told; this waits for the last answers to leave.
    let last_answers = async {
        while !registry.places.are_empty() {
            sleep(ROOM_PAUSE).await;
        }
    };
    let _ = timeout(STOP_GRACE, last_answers).await;
}

/// Has strangers make room. Those who have only just come get a moment first, in which nobody else is accepted; those who are
/// being answered get theirs, so that there may be more for a while than there are places.
async fn make_room(places: &Places) {
    for _ in 0..ROOM_ATTEMPTS {
        if places.make_room() {
            return;
        }
        sleep(ROOM_PAUSE).await;
    }
}

/// Serves one connection. Of a caller who sends nothing there is no more than this.
async fn serve_connection(stream: TcpStream, guest: Arc<Guest>, router: Router, registry: Arc<Registry>) {
    tokio::select! {
        readable = timeout(HEAD_TIMEOUT, stream.readable()) => {
            if matches!(readable, Ok(Ok(()))) {
                // Apart, so that it takes no memory before.
                Box::pin(serve_request(stream, &guest, router, &registry)).await;
            }
        }
        () = guest.must_go() => turn_away(&stream),
        () = registry.stopped() => {}
    }
}

async fn serve_request(stream: TcpStream, guest: &Arc<Guest>, router: Router, registry: &Registry) {
    // An answer is written at once; without this its last bytes could wait for an acknowledgement.
    let _ = stream.set_nodelay(true);
    let answered = Arc::new(Notify::new());
    let service = TowerToHyperService::new(router);
    let service = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(guest.clone());
        let (answer, answered, guest) = (service.call(request), answered.clone(), guest.clone());
        async move {
            let answer = answer.await;
            if let Ok(answer) = &answer {
                guest.answer(usize::try_from(answer.body().size_hint().lower()).unwrap_or(0));
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
        .serve_connection(TokioIo::new(Line::new(stream, guest.clone())), service);
    let answer_read = async {
        answered.notified().await;
        sleep(if guest.is_proven() { ANSWER_TIMEOUT } else { STRANGER_ANSWER_TIMEOUT }).await;
    };
    tokio::select! {
        // Its error is the client's: bytes that are no HTTP, a head that came too slowly, a connection that broke.
        _ = &mut connection => {}
        () = guest.must_go() => {
            if !guest.is_answering() {
                turn_away(&connection.into_parts().io.into_inner().into_stream());
            }
        }
        () = answer_read => {}
        () = async { registry.stopped().await; sleep(STOP_GRACE).await } => {}
    }
}

/// Tells a caller who has to make room that nothing was done, as far as the system takes it at once.
fn turn_away(stream: &TcpStream) {
    let body = r#"{"code":"internal","message":"this call had to make room for others at the connection manager: try again"}"#;
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: \
         close\r\n\r\n{body}",
        body.len()
    );
    // A stranger who has gone, or takes nothing, is none the worse.
    let _ = stream.try_write(answer.as_bytes());
}

/// Warns that connections cannot be accepted, now and then.
#[derive(Default)]
struct Complaint {
    uttered: Option<Instant>,
}

impl Complaint {
    fn utter(&mut self, cause: &std::io::Error) {
        if self.uttered.is_none_or(|at| at.elapsed() >= COMPLAINT_PAUSE) {
            self.uttered = Some(Instant::now());
            tracing::warn!("cannot accept a connection: {cause}; callers who have proved nothing make room");
        }
    }
}
