//! The tensor of a frame, in the receive buffer or in an arena.

use std::ops::Range;

use paramhub_core::codec::Codec;

use crate::core::arenas::Arenas;
use crate::core::layout::{BLOCK_ELEMENTS, Slot};

/// The place of a frame's tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Payload<'a> {
    /// The tensor is in the receive buffer.
    Here(&'a [u8]),
    /// The tensor is in the arena of the rank that sent the frame.
    InArena,
}

impl<'a> Payload<'a> {
    /// The payload of a frame that carries no tensor.
    pub(super) fn here(self) -> &'a [u8] {
        match self {
            Payload::Here(bytes) => bytes,
            Payload::InArena => unreachable!("only tensors lie in arenas"),
        }
    }
}

/// Copies a chunk that starts at `place` in the arena of `rank`, block by block.
pub(super) fn read_blocks(
    arenas: &Arenas,
    rank: u32,
    place: usize,
    slot: Slot,
    codec: Codec,
    mut each: impl FnMut(Range<usize>, &[u8]),
) {
    let mut wire = [0_u8; BLOCK_ELEMENTS * Codec::F32.bytes()];
    for block in slot.blocks(BLOCK_ELEMENTS) {
        let wire = &mut wire[..block.len() * codec.bytes()];
        arenas.read(rank, place + block.start * codec.bytes(), wire);
        each(block, wire);
    }
}
