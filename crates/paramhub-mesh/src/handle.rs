//! An operation's end: waited for, polled or called back.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{MeshError, panic_message};
use crate::inbox::{Command, Inbox};

/// How long [`Handle::awaited_ranks`] waits for the mesh's thread to look.
const INQUIRY: Duration = Duration::from_secs(1);

/// An operation under way. It ends whether or not anyone waits; a dropped handle lets it.
///
/// The regions given to the operation are dropped before anyone is told of the end. After a failure what was received into
/// may have been written in part.
pub struct Handle {
    completion: Arc<Completion>,
    inbox: Arc<Inbox>,
}

impl Handle {
    pub(crate) fn new(completion: Arc<Completion>, inbox: Arc<Inbox>) -> Self {
        Handle { completion, inbox }
    }

    /// Waits for the end.
    ///
    /// # Panics
    /// On the mesh's thread, that is in a callback: it would wait for itself.
    pub fn wait(&self) -> Result<(), MeshError> {
        self.completion.wait(None).expect("without a deadline the wait ends with the operation").map(|_| ())
    }

    /// Waits at most `timeout`; says whether the operation has ended well, or how it failed. An operation that is not over
    /// goes on: [`awaited_ranks`](Self::awaited_ranks) says whom it waits for.
    ///
    /// # Panics
    /// As [`Handle::wait`].
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool, MeshError> {
        let deadline = Instant::now().checked_add(timeout);
        self.completion.wait(deadline).map_or(Ok(false), |outcome| outcome.map(|_| true))
    }

    /// Whether the operation has ended, well or not.
    pub fn is_done(&self) -> bool {
        self.completion.done.load(Ordering::Acquire)
    }

    /// Calls `callback` once when the operation has ended: on the mesh's thread, or here if it has ended already. It must be
    /// quick, for every transfer waits meanwhile, and may not wait for another operation. A panic in it fails the mesh.
    pub fn on_complete(&self, callback: impl FnOnce(&Result<(), MeshError>) + Send + 'static) {
        let mut state = self.completion.lock();
        match &mut *state {
            State::Pending { callbacks, .. } => callbacks.push(Box::new(callback)),
            State::Done(outcome) => {
                let outcome = outcome.clone().map(|_| ());
                drop(state);
                callback(&outcome);
            }
        }
    }

    /// The peer a receive got its bytes from, once it has ended well; `None` for other operations.
    pub fn source(&self) -> Option<u32> {
        match &*self.completion.lock() {
            State::Done(Ok(source)) => *source,
            _ => None,
        }
    }

    /// The ranks the operation is waiting for now, ascending. None once it has ended, and none if it has not begun because
    /// collectives before it are under way.
    ///
    /// # Panics
    /// As [`Handle::wait`].
    pub fn awaited_ranks(&self) -> Vec<u32> {
        assert!(
            !on_mesh_thread(),
            "a callback must not wait for the mesh's thread: it would wait for itself"
        );
        if self.is_done() {
            return Vec::new();
        }
        let (answer, asked) = std::sync::mpsc::sync_channel(1);
        let completion = Arc::clone(&self.completion);
        match self.inbox.put(Command::Inquire { completion, answer }) {
            Ok(()) => asked.recv_timeout(INQUIRY).unwrap_or_default(),
            Err(_) => Vec::new(),
        }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("is_done", &self.is_done()).finish_non_exhaustive()
    }
}

type Callback = Box<dyn FnOnce(&Result<(), MeshError>) + Send>;
/// Well ended, with the source of a receive, or not.
type Outcome = Result<Option<u32>, MeshError>;

/// What a handle and the mesh's thread share of an operation.
pub(crate) struct Completion {
    done: AtomicBool,
    state: Mutex<State>,
    signal: Condvar,
}

enum State {
    Pending {
        callbacks: Vec<Callback>,
        /// Somebody sleeps until the end: waking nobody would cost a system call as well.
        is_awaited: bool,
    },
    Done(Outcome),
}

impl Completion {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The outcome, or `None` at the deadline.
    fn wait(&self, deadline: Option<Instant>) -> Option<Outcome> {
        let mut state = self.lock();
        loop {
            match &mut *state {
                State::Done(outcome) => return Some(outcome.clone()),
                State::Pending { is_awaited, .. } => *is_awaited = true,
            }
            assert!(!on_mesh_thread(), "a callback must not wait for an operation: it would wait for itself");
            state = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                None => self.signal.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return None,
                Some(left) => self.signal.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }
}

/// The mesh's end of an operation. Dropped unfinished, it fails the operation, so that nobody waits for ever.
pub(crate) struct Ticket {
    completion: Arc<Completion>,
    /// What the handle gets if the ticket is lost.
    if_lost: MeshError,
}

impl Ticket {
    pub(crate) fn new(if_lost: MeshError) -> (Self, Arc<Completion>) {
        let completion = Arc::new(Completion {
            done: AtomicBool::new(false),
            state: Mutex::new(State::Pending { callbacks: Vec::new(), is_awaited: false }),
            signal: Condvar::new(),
        });
        (Ticket { completion: Arc::clone(&completion), if_lost }, completion)
    }

    pub(crate) fn is_of(&self, completion: &Arc<Completion>) -> bool {
        Arc::ptr_eq(&self.completion, completion)
    }

    /// Ends the operation, whose regions have been dropped: waiters woken, callbacks called. The error is the message of a
    /// callback that panicked; the others were called all the same.
    pub(crate) fn finish(self, outcome: Outcome) -> Result<(), Arc<str>> {
        self.end(outcome)
    }

    fn end(&self, outcome: Outcome) -> Result<(), Arc<str>> {
        let mut state = self.completion.lock();
        let State::Pending { callbacks, is_awaited } = &mut *state else { return Ok(()) };
        let (callbacks, is_awaited) = (std::mem::take(callbacks), *is_awaited);
        let told = (!callbacks.is_empty()).then(|| outcome.clone().map(|_| ()));
        *state = State::Done(outcome);
        self.completion.done.store(true, Ordering::Release);
        drop(state);
        if is_awaited {
            self.completion.signal.notify_all();
        }
        let mut panicked = Ok(());
        if let Some(outcome) = told {
            for callback in callbacks {
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| callback(&outcome))) {
                    panicked = Err(panic_message(&*panic));
                }
            }
        }
        panicked
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // A panic of a callback was reported by the panic hook, and the mesh is failing already.
        let _ = self.end(Err(self.if_lost.clone()));
    }
}

thread_local! {
    static IS_MESH_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Marks the calling thread as one that completes operations.
pub(crate) fn become_mesh_thread() {
    IS_MESH_THREAD.set(true);
}

/// Whether the caller is a callback on a mesh's thread.
pub(crate) fn on_mesh_thread() -> bool {
    IS_MESH_THREAD.get()
}
