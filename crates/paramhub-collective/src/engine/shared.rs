//! The state that threads, pushers and completions share, and the way of an operation from its push to its
//! end.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::config::{EngineConfig, Observer};
use super::error::PushError;
use super::failure::Failure;
use super::graph::{VariableQueue, enter, leave};
use super::in_flight_limit::{InFlightLimit, PushRefusal};
use super::kind::Kind;
use super::operation::{Operation, OperationRole, Outcome};
use super::ready::ReadyQueue;

/// The maximum of failures kept, of which `wait_for_all` reports the first.
const UNREPORTED_MAX: usize = 1024;

thread_local! {
    /// The engine whose thread this is; 0 for none.
    static ENGINE: Cell<u64> = const { Cell::new(0) };
}

pub(super) struct Shared {
    pub(super) id: u64,
    pub(super) in_flight_limit: InFlightLimit,
    /// The ready operations of each kind.
    ready: [ReadyQueue<Operation>; 3],
    observer: Option<Arc<dyn Observer>>,
    failures: Mutex<Failures>,
    closed: AtomicBool,
}

/// Failures that no wait has reported.
#[derive(Default)]
struct Failures {
    unreported: Vec<Arc<Failure>>,
    poisoned: Vec<Weak<VariableQueue<Operation>>>,
    /// The number of poisoned variables at which those that are gone or clean are removed.
    sort_at: usize,
}

/// The operations that one end released; each thread keeps one, so that it seldom allocates.
#[derive(Default)]
pub(super) struct Released {
    all: VecDeque<Operation>,
    runnable: Vec<Operation>,
}

impl Shared {
    pub(super) fn new(config: &EngineConfig) -> Shared {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Shared {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            in_flight_limit: InFlightLimit::new(config.in_flight, config.spin),
            ready: [(); 3].map(|()| ReadyQueue::new(config.spin)),
            observer: config.observer.clone(),
            failures: Mutex::default(),
            closed: AtomicBool::new(false),
        }
    }

    pub(super) fn is_own_thread(&self) -> bool {
        ENGINE.get() == self.id
    }

    pub(super) fn push(&self, operation: Operation) -> Result<(), PushError> {
        let ready = match self.in_flight_limit.push(self.is_own_thread()) {
            Ok(permit) => {
                operation.0.head().number.store(permit.number, Ordering::Relaxed);
                enter(&operation)
            }
            Err(refusal) => {
                let operation = operation.0.head().name.clone().into_owned();
                return Err(match refusal {
                    PushRefusal::Full(limit) => PushError::Full { operation, limit },
                    PushRefusal::Closed => PushError::Closed { operation },
                });
            }
        };
        if ready {
            self.begin(operation);
        }
        Ok(())
    }

    /// A wait is in one queue only, and so needs no lock on pushes.
    pub(super) fn push_wait(&self, wait: Operation) {
        if enter(&wait) {
            self.begin(wait);
        }
    }

    /// Runs a thread, which takes the operations of this kind.
    pub(super) fn work(self: &Arc<Self>, kind: Kind) {
        ENGINE.set(self.id);
        let ready = &self.ready[kind as usize];
        let mut released = Released::default();
        let mut next = None;
        while let Some(operation) = next.take().or_else(|| ready.take()) {
            if let Some(outcome) = self.run(&operation) {
                self.observe_end(&operation, outcome.is_ok());
                self.end(&operation, outcome, &mut released);
                drop(operation);
                next = self.keep_one(&mut released, kind);
            }
        }
    }

    /// Ends an operation for the holder of its completion.
    pub(super) fn end_elsewhere(&self, operation: &Operation, outcome: Outcome) {
        let mut released = Released::default();
        self.observe_end(operation, outcome.is_ok());
        self.end(operation, outcome, &mut released);
        self.put(&mut released.runnable);
    }

    /// Records a failure that no variable need show.
    pub(super) fn record(&self, operation: &Operation, reason: String) -> Arc<Failure> {
        let head = operation.0.head();
        let failure = Failure { number: head.number(), operation: head.name.clone().into_owned(), reason };
        let failure = Arc::new(failure);
        let unreported = &mut self.failures().unreported;
        let known = unreported.iter().any(|known| known.number == failure.number);
        if !known && unreported.len() < UNREPORTED_MAX {
            unreported.push(Arc::clone(&failure));
        }
        failure
    }

    pub(super) fn reported(&self, failure: &Failure) {
        self.failures().unreported.retain(|unreported| unreported.number != failure.number);
    }

    /// Marks all failures as reported and all variables as clean; returns the first failure not reported
    /// before.
    pub(super) fn report_all(&self) -> Option<Arc<Failure>> {
        let Failures { unreported, poisoned, .. } = std::mem::take(&mut *self.failures());
        let mut first = None;
        let found = poisoned.iter().filter_map(Weak::upgrade).filter_map(|queue| queue.take_poison());
        found.chain(unreported).for_each(|failure| {
            Failure::meet(&mut first, &failure);
        });
        first
    }

    /// Closes the engine: no operation begins any more, and those that have not begun are dropped.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        for ready in &self.ready {
            self.drop_all(ready.close());
        }
        // This comes last, so that a thread whose push is refused knows that no operation begins any more.
        self.in_flight_limit.close();
    }

    /// Returns whether the engine is closed.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    fn run(self: &Arc<Self>, operation: &Operation) -> Option<Outcome> {
        if let Some(observer) = &self.observer {
            observe(|| observer.begin(&operation.event()));
        }
        operation.0.run(operation, self)
    }

    fn observe_end(&self, operation: &Operation, succeeded: bool) {
        if let Some(observer) = &self.observer {
            observe(|| observer.end(&operation.event(), succeeded));
        }
    }

    /// Gives a ready operation to the threads of its kind.
    fn begin(&self, operation: Operation) {
        let head = operation.0.head();
        let (OperationRole::Run(kind), false) = (head.role, head.dependencies.is_poisoned()) else {
            let mut released = Released::default();
            released.all.push_back(operation);
            self.sort(&mut released);
            return self.put(&mut released.runnable);
        };
        let entry = (head.priority, operation);
        if let Err(operations) = self.ready[kind as usize].put([entry]) {
            self.drop_all(operations);
        }
    }

    fn end(&self, operation: &Operation, outcome: Outcome, released: &mut Released) {
        let failure = outcome.err().map(|reason| self.record(operation, reason));
        self.leave(operation, failure.as_ref(), released);
        self.in_flight_limit.end();
        self.sort(released);
    }

    fn leave(&self, operation: &Operation, failure: Option<&Arc<Failure>>, released: &mut Released) {
        leave(operation, failure, |next| released.all.push_back(next), |queue| self.poisoned(queue));
    }

    /// Keeps the operations that may run. Ends the others here, and handles in turn what they release: no
    /// recursion, however long the chain.
    fn sort(&self, released: &mut Released) {
        while let Some(operation) = released.all.pop_front() {
            let head = operation.0.head();
            if head.role == OperationRole::Wait {
                operation.0.discard();
                self.leave(&operation, None, released);
            } else if head.dependencies.is_poisoned() || self.closed.load(Ordering::Relaxed) {
                operation.0.discard();
                self.leave(&operation, head.dependencies.poison().as_ref(), released);
                self.in_flight_limit.end();
            } else {
                released.runnable.push(operation);
            }
        }
    }

    /// Puts all operations into the queues of their kinds but one, which the calling thread may run at once
    /// if the queue of its kind is empty.
    fn keep_one(&self, released: &mut Released, own: Kind) -> Option<Operation> {
        let runnable = &mut released.runnable;
        if runnable.is_empty() {
            return None;
        }
        let mut kept: Option<usize> = None;
        if self.ready[own as usize].is_empty() && !self.closed.load(Ordering::Relaxed) {
            for (at, operation) in runnable.iter().enumerate() {
                let head = operation.0.head();
                let before = kept.is_none_or(|kept| runnable[kept].0.head().priority < head.priority);
                if head.role == OperationRole::Run(own) && before {
                    kept = Some(at);
                }
            }
        }
        let kept = kept.map(|at| runnable.remove(at));
        self.put(runnable);
        kept
    }

    fn put(&self, runnable: &mut Vec<Operation>) {
        for kind in Kind::ALL {
            let is_of_kind = |operation: &Operation| operation.0.head().role == OperationRole::Run(kind);
            if !runnable.iter().any(is_of_kind) {
                continue;
            }
            let of_kind = runnable.extract_if(.., |operation| is_of_kind(operation));
            let entries = of_kind.map(|operation| (operation.0.head().priority, operation));
            if let Err(operations) = self.ready[kind as usize].put(entries) {
                self.drop_all(operations);
            }
        }
    }

    fn drop_all(&self, operations: Vec<Operation>) {
        let mut released = Released { all: operations.into(), ..Released::default() };
        self.sort(&mut released);
        debug_assert!(released.runnable.is_empty(), "only a closed engine drops");
    }

    fn poisoned(&self, queue: &Arc<VariableQueue<Operation>>) {
        let mut failures = self.failures();
        if failures.poisoned.len() >= failures.sort_at.max(UNREPORTED_MAX) {
            failures.poisoned.retain(|queue| queue.upgrade().is_some_and(|queue| queue.is_poisoned()));
            failures.sort_at = 2 * failures.poisoned.len();
        }
        failures.poisoned.push(Arc::downgrade(queue));
    }

    fn failures(&self) -> std::sync::MutexGuard<'_, Failures> {
        self.failures.lock().expect("nothing panics under this lock")
    }
}

/// Calls an observer and ignores its panic, which concerns no operation.
fn observe(callback: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(callback)) {
        std::mem::forget(payload);
    }
}
