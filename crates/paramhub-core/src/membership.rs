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
//! `job`, and what follows for hubs, records and the log in `consequences`. `names` creates and finds jobs, `callers` has the
//! calls that wait, `hub_events` what hubs do, `silence` what their silence leads to, `arrangement` how a job gets its hubs,
//! `new_standbys` how it gets further ones, and `drain` how it leaves some.

mod arrangement;
mod callers;
mod commands;
mod consequences;
mod drain;
mod hub_events;
mod hubs;
mod job;
mod names;
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
use crate::cost::Rate;
use crate::limits::MESSAGE_BYTES_MAX;
use crate::scheme::{InformationBook, Roster};
use crate::service::{
    ErrorCode, HubCommand, HubStatus, JobState, JobStatus, LeaveService, ServiceError, refusal,
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

    fn next_call(&mut self) -> CallId {
        self.next_call += 1;
        CallId(self.next_call)
    }
}

fn forgotten() -> ServiceError {
    refusal(ErrorCode::JobEnded, "the job ended so long ago that the connection manager has forgotten it")
}

/// A message from outside, cut to the length that is kept.
fn bounded(message: &str) -> &str {
    &message[..message.floor_char_boundary(MESSAGE_BYTES_MAX)]
}
