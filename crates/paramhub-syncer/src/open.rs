//! From a job that has begun to the exchange of those of its layers that go by factors.

use paramhub_kernels::Registry;
use paramhub_worker::Job;

use crate::error::SyncError;
use crate::exchange::{FactorConfig, FactorExchange};
use crate::meeting::{Meeting, Peers};
use crate::plan::{PlannedFactors, planned_factors};

/// Connects the workers of a job if its plan has layers that go by factors, and makes their exchange, in which layers have the
/// positions they have here. None, and nobody is connected, where there are none: all ranks have the same plan.
///
/// # Errors
/// If the workers cannot reach one another, or cannot exchange factors ([`FactorExchange::new`]).
///
/// # Panics
/// If the job's optimizer is none of this registry's: jobs by factors are refused others.
pub fn open_factors(
    job: &Job,
    meeting: Meeting,
    peers: &Peers,
    registry: &Registry,
    threads: usize,
) -> Result<Option<(FactorExchange, Vec<PlannedFactors>)>, SyncError> {
    let settings = job.settings();
    let planned = planned_factors(settings, &job.book().plan);
    if planned.is_empty() {
        return Ok(None);
    }
    let optimizer = registry.optimizer(&settings.optimizer.name).expect("checked with the settings");
    let hyperparameters = settings.optimizer.of_groups(optimizer.defaults());
    let mesh = meeting.join(peers, "factors")?;
    let hosts = job.book().roster.workers.iter().map(|worker| worker.machine).collect();
    let (reject_non_finite, resignation) = (settings.reject_non_finite, Some(job.resignation()));
    let config =
        FactorConfig { mesh, optimizer, hyperparameters, threads, hosts, reject_non_finite, resignation };
    let layers = planned.iter().map(|planned| planned.layer.clone()).collect();
    Ok(Some((FactorExchange::new(config, layers)?, planned)))
}
