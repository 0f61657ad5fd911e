//! When checkpoints are due, and of which version.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use paramhub_core::job_control::{LAST_CHECKPOINT, LastCheckpoint};
use tracing::warn;

use super::{CheckpointLoop, SnapshotResult};
use crate::core::SnapshotTarget;

/// The time that one try of the last checkpoint may take: workers that have stopped bring no later version.
const LAST_TRY: Duration = Duration::from_millis(300);
/// The furthest that a try aims ahead, in versions.
const AHEAD_MAX: u32 = 1 << 16;
/// Checkpoints in a row that were due and not missed, after which they are taken as often as requested again.
const STREAK: u32 = 4;

impl CheckpointLoop {
    /// Takes checkpoints at multiples of `steps`. If the job is too fast for all of them, it takes every
    /// second, fourth and so on: several hubs then skip the same ones, and those of the slowest hub are
    /// complete.
    pub(super) fn every_steps(&mut self, steps: NonZeroU32) {
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

    pub(super) fn every_seconds(&mut self, pause: Duration) {
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
    pub(super) fn take_last(&mut self) {
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

    /// A version that no chunk has passed, as far as is known; `None` if there is no common version.
    fn version_ahead(&self, ahead: u32) -> Option<u32> {
        let least = self.last.filter(|_| self.finish.is_none()).map_or(1, |last| last.saturating_add(1));
        self.is_synchronous.then(|| self.newest.saturating_add(ahead).max(least))
    }

    /// If there is no common version: the steps to which all workers have contributed in every chunk.
    fn steps_taken(&self) -> u32 {
        let marks = self.here.iter().flat_map(|snapshot| snapshot.chunks());
        marks.map(|(.., mark)| mark.steps).min().unwrap_or(0)
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
}
