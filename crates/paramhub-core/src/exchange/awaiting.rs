//! These functions find what members wait for at a chunk, and which member must send it.

use super::state::{Exchange, MemberRequest, StepStage};
use super::violation::Awaited;
use crate::consistency::Consistency;

impl Exchange {
    /// Returns what members wait for at this chunk, if they do. The answer stays the same until it has come.
    pub fn awaits(&self, slot: u32) -> Option<Awaited> {
        let chunk = self.chunks[slot as usize];
        let step = chunk.version as u32;
        if !chunk.initialised {
            return self.has_waiting(slot).then_some(Awaited::Parameters);
        }
        match (chunk.stage, self.rules.consistency) {
            // All contributions from below are here. If the sum went up, the site above knows what is
            // missing.
            (StepStage::SummingFactors | StepStage::SentUp, _) => None,
            // Until all chunks are held, members wait for something at another chunk.
            (StepStage::Held, _) => self.held_step().map(Awaited::Release),
            (StepStage::Open, _) if chunk.arrived > 0 => Some(Awaited::Contribution(step)),
            (StepStage::Open, Consistency::BoundedStaleness(_)) => {
                self.has_waiting(slot).then(|| Awaited::Contribution(self.slowest(slot)))
            }
            (StepStage::Open, Consistency::Synchronous | Consistency::Asynchronous) => None,
        }
    }

    /// The members that others wait for, ascending, if [`awaits`](Self::awaits) returns a contribution.
    pub fn late(&self, slot: u32) -> impl Iterator<Item = u32> + '_ {
        let chunk = self.chunks[slot as usize];
        let (members, last) = match chunk.arrived > 0 {
            true => (chunk.reach.together, chunk.version),
            false => (self.member_count(slot), self.slowest(slot).into()),
        };
        (0..members).filter(move |&member| {
            !self.departed[member as usize] && u64::from(self.member(slot, member).next_step) <= last
        })
    }

    fn has_waiting(&self, slot: u32) -> bool {
        let waits = |member| matches!(self.member(slot, member).request, MemberRequest::Waiting(_));
        (0..self.rules.members).any(waits)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Answer, ChunkReach, Rules, SumAction};
    use super::*;

    fn rules(consistency: Consistency, two_phase: bool) -> Rules {
        Rules {
            workers: 3,
            members: 3,
            first_members: 3,
            first_site: 3,
            rank_0: Some(0),
            consistency,
            reproducible: false,
            has_parameters: true,
            two_phase,
            quorum: None,
            rewind_every: None,
        }
    }

    fn begun(consistency: Consistency, two_phase: bool, chunks: u32) -> Exchange {
        let mut exchange = Exchange::new(rules(consistency, two_phase), chunks);
        for slot in 0..chunks {
            exchange.initialise(slot, Some(0), 0).unwrap();
            answer(&mut exchange, slot);
        }
        exchange
    }

    fn answer(exchange: &mut Exchange, slot: u32) {
        let mut owed = Vec::new();
        exchange.mark_due_answers(slot, |member, _| owed.push(member));
        owed.into_iter().for_each(|member| exchange.answer_begun(slot, member));
    }

    fn push(exchange: &mut Exchange, slot: u32, member: u32, step: u32) {
        exchange.push(slot, member, step, Answer::Parameters).unwrap();
        answer(exchange, slot);
    }

    fn late(exchange: &Exchange, slot: u32) -> Vec<u32> {
        exchange.late(slot).collect()
    }

    #[test]
    fn initial_parameters_are_awaited_once_a_rank_asks_for_them() {
        let mut exchange = Exchange::new(rules(Consistency::Synchronous, false), 1);
        assert_eq!(exchange.awaits(0), None);
        exchange.pull(0, 2, 0).unwrap();
        assert_eq!(exchange.awaits(0), Some(Awaited::Parameters));
        exchange.initialise(0, Some(0), 0).unwrap();
        answer(&mut exchange, 0);
        assert_eq!(exchange.awaits(0), None);
    }

    #[test]
    fn contributions_are_awaited_from_the_first_on_until_the_last() {
        let mut exchange = begun(Consistency::Synchronous, false, 2);
        assert_eq!((exchange.awaits(0), exchange.awaits(1)), (None, None));
        push(&mut exchange, 0, 1, 0);
        assert_eq!((exchange.awaits(0), exchange.awaits(1)), (Some(Awaited::Contribution(0)), None));
        assert_eq!(late(&exchange, 0), [0, 2]);
        push(&mut exchange, 0, 0, 0);
        assert_eq!(late(&exchange, 0), [2]);
        push(&mut exchange, 0, 2, 0);
        assert_eq!(exchange.awaits(0), None);
        push(&mut exchange, 0, 2, 1);
        assert_eq!((exchange.awaits(0), late(&exchange, 0)), (Some(Awaited::Contribution(1)), vec![0, 1]));
    }

    #[test]
    fn a_release_is_awaited_once_all_chunks_are_held() {
        let mut exchange = begun(Consistency::Synchronous, true, 2);
        (0..3).for_each(|member| push(&mut exchange, 0, member, 0));
        assert_eq!(exchange.awaits(0), None, "what is awaited is at the other chunk");
        push(&mut exchange, 1, 0, 0);
        assert_eq!((exchange.awaits(1), late(&exchange, 1)), (Some(Awaited::Contribution(0)), vec![1, 2]));
        (1..3).for_each(|member| push(&mut exchange, 1, member, 0));
        assert_eq!([0, 1].map(|slot| exchange.awaits(slot)), [Some(Awaited::Release(0)); 2]);
        exchange.release(Some(0), 0).unwrap();
        assert_eq!([0, 1].map(|slot| exchange.awaits(slot)), [None; 2]);
    }

    #[test]
    fn a_rank_too_far_ahead_waits_for_the_slowest() {
        let mut exchange = begun(Consistency::BoundedStaleness(1), false, 1);
        push(&mut exchange, 0, 1, 0);
        assert_eq!(exchange.awaits(0), None);
        push(&mut exchange, 0, 2, 0);
        push(&mut exchange, 0, 1, 1);
        assert_eq!((exchange.awaits(0), late(&exchange, 0)), (Some(Awaited::Contribution(0)), vec![0]));
        push(&mut exchange, 0, 0, 0);
        assert_eq!(exchange.awaits(0), None);
        let mut exchange = begun(Consistency::Asynchronous, false, 1);
        (0..5).for_each(|step| push(&mut exchange, 0, 1, step));
        assert_eq!(exchange.awaits(0), None);
    }

    #[test]
    fn the_sum_of_the_site_above_is_not_awaited_here() {
        let rules = Rules { workers: 6, ..rules(Consistency::Synchronous, false) };
        let reach = ChunkReach { members: 3, together: 3, has_above: true, site_first: false };
        let mut exchange = Exchange::among_sites(rules, [reach]);
        exchange.initialise(0, Some(0), 0).unwrap();
        answer(&mut exchange, 0);
        (0..2).for_each(|member| push(&mut exchange, 0, member, 0));
        assert_eq!(exchange.awaits(0), Some(Awaited::Contribution(0)));
        push(&mut exchange, 0, 2, 0);
        assert_eq!(exchange.awaits(0), None);
        assert!(matches!(exchange.lower(0, 0), Ok(SumAction::Update(_))));
        answer(&mut exchange, 0);
        assert_eq!(exchange.awaits(0), None);
    }
}
