//! The parameters and the optimizer's state of a shard's chunks.

use std::ops::Range;

use paramhub_core::codec::Codec;
use paramhub_kernels::{convert, shared};

use crate::core::buffer::{Buffer, OutOfMemory, Pages};
use crate::core::layout::{BLOCK_ELEMENTS, ChunkPlace, Layout, block_elements};
use crate::core::plan::ShardPlan;

/// The parameters of all chunks of a shard, each chunk at the offset of its slot, and their optimizer state.
pub(in crate::core) struct Model {
    pub(super) parameters: Buffer,
    /// The optimizer's state: as many values for each parameter as the optimizer has state slots.
    /// [`ChunkPlace::state_blocks`] says in which order they lie.
    pub(super) state: Buffer,
    /// The parameters of keys that are not f32 as they travel in frames, with 2 bytes for each element, at
    /// the same element offsets as in `parameters`. It is empty if all keys are f32.
    pub(super) encoded: Buffer<u8>,
    /// The number of values of state that the optimizer keeps for each parameter.
    pub(super) state_slots: usize,
    /// The largest number of elements that the optimizer gets at once.
    pub(super) block_elements: usize,
}

impl Model {
    pub(super) fn new(plan: &ShardPlan, layout: &Layout) -> Result<Model, OutOfMemory> {
        // The optimizer reads parameters and state together, so their skews differ.
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

    /// The parameters and the state of a block: a range of elements that the optimizer gets at once.
    pub(super) fn block_mut(&mut self, range: Range<usize>) -> (&mut [f32], &mut [f32]) {
        let state = range.start * self.state_slots..range.end * self.state_slots;
        (&mut self.parameters[range], &mut self.state[state])
    }

    /// Prefetches the parameters and the state of a block that the optimizer gets soon.
    pub(super) fn prefetch(&self, range: Range<usize>) {
        let state = range.start * self.state_slots..range.end * self.state_slots;
        shared::prefetch(bytemuck::cast_slice(&self.parameters[range]));
        shared::prefetch(bytemuck::cast_slice(&self.state[state]));
    }

    /// Encodes the parameters of a range of elements as they travel in frames, and returns their bytes.
    pub(super) fn encode(&mut self, range: Range<usize>, codec: Codec) -> &[u8] {
        encode(&self.parameters[range.clone()], &mut self.encoded, range, codec)
    }

    /// Encodes the parameters that ranks have in place of those of the model, and returns their bytes.
    pub(super) fn encode_of_ranks<'a>(
        &'a mut self,
        parameters: &'a [f32],
        range: Range<usize>,
        codec: Codec,
    ) -> &'a [u8] {
        encode(parameters, &mut self.encoded, range, codec)
    }

    /// The bytes of a chunk's parameters as they travel in frames. They were encoded when they last changed.
    pub(super) fn encoded(&self, slot: &ChunkPlace) -> &[u8] {
        match slot.parameter {
            Codec::F32 => bytemuck::cast_slice(&self.parameters[slot.range()]),
            _ => &self.encoded[slot.encoded_range()],
        }
    }

    /// The state of a chunk.
    pub(super) fn state_of(&self, slot: &ChunkPlace) -> &[f32] {
        let range = slot.range();
        &self.state[range.start * self.state_slots..range.end * self.state_slots]
    }

    /// Begins a chunk with the parameters and the state of a checkpoint. The arrays of both must have been
    /// touched up to the end of this chunk, and `encoded` as a whole: a core restores the first chunks while
    /// the memory for later ones has not been touched.
    pub(super) fn restore(&mut self, slot: &ChunkPlace, parameters: &[f32], state: &[f32]) {
        let range = slot.range();
        let target = self.parameters.part_mut(range.clone());
        target.copy_from_slice(parameters);
        encode(target, &mut self.encoded, range.clone(), slot.parameter);
        self.state
            .part_mut(range.start * self.state_slots..range.end * self.state_slots)
            .copy_from_slice(state);
    }

    /// Begins a slot of a chunk's state with values as they travel.
    pub(super) fn begin_state(&mut self, slot: ChunkPlace, state_slot: usize, mut values: &[u8]) {
        for block in slot.state_blocks(self.state_slots, state_slot, self.block_elements) {
            let (wire, rest) = values.split_at(block.len() * size_of::<f32>());
            convert::decode(wire, &mut self.state[block], Codec::F32);
            values = rest;
        }
    }

    /// Sets the state of a chunk to zero, with which every optimizer begins.
    pub(super) fn clear_state(&mut self, slot: &ChunkPlace) {
        let range = slot.range();
        self.state[range.start * self.state_slots..range.end * self.state_slots].fill(0.0);
    }

    /// Calls `each` for every array of the model, so that the memory of all is touched and freed in parts.
    pub(super) fn each_array(&mut self, each: &mut dyn FnMut(&mut dyn Pages)) {
        each(&mut self.parameters);
        each(&mut self.state);
        each(&mut self.encoded);
    }
}

/// Encodes parameters as they travel in frames, and returns their bytes. `range` is that of their elements in
/// the shard's arrays. Parameters in f32 travel as they are; every other codec of parameters takes 2 bytes
/// for each element.
fn encode<'a>(parameters: &'a [f32], encoded: &'a mut [u8], range: Range<usize>, codec: Codec) -> &'a [u8] {
    match codec {
        Codec::F32 => bytemuck::cast_slice(parameters),
        _ => {
            let wire = &mut encoded[range.start * 2..range.end * 2];
            convert::encode(parameters, wire, codec);
            wire
        }
    }
}
