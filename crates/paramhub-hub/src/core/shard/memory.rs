//! This part takes and gives back a shard's memory: in parts, between the turns of other jobs.

use paramhub_core::exchange::Exchange;
use paramhub_core::hyperparameters::{ChangesOfMembers, Schedule};
use paramhub_core::lateness::LatenessMonitor;
use paramhub_core::norms::TensorSquares;
use paramhub_core::wire::HEADER_BYTES;
use paramhub_transport::encryption::Encryption;

use super::rewind::Copies;
use super::timing::UpdateTiming;
use super::{Arenas, Shard};
use crate::core::buffer::Pages;
use crate::core::deadlines::Deadlines;
use crate::core::factor_layers::FactorLayers;
use crate::core::layout::{ChunkPlace, Layout};
use crate::core::plan::ShardPlan;
use crate::core::quantised::Quantised;
use crate::core::restored::{RestoreProgress, Restored};
use crate::core::snapshot::Snapshot;

/// Bytes that a shard of the plan will take, so that a job can be refused before anything is allocated.
pub(crate) fn memory_bytes(plan: &ShardPlan) -> u64 {
    let layout = Layout::new(plan);
    let quantised = Quantised::memory_bytes(&layout, plan.ports.workers());
    let arrays = 2 + layout.state_slots + layout.parked_members + Copies::arrays(plan, &layout);
    let books = Exchange::memory_bytes(layout.rules, layout.slots.len() as u32);
    let squares = if layout.rules.two_phase { size_of::<[f64; 2]>() } else { 0 };
    let of_tensors = if plan.optimizer.needs_tensor_norms() { size_of::<TensorSquares>() } else { 0 };
    let slots = layout.slots.len() as u64 * (size_of::<ChunkPlace>() + squares + 2 * of_tensors) as u64
        // The sums of all keys, and the payload of the Norm.
        + (2 * plan.settings.keys.len() * of_tensors) as u64;
    // Each stream has the frame that it may spill, and the one that a read has cut off.
    let frame_bytes_max = plan.frame_bytes_max();
    let encryption = if plan.encrypts { Encryption::memory_bytes(frame_bytes_max + HEADER_BYTES) } else { 0 };
    let streams =
        u64::from(plan.ports.len()) * (layout.payload_bytes_max + frame_bytes_max + encryption) as u64;
    let changes = if plan.loses_workers() { ChangesOfMembers::memory_bytes(plan.ports.workers()) } else { 0 };
    let schedules = plan.groups.len() as u64 * (Schedule::MEMORY_BYTES + changes);
    let deadlines =
        if plan.stragglers.leaves_out() { Deadlines::memory_bytes(layout.slots.len()) } else { 0 };
    let snapshot = if plan.checkpoints { Snapshot::memory_bytes(plan, &layout) } else { 0 };
    layout.elements as u64 * 4 * arrays as u64
        + layout.encoded_bytes as u64
        + layout.crossing_bytes as u64
        + layout.lost_elements as u64 * 4
        + layout.apart_elements as u64 * 4
        + quantised
        + books
        + slots
        + streams
        + schedules
        + deadlines
        + LatenessMonitor::memory_bytes(layout.slots.len())
        + snapshot
        + plan.program_states_memory_bytes()
        + FactorLayers::memory_bytes(plan, &layout)
}

impl Shard {
    /// Sets what the chunks begin with, if a checkpoint has it.
    pub(super) fn begin_restoring(&mut self, mut restored: Restored) {
        self.newest_step = restored.step;
        self.counters.steps = restored.step.into();
        for (rank, bytes) in std::mem::take(&mut restored.program_states) {
            self.program_states.restore(rank, restored.step, bytes);
        }
        self.restoring = (!self.slots.is_empty()).then_some(RestoreProgress { restored, at: 0 });
    }

    /// Touches the next pages, or restores the next chunks, about `bytes` bytes. `false` when all is done and
    /// frames may come.
    pub(crate) fn open_some(&mut self, bytes: usize) -> bool {
        let mut left = bytes;
        while let Some(mut restoring) = self.restoring.take() {
            self.restore_next(&mut restoring, &mut left);
            if (restoring.at as usize) < self.slots.len() {
                self.restoring = Some(restoring);
            }
            if left == 0 {
                return true;
            }
        }
        self.each_array(&mut |array| touch(array, &mut left));
        left == 0
    }

    /// Restores the next chunk, or touches some of the pages that it needs. Pages that hold nothing restored
    /// are touched afterwards, in the memory that the restored state has left.
    fn restore_next(&mut self, restoring: &mut RestoreProgress, left: &mut usize) {
        let slot = self.slots[restoring.at as usize];
        let (range, slots) = (slot.range(), self.model.state_slots);
        touch(&mut self.model.encoded, left);
        self.quantised.each_array(&mut |array| touch(array, left));
        for (array, end) in
            [(&mut self.model.parameters, range.end), (&mut self.model.state, range.end * slots)]
        {
            while !array.reaches(end) && *left > 0 {
                touch(array, left);
            }
        }
        if *left > 0 {
            self.restore(restoring.at, &restoring.restored);
            *left = left.saturating_sub(range.len() * (1 + slots) * size_of::<f32>());
            restoring.restored.forget_up_to(restoring.at);
            restoring.at += 1;
        }
    }

    /// Begins a chunk with the checkpoint's state.
    fn restore(&mut self, index: u32, restored: &Restored) {
        let slot = self.slots[index as usize];
        self.model.restore(&slot, restored.parameters(index), restored.state(index));
        // The state arrives as if from a site above. No member has contributed, and the counts were checked
        // when they were read.
        let known = self.exchange.initialise_state(index, None, restored.updates[index as usize]);
        known.and_then(|_| self.exchange.initialise(index, None, restored.step)).expect("a new chunk");
        if self.exchange.has_standby() {
            // The standby has read the same checkpoint: the job does not begin before all its hubs have.
            self.exchange.acknowledged(index, restored.step).expect("it is the chunk's version");
        }
        if slot.gradient.is_quantised() {
            self.quantised.start(&slot, restored.received(index));
        }
    }

    /// Saves what has begun to leave: the job is over, and nothing reads or writes the arrays any more, which
    /// [`free_some`](Self::free_some) gives back. Returns the memory that the job's ranks have shared.
    pub(crate) fn close(&mut self) -> Arenas {
        self.spill_all();
        for outbox in &mut self.outboxes {
            outbox.forget();
        }
        (0..self.plan.ports.workers()).for_each(|worker| self.program_states.cut(worker));
        self.timing = UpdateTiming::WhenComplete;
        self.factors.stop();
        std::mem::replace(&mut self.arenas, Arenas::new(self.plan.ports.workers()))
    }

    /// Gives back about `bytes` bytes of pages. `false` when none are left.
    pub(crate) fn free_some(&mut self, bytes: usize) -> bool {
        let mut left = bytes;
        self.each_array(&mut |array| {
            if left > 0 {
                left = left.saturating_sub(array.free_some(left));
            }
        });
        while left > 0
            && let Some(RestoreProgress { restored, at }) = &mut self.restoring
        {
            let Some(slot) = self.slots.get(*at as usize) else {
                self.restoring = None;
                break;
            };
            restored.forget_up_to(*at);
            *at += 1;
            left =
                left.saturating_sub(slot.elements as usize * (1 + self.model.state_slots) * size_of::<f32>());
        }
        while left > 0
            && let Some(bytes) = self.program_states.free_one()
        {
            left = left.saturating_sub(bytes);
        }
        if left == 0 {
            return true;
        }
        self.counters.memory_bytes = 0;
        false
    }

    /// Bytes of its arrays that have been written, and of the state that is still to be copied there.
    #[cfg(test)]
    pub(crate) fn touched_bytes(&mut self) -> u64 {
        let mut bytes = self.restoring.as_ref().map_or(0, |restoring| restoring.restored.memory_bytes());
        self.each_array(&mut |array| bytes += array.touched_bytes() as u64);
        bytes
    }

    fn each_array(&mut self, each: &mut dyn FnMut(&mut dyn Pages)) {
        self.model.each_array(each);
        self.copies.each_array(each);
        self.sums.each_array(each);
        self.quantised.each_array(each);
        self.factors.each_array(each);
        let armed = self.armed.as_mut().map(|armed| &mut armed.snapshot);
        for snapshot in self.spare_snapshot.iter_mut().chain(armed) {
            snapshot.each_array(each);
        }
    }
}

fn touch(array: &mut dyn Pages, left: &mut usize) {
    if *left > 0 {
        *left = left.saturating_sub(array.touch_some(*left));
    }
}
