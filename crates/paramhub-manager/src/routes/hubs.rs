//! Routes of hubs: joining, waiting for commands, reporting events.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use paramhub_core::service::{
    Commands, DrainHub, DrainStatus, HubRegistered, HubReport, HubStatus, LinkStatus, PollCommands,
    ProbeLinks, RegisterHub, ServiceError,
};
use tokio::time::{Instant, timeout_at};

use crate::auth::{Admin, FromHub, HubOwner, JobReader, Reader};
use crate::body::{JsonBody, REPORT, SHAPE, SMALL};
use crate::clock::now;
use crate::error::Refusal;
use crate::hub_queues::{WaitingCommands, commands_json};
use crate::log::audit;
use crate::registry::Registry;
use crate::routes::PathSegment;

/// The longest wait of one poll.
const POLL_MAX: Duration = Duration::from_secs(10);

/// A hub joins. One that registers an address of another hub replaces that hub, which counts as lost.
///
/// A hub that the manager has not heard for as long as `--hub-dead-after` says gets no new jobs; polls and reports count
/// as signs of life. Jobs that open there fail, and those that run go on. When it calls again it goes on under its number
/// and token. It is lost, and its jobs fail, after an hour of silence, or if it had said that it shuts down. A job that
/// runs at a silent hub ends earlier if something shows that the hub is gone: its launcher says that the workers have
/// ended, another of its hubs reports the end, or a rank has lost the hub, too (LeaveService).
///
/// The number and token of a lost hub are no longer valid (`not_found` or
/// `unauthorized`), nor are those from before a restart of a manager that keeps no state. The hub then registers
/// again. In its next report it names the jobs that it still serves, with the ends that it has not reported, and the
/// manager commands it to end those that it does not know as running. A manager that restarts with its state knows the
/// hub, and commands it to report its jobs.
#[utoipa::path(
    post, path = "/v1/hubs", tag = "hubs", operation_id = "register_hub",
    request_body = RegisterHub,
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The hub's number and its token for later calls.", body = HubRegistered),
        (status = 400, description = "The shape cannot serve.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 408, description = "The body did not arrive in time.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
        (status = 500, description = "The operating system gives no random numbers.", body = ServiceError),
        (status = 507, description = "Too many hubs have joined.", body = ServiceError),
    )
)]
pub(crate) async fn register(
    HubOwner(by): HubOwner,
    State(registry): State<Arc<Registry>>,
    JsonBody(request): JsonBody<RegisterHub, SHAPE>,
) -> Result<Json<HubRegistered>, Refusal> {
    let registered = registry.register_hub(request).await?;
    audit(&by, format_args!("let hub {} join", registered.hub));
    Ok(Json(registered))
}

/// Every hub that has joined and is not lost.
#[utoipa::path(
    get, path = "/v1/hubs", tag = "hubs", operation_id = "list_hubs",
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "In order of arrival.", body = Vec<HubStatus>),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
    )
)]
pub(crate) async fn list(_: JobReader, State(registry): State<Arc<Registry>>) -> Json<Vec<HubStatus>> {
    Json(registry.with(|state| state.membership.hub_statuses(now())))
}

/// Drains a hub, or ends that. A hub that is drained gets no new jobs. A job with standbys leaves it once other hubs have all
/// chunks that it has there, without a lost step; the others stay until they end. A manager that restarts with its state goes on
/// with it, and it ends when the hub joins again under another number.
#[utoipa::path(
    post, path = "/v1/hubs/{hub}/drain", tag = "hubs", operation_id = "drain_hub",
    params(("hub" = u32, Path, description = "The hub's number.")),
    request_body = DrainHub,
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The jobs that have yet to leave it.", body = DrainStatus),
        (status = 400, description = "The body is malformed.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 404, description = "There is no such hub.", body = ServiceError),
        (status = 408, description = "The body did not arrive in time.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
    )
)]
pub(crate) async fn drain(
    Admin(by): Admin,
    State(registry): State<Arc<Registry>>,
    PathSegment(hub): PathSegment<u32>,
    JsonBody(DrainHub { drained }): JsonBody<DrainHub, SMALL>,
) -> Result<Json<DrainStatus>, Refusal> {
    let status = registry.with(|state| state.membership.drain_hub(hub, drained, now()))?;
    audit(&by, format_args!("{} hub {hub}", if drained { "drained" } else { "no longer drains" }));
    Ok(Json(status))
}

/// Returns the jobs that have a part at a hub, and what those wait for that are to leave it.
#[utoipa::path(
    get, path = "/v1/hubs/{hub}/drain", tag = "hubs", operation_id = "drain_status",
    params(("hub" = u32, Path, description = "The hub's number.")),
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "Oldest first.", body = DrainStatus),
        (status = 400, description = "That is not a number.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 404, description = "There is no such hub.", body = ServiceError),
    )
)]
pub(crate) async fn drain_status(
    _: Reader,
    State(registry): State<Arc<Registry>>,
    PathSegment(hub): PathSegment<u32>,
) -> Result<Json<DrainStatus>, Refusal> {
    Ok(Json(registry.with(|state| state.membership.drain_status(hub))?))
}

/// Returns the measurements by hubs of the network between racks.
#[utoipa::path(
    get, path = "/v1/links", tag = "hubs", operation_id = "list_links",
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "By the racks' names, each direction by itself.", body = Vec<LinkStatus>),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
    )
)]
pub(crate) async fn links(_: Reader, State(registry): State<Arc<Registry>>) -> Json<Vec<LinkStatus>> {
    Json(registry.with(|state| state.membership.link_statuses(now())))
}

/// Lets the hubs of all racks probe the network between them. Answered when they have, within 2 s for each
/// other rack, 14 s at most.
#[utoipa::path(
    post, path = "/v1/links", tag = "hubs", operation_id = "probe_links",
    request_body = ProbeLinks,
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "As GET; what failed says why.", body = Vec<LinkStatus>),
        (status = 400, description = "The body is malformed, or there are not hubs of two racks.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 408, description = "The body did not arrive in time.", body = ServiceError),
        (status = 409, description = "A job runs at hubs that would probe.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
        (status = 500, description = "The manager is shutting down.", body = ServiceError),
    )
)]
pub(crate) async fn probe(
    Admin(by): Admin,
    State(registry): State<Arc<Registry>>,
    JsonBody(ProbeLinks {}): JsonBody<ProbeLinks, SMALL>,
) -> Result<Json<Vec<LinkStatus>>, Refusal> {
    audit(&by, format_args!("let hubs probe the links between racks"));
    Ok(Json(registry.probe_links().await?))
}

/// Waits for commands. Answered at once while some are not acknowledged, else when one comes or `wait_s` is
/// over.
#[utoipa::path(
    post, path = "/v1/hubs/{hub}/poll", tag = "hubs", operation_id = "poll_commands",
    params(("hub" = u32, Path, description = "The hub's number.")),
    request_body = PollCommands,
    security(("hub_token" = [])),
    responses(
        (status = 200, description = "Commands not acknowledged, oldest first; none when the wait ran out.", body = Commands),
        (status = 400, description = "The body is malformed or acknowledges what was never sent.", body = ServiceError),
        (status = 401, description = "The hub's token is missing or wrong.", body = ServiceError),
        (status = 404, description = "The hub is not, or no longer, registered: register again.", body = ServiceError),
        (status = 408, description = "The body did not arrive in time.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
        (status = 500, description = "The manager is shutting down.", body = ServiceError),
    )
)]
pub(crate) async fn poll(
    FromHub { hub, token }: FromHub,
    State(registry): State<Arc<Registry>>,
    JsonBody(request): JsonBody<PollCommands, SMALL>,
) -> Result<Response, Refusal> {
    // Several polls must fit into the time after which a silent hub counts as lost.
    let longest = POLL_MAX.min(registry.hub_timeout / 3);
    let wait = Duration::try_from_secs_f64(request.wait_s).unwrap_or(longest).min(longest);
    let deadline = Instant::now() + wait;
    let look = |acknowledged| {
        registry.with(|state| {
            state.membership.admit_hub(hub, Some(token.as_str()), now())?;
            state.queues.poll(hub, acknowledged).expect("commands are kept for every hub that has joined")
        })
    };
    let WaitingCommands { mut commands, mut more } = look(request.acknowledged)?;
    if commands.is_empty() {
        let waiting = WaitingPoll { registry: &registry, hub };
        tokio::select! {
            biased;
            _ = registry.ended() => return Err(registry.end_refusal().into()),
            changed = timeout_at(deadline, more.changed()) => match changed {
                Err(_) => {}
                // A command has come or the hub was removed; the second look finds out which.
                Ok(_) => commands = look(request.acknowledged)?.commands,
            }
        }
        waiting.end();
    }
    Ok(([(header::CONTENT_TYPE, "application/json")], commands_json(&commands)).into_response())
}

/// A poll that waits for commands. If it is dropped before it [ends](Self::end), its hub has hung up.
struct WaitingPoll<'a> {
    registry: &'a Registry,
    hub: u32,
}

impl WaitingPoll<'_> {
    fn end(self) {
        std::mem::forget(self);
    }
}

impl Drop for WaitingPoll<'_> {
    fn drop(&mut self) {
        self.registry.with(|state| state.membership.hub_hung_up(self.hub, now()));
    }
}

/// Takes a hub's report: events of its jobs, and counters. Every field may be left out.
#[utoipa::path(
    post, path = "/v1/hubs/{hub}/events", tag = "hubs", operation_id = "report",
    params(("hub" = u32, Path, description = "The hub's number.")),
    request_body = HubReport,
    security(("hub_token" = [])),
    responses(
        (status = 204, description = "Taken. Reporting the same event twice does no harm."),
        (status = 400, description = "The body is malformed.", body = ServiceError),
        (status = 401, description = "The hub's token is missing or wrong.", body = ServiceError),
        (status = 404, description = "The hub is not, or no longer, registered: register again.", body = ServiceError),
        (status = 408, description = "The body did not arrive in time.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
    )
)]
pub(crate) async fn events(
    FromHub { hub, token }: FromHub,
    State(registry): State<Arc<Registry>>,
    JsonBody(report): JsonBody<HubReport, REPORT>,
) -> Result<StatusCode, Refusal> {
    registry.with(|state| state.membership.report(hub, Some(token.as_str()), report, now()))?;
    Ok(StatusCode::NO_CONTENT)
}
