//! Chunks that two hubs have: one that serves them, and its [standby](crate::standbys).
//!
//! At the hub that serves, a complete sum goes to the standby as it would go to a site above. The standby
//! [follows](Exchange::follow): it makes the update of that step from the sum, and acknowledges the version that this makes.
//! Only then does the hub that serves make its own update and answer. The parameters to start from take the same way. So
//! whatever a worker has been answered is at the standby.
//!
//! If the standby is lost, the connection manager has the hub that serves [go on alone](Exchange::go_on_alone). If the hub that
//! serves is lost, the standby [takes over](Exchange::take_over). Workers then repeat at it what was not answered, as they
//! would over a stream that replaces another.

use super::actions::SumAction;
use super::state::{Exchange, MemberRequest, StepStage};
use super::violation::ProtocolViolation;
use crate::standbys::Role;

impl Exchange {
    /// Sets which of the two hubs of the chunks this one is. The caller does so before anything else.
    pub fn set_role(&mut self, role: Role) {
        self.role = role;
    }

    /// Returns whether this hub is the standby of the chunks.
    pub fn stands_by(&self) -> bool {
        self.role == Role::StandsBy
    }

    /// Returns whether the chunks have a standby that must acknowledge what workers are answered.
    pub fn has_standby(&self) -> bool {
        self.role == Role::Serves { has_standby: true }
    }

    /// Takes the sum of `step` at the standby: all members have contributed to it. `Repeated`: it was here before its stream was
    /// cut, and is to be acknowledged once more.
    pub fn follow(&mut self, slot: u32, step: u32) -> Result<SumAction, ProtocolViolation> {
        let chunk = self.chunks[slot as usize];
        let expected = chunk.version as u32;
        match u64::from(step) {
            _ if !chunk.initialised => return Err(ProtocolViolation::NotInitialised),
            got if got + 1 == chunk.version => return Ok(SumAction::Repeated),
            got if got < chunk.version => return Err(ProtocolViolation::StepBehind { expected, got: step }),
            got if got > chunk.version => return Err(ProtocolViolation::StepAhead { expected, got: step }),
            _ if step == u32::MAX => return Err(ProtocolViolation::StepsExhausted),
            _ => {}
        }
        for member in 0..self.rules.members {
            self.member_mut(slot, member).next_step = step + 1;
        }
        let contributors = self.contributors();
        Ok(SumAction::Update(self.chunks[slot as usize].update(step, contributors)))
    }

    /// Takes the standby's acknowledgement that it has this version of a chunk. Returns what to do with the sum if the sum under
    /// way makes that version; otherwise the caller calls [`Exchange::mark_due_answers`].
    pub fn acknowledged(&mut self, slot: u32, version: u32) -> Result<Option<SumAction>, ProtocolViolation> {
        let chunk = &mut self.chunks[slot as usize];
        let version = u64::from(version);
        if version <= chunk.version {
            // What was sent once more over another stream is acknowledged twice.
            chunk.awaits_standby &= version < chunk.version;
            return Ok(None);
        }
        chunk.awaits_standby = false;
        self.lower(slot, (version - 1) as u32).map(Some)
    }

    /// Has the chunks go on without their standby. The caller then calls [`Exchange::complete_alone`] for every slot.
    pub fn go_on_alone(&mut self) {
        self.role = Role::Serves { has_standby: false };
        for chunk in &mut self.chunks {
            chunk.reach.has_above = false;
            chunk.awaits_standby = false;
        }
    }

    /// Returns what to do with a sum for which the standby was awaited; `None` if there is none, and the caller calls
    /// [`Exchange::mark_due_answers`].
    pub fn complete_alone(&mut self, slot: u32) -> Option<SumAction> {
        let chunk = self.chunks[slot as usize];
        let step = chunk.version as u32;
        (chunk.stage == StepStage::SentUp).then(|| self.complete(slot, step, self.contributors()))
    }

    /// Has chunks that this hub serves alone get a standby. Those that have not begun yet have it from now on; the others are to be
    /// [copied](Self::begin_copy).
    pub fn take_standby(&mut self) {
        self.role = Role::Serves { has_standby: true };
        for chunk in &mut self.chunks {
            chunk.reach.has_above = !chunk.initialised;
        }
    }

    /// Begins to copy a chunk to the new standby, whose acknowledgement it awaits from now on. Returns whether the caller must send
    /// parameters and state: `false` if the chunk has that standby already.
    pub fn begin_copy(&mut self, slot: u32) -> bool {
        let chunk = &mut self.chunks[slot as usize];
        let is_due = !chunk.reach.has_above;
        if is_due {
            (chunk.reach.has_above, chunk.awaits_standby) = (true, true);
        }
        is_due
    }

    /// Returns whether the standby has not acknowledged yet the parameters that it begins with.
    pub fn awaits_standby(&self, slot: u32) -> bool {
        self.chunks[slot as usize].awaits_standby
    }

    /// Has the standby serve the chunks from now on. Members repeat every request that was not answered.
    pub fn take_over(&mut self) {
        self.role = Role::Serves { has_standby: false };
        for slot in 0..self.chunks.len() as u32 {
            for member in 0..self.rules.members {
                self.member_mut(slot, member).request = MemberRequest::Cut;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Answer, ChunkReach, Rules};
    use super::*;
    use crate::consistency::Consistency;

    const MEMBERS: u32 = 2;

    fn exchange(role: Role) -> Exchange {
        let rules = Rules {
            workers: MEMBERS,
            members: MEMBERS,
            first_members: MEMBERS,
            first_site: MEMBERS,
            rank_0: Some(0),
            consistency: Consistency::Synchronous,
            reproducible: false,
            has_parameters: true,
            two_phase: false,
            quorum: None,
            rewind_every: None,
        };
        let has_above = role == Role::Serves { has_standby: true };
        let mut exchange = Exchange::among_sites(
            rules,
            [ChunkReach { members: MEMBERS, together: MEMBERS, has_above, site_first: false }],
        );
        exchange.set_role(role);
        exchange
    }

    /// A hub that serves and its standby, both with the parameters to start from.
    fn pair() -> (Exchange, Exchange) {
        let (mut serving, mut standby) =
            (exchange(Role::Serves { has_standby: true }), exchange(Role::StandsBy));
        assert_eq!(serving.initialise(0, Some(0), 0), Ok(true));
        assert!(due(&mut serving).is_empty(), "the standby has no parameters yet");
        assert_eq!(standby.initialise(0, None, 0), Ok(true));
        assert_eq!(serving.acknowledged(0, 0), Ok(None));
        assert_eq!(due(&mut serving), [0]);
        (serving, standby)
    }

    /// The members whose answers may leave now, which then do.
    fn due(exchange: &mut Exchange) -> Vec<u32> {
        let mut members = Vec::new();
        exchange.mark_due_answers(0, |member, _| members.push(member));
        members.iter().for_each(|&member| exchange.answer_begun(0, member));
        members
    }

    fn push(exchange: &mut Exchange, member: u32, step: u32) -> SumAction {
        exchange.push(0, member, step, Answer::Parameters).unwrap().then
    }

    #[test]
    fn no_answer_leaves_before_the_standby_has_its_sum() {
        let (mut serving, mut standby) = pair();
        assert_eq!([push(&mut serving, 0, 0), push(&mut serving, 1, 0)], [SumAction::Wait, SumAction::Raise]);
        assert!(due(&mut serving).is_empty());
        assert!(matches!(standby.follow(0, 0), Ok(SumAction::Update(update)) if update.contributions == 2));
        assert!(matches!(serving.acknowledged(0, 1), Ok(Some(SumAction::Update(_)))));
        assert_eq!(due(&mut serving), [0, 1]);
        assert_eq!((serving.step(0), standby.step(0)), (1, 1));
    }

    #[test]
    fn what_goes_once_more_is_followed_and_counted_once() {
        let (mut serving, mut standby) = pair();
        for member in 0..MEMBERS {
            push(&mut serving, member, 0);
        }
        assert!(matches!(standby.follow(0, 0), Ok(SumAction::Update(_))));
        assert_eq!(standby.initialise(0, None, 0), Ok(false));
        assert_eq!(standby.follow(0, 0), Ok(SumAction::Repeated));
        assert!(matches!(serving.acknowledged(0, 1), Ok(Some(SumAction::Update(_)))));
        assert_eq!(serving.acknowledged(0, 1), Ok(None), "the second acknowledgement");
        assert_eq!(standby.follow(0, 2), Err(ProtocolViolation::StepAhead { expected: 1, got: 2 }));
        assert_eq!(serving.acknowledged(0, 3), Err(ProtocolViolation::NotAwaited(2)));
    }

    #[test]
    fn a_hub_that_goes_on_alone_ends_the_steps_for_which_the_standby_was_awaited() {
        let (mut serving, _) = pair();
        for member in 0..MEMBERS {
            push(&mut serving, member, 0);
        }
        serving.go_on_alone();
        assert!(matches!(serving.complete_alone(0), Some(SumAction::Update(_))));
        assert_eq!(serving.complete_alone(0), None);
        assert_eq!(due(&mut serving), [0, 1]);
        assert!(matches!([push(&mut serving, 0, 1), push(&mut serving, 1, 1)], [_, SumAction::Update(_)]));
        let mut alone = exchange(Role::Serves { has_standby: true });
        alone.initialise(0, Some(0), 0).unwrap();
        alone.go_on_alone();
        assert_eq!((alone.complete_alone(0), due(&mut alone)), (None, vec![0]));
    }

    #[test]
    fn a_standby_that_takes_over_knows_what_was_answered_and_what_was_not() {
        let (mut serving, mut standby) = pair();
        for member in 0..MEMBERS {
            push(&mut serving, member, 0);
        }
        standby.follow(0, 0).unwrap();
        // The hub is lost after the standby has followed: member 0 has its answer, and member 1 has not.
        standby.take_over();
        assert_eq!(push(&mut standby, 0, 1), SumAction::Wait);
        assert_eq!(push(&mut standby, 1, 0), SumAction::Repeated);
        assert_eq!(due(&mut standby), [1]);
        assert!(matches!(push(&mut standby, 1, 1), SumAction::Update(update) if update.step == 1));
        assert_eq!(due(&mut standby), [0, 1]);
    }

    #[test]
    fn rank_0_sends_parameters_again_that_the_standby_has_or_has_not() {
        for has_them in [false, true] {
            let mut standby = exchange(Role::StandsBy);
            if has_them {
                standby.initialise(0, None, 0).unwrap();
            }
            standby.take_over();
            assert_eq!(standby.initialise(0, Some(0), 0), Ok(!has_them));
            assert_eq!(due(&mut standby), [0]);
        }
    }

    #[test]
    fn a_chunk_is_copied_in_the_middle_of_a_step_and_cannot_move_on_before() {
        let (mut serving, _) = pair();
        serving.go_on_alone();
        for step in 0..2 {
            push(&mut serving, 0, step);
            assert!(matches!(push(&mut serving, 1, step), SumAction::Update(_)));
            assert_eq!(due(&mut serving), [0, 1]);
        }
        push(&mut serving, 0, 2);
        serving.take_standby();
        assert!(serving.has_standby() && serving.begin_copy(0) && serving.awaits_standby(0));
        assert!(!serving.begin_copy(0), "once");
        assert_eq!(push(&mut serving, 1, 2), SumAction::Raise);
        assert!(due(&mut serving).is_empty());
        let mut standby = exchange(Role::StandsBy);
        assert_eq!(standby.initialise_state(0, None, serving.updates(0)), Ok(true));
        assert_eq!(standby.initialise(0, None, serving.step(0)), Ok(true));
        assert_eq!(serving.acknowledged(0, 2), Ok(None));
        assert!(!serving.awaits_standby(0) && due(&mut serving).is_empty());
        let followed = standby.follow(0, 2);
        assert!(matches!(followed, Ok(SumAction::Update(update)) if update.number == 3));
        assert!(matches!(serving.acknowledged(0, 3), Ok(Some(SumAction::Update(_)))));
        assert_eq!(due(&mut serving), [0, 1]);
        standby.take_over();
        assert_eq!([push(&mut standby, 0, 2), push(&mut standby, 1, 2)], [SumAction::Repeated; 2]);
        assert_eq!(due(&mut standby), [0, 1]);
    }

    #[test]
    fn a_chunk_that_has_not_begun_gets_its_standby_with_its_parameters() {
        let mut serving = exchange(Role::Serves { has_standby: true });
        serving.go_on_alone();
        serving.take_standby();
        assert!(!serving.begin_copy(0));
        assert_eq!(serving.initialise_state(0, Some(0), 3), Ok(true));
        serving.answer_begun(0, 0);
        assert_eq!(serving.initialise(0, Some(0), 7), Ok(true));
        assert!(serving.awaits_standby(0));
        assert_eq!(serving.acknowledged(0, 7), Ok(None));
        assert!(!serving.awaits_standby(0));
    }

    #[test]
    fn a_standby_that_is_lost_before_it_has_its_copy_holds_nobody_up() {
        let (mut serving, _) = pair();
        serving.go_on_alone();
        serving.take_standby();
        serving.begin_copy(0);
        push(&mut serving, 0, 0);
        assert_eq!(push(&mut serving, 1, 0), SumAction::Raise);
        serving.go_on_alone();
        assert!(matches!(serving.complete_alone(0), Some(SumAction::Update(_))));
        assert_eq!(due(&mut serving), [0, 1]);
        serving.take_standby();
        assert!(serving.begin_copy(0), "the next standby gets the chunk, too");
    }
}
