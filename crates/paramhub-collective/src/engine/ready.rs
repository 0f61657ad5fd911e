//! Operations that are ready, and the threads of one kind that run them.
//!
//! **Which threads are woken.** A thread that looks for work is searching: it spins, or it was woken and has
//! not run yet. A thread that puts operations in wakes sleepers only for those that no searching thread will
//! take. A wakeup takes longer than pushing hundreds of operations, and meanwhile pushes cost no system call
//! each. Invariant under the lock: there are at least as many searching threads as operations, or no thread
//! sleeps.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::spin::spin;
use super::sync::{AtomicUsize, Condvar, Mutex, Ordering};

/// The number of empty levels that are kept for other priorities, so that these need no allocation.
const SPARE: usize = 8;

/// Ready operations, which the threads of one kind take by priority.
pub(super) struct ReadyQueue<T> {
    state: Mutex<ReadyQueueState<T>>,
    /// A copy of the length in the state, for threads that need only a hint.
    length: AtomicUsize,
    wake: Condvar,
    spin: Duration,
}

/// The state of a [`ReadyQueue`], under its lock.
struct ReadyQueueState<T> {
    levels: Levels<T>,
    /// The number of threads that look for work.
    searching: usize,
    /// The number of threads that sleep until they are woken.
    sleeping: usize,
    /// The number of searching threads that were woken and have yet to notice it.
    woken: usize,
    closed: bool,
}

impl<T> ReadyQueue<T> {
    pub(super) fn new(spin: Duration) -> ReadyQueue<T> {
        let levels = Levels { levels: BTreeMap::new(), spare: Vec::new(), length: 0 };
        let state = ReadyQueueState { levels, searching: 0, sleeping: 0, woken: 0, closed: false };
        ReadyQueue { state: Mutex::new(state), length: AtomicUsize::new(0), wake: Condvar::new(), spin }
    }

    /// Returns whether the queue is empty; only a hint, for another thread may be putting an entry in.
    pub(super) fn is_empty(&self) -> bool {
        self.length.load(Ordering::Relaxed) == 0
    }

    /// Puts entries in, each with its priority, and wakes as many sleeping threads as are needed to take
    /// them. `entries` runs under the lock, and so must not panic.
    ///
    /// # Errors
    /// The entries, if the queue is closed.
    pub(super) fn put(&self, entries: impl IntoIterator<Item = (i32, T)>) -> Result<(), Vec<T>> {
        let woken = {
            let mut state = self.state.lock().expect("nothing panics under this lock");
            if state.closed {
                return Err(entries.into_iter().map(|(_, entry)| entry).collect());
            }
            entries.into_iter().for_each(|(priority, entry)| state.levels.push(priority, entry));
            self.length.store(state.levels.length, Ordering::Relaxed);
            let woken = state.sleeping.min(state.levels.length.saturating_sub(state.searching));
            state.sleeping -= woken;
            state.searching += woken;
            state.woken += woken;
            woken
        };
        (0..woken).for_each(|_| self.wake.notify_one());
        Ok(())
    }

    /// The first entry of the highest priority; waits for one. `None` once the queue is closed.
    pub(super) fn take(&self) -> Option<T> {
        let mut state = self.state.lock().expect("nothing panics under this lock");
        let (mut searching, mut may_spin) = (false, true);
        loop {
            if let Some(entry) = state.levels.pop() {
                state.searching -= usize::from(searching);
                self.length.store(state.levels.length, Ordering::Relaxed);
                return Some(entry);
            }
            if state.closed {
                return None;
            }
            // One spinning thread is enough to take the next operation without a system call. A thread spins
            // once before it sleeps, and not again after it was woken.
            if may_spin && state.searching == 0 && !self.spin.is_zero() {
                state.searching += 1;
                (searching, may_spin) = (true, false);
                drop(state);
                spin(self.spin, || !self.is_empty());
                state = self.state.lock().expect("nothing panics under this lock");
                continue;
            }
            state.searching -= usize::from(searching);
            state.sleeping += 1;
            while state.woken == 0 && !state.closed {
                state = self.wake.wait(state).expect("nothing panics under this lock");
            }
            if state.closed {
                return None;
            }
            state.woken -= 1;
            (searching, may_spin) = (true, false);
        }
    }

    /// Ends all takes; returns the entries that were not taken.
    pub(super) fn close(&self) -> Vec<T> {
        let mut state = self.state.lock().expect("nothing panics under this lock");
        state.closed = true;
        self.length.store(0, Ordering::Relaxed);
        self.wake.notify_all();
        std::iter::from_fn(|| state.levels.pop()).collect()
    }
}

/// Entries by priority, and in order of arrival among equals. A level is the queue of one priority.
struct Levels<T> {
    levels: BTreeMap<i32, VecDeque<T>>,
    spare: Vec<VecDeque<T>>,
    length: usize,
}

impl<T> Levels<T> {
    fn push(&mut self, priority: i32, entry: T) {
        let Levels { levels, spare, length } = self;
        levels.entry(priority).or_insert_with(|| spare.pop().unwrap_or_default()).push_back(entry);
        *length += 1;
    }

    fn pop(&mut self) -> Option<T> {
        let mut highest = self.levels.last_entry()?;
        let entry = highest.get_mut().pop_front();
        if highest.get().is_empty() {
            let level = highest.remove();
            if self.spare.len() < SPARE {
                self.spare.push(level);
            }
        }
        self.length -= 1;
        entry
    }
}
