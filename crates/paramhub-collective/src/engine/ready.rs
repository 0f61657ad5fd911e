//! Operations that are ready, and the threads of one kind that run them.
//!
//! **Who is woken.** A thread that looks for work is searching: one that spins, or was called from its sleep and has not
//! come back yet. Whoever puts operations in calls a sleeper only for those that no searching thread will take. While a
//! thread wakes up, which takes longer than pushing hundreds of operations, these cost no system call each. What holds
//! under the lock: there are as many searching threads as operations, or nobody sleeps.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::spin::spin;
use super::sync::{AtomicUsize, Condvar, Mutex, Ordering};

/// Empty levels kept for the next priorities, so that they need no allocation.
const SPARE: usize = 8;

pub(super) struct Pool<T> {
    state: Mutex<State<T>>,
    /// As in the state, for those who need only a hint.
    length: AtomicUsize,
    call: Condvar,
    spin: Duration,
}

struct State<T> {
    levels: Levels<T>,
    searching: usize,
    sleeping: usize,
    /// Of those searching, how many have yet to notice that they need not sleep any more.
    called: usize,
    closed: bool,
}

impl<T> Pool<T> {
    pub(super) fn new(spin: Duration) -> Pool<T> {
        let levels = Levels { levels: BTreeMap::new(), spare: Vec::new(), length: 0 };
        let state = State { levels, searching: 0, sleeping: 0, called: 0, closed: false };
        Pool { state: Mutex::new(state), length: AtomicUsize::new(0), call: Condvar::new(), spin }
    }

    /// A hint: another thread may be putting something in.
    pub(super) fn is_empty(&self) -> bool {
        self.length.load(Ordering::Relaxed) == 0
    }

    /// # Errors
    /// The entries, if the pool is closed.
    pub(super) fn put(&self, entries: impl IntoIterator<Item = (i32, T)>) -> Result<(), Vec<T>> {
        let called = {
            let mut state = self.state.lock().expect("nothing panics under this lock");
            if state.closed {
                return Err(entries.into_iter().map(|(_, entry)| entry).collect());
            }
            entries.into_iter().for_each(|(priority, entry)| state.levels.push(priority, entry));
            self.length.store(state.levels.length, Ordering::Relaxed);
            let called = state.sleeping.min(state.levels.length.saturating_sub(state.searching));
            state.sleeping -= called;
            state.searching += called;
            state.called += called;
            called
        };
        (0..called).for_each(|_| self.call.notify_one());
        Ok(())
    }

    /// The first of the highest priority, as soon as there is one. None once the pool is closed.
    pub(super) fn take(&self) -> Option<T> {
        let mut state = self.state.lock().expect("nothing panics under this lock");
        let (mut searching, mut has_spun) = (false, false);
        loop {
            if let Some(entry) = state.levels.pop() {
                state.searching -= usize::from(searching);
                self.length.store(state.levels.length, Ordering::Relaxed);
                return Some(entry);
            }
            if state.closed {
                return None;
            }
            // One spinning thread is enough to take the next operation without a system call.
            if !has_spun && state.searching == 0 && !self.spin.is_zero() {
                state.searching += 1;
                (searching, has_spun) = (true, true);
                drop(state);
                spin(self.spin, || !self.is_empty());
                state = self.state.lock().expect("nothing panics under this lock");
                continue;
            }
            state.searching -= usize::from(searching);
            state.sleeping += 1;
            while state.called == 0 && !state.closed {
                state = self.call.wait(state).expect("nothing panics under this lock");
            }
            if state.closed {
                return None;
            }
            state.called -= 1;
            (searching, has_spun) = (true, true);
        }
    }

    /// Ends all takes; what has not been taken comes back.
    pub(super) fn close(&self) -> Vec<T> {
        let mut state = self.state.lock().expect("nothing panics under this lock");
        state.closed = true;
        self.length.store(0, Ordering::Relaxed);
        self.call.notify_all();
        std::iter::from_fn(|| state.levels.pop()).collect()
    }
}

/// Entries by priority, and in order of arrival among equals.
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
