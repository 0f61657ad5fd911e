//! Steps in two phases: chunks are held until rank 0 releases the step.

use super::actions::Update;
use super::state::Exchange;
use super::violation::ProtocolViolation;

impl Exchange {
    /// The step at which all chunks are held, if they are: its norm is due.
    pub fn held_step(&self) -> Option<u32> {
        let all = self.rules.two_phase && self.held as usize == self.chunks.len();
        all.then(|| self.chunks[0].version as u32)
    }

    /// Takes rank 0's release of the step at which all chunks are held. The caller then asks for the chunks'
    /// updates, a few at a time: see [`Exchange::release_next`]. `false`: it is the last release once more, which rank 0
    /// sends first when a stream of it was replaced.
    pub fn release(&mut self, member: u32, step: u32) -> Result<bool, ProtocolViolation> {
        self.end_held(member, step, false)
    }

    /// Does the same as [`Exchange::release`] for a step that ends without an update: the caller runs no optimizer.
    pub fn skip(&mut self, member: u32, step: u32) -> Result<bool, ProtocolViolation> {
        self.end_held(member, step, true)
    }

    fn end_held(&mut self, member: u32, step: u32, skips: bool) -> Result<bool, ProtocolViolation> {
        let is_of_rank_0 = self.rules.rank_0 == Some(member);
        if is_of_rank_0 && std::mem::take(&mut self.release_may_repeat) && self.released == Some(step) {
            return Ok(false);
        }
        if !is_of_rank_0 || self.held_step() != Some(step) {
            return Err(ProtocolViolation::Released(step));
        }
        (self.held, self.release_at, self.released, self.skips) = (0, 0, Some(step), skips);
        Ok(true)
    }

    /// The next chunk of the release under way, most urgent first, and its update. The caller calls
    /// [`Exchange::mark_due_answers`] and runs the optimizer, in either order.
    pub fn release_next(&mut self) -> Option<(u32, Update)> {
        let (slot, contributors) = (self.release_at, self.contributors());
        let chunk = self.chunks.get_mut(slot as usize)?;
        self.release_at += 1;
        let update = chunk.update(chunk.version as u32, contributors);
        // The optimizer does not see a step that is skipped.
        chunk.updates -= u64::from(self.skips);
        Some((slot, update))
    }

    /// Returns whether the step that was released last ends without an update.
    pub fn skips(&self) -> bool {
        self.skips
    }

    /// Returns whether chunks of a released step wait for their update.
    pub fn is_releasing(&self) -> bool {
        (self.release_at as usize) < self.chunks.len()
    }

    /// Forgets which chunks are held or wait for their update, and the last release.
    pub(super) fn forget_releases(&mut self) {
        (self.held, self.released, self.release_may_repeat) = (0, None, false);
        self.release_at = self.chunks.len() as u32;
    }
}
