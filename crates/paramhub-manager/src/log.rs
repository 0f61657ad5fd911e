//! The manager's news as lines of its log.

use paramhub_core::membership::News;

/// Logs one piece of news.
pub(crate) fn log(news: &News) {
    match news {
        News::JobCreated { job, namespace, workers } => {
            tracing::info!(job, %namespace, workers, "job created");
        }
        News::ReductionChosen { job, reduction } => tracing::info!(job, "reduction: {reduction}"),
        News::JobAdvanced { job, namespace, state } => {
            tracing::info!(job, %namespace, ?state, "job advanced");
        }
        News::JobFinished { job, namespace } => tracing::info!(job, %namespace, "job finished"),
        News::JobFailed { job, namespace, message, was_logged: false } => {
            tracing::warn!(job, %namespace, "job failed: {message}");
        }
        // The hub has logged this itself, with an embedded manager even in the same log.
        News::JobFailed { job, namespace, message, was_logged: true } => {
            tracing::info!(job, %namespace, "job failed: {message}");
        }
        News::JobExplained { job, namespace, message } => {
            tracing::info!(job, %namespace, "job had failed because: {message}");
        }
        News::HubLost { message } => tracing::warn!("{message}"),
        News::HubLeft { hub } => tracing::info!(hub, "hub left"),
        // The hub has logged this, too.
        News::HubNoticed { job, hub, message } => tracing::info!(job, hub, "{message}"),
        News::RanksAwaited { job, hub, message } => tracing::warn!(job, hub, "{message}"),
        News::LinkProbed { from, to, outcome: Ok(rate) } => {
            tracing::info!("from rack {from} to rack {to} go {rate}");
        }
        News::LinkProbed { from, to, outcome: Err(why) } => {
            tracing::warn!("not probed from rack {from} to rack {to}: {why}");
        }
    }
}
