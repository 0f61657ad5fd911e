//! The place where a frame's payload is: in the receive buffer, or in an arena.

use std::ops::Range;

use paramhub_core::codec::Codec;

use crate::core::arenas::Arenas;
use crate::core::layout::{BLOCK_ELEMENTS, ChunkPlace};

/// The payload of a frame, by its place.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Payload<'a> {
    /// The payload, empty or not, is in the receive buffer.
    Here(&'a [u8]),
    /// The payload is a tensor in the arena of the worker that sent the frame.
    InArena,
}

impl<'a> Payload<'a> {
    /// The bytes of a payload that is never in an arena.
    ///
    /// # Panics
    /// If the payload is in an arena. Only that of an operation which
    /// [carries a tensor](paramhub_core::wire::Operation::carries_tensor) can be.
    pub(super) fn here(self) -> &'a [u8] {
        match self {
            Payload::Here(bytes) => bytes,
            Payload::InArena => unreachable!("only tensors lie in arenas"),
        }
    }
}

/// Reads the chunk that begins at byte `place` of the arena of `member`, block by block. It calls `each` with
/// the range of a block's elements within the chunk, and with a copy of the block's encoded bytes: the worker
/// may write to the arena meanwhile, so nothing but a copy is safe to read.
pub(super) fn read_blocks(
    arenas: &Arenas,
    member: u32,
    place: usize,
    slot: ChunkPlace,
    codec: Codec,
    mut each: impl FnMut(Range<usize>, &[u8]),
) {
    let mut wire = [0_u8; BLOCK_ELEMENTS * Codec::F32.bytes()];
    for block in slot.blocks(BLOCK_ELEMENTS) {
        let wire = &mut wire[..block.len() * codec.bytes()];
        arenas.read(member, place + block.start * codec.bytes(), wire);
        each(block, wire);
    }
}
