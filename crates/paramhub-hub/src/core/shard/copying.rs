//! Snapshots: every chunk is copied when it comes by the wanted version, without a pause of the exchange.
//!
//! Three moments catch a chunk: the update that brings it to the version, while it is in cache; before the update that
//! would take it beyond; and, for chunks that were at the version already, turns of their own between those of streams.

use super::Shard;
use crate::core::snapshot::{Mark, Outcome, Snapshot, Wanted};

/// How far chunks may be beyond the wanted version while others are before it. Where all keys are pushed in every step, one
/// step is all.
const LAG_MAX: u32 = 8;

/// A snapshot being taken.
pub(super) struct Armed {
    wanted: Wanted,
    pub(super) snapshot: Box<Snapshot>,
    /// Slots before this one have been looked at.
    at: u32,
}

impl Shard {
    /// The memory for snapshots, for whoever will ask for them.
    pub(crate) fn hand_out_snapshot(&mut self) -> Option<Box<Snapshot>> {
        self.spare_snapshot.take()
    }

    /// From now on a snapshot is being taken.
    pub(crate) fn arm(&mut self, wanted: Wanted, mut snapshot: Box<Snapshot>) {
        snapshot.begin();
        self.armed = Some(Armed { wanted, snapshot, at: 0 });
    }

    /// Calls a snapshot off.
    pub(crate) fn disarm(&mut self) {
        if let Some(armed) = &mut self.armed
            && armed.snapshot.outcome == Outcome::Open
        {
            armed.snapshot.outcome = Outcome::Disarmed;
        }
    }

    /// Whether chunks have not been looked at yet.
    pub(crate) fn is_copying(&self) -> bool {
        self.armed.as_ref().is_some_and(|armed| {
            armed.snapshot.outcome == Outcome::Open && (armed.at as usize) < self.slots.len()
        })
    }

    /// Looks at the next chunks, and copies about so many elements of those that are at the version.
    pub(crate) fn copy_some(&mut self, elements: usize) {
        let mut copied = 0;
        while copied < elements && self.is_copying() {
            let armed = self.armed.as_mut().expect("it is copying");
            let index = armed.at;
            armed.at += 1;
            let wanted = armed.wanted;
            if !armed.snapshot.lacks(index) {
                continue;
            }
            let version = self.exchange.step(index);
            match wanted {
                // Nothing to keep yet; it would have to be waited for.
                _ if !self.exchange.has_begun(index) => self.miss_if(wanted == Wanted::Now, version),
                Wanted::Version(wanted) if version != wanted => self.miss_if(version > wanted, version),
                _ => {
                    self.copy(index, self.exchange.updates(index));
                    copied += self.slots[index as usize].elements as usize;
                }
            }
            // A glance costs something, too.
            copied += 64;
        }
    }

    /// The chunk is about to be updated beyond this version.
    #[inline]
    pub(super) fn before_update(&mut self, index: u32) {
        if let Some(Armed { wanted: Wanted::Version(wanted), .. }) = self.armed {
            // The books are ahead by the update that is due.
            let version = self.exchange.step(index).wrapping_sub(1);
            if version >= wanted && self.lacks(index) {
                match version == wanted {
                    true => self.copy(index, self.exchange.updates(index) - 1),
                    false => self.miss_if(true, version + 1),
                }
            } else if version > wanted.saturating_add(LAG_MAX) {
                self.give_up(Outcome::Lagging, version + 1);
            }
        }
    }

    /// The chunk has been updated to this version.
    #[inline]
    pub(super) fn after_update(&mut self, index: u32) {
        if let Some(Armed { wanted: Wanted::Version(wanted), .. }) = self.armed
            && self.exchange.step(index) == wanted
            && self.lacks(index)
        {
            self.copy(index, self.exchange.updates(index));
        }
    }

    /// The snapshot, if nothing more is to be expected of it.
    pub(crate) fn ended_snapshot(&mut self) -> Option<Box<Snapshot>> {
        let ended = self.armed.as_ref().is_some_and(|armed| armed.snapshot.outcome != Outcome::Open);
        if !ended {
            return None;
        }
        let Armed { wanted, mut snapshot, .. } = self.armed.take()?;
        if snapshot.outcome == Outcome::Disarmed {
            let begun = (0..self.slots.len() as u32).filter(|&index| self.exchange.has_begun(index));
            snapshot.newest = begun.map(|index| self.exchange.step(index)).max().unwrap_or(0);
        }
        let step = match wanted {
            Wanted::Version(version) => version,
            Wanted::Now => self.newest_step.saturating_add(1),
        };
        snapshot.hyperparameters.clear();
        snapshot.hyperparameters.extend(self.schedules.iter().map(|schedule| *schedule.at(step)));
        Some(snapshot)
    }

    fn lacks(&self, index: u32) -> bool {
        self.armed
            .as_ref()
            .is_some_and(|armed| armed.snapshot.outcome == Outcome::Open && armed.snapshot.lacks(index))
    }

    fn miss_if(&mut self, is_missed: bool, version: u32) {
        if is_missed {
            self.give_up(Outcome::Missed, version);
        }
    }

    fn give_up(&mut self, outcome: Outcome, newest: u32) {
        if let Some(armed) = &mut self.armed
            && armed.snapshot.outcome == Outcome::Open
        {
            (armed.snapshot.outcome, armed.snapshot.newest) = (outcome, newest);
        }
    }

    /// `updates` as its state has had them: an update may be due that is in the books already.
    fn copy(&mut self, index: u32, updates: u64) {
        let Some(armed) = &mut self.armed else { return };
        let version = match armed.wanted {
            Wanted::Version(version) => version,
            Wanted::Now => self.exchange.step(index),
        };
        let slot = &self.slots[index as usize];
        let range = slot.range();
        let received = if slot.gradient.is_quantised() { self.quantised.parameters(slot) } else { &[] };
        let state = &self.state[range.start * self.state_slots..range.end * self.state_slots];
        let mark = Mark { version, updates, steps: self.exchange.steps_of_all(index) };
        armed.snapshot.newest = armed.snapshot.newest.max(version);
        armed.snapshot.take(index, &self.model[range], state, received, mark);
    }
}
