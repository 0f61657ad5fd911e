//! Steps that end without workers who are late.

use std::time::Instant;

use paramhub_core::exchange::Update;

use super::Shard;
use crate::core::plan::Slot;

/// A rank is spoken of again when it has missed so many times as many steps.
const TOLD_AGAIN: u64 = 10;

/// What is to be told of a rank that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Late {
    pub(crate) rank: u32,
    /// Steps it was left out of, on average over the chunks here.
    pub(crate) steps: u64,
    /// Steps there were, on average over the chunks here.
    pub(crate) of: u64,
}

impl Shard {
    /// A contribution to a step that is over was dropped: its sender gets what there is now.
    pub(super) fn answer_late(&mut self, index: u32, slot: Slot) {
        self.settle(index);
        if self.arenas.has_targets() {
            self.deliver(slot, false);
        }
    }

    /// A step of the slot begins.
    pub(super) fn begin_step(&mut self, index: u32) {
        if let Some(deadlines) = &mut self.deadlines {
            deadlines.begin(index, self.now);
        }
    }

    /// A contribution has come, or nobody else will: others may come for some time yet.
    pub(super) fn look_at_median(&mut self, index: u32) {
        if let Some(deadlines) = &mut self.deadlines
            && self.exchange.has_median(index)
        {
            deadlines.median(index, self.now);
        }
    }

    /// When the next step ends that late workers are left out of by time.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.as_ref()?.next()
    }

    /// Ends steps that have had their time, of chunks of about so many elements.
    pub(crate) fn end_late(&mut self, now: Instant, elements: usize) {
        self.now = now;
        let mut done = 0;
        while done < elements
            && let Some(index) = self.deadlines.as_ref().and_then(|deadlines| deadlines.due(now))
        {
            let update = self.exchange.end_step(index).expect("the median has come");
            done += self.end_step(index, update);
        }
    }

    /// A worker has left: steps that waited for nobody else end.
    pub(super) fn end_without_it(&mut self) {
        if self.deadlines.is_none() {
            return;
        }
        for index in 0..self.slots.len() as u32 {
            match self.exchange.end_if_complete(index) {
                Some(update) => drop(self.end_step(index, update)),
                None => self.look_at_median(index),
            }
        }
    }

    /// Updates a chunk with what is in its sum.
    fn end_step(&mut self, index: u32, update: Update) -> usize {
        let slot = self.slots[index as usize];
        self.arenas.find_no_sources();
        self.optimise(index, slot, update);
        slot.elements as usize
    }

    /// Of every rank, how many updates of chunks here it was left out of; empty where all are waited for.
    pub(crate) fn left_out(&self) -> &[u64] {
        self.exchange.left_out()
    }

    /// A rank of which somebody should hear that it is left out: once it has missed a step's worth of updates, then each time
    /// it has become [`TOLD_AGAIN`] times as many. So what is said stays little however long it goes on.
    pub(crate) fn news_of_late(&mut self) -> Option<Late> {
        let left_out = self.exchange.left_out();
        let rank = left_out.iter().zip(&self.late_from).position(|(missed, from)| missed >= from)?;
        let slots = self.slots.len() as u64;
        let steps = left_out[rank] / slots;
        self.late_from[rank] = TOLD_AGAIN.saturating_pow(steps.ilog(TOLD_AGAIN) + 1).saturating_mul(slots);
        Some(Late { rank: rank as u32, steps, of: (self.counters.updates / slots).max(steps) })
    }
}
