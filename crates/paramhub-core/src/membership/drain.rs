//! Hubs that an operator drains, so that they can be shut down or replaced: they take no new jobs, and jobs with standbys leave
//! them.

use super::job::Transition;
use super::job::job_hubs::describe_hub;
use super::{Job, LogEvent, Membership, Now, Output};
use crate::auth::Namespace;
use crate::service::{DrainStatus, ErrorCode, JobAtHub, ServiceError, refusal};

impl Membership {
    /// Drains a hub from now on, or no longer. Jobs leave it with the next [checks of the time](Self::check_time).
    ///
    /// # Errors
    /// If there is no such hub.
    pub fn drain_hub(&mut self, hub: u32, drained: bool, now: Now) -> Result<DrainStatus, ServiceError> {
        if self.hubs.drain(hub, drained) {
            self.outputs
                .extend([Output::SaveHub { hub }, Output::Log(LogEvent::HubDrained { hub, drained })]);
            if !drained {
                self.advance_all_jobs(now);
            }
        }
        self.drain_status(hub)
    }

    /// The jobs that have yet to leave a hub.
    ///
    /// # Errors
    /// If there is no such hub.
    pub fn drain_status(&self, hub: u32) -> Result<DrainStatus, ServiceError> {
        let Some(shape) = self.hubs.shape(hub) else {
            let message = format!("there is no hub {hub}: `paramhub hubs` lists all");
            return Err(refusal(ErrorCode::NotFound, message));
        };
        let mut holding: Vec<&Job> =
            self.jobs.values().filter(|job| job.holding_hubs().contains(&hub)).collect();
        holding.sort_by_key(|job| job.order);
        let job = |job: &Job| JobAtHub {
            name: job.name.clone(),
            namespace: job.namespace,
            why: job.stays_because(hub),
        };
        let jobs = holding.into_iter().map(job).collect();
        Ok(DrainStatus { hub, name: describe_hub(hub, shape), drained: self.hubs.is_drained(hub), jobs })
    }

    /// Has a job leave a hub that is drained, once others have all that it has there.
    pub(super) fn check_drained_hubs(&mut self, namespace: Namespace, now: Now) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let transition =
            job.leave_drained_hub(|hub| self.hubs.is_drained(hub), |hub| self.hubs.last_contact(hub), now);
        if transition != Transition::None {
            self.follow(namespace, transition);
        }
    }
}
