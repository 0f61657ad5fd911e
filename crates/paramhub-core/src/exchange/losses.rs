//! Members that are lost, and processes that take their places.
//!
//! What a lost member contributed whole stays in the sums. Steps end with the contributions of the members that
//! remain, as long as there are enough of them ([`Quorum::NotLost`]).
//!
//! A process that takes the place of a lost member first [rejoins](Exchange::rejoin): from then on no chunk goes
//! beyond the step that the route names. When all routes of the job have named theirs, the process
//! [joins](Exchange::join_at) at the latest of them, everywhere. That step is one to which the former process has
//! contributed at no chunk, so that no update counts the member twice, and one that no chunk has passed, so that
//! the process can pull the parameters from which the step starts.
//!
//! A member whose place nobody has had yet, in a job that began with fewer members, is treated as one that is lost, but
//! its missing contributions are not counted.
//!
//! A member may be lost before all chunks have parameters to start from. If it is rank 0, its successor sends them, and those
//! that are here already stay as they are.
//!
//! If all members are lost, their successors make the steps under way [again](Exchange::begin_steps_again), all from
//! the same parameters. Only a step that some chunks have made and others have not is lost at those others.

use super::state::{Exchange, MemberRequest, Presence};
use crate::stragglers::Quorum;

impl Exchange {
    /// Notes that a member is lost. The caller then calls [`Exchange::end_if_complete`] for every slot.
    pub fn lose(&mut self, member: u32) {
        let presence = std::mem::replace(&mut self.presence[member as usize], Presence::Lost);
        if matches!(presence, Presence::NotYet | Presence::Lost) {
            return;
        }
        // It may have left here and died before it had left elsewhere.
        self.departures += u32::from(!std::mem::replace(&mut self.departed[member as usize], true));
        for slot in 0..self.chunks.len() as u32 {
            self.member_mut(slot, member).request = MemberRequest::None;
            self.count_awaited(slot);
        }
    }

    /// Begins the steps under way again if all members are lost: nothing that they contributed to them counts. Returns
    /// whether they are; the caller then drops the sums.
    pub fn begin_steps_again(&mut self) -> bool {
        if (0..self.rules.members).any(|member| !self.is_lost(member)) {
            return false;
        }
        for slot in 0..self.chunks.len() as u32 {
            let step = self.step(slot);
            (self.chunks[slot as usize].arrived, self.chunks[slot as usize].folded) = (0, 0);
            for member in 0..self.rules.members {
                self.member_mut(slot, member).next_step = step;
            }
            self.count_awaited(slot);
        }
        self.former_contributions.clear();
        true
    }

    /// Gives the place of a lost member to another process, and returns the first step to which that process may
    /// contribute at these chunks: the newest step that is under way at any of them, or that the former process
    /// has reached. Until [`Exchange::join_at`] no chunk goes beyond it.
    ///
    /// The caller first calls [`Exchange::begin_steps_again`] or adds what the former process has contributed to the
    /// sums, and then calls [`Exchange::end_if_complete`] for every slot, since there may be enough members again.
    pub fn rejoin(&mut self, member: u32) -> u32 {
        debug_assert!(self.is_lost(member), "only the place of a lost member is given away");
        let slots = 0..self.chunks.len() as u32;
        let reached = |slot| (self.step(slot)).max(self.member(slot, member).next_step);
        let step = slots.map(reached).max().unwrap_or(0);
        self.presence[member as usize] = match self.presence[member as usize] {
            Presence::NotYet => Presence::Newcomer,
            _ => Presence::Present,
        };
        self.departed[member as usize] = false;
        self.departures -= 1;
        for slot in 0..self.chunks.len() as u32 {
            if self.has_contributed(slot, member, self.step(slot)) {
                self.former_contributions.insert((slot, member));
            }
        }
        self.start_at(member, step);
        step
    }

    /// Returns whether all chunks have parameters to start from. Until then a process that takes a lost member's place begins
    /// like the first ones: rank 0 sends parameters, and the others wait for them.
    pub fn have_all_begun(&self) -> bool {
        self.chunks.iter().all(|chunk| chunk.initialised)
    }

    /// Has a process that has [rejoined](Exchange::rejoin) contribute from `step` on. The caller then calls
    /// [`Exchange::end_if_complete`] for every slot.
    pub fn join_at(&mut self, member: u32, step: u32) {
        debug_assert!(step >= self.joined_at[member as usize], "the latest of all routes' steps is meant");
        self.start_at(member, step);
    }

    /// Has a process that has [rejoined](Exchange::rejoin) begin like the first ones, because chunks of some route have no
    /// parameters yet. One of rank 0 then sends all, those that are here among them.
    pub fn join_at_start(&mut self, member: u32) {
        self.start_may_repeat |= self.rules.rank_0 == Some(member);
    }

    fn start_at(&mut self, member: u32, step: u32) {
        self.joined_at[member as usize] = step;
        for slot in 0..self.chunks.len() as u32 {
            let state = self.member_mut(slot, member);
            (state.next_step, state.request, state.is_prompt) = (step, MemberRequest::None, true);
            self.count_awaited(slot);
        }
    }

    /// Moves a chunk on to the first step to which a present member will contribute, if nobody will contribute to
    /// the steps before: all that could have done so are lost. The parameters stay as they are. Returns whether
    /// the chunk has moved; the caller then calls [`Exchange::mark_due_answers`].
    pub fn skip_missed_steps(&mut self, slot: u32) -> bool {
        let chunk = self.chunks[slot as usize];
        let is_idle = chunk.initialised && chunk.arrived == 0 && chunk.awaited == 0;
        if self.rules.quorum.is_none() || !is_idle || !self.has_enough_members() {
            return false;
        }
        let present = (0..self.rules.members).filter(|&member| !self.departed[member as usize]);
        let first = present.map(|member| self.member(slot, member).next_step).min();
        let Some(first) = first.filter(|&first| u64::from(first) > chunk.version) else { return false };
        self.chunks[slot as usize].version = u64::from(first);
        self.count_awaited(slot);
        true
    }

    /// Returns whether the chunk's sum of `step` has a contribution of this member's present process, or of the
    /// process that is lost if no other has taken its place.
    pub fn has_contributed(&self, slot: u32, member: u32, step: u32) -> bool {
        step >= self.joined_at[member as usize] && self.member(slot, member).next_step > step
    }

    /// The first step to which the process contributes that has the member's place, 0 if it was there from the beginning.
    pub fn joined_at(&self, member: u32) -> u32 {
        self.joined_at[member as usize]
    }

    /// Returns whether a member is lost and no other process has taken its place, or no process has had it yet.
    pub fn is_lost(&self, member: u32) -> bool {
        matches!(self.presence[member as usize], Presence::NotYet | Presence::Lost)
    }

    /// Returns whether steps may end: enough members are not lost.
    pub(super) fn has_enough_members(&self) -> bool {
        match self.rules.quorum {
            Some(Quorum::NotLost { least }) => {
                let present = (0..self.rules.members).filter(|&member| !self.is_lost(member)).count() as u32;
                present >= least.min(self.rules.members)
            }
            _ => true,
        }
    }
}
