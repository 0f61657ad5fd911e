//! The state with which a shard begins if its job resumes from a checkpoint.

use paramhub_core::hyperparameters::Hyperparameters;

use super::layout::{ChunkPlace, Layout, block_elements};
use super::plan::ShardPlan;

/// Parameters and optimizer state of one shard. Each chunk is stored as the shard will have it, but the first
/// chunk comes last: what the shard has copied is freed from the end, page by page as the shard takes its own
/// memory. So a job that resumes from a checkpoint never needs more memory than another.
pub(crate) struct Restored {
    /// The version at which every chunk begins. It counts from version 0, `updates` from the optimizer's
    /// first state.
    pub(crate) step: u32,
    /// The hyperparameters of each group.
    pub(crate) hyperparameters: Vec<Hyperparameters>,
    /// The program states with which ranks go on, if the shard keeps them.
    pub(crate) program_states: Vec<(u32, Vec<u8>)>,
    model: Vec<f32>,
    state: Vec<f32>,
    /// For quantised slots: the parameters as the ranks last received them, where `has_received`.
    received: Vec<f32>,
    /// For each slot, `true` if the checkpoint has what the ranks received.
    has_received: Vec<bool>,
    /// For each slot, the updates since its optimizer state was zero, which need not have been at version 0.
    /// `u64::MAX` means that none is stored yet.
    pub(super) updates: Vec<u64>,
    slots: Vec<ChunkPlace>,
    /// The number of state arrays that the optimizer keeps.
    state_slots: usize,
    block_elements: usize,
}

/// The restored state that is still to be copied into a shard.
pub(super) struct RestoreProgress {
    pub(super) restored: Restored,
    /// The first slot that has not been copied.
    pub(super) at: u32,
}

impl Restored {
    /// Room for a whole shard, or `None` if the system does not have enough memory.
    pub(crate) fn room(
        plan: &ShardPlan,
        step: u32,
        hyperparameters: Vec<Hyperparameters>,
    ) -> Option<Restored> {
        let mut layout = Layout::new(plan);
        let mut ends = [layout.elements, layout.quantised_elements];
        for slot in layout.slots.iter_mut().rev() {
            let starts = [slot.array_offset, slot.quantised_offset];
            slot.array_offset = layout.elements - ends[0];
            slot.quantised_offset = layout.quantised_elements - ends[1];
            ends = starts;
        }
        let zeros = |len: usize| {
            let mut values = Vec::new();
            values.try_reserve_exact(len).ok()?;
            values.resize(len, 0.0_f32);
            Some(values)
        };
        Some(Restored {
            step,
            hyperparameters,
            program_states: Vec::new(),
            model: zeros(layout.elements)?,
            state: zeros(layout.elements * layout.state_slots)?,
            received: zeros(layout.quantised_elements)?,
            has_received: vec![false; layout.slots.len()],
            updates: vec![u64::MAX; layout.slots.len()],
            state_slots: layout.state_slots,
            block_elements: block_elements(plan),
            slots: layout.slots,
        })
    }

    /// Frees the memory of all slots up to and including this one: they have been copied or are not needed.
    pub(super) fn forget_up_to(&mut self, index: u32) {
        let slot = self.slots[index as usize];
        let lengths = [slot.array_offset, slot.array_offset * self.state_slots, slot.quantised_offset];
        for (values, len) in [&mut self.model, &mut self.state, &mut self.received].into_iter().zip(lengths) {
            values.truncate(len);
            values.shrink_to(len);
        }
    }

    /// The parameters of a slot's chunk.
    pub(super) fn parameters(&self, index: u32) -> &[f32] {
        &self.model[self.slots[index as usize].range()]
    }

    /// The optimizer state of a slot's chunk, in the shard's form.
    pub(super) fn state(&self, index: u32) -> &[f32] {
        let range = self.slots[index as usize].range();
        &self.state[range.start * self.state_slots..range.end * self.state_slots]
    }

    /// Bytes of the parameters, the optimizer state and what ranks received that are still allocated.
    #[cfg(test)]
    pub(super) fn memory_bytes(&self) -> u64 {
        (self.model.capacity() + self.state.capacity() + self.received.capacity()) as u64 * 4
    }

    /// Stores parameters of a slot's chunk from its element `first` on.
    pub(crate) fn put_parameters(&mut self, index: u32, first: usize, values: &[f32]) {
        let start = self.slots[index as usize].array_offset + first;
        self.model[start..start + values.len()].copy_from_slice(values);
    }

    /// Stores elements of one array of a slot's optimizer state in the same way. `state_slot` numbers the
    /// array.
    pub(crate) fn put_state(&mut self, index: u32, state_slot: usize, first: usize, values: &[f32]) {
        let slot = self.slots[index as usize];
        let (mut at, end) = (0, first + values.len());
        for block in slot.state_blocks(self.state_slots, state_slot, self.block_elements) {
            let (from, to) = (first.max(at), end.min(at + block.len()));
            if from < to {
                let here = block.start + from - at..block.start + to - at;
                self.state[here].copy_from_slice(&values[from - first..to - first]);
            }
            at += block.len();
        }
    }

    /// Stores a slot's parameters as the ranks last received them, in the same way. If gradients are no
    /// longer quantised, this stores nothing: ranks lack nothing.
    pub(crate) fn put_received(&mut self, index: u32, first: usize, values: &[f32]) {
        let slot = self.slots[index as usize];
        if slot.gradient.is_quantised() {
            self.received[slot.quantised_offset + first..][..values.len()].copy_from_slice(values);
            self.has_received[index as usize] = true;
        }
    }

    /// The parameters of a slot's quantised chunk as the ranks last received them. These are the chunk's own
    /// if the checkpoint is of a job that did not quantise it.
    pub(super) fn received(&self, index: u32) -> &[f32] {
        let slot = &self.slots[index as usize];
        match self.has_received[index as usize] {
            true => &self.received[slot.quantised_offset..][..slot.elements as usize],
            false => self.parameters(index),
        }
    }

    /// Stores the number of updates that the optimizer state of some elements of a slot's chunk has had. The
    /// smallest number counts.
    pub(crate) fn put_updates(&mut self, index: u32, updates: u64) {
        let known = &mut self.updates[index as usize];
        *known = updates.min(*known);
    }
}

impl std::fmt::Debug for Restored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Restored").field("step", &self.step).finish_non_exhaustive()
    }
}
