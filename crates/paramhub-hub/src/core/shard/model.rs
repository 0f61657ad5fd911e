//! The parameters and the optimizer's state of a shard's chunks.

use std::ops::Range;

use paramhub_core::codec::Codec;
use paramhub_kernels::{convert, shared};

use crate::core::buffer::{Buffer, OutOfMemory, Pages};
use crate::core::layout::{BLOCK_ELEMENTS, Layout, Slot, block_elements};
use crate::core::plan::ShardPlan;

/// The parameters of all chunks, each at its slot's offset, and their optimizer state.
pub(in crate::core) struct Model {
    pub(super) parameters: Buffer,
    /// As many times as large as the parameters as the optimizer has state slots; see [`Slot::state_blocks`].
    pub(super) state: Buffer,
    /// The parameters encoded for keys that are not f32, at the same offsets; empty if all keys are f32.
    pub(super) encoded: Buffer<u8>,
    pub(super) state_slots: usize,
    /// The largest number of elements that the optimizer gets at once.
    pub(super) block_elements: usize,
}

impl Model {
    pub(super) fn new(plan: &ShardPlan, layout: &Layout) -> Result<Model, OutOfMemory> {
        Ok(Model {
            parameters: Buffer::reserved(layout.elements, 0)?,
            state: Buffer::reserved(layout.elements * layout.state_slots, 2)?,
            encoded: Buffer::reserved(layout.encoded_bytes, 0)?,
            state_slots: layout.state_slots,
            block_elements: block_elements(plan),
        })
    }

    /// Returns whether the optimizer gets whole chunks.
    pub(super) fn is_by_chunk(&self) -> bool {
        self.block_elements > BLOCK_ELEMENTS
    }

    /// Parameters and state of a range of elements that the optimizer gets at once.
    pub(super) fn block_mut(&mut self, at: Range<usize>) -> (&mut [f32], &mut [f32]) {
        let state = at.start * self.state_slots..at.end * self.state_slots;
        (&mut self.parameters[at], &mut self.state[state])
    }

    /// Asks the processor for parameters and state that are needed soon.
    pub(super) fn prefetch(&self, at: Range<usize>) {
        let state = at.start * self.state_slots..at.end * self.state_slots;
        shared::prefetch(bytemuck::cast_slice(&self.parameters[at]));
        shared::prefetch(bytemuck::cast_slice(&self.state[state]));
    }

    /// Encodes the parameters of a range of elements as they travel, and returns them.
    pub(super) fn encode(&mut self, at: Range<usize>, codec: Codec) -> &[u8] {
        encode(&self.parameters[at.clone()], &mut self.encoded, at, codec)
    }

    /// A chunk's parameters as they travel, which were encoded when they last changed.
    pub(super) fn encoded(&self, slot: &Slot) -> &[u8] {
        match slot.parameter {
            Codec::F32 => bytemuck::cast_slice(&self.parameters[slot.range()]),
            _ => &self.encoded[slot.encoded_range()],
        }
    }

    /// The state of a chunk.
    pub(super) fn state_of(&self, slot: &Slot) -> &[f32] {
        let range = slot.range();
        &self.state[range.start * self.state_slots..range.end * self.state_slots]
    }

    /// Begins a chunk with restored parameters and state. Memory behind the chunk need not have been touched.
    pub(super) fn restore(&mut self, slot: &Slot, parameters: &[f32], state: &[f32]) {
        let range = slot.range();
        let model = self.parameters.part_mut(range.clone());
        model.copy_from_slice(parameters);
        encode(model, &mut self.encoded, range.clone(), slot.parameter);
        self.state
            .part_mut(range.start * self.state_slots..range.end * self.state_slots)
            .copy_from_slice(state);
    }

    /// Calls `each` for its arrays.
    pub(super) fn each_array(&mut self, each: &mut dyn FnMut(&mut dyn Pages)) {
        each(&mut self.parameters);
        each(&mut self.state);
        each(&mut self.encoded);
    }
}

/// Encodes parameters as they travel; `at` is their range in the shard's arrays.
fn encode<'a>(parameters: &'a [f32], encoded: &'a mut [u8], at: Range<usize>, codec: Codec) -> &'a [u8] {
    match codec {
        Codec::F32 => bytemuck::cast_slice(parameters),
        _ => {
            let wire = &mut encoded[at.start * 2..at.end * 2];
            convert::encode(parameters, wire, codec);
            wire
        }
    }
}
