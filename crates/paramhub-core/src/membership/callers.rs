//! The calls that wait: ConnectService, InitService and StopService, and what becomes of them.

use std::sync::Arc;
use std::time::Duration;

use super::job::{InitNext, JobCall};
use super::{Answer, CallId, Job, Membership, Now, Output, WaitingCall, forgotten};
use crate::auth::{Incarnation, Namespace};
use crate::service::{ConnectService, ErrorCode, ServiceError, StopWhen};
use crate::settings::Settings;

/// What the caller does next with a call to InitService.
#[derive(Debug)]
pub enum Submission {
    /// The call waits, and its settings need no comparison: the caller reports at once that they
    /// [agree](Membership::agree).
    Wait(WaitingCall),
    /// The call waits. The caller compares its settings with those of rank `first`, and reports whether they
    /// [agree](Membership::agree) or [disagree](Membership::disagree).
    Compare {
        /// The call.
        waiting: WaitingCall,
        /// The rank that handed in its settings first.
        first: u32,
        /// The settings of that rank.
        settings: Arc<Settings>,
    },
    /// The call waits, of a process that takes a lost rank. The caller compares the digest of its settings with
    /// this one, and reports whether it may [join](Membership::join).
    Join {
        /// The call.
        waiting: WaitingCall,
        /// The digest of the job's settings.
        digest: String,
    },
}

impl Membership {
    /// ConnectService: a rank joins its job. The call waits until every rank has joined and as many hubs as
    /// the job waits for.
    ///
    /// # Errors
    /// If the job is over or forgotten, has no such rank, or another process has the rank.
    pub fn connect(
        &mut self,
        namespace: Namespace,
        call: &ConnectService,
        now: Now,
    ) -> Result<WaitingCall, ServiceError> {
        let job = self.jobs.get_mut(&namespace).ok_or_else(forgotten)?;
        let epoch = job.newest_epoch();
        let ticket = job.connect(call, now)?;
        if job.newest_epoch() > epoch {
            // Another process has the rank now, and must not hear of it before a manager that restarts would know.
            self.outputs.push(Output::Save(namespace));
        }
        let deadline = now.monotonic + Duration::from_secs_f64(job.connect_timeout_s());
        let (rank, incarnation) = (call.rank, call.incarnation);
        let call = self.wait(namespace, JobCall::Connect { rank, incarnation, ticket });
        self.advance_job(namespace, now);
        Ok(WaitingCall { call, deadline })
    }

    /// InitService: a rank hands in its settings, in a call that arrived at `arrived`. The call waits until
    /// every rank has done so and the hubs have allocated.
    ///
    /// # Errors
    /// If the job is over or forgotten, is not complete, or another process has the rank.
    pub fn submit(
        &mut self,
        namespace: Namespace,
        rank: u32,
        incarnation: Incarnation,
        settings: &Arc<Settings>,
        arrived: Now,
        now: Now,
    ) -> Result<Submission, ServiceError> {
        let job = self.jobs.get_mut(&namespace).ok_or_else(forgotten)?;
        let deadline = arrived.monotonic + Duration::from_secs_f64(job.init_timeout_s(rank));
        let next = job.submit(rank, incarnation, settings, now)?;
        let (InitNext::Wait { ticket } | InitNext::Compare { ticket, .. } | InitNext::Join { ticket, .. }) =
            next;
        let call = self.wait(namespace, JobCall::Init { rank, ticket });
        let waiting = WaitingCall { call, deadline };
        Ok(match next {
            InitNext::Wait { .. } => Submission::Wait(waiting),
            InitNext::Compare { first, settings, .. } => Submission::Compare { waiting, first, settings },
            InitNext::Join { digest, .. } => Submission::Join { waiting, digest },
        })
    }

    /// The settings of a process that takes a lost rank agree with the job's, or do not. If they do, the job's hubs are
    /// to expect it; otherwise only its call is refused.
    pub fn join(&mut self, call: CallId, agrees: bool, now: Now) {
        let Some((namespace, job)) = self.job_of(call) else { return };
        let Some(JobCall::Init { rank, .. }) = job.call(call) else { return };
        if agrees {
            let transition = job.join(rank);
            return self.follow(namespace, transition);
        }
        let refused = job.refuse_other_settings(rank);
        let transition = job.rank_lost_again(rank, now);
        job.end_refused(call, now);
        self.calls.remove(&call);
        let answer = Answer::Initialised(Err(refused));
        self.outputs.push(Output::Answer { call, namespace: Some(namespace), answer });
        self.follow(namespace, transition);
    }

    /// The settings of a call to InitService agree with the first rank's. For the last rank this returns the
    /// job and its settings: the caller is to make the placement.
    pub fn agree(&mut self, call: CallId, now: Now) -> Option<(Namespace, Arc<Settings>)> {
        let (namespace, job) = self.job_of(call)?;
        let Some(JobCall::Init { rank, .. }) = job.call(call) else { return None };
        let settings = job.agree(rank);
        let transition = job.check_settings_can_come(now);
        self.follow(namespace, transition);
        settings.map(|settings| (namespace, settings))
    }

    /// The settings of a call to InitService differ from the first rank's: the job fails.
    pub fn disagree(&mut self, call: CallId, disagreement: &str, now: Now) {
        let Some((namespace, job)) = self.job_of(call) else { return };
        let message = format!("the ranks of job `{}` do not want the same: {disagreement}", job.name);
        let transition = job.fail(ErrorCode::Disagreement, message, now);
        self.follow(namespace, transition);
    }

    /// StopService: ends a job, or asks its hubs how it ends. The call waits until no
    /// hub holds anything of the job; if the workers are about to end, until the last checkpoint is taken.
    ///
    /// # Errors
    /// If there is no such job.
    pub fn stop(
        &mut self,
        namespace: Namespace,
        reason: String,
        when: StopWhen,
        now: Now,
    ) -> Result<WaitingCall, ServiceError> {
        let job = self.jobs.get_mut(&namespace).ok_or_else(forgotten)?;
        let (timeout, transition) = job.stop(reason, when, now);
        let call = self.wait(namespace, JobCall::Stop(when));
        self.follow(namespace, transition);
        Ok(WaitingCall { call, deadline: now.monotonic + timeout })
    }

    /// A call's deadline has passed. The call is answered, unless that has happened already.
    pub fn expire(&mut self, call: CallId, now: Now) {
        let Some((namespace, job)) = self.job_of(call) else { return };
        if let Some(JobCall::Connect { .. }) = job.call(call) {
            self.advance_job_without_probing(namespace, now);
            self.answer_calls(now);
        }
        let hubs = self.hubs_for(namespace);
        let Some((namespace, job)) = self.job_of(call) else { return };
        let lacks_hubs = !job.suffice(&hubs);
        if let Some((mut answer, transition)) = job.call_expired(call, &hubs, now) {
            if let Answer::Connected(Err(refused)) = &mut answer
                && lacks_hubs
                && let Some(drained) = self.hubs.first_drained()
            {
                refused.message +=
                    &format!("; {drained} is here, but an operator drains it (`paramhub hubs`)");
            }
            self.calls.remove(&call);
            self.outputs.push(Output::Answer { call, namespace: Some(namespace), answer });
            self.follow(namespace, transition);
        }
    }

    /// The connection of a call that waits is gone. The call gets no answer any more.
    pub fn hang_up(&mut self, call: CallId, now: Now) {
        self.probe_calls.retain(|&waiting| waiting != call);
        if let Some(namespace) = self.calls.remove(&call)
            && let Some(job) = self.jobs.get_mut(&namespace)
        {
            job.caller_gone(call, now);
        }
    }

    /// Answers the calls that wait for jobs at which something has happened. An event can change a job more
    /// than once, so that calls are answered when all of it has been applied.
    pub(super) fn answer_calls(&mut self, now: Now) {
        for namespace in std::mem::take(&mut self.touched) {
            let Some(job) = self.jobs.get_mut(&namespace) else { continue };
            for (call, answer) in job.take_answers(now) {
                self.calls.remove(&call);
                self.outputs.push(Output::Answer { call, namespace: Some(namespace), answer });
            }
        }
    }

    fn wait(&mut self, namespace: Namespace, job_call: JobCall) -> CallId {
        let call = self.next_call();
        if let Some(job) = self.jobs.get_mut(&namespace) {
            job.wait(call, job_call);
        }
        self.calls.insert(call, namespace);
        self.touched.insert(namespace);
        call
    }

    fn job_of(&mut self, call: CallId) -> Option<(Namespace, &mut Job)> {
        let namespace = *self.calls.get(&call)?;
        Some((namespace, self.jobs.get_mut(&namespace)?))
    }
}
