//! The state machine of the jobs at a hub: which jobs it takes, when each opens, how long it waits for what, and
//! the order in which it ends.
//!
//! It has no clock, no threads and no channels, and it knows neither the memory nor the streams of a job. Events
//! come in with the time at which they happen, as a duration since any fixed moment. After each event the
//! caller takes the [`Output`]s and carries them out in order: what the cores, the checkpoint writers and the
//! manager are to receive. The hub's job controller is that caller, and a simulator in one thread.
//!
//! A job is loading if its chunks begin with a checkpoint, then opening until all cores have allocated,
//! connecting until all neighbours have opened their streams, and running. When every neighbour has left, it
//! is finishing while its last checkpoint is taken. It is ending from the decision that it is over until its
//! cores have freed everything, and the manager gets its end report after that. Only the first cause of an end
//! counts. A job whose workers are about to be ended, or have been ended, goes on in its phase; it keeps the
//! reason for the case that it does not finish.
//!
//! `admission` has what a job may take, `opening`, `streams` and `ending` the way of a job, `ranks` the workers that
//! are lost and replaced, `standbys`, `new_standbys` and `further_shares` the hubs, `shutdown` the way of the hub, `notices` and `awaited` what ranks and the manager hear of
//! a job that goes on, and `reports` what a manager hears that has restarted.

mod admission;
mod awaited;
mod ending;
mod event;
mod further_shares;
mod job;
mod new_standbys;
mod notices;
mod opening;
mod output;
mod ranks;
mod reports;
mod shutdown;
mod standbys;
mod streams;
mod terms;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::auth::Namespace;
use crate::service::HubEvent;
pub use ending::LAST_CHECKPOINT_TIMEOUT;
pub use event::{Beginning, CoreEvent, Event, FaultCause, LateNeighbour, OverdueEvent, OverdueNeighbours};
use job::{Job, Phase};
pub use opening::READING_SHARE;
pub use output::{LastCheckpoint, Output, RankChange, Recipient};
pub use ranks::chosen_step;
use reports::KeptEnd;
pub use reports::{ENDS_KEPT, EndReport};
use shutdown::Shutdown;
pub use shutdown::{LAST_CHECKPOINT, LAST_COPIES, SHUTDOWN};
pub use standbys::RoleChange;
use streams::Down;
pub use streams::{AdmittedStreams, CUT_OFF, OUTCOME_TIMEOUT, RESUME};
pub use terms::{HubTerms, JobLimits, JobTerms, RouteTerms};

/// The longest time between two checks of the deadlines.
const TICK: Duration = Duration::from_millis(200);

/// All jobs of a hub.
pub struct JobControl {
    hub: HubTerms,
    jobs: BTreeMap<Namespace, Job>,
    /// The interfaces that do not work.
    interfaces_down: BTreeMap<u16, Down>,
    /// Since when the manager has been out of reach.
    manager_lost: Option<Duration>,
    shutdown: Shutdown,
    /// How the last jobs have ended, oldest first.
    ends: VecDeque<KeptEnd>,
    outputs: Vec<Output>,
}

impl JobControl {
    /// A hub without jobs.
    pub fn new(hub: HubTerms) -> JobControl {
        JobControl {
            hub,
            jobs: BTreeMap::new(),
            interfaces_down: BTreeMap::new(),
            manager_lost: None,
            shutdown: Shutdown::Serving,
            ends: VecDeque::new(),
            outputs: Vec::new(),
        }
    }

    /// Whether the hub is to plan a job that the manager wants allocated, which begins with this epoch. A command can come
    /// twice, since the answer to the first may have been lost, or the manager has restarted: then the job may have ended here
    /// meanwhile. A job that begins again does so with another epoch.
    /// A hub that becomes a standby more than once has another position in the job each time.
    pub fn wants(&self, namespace: Namespace, epoch: u64, hub: u16) -> bool {
        self.is_serving() && !self.jobs.contains_key(&namespace) && !self.has_held(namespace, (epoch, hub))
    }

    /// Notes since when the manager has been out of reach, if it is.
    pub fn note_manager(&mut self, lost_since: Option<Duration>) {
        self.manager_lost = lost_since;
    }

    /// Handles an event. [`check_time`](Self::check_time) is to follow when the outputs are carried out.
    pub fn handle(&mut self, event: Event, now: Duration) {
        if self.is_serving() {
            self.handle_serving(event, now);
        } else {
            self.handle_stopping(event, now);
        }
    }

    /// Looks for deadlines that have passed.
    pub fn check_time(&mut self, now: Duration, streams: &impl AdmittedStreams) {
        if self.is_serving() {
            self.check_loading(now);
            self.check_connecting(now, streams);
            self.check_joining(now, streams);
            self.check_counterparts(now);
            self.check_lost_workers(now);
            self.check_workers_come(now, streams);
            self.check_concluding(now);
            self.check_finishing(now);
            self.check_interfaces(now, streams);
        } else {
            self.check_shutdown(now);
        }
    }

    /// The time until the caller is to [check the time](Self::check_time), if no event comes before.
    pub fn until_next_check(&self, now: Duration) -> Duration {
        self.shutdown.deadline().map_or(TICK, |until| until.saturating_sub(now))
    }

    /// The consequences of all events since the last call, in order.
    pub fn take_outputs(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.outputs)
    }

    fn handle_serving(&mut self, event: Event, now: Duration) {
        match event {
            Event::Planned(terms) => self.admit(*terms, now),
            Event::PlannedFurther { terms, further } => self.take_further(*terms, further),
            Event::AllocateAgain(plan) => self.allocated_before(plan),
            Event::ReportJobs { question } => self.report_jobs(question),
            Event::CannotPlan { namespace, reason } => self.refuse(namespace, reason),
            Event::Link { namespace } => self.link(namespace, now),
            Event::CannotLink { namespace, reason } => self.fail_as_known(namespace, reason, now),
            Event::SitesUnreachable { namespace, reason } => self.lose_sites(namespace, reason, now),
            Event::Tell { namespace, rank, message } => self.notify_all(namespace, rank, &message),
            Event::LoseRank { namespace, rank, epoch, reason } => {
                self.lose_rank(namespace, (rank, epoch), &reason, now);
            }
            Event::Rewind { namespace, rank, epoch, reason } => {
                self.rewind(namespace, (rank, epoch), &reason, now);
            }
            Event::ExpectRank { namespace, rank, epoch } => self.expect_rank(namespace, (rank, epoch), now),
            Event::ChangeShares { namespace, number, shares, later_hubs, reason } => {
                self.change_shares(namespace, (number, shares), later_hubs, &reason, now);
            }
            Event::StandbyUnreachable { namespace, route, standby, reason } => {
                self.standby_unreachable(namespace, (route, standby), reason, now);
            }
            Event::Finish { namespace } => self.finished_elsewhere(namespace, now),
            Event::JoinRank { namespace, rank, epoch, step } => {
                self.join_rank(namespace, (rank, epoch), step, now);
            }
            Event::Probe(order) => {
                // A probe would take from a job the bandwidth that it measures. The manager asks only if it
                // knows of no job.
                let job = self.jobs.values().next();
                let refused = job.map(|job| format!("job `{}` runs there", job.terms.name));
                self.outputs.push(Output::Probe { order, refused });
            }
            Event::Probed(report) => self.report(HubEvent::Probed(report)),
            Event::Stop { namespace, reason, when } => self.stop(namespace, reason, when, now),
            Event::Loaded { namespace, result } => self.loaded(namespace, result),
            Event::Core { namespace, event } => self.handle_core(namespace, event, now),
            Event::Interfaces { numbers, down } => self.note_interfaces(numbers, down, now),
            Event::LastCheckpointTaken { namespace } => self.last_checkpoint_taken(namespace, now),
            Event::CheckpointKept { namespace } => self.report(HubEvent::Kept { namespace }),
            Event::ShutDown => self.shut_down(now),
        }
    }

    pub(super) fn handle_core(&mut self, namespace: Namespace, event: CoreEvent, now: Duration) {
        match event {
            CoreEvent::Opened { missing_bytes, has_snapshot } => {
                self.route_opened(namespace, missing_bytes, has_snapshot, now);
            }
            CoreEvent::Faulted { route, culprit, message, cause } => {
                self.faulted(namespace, (route, culprit), message, cause, now);
            }
            CoreEvent::CannotGoOn { reason } => self.fail_as_known(namespace, reason, now),
            CoreEvent::Panicked { reason } => self.part_lost(namespace, reason, now),
            CoreEvent::Left { route, port } => self.left(namespace, route, port, now),
            CoreEvent::Silence { neighbour, seconds } => self.silence(namespace, neighbour, seconds),
            CoreEvent::Copied { route } => self.copied(namespace, route),
            CoreEvent::RankExpected { rank, epoch, step } => {
                self.rank_expected(namespace, (rank, epoch), step);
            }
            CoreEvent::RankJoined { rank, epoch } => self.rank_joined(namespace, (rank, epoch), now),
            CoreEvent::Moved { route, neighbour, by } => {
                self.moved(namespace, (route, neighbour), by, now);
            }
            CoreEvent::Late(late) => self.late(namespace, late),
            CoreEvent::Awaited { route, event } => self.awaited(namespace, route, event, now),
            CoreEvent::Closed { counters, left_out } => {
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                job.count(counters, &left_out);
                match job.phase {
                    Phase::Ending { .. } => self.route_closed(namespace),
                    _ => self.further_closed(namespace),
                }
            }
        }
    }

    fn report(&mut self, event: HubEvent) {
        self.outputs.push(Output::Report(event));
    }

    fn info(&mut self, message: String) {
        self.outputs.push(Output::Info(message));
    }

    fn warn(&mut self, message: String) {
        self.outputs.push(Output::Warning(message));
    }
}

fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}
