//! The connection manager's state machine: all jobs and hubs, and the consequences of an event at one for the
//! others.
//!
//! It has no clock, no sockets, no threads and no store. Events come in as method calls with the time at which
//! they happen ([`Now`]). After each event the caller takes the [`Output`]s: answers to calls that have waited,
//! commands for hubs, records to save, and events for the log. The manager does that under one lock, and a
//! simulator in one thread.
//!
//! A rank holds its number in a job through an incarnation and calls ConnectService, then InitService. Both
//! calls wait for the other ranks ([`WaitingCall`]) and are answered together. What a single job does is in
//! `job`; `callers` has the calls that wait, `hub_events` what hubs do, `silence` what their silence leads to,
//! `arrangement` how a job gets its hubs, `new_standbys` how it gets further ones, and `drain` how it leaves some.

mod arrangement;
mod callers;
mod commands;
mod drain;
mod hub_events;
mod hubs;
mod job;
mod new_standbys;
mod output;
mod probes;
mod silence;
mod teams;
#[cfg(test)]
mod tests;
mod time;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::auth::{Namespace, Nonce, Purpose, StreamSecret};
use crate::checkpoint::Resume;
use crate::combinations::{Feature, conflict_of};
use crate::cost::Rate;
use crate::limits::MESSAGE_BYTES_MAX;
use crate::scheme::{InformationBook, Roster};
use crate::service::{
    CreateService, ErrorCode, HubCommand, HubStatus, JobState, JobStatus, LeaveService, ServiceCreated,
    ServiceError, StopWhen, refusal,
};
use crate::teams::TeamRecord;
pub use callers::Submission;
pub use commands::CommandQueue;
pub use hubs::HubRecord;
use hubs::Hubs;
use job::Transition;
use job::cause::Cause;
pub use job::{Job, JobRecord, MembersRecord, SettingsSummary, SitePlacement};
pub use output::{Answer, CallId, Connected, LogEvent, Output, WaitingCall};
use probes::Probes;
pub use silence::UNHEARD_MAX;
pub use time::{Now, REPORTED_BACK_MAX};

/// The longest time between two checks for silent hubs and expired jobs.
const TICK: Duration = Duration::from_millis(250);

/// The limits of a manager, and its knowledge of the network.
#[derive(Clone, Copy, Debug)]
pub struct MembershipLimits {
    /// The time that a hub may be silent before it gets no new jobs.
    pub hub_timeout: Duration,
    /// The time after which a silent hub is lost, mostly [`UNHEARD_MAX`].
    pub unheard_max: Duration,
    /// The most jobs that may live at a time.
    pub living_jobs_max: usize,
    /// The number of ended jobs that are remembered, the newest.
    pub ended_jobs_max: usize,
    /// The configured rate of a rack's link to the others, if there is one.
    pub core_rate: Option<Rate>,
}

/// All jobs and hubs.
pub struct Membership {
    jobs: BTreeMap<Namespace, Job>,
    /// The jobs that have not ended, by name. A job that is still being written to the store is only in here.
    living: BTreeMap<String, Namespace>,
    /// The weights of the jobs that are still being written to the store, by name.
    weights_reserved: BTreeMap<String, u32>,
    /// The teams by name.
    teams: BTreeMap<String, TeamRecord>,
    /// The jobs that have ended, oldest first.
    ended: VecDeque<Namespace>,
    hubs: Hubs,
    probes: Probes,
    /// The number of the question that this manager asks the hubs of an earlier one.
    question: u32,
    limits: MembershipLimits,
    next_order: u64,
    next_call: u64,
    /// The job of each call that waits for one.
    calls: HashMap<CallId, Namespace>,
    /// The jobs of which ranks have said that they lost a hub, until it is known whether the hub is still there.
    losses_to_check: BTreeSet<Namespace>,
    /// The calls that wait for the end of the probe run.
    probe_calls: Vec<CallId>,
    /// Jobs at which something has happened since their calls were last answered.
    touched: BTreeSet<Namespace>,
    outputs: Vec<Output>,
    /// The time at which silent hubs were last looked for.
    checked: Now,
}

impl Membership {
    /// Restores the state that an earlier manager left in its records of jobs and hubs. `drawn` is drawn anew for each
    /// manager: the secrets of probes are derived from it, and the number of the question to the hubs of an earlier one.
    pub fn new(
        mut records: Vec<JobRecord>,
        hubs: Vec<HubRecord>,
        limits: MembershipLimits,
        drawn: Nonce,
        now: Now,
    ) -> Self {
        let [a, b, c, d, ..] = drawn.derive("report jobs").0;
        let question = u32::from_le_bytes([a, b, c, d]);
        let mut state = Membership {
            jobs: BTreeMap::new(),
            living: BTreeMap::new(),
            weights_reserved: BTreeMap::new(),
            teams: BTreeMap::new(),
            ended: VecDeque::new(),
            hubs: Hubs::default(),
            probes: Probes::new(drawn),
            question,
            limits,
            next_order: 0,
            next_call: 0,
            calls: HashMap::new(),
            losses_to_check: BTreeSet::new(),
            probe_calls: Vec::new(),
            touched: BTreeSet::new(),
            outputs: Vec::new(),
            checked: now,
        };
        for record in hubs {
            let hub = record.hub;
            state.hubs.restore(record, now);
            state.outputs.push(Output::HubRestored { hub });
            state.command(hub, HubCommand::ReportJobs { question });
        }
        records.sort_by_key(|record| record.order);
        for record in records {
            state.restore_job(record, now);
        }
        state.prune();
        state
    }

    fn restore_job(&mut self, record: JobRecord, now: Now) {
        let had_ended = record.status.state.has_ended();
        let (job, transition) = Job::restore(record, now);
        let (namespace, name, hubs) = (job.namespace, job.name.clone(), job.hubs().collect::<Vec<u32>>());
        let former_hubs = job.former_hubs();
        let must_link = job.state() == JobState::Running && job.is_linked();
        self.next_order = job.order + 1;
        self.jobs.insert(namespace, job);
        if had_ended {
            return self.ended.push_back(namespace);
        }
        self.living.insert(name, namespace);
        self.follow(namespace, transition);
        for hub in hubs {
            if !self.hubs.has(hub) {
                let message = format!("hub {hub} was lost before the connection manager restarted");
                self.lose_parts(hub, &Cause::known(message, now), now);
            } else if must_link {
                // The earlier manager may not have sent it. A hub that has linked the job ignores it.
                self.command(hub, HubCommand::Link { namespace });
            }
        }
        for hub in former_hubs.into_iter().filter(|&hub| !self.hubs.has(hub)) {
            self.jobs.get_mut(&namespace).map(|job| job.former_part_over(hub));
        }
    }

    /// The record that the store keeps of a hub that has joined.
    pub fn hub_record(&self, hub: u32) -> Option<HubRecord> {
        self.hubs.record(hub)
    }

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

    /// The secrets with one of which a rank must prove a call to the manager; none if the job is not
    /// remembered.
    pub fn call_secrets(
        &self,
        namespace: Namespace,
        rank: u32,
        purpose: Purpose,
    ) -> [Option<StreamSecret>; 2] {
        self.jobs.get(&namespace).map_or([None; 2], |job| job.call_secrets(rank, purpose))
    }

    /// A job that is remembered.
    ///
    /// # Errors
    /// If there is none in this namespace.
    pub fn job(&self, namespace: Namespace) -> Result<&Job, ServiceError> {
        self.jobs.get(&namespace).ok_or_else(forgotten)
    }

    /// A job by namespace or by name. Of several with one name, the living one or else the newest.
    pub fn find(&self, text: &str) -> Result<&Job, ServiceError> {
        let by_namespace = text.parse().ok().and_then(|namespace: Namespace| self.jobs.get(&namespace));
        by_namespace.or_else(|| self.find_named(text)).ok_or_else(|| Self::no_such_job(text))
    }

    fn find_named(&self, name: &str) -> Option<&Job> {
        let living = self.living.get(name).and_then(|namespace| self.jobs.get(namespace));
        let mut ended = self.ended.iter().rev().filter_map(|namespace| self.jobs.get(namespace));
        living.or_else(|| ended.find(|job| job.name == name))
    }

    fn no_such_job(text: &str) -> ServiceError {
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

    /// The workers and hubs of a job whose ranks have all connected.
    pub fn roster(&self, namespace: Namespace) -> Result<Roster, ServiceError> {
        let job = self.job(namespace)?;
        let on_machine = |hub| (hub, self.hubs.machine(hub));
        Ok(job.roster(job.hubs().map(on_machine)))
    }

    /// The placement is made. Returns the hubs that must be asked to allocate, in placement order; none if the
    /// job has ended meanwhile.
    pub fn place(
        &mut self,
        namespace: Namespace,
        summary: SettingsSummary,
        placements: Vec<SitePlacement>,
        information_book: Arc<InformationBook>,
    ) -> Vec<u32> {
        let Some(job) = self.jobs.get_mut(&namespace) else { return Vec::new() };
        if !job.place(summary, placements, information_book) {
            return Vec::new();
        }
        self.outputs.push(Output::Save(namespace));
        job.hubs().collect()
    }

    /// The placement cannot be made: the job fails.
    pub fn cannot_place(&mut self, namespace: Namespace, why: ServiceError, now: Now) {
        // A job that was forgotten meanwhile needs no placement.
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let transition = job.fail(why.code, why.message, now);
        self.follow(namespace, transition);
    }

    /// A worker leaves before it has reached a hub, or has lost a hub of a job that runs.
    ///
    /// # Errors
    /// If the rank is not the caller's, or the job is forgotten.
    pub fn leave(&mut self, namespace: Namespace, call: &LeaveService, now: Now) -> Result<(), ServiceError> {
        let job = self.jobs.get_mut(&namespace).ok_or_else(forgotten)?;
        let transition = job.leave(call, bounded(&call.reason), now)?;
        if call.finished && job.is_rendezvous_only() {
            // A manager that restarts must still know which ranks have finished.
            self.outputs.push(Output::Save(namespace));
        }
        if call.lost_hub.is_some() {
            self.losses_to_check.insert(namespace);
        }
        self.follow(namespace, transition);
        Ok(())
    }

    /// Looks for hubs that have been silent for too long, and for jobs that wait for ranks that will not come.
    ///
    /// A manager that was suspended has received no calls of hubs and ranks, which may well have made them. If this is
    /// called much later than a [tick](Self::tick) after the last time, all of them count as heard now.
    pub fn check_time(&mut self, now: Now) {
        let hub_timeout = self.limits.hub_timeout;
        let since_check = now.monotonic.saturating_sub(std::mem::replace(&mut self.checked, now).monotonic);
        if since_check > self.tick() + hub_timeout / 2 {
            self.hubs.forgive(now);
            self.jobs.values_mut().for_each(|job| job.forgive(now));
        }
        self.check_silence(now);
        self.go_on_probing(now);
        let living: Vec<Namespace> = self.living.values().copied().collect();
        for namespace in living {
            self.check_hubs_to_go_back(namespace, now);
            self.check_former_hubs(namespace, now);
            self.check_drained_hubs(namespace, now);
            self.check_new_standbys(namespace, now);
            if let Some(job) = self.jobs.get_mut(&namespace) {
                let transition = job.check_time(now);
                if transition != Transition::None {
                    self.follow(namespace, transition);
                }
            }
        }
    }

    /// Returns the interval at which the caller should [check the time](Self::check_time).
    pub fn tick(&self) -> Duration {
        TICK.min(self.limits.hub_timeout / 4)
    }

    /// The consequences of all events since the last call, in order.
    pub fn take_outputs(&mut self, now: Now) -> Vec<Output> {
        self.answer_calls(now);
        std::mem::take(&mut self.outputs)
    }

    /// All jobs, oldest first.
    pub fn statuses(&self, now: Now) -> Vec<JobStatus> {
        let mut jobs: Vec<&Job> = self.jobs.values().collect();
        jobs.sort_by_key(|job| job.order);
        jobs.into_iter().map(|job| job.status(now)).collect()
    }

    /// All hubs.
    pub fn hub_statuses(&self, now: Now) -> Vec<HubStatus> {
        let mut parts: HashMap<u32, u32> = HashMap::new();
        for hub in self.jobs.values().flat_map(Job::holding_hubs) {
            *parts.entry(hub).or_default() += 1;
        }
        self.hubs.statuses(|hub| parts.get(&hub).copied().unwrap_or_default(), now)
    }

    /// The jobs, for metrics.
    pub fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.values()
    }

    /// Applies the consequences of a job's transition.
    fn follow(&mut self, namespace: Namespace, transition: Transition) {
        self.follow_with(namespace, transition, false);
    }

    /// Does the same as [`follow`](Self::follow). `was_logged` is set for a failure that a hub has reported
    /// and logged already.
    fn follow_with(&mut self, namespace: Namespace, transition: Transition, was_logged: bool) {
        self.touched.insert(namespace);
        let Some(job) = self.jobs.get(&namespace) else { return };
        let name = job.name.clone();
        match transition {
            Transition::None => {}
            Transition::Advanced => {
                let (state, links) = (job.state(), job.is_linked());
                self.outputs.push(Output::Log(LogEvent::JobAdvanced { job: name, namespace, state }));
                if state == JobState::Running && links {
                    let hubs: Vec<u32> = job.hubs().collect();
                    hubs.into_iter().for_each(|hub| self.command(hub, HubCommand::Link { namespace }));
                }
                self.outputs.push(Output::Save(namespace));
            }
            Transition::MembershipChanged { changes, epoch, message } => {
                let hubs: Vec<u32> = job.hubs_of_members().collect();
                self.outputs.push(Output::Log(LogEvent::RankChanged {
                    job: name,
                    namespace,
                    epoch,
                    message,
                }));
                self.outputs.push(Output::Save(namespace));
                for hub in hubs.into_iter().filter(|&hub| self.hubs.has(hub)) {
                    for change in &changes {
                        let command = change.command(namespace);
                        self.outputs.push(Output::ChangeMembership { hub, namespace, command });
                    }
                }
            }
            Transition::SharesChanged { message, told_later } => {
                let (hubs, command) = (job.hubs_told_of_shares(), job.shares_command());
                if let Some(message) = message {
                    let is_whole = job
                        .standby_counts()
                        .is_none_or(|counts| counts.ready + counts.copying == counts.shares);
                    let event = LogEvent::SharesChanged { job: name, namespace, message, is_whole };
                    self.outputs.extend([Output::Log(event), Output::Save(namespace)]);
                }
                // A hub that has no share any more hears it, too: it ends its part.
                let is_told = |hub: &u32| self.hubs.has(*hub) && told_later != Some(*hub);
                for hub in hubs.into_iter().filter(is_told) {
                    let command = command.clone();
                    self.outputs.push(Output::ChangeMembership { hub, namespace, command });
                }
            }
            Transition::BeganAgain { hubs, change, epoch, reason, message, .. } => {
                let event = LogEvent::RankChanged { job: name, namespace, epoch, message };
                self.outputs.extend([Output::Log(event), Output::Save(namespace)]);
                for hub in hubs.into_iter().filter(|&hub| self.hubs.has(hub)) {
                    for command in
                        [change.command(namespace), stop_command(namespace, reason.clone(), StopWhen::Now)]
                    {
                        self.outputs.push(Output::ChangeMembership { hub, namespace, command });
                    }
                }
            }
            // The hub may not have heard yet that it has no other part any more: that is sent when it is saved.
            Transition::AskHubs { hubs, reason, when: StopWhen::Now } => {
                for hub in hubs.into_iter().filter(|&hub| self.hubs.has(hub)) {
                    let command = stop_command(namespace, reason.clone(), StopWhen::Now);
                    self.outputs.push(Output::ChangeMembership { hub, namespace, command });
                }
            }
            Transition::AskHubs { hubs, reason, when } => {
                for hub in hubs {
                    self.command(hub, stop_command(namespace, reason.clone(), when));
                }
            }
            Transition::Explained => {
                let message = job.message().to_string();
                self.outputs.push(Output::Log(LogEvent::JobExplained { job: name, namespace, message }));
                self.outputs.push(Output::Save(namespace));
            }
            Transition::Ended { stop } => {
                let message = job.message().to_string();
                let event = match job.state() {
                    JobState::Failed => {
                        let (job, message) = (name.clone(), message.clone());
                        LogEvent::JobFailed { job, namespace, message, was_logged }
                    }
                    _ => LogEvent::JobFinished { job: name.clone(), namespace },
                };
                self.outputs.push(Output::Log(event));
                // If it has finished, the hub is one that was about to become a standby.
                let reason = match message.is_empty() {
                    true => "it has finished at its other hubs".to_owned(),
                    false => message,
                };
                for hub in stop {
                    self.command(hub, stop_command(namespace, reason.clone(), StopWhen::Now));
                }
                if self.living.get(&name) == Some(&namespace) {
                    self.living.remove(&name);
                }
                self.outputs.push(Output::Save(namespace));
                self.ended.push_back(namespace);
                self.prune();
            }
        }
    }

    fn prune(&mut self) {
        while self.ended.len() > self.limits.ended_jobs_max {
            let Some(oldest) = self.ended.pop_front() else { return };
            let Some(job) = self.jobs.remove(&oldest) else { continue };
            for (call, answer) in job.refuse_calls(&forgotten()) {
                self.calls.remove(&call);
                self.outputs.push(Output::Answer { call, namespace: None, answer });
            }
            self.outputs.push(Output::Remove(oldest));
        }
    }

    /// Sends a command to a hub. A hub that is gone gets none.
    fn command(&mut self, hub: u32, command: HubCommand) {
        self.send_command(hub, command, false);
    }

    /// Does the same as [`command`](Self::command), unless the same command waits already.
    fn command_once(&mut self, hub: u32, command: HubCommand) {
        self.send_command(hub, command, true);
    }

    fn send_command(&mut self, hub: u32, command: HubCommand, unless_queued: bool) {
        if self.hubs.has(hub) {
            self.outputs.push(Output::Command { hub, command, unless_queued });
        }
    }

    fn next_call(&mut self) -> CallId {
        self.next_call += 1;
        CallId(self.next_call)
    }
}

fn stop_command(namespace: Namespace, reason: String, when: StopWhen) -> HubCommand {
    HubCommand::Stop { namespace, reason, when }
}

fn forgotten() -> ServiceError {
    refusal(ErrorCode::JobEnded, "the job ended so long ago that the connection manager has forgotten it")
}

/// A message from outside, cut to the length that is kept.
fn bounded(message: &str) -> &str {
    &message[..message.floor_char_boundary(MESSAGE_BYTES_MAX)]
}
