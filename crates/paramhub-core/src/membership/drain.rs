//! Hubs that an operator drains, so that they can be shut down or replaced: they take no new jobs, and jobs with standbys leave
//! them. One job can be moved off a hub, too.

use super::job::Transition;
use super::job::job_hubs::describe_hub;
use super::{Job, LogEvent, Membership, Now, Output, forgotten};
use crate::auth::Namespace;
use crate::service::{DrainStatus, ErrorCode, JobAtHub, MoveJob, MoveStatus, ServiceError, refusal};

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

    /// Moves a job off a hub, which goes on with other jobs. The job leaves it with the next
    /// [checks of the time](Self::check_time).
    ///
    /// # Errors
    /// If there is no such job or hub, if the job cannot leave a hub while it runs, or if the other hub takes no jobs.
    pub fn move_job(
        &mut self,
        namespace: Namespace,
        MoveJob { from, to }: MoveJob,
    ) -> Result<MoveStatus, ServiceError> {
        for hub in [Some(from), to].into_iter().flatten() {
            if self.hubs.shape(hub).is_none() {
                let message = format!("there is no hub {hub}: `paramhub hubs` lists all");
                return Err(refusal(ErrorCode::NotFound, message));
            }
        }
        if let Some(to) = to.filter(|&to| !self.hubs.shapes().iter().any(|&(hub, _)| hub == to)) {
            let why = if self.hubs.is_drained(to) { "is drained" } else { "is not heard, or shuts down" };
            return Err(refusal(ErrorCode::BadRequest, format!("hub {to} takes no jobs: it {why}")));
        }
        let job = self.jobs.get(&namespace).ok_or_else(forgotten)?;
        let places = |to| self.hubs.place(to).zip(self.hubs.place(from));
        if let Some(to) = to.filter(|&to| !places(to).is_some_and(|places| self.may_serve(job, to, places))) {
            let message = format!(
                "hub {to} cannot serve job `{}`: it serves one rack or host, demands encryption and the job does not, or lacks the \
                 label that the job asks for",
                job.name
            );
            return Err(refusal(ErrorCode::BadRequest, message));
        }
        let job = self.jobs.get_mut(&namespace).ok_or_else(forgotten)?;
        if job.order_move(from, to)? {
            self.outputs.push(Output::Save(namespace));
        }
        self.move_status(namespace)
    }

    /// How far the newest move of a job is.
    ///
    /// # Errors
    /// If there is no such job, or it was not moved.
    pub fn move_status(&self, namespace: Namespace) -> Result<MoveStatus, ServiceError> {
        self.job(namespace)?.move_status()
    }

    /// Has a job leave a hub that is drained, or that it was moved off, once others have all that it has there.
    pub(super) fn check_drained_hubs(&mut self, namespace: Namespace, now: Now) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let transition =
            job.leave_drained_hub(|hub| self.hubs.is_drained(hub), |hub| self.hubs.last_contact(hub), now);
        if transition != Transition::None {
            self.follow(namespace, transition);
        }
    }
}
