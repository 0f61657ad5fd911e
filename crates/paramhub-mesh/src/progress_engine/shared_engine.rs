//! The threads that run the engine: the mesh's own, and callers. A caller begins a small operation itself, and runs the engine
//! while it waits for one. That spares two changes of threads, which take longer than a small operation.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use paramhub_transport::runtime::{as_io_thread, become_io_thread, on_io_thread, panic_message};
use paramhub_transport::{Events, Interest, Poller, Waker};

use super::{NextTurn, ProgressEngine, WAKER};
use crate::error::{MeshError, MeshRank};

/// The time for which the mesh's thread leaves the engine to callers after one has had it.
const CALLER_PERIOD: Duration = Duration::from_micros(500);

/// The engine, which one thread at a time runs.
///
/// The mesh's thread waits in one of two ways: for whatever happens at the mesh; or, where callers run the engine, only to be
/// woken. Then it looks again after [`CALLER_PERIOD`]; what they have left goes on within twice that time.
pub(crate) struct SharedEngine {
    this_rank: MeshRank,
    /// `None` once the mesh has ended.
    engine: Mutex<Option<ProgressEngine>>,
    /// The engine's poller.
    poller: Arc<Poller>,
    /// What the mesh's thread waits for while it leaves the engine to callers: its waker.
    thread_poller: Poller,
    waker: Waker,
    /// Counts how often callers have come for the engine.
    visits: AtomicU64,
    /// Whether the mesh's thread leaves the engine to callers. Once it has reset this it runs the engine, before it waits again.
    is_left_to_callers: AtomicBool,
    /// Whether callers have waited for the operations that they had begun. One that does not needs the mesh's thread at once.
    callers_wait: AtomicBool,
}

/// The way in which the mesh ended.
pub(super) enum MeshEnd {
    Left,
    Failed(MeshError),
}

impl SharedEngine {
    pub(crate) fn new(engine: ProgressEngine) -> std::io::Result<Self> {
        let thread_poller = Poller::new()?;
        thread_poller.add(&engine.waker, WAKER, Interest::READABLE)?;
        Ok(SharedEngine {
            this_rank: engine.in_flight.this_rank.clone(),
            poller: Arc::clone(&engine.poller),
            thread_poller,
            waker: engine.waker.clone(),
            engine: Mutex::new(Some(engine)),
            visits: AtomicU64::new(0),
            is_left_to_callers: AtomicBool::new(false),
            callers_wait: AtomicBool::new(false),
        })
    }

    /// Starts the mesh's thread. The receiver gets the way in which the mesh ended.
    pub(crate) fn start(this: &Arc<Self>) -> std::io::Result<Receiver<Result<(), MeshError>>> {
        let (this, (sender, ended)) = (Arc::clone(this), sync_channel(1));
        thread::Builder::new().name("paramhub-mesh".into()).spawn(move || {
            let outcome = this.run();
            // Whoever hears of the end finds no descriptors of this thread's left.
            drop(this);
            // It is possible that no thread waits for the outcome.
            let _ = sender.send(outcome);
        })?;
        Ok(ended)
    }

    /// Serves the mesh until this rank leaves it or it fails. On return every operation has ended.
    fn run(&self) -> Result<(), MeshError> {
        become_io_thread();
        let end = catch_unwind(AssertUnwindSafe(|| self.serve()))
            .unwrap_or_else(|panic| MeshEnd::Failed(self.internal(&panic_message(&*panic))));
        let engine = self.lock().take().expect("only this thread takes the engine");
        engine.close(end)
    }

    fn serve(&self) -> MeshEnd {
        match self.run_until_left() {
            Ok(()) => MeshEnd::Left,
            Err(error) => {
                if let Some(engine) = &mut *self.lock()
                    && !engine.has_panicked
                {
                    engine.end_what_is_complete();
                }
                MeshEnd::Failed(error)
            }
        }
    }

    fn run_until_left(&self) -> Result<(), MeshError> {
        let mut events = Events::with_capacity(256);
        let mut visits_seen = 0;
        loop {
            let (next, is_idle, is_leaving) = match &mut *self.lock() {
                Some(engine) => {
                    let next = engine.turn(&mut events);
                    engine.is_ending = !matches!(next, Ok(NextTurn::Within(_)));
                    (next?, engine.is_idle(), engine.leaving.is_some())
                }
                None => unreachable!("only this thread takes the engine"),
            };
            let NextTurn::Within(timeout) = next else { return Ok(()) };
            let mut is_left = is_idle && self.have_callers_come(&mut visits_seen);
            if !is_left {
                self.wait(&self.poller, &mut events, timeout)?;
                // While this rank leaves, callers are refused.
                is_left = !is_leaving && matches!(self.engine.try_lock(), Err(TryLockError::WouldBlock));
            }
            if is_left {
                self.is_left_to_callers.store(true, Ordering::Release);
                while is_left {
                    self.wait(&self.thread_poller, &mut events, CALLER_PERIOD)?;
                    is_left = events.is_empty() && self.have_callers_come(&mut visits_seen);
                }
                self.is_left_to_callers.store(false, Ordering::Release);
                self.wait(&self.poller, &mut events, Duration::ZERO)?;
            }
        }
    }

    /// Returns whether callers have come for the engine since the last call.
    fn have_callers_come(&self, visits_seen: &mut u64) -> bool {
        let visits = self.visits.load(Ordering::Relaxed);
        std::mem::replace(visits_seen, visits) != visits
    }

    fn wait(&self, poller: &Poller, events: &mut Events, timeout: Duration) -> Result<(), MeshError> {
        poller.wait(events, Some(timeout)).map_err(|error| MeshError::System {
            this_rank: self.this_rank.clone(),
            what: "wait for peers",
            reason: error.to_string().into(),
        })
    }

    /// Wakes the mesh's thread.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// Begins the small operation that the caller has just queued, if it is all there is to do and the caller is expected to
    /// wait for it. Otherwise the mesh's thread does.
    pub(crate) fn begin(&self) {
        let has_begun = self.callers_wait.load(Ordering::Relaxed)
            && self.with_engine(|engine| {
                let may_begin = engine.is_idle() && self.is_left_to_callers.load(Ordering::Acquire);
                if may_begin {
                    self.attempt(engine, ProgressEngine::work);
                    self.callers_wait.store(engine.is_idle(), Ordering::Relaxed);
                }
                may_begin && !engine.must_go_on()
            }) == Some(true);
        if !has_begun {
            self.wake();
        }
    }

    /// Runs the engine on the thread of a caller that waits, until `is_done`, until `deadline`, or until the mesh's thread must
    /// run it. Does nothing if another thread has it. The caller then waits as if it had not called this.
    pub(crate) fn advance(&self, is_done: impl Fn() -> bool, deadline: Option<Instant>) {
        self.callers_wait.store(true, Ordering::Relaxed);
        self.with_engine(|engine| {
            self.attempt(engine, |engine| engine.run_for_caller(is_done, deadline));
            // Other callers may wait for what is still under way, by their operations' ends.
            if !engine.is_idle() || engine.must_go_on() {
                self.wake();
            }
        });
    }

    /// Calls `run` with the engine, if no other thread has it and the mesh is not about to end.
    fn with_engine<R>(&self, run: impl FnOnce(&mut ProgressEngine) -> R) -> Option<R> {
        // A callback runs inside of the engine.
        if on_io_thread() {
            return None;
        }
        self.visits.fetch_add(1, Ordering::Relaxed);
        // The mesh's thread would wait for the lock, which is not fair.
        if self.waker.is_woken() {
            return None;
        }
        // After a panic of the mesh's thread the mesh is about to end, too.
        let mut engine = self.engine.try_lock().ok()?;
        engine.as_mut().filter(|engine| engine.may_run_for_caller()).map(run)
    }

    /// Does work of the engine on the thread of a caller. The mesh's thread ends the mesh if it fails.
    fn attempt(
        &self,
        engine: &mut ProgressEngine,
        work: impl FnOnce(&mut ProgressEngine) -> Result<(), MeshError>,
    ) {
        let outcome = catch_unwind(AssertUnwindSafe(|| as_io_thread(|| work(engine))));
        let failure = match outcome {
            Ok(outcome) => outcome.err(),
            Err(panic) => {
                engine.has_panicked = true;
                Some(self.internal(&panic_message(&*panic)))
            }
        };
        if let Some(failure) = failure {
            engine.failure_at_caller.get_or_insert(failure);
        }
    }

    fn internal(&self, reason: &str) -> MeshError {
        MeshError::Internal { this_rank: self.this_rank.clone(), reason: reason.into() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<ProgressEngine>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
