//! This ends steps of chunks without late members.

use std::time::{Duration, Instant};

use paramhub_core::stragglers::Stragglers;

/// No deadline.
const NEVER: u64 = u64::MAX;

/// The time at which the step under way of each slot began, and when it ends at the latest. It allocates
/// all its memory at once.
#[derive(Debug)]
pub(super) struct Deadlines {
    stragglers: Stragglers,
    /// The time from which times count.
    epoch: Instant,
    /// The start of each slot's step.
    began: Vec<Instant>,
    /// A tournament tree of nanoseconds: the lesser of places 2n and 2n + 1 is at n, the least of all at 1,
    /// and slot s at `leaves + s`.
    tree: Vec<u64>,
    leaves: usize,
}

impl Deadlines {
    pub(super) fn new(stragglers: Stragglers, slots: usize, now: Instant) -> Self {
        let leaves = slots.next_power_of_two();
        Deadlines { stragglers, epoch: now, began: vec![now; slots], tree: vec![NEVER; 2 * leaves], leaves }
    }

    /// Bytes that the deadlines take.
    pub(super) fn memory_bytes(slots: usize) -> u64 {
        (slots * size_of::<Instant>() + 2 * slots.next_power_of_two() * size_of::<u64>()) as u64
    }

    /// Notes that a step of the slot begins.
    pub(super) fn begin(&mut self, slot: u32, now: Instant) {
        self.began[slot as usize] = now;
        self.put(slot, NEVER);
    }

    /// Notes that the step's median contribution has come, unless it has come before.
    pub(super) fn median(&mut self, slot: u32, now: Instant) {
        let took = now.saturating_duration_since(self.began[slot as usize]);
        if self.tree[self.leaves + slot as usize] != NEVER {
            return;
        }
        if let Some(grace) = self.stragglers.grace(took) {
            let at = now.saturating_duration_since(self.epoch).saturating_add(grace);
            self.put(slot, u64::try_from(at.as_nanos()).unwrap_or(NEVER));
        }
    }

    /// Returns the time at which the next step ends.
    pub(super) fn next(&self) -> Option<Instant> {
        let at = self.tree[1];
        (at != NEVER).then(|| self.epoch.checked_add(Duration::from_nanos(at))).flatten()
    }

    /// A slot whose step is over by time, the one that has waited longest.
    pub(super) fn due(&self, now: Instant) -> Option<u32> {
        self.next().filter(|&at| at <= now)?;
        let mut place = 1;
        while place < self.leaves {
            place = if self.tree[2 * place] == self.tree[place] { 2 * place } else { 2 * place + 1 };
        }
        Some((place - self.leaves) as u32)
    }

    fn put(&mut self, slot: u32, at: u64) {
        let mut place = self.leaves + slot as usize;
        if self.tree[place] == at {
            return;
        }
        self.tree[place] = at;
        while place > 1 {
            place /= 2;
            self.tree[place] = self.tree[2 * place].min(self.tree[2 * place + 1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_end_in_the_order_of_their_deadlines() {
        let now = Instant::now();
        let at = |ms: u64| now + Duration::from_millis(ms);
        let mut deadlines = Deadlines::new(Stragglers::Drop(0.5), 5, now);
        assert_eq!((deadlines.next(), deadlines.due(at(9999))), (None, None));
        deadlines.median(4, at(100));
        deadlines.median(0, at(40));
        deadlines.median(2, at(60));
        deadlines.median(0, at(55));
        assert_eq!(deadlines.next(), Some(at(60)), "the first half of them counts, at 40 ms");
        assert_eq!(deadlines.due(at(59)), None);
        let mut ended = Vec::new();
        while let Some(slot) = deadlines.due(at(100)) {
            ended.push(slot);
            deadlines.begin(slot, at(100));
        }
        assert_eq!((ended, deadlines.next()), (vec![0, 2], Some(at(150))));
        deadlines.median(0, at(120));
        assert_eq!(deadlines.next(), Some(at(130)), "20 ms into its step");
        deadlines.begin(0, at(125));
        assert_eq!(deadlines.due(at(149)), None, "it ended in time");
    }

    #[test]
    fn a_single_slot_is_a_tournament_too() {
        let now = Instant::now();
        let mut deadlines = Deadlines::new(Stragglers::Drop(1.0), 1, now);
        deadlines.median(0, now);
        assert_eq!(deadlines.due(now), None);
        assert_eq!(deadlines.due(now + Stragglers::GRACE_MIN), Some(0));
        let mut counted = Deadlines::new(Stragglers::Backup(1), 1, now);
        counted.median(0, now + Duration::from_secs(1));
        assert_eq!(counted.next(), None, "no clock decides");
    }
}
