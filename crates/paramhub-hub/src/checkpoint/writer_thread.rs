//! The thread that orders a job's checkpoints and writes them.
//!
//! It owns the memory of one snapshot, which is with the cores while they copy and here while it is written;
//! checkpoints that are due meanwhile are skipped. The version of a checkpoint of "now" cannot be known from
//! outside, so the thread tries. A version that the job has passed comes back as missed, with the version
//! that the job has reached, and the next try aims a little further.
//!
//! In a job with standbys the hub that serves a route writes its chunks. A hub that takes a route over writes them from the next
//! checkpoint on; that of a step for which the lost hub has not written its part is not whole.

mod due;
mod records;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::checkpoint::Every;
use paramhub_core::consistency::Consistency;
use paramhub_core::job_control::LastCheckpoint;
use paramhub_core::settings::Settings;

use super::folder::JobFolder;
use super::statuses::CheckpointStatuses;
use crate::core::{CoreCommand, CoreHandle, Snapshot, SnapshotOutcome, SnapshotTarget};

/// The time that other cores may take to reach a version that one of them has passed.
const LAG: Duration = Duration::from_secs(60);

/// Commands to a checkpoint writer. Sending one never waits.
pub(crate) enum CheckpointCommand {
    /// A core has ended a snapshot.
    Snapshot(Box<Snapshot>),
    /// The hub serves these routes now.
    Serve(HashSet<u16>),
    /// The hub has become the standby of a further route, whose snapshots this core takes.
    StandBy { snapshot: Box<Snapshot>, core: CoreHandle },
    /// The hub has nothing more to do with a route of which it was the standby.
    GiveUp(u16),
    /// Take a last checkpoint; the writer drops `taken` as soon as the job may end.
    Finish { taken: NotifyOnDrop, before: LastCheckpoint },
    /// The job is over.
    End,
}

/// Calls a function when it is dropped, so that a caller that waits for a last checkpoint does not wait for
/// ever, whatever happens to the writer.
pub(crate) struct NotifyOnDrop(Option<Box<dyn FnOnce() + Send>>);

impl NotifyOnDrop {
    pub(crate) fn new(call: impl FnOnce() + Send + 'static) -> NotifyOnDrop {
        NotifyOnDrop(Some(Box::new(call)))
    }
}

impl Drop for NotifyOnDrop {
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            call();
        }
    }
}

/// The task of a checkpoint writer.
pub(crate) struct CheckpointTask {
    pub(crate) name: String,
    pub(crate) namespace: Namespace,
    pub(crate) settings: Arc<Settings>,
    pub(crate) workers: u32,
    /// The hub's number among the job's hubs.
    pub(crate) hub: u32,
    pub(crate) every: Every,
    pub(crate) keep: usize,
    pub(crate) folder: JobFolder,
    /// The version with which the job began, if it is a checkpoint's.
    pub(crate) resumed_step: Option<u32>,
    /// The name of that checkpoint's folder.
    pub(crate) resumed_from: Option<String>,
    /// The cores that take the snapshots, by the snapshots' routes.
    pub(crate) cores: HashMap<u16, CoreHandle>,
    pub(crate) snapshots: Vec<Snapshot>,
    /// The routes for which the hub is the standby.
    pub(crate) standby_routes: HashSet<u16>,
    /// The number of routes that the hub may have to do with.
    pub(crate) routes_max: usize,
    /// Whether the hub is there from the job's beginning, and records that.
    pub(crate) records_begin: bool,
}

/// A running checkpoint writer.
pub(crate) struct CheckpointWriter {
    commands: SyncSender<CheckpointCommand>,
    thread: JoinHandle<()>,
}

impl CheckpointWriter {
    /// Starts a checkpoint writer.
    pub(crate) fn start(
        task: CheckpointTask,
        statuses: CheckpointStatuses,
    ) -> std::io::Result<CheckpointWriter> {
        // There may be one snapshot per route, changes of what the hub is for each, and the two ends of a job.
        let (commands, inbox) = sync_channel(4 * task.routes_max + 4);
        let thread = std::thread::Builder::new().name("hub-checkpoints".into()).spawn(move || {
            let namespace = task.namespace;
            statuses.change(namespace, |_| {});
            CheckpointLoop::new(task, inbox, statuses.clone()).run();
            statuses.end(namespace);
        })?;
        Ok(CheckpointWriter { commands, thread })
    }

    /// Sends it a command; `false` if the writer has ended.
    pub(crate) fn send(&self, command: CheckpointCommand) -> bool {
        self.commands.try_send(command).is_ok()
    }

    /// The thread, which ends once the job is over and all copies are written.
    pub(crate) fn into_thread(self) -> JoinHandle<()> {
        self.thread
    }
}

struct CheckpointLoop {
    task: CheckpointTask,
    inbox: Receiver<CheckpointCommand>,
    statuses: CheckpointStatuses,
    /// The snapshots of the routes that the hub serves, except those that are with the cores.
    here: Vec<Snapshot>,
    /// The number of these routes.
    routes: usize,
    /// The snapshots of routes for which it is the standby.
    of_standbys: Vec<Snapshot>,
    /// The routes that it has taken over since it last began a snapshot.
    taken_over: HashSet<u16>,
    /// Whether it has begun no snapshot since, so that it may not know how far the job has come.
    is_new_here: bool,
    is_synchronous: bool,
    /// The newest version known.
    newest: u32,
    /// The version last written.
    last: Option<u32>,
    /// This run's generation among those with checkpoints in the folder; determined before the first
    /// checkpoint is written.
    generation: Option<u64>,
    finish: Option<NotifyOnDrop>,
    /// What the last checkpoint is the last one before.
    last_before: LastCheckpoint,
    /// In a job whose workers are lost, the newest version to which its chunks can go back, as far as a try has shown
    /// it.
    goes_back_to: Option<u32>,
    /// Whether the disk says that the run has begun.
    has_noted_begin: bool,
    is_over: bool,
    /// A key that is not updated with the others, found in the last try.
    lagging: Option<u32>,
}

/// The outcome of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SnapshotResult {
    All,
    /// The job had passed the version, or the snapshot was cancelled.
    Missed,
    /// The job is over.
    Nothing,
}

impl CheckpointLoop {
    fn new(
        mut task: CheckpointTask,
        inbox: Receiver<CheckpointCommand>,
        statuses: CheckpointStatuses,
    ) -> Self {
        let snapshots = std::mem::take(&mut task.snapshots).into_iter();
        let stands_by = |snapshot: &Snapshot| task.standby_routes.contains(&snapshot.route);
        let (of_standbys, here): (Vec<_>, Vec<_>) = snapshots.partition(stands_by);
        CheckpointLoop {
            routes: here.len(),
            here,
            of_standbys,
            taken_over: HashSet::new(),
            is_new_here: false,
            is_synchronous: task.settings.consistency == Consistency::Synchronous,
            newest: task.resumed_step.unwrap_or(0),
            last: task.resumed_step,
            generation: None,
            finish: None,
            last_before: LastCheckpoint::Finish,
            goes_back_to: None,
            has_noted_begin: !task.records_begin,
            is_over: false,
            lagging: None,
            inbox,
            statuses,
            task,
        }
    }

    fn run(mut self) {
        match self.task.every {
            Every::Steps(steps) => self.every_steps(steps),
            Every::Seconds(seconds) => {
                self.note_begin();
                self.every_seconds(Duration::from_secs(seconds.get().into()));
            }
        }
        if self.finish.is_some() && !self.is_over {
            self.take_last();
        }
    }

    fn goes_on(&self) -> bool {
        self.finish.is_none() && !self.is_over
    }

    /// Has the next snapshot be one of the routes, too, that the hub has taken over. Returns whether it serves any.
    fn serve_taken_over(&mut self) -> bool {
        if self.taken_over.is_empty() {
            return self.routes > 0;
        }
        let taken_over = std::mem::take(&mut self.taken_over);
        self.here.extend(self.of_standbys.extract_if(.., |snapshot| taken_over.contains(&snapshot.route)));
        (self.routes, self.is_new_here) = (self.here.len(), true);
        self.report_newest_on_disk();
        self.routes > 0
    }

    /// Makes the cores copy. They have all the time that they need, or until `deadline`.
    fn take(&mut self, target: SnapshotTarget, deadline: Option<Instant>) -> SnapshotResult {
        debug_assert_eq!(self.here.len(), self.routes, "all have come back");
        let goes_back = self.finish.is_some() && self.last_before == LastCheckpoint::FailureForWorkers;
        for mut snapshot in self.here.drain(..) {
            snapshot.goes_back = goes_back;
            let core = &self.task.cores[&snapshot.route];
            let snapshot = Box::new(snapshot);
            core.send(CoreCommand::Arm { namespace: self.task.namespace, target, snapshot });
        }
        // The disk may be slower than the first steps, so that these would pass the version before it is asked for.
        if !self.has_noted_begin {
            self.note_begin();
        }
        let (mut called_off, mut lags_from) = (false, None);
        let mut result = SnapshotResult::All;
        self.lagging = None;
        while self.here.len() < self.routes && !self.is_over {
            let is_past = |time: Option<Instant>| time.is_some_and(|time| Instant::now() >= time);
            let (is_late, lags) = (is_past(deadline), is_past(lags_from));
            let is_stopped = self.finish.is_some() && deadline.is_none();
            if (result != SnapshotResult::All || is_late || lags || is_stopped)
                && !std::mem::replace(&mut called_off, true)
            {
                self.call_off();
            }
            let until = deadline.into_iter().chain(lags_from).min();
            if let Some(snapshot) = self.receive(until.filter(|_| !called_off)) {
                self.newest = self.newest.max(snapshot.newest);
                if let Some(step) = snapshot.goes_back_to {
                    self.goes_back_to = Some(self.goes_back_to.map_or(step, |least| least.min(step)));
                }
                match snapshot.outcome {
                    // The others will follow soon: a step is the same for all.
                    SnapshotOutcome::Complete => drop(lags_from.get_or_insert_with(|| Instant::now() + LAG)),
                    outcome => {
                        result = SnapshotResult::Missed;
                        if outcome == SnapshotOutcome::Lagging || lags && outcome == SnapshotOutcome::Disarmed
                        {
                            self.lagging = snapshot.missing_key();
                        }
                    }
                }
                self.here.push(snapshot);
            }
        }
        if self.is_over && self.here.len() < self.routes { SnapshotResult::Nothing } else { result }
    }

    fn call_off(&self) {
        for (&route, core) in &self.task.cores {
            core.send(CoreCommand::Disarm { namespace: self.task.namespace, route });
        }
    }

    /// Takes the next command, if one arrives in time.
    fn receive(&mut self, until: Option<Instant>) -> Option<Snapshot> {
        let command = match until {
            None => self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(until) => self.inbox.recv_timeout(until.saturating_duration_since(Instant::now())),
        };
        match command {
            Ok(CheckpointCommand::Snapshot(snapshot)) => return Some(*snapshot),
            Ok(CheckpointCommand::StandBy { snapshot, core }) => {
                self.task.cores.insert(snapshot.route, core);
                self.of_standbys.retain(|other| other.route != snapshot.route);
                self.of_standbys.push(*snapshot);
            }
            Ok(CheckpointCommand::GiveUp(route)) => {
                self.of_standbys.retain(|snapshot| snapshot.route != route);
            }
            Ok(CheckpointCommand::Serve(routes)) => {
                let waiting = self.of_standbys.iter().map(|snapshot| snapshot.route);
                self.taken_over = waiting.filter(|route| routes.contains(route)).collect();
            }
            Ok(CheckpointCommand::Finish { taken, before }) => {
                (self.finish, self.last_before) = (Some(taken), before);
            }
            Ok(CheckpointCommand::End) | Err(RecvTimeoutError::Disconnected) => self.is_over = true,
            Err(RecvTimeoutError::Timeout) => {}
        }
        None
    }
}
