//! This module joins the [`Membership`], which has no I/O, to what surrounds it: the callers that wait, the
//! commands of each hub, and the records that are yet to be saved. It also checks the arguments of calls.

#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, HashSet};

use paramhub_core::auth::{Incarnation, Namespace};
use paramhub_core::combinations;
use paramhub_core::membership::{Answer, CallId, HubRecord, JobRecord, Membership, Output};
use paramhub_core::service::{CreateService, ErrorCode, HubCommand, STOP_REASON_CHARS_MAX, ServiceError};
use tokio::sync::oneshot;

use crate::clock::now;
use crate::error::refusal;
use crate::hub_queues::{HubQueues, command_json};
use crate::log;

/// The manager's state: the membership, the commands queued for hubs, the callers that wait, and the records
/// to save.
pub(crate) struct ManagerState {
    pub(crate) membership: Membership,
    pub(crate) queues: HubQueues,
    /// The callers that wait for an answer.
    callers: HashMap<CallId, oneshot::Sender<Answer>>,
    /// What has changed since the records were last taken to be saved.
    unsaved: Unsaved,
    /// What is being saved.
    saving: Unsaved,
}

/// Records that have changed, and the answers that wait until they are saved.
#[derive(Default)]
struct Unsaved {
    jobs: HashSet<Namespace>,
    removed_jobs: Vec<Namespace>,
    /// Hubs that have joined or are forgotten.
    hubs: BTreeSet<u32>,
    /// A caller that was told of a job must find it as it was told, even if the manager is killed.
    answers: Vec<(CallId, Answer)>,
    /// A hub must know no membership that a manager which restarts does not.
    commands: Vec<(u32, HubCommand)>,
}

/// Records to write, and the keys of those to remove.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) jobs: Vec<JobRecord>,
    pub(crate) removed_jobs: Vec<Namespace>,
    pub(crate) hubs: Vec<HubRecord>,
    pub(crate) removed_hubs: Vec<u32>,
}

impl ManagerState {
    pub(crate) fn new(membership: Membership) -> Self {
        ManagerState {
            membership,
            queues: HubQueues::default(),
            callers: HashMap::new(),
            unsaved: Unsaved::default(),
            saving: Unsaved::default(),
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
            self.carry_out_one(output);
        }
    }

    fn carry_out_one(&mut self, output: Output) {
        match output {
            Output::Answer { call, namespace, answer } => self.answer_when_saved(call, namespace, answer),
            Output::HubJoined { hub } => {
                tracing::info!(hub, "hub joined");
                self.queues.add(hub);
                self.unsaved.hubs.insert(hub);
            }
            Output::SaveHub { hub } => drop(self.unsaved.hubs.insert(hub)),
            Output::HubRestored { hub } => self.queues.restore(hub),
            Output::HubForgotten { hub } => {
                self.queues.remove(hub);
                self.unsaved.hubs.insert(hub);
            }
            Output::Command { hub, command, unless_queued } => {
                match self.waiting_before(hub, command.namespace()) {
                    Some(commands) if unless_queued && waits(commands, hub, &command) => {}
                    Some(commands) => commands.push((hub, command)),
                    None => self.queues.push(hub, &command, unless_queued),
                }
            }
            Output::ChangeMembership { hub, namespace, command } => match self.records_of(namespace) {
                Some(records) => records.commands.push((hub, command)),
                None => self.queues.push(hub, &command, false),
            },
            Output::Save(namespace) => drop(self.unsaved.jobs.insert(namespace)),
            Output::Remove(namespace) => {
                self.unsaved.jobs.remove(&namespace);
                self.unsaved.removed_jobs.push(namespace);
            }
            Output::Log(event) => log::log(&event),
        }
    }

    fn answer_when_saved(&mut self, call: CallId, namespace: Option<Namespace>, answer: Answer) {
        match namespace.and_then(|namespace| self.records_of(namespace)) {
            Some(records) => records.answers.push((call, answer)),
            None => self.answer(call, answer),
        }
    }

    /// The records among which that of a job is still to be saved; `None` if it is saved.
    fn records_of(&mut self, namespace: Namespace) -> Option<&mut Unsaved> {
        let records = [&mut self.unsaved, &mut self.saving];
        records.into_iter().find(|records| records.jobs.contains(&namespace))
    }

    /// The commands that wait until a record is saved, if one of them is for this hub and about this job: no later command about
    /// it may reach the hub before.
    fn waiting_before(
        &mut self,
        hub: u32,
        namespace: Option<Namespace>,
    ) -> Option<&mut Vec<(u32, HubCommand)>> {
        let both = [&mut self.unsaved.commands, &mut self.saving.commands];
        both.into_iter().find(|commands| {
            commands.iter().any(|(to, command)| *to == hub && command.namespace() == namespace)
        })
    }

    fn answer(&mut self, call: CallId, answer: Answer) {
        if let Some(caller) = self.callers.remove(&call) {
            // This fails if the caller has just hung up.
            let _ = caller.send(answer);
        }
    }

    /// Returns what is to be saved since the last call; none if there is nothing. [`saved`](Self::saved) or
    /// [`not_saved`](Self::not_saved) must follow before the next call.
    pub(crate) fn take_unsaved(&mut self) -> Option<Changes> {
        if !self.has_unsaved() {
            return None;
        }
        self.saving = std::mem::take(&mut self.unsaved);
        let jobs = self.saving.jobs.iter().filter_map(|&namespace| self.membership.job(namespace).ok());
        let hub = |hub: u32| self.membership.hub_record(hub).ok_or(hub);
        let (hubs, removed_hubs): (Vec<_>, Vec<_>) =
            self.saving.hubs.iter().map(|&number| hub(number)).partition(Result::is_ok);
        Some(Changes {
            jobs: jobs.map(|job| job.record(now())).collect(),
            removed_jobs: self.saving.removed_jobs.clone(),
            hubs: hubs.into_iter().flatten().collect(),
            removed_hubs: removed_hubs.into_iter().filter_map(Result::err).collect(),
        })
    }

    pub(crate) fn has_unsaved(&self) -> bool {
        let Unsaved { jobs, removed_jobs, hubs, .. } = &self.unsaved;
        !jobs.is_empty() || !removed_jobs.is_empty() || !hubs.is_empty()
    }

    /// What was taken last is saved: answers the callers that have waited for it.
    pub(crate) fn saved(&mut self) {
        let Unsaved { answers, commands, .. } = std::mem::take(&mut self.saving);
        commands.into_iter().for_each(|(hub, command)| self.queues.push(hub, &command, false));
        answers.into_iter().for_each(|(call, answer)| self.answer(call, answer));
    }

    /// Whether what was taken last is saved is not known: it is taken again by the next call of
    /// [`take_unsaved`](Self::take_unsaved), and callers wait on.
    pub(crate) fn perhaps_saved(&mut self) {
        let newer = std::mem::take(&mut self.unsaved);
        let Unsaved { jobs, removed_jobs, hubs, answers, commands } = std::mem::take(&mut self.saving);
        let membership = &self.membership;
        let jobs = jobs.into_iter().filter(|&namespace| membership.job(namespace).is_ok());
        self.unsaved = Unsaved {
            jobs: jobs.chain(newer.jobs).collect(),
            removed_jobs: removed_jobs.into_iter().chain(newer.removed_jobs).collect(),
            hubs: hubs.into_iter().chain(newer.hubs).collect(),
            answers: answers.into_iter().chain(newer.answers).collect(),
            commands: commands.into_iter().chain(newer.commands).collect(),
        };
    }

    /// What was taken last could not be saved: it is taken again by the next call of
    /// [`take_unsaved`](Self::take_unsaved). Jobs go on without their records, since a disk that fails must not hold them
    /// up: their callers are answered.
    pub(crate) fn not_saved(&mut self) {
        let Unsaved { jobs, removed_jobs, hubs, answers, commands } = std::mem::take(&mut self.saving);
        let membership = &self.membership;
        self.unsaved.jobs.extend(jobs.into_iter().filter(|&namespace| membership.job(namespace).is_ok()));
        self.unsaved.removed_jobs.extend(removed_jobs);
        self.unsaved.hubs.extend(hubs);
        let commands = commands.into_iter().chain(std::mem::take(&mut self.unsaved.commands));
        commands.for_each(|(hub, command)| self.queues.push(hub, &command, false));
        let answers = answers.into_iter().chain(std::mem::take(&mut self.unsaved.answers));
        answers.collect::<Vec<_>>().into_iter().for_each(|(call, answer)| self.answer(call, answer));
    }
}

/// Whether the same command for a hub waits already.
fn waits(commands: &[(u32, HubCommand)], hub: u32, command: &HubCommand) -> bool {
    let json = command_json(command);
    commands.iter().any(|(to, waiting)| *to == hub && command_json(waiting) == json)
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
        HUBS_MAX, JOB_NAME_BYTES_MAX, PROGRAM_STATE_BYTES_MAX, REDIAL_GRACE_S_MAX, RESUME_DEAD_AFTER_S_MIN,
        RESUME_S, REWIND_EVERY_MAX, WEIGHT_MAX, WORKERS_MAX,
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
    if let Some(most) = options.max_hubs {
        let least = options.hubs.unwrap_or(0).max(if options.has_standbys() { 2 } else { 1 });
        if !(least..=HUBS_MAX as u32).contains(&most) {
            return refuse(format!(
                "job `{name}` is to have {most} hubs at most: {least} to {HUBS_MAX} are possible with its `hubs` and `replicas`"
            ));
        }
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
    if options.outlives_workers() && !(1..=request.workers).contains(&options.min_workers) {
        return refuse(format!(
            "job `{name}` has {} workers and is to go on with {} or more: set min_workers to 1 to {}",
            request.workers, options.min_workers, request.workers
        ));
    }
    if let Some(start_workers) = options.start_workers
        && !(options.min_workers..=request.workers).contains(&start_workers)
    {
        return refuse(format!(
            "job `{name}` is to begin with {start_workers} workers: set start_workers to {} to {}, from min_workers to all",
            options.min_workers, request.workers
        ));
    }
    if options.replicas > 1 {
        return refuse(format!("job `{name}` asks for {} replicas: 0 or 1 is possible", options.replicas));
    }
    if options.has_standbys() && options.hubs == Some(1) {
        return refuse(format!(
            "job `{name}` asks for standbys and for 1 hub, and the standby of a chunk is another hub: ask for 2 hubs or more, or \
             leave `replicas` out"
        ));
    }
    if !(1..=REWIND_EVERY_MAX).contains(&options.rewind_every) {
        return refuse(format!(
            "rewind_every of job `{name}` is {}: 1 to {REWIND_EVERY_MAX} steps are possible",
            options.rewind_every
        ));
    }
    if options.program_state_bytes > PROGRAM_STATE_BYTES_MAX {
        return refuse(format!(
            "program_state_bytes of job `{name}` is {}: at most {PROGRAM_STATE_BYTES_MAX} are possible",
            options.program_state_bytes
        ));
    }
    let bounds = [
        ("rendezvous_timeout_s", options.rendezvous_timeout_s, 0.1, 86_400.0),
        ("lease_s", options.lease_s, 0.1, 604_800.0),
        ("dead_after_s", options.dead_after_s, 1.0, 86_400.0),
        ("redial_grace_s", options.redial_grace_s, 0.0, REDIAL_GRACE_S_MAX),
        ("linger_s", options.linger_s, 1.0, 604_800.0),
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
