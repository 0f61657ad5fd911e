//! The thread that opens jobs on the cores and ends them on all cores at once.
//!
//! The rules are those of [`JobControl`]. This thread passes it what happens, with the time, and carries out
//! what it wants: commands to the cores, threads to start, and reports to the manager. It keeps what the rules
//! do not need of a job: its memory, its streams and its checkpoints.

mod checkpoints;
#[cfg(test)]
mod combinations_tests;
mod job;
mod outputs;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::job_control::{self, Event, JobControl, JobTerms};
use paramhub_core::placement::HubShape;
use paramhub_core::service::{HubCommand, JobPlan};
use paramhub_kernels::Registry;

use crate::checkpoint::{CheckpointCommand, CheckpointConfig, CheckpointStatuses};
use crate::core::{CoreEvent, CoreHandle, panic_text};
use crate::directory::Directory;
use crate::events::{ControllerEvent, ReportEvent};
use crate::interfaces::SourceAddress;
use crate::manager_link::ManagerOutage;
use crate::probe::Prober;
use checkpoints::CheckpointPlan;
use job::HubJob;

/// The job controller: the rules of the hub's jobs, and what it takes to carry them out.
pub(crate) struct JobController {
    pub(crate) control: JobControl,
    /// The moment from which the rules count the time.
    pub(crate) started: Instant,
    pub(crate) events: Receiver<ControllerEvent>,
    /// Its own channel, for threads that answer later.
    pub(crate) own_sender: SyncSender<ControllerEvent>,
    pub(crate) cores: Vec<CoreHandle>,
    pub(crate) directory: Arc<Directory>,
    pub(crate) reports: SyncSender<ReportEvent>,
    /// Since when the manager has been out of reach.
    pub(crate) outage: Arc<ManagerOutage>,
    pub(crate) registry: Registry,
    pub(crate) shape: HubShape,
    /// For each interface of the shape, the address from which streams to other hubs leave, unless the kernel chooses.
    pub(crate) sources: Vec<Option<SourceAddress>>,
    /// The address from which to dial other hubs on the link that they have for themselves.
    pub(crate) between_hubs: Option<SourceAddress>,
    /// The jobs that the rules know.
    pub(crate) jobs: HashMap<Namespace, HubJob>,
    pub(crate) prober: Prober,
    pub(crate) checkpoints: Option<CheckpointConfig>,
    pub(crate) checkpoint_statuses: CheckpointStatuses,
    /// The threads that still write checkpoints of jobs that are over.
    pub(crate) writing: Vec<JoinHandle<()>>,
}

impl JobController {
    /// Handles events until the hub stops.
    pub(crate) fn run(mut self) {
        while !self.control.is_done() {
            match self.events.recv_timeout(self.control.until_next_check(self.now())) {
                Ok(event) => self.receive(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.receive(ControllerEvent::Stop),
            }
            self.carry_out_all();
            self.note_manager();
            self.control.check_time(self.now(), &*self.directory);
            self.carry_out_all();
        }
        self.await_checkpoint_writers();
    }

    /// The time as the rules count it.
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Passes an event to the rules, and keeps what they do not need of it.
    fn receive(&mut self, event: ControllerEvent) {
        let event = match event {
            ControllerEvent::Command(command) => self.command(command),
            ControllerEvent::Core(event) => self.core_event(event),
            ControllerEvent::SitesUnreachable { namespace, reason } => {
                Some(Event::SitesUnreachable { namespace, reason })
            }
            ControllerEvent::StandbyUnreachable { namespace, route, standby, reason } => {
                Some(Event::StandbyUnreachable { namespace, route, standby, reason })
            }
            ControllerEvent::Interfaces { numbers, down } => Some(Event::Interfaces { numbers, down }),
            ControllerEvent::Probed(report) => Some(Event::Probed(report)),
            ControllerEvent::Loaded { namespace, result } => {
                let result = result.map(|loaded| self.keep_restored(namespace, loaded));
                Some(Event::Loaded { namespace, result })
            }
            ControllerEvent::LastCheckpointTaken { namespace } => {
                Some(Event::LastCheckpointTaken { namespace })
            }
            ControllerEvent::CheckpointKept { namespace } => Some(Event::CheckpointKept { namespace }),
            ControllerEvent::Stop => Some(Event::ShutDown),
        };
        if let Some(event) = event {
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        self.note_manager();
        self.control.handle(event, self.now());
    }

    fn note_manager(&mut self) {
        let lost = self.outage.since().map(|since| since.saturating_duration_since(self.started));
        self.control.note_manager(lost);
    }

    /// The event that a command is to the rules.
    fn command(&mut self, command: HubCommand) -> Option<Event> {
        Some(match command {
            HubCommand::Allocate(plan) => {
                let (namespace, epoch, hub) = (plan.namespace, plan.epoch.number, plan.hub as u16);
                if plan.further.is_some() {
                    return Some(self.plan_further(plan));
                }
                if !self.control.wants(namespace, epoch, hub) {
                    return Some(Event::AllocateAgain(plan));
                }
                match self.plan(&plan) {
                    Ok((job, terms)) => {
                        self.jobs.insert(namespace, job);
                        Event::Planned(Box::new(terms))
                    }
                    Err(reason) => Event::CannotPlan { namespace, reason },
                }
            }
            HubCommand::ReportJobs { question } => Event::ReportJobs { question },
            HubCommand::Link { namespace } => Event::Link { namespace },
            HubCommand::Tell { namespace, rank, message } => Event::Tell { namespace, rank, message },
            HubCommand::Rewind { namespace, rank, epoch, reason } => {
                Event::Rewind { namespace, rank, epoch, reason }
            }
            HubCommand::LoseRank { namespace, rank, epoch, reason } => {
                Event::LoseRank { namespace, rank, epoch, reason }
            }
            HubCommand::ExpectRank { namespace, rank, epoch } => Event::ExpectRank { namespace, rank, epoch },
            HubCommand::ChangeShares { namespace, number, shares, later_hubs, reason } => {
                Event::ChangeShares { namespace, number, shares, later_hubs, reason }
            }
            HubCommand::Finish { namespace } => Event::Finish { namespace },
            HubCommand::JoinRank { namespace, rank, epoch, step } => {
                Event::JoinRank { namespace, rank, epoch, step }
            }
            HubCommand::Probe(order) => Event::Probe(order),
            HubCommand::Stop { namespace, reason, when } => Event::Stop { namespace, reason, when },
        })
    }

    /// Plans further shares of a job that this hub has.
    fn plan_further(&mut self, plan: Box<JobPlan>) -> Event {
        let (namespace, epoch, hub) = (plan.namespace, plan.epoch.number, plan.hub as u16);
        let further = plan.further.clone().unwrap_or_default();
        if !self.control.wants_further(namespace, epoch, hub, &further) {
            return Event::AllocateAgain(plan);
        }
        match (self.plan(&plan), self.jobs.get_mut(&namespace)) {
            (Ok((planned, terms)), Some(job)) => {
                job.further = Some(Box::new(planned));
                Event::PlannedFurther { terms: Box::new(terms), further }
            }
            (Err(reason), _) => Event::CannotPlan { namespace, reason },
            (Ok(_), None) => Event::AllocateAgain(plan),
        }
    }

    fn plan(&self, plan: &JobPlan) -> Result<(HubJob, JobTerms), String> {
        let checkpoints = CheckpointPlan::of(plan, self.checkpoints.as_ref())?;
        // The plan calls optimizers that were registered with the hub, whose own code may panic.
        let planned = AssertUnwindSafe(|| HubJob::plan(plan, &self.shape, &self.registry, checkpoints));
        catch_unwind(planned).unwrap_or_else(|panic| {
            Err(format!(
                "job `{}` made its hub panic ({}): this is a fault of the hub, or of an optimizer or aggregator registered with \
                 it; report it with the hub's log",
                plan.name,
                panic_text(&*panic)
            ))
        })
    }

    /// The event that a core's report is to the rules; none for a snapshot and a cut stream.
    fn core_event(&mut self, event: CoreEvent) -> Option<Event> {
        use job_control::CoreEvent as Reported;
        let (namespace, event) = match event {
            CoreEvent::Snapshot { namespace, snapshot } => {
                self.pass_to_writer(namespace, CheckpointCommand::Snapshot(snapshot));
                return None;
            }
            CoreEvent::Opened { namespace, missing_bytes, snapshot } => {
                let has_snapshot = snapshot.is_some();
                if let Some(snapshot) = snapshot {
                    self.keep_snapshot(namespace, *snapshot);
                }
                (namespace, Reported::Opened { missing_bytes, has_snapshot })
            }
            CoreEvent::Faulted { namespace, route, culprit, message, cause } => {
                (namespace, Reported::Faulted { route, culprit, message, cause })
            }
            CoreEvent::CannotGoOn { namespace, reason } => (namespace, Reported::CannotGoOn { reason }),
            CoreEvent::Panicked { namespace, reason } => (namespace, Reported::Panicked { reason }),
            CoreEvent::Left { namespace, route, port } => (namespace, Reported::Left { route, port }),
            CoreEvent::Silence { namespace, neighbour, seconds } => {
                (namespace, Reported::Silence { neighbour, seconds })
            }
            CoreEvent::CutFromAbove { namespace, route, port, attempt, until } => {
                self.dial_again(namespace, route, port, attempt, until);
                return None;
            }
            CoreEvent::Copied { namespace, route } => (namespace, Reported::Copied { route }),
            CoreEvent::Moved { namespace, route, neighbour, by } => {
                (namespace, Reported::Moved { route, neighbour, by })
            }
            CoreEvent::RankExpected { namespace, rank, epoch, step } => {
                (namespace, Reported::RankExpected { rank, epoch, step })
            }
            CoreEvent::RankJoined { namespace, rank, epoch } => {
                (namespace, Reported::RankJoined { rank, epoch })
            }
            CoreEvent::Late { namespace, late } => (namespace, Reported::Late(late)),
            CoreEvent::Awaited { namespace, route, event } => (namespace, Reported::Awaited { route, event }),
            CoreEvent::Closed { namespace, counters, left_out } => {
                (namespace, Reported::Closed { counters, left_out })
            }
        };
        Some(Event::Core { namespace, event })
    }
}
