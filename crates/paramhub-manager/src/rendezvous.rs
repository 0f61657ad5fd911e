//! ConnectService and InitService: calls that wait for other ranks.

use std::sync::Arc;

use paramhub_core::membership::{Answer, Submission};
use paramhub_core::service::{
    ConnectService, ErrorCode, InitService, ServiceConnected, ServiceError, ServiceInitialised,
};
use paramhub_core::settings::Settings;

use crate::allocation::{allocate, settings_digest};
use crate::blocking::blocking;
use crate::body::TableBody;
use crate::caller::Caller;
use crate::clock::now;
use crate::error::refusal;
use crate::registry::Registry;
use crate::state::CallingRank;

/// Joins a rank to its job. Returns when every rank has joined and as many hubs as the job waits for.
pub(crate) async fn connect(
    registry: &Arc<Registry>,
    caller: CallingRank,
    call: ConnectService,
) -> Result<ServiceConnected, ServiceError> {
    let (mut call, deadline) = registry.with(|state| {
        let waiting = state.membership.connect(caller.namespace, &call, now())?;
        Ok::<_, ServiceError>((Caller::wait(registry, state, waiting.call), waiting.deadline))
    })?;
    match call.answer_by(deadline).await? {
        Answer::Connected(connected) => connected.map(|connected| connected.answer()),
        other => unreachable!("ConnectService is answered with {other:?}"),
    }
}

/// Hands in a rank's settings. Returns when every rank has done so and the hubs have allocated.
pub(crate) async fn init(
    registry: &Arc<Registry>,
    body: TableBody,
) -> Result<Arc<ServiceInitialised>, ServiceError> {
    let arrived = now();
    let CallingRank { namespace, rank, incarnation } = body.caller;
    let (settings, body) = parse(body).await?;
    let submitted = registry.with(|state| {
        let submission = state.membership.submit(namespace, rank, incarnation, &settings, arrived, now())?;
        Ok::<_, ServiceError>(match submission {
            Submission::Wait(waiting) => {
                (Caller::wait(registry, state, waiting.call), waiting.deadline, None)
            }
            Submission::Compare { waiting, first, settings } => {
                let first = Expected::SettingsOf(first, settings);
                (Caller::wait(registry, state, waiting.call), waiting.deadline, Some(first))
            }
            Submission::Join { waiting, digest } => {
                let digest = Some(Expected::Digest(digest));
                (Caller::wait(registry, state, waiting.call), waiting.deadline, digest)
            }
        })
    })?;
    let (mut call, deadline, expected) = submitted;
    let agrees = match expected {
        Some(Expected::SettingsOf(first, theirs)) => compare(&call, rank, settings, first, theirs).await?,
        Some(Expected::Digest(digest)) => {
            let is_same = blocking(move || settings_digest(&settings) == digest).await?;
            call.join(is_same);
            false
        }
        None => {
            drop(settings);
            true
        }
    };
    // The megabytes of key table have been compared and freed: the next body may be read.
    drop(body);
    if agrees && let Some((namespace, agreed)) = call.agree() {
        tokio::spawn(allocate(registry.clone(), namespace, agreed));
    }
    match call.answer_by(deadline).await? {
        Answer::Initialised(initialised) => initialised,
        other => unreachable!("InitService is answered with {other:?}"),
    }
}

/// What a rank's settings must agree with.
enum Expected {
    /// The settings of this rank.
    SettingsOf(u32, Arc<Settings>),
    /// The digest of the job's settings: the job runs, and the rank was lost.
    Digest(String),
}

/// Parses and checks the settings in a call to InitService. The body is returned although it is empty,
/// because it holds its share of the budget.
async fn parse(mut body: TableBody) -> Result<(Arc<Settings>, TableBody), ServiceError> {
    blocking(move || {
        let call: InitService = body.parse()?;
        // The proved fields came first in the body, and no field can come twice.
        if (call.rank, call.incarnation) != (body.caller.rank, body.caller.incarnation) {
            return Err(refusal(ErrorCode::BadRequest, "the body names two ranks"));
        }
        call.settings.check().map_err(|wrong| {
            refusal(
                ErrorCode::BadRequest,
                format!("the settings of rank {} cannot be used: {wrong}", call.rank),
            )
        })?;
        Ok((Arc::new(call.settings), body))
    })
    .await?
}

/// Compares a rank's settings with the first rank's; where they differ the job is over for all ranks, and the
/// call is answered with that.
async fn compare(
    call: &Caller<'_>,
    rank: u32,
    mine: Arc<Settings>,
    first: u32,
    theirs: Arc<Settings>,
) -> Result<bool, ServiceError> {
    match blocking(move || mine.agree(rank, first, &theirs)).await? {
        Ok(()) => Ok(true),
        Err(disagreement) => {
            call.disagree(&disagreement.to_string());
            Ok(false)
        }
    }
}
