//! A request's end: waited for, polled or called back, and the buffers given back.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use paramhub_transport::shm::Tensor;
use paramhub_transport::{ReceiveRegion, SendRegion};

use crate::error::{WorkerError, panic_message};

/// A request under way. It ends whether or not anyone waits: a dropped handle lets it, and its buffers are freed then.
///
/// `G` is what was sent from and `P` what was received into, `()` where there is none or where it was borrowed. What is
/// exchanged in place is `P`.
pub struct Handle<G, P> {
    completion: Arc<Completion>,
    unpack: fn(Buffers) -> (G, P),
}

/// How a request ended. The buffers come back either way; after a failure some chunks of `parameters` may be new.
#[derive(Debug)]
pub struct Finished<G, P> {
    /// Whether it was answered.
    pub outcome: Result<(), WorkerError>,
    /// What was sent from.
    pub gradient: G,
    /// What was received into.
    pub parameters: P,
    /// How many updates the optimizer state had had that was sent or pulled; 0 after a failure or any other request.
    pub updates: u64,
}

impl<G, P> Handle<G, P> {
    pub(crate) fn new(completion: Arc<Completion>, unpack: fn(Buffers) -> (G, P)) -> Self {
        Handle { completion, unpack }
    }

    /// Waits for the end and gives the buffers back; an error frees them, see [`Handle::finish`].
    ///
    /// # Panics
    /// On the I/O thread, that is in a callback: it would wait for itself.
    pub fn wait(self) -> Result<(G, P), WorkerError> {
        let Finished { outcome, gradient, parameters, .. } = self.finish();
        outcome.map(|()| (gradient, parameters))
    }

    /// Waits for the end and gives the buffers back even after an error.
    ///
    /// # Panics
    /// As [`Handle::wait`].
    pub fn finish(self) -> Finished<G, P> {
        let mut state =
            self.completion.wait(None).expect("without a deadline the wait ends with the request");
        let State::Done { outcome, buffers } = &mut *state else { unreachable!("the wait has ended") };
        let (outcome, buffers) = (outcome.clone(), std::mem::take(buffers));
        drop(state);
        let updates = if outcome.is_ok() { buffers.updates } else { 0 };
        let (gradient, parameters) = (self.unpack)(buffers);
        Finished { outcome, gradient, parameters, updates }
    }

    /// Waits at most `timeout`; says whether the request has ended well, or how it failed. The buffers stay until
    /// [`Handle::wait`].
    ///
    /// # Panics
    /// As [`Handle::wait`].
    pub fn wait_timeout(&mut self, timeout: Duration) -> Result<bool, WorkerError> {
        let deadline = Instant::now().checked_add(timeout);
        match self.completion.wait(deadline) {
            None => Ok(false),
            Some(state) => match &*state {
                State::Done { outcome, .. } => outcome.clone().map(|()| true),
                State::Pending { .. } => unreachable!("the wait has ended"),
            },
        }
    }

    /// Whether the request has ended, well or not.
    pub fn is_done(&self) -> bool {
        self.completion.done.load(Ordering::Acquire)
    }

    /// Calls `callback` once when the request has ended: on the I/O thread, or here if it has ended already. It must be
    /// quick, for every stream waits meanwhile, and may not wait for another request. A panic in it ends the job.
    pub fn on_complete(&self, callback: impl FnOnce(&Result<(), WorkerError>) + Send + 'static) {
        let mut state = self.completion.lock();
        match &mut *state {
            State::Pending { callbacks, .. } => callbacks.push(Box::new(callback)),
            State::Done { outcome, .. } => {
                let outcome = outcome.clone();
                drop(state);
                callback(&outcome);
            }
        }
    }
}

impl<G, P> fmt::Debug for Handle<G, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("is_done", &self.is_done()).finish_non_exhaustive()
    }
}

type Callback = Box<dyn FnOnce(&Result<(), WorkerError>) + Send>;

/// What a request sends from and receives into.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    pub(crate) send: Option<SendRegion>,
    pub(crate) receive: Option<ReceiveRegion>,
    /// Of a layer's factors: `send` has the inputs.
    pub(crate) output_gradients: Option<SendRegion>,
    /// The gradient is sent from where the parameters are received into.
    pub(crate) is_in_place: bool,
    /// Places in the arena that the request passes through; nobody's until it ends.
    pub(crate) claims: [Option<Tensor>; 2],
    /// Of optimizer state sent or received: the updates it has had, of its least updated chunk.
    pub(crate) updates: u64,
    /// Of a step's mean gradient.
    pub(crate) norm: f64,
}

impl Buffers {
    /// The bytes that are sent, if any are.
    pub(crate) fn sent_from(&self) -> Option<&[u8]> {
        match &self.receive {
            Some(region) if self.is_in_place => Some(region.bytes()),
            _ => self.send.as_ref().map(SendRegion::bytes),
        }
    }
}

/// What a handle and the I/O thread share of a request.
pub(crate) struct Completion {
    done: AtomicBool,
    state: Mutex<State>,
    signal: Condvar,
}

#[expect(
    clippy::large_enum_variant,
    reason = "each ends up as the larger one, and a box would cost an allocation"
)]
enum State {
    Pending {
        callbacks: Vec<Callback>,
        /// Somebody sleeps until the end: waking nobody would cost a system call as well.
        is_awaited: bool,
    },
    Done {
        outcome: Result<(), WorkerError>,
        buffers: Buffers,
    },
}

impl Completion {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state once the request has ended, or `None` at the deadline.
    fn wait(&self, deadline: Option<Instant>) -> Option<MutexGuard<'_, State>> {
        let mut state = self.lock();
        while matches!(*state, State::Pending { .. }) {
            assert!(!on_io_thread(), "a callback must not wait for a request: it would wait for itself");
            if let State::Pending { is_awaited, .. } = &mut *state {
                *is_awaited = true;
            }
            state = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                None => self.signal.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return None,
                Some(left) => self.signal.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
        Some(state)
    }
}

/// The I/O thread's end of a request. Dropped unfinished, it fails the request, so that nobody waits for ever.
pub(crate) struct Ticket {
    completion: Arc<Completion>,
    pub(crate) buffers: Buffers,
    /// Owned buffers go back through the handle, borrowed ones are let go before anyone is told.
    keep: bool,
    /// What the handle gets if the ticket is lost.
    if_lost: WorkerError,
}

impl Ticket {
    pub(crate) fn new(buffers: Buffers, keep: bool, if_lost: WorkerError) -> (Self, Arc<Completion>) {
        let completion = Arc::new(Completion {
            done: AtomicBool::new(false),
            state: Mutex::new(State::Pending { callbacks: Vec::new(), is_awaited: false }),
            signal: Condvar::new(),
        });
        (Ticket { completion: Arc::clone(&completion), buffers, keep, if_lost }, completion)
    }

    /// Ends the request: buffers back, waiters woken, callbacks called. The error is the message of a callback that
    /// panicked; the others were called all the same.
    pub(crate) fn finish(mut self, outcome: Result<(), WorkerError>) -> Result<(), Arc<str>> {
        self.end(outcome)
    }

    fn end(&mut self, outcome: Result<(), WorkerError>) -> Result<(), Arc<str>> {
        let mut buffers = std::mem::take(&mut self.buffers);
        if !self.keep {
            // Lets them go here and now; a second variable of this name would keep the first alive to the end.
            buffers = Buffers { updates: buffers.updates, ..Buffers::default() };
        }
        let mut state = self.completion.lock();
        let State::Pending { callbacks, is_awaited } = &mut *state else { return Ok(()) };
        let (callbacks, is_awaited) = (std::mem::take(callbacks), *is_awaited);
        let told = (!callbacks.is_empty()).then(|| outcome.clone());
        *state = State::Done { outcome, buffers };
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
        // A panic of a callback was reported by the panic hook, and there is no job left to fail.
        let _ = self.end(Err(self.if_lost.clone()));
    }
}

thread_local! {
    static IS_IO_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Marks the calling thread as one that completes requests.
pub(crate) fn become_io_thread() {
    IS_IO_THREAD.set(true);
}

/// Whether the caller is a callback on the I/O thread.
pub(crate) fn on_io_thread() -> bool {
    IS_IO_THREAD.get()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Who;
    use std::sync::mpsc;

    fn lost() -> WorkerError {
        WorkerError::Left { who: Who { job: "j".into(), rank: 0 } }
    }

    fn owned() -> (Ticket, Handle<Vec<f32>, ()>) {
        let buffers = Buffers { send: Some(SendRegion::owned(vec![1.0_f32, 2.0])), ..Default::default() };
        let (ticket, completion) = Ticket::new(buffers, true, lost());
        (ticket, Handle::new(completion, |buffers| (buffers.send.unwrap().into_owned().unwrap(), ())))
    }

    #[test]
    fn the_buffer_comes_back_to_a_waiter_on_another_thread() {
        let (ticket, handle) = owned();
        assert!(!handle.is_done());
        let waiter = std::thread::spawn(move || handle.wait().unwrap().0);
        ticket.finish(Ok(())).unwrap();
        assert_eq!(waiter.join().unwrap(), [1.0, 2.0]);
    }

    #[test]
    fn a_timeout_is_no_end() {
        let (ticket, mut handle) = owned();
        assert!(!handle.wait_timeout(Duration::from_millis(1)).unwrap());
        ticket.finish(Ok(())).unwrap();
        assert!(handle.wait_timeout(Duration::from_secs(60)).unwrap());
        assert_eq!(handle.wait().unwrap().0.len(), 2);
    }

    #[test]
    fn a_lost_ticket_fails_the_request_and_returns_the_buffer() {
        let (ticket, mut handle) = owned();
        drop(ticket);
        assert!(matches!(handle.wait_timeout(Duration::ZERO), Err(WorkerError::Left { .. })));
        let finished = handle.finish();
        assert!(finished.outcome.is_err());
        assert_eq!(finished.gradient, [1.0, 2.0]);
    }

    #[test]
    fn callbacks_run_once_before_and_after_the_end() {
        let (ticket, handle) = owned();
        let (told, hear) = mpsc::channel();
        let early = told.clone();
        handle.on_complete(move |outcome| early.send(("early", outcome.is_ok())).unwrap());
        assert!(hear.try_recv().is_err());
        ticket.finish(Ok(())).unwrap();
        handle.on_complete(move |outcome| told.send(("late", outcome.is_ok())).unwrap());
        assert_eq!(hear.iter().collect::<Vec<_>>(), [("early", true), ("late", true)]);
    }

    #[test]
    fn a_panicking_callback_is_reported_and_stops_no_other() {
        let (ticket, handle) = owned();
        let (told, hear) = mpsc::channel();
        handle.on_complete(|_| panic!("told you"));
        handle.on_complete(move |_| told.send(()).unwrap());
        assert_eq!(&*ticket.finish(Ok(())).unwrap_err(), "told you");
        hear.recv().unwrap();
        handle.wait().unwrap();
    }

    #[test]
    fn a_borrowed_buffer_is_let_go_though_the_handle_lives_on() {
        let (told, hear) = mpsc::channel();
        std::thread::spawn(move || {
            let mut out = [0.0_f32; 2];
            // `lend` returns once the region is gone.
            let handle: Handle<(), ()> = paramhub_transport::lend(|lending| {
                let buffers = Buffers { receive: Some(lending.receive(&mut out)), ..Default::default() };
                let (mut ticket, completion) = Ticket::new(buffers, false, lost());
                ticket.buffers.receive.as_mut().unwrap().bytes_mut().fill(1);
                ticket.finish(Ok(())).unwrap();
                Handle::new(completion, |_| ((), ()))
            });
            told.send((handle, out)).unwrap();
        });
        let (handle, out) = hear.recv_timeout(Duration::from_secs(30)).expect("the region was let go");
        handle.wait().unwrap();
        assert_eq!(out, [f32::from_bits(0x0101_0101); 2]);
    }

    #[test]
    fn a_borrowed_buffer_is_let_go_before_a_callback_hears_of_the_end() {
        let (give, take) = mpsc::channel();
        let (returned, has_returned) = mpsc::channel();
        let lender = std::thread::spawn(move || {
            let out = [0.0_f32; 2];
            paramhub_transport::lend(|lending| {
                let buffers = Buffers { send: Some(lending.send(&out)), ..Default::default() };
                give.send(Ticket::new(buffers, false, lost())).unwrap();
            });
            returned.send(()).unwrap();
        });
        let (ticket, completion) = take.recv().unwrap();
        let handle: Handle<(), ()> = Handle::new(completion, |_| ((), ()));
        // `lend` returns once the region is gone, so a callback that came first would wait in vain.
        handle.on_complete(move |_| has_returned.recv_timeout(Duration::from_secs(30)).unwrap());
        ticket.finish(Ok(())).unwrap();
        lender.join().unwrap();
    }
}
