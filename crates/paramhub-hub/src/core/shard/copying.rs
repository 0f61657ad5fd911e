//! Snapshots: each chunk is copied when it reaches the wanted version, without a pause of the exchange.
//!
//! A chunk is copied at one of three moments: at the update that brings it to the version, while it is in
//! cache; before the update that would take it beyond; or, if it is at the version already, in a turn of its
//! own between those of streams.
//!
//! The program states that belong to the version come a little later than its chunks: each rank saves its own before its
//! next gradient. The snapshot waits for them, at most until a chunk shows that all ranks have gone past that. A hub that has just
//! taken over for another takes none of the versions whose program states are lost with that.

use super::Shard;
use crate::core::snapshot::{ArmedSnapshot, ChunkMark, Snapshot, SnapshotOutcome, SnapshotTarget};

/// The number of versions by which chunks may be beyond the wanted one while others have not reached it. If
/// every step pushes all keys, they differ by one step at most.
const LAG_MAX: u32 = 8;

impl Shard {
    /// Hands out the memory for snapshots to the thread that will request them.
    pub(crate) fn hand_out_snapshot(&mut self) -> Option<Box<Snapshot>> {
        self.spare_snapshot.take()
    }

    /// Begins a snapshot.
    pub(crate) fn arm(&mut self, target: SnapshotTarget, mut snapshot: Box<Snapshot>) {
        snapshot.begin();
        if let SnapshotTarget::Version(version) = target
            && snapshot.goes_back
            && let Err(newest) = self.go_back_for_snapshot(version)
        {
            (snapshot.outcome, snapshot.newest) = (SnapshotOutcome::Missed, newest);
            snapshot.goes_back_to = Some(newest);
        }
        if let SnapshotTarget::Version(version) = target
            && self.lacks_program_states(version)
        {
            (snapshot.outcome, snapshot.newest) = (SnapshotOutcome::Missed, self.program_states_from - 1);
        }
        self.armed = Some(ArmedSnapshot { target, snapshot, at: 0, is_called_off: false });
    }

    /// Cancels the snapshot.
    pub(crate) fn disarm(&mut self) {
        let Some(armed) = &mut self.armed else { return };
        armed.is_called_off = true;
        if armed.snapshot.outcome == SnapshotOutcome::Open {
            armed.snapshot.outcome = SnapshotOutcome::Disarmed;
        }
    }

    /// Returns whether chunks have not been looked at yet.
    pub(crate) fn is_copying(&self) -> bool {
        self.armed.as_ref().is_some_and(|armed| {
            armed.snapshot.outcome == SnapshotOutcome::Open && (armed.at as usize) < self.slots.len()
        })
    }

    /// Looks at the next chunks, and copies about `elements` elements of those that are at the version.
    pub(crate) fn copy_some(&mut self, elements: usize) {
        let mut copied = 0;
        if self.is_copying() && self.is_rewinding() {
            self.rewind_some(elements);
            return;
        }
        while copied < elements && self.is_copying() {
            let armed = self.armed.as_mut().expect("it is copying");
            let index = armed.at;
            armed.at += 1;
            let wanted = armed.target;
            if !armed.snapshot.lacks(index) {
                continue;
            }
            let version = self.exchange.step(index);
            match wanted {
                // The chunk has no parameters yet, and a snapshot does not wait for them.
                _ if !self.exchange.has_begun(index) => self.miss_if(wanted == SnapshotTarget::Now, version),
                SnapshotTarget::Version(wanted) if version != wanted => {
                    self.miss_if(version > wanted, version)
                }
                _ => {
                    self.copy(index, self.exchange.updates(index));
                    copied += self.slots[index as usize].elements as usize;
                }
            }
            // Looking at a slot has a cost, too.
            copied += 64;
        }
    }

    /// Copies the chunk if its next update would take it beyond the version.
    #[inline]
    pub(super) fn before_update(&mut self, index: u32) {
        if let Some(ArmedSnapshot { target: SnapshotTarget::Version(wanted), .. }) = self.armed {
            // The exchange has counted the update that is due.
            let version = self.exchange.step(index).wrapping_sub(1);
            if version >= wanted && self.lacks(index) {
                match version == wanted {
                    true => self.copy(index, self.exchange.updates(index) - 1),
                    false => self.miss_if(true, version + 1),
                }
            } else if version > wanted.saturating_add(LAG_MAX) {
                self.give_up(SnapshotOutcome::Lagging, version + 1);
            }
        }
    }

    /// Copies the chunk if its update has brought it to the version.
    #[inline]
    pub(super) fn after_update(&mut self, index: u32) {
        if let Some(ArmedSnapshot { target: SnapshotTarget::Version(wanted), .. }) = self.armed
            && self.exchange.step(index) == wanted
            && self.lacks(index)
        {
            self.copy(index, self.exchange.updates(index));
        }
    }

    /// The snapshot, if it has ended.
    pub(crate) fn ended_snapshot(&mut self) -> Option<Box<Snapshot>> {
        let ended = self.armed.as_ref().is_some_and(|armed| armed.snapshot.outcome != SnapshotOutcome::Open);
        if !ended || self.awaits_program_states() {
            return None;
        }
        let ArmedSnapshot { target, mut snapshot, .. } = self.armed.take()?;
        if let (SnapshotOutcome::Complete, SnapshotTarget::Version(version)) = (snapshot.outcome, target) {
            snapshot.program_states.extend(self.program_states.of_step(version));
        }
        if snapshot.outcome == SnapshotOutcome::Disarmed {
            let begun = (0..self.slots.len() as u32).filter(|&index| self.exchange.has_begun(index));
            snapshot.newest = begun.map(|index| self.exchange.step(index)).max().unwrap_or(0);
        }
        let step = match target {
            SnapshotTarget::Version(version) => version,
            SnapshotTarget::Now => self.newest_step.saturating_add(1),
        };
        snapshot.hyperparameters.clear();
        snapshot.hyperparameters.extend(self.schedules.iter().map(|schedule| *schedule.at(step)));
        Some(snapshot)
    }

    /// Returns whether all chunks are copied, and ranks that save program states have yet to save those of the version.
    fn awaits_program_states(&self) -> bool {
        let Some(ArmedSnapshot { target: SnapshotTarget::Version(version), snapshot, is_called_off, .. }) =
            &self.armed
        else {
            return false;
        };
        snapshot.outcome == SnapshotOutcome::Complete
            && !is_called_off
            && self.newest_step < *version
            && self.may_get_program_states(*version)
    }

    /// Gives up the snapshot that is being taken: chunks go back to an earlier version.
    pub(super) fn miss_snapshot(&mut self) {
        if self.awaits_program_states()
            && let Some(armed) = &mut self.armed
        {
            // The states that would come are those of another way to the version.
            armed.snapshot.outcome = SnapshotOutcome::Open;
        }
        self.give_up(SnapshotOutcome::Missed, self.newest_step.saturating_add(1));
    }

    fn lacks(&self, index: u32) -> bool {
        self.armed.as_ref().is_some_and(|armed| {
            armed.snapshot.outcome == SnapshotOutcome::Open && armed.snapshot.lacks(index)
        })
    }

    fn miss_if(&mut self, is_missed: bool, version: u32) {
        if is_missed {
            self.give_up(SnapshotOutcome::Missed, version);
        }
    }

    fn give_up(&mut self, outcome: SnapshotOutcome, newest: u32) {
        if let Some(armed) = &mut self.armed
            && armed.snapshot.outcome == SnapshotOutcome::Open
        {
            (armed.snapshot.outcome, armed.snapshot.newest) = (outcome, newest);
        }
    }

    /// Copies a chunk. `updates` is the number that its state has had; the exchange may have counted an
    /// update that is still due.
    fn copy(&mut self, index: u32, updates: u64) {
        let Some(armed) = &mut self.armed else { return };
        let version = match armed.target {
            SnapshotTarget::Version(version) => version,
            SnapshotTarget::Now => self.exchange.step(index),
        };
        let slot = &self.slots[index as usize];
        let received = if slot.gradient.is_quantised() { self.quantised.kept(slot) } else { &[] };
        let mark = ChunkMark { version, updates, steps: self.exchange.steps_of_all(index) };
        armed.snapshot.newest = armed.snapshot.newest.max(version);
        let parameters = &self.model.parameters[slot.range()];
        armed.snapshot.take(index, parameters, self.model.state_of(slot), received, mark);
    }
}
