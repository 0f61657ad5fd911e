//! Contributions of members, and the sums that they make.

use super::actions::{Answer, Arrival, Fold, SumAction};
use super::state::{Exchange, MemberRequest, StepStage};
use super::violation::ProtocolViolation;
use crate::consistency::Consistency;

impl Exchange {
    /// Takes a contribution that has arrived whole. The caller does what the [`Arrival`] states. After an
    /// update, a repeated push and a late one it calls [`Exchange::mark_due_answers`].
    pub fn push(
        &mut self,
        slot: u32,
        member: u32,
        step: u32,
        answer: Answer,
    ) -> Result<Arrival, ProtocolViolation> {
        if self.is_repeat(slot, member, step) {
            self.member_mut(slot, member).request = MemberRequest::Waiting(answer);
            return Ok(Arrival { fold: Fold::Drop, then: SumAction::Repeated });
        }
        self.check_push(slot, member, step)?;
        let chunk = self.chunks[slot as usize];
        if self.quorum(slot).is_some() {
            return self.push_in_time_or_late(slot, member, step, answer);
        }
        let state = self.member_mut(slot, member);
        (state.next_step, state.request) = (step + 1, MemberRequest::Waiting(answer));
        if !self.steps_together(slot, member) {
            let contributions = self.workers_of[member as usize];
            let update = self.chunks[slot as usize].update_apart(step, contributions);
            return Ok(Arrival { fold: Fold::Apart, then: SumAction::Update(update) });
        }
        let fold = self.fold(slot, member);
        let members_due = chunk.reach.together - self.absent;
        let chunk = &mut self.chunks[slot as usize];
        chunk.arrived += 1;
        let then = match chunk.arrived == members_due {
            false => SumAction::Wait,
            true if chunk.reach.has_above => {
                chunk.stage = StepStage::SentUp;
                SumAction::Raise
            }
            true if chunk.takes_factors => {
                chunk.stage = StepStage::SummingFactors;
                SumAction::Make
            }
            true => self.complete(slot, step, self.contributors_at(slot)),
        };
        Ok(Arrival { fold, then })
    }

    /// Fails if a contribution of this member to `step` cannot be taken now. It changes nothing. A
    /// [repetition](Self::is_repeat) is taken without this check.
    pub fn check_push(&self, slot: u32, member: u32, step: u32) -> Result<(), ProtocolViolation> {
        let (chunk, member_state) = (self.chunks[slot as usize], self.member(slot, member));
        if !chunk.initialised {
            return Err(ProtocolViolation::NotInitialised);
        }
        if !matches!(member_state.request, MemberRequest::None | MemberRequest::Cut) {
            return Err(ProtocolViolation::Unanswered);
        }
        let expected = member_state.next_step;
        match step {
            got if got < expected => return Err(ProtocolViolation::StepBehind { expected, got }),
            got if got > expected => return Err(ProtocolViolation::StepAhead { expected, got }),
            u32::MAX => return Err(ProtocolViolation::StepsExhausted),
            _ => {}
        }
        if self.steps_together(slot, member) && u64::from(step) > chunk.version {
            return Err(ProtocolViolation::StepAhead { expected: chunk.version as u32, got: step });
        }
        Ok(())
    }

    /// Notes that a member's stream was cut and another replaces it. Every answer that was owed to the member
    /// counts as lost, even if it has left: the member repeats each request that was not answered whole, and
    /// is answered again. In a synchronous job the chunk cannot have moved on since, so the answer is the
    /// same.
    pub fn resume(&mut self, member: u32) {
        debug_assert_eq!(
            self.rules.consistency,
            Consistency::Synchronous,
            "only a synchronous job resumes streams"
        );
        self.release_may_repeat |= self.rules.rank_0 == Some(member);
        for slot in 0..self.chunks.len() as u32 {
            self.resume_at(slot, member);
        }
    }

    /// Does the same as [`Exchange::resume`] at one chunk, for a site that has other streams for others.
    pub fn resume_at(&mut self, slot: u32, member: u32) {
        self.member_mut(slot, member).request = MemberRequest::Cut;
    }

    /// Returns whether the chunk's sum goes to the site above, which has not answered yet.
    pub fn is_sent_up(&self, slot: u32) -> bool {
        self.chunks[slot as usize].stage == StepStage::SentUp
    }

    /// Returns whether a contribution to `step` was taken before the member's stream was cut.
    pub fn is_repeat(&self, slot: u32, member: u32, step: u32) -> bool {
        let member_state = self.member(slot, member);
        member_state.request == MemberRequest::Cut && step.checked_add(1) == Some(member_state.next_step)
    }

    /// Takes the report that the caller has [made](SumAction::Make) a chunk's sum, and returns what to do
    /// with the sum.
    ///
    /// # Panics
    /// If the sum was not to be made.
    pub fn made(&mut self, slot: u32) -> SumAction {
        let chunk = self.chunks[slot as usize];
        assert_eq!(chunk.stage, StepStage::SummingFactors, "the sum waits for no factors");
        self.complete(slot, chunk.version as u32, self.contributors())
    }

    /// Takes the answer of the site above to a sum that went up: the sum of all workers' gradients at `step`, or the parameters
    /// after it. The step then continues as if the sum had become complete here.
    ///
    /// In a job that leaves out late members, steps may have ended without this site. The chunk then skips those before `step`.
    pub fn lower(&mut self, slot: u32, step: u32) -> Result<SumAction, ProtocolViolation> {
        let chunk = self.chunks[slot as usize];
        let (newest, version) = (u64::from(step), chunk.version);
        let has_missed = newest > version && step < u32::MAX && self.rules.quorum.is_some();
        if chunk.stage != StepStage::SentUp || newest != version && !has_missed {
            return Err(ProtocolViolation::NotAwaited(step));
        }
        if has_missed {
            // All members here have contributed to the sum that went up.
            self.chunks[slot as usize].version = newest;
            for member in 0..chunk.reach.members {
                self.member_mut(slot, member).next_step = step + 1;
            }
        }
        Ok(self.complete(slot, step, self.contributors()))
    }

    /// The first step to which not every member has contributed. Lost members do not count.
    pub fn steps_of_all(&self, slot: u32) -> u32 {
        let members = self.chunks[slot as usize].reach.members;
        let not_lost = (0..members).filter(|&member| !self.is_lost(member));
        not_lost.map(|member| self.member(slot, member).next_step).min().unwrap_or(0)
    }

    /// Members whose contribution to the chunk's step under way is missing, ascending. Those that do not step together are
    /// never among them.
    pub fn missing(&self, slot: u32) -> impl Iterator<Item = u32> + '_ {
        let chunk = self.chunks[slot as usize];
        let version = chunk.version;
        (0..chunk.reach.together - self.absent)
            .filter(move |&member| u64::from(self.member(slot, member).next_step) <= version)
    }

    /// The number of workers that contribute to each update of the chunk by the members that step together.
    fn contributors_at(&self, slot: u32) -> u32 {
        let together = self.chunks[slot as usize].reach.together;
        match self.rules.consistency {
            Consistency::Synchronous => self.contributors(),
            _ => self.workers_of[..together as usize].iter().sum(),
        }
    }

    /// Returns the destination of the contribution and counts it. Contributions are summed in the order of
    /// members if the job is reproducible, else in the order of arrival.
    pub(super) fn fold(&mut self, slot: u32, member: u32) -> Fold {
        let chunk = self.chunks[slot as usize];
        if !self.rules.reproducible {
            self.chunks[slot as usize].folded += 1;
            return Fold::Sum { starts_sum: chunk.folded == 0, parked: 0..0 };
        }
        // A site that comes first is the last member, and the others come one place later.
        let (members, shift) = (chunk.reach.members, u32::from(chunk.reach.site_first));
        let place = (member + shift) % members;
        if chunk.folded != place {
            return Fold::Park;
        }
        let next_step = self.member(slot, member).next_step;
        let begin = place + 1 - shift;
        let mut end = begin;
        while end + shift < members && self.member(slot, end).next_step == next_step {
            end += 1;
        }
        self.chunks[slot as usize].folded = end + shift;
        Fold::Sum { starts_sum: place == 0, parked: begin..end }
    }

    /// Continues the step once the sum is complete.
    pub(super) fn complete(&mut self, slot: u32, step: u32, contributions: u32) -> SumAction {
        if self.rules.two_phase {
            self.hold(slot);
            return SumAction::Hold;
        }
        SumAction::Update(self.chunks[slot as usize].update(step, contributions))
    }
}
