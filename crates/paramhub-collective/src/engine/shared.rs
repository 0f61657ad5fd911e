//! What threads, pushers and completions share: the way of an operation from its push to its end.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::config::{EngineConfig, Event, Observer};
use super::error::PushError;
use super::failure::Failure;
use super::graph::{Place, enter, leave};
use super::operation::{Kind, Operation, Outcome, Role};
use super::progress::{Progress, Refusal};
use super::ready::Pool;

/// Failures kept for `wait_for_all` to tell the first of.
const UNTOLD_MAX: usize = 1024;

thread_local! {
    /// The engine whose thread this is; 0 for none.
    static ENGINE: Cell<u64> = const { Cell::new(0) };
}

pub(super) struct Shared {
    pub(super) id: u64,
    pub(super) progress: Progress,
    pools: [Pool<Operation>; 3],
    observer: Option<Arc<dyn Observer>>,
    failures: Mutex<Failures>,
    closed: AtomicBool,
}

/// What no wait has told of.
#[derive(Default)]
struct Failures {
    untold: Vec<Arc<Failure>>,
    poisoned: Vec<Weak<Place<Operation>>>,
    /// So many poisoned variables that those are sorted out which are gone or clean.
    sort_at: usize,
}

/// What one end of an operation led to; kept by threads, so that it seldom needs an allocation.
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
            progress: Progress::new(config.in_flight, config.spin),
            pools: [(); 3].map(|()| Pool::new(config.spin)),
            observer: config.observer.clone(),
            failures: Mutex::default(),
            closed: AtomicBool::new(false),
        }
    }

    pub(super) fn is_own_thread(&self) -> bool {
        ENGINE.get() == self.id
    }

    pub(super) fn push(&self, operation: Operation) -> Result<(), PushError> {
        let ready = match self.progress.push(self.is_own_thread()) {
            Ok(turn) => {
                operation.0.head().number.store(turn.number, Ordering::Relaxed);
                enter(&operation)
            }
            Err(refusal) => {
                let operation = operation.0.head().name.clone().into_owned();
                return Err(match refusal {
                    Refusal::Full(limit) => PushError::Full { operation, limit },
                    Refusal::Closed => PushError::Closed { operation },
                });
            }
        };
        if ready {
            self.begin(operation);
        }
        Ok(())
    }

    /// A wait is in one queue only, and so needs no turn among pushes.
    pub(super) fn push_wait(&self, wait: Operation) {
        if enter(&wait) {
            self.begin(wait);
        }
    }

    /// A thread of a pool.
    pub(super) fn work(self: &Arc<Self>, kind: Kind) {
        ENGINE.set(self.id);
        let pool = &self.pools[kind as usize];
        let mut released = Released::default();
        let mut next = None;
        while let Some(operation) = next.take().or_else(|| pool.take()) {
            if let Some(outcome) = self.run(&operation) {
                self.observe_end(&operation, outcome.is_ok());
                self.end(&operation, outcome, &mut released);
                drop(operation);
                next = self.hand_on(&mut released, kind);
            }
        }
    }

    /// For whoever holds a completion.
    pub(super) fn end_elsewhere(&self, operation: &Operation, outcome: Outcome) {
        let mut released = Released::default();
        self.observe_end(operation, outcome.is_ok());
        self.end(operation, outcome, &mut released);
        self.put(&mut released.runnable);
    }

    /// A failure that no variable need show.
    pub(super) fn record(&self, operation: &Operation, reason: String) -> Arc<Failure> {
        let head = operation.0.head();
        let failure = Failure { number: head.number(), operation: head.name.clone().into_owned(), reason };
        let failure = Arc::new(failure);
        let untold = &mut self.failures().untold;
        let known = untold.iter().any(|known| known.number == failure.number);
        if !known && untold.len() < UNTOLD_MAX {
            untold.push(Arc::clone(&failure));
        }
        failure
    }

    pub(super) fn told(&self, failure: &Failure) {
        self.failures().untold.retain(|untold| untold.number != failure.number);
    }

    /// All failures count as told and all variables are clean; the first of what nobody had told of.
    pub(super) fn tell_all(&self) -> Option<Arc<Failure>> {
        let Failures { untold, poisoned, .. } = std::mem::take(&mut *self.failures());
        let mut first = None;
        let found = poisoned.iter().filter_map(Weak::upgrade).filter_map(|place| place.take_poison());
        found.chain(untold).for_each(|failure| {
            Failure::meet(&mut first, &failure);
        });
        first
    }

    /// Nothing begins any more; what has not begun is dropped.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        for pool in &self.pools {
            self.drop_all(pool.close());
        }
        // Last, so that whoever is refused a push knows that nothing begins any more.
        self.progress.close();
    }

    /// Whether nothing begins any more.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    fn run(self: &Arc<Self>, operation: &Operation) -> Option<Outcome> {
        if let Some(observer) = &self.observer {
            observe(|| observer.begin(&Event::of(operation)));
        }
        operation.0.run(operation, self)
    }

    fn observe_end(&self, operation: &Operation, succeeded: bool) {
        if let Some(observer) = &self.observer {
            observe(|| observer.end(&Event::of(operation), succeeded));
        }
    }

    /// Gives a ready operation to the threads of its kind.
    fn begin(&self, operation: Operation) {
        let head = operation.0.head();
        let (Role::Run(kind), false) = (head.role, head.links.is_poisoned()) else {
            let mut released = Released::default();
            released.all.push_back(operation);
            self.sort(&mut released);
            return self.put(&mut released.runnable);
        };
        let entry = (head.priority, operation);
        if let Err(operations) = self.pools[kind as usize].put([entry]) {
            self.drop_all(operations);
        }
    }

    fn end(&self, operation: &Operation, outcome: Outcome, released: &mut Released) {
        let failure = outcome.err().map(|reason| self.record(operation, reason));
        self.leave(operation, failure.as_ref(), released);
        self.progress.end();
        self.sort(released);
    }

    fn leave(&self, operation: &Operation, failure: Option<&Arc<Failure>>, released: &mut Released) {
        leave(operation, failure, |next| released.all.push_back(next), |place| self.poisoned(place));
    }

    /// Finds out what may run. What may not ends here, and what that releases is looked at in turn: no recursion, however
    /// long the chain.
    fn sort(&self, released: &mut Released) {
        while let Some(operation) = released.all.pop_front() {
            let head = operation.0.head();
            if head.role == Role::Wait {
                operation.0.discard();
                self.leave(&operation, None, released);
            } else if head.links.is_poisoned() || self.closed.load(Ordering::Relaxed) {
                operation.0.discard();
                self.leave(&operation, head.links.poison().as_ref(), released);
                self.progress.end();
            } else {
                released.runnable.push(operation);
            }
        }
    }

    /// Puts all into their pools but one, which the calling thread may run at once if nothing of its pool came before.
    fn hand_on(&self, released: &mut Released, own: Kind) -> Option<Operation> {
        let runnable = &mut released.runnable;
        if runnable.is_empty() {
            return None;
        }
        let mut kept: Option<usize> = None;
        if self.pools[own as usize].is_empty() && !self.closed.load(Ordering::Relaxed) {
            for (at, operation) in runnable.iter().enumerate() {
                let head = operation.0.head();
                let before = kept.is_none_or(|kept| runnable[kept].0.head().priority < head.priority);
                if head.role == Role::Run(own) && before {
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
            let is_of_kind = |operation: &Operation| operation.0.head().role == Role::Run(kind);
            if !runnable.iter().any(is_of_kind) {
                continue;
            }
            let of_kind = runnable.extract_if(.., |operation| is_of_kind(operation));
            let entries = of_kind.map(|operation| (operation.0.head().priority, operation));
            if let Err(operations) = self.pools[kind as usize].put(entries) {
                self.drop_all(operations);
            }
        }
    }

    fn drop_all(&self, operations: Vec<Operation>) {
        let mut released = Released { all: operations.into(), ..Released::default() };
        self.sort(&mut released);
        debug_assert!(released.runnable.is_empty(), "only a closed engine drops");
    }

    fn poisoned(&self, place: &Arc<Place<Operation>>) {
        let mut failures = self.failures();
        if failures.poisoned.len() >= failures.sort_at.max(UNTOLD_MAX) {
            failures.poisoned.retain(|place| place.upgrade().is_some_and(|place| place.is_poisoned()));
            failures.sort_at = 2 * failures.poisoned.len();
        }
        failures.poisoned.push(Arc::downgrade(place));
    }

    fn failures(&self) -> std::sync::MutexGuard<'_, Failures> {
        self.failures.lock().expect("nothing panics under this lock")
    }
}

/// An observer's panic is no operation's.
fn observe(tell: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(tell)) {
        std::mem::forget(payload);
    }
}
