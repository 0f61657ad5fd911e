//! The state that a shard keeps of the answers for its quantised chunks, so that the next answer makes up
//! for the loss of the last.

use paramhub_kernels::{convert, quantise};

use super::buffer::{Buffer, OutOfMemory, Pages};
use super::layout::{ChunkPlace, Layout};

/// A version that no rank has: a run ends before it.
const NONE: u32 = u32::MAX;

/// The state of all quantised chunks of a shard. In a job with an optimizer an answer is the change from the
/// ranks' parameters to the model; in another job it is the mean or the sum itself. Both include what earlier
/// answers have lost.
#[derive(Debug, Default)]
pub(super) struct Quantised {
    /// With an optimizer: the parameters that ranks have after all answers so far; the model has what they
    /// lack. Without one: what the answers have lost so far.
    kept: Buffer,
    /// The newest answers.
    answers: Buffer<u8>,
    /// With an optimizer: the version that rank `r` has of slot `s`, at `s * ranks + r`.
    versions: Vec<u32>,
    ranks: usize,
}

impl Quantised {
    /// Bytes that [`new`](Self::new) will take.
    pub(super) fn memory_bytes(layout: &Layout, ranks: u32) -> u64 {
        let (elements, bytes) = (layout.quantised_elements, layout.answer_bytes);
        let versions = if elements > 0 && layout.rules.has_parameters { layout.slots.len() } else { 0 };
        elements as u64 * 4 + bytes as u64 + versions as u64 * u64::from(ranks) * 4
    }

    pub(super) fn new(layout: &Layout, ranks: u32) -> Result<Self, OutOfMemory> {
        let (elements, bytes) = (layout.quantised_elements, layout.answer_bytes);
        if elements == 0 {
            return Ok(Quantised::default());
        }
        let versions = if layout.rules.has_parameters { layout.slots.len() * ranks as usize } else { 0 };
        Ok(Quantised {
            kept: Buffer::reserved(elements, 5)?,
            answers: Buffer::reserved(bytes, 0)?,
            versions: vec![NONE; versions],
            ranks: ranks as usize,
        })
    }

    /// Calls `each` for its arrays.
    pub(super) fn each_array(&mut self, each: &mut dyn FnMut(&mut dyn Pages)) {
        each(&mut self.kept);
        each(&mut self.answers);
    }

    /// Sets the parameters of the chunk with which every rank begins.
    pub(super) fn start(&mut self, slot: &ChunkPlace, parameters: &[f32]) {
        self.kept_mut(slot).copy_from_slice(parameters);
    }

    /// Makes the answer that follows from a chunk's new values; without an optimizer these become what ranks
    /// will decode.
    pub(super) fn make_answer(&mut self, slot: &ChunkPlace, values: &mut [f32]) {
        match self.sends_changes() {
            true => self.answer_change(slot, values),
            false => self.answer_whole(slot, values),
        }
    }

    /// Makes the answer that brings ranks from their parameters as near as possible to the chunk's new ones.
    fn answer_change(&mut self, slot: &ChunkPlace, model: &[f32]) {
        let at = slot.quantised_offset;
        let kept = &mut self.kept[at..at + model.len()];
        quantise::encode_change(model, kept, &mut self.answers[answer_range(slot)], slot.gradient);
    }

    /// Makes an answer of a mean or a sum, and leaves in `mean` what ranks will decode.
    fn answer_whole(&mut self, slot: &ChunkPlace, mean: &mut [f32]) {
        let at = slot.quantised_offset;
        let kept = &mut self.kept[at..at + mean.len()];
        let answer = &mut self.answers[answer_range(slot)];
        quantise::encode(mean, kept, answer, slot.gradient);
        convert::decode(answer, mean, slot.gradient);
    }

    /// The newest answer.
    pub(super) fn answer(&self, slot: &ChunkPlace) -> &[u8] {
        &self.answers[answer_range(slot)]
    }

    /// The parameters that ranks have after all answers so far; `None` in a job without an optimizer.
    pub(super) fn parameters(&self, slot: &ChunkPlace) -> Option<&[f32]> {
        self.sends_changes().then(|| self.kept(slot))
    }

    /// The state that is kept of a chunk for the next answer.
    pub(super) fn kept(&self, slot: &ChunkPlace) -> &[f32] {
        let at = slot.quantised_offset;
        &self.kept[at..at + slot.elements as usize]
    }

    /// Returns whether answers are changes of parameters, because there is an optimizer.
    fn sends_changes(&self) -> bool {
        !self.versions.is_empty()
    }

    /// Returns whether a rank lacks exactly the newest answer, which makes `version`.
    pub(super) fn lacks_last(&self, index: u32, rank: u32, version: u32) -> bool {
        self.versions.is_empty()
            || self.versions[index as usize * self.ranks + rank as usize].checked_add(1) == Some(version)
    }

    /// Notes that a rank has parameters of this version, or receives them before anything else.
    pub(super) fn has(&mut self, index: u32, rank: u32, version: u32) {
        if let Some(known) = self.versions.get_mut(index as usize * self.ranks + rank as usize) {
            *known = version;
        }
    }

    /// Notes that the rank's versions are unknown: its next answers are whole.
    pub(super) fn forget(&mut self, rank: u32) {
        let of_rank = self.versions.iter_mut().skip(rank as usize).step_by(self.ranks.max(1));
        of_rank.for_each(|version| *version = NONE);
    }

    fn kept_mut(&mut self, slot: &ChunkPlace) -> &mut [f32] {
        let at = slot.quantised_offset;
        &mut self.kept[at..at + slot.elements as usize]
    }
}

fn answer_range(slot: &ChunkPlace) -> std::ops::Range<usize> {
    debug_assert!(slot.gradient.is_quantised(), "others are answered from the model");
    slot.answer_offset_bytes..slot.answer_offset_bytes + slot.extent().bytes(slot.gradient) as usize
}
