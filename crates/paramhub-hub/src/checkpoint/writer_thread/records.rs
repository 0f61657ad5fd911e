//! What the writer puts on the disk, and what it reports of that.

use std::time::Instant;

use tracing::{info, warn};

use super::super::manifest::{FORMAT, Manifest};
use super::super::write::{now_ms, write};
use super::{CheckpointLoop, CheckpointTask};

impl CheckpointLoop {
    /// Writes the copies that are here, unless that step is on the disk already.
    pub(super) fn write(&mut self, step: u32, begun: Instant, skipped: u32) {
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

    /// Records that the run has begun, before it has a checkpoint: a later run of the name may go on with this one.
    pub(super) fn note_begin(&mut self) {
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
    pub(super) fn note_finish(&self, step: u32) {
        let CheckpointTask { name, namespace, folder, hub, .. } = &self.task;
        if let Err(error) = folder.note_finish(*namespace, step, *hub) {
            warn!(
                "job `{name}`: {} cannot say that this run has finished: {error}. A later run of the name with `resume = \
                 auto` would go on with it",
                folder.path().display()
            );
        }
    }

    /// Reports the newest checkpoint that is whole: the hub before this one may not have written its part of the last.
    pub(super) fn report_newest_on_disk(&self) {
        let CheckpointTask { name, namespace, folder, .. } = &self.task;
        match folder.newest_of(*namespace) {
            Ok(newest) => self.statuses.change(*namespace, |status| {
                status.step = newest.as_ref().map(|found| found.step);
                status.written_at = newest.as_ref().map_or(0, |found| found.written_ms() / 1000);
            }),
            Err(error) => warn!("job `{name}`: {} cannot be read: {error}", folder.path().display()),
        }
    }

    /// Reports the key that keeps the job from having checkpoints; `false` if there is none.
    pub(super) fn report_lagging_key(&mut self) -> bool {
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
}
