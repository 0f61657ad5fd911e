//! The queue of one variable: the operations that have it, and those that wait for it in order of push.

use std::collections::VecDeque;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Access {
    Read,
    Mutate,
}

/// Either any number of readers have the variable or one mutator. An operation that cannot have it at once
/// waits behind all that came before, so that none overtakes a mutation and no mutation starves.
pub(super) struct Queue<T> {
    readers: usize,
    mutated: bool,
    waiting: VecDeque<(Access, T)>,
}

impl<T> Queue<T> {
    pub(super) fn new() -> Queue<T> {
        Queue { readers: 0, mutated: false, waiting: VecDeque::new() }
    }

    /// True if the variable is given at once; else `entry` makes the entry that waits.
    pub(super) fn enter(&mut self, access: Access, entry: impl FnOnce() -> T) -> bool {
        let free = self.waiting.is_empty() && self.admits(access);
        match free {
            true => self.admit(access),
            false => self.waiting.push_back((access, entry())),
        }
        free
    }

    /// Gives the variable back. Calls `give`, in order of push, with each entry that has it now: one
    /// mutation, or all reads up to the next mutation.
    pub(super) fn leave(&mut self, access: Access, mut give: impl FnMut(T)) {
        match access {
            Access::Read => self.readers -= 1,
            Access::Mutate => self.mutated = false,
        }
        while let Some((access, _)) = self.waiting.front() {
            let access = *access;
            if !self.admits(access) {
                return;
            }
            self.admit(access);
            give(self.waiting.pop_front().expect("it was in front").1);
        }
    }

    /// Returns whether an operation with this access can have it: it is free, or the operation reads and only
    /// readers have it.
    pub(super) fn admits(&self, access: Access) -> bool {
        !self.mutated && (access == Access::Read || self.readers == 0)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    fn admit(&mut self, access: Access) {
        match access {
            Access::Read => self.readers += 1,
            Access::Mutate => self.mutated = true,
        }
    }
}
