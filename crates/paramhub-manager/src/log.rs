//! The manager's events as lines of its log.

use paramhub_core::membership::LogEvent;
use paramhub_core::tokens::TokenBearer;

/// Logs what an operator or a hub's owner has done, under the target `audit`. Without tokens it is not known who
/// called.
pub(crate) fn audit(by: &TokenBearer, what: std::fmt::Arguments<'_>) {
    match (&by.token, &by.team) {
        (Some(token), Some(team)) => {
            tracing::info!(target: "audit", "audit: token `{token}` of team `{team}` {what}");
        }
        (Some(token), None) => tracing::info!(target: "audit", "audit: token `{token}` {what}"),
        (None, _) => tracing::info!(target: "audit", "audit: a caller without a token {what}"),
    }
}

/// Logs one event.
pub(crate) fn log(event: &LogEvent) {
    match event {
        LogEvent::JobCreated { job, namespace, workers } => {
            tracing::info!(job, %namespace, workers, "job created");
        }
        LogEvent::ReductionChosen { job, reduction } => tracing::info!(job, "reduction: {reduction}"),
        LogEvent::JobAdvanced { job, namespace, state } => {
            tracing::info!(job, %namespace, ?state, "job advanced");
        }
        LogEvent::JobFinished { job, namespace } => tracing::info!(job, %namespace, "job finished"),
        LogEvent::JobFailed { job, namespace, message, was_logged: false } => {
            tracing::warn!(job, %namespace, "job failed: {message}");
        }
        // The hub has logged this itself, with an embedded manager even in the same log.
        LogEvent::JobFailed { job, namespace, message, was_logged: true } => {
            tracing::info!(job, %namespace, "job failed: {message}");
        }
        LogEvent::JobExplained { job, namespace, message } => {
            tracing::info!(job, %namespace, "job had failed because: {message}");
        }
        LogEvent::RankChanged { job, namespace, epoch, message } => {
            tracing::warn!(job, %namespace, epoch, "{message}");
        }
        LogEvent::SharesChanged { job, namespace, message, is_whole: false } => {
            tracing::warn!(job, %namespace, "{message}");
        }
        LogEvent::SharesChanged { job, namespace, message, is_whole: true } => {
            tracing::info!(job, %namespace, "{message}");
        }
        LogEvent::HubUnheard { message }
        | LogEvent::HubHeardAgain { message }
        | LogEvent::HubLost { message } => tracing::warn!("{message}"),
        LogEvent::HubDrained { hub, drained: true } => {
            tracing::info!(hub, "hub is drained: it takes no new jobs, and those with standbys leave it");
        }
        LogEvent::HubDrained { hub, drained: false } => tracing::info!(hub, "hub is not drained any more"),
        LogEvent::HubLeft { hub } => tracing::info!(hub, "hub left"),
        // The hub has logged this, too.
        LogEvent::HubNoticed { job, hub, message } => tracing::info!(job, hub, "{message}"),
        LogEvent::RanksAwaited { job, hub, message } => tracing::warn!(job, hub, "{message}"),
        LogEvent::LinkProbed { from, to, outcome: Ok(rate) } => {
            tracing::info!("from rack {from} to rack {to} go {rate}");
        }
        LogEvent::LinkProbed { from, to, outcome: Err(why) } => {
            tracing::warn!("not probed from rack {from} to rack {to}: {why}");
        }
    }
}
