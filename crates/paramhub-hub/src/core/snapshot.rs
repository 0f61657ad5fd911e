//! A copy of a shard's parameters, optimizer state and quantisation residuals, all of one version, taken
//! while the exchange goes on.
//!
//! The core has its memory from the moment the job opens, passes it to the writer when the copy is complete,
//! and gets it back with the next request. [`Shard`](super::shard::Shard) makes the copy itself.

use std::sync::Arc;

use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::placement::RouteId;

use super::buffer::{Buffer, OutOfMemory, Pages, whole_lines};
use super::layout::{ChunkPlace, Layout};
use super::plan::ShardPlan;

/// The place of a slot that does not belong to the snapshot.
const NONE: u32 = u32::MAX;

/// The version that a snapshot must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SnapshotTarget {
    /// Each chunk exactly at this version.
    Version(u32),
    /// Each chunk as it is in its turn: there is no common version if members do not take steps together.
    Now,
}

/// The state of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SnapshotOutcome {
    /// Chunks are missing.
    Open,
    /// All chunks are here.
    Complete,
    /// Some chunk was beyond the wanted version before it could be copied.
    Missed,
    /// Other chunks went far beyond the wanted version while some chunk was still before it: they are not
    /// updated together.
    Lagging,
    /// It was cancelled.
    Disarmed,
}

/// The state of a copied chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChunkMark {
    pub(crate) version: u32,
    /// Updates that its optimizer state has had.
    pub(crate) updates: u64,
    /// Steps to which every member had contributed.
    pub(crate) steps: u32,
}

/// A chunk's place in a snapshot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    slot: ChunkPlace,
}

/// The copy of those chunks of a shard that this hub must keep: their sums do not go to a site above.
pub(crate) struct Snapshot {
    pub(crate) route: RouteId,
    pub(crate) outcome: SnapshotOutcome,
    /// The newest version of a chunk that was seen.
    pub(crate) newest: u32,
    /// Whether chunks whose members are lost go back to the wanted version, since the job ends after this.
    pub(crate) goes_back: bool,
    /// In a job whose members are to go back: the newest version to which the chunks here can go back, if they
    /// cannot to the wanted one.
    pub(crate) goes_back_to: Option<u32>,
    /// The hyperparameters of each group at the wanted version.
    pub(crate) hyperparameters: Vec<Hyperparameters>,
    /// The program states with which ranks go on from the wanted version, if they are kept at this route.
    pub(crate) program_states: Vec<(u32, Arc<Vec<u8>>)>,
    pieces: Arc<[Piece]>,
    marks: Vec<ChunkMark>,
    taken: Vec<bool>,
    missing: usize,
    /// The piece of each slot of the shard.
    piece_of: Arc<[u32]>,
    model: Buffer,
    state: Buffer,
    /// For quantised chunks: the parameters that ranks have.
    received: Buffer,
    state_slots: usize,
    block_elements: usize,
}

/// A snapshot that is being taken.
pub(super) struct ArmedSnapshot {
    pub(super) target: SnapshotTarget,
    pub(super) snapshot: Box<Snapshot>,
    /// The first slot that has not been looked at.
    pub(super) at: u32,
    /// Whether it waits for nothing more.
    pub(super) is_called_off: bool,
}

impl Snapshot {
    /// A snapshot with room that is not touched yet; `None` if this hub must keep none of the chunks.
    pub(super) fn new(
        plan: &ShardPlan,
        layout: &Layout,
        block_elements: usize,
    ) -> Result<Option<Box<Snapshot>>, OutOfMemory> {
        let (mut offset, mut received, mut pieces) = (0, 0, Vec::new());
        let mut piece_of = vec![NONE; layout.slots.len()];
        for (index, slot) in (0..).zip(&layout.slots).filter(|(index, _)| plan.ports.updates_here(*index)) {
            piece_of[index as usize] = pieces.len() as u32;
            pieces.push(Piece {
                slot: ChunkPlace { array_offset: offset, quantised_offset: received, ..*slot },
            });
            offset += whole_lines(slot.elements as usize);
            received += received_elements(slot);
        }
        if pieces.is_empty() {
            return Ok(None);
        }
        Ok(Some(Box::new(Snapshot {
            route: plan.route,
            outcome: SnapshotOutcome::Open,
            newest: 0,
            goes_back: false,
            goes_back_to: None,
            hyperparameters: Vec::with_capacity(plan.groups.len()),
            program_states: Vec::new(),
            marks: vec![ChunkMark::default(); pieces.len()],
            taken: vec![false; pieces.len()],
            missing: pieces.len(),
            pieces: pieces.into(),
            piece_of: piece_of.into(),
            model: Buffer::reserved(offset, 5)?,
            state: Buffer::reserved(offset * layout.state_slots, 6)?,
            received: Buffer::reserved(received, 7)?,
            state_slots: layout.state_slots,
            block_elements,
        })))
    }

    /// Calls `each` for its arrays.
    pub(super) fn each_array(&mut self, each: &mut dyn FnMut(&mut dyn Pages)) {
        [&mut self.model, &mut self.state, &mut self.received].into_iter().for_each(|array| each(array));
    }

    /// Bytes that a snapshot of this plan takes.
    pub(super) fn memory_bytes(plan: &ShardPlan, layout: &Layout) -> u64 {
        let here = |(index, _): &(u32, &ChunkPlace)| plan.ports.updates_here(*index);
        let of_a_chunk = |(_, slot): (u32, &ChunkPlace)| {
            (whole_lines(slot.elements as usize) * size_of::<f32>() * (1 + layout.state_slots)
                + received_elements(slot) * size_of::<f32>()
                + size_of::<Piece>()
                + size_of::<ChunkMark>()
                + 1) as u64
        };
        (0..).zip(&layout.slots).filter(here).map(of_a_chunk).sum()
    }

    /// Starts again with no chunks.
    pub(super) fn begin(&mut self) {
        self.outcome = SnapshotOutcome::Open;
        self.newest = 0;
        self.goes_back_to = None;
        self.program_states.clear();
        self.missing = self.pieces.len();
        self.taken.fill(false);
    }

    /// Returns whether this slot's chunk belongs to the snapshot and is missing.
    pub(super) fn lacks(&self, index: u32) -> bool {
        let piece = self.piece_of[index as usize];
        piece != NONE && !self.taken[piece as usize]
    }

    /// Copies the chunk of a slot that the snapshot [`lacks`](Snapshot::lacks). `received` has the parameters
    /// that ranks have of a quantised chunk, and is empty for another.
    pub(super) fn take(
        &mut self,
        index: u32,
        model: &[f32],
        state: &[f32],
        received: &[f32],
        mark: ChunkMark,
    ) {
        let piece = self.piece_of[index as usize] as usize;
        let slot = self.pieces[piece].slot;
        self.received[slot.quantised_offset..][..received.len()].copy_from_slice(received);
        let range = slot.range();
        self.state[range.start * self.state_slots..range.end * self.state_slots].copy_from_slice(state);
        self.model[range].copy_from_slice(model);
        self.marks[piece] = mark;
        self.taken[piece] = true;
        self.missing -= 1;
        if self.missing == 0 {
            self.outcome = SnapshotOutcome::Complete;
        }
    }

    /// The key of the first missing chunk.
    pub(crate) fn missing_key(&self) -> Option<u32> {
        let mut chunks = self.pieces.iter().zip(&self.taken);
        chunks.find(|(_, taken)| !**taken).map(|(piece, _)| piece.slot.key)
    }

    /// Its chunks: key, first element there, elements, and what is known of each.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = (u32, u64, u32, ChunkMark)> + '_ {
        self.pieces
            .iter()
            .zip(&self.marks)
            .map(|(Piece { slot }, &mark)| (slot.key, slot.key_offset, slot.elements, mark))
    }

    #[cfg(test)]
    pub(super) fn floats(&self) -> usize {
        self.model.len() + self.state.len() + self.received.len()
    }

    /// Values of state per parameter.
    pub(crate) fn state_slots(&self) -> usize {
        self.state_slots
    }

    /// The parameters of its chunk number `chunk`.
    pub(crate) fn parameters(&self, chunk: usize) -> &[f32] {
        &self.model[self.pieces[chunk].slot.range()]
    }

    /// The parameters that ranks have of its chunk number `chunk`, if it is quantised: these lag behind the
    /// chunk's.
    pub(crate) fn received(&self, chunk: usize) -> Option<&[f32]> {
        let slot = &self.pieces[chunk].slot;
        slot.gradient
            .is_quantised()
            .then(|| &self.received[slot.quantised_offset..][..slot.elements as usize])
    }

    /// A slot of the optimizer state of its chunk number `chunk`, in the order of the elements.
    pub(crate) fn state(&self, chunk: usize, state_slot: usize) -> impl Iterator<Item = &[f32]> + '_ {
        let blocks = self.pieces[chunk].slot.state_blocks(self.state_slots, state_slot, self.block_elements);
        blocks.map(|block| &self.state[block])
    }
}

fn received_elements(slot: &ChunkPlace) -> usize {
    if slot.gradient.is_quantised() { whole_lines(slot.elements as usize) } else { 0 }
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Snapshot")
            .field("route", &self.route)
            .field("outcome", &self.outcome)
            .field("newest", &self.newest)
            .finish_non_exhaustive()
    }
}
