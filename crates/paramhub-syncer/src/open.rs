//! Opens the exchange of a job's layers whose scheme is `factors`.

use paramhub_kernels::Registry;
use paramhub_worker::Job;

use crate::error::SyncError;
use crate::exchange::{FactorConfig, FactorExchange};
use crate::peer_listener::{PeerAddresses, PeerListener};
use crate::plan::{PlannedFactors, planned_factors};

/// Connects the workers of a job if its plan has layers with the scheme `factors`, and makes their exchange,
/// in which the layers have the positions that they have in `layers`. Returns `None`, and connects no
/// workers, where there are none: all ranks have the same plan.
///
/// # Errors
/// If the workers cannot reach one another, or cannot exchange factors ([`FactorExchange::new`]).
///
/// # Panics
/// If `registry` lacks the job's optimizer: a job with such layers is refused optimizers other than the
/// built-in ones.
pub fn open_factors(
    job: &Job,
    peer_listener: PeerListener,
    peers: &PeerAddresses,
    registry: &Registry,
    threads: usize,
) -> Result<Option<(FactorExchange, Vec<PlannedFactors>)>, SyncError> {
    let settings = job.settings();
    let planned = planned_factors(settings, &job.information_book().plan);
    if planned.is_empty() {
        return Ok(None);
    }
    let optimizer = registry.optimizer(&settings.optimizer.name).expect("checked with the settings");
    let hyperparameters = settings.optimizer.of_groups(optimizer.defaults());
    let mesh = peer_listener.join(peers, "factors")?;
    let hosts = job.information_book().roster.workers.iter().map(|worker| worker.machine).collect();
    let (reject_non_finite, abort_handle) = (settings.reject_non_finite, Some(job.abort_handle()));
    let config =
        FactorConfig { mesh, optimizer, hyperparameters, threads, hosts, reject_non_finite, abort_handle };
    let layers = planned.iter().map(|planned| planned.layer.clone()).collect();
    Ok(Some((FactorExchange::new(config, layers)?, planned)))
}
