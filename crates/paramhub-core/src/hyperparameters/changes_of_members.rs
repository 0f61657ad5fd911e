//! The member whose changes of hyperparameters hold, in a job that goes on without the members that are lost.

use std::collections::BTreeMap;

use super::Hyperparameters;

/// The newest change that each member has sent for one group of keys.
///
/// All members of such a job send their changes, so that none is missing when the member whose changes hold is lost.
/// The members are to send the same. If they do not, the changes of the member hold that contributes since the earliest
/// step, and among several of these the lowest: a process that has taken the place of a lost one may have begun its
/// learning rate anew.
#[derive(Clone, Debug, Default)]
pub struct ChangesOfMembers {
    /// By the first step to which the member contributes, then by member.
    newest: BTreeMap<(u32, u32), Change>,
}

/// Hyperparameters, and the first step for which they hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// The first step for which they hold.
    pub first_step: u32,
    /// What holds from then on.
    pub hyperparameters: Hyperparameters,
}

impl ChangesOfMembers {
    /// Bytes that the changes of this many members take.
    pub fn memory_bytes(members: u32) -> u64 {
        u64::from(members) * size_of::<((u32, u32), Change)>() as u64
    }

    /// Notes a change that a member has sent, which contributes since the step `since`. Returns whether it holds.
    pub fn note(&mut self, member: u32, since: u32, change: Change) -> bool {
        let newest = self.newest.entry((since, member)).or_insert(change);
        if newest.first_step <= change.first_step {
            *newest = change;
        }
        self.holding() == Some((since, member))
    }

    /// Forgets what a member has sent that is lost or has left. If its changes held, those of another hold from now on:
    /// returns the newest of them.
    pub fn forget(&mut self, member: u32) -> Option<Change> {
        let held = self.holding();
        self.newest.retain(|&(_, other), _| other != member);
        let holds = self.holding();
        holds.filter(|_| holds != held).map(|holds| self.newest[&holds])
    }

    /// The step since which the member contributes whose changes hold, and that member.
    fn holding(&self) -> Option<(u32, u32)> {
        self.newest.keys().next().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(first_step: u32, learning_rate: f64) -> Change {
        Change { first_step, hyperparameters: Hyperparameters { learning_rate, ..Default::default() } }
    }

    #[test]
    fn the_changes_of_the_lowest_member_hold_until_it_is_gone() {
        let mut changes = ChangesOfMembers::default();
        assert!(changes.note(2, 0, change(5, 0.2)), "no lower member has sent one");
        assert!(changes.note(0, 0, change(5, 0.0)));
        assert!(!changes.note(1, 0, change(5, 0.1)));
        assert!(!changes.note(1, 0, change(9, 0.9)));
        assert_eq!(changes.forget(2), None);
        assert_eq!(changes.forget(0), Some(change(9, 0.9)), "the newest of the next member");
        assert!(changes.note(1, 0, change(10, 1.0)));
        assert_eq!(changes.forget(1), None, "nobody has sent one");
        assert!(changes.note(7, 3, change(11, 1.1)));
    }

    #[test]
    fn a_process_that_has_taken_a_place_decides_nothing_while_earlier_ones_are_there() {
        let mut changes = ChangesOfMembers::default();
        assert!(changes.note(0, 0, change(5, 0.5)));
        assert!(!changes.note(1, 0, change(5, 0.5)));
        assert_eq!(changes.forget(0), Some(change(5, 0.5)));
        assert!(!changes.note(0, 7, change(7, 9.9)), "the successor of member 0 began at step 7");
        assert!(!changes.note(2, 6, change(6, 8.8)));
        assert_eq!(changes.forget(1), Some(change(6, 8.8)), "member 2 has been there for longer");
        assert_eq!(changes.forget(2), Some(change(7, 9.9)));
    }

    #[test]
    fn changes_that_a_member_repeats_do_not_replace_newer_ones() {
        let mut changes = ChangesOfMembers::default();
        assert!(changes.note(0, 0, change(1, 0.5)));
        for (first_step, learning_rate) in [(5, 0.5), (9, 0.9), (5, 0.5)] {
            assert!(!changes.note(1, 0, change(first_step, learning_rate)));
        }
        assert_eq!(changes.forget(0), Some(change(9, 0.9)));
    }
}
