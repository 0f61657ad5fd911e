//! What a job has exchanged so far.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a job has exchanged since it was joined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Bytes that this worker has sent, headers included.
    pub bytes_sent: u64,
    /// Bytes that this worker has received, headers included.
    pub bytes_received: u64,
    /// Requests that ended well, each key of a request for several counted.
    pub requests: u64,
    /// Time during which at least one request was under way.
    pub in_flight: Duration,
    /// Streams that were cut and opened again, by the same path or another.
    pub streams_moved: u64,
}

/// The counters, which the I/O thread writes and any thread reads.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    bytes_sent: AtomicU64,
    bytes_received: AtomicU64,
    requests: AtomicU64,
    streams_moved: AtomicU64,
    /// Locked only when the first request begins and when the last one ends.
    in_flight: Mutex<InFlight>,
}

#[derive(Debug, Default)]
struct InFlight {
    total: Duration,
    since: Option<Instant>,
}

impl Counters {
    pub(crate) fn sent(&self, bytes: usize) {
        self.bytes_sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn received(&self, bytes: usize) {
        self.bytes_received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn finished(&self, requests: u32) {
        self.requests.fetch_add(requests.into(), Ordering::Relaxed);
    }

    pub(crate) fn moved_one(&self) {
        self.streams_moved.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes whether any request is under way.
    pub(crate) fn set_in_flight(&self, any: bool) {
        let mut in_flight = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        match in_flight.since {
            None if any => in_flight.since = Some(Instant::now()),
            Some(since) if !any => {
                in_flight.total += since.elapsed();
                in_flight.since = None;
            }
            _ => {}
        }
    }

    pub(crate) fn read(&self) -> Statistics {
        let in_flight = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        Statistics {
            bytes_sent: self.bytes_sent.load(Ordering::Relaxed),
            bytes_received: self.bytes_received.load(Ordering::Relaxed),
            requests: self.requests.load(Ordering::Relaxed),
            streams_moved: self.streams_moved.load(Ordering::Relaxed),
            in_flight: in_flight.total + in_flight.since.map_or(Duration::ZERO, |since| since.elapsed()),
        }
    }
}
