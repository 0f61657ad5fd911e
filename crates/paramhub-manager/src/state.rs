//! This module joins the [`Membership`], which has no I/O, to what surrounds it: the callers that wait, the
//! commands of each hub, and the records that are yet to be saved. It also checks the arguments of calls.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};

use paramhub_core::auth::{Incarnation, Namespace};
use paramhub_core::combinations;
use paramhub_core::membership::{Answer, CallId, JobRecord, Membership, Output};
use paramhub_core::service::{CreateService, ErrorCode, STOP_REASON_CHARS_MAX, ServiceError};
use tokio::sync::oneshot;

use crate::clock::now;
use crate::error::refusal;
use crate::hub_queues::HubQueues;
use crate::log;

/// The manager's state: the membership, the commands queued for hubs, the callers that wait, and the records
/// to save.
pub(crate) struct ManagerState {
    pub(crate) membership: Membership,
    pub(crate) queues: HubQueues,
    /// The callers that wait for an answer.
    callers: HashMap<CallId, oneshot::Sender<Answer>>,
    /// Jobs whose record has changed since it was saved.
    unsaved: HashSet<Namespace>,
    /// Jobs whose record is to be removed.
    removed: Vec<Namespace>,
}

impl ManagerState {
    pub(crate) fn new(membership: Membership) -> Self {
        ManagerState {
            membership,
            queues: HubQueues::default(),
            callers: HashMap::new(),
            unsaved: HashSet::new(),
            removed: Vec::new(),
        }
    }

    /// Lets a caller wait for the answer to its call.
    pub(crate) fn wait(&mut self, call: CallId) -> oneshot::Receiver<Answer> {
        let (sender, receiver) = oneshot::channel();
        self.callers.insert(call, sender);
        receiver
    }

    /// Forgets a caller that waited for an answer and whose connection is gone.
    pub(crate) fn hang_up(&mut self, call: CallId) {
        self.callers.remove(&call);
        self.membership.hang_up(call, now());
    }

    /// Carries out the outputs of the events that the membership has handled since the last call.
    pub(crate) fn carry_out(&mut self) {
        for output in self.membership.take_outputs(now()) {
            match output {
                Output::Answer { call, answer } => {
                    if let Some(caller) = self.callers.remove(&call) {
                        // This fails if the caller has just hung up.
                        let _ = caller.send(answer);
                    }
                }
                Output::HubJoined { hub } => {
                    tracing::info!(hub, "hub joined");
                    self.queues.add(hub);
                }
                Output::HubForgotten { hub } => self.queues.remove(hub),
                Output::Command { hub, command, unless_queued } => {
                    self.queues.push(hub, &command, unless_queued);
                }
                Output::Save(namespace) => drop(self.unsaved.insert(namespace)),
                Output::Remove(namespace) => {
                    self.unsaved.remove(&namespace);
                    self.removed.push(namespace);
                }
                Output::Log(event) => log::log(&event),
            }
        }
    }

    /// Returns the records to write, and the jobs whose record is to be removed, since the last call.
    pub(crate) fn take_unsaved(&mut self) -> (Vec<JobRecord>, Vec<Namespace>) {
        let unsaved = std::mem::take(&mut self.unsaved);
        let jobs = unsaved.iter().filter_map(|&namespace| self.membership.job(namespace).ok());
        let changed = jobs.map(|job| job.record(now())).collect();
        (changed, std::mem::take(&mut self.removed))
    }

    pub(crate) fn has_unsaved(&self) -> bool {
        !self.unsaved.is_empty() || !self.removed.is_empty()
    }

    /// Marks the records that could not be saved or removed, so that a later call of
    /// [`take_unsaved`](Self::take_unsaved) returns them again.
    pub(crate) fn keep_unsaved(&mut self, changed: &[JobRecord], removed: Vec<Namespace>) {
        let namespaces = changed.iter().map(|record| record.status.namespace);
        let membership = &self.membership;
        self.unsaved.extend(namespaces.filter(|&namespace| membership.job(namespace).is_ok()));
        self.removed.extend(removed);
    }
}

/// The rank that makes a call. Its request has proved all three fields.
#[derive(Clone, Copy)]
pub(crate) struct CallingRank {
    pub(crate) namespace: Namespace,
    pub(crate) rank: u32,
    pub(crate) incarnation: Incarnation,
}

/// Checks the arguments of `CreateService`.
pub(crate) fn check_request(request: &CreateService) -> Result<(), ServiceError> {
    use paramhub_core::limits::{
        HUBS_MAX, JOB_NAME_BYTES_MAX, RESUME_DEAD_AFTER_S_MIN, RESUME_S, WEIGHT_MAX, WORKERS_MAX,
    };

    let refuse = |message: String| Err(refusal(ErrorCode::BadRequest, message));
    let name = &request.name;
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte);
    if name.is_empty() || name.len() > JOB_NAME_BYTES_MAX || !name.bytes().all(allowed) {
        let shown: String = name.chars().take(JOB_NAME_BYTES_MAX).collect();
        return refuse(format!(
            "{shown:?} is no job name: it must have 1 to {JOB_NAME_BYTES_MAX} letters, digits, `.`, `_`, `-` or `/`"
        ));
    }
    if !(1..=WORKERS_MAX).contains(&request.workers) {
        return refuse(format!(
            "job `{name}` asks for {} workers: 1 to {WORKERS_MAX} are possible",
            request.workers
        ));
    }
    let options = &request.options;
    if let Some(hubs) = options.hubs
        && hubs > HUBS_MAX as u32
    {
        return refuse(format!("job `{name}` waits for {hubs} hubs: at most {HUBS_MAX} are possible"));
    }
    combinations::check(options.features())
        .map_err(|conflict| refusal(ErrorCode::BadRequest, format!("job `{name}`: {conflict}")))?;
    if !(1..=WEIGHT_MAX).contains(&options.weight) {
        return refuse(format!("job `{name}` has weight {}: 1 to {WEIGHT_MAX} are possible", options.weight));
    }
    if options.continues() && options.dead_after_s < RESUME_DEAD_AFTER_S_MIN {
        return refuse(format!(
            "job `{name}` is to go on when an interface goes down, which takes up to {RESUME_S} s, but gives workers up after \
             {} s: set dead_after_s to {RESUME_DEAD_AFTER_S_MIN} or more",
            options.dead_after_s
        ));
    }
    options.stragglers.check(request.workers).map_err(|why| {
        refusal(
            ErrorCode::BadRequest,
            format!("job `{name}` cannot have stragglers = {}: {why}", options.stragglers),
        )
    })?;
    let bounds = [
        ("rendezvous_timeout_s", options.rendezvous_timeout_s, 0.1, 86_400.0),
        ("lease_s", options.lease_s, 0.1, 604_800.0),
        ("dead_after_s", options.dead_after_s, 1.0, 86_400.0),
    ];
    let progress_timeout =
        options.progress_timeout_s.map(|seconds| ("progress_timeout_s", seconds, 1.0, 604_800.0));
    for (option, value, least, most) in bounds.into_iter().chain(progress_timeout) {
        // No range contains a NaN, so this refuses it, too.
        if !(least..=most).contains(&value) {
            return refuse(format!(
                "{option} of job `{name}` is {value}: {least} to {most} seconds are possible"
            ));
        }
    }
    Ok(())
}

/// Checks the reason of a stop, which appears in listings, in logs and on workers' terminals.
pub(crate) fn check_reason(reason: String) -> Result<String, ServiceError> {
    let printable = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
    if (1..=STOP_REASON_CHARS_MAX).contains(&reason.len()) && reason.bytes().all(printable) {
        return Ok(reason);
    }
    let message = format!(
        "the reason of a stop must have 1 to {STOP_REASON_CHARS_MAX} printable ASCII characters: shorten it, or leave \
         it out"
    );
    Err(refusal(ErrorCode::BadRequest, message))
}
