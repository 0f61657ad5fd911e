//! A timeline of an engine's operations and of other recorded spans: what ran when, on which thread.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use super::config::{Event, Observer};
use super::kind::Kind;

/// An [`Observer`] that keeps the newest operations with their times, for
/// [`write_chrome`](super::write_chrome).
///
/// It is off at first; then it costs a load of one atomic for each operation.
pub struct Trace {
    /// The instant from which times are counted.
    origin: Instant,
    /// The maximum of spans kept.
    limit: usize,
    is_on: AtomicBool,
    state: Mutex<TraceState>,
}

/// A span of the timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The operation's name.
    pub name: String,
    /// The operation's kind.
    pub kind: Kind,
    /// The thread that began it, in the order in which threads were first seen.
    pub thread: usize,
    /// That thread's name.
    pub thread_name: Arc<str>,
    /// The time since the trace's origin.
    pub start: Duration,
    /// The time since the trace's origin.
    pub end: Duration,
    /// `true` if another thread ended it, while this one did other things.
    pub is_deferred: bool,
}

#[derive(Default)]
struct TraceState {
    threads: Vec<(ThreadId, Arc<str>)>,
    /// Operations that have begun, by their numbers.
    open: HashMap<u64, (usize, Duration)>,
    spans: VecDeque<Span>,
    left_out: u64,
}

impl Trace {
    /// The default maximum of spans: some 20 MB.
    pub const LIMIT: usize = 1 << 17;

    /// A trace whose times count from `origin`. Several processes share it if their traces are to be read
    /// together.
    pub fn since(origin: Instant) -> Trace {
        Trace::with_limit(origin, Trace::LIMIT)
    }

    /// [`since`](Self::since) that keeps at most the newest `limit` spans.
    pub fn with_limit(origin: Instant, limit: usize) -> Trace {
        Trace { origin, limit, is_on: AtomicBool::new(false), state: Mutex::default() }
    }

    /// Begins or ends recording. Operations that began before are not recorded.
    pub fn switch(&self, is_on: bool) {
        let mut state = self.lock();
        state.open.clear();
        self.is_on.store(is_on, Ordering::Relaxed);
    }

    /// Runs something that is no operation, and records it as a span of this thread.
    pub fn note<R>(&self, name: &str, kind: Kind, work: impl FnOnce() -> R) -> R {
        if !self.is_on() {
            return work();
        }
        let start = self.origin.elapsed();
        let made = work();
        let end = self.origin.elapsed();
        let mut state = self.lock();
        let thread = state.this_thread();
        state.keep(name, kind, (thread, start), (thread, end), self.limit);
        made
    }

    /// Takes all spans, in the order of their ends, with the number of older ones that it had no room for.
    pub fn take(&self) -> (Vec<Span>, u64) {
        let mut state = self.lock();
        (std::mem::take(&mut state.spans).into(), std::mem::take(&mut state.left_out))
    }

    fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, TraceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for Trace {
    fn begin(&self, operation: &Event<'_>) {
        if self.is_on() {
            let start = self.origin.elapsed();
            let mut state = self.lock();
            let thread = state.this_thread();
            state.open.insert(operation.number, (thread, start));
        }
    }

    fn end(&self, operation: &Event<'_>, _succeeded: bool) {
        if self.is_on() {
            let end = self.origin.elapsed();
            let mut state = self.lock();
            if let Some(begun) = state.open.remove(&operation.number) {
                let thread = state.this_thread();
                state.keep(operation.name, operation.kind, begun, (thread, end), self.limit);
            }
        }
    }
}

impl TraceState {
    /// The calling thread's position among those that were seen.
    fn this_thread(&mut self) -> usize {
        let this = thread::current();
        if let Some(known) = self.threads.iter().position(|(id, _)| *id == this.id()) {
            return known;
        }
        self.threads.push((this.id(), this.name().unwrap_or("unnamed").into()));
        self.threads.len() - 1
    }

    fn keep(
        &mut self,
        name: &str,
        kind: Kind,
        (thread, start): (usize, Duration),
        (ended_by, end): (usize, Duration),
        limit: usize,
    ) {
        if self.spans.len() >= limit {
            self.left_out += 1;
            // A trace with a limit of 0 keeps no span.
            if self.spans.pop_front().is_none() {
                return;
            }
        }
        let thread_name = Arc::clone(&self.threads[thread].1);
        let is_deferred = thread != ended_by;
        self.spans.push_back(Span {
            name: name.to_owned(),
            kind,
            thread,
            thread_name,
            start,
            end,
            is_deferred,
        });
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace")
            .field("is_on", &self.is_on())
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}
