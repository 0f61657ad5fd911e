//! The thread that has a job's checkpoints taken, and writes them.
//!
//! It holds the memory of one snapshot. That is with the cores while they copy and here while it is written: what is due
//! meanwhile is skipped. Which version a checkpoint of "now" is of cannot be known from outside, so it tries: one that the
//! job has passed comes back as missed, with the version the job is at, and the next try aims a little further.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::checkpoint::{CheckpointStatus, Every};
use paramhub_core::consistency::Consistency;
use paramhub_core::service::HubJobCheckpoints;
use paramhub_core::settings::Settings;
use tracing::{info, warn};

use super::folder::JobFolder;
use super::manifest::{FORMAT, Manifest};
use super::write::{now_ms, write};
use crate::core::{CoreCommand, CoreHandle, Outcome, Snapshot, Wanted};

/// How long the last checkpoint of a job may wait for its workers.
pub(crate) const LAST: Duration = Duration::from_secs(5);
/// How long one try of it may: workers that stand still will not bring a later version.
const LAST_TRY: Duration = Duration::from_millis(300);
/// How long other cores may take to come by a version that one has passed.
const LAG: Duration = Duration::from_secs(60);
/// Furthest that a try aims ahead, in versions.
const AHEAD_MAX: u32 = 1 << 16;
/// Checkpoints in a row that were due and not missed, after which they are taken as often again as asked for.
const STREAK: u32 = 4;

/// What a keeper is told. None of it makes who tells it wait.
pub(crate) enum Word {
    /// A core has ended a snapshot.
    Snapshot(Box<Snapshot>),
    /// Take a last one; `taken` is dropped as soon as the job may end.
    Finish { taken: Taken },
    /// The job is over.
    End,
}

/// Calls what waits for a last checkpoint when it is dropped: whatever becomes of the keeper, nobody waits for ever.
pub(crate) struct Taken(Option<Box<dyn FnOnce() + Send>>);

impl Taken {
    pub(crate) fn new(call: impl FnOnce() + Send + 'static) -> Taken {
        Taken(Some(Box::new(call)))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            call();
        }
    }
}

/// What a keeper is to do.
pub(crate) struct Terms {
    pub(crate) name: String,
    pub(crate) namespace: Namespace,
    pub(crate) settings: Arc<Settings>,
    pub(crate) workers: u32,
    /// Among the job's hubs.
    pub(crate) hub: u32,
    pub(crate) every: Every,
    pub(crate) keep: usize,
    pub(crate) folder: JobFolder,
    /// The version the job began with, if it is that of a checkpoint.
    pub(crate) resumed_step: Option<u32>,
    /// By the snapshots' routes, the cores that take them.
    pub(crate) cores: HashMap<u16, CoreHandle>,
    pub(crate) snapshots: Vec<Snapshot>,
}

/// What keepers have to report, by job.
#[derive(Clone, Debug, Default)]
pub(crate) struct Board(Arc<Mutex<HashMap<Namespace, (CheckpointStatus, bool)>>>);

impl Board {
    /// Of all jobs; what is over is told this once more.
    pub(crate) fn read(&self) -> Vec<HubJobCheckpoints> {
        let mut board = self.0.lock().expect("no panic while holding it");
        let all = board
            .iter()
            .map(|(&namespace, (status, _))| HubJobCheckpoints { namespace, status: status.clone() });
        let all = all.collect();
        board.retain(|_, (_, is_over)| !*is_over);
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

/// A running keeper.
pub(crate) struct Keeper {
    words: SyncSender<Word>,
    thread: JoinHandle<()>,
}

impl Keeper {
    /// Starts one.
    pub(crate) fn start(terms: Terms, board: Board) -> std::io::Result<Keeper> {
        // A snapshot a route, and the two ends of a job.
        let (words, inbox) = sync_channel(terms.snapshots.len() + 4);
        let thread = std::thread::Builder::new().name("hub-checkpoints".into()).spawn(move || {
            let namespace = terms.namespace;
            board.change(namespace, |_| {});
            Keeping::new(terms, inbox, board.clone()).run();
            board.end(namespace);
        })?;
        Ok(Keeper { words, thread })
    }

    /// Tells it; false where it has ended.
    pub(crate) fn tell(&self, word: Word) -> bool {
        self.words.try_send(word).is_ok()
    }

    /// The thread, which ends once the job is over and what was taken is written.
    pub(crate) fn into_thread(self) -> JoinHandle<()> {
        self.thread
    }
}

struct Keeping {
    terms: Terms,
    inbox: Receiver<Word>,
    board: Board,
    /// Those that are not with the cores.
    here: Vec<Snapshot>,
    routes: usize,
    is_synchronous: bool,
    /// The newest version known.
    newest: u32,
    /// The version last written.
    last: Option<u32>,
    /// This run's generation among those that have checkpoints in the folder; it is found before the first one is written.
    generation: Option<u64>,
    finish: Option<Taken>,
    is_over: bool,
    /// A key that is not updated with the others, which the last try has met.
    lagging: Option<u32>,
}

/// How a snapshot went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Took {
    All,
    /// The job was beyond it, or it was called off.
    Missed,
    /// The job is over.
    Nothing,
}

impl Keeping {
    fn new(mut terms: Terms, inbox: Receiver<Word>, board: Board) -> Self {
        let here = std::mem::take(&mut terms.snapshots);
        Keeping {
            routes: here.len(),
            here,
            is_synchronous: terms.settings.consistency == Consistency::Synchronous,
            newest: terms.resumed_step.unwrap_or(0),
            last: terms.resumed_step,
            generation: None,
            finish: None,
            is_over: false,
            lagging: None,
            inbox,
            board,
            terms,
        }
    }

    fn run(mut self) {
        match self.terms.every {
            Every::Steps(steps) => self.every_steps(steps),
            Every::Seconds(seconds) => self.every_seconds(Duration::from_secs(seconds.get().into())),
        }
        if self.finish.is_some() && !self.is_over {
            self.leave_one();
        }
    }

    fn goes_on(&self) -> bool {
        self.finish.is_none() && !self.is_over
    }

    /// At multiples of `steps`. Where the job is too fast for all of them, at every second, fourth and so on: several hubs that
    /// skip do so alike, and what the slowest writes is complete.
    fn every_steps(&mut self, steps: NonZeroU32) {
        let (mut shift, mut streak) = (0_u32, 0);
        while self.goes_on() {
            let stride = u64::from(steps.get()) << shift;
            let due = (u64::from(self.newest.max(self.last.unwrap_or(0))) / stride + 1) * stride;
            let Ok(due) = u32::try_from(due) else { return self.wait_for_the_end() };
            let (begun, before) = (Instant::now(), self.last);
            match self.take(Wanted::Version(due), None) {
                Took::All => {
                    let skipped =
                        due.saturating_sub(before.unwrap_or(0)).div_ceil(steps.get()).saturating_sub(1);
                    self.write(due, begun, skipped);
                    streak += 1;
                    if streak >= STREAK && shift > 0 {
                        (shift, streak) = (shift - 1, 0);
                    }
                }
                Took::Missed if self.say_what_lags() => {}
                Took::Missed if self.goes_on() => (shift, streak) = ((shift + 1).min(31), 0),
                Took::Missed | Took::Nothing => {}
            }
        }
    }

    /// Says which key keeps the job from having checkpoints, if one does.
    fn say_what_lags(&mut self) -> bool {
        let Some(key) = self.lagging.take() else { return false };
        let key = &self.terms.settings.keys.keys()[key as usize].name;
        let reason = format!(
            "there is no checkpoint where key `{key}` is not updated in every step with the others: no step is common to all"
        );
        self.board.change(self.terms.namespace, |status| {
            if status.failure != reason {
                warn!("job `{}`: {reason}", self.terms.name);
            }
            status.failed += 1;
            status.failure = reason;
        });
        true
    }

    fn every_seconds(&mut self, pause: Duration) {
        let mut due = Instant::now() + pause;
        while self.goes_on() {
            if !self.wait_until(due) {
                continue;
            }
            due = Instant::now() + pause;
            let begun = Instant::now();
            let mut ahead = 0;
            loop {
                let version = self.version_ahead(ahead);
                match self.take(version.map_or(Wanted::Now, Wanted::Version), None) {
                    Took::All => {
                        let late = begun.elapsed().as_millis() / pause.as_millis().max(1);
                        self.write(version.unwrap_or_else(|| self.steps_taken()), begun, late as u32);
                        break;
                    }
                    Took::Missed if self.say_what_lags() => break,
                    Took::Missed if self.goes_on() => ahead = (ahead * 2).clamp(1, AHEAD_MAX),
                    Took::Missed | Took::Nothing => break,
                }
            }
        }
    }

    /// Before the job ends: what its workers have reached, if they reach it together within some time.
    fn leave_one(&mut self) {
        let deadline = Instant::now() + LAST;
        let (begun, mut tries, mut ahead, mut took) = (Instant::now(), 0, 0, Took::Missed);
        let mut version = None;
        while took == Took::Missed && !self.is_over && Instant::now() < deadline {
            version = self.version_ahead(ahead);
            let asked = Instant::now();
            let wanted = version.map_or(Wanted::Now, Wanted::Version);
            took = self.take(wanted, Some((asked + LAST_TRY).min(deadline)));
            tries += 1;
            // The first try tells where the job is, and one that ran out of time was too far ahead.
            let knows_better = tries == 1 || asked.elapsed() >= LAST_TRY;
            ahead = if knows_better { 0 } else { (ahead * 2).clamp(1, AHEAD_MAX) };
        }
        drop(self.finish.take());
        let name = &self.terms.name;
        match took {
            Took::All => {
                let version = version.unwrap_or_else(|| self.steps_taken());
                self.write(version, begun, 0);
            }
            Took::Missed => warn!(
                "job `{name}` ends without a last checkpoint: within {} s its workers reached no step together; the newest is {}",
                LAST.as_secs(),
                self.last.map_or("none".to_string(), |step| format!("of step {step}"))
            ),
            Took::Nothing => {}
        }
    }

    /// A version that no chunk is beyond, for all that is known; none where there is no common one.
    fn version_ahead(&self, ahead: u32) -> Option<u32> {
        let least = self.last.filter(|_| self.finish.is_none()).map_or(1, |last| last.saturating_add(1));
        self.is_synchronous.then(|| self.newest.saturating_add(ahead).max(least))
    }

    /// Has the cores copy. They get all the time they need, or until `deadline`.
    fn take(&mut self, wanted: Wanted, deadline: Option<Instant>) -> Took {
        debug_assert_eq!(self.here.len(), self.routes, "all have come back");
        for snapshot in self.here.drain(..) {
            let core = &self.terms.cores[&snapshot.route];
            let snapshot = Box::new(snapshot);
            core.send(CoreCommand::Arm { namespace: self.terms.namespace, wanted, snapshot });
        }
        let (mut called_off, mut lags_from) = (false, None);
        let mut took = Took::All;
        self.lagging = None;
        while self.here.len() < self.routes && !self.is_over {
            let is_past = |time: Option<Instant>| time.is_some_and(|time| Instant::now() >= time);
            let (is_late, lags) = (is_past(deadline), is_past(lags_from));
            let is_stopped = self.finish.is_some() && deadline.is_none();
            if (took != Took::All || is_late || lags || is_stopped)
                && !std::mem::replace(&mut called_off, true)
            {
                self.call_off();
            }
            let until = deadline.into_iter().chain(lags_from).min();
            if let Some(snapshot) = self.hear(until.filter(|_| !called_off)) {
                self.newest = self.newest.max(snapshot.newest);
                match snapshot.outcome {
                    // The others are not far: a step is the same for all.
                    Outcome::Complete => drop(lags_from.get_or_insert_with(|| Instant::now() + LAG)),
                    outcome => {
                        took = Took::Missed;
                        if outcome == Outcome::Lagging || lags && outcome == Outcome::Disarmed {
                            self.lagging = snapshot.missing_key();
                        }
                    }
                }
                self.here.push(snapshot);
            }
        }
        if self.is_over && self.here.len() < self.routes { Took::Nothing } else { took }
    }

    fn call_off(&self) {
        for (&route, core) in &self.terms.cores {
            core.send(CoreCommand::Disarm { namespace: self.terms.namespace, route });
        }
    }

    /// Takes the next word, if one comes in time.
    fn hear(&mut self, until: Option<Instant>) -> Option<Snapshot> {
        let word = match until {
            None => self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(until) => self.inbox.recv_timeout(until.saturating_duration_since(Instant::now())),
        };
        match word {
            Ok(Word::Snapshot(snapshot)) => return Some(*snapshot),
            Ok(Word::Finish { taken }) => self.finish = Some(taken),
            Ok(Word::End) | Err(RecvTimeoutError::Disconnected) => self.is_over = true,
            Err(RecvTimeoutError::Timeout) => {}
        }
        None
    }

    /// Whether it is time; else there is other news.
    fn wait_until(&mut self, due: Instant) -> bool {
        while self.goes_on() && Instant::now() < due {
            self.hear(Some(due));
        }
        self.goes_on()
    }

    fn wait_for_the_end(&mut self) {
        while self.goes_on() {
            self.hear(None);
        }
    }

    /// Where there is no common version: the steps that all workers have contributed to every chunk.
    fn steps_taken(&self) -> u32 {
        let marks = self.here.iter().flat_map(|snapshot| snapshot.chunks());
        marks.map(|(.., mark)| mark.steps).min().unwrap_or(0)
    }

    /// Writes the copies that are here, unless that step is on the disk.
    fn write(&mut self, step: u32, begun: Instant, skipped: u32) {
        if self.last == Some(step) {
            return;
        }
        let Terms { name, namespace, settings, folder, .. } = &self.terms;
        let about = Manifest {
            format: FORMAT,
            job: name.clone(),
            namespace: *namespace,
            hub: self.terms.hub,
            step,
            is_consistent: self.is_synchronous,
            generation: 0,
            written_ms: 0,
            workers: self.terms.workers,
            optimizer: settings.optimizer.name.clone(),
            hyperparameters: self.here[0].hyperparameters.clone(),
            exact: Vec::new(),
            state_slots: self.here[0].state_slots(),
            keys: settings.keys.clone(),
            files: Vec::new(),
            tensors: Vec::new(),
        };
        let generation = self.generation.map_or_else(|| folder.next_generation(*namespace), Ok);
        let written = generation.and_then(|generation| {
            self.generation = Some(generation);
            write(folder, &self.here, Manifest { generation, ..about })
        });
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
                self.board.change(*namespace, |status| {
                    status.step = Some(step);
                    status.written_at = now_ms() / 1000;
                    (status.bytes, status.seconds) = (bytes, seconds);
                    status.written += 1;
                    status.skipped += u64::from(skipped);
                    status.failure.clear();
                });
                if let Err(error) = folder.prune(self.terms.keep, *namespace, step) {
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
                self.board.change(*namespace, |status| {
                    status.failed += 1;
                    status.failure = reason;
                });
            }
        }
    }
}
