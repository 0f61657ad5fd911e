//! Jobs by their names: how they are created, found and joined.

use super::{Job, LogEvent, Membership, Now, Output, forgotten};
use crate::auth::{Namespace, Nonce};
use crate::checkpoint::Resume;
use crate::combinations::{Feature, conflict_of};
use crate::service::{CreateService, ErrorCode, JobState, ServiceCreated, ServiceError, refusal};

impl Membership {
    /// Refuses a job with checkpoints if no hub that could serve it keeps any. Its hubs would refuse the job
    /// as well, but only when all of its workers are there.
    pub fn check_checkpoints(&self, request: &CreateService) -> Result<(), ServiceError> {
        let CreateService { name, options, .. } = request;
        if !self.hubs.keep_no_checkpoints(options.hubs.unwrap_or(1)) {
            return Ok(());
        }
        let conflict = conflict_of(Feature::NoCheckpointFolder, options.features());
        conflict.map_or(Ok(()), |conflict| {
            let message = format!("job `{name}`: no hub that has joined keeps any checkpoints: {conflict}");
            Err(refusal(ErrorCode::BadRequest, message))
        })
    }

    /// Ends the job of this name if it has begun again and none of its ranks is there, and the new job is to go on from its
    /// checkpoint: everything had ended at once, and is started again by the same command.
    pub fn give_way_to(&mut self, request: &CreateService, now: Now) {
        let goes_on = request.options.resume == Some(Resume::Auto);
        let living = self.living.get(&request.name).copied().filter(|_| goes_on);
        let job = living.and_then(|namespace| self.jobs.get_mut(&namespace));
        let Some(job) = job.filter(|job| job.is_deserted()) else { return };
        let (namespace, message) =
            (job.namespace, "another start of the job goes on from its checkpoint".into());
        let transition = job.fail(ErrorCode::JobEnded, message, now);
        self.follow(namespace, transition);
    }

    /// Reserves a name, and a part of its team's quotas, for a job that is about to be written to the store.
    /// Returns the job's number.
    pub fn reserve(&mut self, name: &str, weight: u32, namespace: Namespace) -> Result<u64, ServiceError> {
        if self.living.contains_key(name) {
            let message = format!(
                "the name `{name}` belongs to a job that has not ended: choose another, or end that one with \
                 `paramhub jobs stop {name}`"
            );
            return Err(refusal(ErrorCode::NameTaken, message));
        }
        if self.living.len() >= self.limits.living_jobs_max {
            let message = format!(
                "{} jobs live already, the most this connection manager serves: end one with `paramhub jobs stop`",
                self.limits.living_jobs_max
            );
            return Err(refusal(ErrorCode::DoesNotFit, message));
        }
        self.admit_to_team(name, weight)?;
        self.living.insert(name.to_string(), namespace);
        self.weights_reserved.insert(name.to_string(), weight);
        self.next_order += 1;
        Ok(self.next_order - 1)
    }

    /// What CreateService has answered already, if it is called for a second time with the same name and namespace, because
    /// its answer was lost. It is without the authority, which the caller adds.
    ///
    /// # Errors
    /// If the namespace is that of another job, or of one all of whose ranks have joined: whoever made that call had its
    /// answer.
    pub fn created_before(
        &self,
        name: &str,
        namespace: Namespace,
    ) -> Result<Option<ServiceCreated>, ServiceError> {
        let Some(job) = self.jobs.get(&namespace) else { return Ok(None) };
        if job.name == name && job.state() == JobState::Connecting {
            return Ok(Some(ServiceCreated { namespace, nonce: job.nonce, authority: None }));
        }
        let message =
            format!("the namespace {namespace} belongs to a job already: draw another for job `{name}`");
        Err(refusal(ErrorCode::NameTaken, message))
    }

    /// Frees a name whose job could not be written.
    pub fn give_back(&mut self, name: &str) {
        self.living.remove(name);
        self.weights_reserved.remove(name);
    }

    /// Admits a job whose name was reserved and whose record is in the store.
    pub fn admit(&mut self, job: Job) {
        let (namespace, workers) = (job.namespace, job.workers);
        self.outputs.push(Output::Log(LogEvent::JobCreated { job: job.name.clone(), namespace, workers }));
        self.weights_reserved.remove(&job.name);
        self.jobs.insert(job.namespace, job);
    }

    /// A job by namespace or by name. Of several with one name, the living one or else the newest.
    pub fn find(&self, text: &str) -> Result<&Job, ServiceError> {
        let by_namespace = text.parse().ok().and_then(|namespace: Namespace| self.jobs.get(&namespace));
        by_namespace.or_else(|| self.find_named(text)).ok_or_else(|| Self::no_such_job(text))
    }

    pub(super) fn find_named(&self, name: &str) -> Option<&Job> {
        let living = self.living.get(name).and_then(|namespace| self.jobs.get(namespace));
        let mut ended = self.ended.iter().rev().filter_map(|namespace| self.jobs.get(namespace));
        living.or_else(|| ended.find(|job| job.name == name))
    }

    pub(super) fn no_such_job(text: &str) -> ServiceError {
        let message =
            format!("there is no job with the name or namespace `{text}`: `paramhub jobs list` lists all");
        refusal(ErrorCode::NotFound, message)
    }

    /// Returns what workers need to join a job whose ranks are still connecting, or a running one that goes on when it
    /// loses workers: processes that take their ranks may come at any time.
    ///
    /// # Errors
    /// If no job of this name lives, or all ranks of the job have connected and it takes no others.
    pub fn credentials_to_join(&self, name: &str) -> Result<ServiceCreated, ServiceError> {
        let Some(job) = self.living.get(name).and_then(|namespace| self.jobs.get(namespace)) else {
            return Err(refusal(ErrorCode::NotFound, format!("no job that lives is called `{name}`")));
        };
        if job.state() != JobState::Connecting && !job.may_lose_ranks() {
            let message = format!(
                "job `{name}` has begun, and all its ranks are there: end it with `paramhub jobs stop {name}`, or choose \
                 another name"
            );
            return Err(refusal(ErrorCode::NameTaken, message));
        }
        Ok(ServiceCreated { namespace: job.namespace, nonce: job.nonce, authority: None })
    }

    /// Replaces the nonce of a job that lives: whoever knows the former one can claim no rank any more. Ranks that
    /// have connected have secrets of their own and go on.
    ///
    /// # Errors
    /// If there is no such job, or one of its ranks proves itself by the nonce alone.
    pub fn replace_nonce(
        &mut self,
        namespace: Namespace,
        nonce: Nonce,
    ) -> Result<ServiceCreated, ServiceError> {
        let job = self.jobs.get_mut(&namespace).ok_or_else(forgotten)?;
        let refuse = |code, message| Err(refusal(code, message));
        if job.state().has_ended() {
            return refuse(ErrorCode::JobEnded, format!("job `{}` has ended", job.name));
        }
        if !job.version_1_ranks().is_empty() {
            let ranks: Vec<String> = job.version_1_ranks().iter().map(u32::to_string).collect();
            let message = format!(
                "rank {} of job `{}` runs the release before, whose workers prove themselves by the job's secret: it stays \
                 as it is while they run",
                ranks.join(", "),
                job.name
            );
            return refuse(ErrorCode::Busy, message);
        }
        job.nonce = nonce;
        self.outputs.push(Output::Save(namespace));
        Ok(ServiceCreated { namespace, nonce, authority: None })
    }
}
