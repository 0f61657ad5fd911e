//! Steps in two phases: chunks are held until rank 0 releases the step.
//!
//! In a job of several [sites](crate::composition) a chunk is held at a site with the total of all workers, which a site
//! above sends down as soon as it holds the chunk itself. So sites hold their last chunk at different times, and rank 0
//! knows only that those around it hold all of theirs. A release reaches a site by every stream of another site, and may
//! come before the site holds all of its chunks. Then it updates what it holds, and the others as soon as they are complete.
//! Chunks are at most one step apart even so: rank 0 cannot release the next step before every site has updated every
//! chunk, since each takes a contribution to it through each site.

use super::actions::Update;
use super::state::{Exchange, StepStage};
use super::violation::ProtocolViolation;

impl Exchange {
    /// The newest step of which every chunk's sum is complete here: its norm is known.
    pub fn complete_step(&self) -> Option<u32> {
        self.complete_step
    }

    /// The step at which all chunks are held, if they are: it waits for its release.
    pub fn held_step(&self) -> Option<u32> {
        self.complete_step.filter(|&step| self.released.is_none_or(|released| released < step))
    }

    /// The step that was released last.
    pub fn released_step(&self) -> Option<u32> {
        self.released
    }

    /// Takes the release of a step, from rank 0 or, if `member` is `None`, from another site. The caller then asks for the
    /// updates of the chunks that are held, a few at a time: see [`Exchange::release_next`].
    ///
    /// Returns whether it is new. It is not if it is the last one once more, which rank 0 sends first when a stream of it was
    /// replaced, and which comes to a site by every stream of another. A caller of several sites passes a new one on to all
    /// of them but the one from which it came.
    pub fn release(&mut self, member: Option<u32>, step: u32) -> Result<bool, ProtocolViolation> {
        self.end_held(member, step, false)
    }

    /// Does the same as [`Exchange::release`] for a step that ends without an update: the caller runs no optimizer.
    pub fn skip(&mut self, member: Option<u32>, step: u32) -> Result<bool, ProtocolViolation> {
        self.end_held(member, step, true)
    }

    fn end_held(&mut self, member: Option<u32>, step: u32, skips: bool) -> Result<bool, ProtocolViolation> {
        if member.is_some() && member != self.rules.rank_0 {
            return Err(ProtocolViolation::Released(step));
        }
        let is_due = match member {
            Some(_) => {
                let may_repeat = std::mem::take(&mut self.release_may_repeat);
                if self.released == Some(step) && (may_repeat || self.is_among_sites()) {
                    return Ok(false);
                }
                self.held_step() == Some(step)
            }
            None if self.released.is_some_and(|released| step <= released) => return Ok(false),
            None => self.rules.two_phase && self.are_all_at(step),
        };
        if !is_due {
            return Err(ProtocolViolation::Released(step));
        }
        (self.release_at, self.released, self.skips) = (0, Some(step), skips);
        Ok(true)
    }

    /// Returns whether the step that was released last ends without an update.
    pub fn skips(&self) -> bool {
        self.skips
    }

    /// The next chunk that is held at the released step, most urgent first, and its update. The caller calls
    /// [`Exchange::mark_due_answers`] and runs the optimizer, in either order.
    pub fn release_next(&mut self) -> Option<(u32, Update)> {
        while self.is_releasing() {
            let slot = self.release_at;
            self.release_at += 1;
            if let Some(update) = self.release_chunk(slot) {
                return Some((slot, update));
            }
        }
        None
    }

    /// The update of this chunk, if it is held and its step is released. The caller goes on as after
    /// [`Exchange::release_next`]. It asks once it has held a chunk, whose release may have come before, and before it takes a
    /// contribution of another site, which may be released already and contributes to the next step then.
    pub fn release_chunk(&mut self, slot: u32) -> Option<Update> {
        let contributors = self.contributors();
        let (released, chunk) = (self.released, &mut self.chunks[slot as usize]);
        let step = chunk.version as u32;
        if chunk.stage != StepStage::Held || released != Some(step) {
            return None;
        }
        let update = chunk.update(step, contributors);
        // The optimizer does not see a step that is skipped.
        chunk.updates -= u64::from(self.skips);
        Some(update)
    }

    /// Returns whether chunks of a released step wait for their update.
    pub fn is_releasing(&self) -> bool {
        (self.release_at as usize) < self.chunks.len()
    }

    /// Holds a chunk whose sum is complete.
    pub(super) fn hold(&mut self, slot: u32) {
        let chunk = &mut self.chunks[slot as usize];
        chunk.stage = StepStage::Held;
        let step = chunk.version as u32;
        let complete = &mut self.complete_chunks[step as usize % 2];
        *complete += 1;
        if *complete as usize == self.chunks.len() {
            *complete = 0;
            self.complete_step = Some(step);
        }
    }

    /// Forgets which chunks are held or wait for their update, and the last release.
    pub(super) fn forget_releases(&mut self) {
        (self.complete_chunks, self.complete_step) = ([0; 2], None);
        (self.released, self.release_may_repeat) = (None, false);
        self.release_at = self.chunks.len() as u32;
    }

    /// Whether other sites send sums here, or take those of this one.
    fn is_among_sites(&self) -> bool {
        self.rules.first_site < self.rules.members || self.chunks.iter().any(|chunk| chunk.reach.has_above)
    }

    /// Whether all chunks are at this step.
    fn are_all_at(&self, step: u32) -> bool {
        self.chunks.iter().all(|chunk| chunk.initialised && chunk.version == u64::from(step))
    }
}
