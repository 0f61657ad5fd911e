//! The router, and the connections it serves.
//!
//! A connection carries one request. So there are no idle connections, and each of the steps a connection goes through,
//! head, body, wait, answer, has its own bound: what a client does with a connection ends, and their number is bounded.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::{get, post};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{sleep, timeout};

use crate::host::guard;
use crate::metrics::count;
use crate::registry::Registry;
use crate::routes::{book, hubs, jobs, pages, unknown_method, unknown_route};

/// How long the head of a request may take.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client may take to receive its answer, the largest of which is a hub's plan.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
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
pub(crate) async fn serve(listener: TcpListener, registry: Arc<Registry>, connections_max: usize) {
    let router = router(registry.clone());
    let places = Arc::new(Semaphore::new(connections_max));
    loop {
        let place = tokio::select! {
            place = places.clone().acquire_owned() => place.expect("the semaphore is never closed"),
            () = registry.stopped() => break,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = registry.stopped() => break,
        };
        match accepted {
            Ok((stream, _)) => {
                let (router, registry) = (router.clone(), registry.clone());
                tokio::spawn(async move {
                    serve_connection(stream, router, &registry).await;
                    drop(place);
                });
            }
            Err(cause) => {
                tracing::warn!("cannot accept a connection: {cause}");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    // Everyone who waits is being told; this waits for the last answers to leave.
    let all = u32::try_from(connections_max).expect("the configuration bounds it");
    let _ = timeout(STOP_GRACE, places.acquire_many(all)).await;
}

async fn serve_connection(stream: TcpStream, router: Router, registry: &Registry) {
    // An answer is written at once; without this its last bytes could wait for an acknowledgement.
    let _ = stream.set_nodelay(true);
    let answered = Arc::new(Notify::new());
    let service = TowerToHyperService::new(router);
    let service = service_fn(|request| {
        let (answer, answered) = (service.call(request), answered.clone());
        async move {
            let answer = answer.await;
            answered.notify_one();
            answer
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // Its error is the client's: bytes that are no HTTP, a head that came too slowly, a connection that broke.
        _ = connection => {}
        () = async { answered.notified().await; sleep(ANSWER_TIMEOUT).await } => {}
        () = async { registry.stopped().await; sleep(STOP_GRACE).await } => {}
    }
}
