//! Routes of jobs: CreateService, ConnectService, InitService, and the calls of operators.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use paramhub_core::auth::Purpose;
use paramhub_core::service::{
    ConnectService, CreateService, IDEMPOTENCY_KEY, InitService, JobStatus, LeaveService, MoveJob,
    MoveStatus, ReplaceSecret, STOP_REASON_CHARS_MAX, ServiceConnected, ServiceCreated, ServiceError,
    ServiceInitialised, StopService, StopWhen,
};
use paramhub_core::teams::full_name;

use super::{PathSegment, QueryParameters, namespace};
use crate::auth::{Admin, CallerSlot, JobOwner, JobReader, Reader};
use crate::body::{JsonBody, SMALL, TableBody};
use crate::clock::now;
use crate::error::Refusal;
use crate::log::audit;
use crate::registry::Registry;
use crate::rendezvous;
use crate::state::CallingRank;

type Answer<T> = Result<Json<T>, Refusal>;

/// CreateService: a new job, its namespace and its secret. The name of a job that a team creates begins with that of
/// the team; where that is left out, it is added. A caller that may have to repeat the call, because the answer was lost,
/// gives the job's namespace in the header `idempotency-key`, and gets the same answer again until every rank has joined.
#[utoipa::path(
    post, path = "/v1/jobs", tag = "jobs", operation_id = "create_service",
    params(("idempotency-key" = Option<String>, Header,
            description = "The job's namespace, 32 hexadecimal digits that no other job has: random ones. Left out, the manager draws it.")),
    request_body = CreateService,
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The job exists.", body = ServiceCreated),
        (status = 400, description = "The name, the number of workers or an option is out of bounds.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 408, description = "The body did not arrive in time.", body = ServiceError),
        (status = 409, description = "The name belongs to a living job.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
        (status = 500, description = "The job could not be saved; it does not exist.", body = ServiceError),
        (status = 507, description = "Too many jobs live, or the team has a quota that the job does not fit.", body = ServiceError),
    )
)]
pub(crate) async fn create(
    JobOwner(by): JobOwner,
    State(registry): State<Arc<Registry>>,
    headers: HeaderMap,
    JsonBody(request): JsonBody<CreateService, SMALL>,
) -> Answer<ServiceCreated> {
    let wanted = headers.get(IDEMPOTENCY_KEY).map(|key| namespace(key.to_str().unwrap_or_default()));
    let (name, created) = registry.create(request, &by, wanted.transpose()?).await?;
    audit(&by, format_args!("created job `{name}` ({})", created.namespace));
    Ok(Json(created))
}

/// ConnectService: joins a rank. Answered when every rank has called, as many hubs have joined as the job waits
/// for, and these serve every rank; at most `rendezvous_timeout_s` later. Ranks and hubs may start in any
/// order.
///
/// A call may be repeated with the same incarnation, for instance after a broken connection. A rank whose
/// connection breaks while it waits gives up its place. The ranks of a job without hubs repeat the call at
/// least four times in `lease_s`: the manager learns that the job lives, and the rank learns when it has ended.
/// Such a job fails when no rank has called for `lease_s`.
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
    CallerSlot(slot): CallerSlot,
    PathSegment(text): PathSegment<String>,
    JsonBody(call): JsonBody<ConnectService, SMALL>,
) -> Result<Response, Refusal> {
    let namespace = namespace(&text)?;
    let rank = CallingRank { namespace, rank: call.rank, incarnation: call.incarnation };
    registry.check_proof(rank, Purpose::Connect, &call.proof)?;
    registry.admit_rank(&slot, namespace)?;
    Ok(Json(rendezvous::connect(&registry, rank, call).await?).into_response())
}

/// InitService: hands in a rank's settings. Answered when all ranks agree and the hubs have allocated; at most
/// `rendezvous_timeout_s` later.
///
/// The settings of every rank are compared with those of the rank that called first. The first difference
/// fails the job for every rank, and the message names the setting or the key and both sides. A rank whose
/// connection breaks while it waits must call again within two seconds, or the job fails. After the answer the
/// hubs accept the job's streams. Each rank has `rendezvous_timeout_s` to open all of them.
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
) -> Result<Response, Refusal> {
    Ok(Json(&*rendezvous::init(&registry, body).await?).into_response())
}

/// LeaveService: a worker that reached no hub gives up its rank, or reports that its work is done; or a worker that has
/// lost a hub says so.
///
/// Before every rank has connected, the rank becomes free. Later the job fails, because the others would wait
/// in vain, unless the worker says `finished`. In a job that runs at hubs the hubs notice when workers come and go, and
/// the call changes nothing, unless it names a `lost_hub`: if the manager does not hear that hub, or the hub does not call
/// within three seconds, the job fails. A hub that calls reports itself how the job ends.
#[utoipa::path(
    post, path = "/v1/jobs/{namespace}/leave", tag = "jobs", operation_id = "leave_service",
    params(("namespace" = String, Path, description = "The job's namespace, 32 hexadecimal digits.")),
    request_body = LeaveService,
    responses(
        (status = 204, description = "The rank is free, the job over, or the loss of the hub noted."),
        (status = 400, description = "The body is malformed, the rank has not connected, or the job has no such hub.", body = ServiceError),
        (status = 403, description = "No job of this namespace has the nonce that the proof was made with.", body = ServiceError),
        (status = 408, description = "The body did not arrive in time.", body = ServiceError),
        (status = 409, description = "The rank belongs to another process.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
    )
)]
pub(crate) async fn leave(
    State(registry): State<Arc<Registry>>,
    CallerSlot(slot): CallerSlot,
    PathSegment(text): PathSegment<String>,
    JsonBody(call): JsonBody<LeaveService, SMALL>,
) -> Result<StatusCode, Refusal> {
    let namespace = namespace(&text)?;
    let rank = CallingRank { namespace, rank: call.rank, incarnation: call.incarnation };
    registry.check_proof(rank, Purpose::Leave, &call.proof)?;
    registry.admit_rank(&slot, namespace)?;
    registry.with(|state| state.membership.leave(namespace, &call, now()))?;
    Ok(StatusCode::NO_CONTENT)
}

/// Every job the manager remembers, oldest first; for a team its own.
#[utoipa::path(
    get, path = "/v1/jobs", tag = "jobs", operation_id = "list_jobs",
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "Oldest first.", body = Vec<JobStatus>),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
    )
)]
pub(crate) async fn list(
    JobReader(by): JobReader,
    State(registry): State<Arc<Registry>>,
) -> Json<Vec<JobStatus>> {
    Json(registry.with(|state| state.membership.statuses_for(by.team.as_deref(), now())))
}

/// One job, by name or namespace. Of several with one name, the living one or else the newest.
#[utoipa::path(
    get, path = "/v1/jobs/{job}", tag = "jobs", operation_id = "show_job",
    params(("job" = String, Path, description = "The job's name, with `/` written as `%2F`, or its namespace.")),
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The job.", body = JobStatus),
        (status = 400, description = "The path is malformed.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 404, description = "There is no such job.", body = ServiceError),
    )
)]
pub(crate) async fn show(
    JobReader(by): JobReader,
    State(registry): State<Arc<Registry>>,
    PathSegment(job): PathSegment<String>,
) -> Answer<JobStatus> {
    let team = by.team.as_deref();
    Ok(Json(registry.with(|state| state.membership.find_for(team, &job).map(|job| job.status(now())))?))
}

/// Returns what a launcher on a further host needs for its workers, as CreateService answered it, by the
/// name of a job that lives. Available until every rank has joined; with `on_worker_loss` set to `continue` or `rewind` also
/// while the job runs.
#[utoipa::path(
    get, path = "/v1/jobs/{job}/membership", tag = "jobs", operation_id = "job_membership",
    params(("job" = String, Path, description = "The job's name, with `/` written as `%2F`.")),
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "Namespace and nonce.", body = ServiceCreated),
        (status = 400, description = "The path is malformed.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 404, description = "No living job has this name.", body = ServiceError),
        (status = 409, description = "Every rank of it has joined, and it takes no others.", body = ServiceError),
    )
)]
pub(crate) async fn membership(
    JobOwner(by): JobOwner,
    State(registry): State<Arc<Registry>>,
    PathSegment(job): PathSegment<String>,
) -> Answer<ServiceCreated> {
    let job = full_name(by.team.as_deref(), &job);
    let mut credentials = registry.with(|state| state.membership.credentials_to_join(&job))?;
    credentials.authority = registry.authority_of_jobs();
    audit(&by, format_args!("took the secret of job `{job}` ({})", credentials.namespace));
    Ok(Json(credentials))
}

/// Replaces a job's secret. Workers that have yet to join need the new one; those that have joined go on.
#[utoipa::path(
    post, path = "/v1/jobs/{job}/secret", tag = "jobs", operation_id = "replace_secret",
    params(("job" = String, Path, description = "The job's name, with `/` written as `%2F`, or its namespace.")),
    request_body = ReplaceSecret,
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "Namespace and the new nonce.", body = ServiceCreated),
        (status = 400, description = "The path is malformed.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 404, description = "There is no such job.", body = ServiceError),
        (status = 408, description = "The body did not arrive in time.", body = ServiceError),
        (status = 409, description = "A rank proves itself by the secret, because it runs the release before.", body = ServiceError),
        (status = 410, description = "The job has ended.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
        (status = 500, description = "The operating system gives no random numbers.", body = ServiceError),
    )
)]
pub(crate) async fn replace_secret(
    JobOwner(by): JobOwner,
    State(registry): State<Arc<Registry>>,
    PathSegment(job): PathSegment<String>,
    JsonBody(_): JsonBody<ReplaceSecret, SMALL>,
) -> Answer<ServiceCreated> {
    let (name, namespace) = registry.with(|state| {
        let job = state.membership.find_for(by.team.as_deref(), &job)?;
        Ok::<_, ServiceError>((job.name.clone(), job.namespace))
    })?;
    let replaced = registry.replace_nonce(namespace)?;
    audit(&by, format_args!("replaced the secret of job `{name}` ({namespace})"));
    Ok(Json(replaced))
}

/// Moves a job off a hub while it runs, without a lost step: another hub becomes the standby of what it had there. The hub goes on
/// with its other jobs. Only jobs with standbys can leave a hub. A manager that restarts with its state goes on with the move.
#[utoipa::path(
    post, path = "/v1/jobs/{job}/move", tag = "jobs", operation_id = "move_job",
    params(("job" = String, Path, description = "The job's name, with `/` written as `%2F`, or its namespace.")),
    request_body = MoveJob,
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The move is under way.", body = MoveStatus),
        (status = 400, description = "The body is malformed, or the job cannot make this move.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 404, description = "There is no such job or hub.", body = ServiceError),
        (status = 408, description = "The body did not arrive in time.", body = ServiceError),
        (status = 410, description = "The job has ended.", body = ServiceError),
        (status = 413, description = "The body is too long.", body = ServiceError),
        (status = 415, description = "The body is not declared as JSON.", body = ServiceError),
    )
)]
pub(crate) async fn move_job(
    Admin(by): Admin,
    State(registry): State<Arc<Registry>>,
    PathSegment(job): PathSegment<String>,
    JsonBody(order): JsonBody<MoveJob, SMALL>,
) -> Answer<MoveStatus> {
    let (name, status) = registry.with(|state| {
        let job = state.membership.find(&job)?;
        let (name, namespace) = (job.name.clone(), job.namespace);
        Ok::<_, ServiceError>((name, state.membership.move_job(namespace, order)?))
    })?;
    let to = order.to.map_or(String::new(), |to| format!(" to hub {to}"));
    audit(&by, format_args!("moved job `{name}` off hub {}{to}", order.from));
    Ok(Json(status))
}

/// Returns how far the newest move of a job is.
#[utoipa::path(
    get, path = "/v1/jobs/{job}/move", tag = "jobs", operation_id = "move_status",
    params(("job" = String, Path, description = "The job's name, with `/` written as `%2F`, or its namespace.")),
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "How far it is.", body = MoveStatus),
        (status = 400, description = "The path is malformed.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 404, description = "There is no such job, or it was not moved.", body = ServiceError),
    )
)]
pub(crate) async fn move_status(
    _: Reader,
    State(registry): State<Arc<Registry>>,
    PathSegment(job): PathSegment<String>,
) -> Answer<MoveStatus> {
    let status = registry.with(|state| {
        let namespace = state.membership.find(&job)?.namespace;
        state.membership.move_status(namespace)
    })?;
    Ok(Json(status))
}

/// StopService: ends a job for all ranks. Its status, its workers and the logs then say `stopped: ` and the
/// reason. A job that has ended does not change. Answered when the hubs have freed the job, or with 408 if that
/// takes some seconds too long. With `when` set the call does not wait for hubs that are not heard: with
/// `workers_ended` the job ends ten seconds later although such a hub has not said how it ended.
#[utoipa::path(
    delete, path = "/v1/jobs/{job}", tag = "jobs", operation_id = "stop_job",
    params(
        ("job" = String, Path, description = "The job's name, with `/` written as `%2F`, or its namespace."),
        ("reason" = Option<String>, Query, min_length = 1, max_length = 256, pattern = "^[ -~]+$",
         description = "Why, for the job's status, its workers and the logs. Left out, they show `stopped by an operator`."),
        ("when" = Option<StopWhen>, Query,
         description = "What the stop waits for; left out, nothing."),
    ),
    security(("admin_token" = [])),
    responses(
        (status = 200, description = "The job is over and its memory free; with `workers_ending`, its last checkpoint is taken.", body = JobStatus),
        (status = 400, description = "The path or the reason is malformed.", body = ServiceError),
        (status = 401, description = "The token is missing, wrong or revoked.", body = ServiceError),
        (status = 403, description = "The token has another role.", body = ServiceError),
        (status = 404, description = "There is no such job.", body = ServiceError),
        (status = 408, description = "A hub, which is named, has not confirmed in time that the job's memory is free or, with `workers_ended`, how the job ended.", body = ServiceError),
        (status = 500, description = "The manager is shutting down.", body = ServiceError),
    )
)]
pub(crate) async fn stop(
    JobOwner(by): JobOwner,
    State(registry): State<Arc<Registry>>,
    PathSegment(job): PathSegment<String>,
    QueryParameters(stop): QueryParameters<StopService>,
) -> Answer<JobStatus> {
    let (name, namespace) = registry.with(|state| {
        let job = state.membership.find_for(by.team.as_deref(), &job)?;
        Ok::<_, ServiceError>((job.name.clone(), job.namespace))
    })?;
    match &stop.reason {
        None => audit(&by, format_args!("asked to stop job `{name}`")),
        // The job may end long after its launcher has said why. The reason has not been checked yet.
        Some(reason) => {
            let why: String =
                reason.chars().take(STOP_REASON_CHARS_MAX).flat_map(char::escape_debug).collect();
            audit(&by, format_args!("asked to stop job `{name}`: {why}"));
        }
    }
    Ok(Json(registry.stop_job(namespace, stop).await?))
}
