//! The thread that orders a job's checkpoints and writes them.
//!
//! It owns the memory of one snapshot, which is with the cores while they copy and here while it is written;
//! checkpoints that are due meanwhile are skipped. The version of a checkpoint of "now" cannot be known from
//! outside, so the thread tries. A version that the job has passed comes back as missed, with the version
//! that the job has reached, and the next try aims a little further.
//!
//! In a job with standbys the hub that serves a route writes its chunks. A hub that takes a route over writes them from the next
//! checkpoint on; that of a step for which the lost hub has not written its part is not whole.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU32;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::checkpoint::{CheckpointStatus, Every};
use paramhub_core::consistency::Consistency;
use paramhub_core::job_control::{LAST_CHECKPOINT, LastCheckpoint};
use paramhub_core::service::HubJobCheckpoints;
use paramhub_core::settings::Settings;
use tracing::{info, warn};

use super::folder::JobFolder;
use super::manifest::{FORMAT, Manifest};
use super::write::{now_ms, write};
use crate::core::{CoreCommand, CoreHandle, Snapshot, SnapshotOutcome, SnapshotTarget};

/// The time that one try of the last checkpoint may take: workers that have stopped bring no later version.
const LAST_TRY: Duration = Duration::from_millis(300);
/// The time that other cores may take to reach a version that one of them has passed.
const LAG: Duration = Duration::from_secs(60);
/// The furthest that a try aims ahead, in versions.
const AHEAD_MAX: u32 = 1 << 16;
/// Checkpoints in a row that were due and not missed, after which they are taken as often as requested again.
const STREAK: u32 = 4;

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

/// The state of each job's checkpoints, for reports to the manager.
#[derive(Clone, Debug, Default)]
pub(crate) struct CheckpointStatuses(Arc<Mutex<HashMap<Namespace, (CheckpointStatus, bool)>>>);

impl CheckpointStatuses {
    /// The state for all jobs; it lists a job that is over one last time.
    pub(crate) fn read(&self) -> Vec<HubJobCheckpoints> {
        let mut statuses = self.0.lock().expect("no panic while holding it");
        let all = statuses
            .iter()
            .map(|(&namespace, (status, _))| HubJobCheckpoints { namespace, status: status.clone() });
        let all = all.collect();
        statuses.retain(|_, (_, is_over)| !*is_over);
        all
    }

    fn change(&self, namespace: Namespace, change: impl FnOnce(&mut CheckpointStatus)) {
        change(&mut self.0.lock().expect("no panic while holding it").entry(namespace).or_default().0);
    }

    fn end(&self, namespace: Namespace) {
        if let Some((_, is_over)) = self.0.lock().expect("no panic while holding it").get_mut(&namespace) {
            *is_over = true;
        }
    }
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

    /// Reports the newest checkpoint that is whole: the hub before this one may not have written its part of the last.
    fn report_newest_on_disk(&self) {
        let CheckpointTask { name, namespace, folder, .. } = &self.task;
        match folder.newest_of(*namespace) {
            Ok(newest) => self.statuses.change(*namespace, |status| {
                status.step = newest.as_ref().map(|found| found.step);
                status.written_at = newest.as_ref().map_or(0, |found| found.written_ms() / 1000);
            }),
            Err(error) => warn!("job `{name}`: {} cannot be read: {error}", folder.path().display()),
        }
    }

    /// Takes checkpoints at multiples of `steps`. If the job is too fast for all of them, it takes every
    /// second, fourth and so on: several hubs then skip the same ones, and those of the slowest hub are
    /// complete.
    fn every_steps(&mut self, steps: NonZeroU32) {
        let (mut shift, mut streak) = (0_u32, 0);
        while self.goes_on() {
            if !self.serve_taken_over() {
                self.receive(None);
                continue;
            }
            let stride = u64::from(steps.get()) << shift;
            let due = (u64::from(self.newest.max(self.last.unwrap_or(0))) / stride + 1) * stride;
            let Ok(due) = u32::try_from(due) else { return self.wait_for_the_end() };
            let (begun, before) = (Instant::now(), self.last);
            let was_new_here = std::mem::take(&mut self.is_new_here);
            match self.take(SnapshotTarget::Version(due), None) {
                SnapshotResult::All => {
                    let skipped =
                        due.saturating_sub(before.unwrap_or(0)).div_ceil(steps.get()).saturating_sub(1);
                    self.write(due, begun, skipped);
                    streak += 1;
                    if streak >= STREAK && shift > 0 {
                        (shift, streak) = (shift - 1, 0);
                    }
                }
                SnapshotResult::Missed if self.report_lagging_key() || was_new_here => {}
                SnapshotResult::Missed if self.goes_on() => (shift, streak) = ((shift + 1).min(31), 0),
                SnapshotResult::Missed | SnapshotResult::Nothing => {}
            }
        }
    }

    /// Reports the key that keeps the job from having checkpoints; `false` if there is none.
    fn report_lagging_key(&mut self) -> bool {
        let Some(key) = self.lagging.take() else { return false };
        let key = &self.task.settings.keys.keys()[key as usize].name;
        let reason = format!(
            "there is no checkpoint where key `{key}` is not updated in every step with the others: no step is common to all"
        );
        self.statuses.change(self.task.namespace, |status| {
            if status.failure != reason {
                warn!("job `{}`: {reason}", self.task.name);
            }
            status.failed += 1;
            status.failure = reason;
        });
        true
    }

    fn every_seconds(&mut self, pause: Duration) {
        let mut due = Instant::now() + pause;
        while self.goes_on() {
            if !self.serve_taken_over() {
                self.receive(None);
                continue;
            }
            if !self.wait_until(due) {
                continue;
            }
            due = Instant::now() + pause;
            let begun = Instant::now();
            let mut ahead = 0;
            loop {
                let version = self.version_ahead(ahead);
                match self.take(version.map_or(SnapshotTarget::Now, SnapshotTarget::Version), None) {
                    SnapshotResult::All => {
                        let late = begun.elapsed().as_millis() / pause.as_millis().max(1);
                        self.write(version.unwrap_or_else(|| self.steps_taken()), begun, late as u32);
                        break;
                    }
                    SnapshotResult::Missed if self.report_lagging_key() => break,
                    SnapshotResult::Missed if self.goes_on() => ahead = (ahead * 2).clamp(1, AHEAD_MAX),
                    SnapshotResult::Missed | SnapshotResult::Nothing => break,
                }
            }
        }
    }

    /// Takes a checkpoint before the job ends, if the workers reach a step together within some time.
    fn take_last(&mut self) {
        if !self.serve_taken_over() {
            self.finish = None;
            return;
        }
        let deadline = Instant::now() + LAST_CHECKPOINT;
        let (begun, mut tries, mut ahead, mut result) = (Instant::now(), 0, 0, SnapshotResult::Missed);
        let mut version = None;
        while result == SnapshotResult::Missed && !self.is_over && Instant::now() < deadline {
            version = match self.last_before {
                // The first try only asks to which version the chunks of lost workers can go back.
                LastCheckpoint::FailureForWorkers if tries == 0 && self.is_synchronous => Some(u32::MAX),
                _ => self.goes_back_to.or(self.version_ahead(ahead)),
            };
            let asked = Instant::now();
            let target = version.map_or(SnapshotTarget::Now, SnapshotTarget::Version);
            result = self.take(target, Some((asked + LAST_TRY).min(deadline)));
            tries += 1;
            // The first try shows which version the job has reached, and one that ran out of time was too far
            // ahead.
            let knows_better = tries == 1 || asked.elapsed() >= LAST_TRY;
            ahead = if knows_better { 0 } else { (ahead * 2).clamp(1, AHEAD_MAX) };
        }
        if self.last_before == LastCheckpoint::Finish && !self.is_over {
            self.note_finish(match result {
                SnapshotResult::All => version.unwrap_or_else(|| self.steps_taken()),
                SnapshotResult::Missed | SnapshotResult::Nothing => self.newest,
            });
        }
        let finish = self.finish.take();
        if self.last_before != LastCheckpoint::FailureForWorkers {
            drop(finish);
        }
        let name = &self.task.name;
        match result {
            SnapshotResult::All => {
                let version = version.unwrap_or_else(|| self.steps_taken());
                self.write(version, begun, 0);
            }
            SnapshotResult::Missed => warn!(
                "job `{name}` ends without a last checkpoint: within {} s its workers reached no step together; the newest is {}",
                LAST_CHECKPOINT.as_secs(),
                self.last.map_or("none".to_string(), |step| format!("of step {step}"))
            ),
            SnapshotResult::Nothing => {}
        }
    }

    /// Records that the run has begun, before it has a checkpoint: a later run of the name may go on with this one.
    fn note_begin(&mut self) {
        self.has_noted_begin = true;
        let CheckpointTask { name, namespace, folder, resumed_from, hub, .. } = &self.task;
        if let Err(error) = folder.note_begin(*namespace, resumed_from.as_deref(), *hub) {
            warn!(
                "job `{name}`: {} cannot say that this run has begun: {error}. After a crash it does not go on by itself \
                 (`resume = auto`)",
                folder.path().display()
            );
        }
    }

    /// Records that the run has finished, before its name is free for another that would go on with it.
    fn note_finish(&self, step: u32) {
        let CheckpointTask { name, namespace, folder, hub, .. } = &self.task;
        if let Err(error) = folder.note_finish(*namespace, step, *hub) {
            warn!(
                "job `{name}`: {} cannot say that this run has finished: {error}. A later run of the name with `resume = \
                 auto` would go on with it",
                folder.path().display()
            );
        }
    }

    /// A version that no chunk has passed, as far as is known; `None` if there is no common version.
    fn version_ahead(&self, ahead: u32) -> Option<u32> {
        let least = self.last.filter(|_| self.finish.is_none()).map_or(1, |last| last.saturating_add(1));
        self.is_synchronous.then(|| self.newest.saturating_add(ahead).max(least))
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

    /// Waits until `due`; `false` if a command has come first.
    fn wait_until(&mut self, due: Instant) -> bool {
        while self.goes_on() && Instant::now() < due {
            self.receive(Some(due));
        }
        self.goes_on()
    }

    fn wait_for_the_end(&mut self) {
        while self.goes_on() {
            self.receive(None);
        }
    }

    /// If there is no common version: the steps to which all workers have contributed in every chunk.
    fn steps_taken(&self) -> u32 {
        let marks = self.here.iter().flat_map(|snapshot| snapshot.chunks());
        marks.map(|(.., mark)| mark.steps).min().unwrap_or(0)
    }

    /// Writes the copies that are here, unless that step is on the disk already.
    fn write(&mut self, step: u32, begun: Instant, skipped: u32) {
        if self.last == Some(step) {
            return;
        }
        let CheckpointTask { name, namespace, settings, folder, .. } = &self.task;
        let about = Manifest {
            format: FORMAT,
            job: name.clone(),
            namespace: *namespace,
            hub: self.task.hub,
            step,
            is_consistent: self.is_synchronous,
            generation: 0,
            written_ms: 0,
            workers: self.task.workers,
            optimizer: settings.optimizer.name.clone(),
            hyperparameters: self.here[0].hyperparameters.clone(),
            exact: Vec::new(),
            state_slots: self.here[0].state_slots(),
            keys: settings.keys.clone(),
            files: Vec::new(),
            tensors: Vec::new(),
            program_states: Vec::new(),
        };
        let generation = self.generation.map_or_else(|| folder.next_generation(*namespace), Ok);
        let written = generation.and_then(|generation| {
            self.generation = Some(generation);
            write(folder, &self.here, Manifest { generation, ..about })
        });
        // Not on a core, to which the snapshots return.
        self.here.iter_mut().for_each(|snapshot| snapshot.program_states.clear());
        let seconds = begun.elapsed().as_secs_f64();
        match written {
            Ok(part) => {
                let bytes = part.bytes();
                info!(
                    "job `{name}`: checkpoint of step {step} written, {} MiB in {seconds:.2} s{}",
                    bytes.div_ceil(1 << 20),
                    if skipped > 0 {
                        format!("; {skipped} due since the last were skipped")
                    } else {
                        String::new()
                    }
                );
                self.last = Some(step);
                self.newest = self.newest.max(step);
                self.statuses.change(*namespace, |status| {
                    status.step = Some(step);
                    status.written_at = now_ms() / 1000;
                    (status.bytes, status.seconds) = (bytes, seconds);
                    status.written += 1;
                    status.skipped += u64::from(skipped);
                    status.failure.clear();
                });
                if let Err(error) = folder.prune(self.task.keep, *namespace, step) {
                    warn!("job `{name}`: old checkpoints in {} stay: {error}", folder.path().display());
                }
            }
            Err(error) => {
                let reason = format!(
                    "the checkpoint of step {step} cannot be written to {}: {error}. The job goes on, and it is tried again",
                    folder.path().display()
                );
                warn!("job `{name}`: {reason}");
                self.newest = self.newest.max(step);
                self.statuses.change(*namespace, |status| {
                    status.failed += 1;
                    status.failure = reason;
                });
            }
        }
    }
}
