//! Going back to an earlier step.
//!
//! The caller keeps a copy of each chunk, with its optimizer's state, from before every `rewind_every`-th update. If a
//! member is lost, all members begin again at a step of which all chunks have the parameters, as their present ones or
//! as their copies. So no update lacks a contribution, and none has one of a process that is gone.
//!
//! One copy of each chunk suffices where every step exchanges every chunk. Chunks then are at most one update apart, so
//! that those which have replaced their copy for a newer one prove that all others have come as far. The step to go back
//! to is the newest one of which no chunk has missed the copy: see [`Exchange::newest_rewind`].
//!
//! If a member is lost before all chunks have parameters, there is no step to go back to. All members then begin
//! [anew](Exchange::begin_anew), with the parameters that rank 0 sends.
//!
//! There may be more members then than before, or fewer: the first of them have processes, and steps end without the rest.

use super::state::{ChunkState, Exchange, MemberState, StepStage};
use super::violation::CannotRewind;

/// What the exchange knows of the copy that the caller keeps of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeptVersion {
    version: u32,
    updates: u64,
}

/// Which parameters a chunk has after it has gone back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RewoundTo {
    /// Its present ones: they are those of the step.
    Present,
    /// Those of the copy.
    Copy,
}

impl Exchange {
    /// Returns whether the caller must copy the chunk before it makes the update that was just counted. From then on that
    /// copy counts.
    #[inline]
    pub fn keeps_version(&mut self, slot: u32) -> bool {
        let Some(every) = self.rules.rewind_every else { return false };
        let (step, updates) = (self.step(slot).wrapping_sub(1), self.updates(slot) - u64::from(!self.skips));
        if step.wrapping_sub(self.start_version.unwrap_or(0)) % every != 0 {
            return false;
        }
        self.kept[slot as usize] = Some(KeptVersion { version: step, updates });
        true
    }

    /// The newest step to which these chunks can go back; `None` if one of them has no parameters yet. A caller with
    /// several routes takes the earliest of all of them, and has all begin anew if one has none.
    ///
    /// Fails if they have no such step in common.
    pub fn newest_rewind(&self) -> Result<Option<u32>, CannotRewind> {
        if !self.have_all_begun() {
            return Ok(None);
        }
        let every = self.rules.rewind_every.unwrap_or(1);
        let start = self.start_version.unwrap_or(0);
        let oldest = (0..self.chunks.len() as u32).map(|slot| self.step(slot)).min().unwrap_or(start);
        let step = start + oldest.saturating_sub(start) / every * every;
        self.check_rewind(step).map(|()| Some(step))
    }

    /// Fails if not all of these chunks have the parameters of `step`.
    pub fn check_rewind(&self, step: u32) -> Result<(), CannotRewind> {
        for slot in 0..self.chunks.len() as u32 {
            let has_copy = self
                .kept
                .get(slot as usize)
                .is_some_and(|kept| kept.is_some_and(|kept| kept.version == step));
            if self.step(slot) != step && !has_copy {
                let kept = self.kept.get(slot as usize).copied().flatten().map(|kept| kept.version);
                return Err(CannotRewind { slot, step, version: self.step(slot), kept });
            }
        }
        Ok(())
    }

    /// Has this many members, counted from member 0, begin again at `step`, which [`check_rewind`](Self::check_rewind) has
    /// allowed: whatever members have contributed since, requested or left counts no more. The caller then calls
    /// [`Exchange::rewind_chunk`] for every slot.
    pub fn rewind(&mut self, step: u32, members: u32) {
        self.begin_with(members);
        self.forget_releases();
        self.joined_at.fill(step);
    }

    /// Has this many members, counted from member 0, begin anew, with parameters that rank 0 sends: nothing counts that any
    /// member has sent. The caller then calls [`Exchange::begin_chunk_anew`] for every slot.
    pub fn begin_anew(&mut self, members: u32) {
        self.rewind(0, members);
        (self.start_version, self.start_may_repeat) = (None, false);
        self.kept.fill(None);
    }

    /// Has a chunk wait for the parameters to start from. Its optimizer's state is to be zero.
    pub fn begin_chunk_anew(&mut self, slot: u32) {
        let ChunkState { reach, takes_factors, .. } = self.chunks[slot as usize];
        self.chunks[slot as usize] =
            ChunkState { takes_factors, ..ChunkState::new(reach, !self.rules.has_parameters) };
        for member in 0..self.rules.members {
            *self.member_mut(slot, member) = MemberState { is_prompt: true, ..MemberState::default() };
        }
        self.count_awaited(slot);
    }

    /// Takes a chunk back to `step`, and returns which parameters it has then.
    pub fn rewind_chunk(&mut self, slot: u32, step: u32) -> RewoundTo {
        let kept = self.kept[slot as usize].filter(|_| self.step(slot) != step);
        let chunk = &mut self.chunks[slot as usize];
        (chunk.arrived, chunk.folded, chunk.stage) = (0, 0, StepStage::Open);
        chunk.go_back(step, kept.map(|kept| kept.updates));
        for member in 0..self.rules.members {
            *self.member_mut(slot, member) =
                MemberState { next_step: step, is_prompt: true, ..MemberState::default() };
        }
        self.count_awaited(slot);
        if kept.is_some() { RewoundTo::Copy } else { RewoundTo::Present }
    }
}
