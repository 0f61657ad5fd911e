//! Requests for parameters and optimizer state, and when they and contributions are answered.

use super::actions::Answer;
use super::state::{ChunkState, Exchange, MemberRequest, StepStage};
use super::violation::ProtocolViolation;
use crate::consistency::Consistency;
use crate::stragglers::Quorum;

impl Exchange {
    /// Takes a request for parameters of at least `version`. The answer may be due at once: see [`Exchange::mark_due_answers`].
    pub fn pull(&mut self, slot: u32, member: u32, version: u32) -> Result<(), ProtocolViolation> {
        let chunk = self.chunks[slot as usize];
        let member_state = self.member(slot, member);
        if self.is_unanswered(slot, member) {
            return Err(ProtocolViolation::Unanswered);
        }
        let newest = match self.steps_together(slot, member) {
            // A member that has joined waits for the version that its first step starts from.
            true => member_state.next_step.max(chunk.version as u32),
            false => member_state.next_step,
        };
        // Before rank 0 has sent parameters, the version that they start from is unknown.
        if chunk.initialised && version > newest {
            return Err(ProtocolViolation::StepAhead { expected: newest, got: version });
        }
        self.member_mut(slot, member).request = MemberRequest::Waiting(Answer::Parameters);
        Ok(())
    }

    /// Takes a request for a slot of the optimizer's state. The answer is due as soon as there are
    /// parameters, and is the state after the chunk's last update: see [`Exchange::mark_due_answers`].
    pub fn pull_state(&mut self, slot: u32, member: u32, state_slot: u8) -> Result<(), ProtocolViolation> {
        if self.is_unanswered(slot, member) {
            return Err(ProtocolViolation::Unanswered);
        }
        self.member_mut(slot, member).request = MemberRequest::Waiting(Answer::State(state_slot));
        Ok(())
    }

    /// Calls `on_due` for each member whose request for this chunk may now be answered and could not be
    /// before. In a job that leaves out late members, it also calls `on_due` for members whose parameters have
    /// not begun to leave. The caller calls it after every initialise, [`Update`](super::Update), [`Hold`](super::SumAction::Hold) among sites, pull, pull_state, late push and
    /// repeated push of the chunk. After an update, the answers may leave once the optimizer has run.
    pub fn mark_due_answers(&mut self, slot: u32, mut on_due: impl FnMut(u32, Answer)) {
        let slowest = self.slowest(slot);
        for member in 0..self.rules.members {
            match self.member(slot, member).request {
                MemberRequest::Waiting(answer) if self.may_answer(slot, member, answer, slowest) => {
                    self.member_mut(slot, member).request = MemberRequest::Sendable(answer);
                    on_due(member, answer);
                }
                // The chunk may have had updates since. An answer that has not begun to leave carries the
                // newest values, even if older ones are already in an arena.
                MemberRequest::Sendable(Answer::Parameters)
                    if self.quorum(slot).is_some_and(Quorum::leaves_out) =>
                {
                    on_due(member, Answer::Parameters);
                }
                _ => {}
            }
        }
    }

    /// The answer that is owed to `member` and has not begun to leave.
    pub fn owed(&self, slot: u32, member: u32) -> Option<Answer> {
        match self.member(slot, member).request {
            MemberRequest::Sendable(answer) => Some(answer),
            MemberRequest::None | MemberRequest::Cut | MemberRequest::Waiting(_) => None,
        }
    }

    /// The version to send with the answer to `member`.
    pub fn answer_version(&self, slot: u32, member: u32) -> u32 {
        // A site gets the total of a chunk that is held, which is not at the next version yet. Members without common steps
        // count their own. Where late members are left out, all get the newest.
        let is_newest = self.steps_together(slot, member) && !self.is_site(member);
        match is_newest || self.quorum(slot).is_some() {
            true => self.chunks[slot as usize].version as u32,
            false => self.member(slot, member).next_step,
        }
    }

    /// Notes that the answer to `member` has begun to leave: from now on the member may request this chunk
    /// again.
    pub fn answer_begun(&mut self, slot: u32, member: u32) {
        let request = &mut self.member_mut(slot, member).request;
        debug_assert!(matches!(request, MemberRequest::Sendable(_)), "only what is owed is sent");
        let owed = std::mem::take(request);
        // An answer with optimizer state brings no parameters.
        if matches!(owed, MemberRequest::Sendable(Answer::Parameters | Answer::Applied)) {
            self.catch_up(slot, member);
        }
    }

    /// The next step of the least advanced member; members that have left do not count.
    pub(super) fn slowest(&self, slot: u32) -> u32 {
        let present = (0..self.rules.members).filter(|&member| !self.departed[member as usize]);
        present.map(|member| self.member(slot, member).next_step).min().unwrap_or(u32::MAX)
    }

    pub(super) fn is_unanswered(&self, slot: u32, member: u32) -> bool {
        matches!(self.member(slot, member).request, MemberRequest::Waiting(_) | MemberRequest::Sendable(_))
    }

    /// Whether the member is another site.
    fn is_site(&self, member: u32) -> bool {
        member >= self.rules.first_site
    }

    fn may_answer(&self, slot: u32, member: u32, answer: Answer, slowest: u32) -> bool {
        let chunk = self.chunks[slot as usize];
        let next_step = self.member(slot, member).next_step;
        chunk.initialised
            && !chunk.awaits_standby
            && (matches!(answer, Answer::State(_))
                || self.has_ended(slot, member) && self.is_within_bound(chunk, next_step, slowest))
    }

    /// Whether the step has ended to which the member contributed last.
    fn has_ended(&self, slot: u32, member: u32) -> bool {
        let chunk = self.chunks[slot as usize];
        // Another site needs the total to hold the chunk as well.
        let has_total = chunk.stage == StepStage::Held && self.is_site(member);
        let next_step = self.member(slot, member).next_step;
        !self.steps_together(slot, member) || u64::from(next_step) <= chunk.version + u64::from(has_total)
    }

    /// Whether a member may go on that is so far. Where a site is above, that site holds back its answer.
    fn is_within_bound(&self, chunk: ChunkState, next_step: u32, slowest: u32) -> bool {
        match self.rules.consistency {
            Consistency::BoundedStaleness(bound) => chunk.reach.has_above || next_step - slowest <= bound,
            Consistency::Synchronous | Consistency::Asynchronous => true,
        }
    }
}
