use std::sync::Arc;

use pyo3::prelude::*;

use crate::errors;
use crate::factors::FactorLayers;

/// The job, and its layers that do not go through hubs.
pub(crate) struct JobParts {
    /// The exchange of factors, which is left and dropped before the job.
    pub(crate) factors: Option<FactorLayers>,
    pub(crate) job: Arc<paramhub::Job>,
}

impl JobParts {
    /// Refuses gradients of layers that are exchanged by factors: hubs would wait for ever for those of the
    /// other ranks.
    pub(crate) fn check_through_hubs(&self, py: Python<'_>, keys: &[u32]) -> PyResult<()> {
        let Some(factors) = &self.factors else { return Ok(()) };
        let Some(&key) = keys.iter().find(|&&key| factors.part(key).is_some()) else { return Ok(()) };
        let name = self.job.settings().keys.keys().get(key as usize).map_or("?", |key| &*key.name);
        Err(errors::misuse(
            py,
            &format!(
                "job `{}`, rank {}: tensor `{name}` goes by factors: push_factors() of its layer takes them and gives its \
                 parameters back",
                self.job.name(),
                self.job.rank()
            ),
        ))
    }

    pub(crate) fn factors(&self, py: Python<'_>, layer: usize) -> PyResult<&FactorLayers> {
        self.factors.as_ref().filter(|factors| layer < factors.planned().len()).ok_or_else(|| {
            errors::misuse(
                py,
                &format!(
                    "job `{}`, rank {}: there is no layer {layer} that goes by factors",
                    self.job.name(),
                    self.job.rank()
                ),
            )
        })
    }
}
