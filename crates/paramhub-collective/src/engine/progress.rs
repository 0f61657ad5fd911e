//! How many operations are in flight, who may push, and who waits for fewer.
//!
//! Whoever pushes counts what is pushed and whoever runs counts what has ended, so that neither writes the other's line of
//! the cache for each operation. A pusher looks at the second count only when the last look does not suffice any more.

use std::time::Duration;

use super::spin::spin;
use super::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering};

/// In [`Progress::ended`]: somebody waits. On the same word as the count, so that whoever ends an operation hears of the
/// wait or the wait of the end, without a barrier.
const WAITED_FOR: u64 = 1 << 63;

pub(super) struct Progress {
    limit: u64,
    spin: Duration,
    /// Held while an operation enters its queues.
    pushes: Mutex<Pushes>,
    pushed: AtomicU64,
    ended: Apart<AtomicU64>,
    /// The most that somebody waits for: fewer operations in flight than this.
    wanted: AtomicU64,
    waits: Mutex<Vec<u64>>,
    fewer: Condvar,
}

/// On a line of the cache of its own, and of the one that processors fetch with it.
#[repr(align(128))]
struct Apart<T>(T);

#[derive(Default)]
struct Pushes {
    ended: u64,
    closed: bool,
}

/// The right to enter queues, before anybody who pushes later.
pub(super) struct Turn<'a> {
    pub(super) number: u64,
    _pushes: MutexGuard<'a, Pushes>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Full(u64),
    Closed,
}

impl Progress {
    pub(super) fn new(limit: u64, spin: Duration) -> Progress {
        Progress {
            limit,
            spin,
            pushes: Mutex::new(Pushes::default()),
            pushed: AtomicU64::new(0),
            ended: Apart(AtomicU64::new(0)),
            wanted: AtomicU64::new(0),
            waits: Mutex::new(Vec::new()),
            fewer: Condvar::new(),
        }
    }

    /// Counts one operation as pushed. Waits for room, unless `inside` one: what would make room may wait for that.
    pub(super) fn push(&self, inside: bool) -> Result<Turn<'_>, Refusal> {
        let limit = if inside { 2 * self.limit } else { self.limit };
        loop {
            let mut pushes = self.pushes.lock().expect("nothing panics under this lock");
            if pushes.closed {
                return Err(Refusal::Closed);
            }
            let number = self.pushed.load(Ordering::Relaxed);
            if number - pushes.ended >= limit {
                pushes.ended = self.ended();
            }
            if number - pushes.ended < limit {
                self.pushed.store(number + 1, Ordering::Release);
                return Ok(Turn { number, _pushes: pushes });
            }
            drop(pushes);
            if inside {
                return Err(Refusal::Full(limit));
            }
            // Room for many, so that this thread does not sleep and wake for each.
            self.wait_for_fewer_than(limit - limit / 4);
        }
    }

    pub(super) fn end(&self) {
        let ended = self.ended.0.fetch_add(1, Ordering::AcqRel) + 1;
        if ended & WAITED_FOR != 0 {
            let wanted = self.wanted.load(Ordering::Relaxed);
            if self.pushed().saturating_sub(ended & !WAITED_FOR) < wanted {
                drop(self.waits.lock().expect("nothing panics under this lock"));
                self.fewer.notify_all();
            }
        }
    }

    pub(super) fn pushed(&self) -> u64 {
        self.pushed.load(Ordering::Acquire)
    }

    pub(super) fn in_flight(&self) -> u64 {
        // In this order: what has ended was pushed before.
        let ended = self.ended();
        self.pushed() - ended
    }

    pub(super) fn wait_for_fewer_than(&self, wanted: u64) {
        if spin(self.spin, || self.in_flight() < wanted) {
            return;
        }
        let mut waits = self.waits.lock().expect("nothing panics under this lock");
        waits.push(wanted);
        self.tell(&waits);
        while self.in_flight() >= wanted {
            waits = self.fewer.wait(waits).expect("nothing panics under this lock");
        }
        let mine = waits.iter().position(|&wait| wait == wanted).expect("it was put there");
        waits.swap_remove(mine);
        self.tell(&waits);
    }

    pub(super) fn close(&self) {
        self.pushes.lock().expect("nothing panics under this lock").closed = true;
    }

    fn tell(&self, waits: &[u64]) {
        match waits.iter().max() {
            None => self.ended.0.fetch_and(!WAITED_FOR, Ordering::AcqRel),
            Some(&wanted) => {
                self.wanted.store(wanted, Ordering::Relaxed);
                self.ended.0.fetch_or(WAITED_FOR, Ordering::AcqRel)
            }
        };
    }

    fn ended(&self) -> u64 {
        self.ended.0.load(Ordering::Acquire) & !WAITED_FOR
    }
}
