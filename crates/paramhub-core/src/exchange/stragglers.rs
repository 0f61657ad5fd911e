//! Steps that end without late members.
//!
//! Each chunk decides for itself when its step ends, and its mean is over the members counted there. A late
//! member does not wait: the hub drops its contribution and answers it at once. So a member that waits has
//! contributed.
//!
//! Among sites this holds at a chunk's owner, whose members are workers of its own and whole sites. The members of another
//! site wait for one another, and what they contribute together comes in time or late as a whole. Medians and quorums count
//! workers.
//!
//! A ring of chunks and workers that wait for each other cannot close if every worker pushes every chunk once
//! before it pushes any chunk again. For suppose that all workers wait. A chunk at which a member waits lacks
//! a *prompt* member, one that was counted in the chunk's previous step. That prompt member waits at another
//! chunk and has the newest parameters of that chunk; it has had them since before it was counted at the
//! first chunk. So the last update of the other chunk is the older one, and the other chunk lacks a prompt
//! member in its turn: the chain would never end. A late member cannot take the place of a prompt one in this
//! argument, so prompt members are counted apart. If the prompt member is a site, the argument is about the worker of it that
//! has not contributed.

use super::actions::{Answer, Arrival, Fold, SumAction, Update};
use super::state::{Exchange, MemberRequest, MemberState, Presence};
use super::violation::ProtocolViolation;
use crate::stragglers::Quorum;

impl Exchange {
    /// Takes a contribution to the step under way, or drops one to a step that is over.
    pub(super) fn push_in_time_or_late(
        &mut self,
        slot: u32,
        member: u32,
        step: u32,
        answer: Answer,
    ) -> Result<Arrival, ProtocolViolation> {
        let workers = self.workers_of[member as usize];
        let chunk = &mut self.chunks[slot as usize];
        if u64::from(step) < chunk.version {
            let next_step = u32::try_from(chunk.version).map_err(|_| ProtocolViolation::StepsExhausted)?;
            chunk.awaited += workers;
            let request = MemberRequest::Waiting(answer);
            let state = self.member_mut(slot, member);
            (state.next_step, state.request, state.is_prompt) = (next_step, request, false);
            return Ok(Arrival { fold: Fold::Drop, then: SumAction::Late });
        }
        let fold = Fold::Sum { starts_sum: chunk.folded == 0, parked: 0..0 };
        chunk.arrived += workers;
        chunk.folded += 1;
        chunk.awaited -= workers;
        let state = self.member(slot, member);
        self.chunks[slot as usize].prompt -= if state.is_prompt { workers } else { 0 };
        *self.member_mut(slot, member) =
            MemberState { next_step: step + 1, request: MemberRequest::Waiting(answer), ..state };
        let then = self.end_if_complete(slot).map_or(SumAction::Wait, SumAction::Update);
        Ok(Arrival { fold, then })
    }

    /// Ends the chunk's step under way if all contributions that it waits for are here. The caller calls it
    /// for every slot after a member has left, was lost or has joined. It then calls [`Exchange::mark_due_answers`] and runs the optimizer, in
    /// either order.
    pub fn end_if_complete(&mut self, slot: u32) -> Option<Update> {
        let (chunk, quorum) = (self.chunks[slot as usize], self.quorum(slot)?);
        let is_complete = chunk.awaited == 0
            || match quorum {
                Quorum::Count(count) => chunk.arrived >= count || chunk.prompt == 0,
                Quorum::Clock | Quorum::NotLost { .. } => false,
            };
        if is_complete && self.has_enough_members() { self.end_step(slot) } else { None }
    }

    /// Ends the chunk's step under way with the contributions that are here, if there are any. The caller
    /// then calls [`Exchange::mark_due_answers`] and runs the optimizer, in either order.
    pub fn end_step(&mut self, slot: u32) -> Option<Update> {
        let chunk = self.chunks[slot as usize];
        if chunk.arrived == 0 {
            return None;
        }
        for member in 0..self.rules.members {
            let is_missing = !self.has_contributed(slot, member, chunk.version as u32)
                && !self.former_contributions.remove(&(slot, member));
            self.member_mut(slot, member).is_prompt = !is_missing;
            let was_expected = match self.presence[member as usize] {
                Presence::Present => !self.departed[member as usize],
                Presence::Newcomer => {
                    let has_joined = chunk.version >= u64::from(self.joined_at[member as usize]);
                    has_joined && !self.departed[member as usize]
                }
                Presence::NotYet => false,
                Presence::Lost => true,
            };
            self.left_out[member as usize] += u64::from(is_missing && was_expected);
        }
        let update = self.chunks[slot as usize].update(chunk.version as u32, chunk.arrived);
        self.count_awaited(slot);
        Some(update)
    }

    /// Returns whether at least half of the workers that are expected to contribute to the step under way
    /// have done so, or all that contributed to the step before.
    pub fn has_median(&self, slot: u32) -> bool {
        let chunk = self.chunks[slot as usize];
        let has_median = chunk.arrived >= chunk.awaited || chunk.prompt == 0;
        self.quorum(slot).is_some() && chunk.arrived > 0 && has_median
    }

    /// For each member, how many updates of chunks were made without it; empty if the job waits for all members.
    pub fn left_out(&self) -> &[u64] {
        &self.left_out
    }

    /// Notes that the newest parameters have begun to leave for a member: it may contribute to the step under way.
    pub fn catch_up(&mut self, slot: u32, member: u32) {
        if self.quorum(slot).is_none() {
            return;
        }
        let version = self.chunks[slot as usize].version as u32;
        if self.member(slot, member).next_step < version {
            self.member_mut(slot, member).next_step = version;
            let is_here = !self.departed[member as usize];
            self.chunks[slot as usize].awaited += if is_here { self.workers_of[member as usize] } else { 0 };
        }
    }

    /// Counts the workers that may contribute to the step under way and have not.
    pub(super) fn count_awaited(&mut self, slot: u32) {
        if self.quorum(slot).is_some() {
            let version = self.chunks[slot as usize].version;
            let (mut awaited, mut prompt) = (0, 0);
            for member in (0..self.rules.members).filter(|&member| !self.departed[member as usize]) {
                let state = self.member(slot, member);
                if u64::from(state.next_step) == version {
                    let workers = self.workers_of[member as usize];
                    awaited += workers;
                    prompt += if state.is_prompt { workers } else { 0 };
                }
            }
            let chunk = &mut self.chunks[slot as usize];
            (chunk.awaited, chunk.prompt) = (awaited, prompt);
        }
    }

    /// [`count_awaited`](Self::count_awaited) for all chunks.
    pub(super) fn await_all(&mut self) {
        for slot in 0..self.chunks.len() as u32 {
            self.count_awaited(slot);
        }
    }
}
