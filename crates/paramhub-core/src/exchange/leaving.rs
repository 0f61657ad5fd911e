//! Members that leave of their own accord, and those that wait in vain for something only they could send.

use super::actions::Answer;
use super::state::{Exchange, MemberRequest, StepStage};
use super::violation::{Awaited, LeftWhileAwaited};

impl Exchange {
    /// Notes that a member has left of its own accord, and calls `on_due` as [`Exchange::mark_due_answers`] does, for
    /// every slot whose answers may now leave.
    ///
    /// Fails if another member waits for something that only a member that has left could send.
    pub fn leave(
        &mut self,
        member: u32,
        mut on_due: impl FnMut(u32, u32, Answer),
    ) -> Result<(), LeftWhileAwaited> {
        self.departed[member as usize] = true;
        self.departures += 1;
        for slot in 0..self.chunks.len() as u32 {
            // An answer that may leave is still sent.
            if let MemberRequest::Waiting(_) = self.member(slot, member).request {
                self.member_mut(slot, member).request = MemberRequest::None;
            }
            self.count_awaited(slot);
            self.mark_due_answers(slot, |waiting, answer| on_due(slot, waiting, answer));
            self.check_waits(slot)?;
        }
        Ok(())
    }

    /// Fails if a member waits at this chunk for one that has left. The caller calls it after every pull, after every
    /// push without an update, and after every acknowledgement of a standby without one.
    pub fn check_waits(&self, slot: u32) -> Result<(), LeftWhileAwaited> {
        if self.departures == self.absent {
            return Ok(());
        }
        let chunk = self.chunks[slot as usize];
        // Another process may take the place of a member that is lost.
        let has_left = |&member: &u32| self.departed[member as usize] && !self.is_lost(member);
        let gone_rank_0 = self.rules.rank_0.filter(has_left);
        let missing = if !chunk.initialised {
            gone_rank_0.map(|rank_0| (rank_0, Awaited::Parameters))
        } else if chunk.awaits_standby {
            // Members wait for the standby, and the caller calls this again when it has acknowledged.
            None
        } else if chunk.stage == StepStage::SummingFactors {
            // All contributions are here.
            None
        } else if chunk.stage == StepStage::Held {
            let step = chunk.version as u32;
            let gone = gone_rank_0.filter(|_| self.released != Some(step));
            gone.map(|rank_0| (rank_0, Awaited::Release(step)))
        } else if self.quorum(slot).is_none() {
            self.missing(slot)
                .find(|&member| self.departed[member as usize])
                .map(|member| (member, Awaited::Contribution(chunk.version as u32)))
        } else {
            None
        };
        let waits = |member: u32| {
            matches!(self.member(slot, member).request, MemberRequest::Waiting(_))
                && !self.departed[member as usize]
        };
        // A member that steps with no other waits for what that one may still send.
        let members = match missing {
            Some((_, Awaited::Contribution(_))) => chunk.reach.together,
            _ => self.rules.members,
        };
        match missing {
            Some((member, awaited)) if (0..members).any(waits) => Err(LeftWhileAwaited { member, awaited }),
            _ => Ok(()),
        }
    }
}
