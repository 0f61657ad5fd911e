//! Routes of jobs: CreateService, ConnectService, InitService, and what operators ask.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use paramhub_core::auth::Purpose;
use paramhub_core::service::{
    ConnectService, CreateService, InitService, JobStatus, LeaveService, ServiceConnected, ServiceCreated,
    ServiceError, ServiceInitialised, StopService, StopWhen,
};

use super::{Asked, Segment, namespace};
use crate::auth::{Admin, Caller};
use crate::body::{JsonBody, SMALL, TableBody};
use crate::clock::Now;
use crate::error::Refusal;
use crate::registry::Registry;
use crate::rendezvous;
use crate::world::Rank;

type Answer<T> = Result<Json<T>, Refusal>;

/// CreateService: a new job, its namespace and its secret.
#[utoipa::path(
    post, path = "/v1/jobs", tag = "jobs", operation_id = "create_service",
    request_body = CreateService,
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The job exists.", body = ServiceCreated),
        (status = 400, description = "The name, the number of workers or an option is out of bounds.", body = ServiceError),
        (status = 401, description = "The admin token is missing or wrong.", body = ServiceError),
        (status = 408, description = "The body did not arrive in time.", body = ServiceError),
        (status = 409, description = "The name belongs to a living job.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
        (status = 500, description = "The job could not be saved; it does not exist.", body = ServiceError),
        (status = 507, description = "Too many jobs live.", body = ServiceError),
    )
)]
pub(crate) async fn create(
    _: Admin,
    State(registry): State<Arc<Registry>>,
    JsonBody(request): JsonBody<CreateService, SMALL>,
) -> Answer<ServiceCreated> {
    Ok(Json(registry.create(request).await?))
}

/// ConnectService: joins a rank; answered when every rank has joined and there is a hub.
#[utoipa::path(
    post, path = "/v1/jobs/{namespace}/connect", tag = "jobs", operation_id = "connect_service",
    params(("namespace" = String, Path, description = "The job's namespace, 32 hexadecimal digits.")),
    request_body = ConnectService,
    responses(
        (status = 200, description = "Every rank has joined.", body = ServiceConnected),
        (status = 400, description = "The body is malformed or the rank out of bounds.", body = ServiceError),
        (status = 403, description = "No job of this namespace has the nonce that the proof was made with.", body = ServiceError),
        (status = 408, description = "Ranks, which are named, or a hub did not come in time.", body = ServiceError),
        (status = 409, description = "The rank belongs to another process.", body = ServiceError),
        (status = 410, description = "The job has ended.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
        (status = 500, description = "The manager is shutting down.", body = ServiceError),
    )
)]
pub(crate) async fn connect(
    State(registry): State<Arc<Registry>>,
    Caller(guest): Caller,
    Segment(text): Segment<String>,
    JsonBody(call): JsonBody<ConnectService, SMALL>,
) -> Answer<ServiceConnected> {
    let namespace = namespace(&text)?;
    let rank = Rank { namespace, rank: call.rank, incarnation: call.incarnation };
    registry.check_proof(rank, Purpose::Connect, &call.proof)?;
    registry.seat(&guest, namespace)?;
    Ok(Json(rendezvous::connect(&registry, rank, call).await?))
}

/// InitService: hands in a rank's settings; answered when all agree and the hubs have allocated.
#[utoipa::path(
    post, path = "/v1/jobs/{namespace}/init", tag = "jobs", operation_id = "init_service",
    params(("namespace" = String, Path, description = "The job's namespace, 32 hexadecimal digits.")),
    request_body = InitService,
    responses(
        (status = 200, description = "The buffers stand; workers may open their streams.", body = ServiceInitialised),
        (status = 400, description = "The settings are malformed or unusable, or the rank has not connected.", body = ServiceError),
        (status = 403, description = "No job of this namespace has the nonce that the proof was made with.", body = ServiceError),
        (status = 408, description = "Ranks, which are named, or hubs did not come in time, or the body did not.", body = ServiceError),
        (status = 409, description = "The ranks disagree, or the rank belongs to another process.", body = ServiceError),
        (status = 410, description = "The job has ended.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
        (status = 500, description = "The manager is shutting down, or a hub placed the job otherwise.", body = ServiceError),
        (status = 503, description = "Too many key tables are on their way; try again.", body = ServiceError),
        (status = 507, description = "A hub cannot hold the job.", body = ServiceError),
    )
)]
pub(crate) async fn init(
    State(registry): State<Arc<Registry>>,
    body: TableBody,
) -> Answer<ServiceInitialised> {
    Ok(Json(rendezvous::init(&registry, body).await?))
}

/// LeaveService: a worker that reached no hub gives up its rank.
#[utoipa::path(
    post, path = "/v1/jobs/{namespace}/leave", tag = "jobs", operation_id = "leave_service",
    params(("namespace" = String, Path, description = "The job's namespace, 32 hexadecimal digits.")),
    request_body = LeaveService,
    responses(
        (status = 204, description = "The rank is free, or the job over."),
        (status = 400, description = "The body is malformed, or the rank has not connected.", body = ServiceError),
        (status = 403, description = "No job of this namespace has the nonce that the proof was made with.", body = ServiceError),
        (status = 408, description = "The body did not arrive in time.", body = ServiceError),
        (status = 409, description = "The rank belongs to another process.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
    )
)]
pub(crate) async fn leave(
    State(registry): State<Arc<Registry>>,
    Caller(guest): Caller,
    Segment(text): Segment<String>,
    JsonBody(call): JsonBody<LeaveService, SMALL>,
) -> Result<StatusCode, Refusal> {
    let namespace = namespace(&text)?;
    let rank = Rank { namespace, rank: call.rank, incarnation: call.incarnation };
    registry.check_proof(rank, Purpose::Leave, &call.proof)?;
    registry.seat(&guest, namespace)?;
    registry.with(|world| world.leave(namespace, &call, Now::read()))?;
    Ok(StatusCode::NO_CONTENT)
}

/// Every job the manager remembers, oldest first.
#[utoipa::path(
    get, path = "/v1/jobs", tag = "jobs", operation_id = "list_jobs",
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "Oldest first.", body = Vec<JobStatus>),
        (status = 401, description = "The admin token is missing or wrong.", body = ServiceError),
    )
)]
pub(crate) async fn list(_: Admin, State(registry): State<Arc<Registry>>) -> Json<Vec<JobStatus>> {
    Json(registry.with(|world| world.statuses()))
}

/// One job, by name or namespace; of several with one name the living one, else the newest.
#[utoipa::path(
    get, path = "/v1/jobs/{job}", tag = "jobs", operation_id = "show_job",
    params(("job" = String, Path, description = "The job's name, with `/` written as `%2F`, or its namespace.")),
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The job.", body = JobStatus),
        (status = 400, description = "The path is malformed.", body = ServiceError),
        (status = 401, description = "The admin token is missing or wrong.", body = ServiceError),
        (status = 404, description = "There is no such job.", body = ServiceError),
    )
)]
pub(crate) async fn show(
    _: Admin,
    State(registry): State<Arc<Registry>>,
    Segment(job): Segment<String>,
) -> Answer<JobStatus> {
    Ok(Json(registry.with(|world| world.find(&job).map(crate::job::Job::status))?))
}

/// What a launcher on a further host needs for its workers, as CreateService answered it; until every rank has joined.
#[utoipa::path(
    get, path = "/v1/jobs/{job}/membership", tag = "jobs", operation_id = "job_membership",
    params(("job" = String, Path, description = "The job's name, with `/` written as `%2F`.")),
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "Namespace and nonce.", body = ServiceCreated),
        (status = 400, description = "The path is malformed.", body = ServiceError),
        (status = 401, description = "The admin token is missing or wrong.", body = ServiceError),
        (status = 404, description = "No living job has this name.", body = ServiceError),
        (status = 409, description = "Every rank of it has joined.", body = ServiceError),
    )
)]
pub(crate) async fn membership(
    _: Admin,
    State(registry): State<Arc<Registry>>,
    Segment(job): Segment<String>,
) -> Answer<ServiceCreated> {
    Ok(Json(registry.with(|world| world.membership(&job))?))
}

/// StopService: ends a job; answered when its hubs have freed it.
#[utoipa::path(
    delete, path = "/v1/jobs/{job}", tag = "jobs", operation_id = "stop_job",
    params(
        ("job" = String, Path, description = "The job's name, with `/` written as `%2F`, or its namespace."),
        ("reason" = Option<String>, Query, min_length = 1, max_length = 256, pattern = "^[ -~]+$",
         description = "Why, for the job's status, its workers and the logs. Left out, they show `stopped by an operator`."),
        ("when" = Option<StopWhen>, Query,
         description = "What the stop waits for. Left out or `now`: nothing. `workers_ending`, from a launcher that is about to end \
                        them: the hubs take a last checkpoint, and the job goes on. `workers_ended`: if all had left, the job \
                        finishes."),
    ),
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The job is over and its memory free; with `workers_ending`, its last checkpoint is taken.", body = JobStatus),
        (status = 400, description = "The path or the reason is malformed.", body = ServiceError),
        (status = 401, description = "The admin token is missing or wrong.", body = ServiceError),
        (status = 404, description = "There is no such job.", body = ServiceError),
        (status = 408, description = "The job is over, but a hub, which is named, has not confirmed that its memory is free.", body = ServiceError),
        (status = 500, description = "The manager is shutting down.", body = ServiceError),
    )
)]
pub(crate) async fn stop(
    _: Admin,
    State(registry): State<Arc<Registry>>,
    Segment(job): Segment<String>,
    Asked(stop): Asked<StopService>,
) -> Answer<JobStatus> {
    Ok(Json(registry.stop_job(&job, stop).await?))
}
