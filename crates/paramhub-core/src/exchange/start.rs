//! The initial parameters and optimizer state, which rank 0 sends.

use super::actions::Answer;
use super::state::{ChunkState, Exchange, MemberRequest, StepStage};
use super::violation::ProtocolViolation;
use crate::limits::STATE_UPDATES_MAX;

impl Exchange {
    /// Takes the initial parameters, at `version`, from a member or, if `None`, from the site above.
    ///
    /// Returns whether the caller must copy them into the model and call [`Exchange::mark_due_answers`]; `false`: they
    /// were here already when the stream was cut or the process was replaced. Sites have no answer to them, so a site sends
    /// them once more whenever its stream was replaced.
    pub fn initialise(
        &mut self,
        slot: u32,
        member: Option<u32>,
        version: u32,
    ) -> Result<bool, ProtocolViolation> {
        let chunk = self.chunks[slot as usize];
        if let Some(rank_0) = member.filter(|_| member == self.rules.rank_0)
            && chunk.initialised
            && self.rules.has_parameters
            && chunk.version == u64::from(version)
            && (self.start_may_repeat || self.member(slot, rank_0).request == MemberRequest::Cut)
            && !self.is_unanswered(slot, rank_0)
        {
            self.member_mut(slot, rank_0).request = MemberRequest::Waiting(Answer::Applied);
            return Ok(false);
        }
        if self.has_begun_for_site(slot, member) && u64::from(version) <= chunk.version {
            return Ok(false);
        }
        if chunk.initialised || !self.speaks_for_rank_0(member) {
            return Err(ProtocolViolation::Initialised);
        }
        if member.is_some_and(|member| self.is_unanswered(slot, member)) {
            return Err(ProtocolViolation::Unanswered);
        }
        let expected = self.start_version.unwrap_or(version);
        if self.rules.two_phase && version != expected {
            return Err(ProtocolViolation::Versions { expected, got: version });
        }
        self.start_version = Some(expected);
        self.chunks[slot as usize] = ChunkState {
            version: u64::from(version),
            updates: chunk.updates,
            takes_factors: chunk.takes_factors,
            awaits_standby: self.has_standby(),
            ..ChunkState::new(chunk.reach, true)
        };
        for member in 0..self.rules.members {
            // A process that has taken a member's place may join at a later step, of other chunks.
            let first = version.max(self.joined_at[member as usize]);
            let member_state = self.member_mut(slot, member);
            (member_state.next_step, member_state.is_prompt) = (first, true);
        }
        self.count_awaited(slot);
        if let Some(rank_0) = member.filter(|_| member == self.rules.rank_0) {
            self.member_mut(slot, rank_0).request = MemberRequest::Waiting(Answer::Applied);
        }
        Ok(true)
    }

    /// Takes a slot of the optimizer's initial state, which has had `updates` updates; the count that
    /// comes with the last slot is kept. On `Ok(true)` the caller copies the state; `false`: a site, or rank 0's new process,
    /// sends once more what is here. The caller owes rank 0 an acknowledgement at once.
    ///
    /// The state comes before the parameters. No other member may contribute or is answered before the
    /// parameters are here, so none sees a chunk with restored parameters and without its restored state.
    pub fn initialise_state(
        &mut self,
        slot: u32,
        member: Option<u32>,
        updates: u64,
    ) -> Result<bool, ProtocolViolation> {
        if self.has_begun_for_site(slot, member) {
            return Ok(false);
        }
        let is_here = self.chunks[slot as usize].initialised;
        if is_here && !self.start_may_repeat || !self.speaks_for_rank_0(member) {
            return Err(ProtocolViolation::StateInitialised);
        }
        if member.is_some_and(|member| self.is_unanswered(slot, member)) {
            return Err(ProtocolViolation::Unanswered);
        }
        if updates > STATE_UPDATES_MAX {
            return Err(ProtocolViolation::StateUpdates(updates));
        }
        if !is_here {
            self.chunks[slot as usize].updates = updates;
        }
        if let Some(rank_0) = member.filter(|_| member == self.rules.rank_0) {
            self.member_mut(slot, rank_0).request = MemberRequest::Sendable(Answer::Applied);
        }
        Ok(!is_here)
    }

    /// Returns whether the chunk has the parameters that a site sends once more.
    fn has_begun_for_site(&self, slot: u32, member: Option<u32>) -> bool {
        let is_site = member.is_none_or(|member| member >= self.rules.first_site);
        is_site && self.rules.has_parameters && self.chunks[slot as usize].initialised
    }

    /// Returns whether a chunk still has the parameters that training starts from, so that a site around may lack them. None
    /// does if the chunk is held: all have had a part in its sum.
    pub fn is_at_start(&self, slot: u32) -> bool {
        let chunk = self.chunks[slot as usize];
        chunk.initialised && !chunk.has_moved_on && chunk.stage != StepStage::Held
    }

    /// Returns whether `member` may send what only rank 0 may send: it is rank 0, or a site that passes it
    /// on.
    fn speaks_for_rank_0(&self, member: Option<u32>) -> bool {
        member.is_none_or(|member| self.rules.rank_0 == Some(member) || member >= self.rules.first_site)
    }
}
