//! The limit on operations in flight: it counts them, admits pushes, and wakes threads that wait for fewer.
//!
//! Pushing threads count pushes and running threads count ends, so that neither writes the other's cache line
//! for each operation. A pusher reads the second count only when its last reading no longer proves that there
//! is room.

use std::time::Duration;

use super::spin::spin;
use super::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering};

/// A flag in [`InFlightLimit::ended`]: a thread waits. It is in the same word as the count, so that either
/// the thread that ends an operation sees the wait or the wait sees the end, without a barrier.
const WAITED_FOR: u64 = 1 << 63;

pub(super) struct InFlightLimit {
    limit: u64,
    spin: Duration,
    /// Held while an operation enters its queues.
    pushes: Mutex<Pushes>,
    pushed: AtomicU64,
    ended: CachePadded<AtomicU64>,
    /// The largest number that a thread waits for; it waits until fewer operations are in flight.
    wanted: AtomicU64,
    waits: Mutex<Vec<u64>>,
    fewer: Condvar,
}

/// Puts a value on a cache line of its own, and on the neighbour that processors fetch with it.
#[repr(align(128))]
struct CachePadded<T>(T);

#[derive(Default)]
struct Pushes {
    ended: u64,
    closed: bool,
}

/// The right to enter queues ahead of any later push.
pub(super) struct PushPermit<'a> {
    pub(super) number: u64,
    _pushes: MutexGuard<'a, Pushes>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PushRefusal {
    Full(u64),
    Closed,
}

impl InFlightLimit {
    pub(super) fn new(limit: u64, spin: Duration) -> InFlightLimit {
        InFlightLimit {
            limit,
            spin,
            pushes: Mutex::new(Pushes::default()),
            pushed: AtomicU64::new(0),
            ended: CachePadded(AtomicU64::new(0)),
            wanted: AtomicU64::new(0),
            waits: Mutex::new(Vec::new()),
            fewer: Condvar::new(),
        }
    }

    /// Counts one operation as pushed. Waits for room, unless `inside` an operation: the operations that
    /// would make room may wait for that one.
    pub(super) fn push(&self, inside: bool) -> Result<PushPermit<'_>, PushRefusal> {
        let limit = if inside { 2 * self.limit } else { self.limit };
        loop {
            let mut pushes = self.pushes.lock().expect("nothing panics under this lock");
            if pushes.closed {
                return Err(PushRefusal::Closed);
            }
            let number = self.pushed.load(Ordering::Relaxed);
            if number - pushes.ended >= limit {
                pushes.ended = self.ended();
            }
            if number - pushes.ended < limit {
                self.pushed.store(number + 1, Ordering::Release);
                return Ok(PushPermit { number, _pushes: pushes });
            }
            drop(pushes);
            if inside {
                return Err(PushRefusal::Full(limit));
            }
            // Wait for room for many, so that this thread does not sleep and wake for each.
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
        // Read in this order, for every operation that has ended was pushed before.
        let ended = self.ended();
        self.pushed() - ended
    }

    pub(super) fn wait_for_fewer_than(&self, wanted: u64) {
        if spin(self.spin, || self.in_flight() < wanted) {
            return;
        }
        let mut waits = self.waits.lock().expect("nothing panics under this lock");
        waits.push(wanted);
        self.publish_waits(&waits);
        while self.in_flight() >= wanted {
            waits = self.fewer.wait(waits).expect("nothing panics under this lock");
        }
        let mine = waits.iter().position(|&wait| wait == wanted).expect("it was put there");
        waits.swap_remove(mine);
        self.publish_waits(&waits);
    }

    pub(super) fn close(&self) {
        self.pushes.lock().expect("nothing panics under this lock").closed = true;
    }

    fn publish_waits(&self, waits: &[u64]) {
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
