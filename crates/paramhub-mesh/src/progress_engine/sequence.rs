//! Checks that all ranks call the same collectives in the same order.
//!
//! Each rank announces its collectives to the next one. Where two ranks differ, some two neighbours on the
//! ring differ.

use std::collections::VecDeque;

use crate::descriptor::Descriptor;

/// The number of collectives by which a rank may be ahead of a neighbour.
const AHEAD_MAX: u64 = 1024;
/// The number of comparisons after which the previous rank gets an acknowledgement.
const ACKNOWLEDGE_EVERY: u64 = 256;

#[derive(Debug, Default)]
pub(crate) struct Sequence {
    /// The number of collectives begun.
    begun: u64,
    /// The number compared with the previous rank's.
    compared: u64,
    /// The number that the next rank has compared, as far as it has acknowledged.
    acknowledged: u64,
    /// `true` if the next rank has left: it acknowledges nothing any more.
    next_has_left: bool,
    /// Collectives that this rank has begun and not compared.
    ours: VecDeque<Descriptor>,
    /// Collectives that the previous rank has begun and this rank has not compared.
    theirs: VecDeque<Descriptor>,
}

/// A difference between the collectives of two ranks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    pub(crate) number: u64,
    pub(crate) ours: Descriptor,
    pub(crate) theirs: Descriptor,
}

impl Sequence {
    /// The number of collectives that this rank has begun.
    pub(crate) fn begun(&self) -> u64 {
        self.begun
    }

    /// Returns whether the next collective may begin: the neighbours are not too far behind.
    pub(crate) fn may_begin(&self) -> bool {
        let next_follows = self.next_has_left || self.begun - self.acknowledged < AHEAD_MAX;
        next_follows && (self.ours.len() as u64) < AHEAD_MAX
    }

    /// Handles that the next rank has left, perhaps far ahead: this rank begins the same collectives without
    /// its acknowledgement.
    pub(crate) fn next_left(&mut self) {
        self.next_has_left = true;
    }

    /// Begins a collective; returns its number.
    pub(crate) fn begin(&mut self, descriptor: Descriptor) -> u64 {
        self.ours.push_back(descriptor);
        self.begun += 1;
        self.begun - 1
    }

    /// Notes a collective that the previous rank has begun; `false` if it must not have.
    pub(crate) fn announced_by_previous(&mut self, number: u64, descriptor: Descriptor) -> bool {
        let expected = self.compared + self.theirs.len() as u64;
        if number != expected || self.theirs.len() as u64 >= AHEAD_MAX + ACKNOWLEDGE_EVERY {
            return false;
        }
        self.theirs.push_back(descriptor);
        true
    }

    /// Notes that the next rank has compared so many; `false` if it cannot have.
    pub(crate) fn acknowledge(&mut self, compared: u64) -> bool {
        let is_possible = (self.acknowledged..=self.begun).contains(&compared);
        if is_possible {
            self.acknowledged = compared;
        }
        is_possible
    }

    /// Compares as many as possible. Returns the number to acknowledge to the previous rank, if an
    /// acknowledgement is due.
    pub(crate) fn compare(&mut self) -> Result<Option<u64>, Mismatch> {
        let before = self.compared / ACKNOWLEDGE_EVERY;
        while let (Some(&ours), Some(&theirs)) = (self.ours.front(), self.theirs.front()) {
            if ours != theirs {
                return Err(Mismatch { number: self.compared, ours, theirs });
            }
            self.ours.pop_front();
            self.theirs.pop_front();
            self.compared += 1;
        }
        Ok((self.compared / ACKNOWLEDGE_EVERY > before).then_some(self.compared))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor::Collective;

    fn broadcast(root: u32) -> Descriptor {
        Descriptor { root, ..Descriptor::new(Collective::Broadcast) }
    }

    #[test]
    fn a_difference_is_found_whichever_rank_is_ahead() {
        let mut sequence = Sequence::default();
        assert_eq!(sequence.begin(broadcast(0)), 0);
        assert!(
            sequence.announced_by_previous(0, broadcast(0))
                && sequence.announced_by_previous(1, broadcast(1))
        );
        assert_eq!(sequence.compare(), Ok(None));
        sequence.begin(broadcast(0));
        let mismatch = Mismatch { number: 1, ours: broadcast(0), theirs: broadcast(1) };
        assert_eq!(sequence.compare(), Err(mismatch));
    }

    #[test]
    fn a_rank_begins_only_so_many_collectives_ahead_of_the_next() {
        let mut sequence = Sequence::default();
        for _ in 0..AHEAD_MAX {
            assert!(sequence.may_begin());
            sequence.begin(broadcast(0));
        }
        assert!(!sequence.may_begin());
        for number in 0..ACKNOWLEDGE_EVERY {
            assert!(sequence.announced_by_previous(number, broadcast(0)));
        }
        assert_eq!(sequence.compare(), Ok(Some(ACKNOWLEDGE_EVERY)));
        assert!(!sequence.may_begin(), "the next rank has not compared any");
        assert!(sequence.acknowledge(ACKNOWLEDGE_EVERY));
        assert!(sequence.may_begin());
        let mut alone = Sequence::default();
        alone.next_left();
        for number in 0..2 * AHEAD_MAX {
            assert!(alone.may_begin() && alone.announced_by_previous(number, broadcast(0)));
            alone.begin(broadcast(0));
            alone.compare().unwrap();
        }
        assert!(!sequence.acknowledge(AHEAD_MAX + 1) && !sequence.acknowledge(0), "impossible");
        assert!(!sequence.announced_by_previous(ACKNOWLEDGE_EVERY + 1, broadcast(0)), "one was left out");
    }
}
