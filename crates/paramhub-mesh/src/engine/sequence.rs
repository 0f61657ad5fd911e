//! Whether all ranks call the same collectives in the same order.
//!
//! Each rank tells the next one what it begins. Where two ranks differ, somewhere on the way round two neighbours differ.

use std::collections::VecDeque;

use crate::descriptor::Descriptor;

/// How far a rank may be ahead of a neighbour.
const AHEAD_MAX: u64 = 1024;
/// Comparisons after which the previous rank is told.
const TOLD_EVERY: u64 = 256;

#[derive(Debug, Default)]
pub(crate) struct Sequence {
    /// Collectives begun.
    begun: u64,
    /// Compared with the previous rank's.
    compared: u64,
    /// Compared by the next rank, as far as it has told.
    acknowledged: u64,
    /// It tells nothing any more.
    next_has_left: bool,
    /// Begun and not compared.
    ours: VecDeque<Descriptor>,
    /// Begun by the previous rank and not compared.
    theirs: VecDeque<Descriptor>,
}

/// A difference.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    pub(crate) number: u64,
    pub(crate) ours: Descriptor,
    pub(crate) theirs: Descriptor,
}

impl Sequence {
    /// Collectives this rank has begun.
    pub(crate) fn begun(&self) -> u64 {
        self.begun
    }

    /// Whether the next collective may begin: the neighbours are not too far behind.
    pub(crate) fn may_begin(&self) -> bool {
        let next_follows = self.next_has_left || self.begun - self.acknowledged < AHEAD_MAX;
        next_follows && (self.ours.len() as u64) < AHEAD_MAX
    }

    /// The next rank has left, perhaps far ahead: what it has begun is begun here without its word.
    pub(crate) fn next_left(&mut self) {
        self.next_has_left = true;
    }

    /// This rank begins a collective; returns its number.
    pub(crate) fn begin(&mut self, descriptor: Descriptor) -> u64 {
        self.ours.push_back(descriptor);
        self.begun += 1;
        self.begun - 1
    }

    /// The previous rank has begun one; `false` if it must not have.
    pub(crate) fn hear(&mut self, number: u64, descriptor: Descriptor) -> bool {
        let expected = self.compared + self.theirs.len() as u64;
        if number != expected || self.theirs.len() as u64 >= AHEAD_MAX + TOLD_EVERY {
            return false;
        }
        self.theirs.push_back(descriptor);
        true
    }

    /// The next rank has compared so many; `false` if it cannot have.
    pub(crate) fn acknowledge(&mut self, compared: u64) -> bool {
        let is_possible = (self.acknowledged..=self.begun).contains(&compared);
        if is_possible {
            self.acknowledged = compared;
        }
        is_possible
    }

    /// Compares what can be compared. Returns what the previous rank is to be told, if it is.
    pub(crate) fn compare(&mut self) -> Result<Option<u64>, Mismatch> {
        let before = self.compared / TOLD_EVERY;
        while let (Some(&ours), Some(&theirs)) = (self.ours.front(), self.theirs.front()) {
            if ours != theirs {
                return Err(Mismatch { number: self.compared, ours, theirs });
            }
            self.ours.pop_front();
            self.theirs.pop_front();
            self.compared += 1;
        }
        Ok((self.compared / TOLD_EVERY > before).then_some(self.compared))
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
    fn a_difference_is_found_whoever_is_ahead() {
        let mut sequence = Sequence::default();
        assert_eq!(sequence.begin(broadcast(0)), 0);
        assert!(sequence.hear(0, broadcast(0)) && sequence.hear(1, broadcast(1)));
        assert_eq!(sequence.compare(), Ok(None));
        sequence.begin(broadcast(0));
        let mismatch = Mismatch { number: 1, ours: broadcast(0), theirs: broadcast(1) };
        assert_eq!(sequence.compare(), Err(mismatch));
    }

    #[test]
    fn nobody_runs_away() {
        let mut sequence = Sequence::default();
        for _ in 0..AHEAD_MAX {
            assert!(sequence.may_begin());
            sequence.begin(broadcast(0));
        }
        assert!(!sequence.may_begin());
        for number in 0..TOLD_EVERY {
            assert!(sequence.hear(number, broadcast(0)));
        }
        assert_eq!(sequence.compare(), Ok(Some(TOLD_EVERY)));
        assert!(!sequence.may_begin(), "the next rank has not compared any");
        assert!(sequence.acknowledge(TOLD_EVERY));
        assert!(sequence.may_begin());
        let mut alone = Sequence::default();
        alone.next_left();
        for number in 0..2 * AHEAD_MAX {
            assert!(alone.may_begin() && alone.hear(number, broadcast(0)));
            alone.begin(broadcast(0));
            alone.compare().unwrap();
        }
        assert!(!sequence.acknowledge(AHEAD_MAX + 1) && !sequence.acknowledge(0), "impossible");
        assert!(!sequence.hear(TOLD_EVERY + 1, broadcast(0)), "one was left out");
    }
}
