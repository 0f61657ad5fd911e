//! The end of an operation: callers wait for it, poll it or have it call back.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

type Callback<E> = Box<dyn FnOnce(&Result<(), E>) + Send>;

/// The state of an operation that its caller and an I/O thread share. The operation ends once, with an
/// outcome and a value: what it gives back even after a failure, such as its buffers.
pub struct Completion<V, E> {
    is_done: AtomicBool,
    state: Mutex<CompletionState<V, E>>,
    ended: Condvar,
}

enum CompletionState<V, E> {
    Pending {
        callbacks: Vec<Callback<E>>,
        /// Whether a thread sleeps until the end: a wakeup without a sleeper would cost a system call as
        /// well.
        is_awaited: bool,
    },
    Done {
        outcome: Result<(), E>,
        value: V,
    },
}

impl<V, E: Clone> Completion<V, E> {
    /// Whether the operation has ended, well or not.
    pub fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire)
    }

    /// Waits for the end and returns what `read` makes of outcome and value, or `None` at the deadline.
    ///
    /// # Panics
    /// On an I/O thread, that is in a callback, if the operation has not ended.
    pub fn wait_until<R>(
        &self,
        deadline: Option<Instant>,
        read: impl FnOnce(&Result<(), E>, &mut V) -> R,
    ) -> Option<R> {
        let mut state = self.lock();
        loop {
            match &mut *state {
                CompletionState::Done { outcome, value } => return Some(read(outcome, value)),
                CompletionState::Pending { is_awaited, .. } => *is_awaited = true,
            }
            assert!(!on_io_thread(), "a callback must not wait for an operation: it would wait for itself");
            state = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                None => self.ended.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return None,
                Some(left) => self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// Waits for the end and returns what `read` makes of outcome and value.
    ///
    /// # Panics
    /// See [`wait_until`](Self::wait_until).
    pub fn wait<R>(&self, read: impl FnOnce(&Result<(), E>, &mut V) -> R) -> R {
        self.wait_until(None, read).expect("without a deadline the wait ends with the operation")
    }

    /// Waits at most `timeout`; `Ok(true)` if the operation has ended well, `Ok(false)` if it goes on, and
    /// the error if it failed.
    ///
    /// # Panics
    /// See [`wait_until`](Self::wait_until).
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool, E> {
        let ended = self.wait_until(Instant::now().checked_add(timeout), |outcome, _| outcome.clone());
        ended.map_or(Ok(false), |outcome| outcome.map(|()| true))
    }

    /// What `read` makes of outcome and value if the operation has ended; does not wait.
    pub fn poll<R>(&self, read: impl FnOnce(&Result<(), E>, &mut V) -> R) -> Option<R> {
        match &mut *self.lock() {
            CompletionState::Done { outcome, value } => Some(read(outcome, value)),
            CompletionState::Pending { .. } => None,
        }
    }

    /// Calls `callback` once when the operation has ended: on the I/O thread, or here if the operation has
    /// ended already.
    pub fn on_complete(&self, callback: impl FnOnce(&Result<(), E>) + Send + 'static) {
        let mut state = self.lock();
        match &mut *state {
            CompletionState::Pending { callbacks, .. } => callbacks.push(Box::new(callback)),
            CompletionState::Done { outcome, .. } => {
                let outcome = outcome.clone();
                drop(state);
                callback(&outcome);
            }
        }
    }

    fn end(&self, outcome: Result<(), E>, value: V) -> Result<(), Arc<str>> {
        let mut state = self.lock();
        let CompletionState::Pending { callbacks, is_awaited } = &mut *state else { return Ok(()) };
        let (callbacks, is_awaited) = (std::mem::take(callbacks), *is_awaited);
        let callback_outcome = (!callbacks.is_empty()).then(|| outcome.clone());
        *state = CompletionState::Done { outcome, value };
        self.is_done.store(true, Ordering::Release);
        drop(state);
        if is_awaited {
            self.ended.notify_all();
        }
        let mut panicked = Ok(());
        if let Some(outcome) = callback_outcome {
            for callback in callbacks {
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| callback(&outcome))) {
                    panicked = Err(panic_message(&*panic));
                }
            }
        }
        panicked
    }

    fn lock(&self) -> MutexGuard<'_, CompletionState<V, E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<V, E> fmt::Debug for Completion<V, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_done = self.is_done.load(Ordering::Acquire);
        f.debug_struct("Completion").field("is_done", &is_done).finish_non_exhaustive()
    }
}

/// The I/O thread's end of an operation. A completer dropped unfinished fails the operation, so that no
/// thread waits for ever.
#[derive(Debug)]
pub struct Completer<V: Default, E: Clone> {
    completion: Arc<Completion<V, E>>,
    /// What the operation gives back at its end.
    pub value: V,
    /// Frees what must not outlive the operation, before the end is announced.
    release: fn(&mut V),
    /// The error that the caller gets if the completer is dropped.
    if_lost: E,
}

impl<V: Default, E: Clone> Completer<V, E> {
    /// Both ends of an operation. `release` frees the part of the value that must not outlive the operation;
    /// it runs before the end is announced.
    pub fn new(value: V, release: fn(&mut V), if_lost: E) -> (Self, Arc<Completion<V, E>>) {
        let completion = Arc::new(Completion {
            is_done: AtomicBool::new(false),
            state: Mutex::new(CompletionState::Pending { callbacks: Vec::new(), is_awaited: false }),
            ended: Condvar::new(),
        });
        (Completer { completion: Arc::clone(&completion), value, release, if_lost }, completion)
    }

    /// Whether this is the other end of `completion`.
    pub fn is_of(&self, completion: &Arc<Completion<V, E>>) -> bool {
        Arc::ptr_eq(&self.completion, completion)
    }

    /// Ends the operation: gives the value back, wakes waiters and calls callbacks. If a callback panics, the
    /// others run all the same, and the error is the panic's message.
    pub fn finish(mut self, outcome: Result<(), E>) -> Result<(), Arc<str>> {
        self.end(outcome)
    }

    fn end(&mut self, outcome: Result<(), E>) -> Result<(), Arc<str>> {
        (self.release)(&mut self.value);
        self.completion.end(outcome, std::mem::take(&mut self.value))
    }
}

impl<V: Default, E: Clone> Drop for Completer<V, E> {
    fn drop(&mut self) {
        if !self.completion.is_done() {
            // The panic hook has reported a callback's panic, and the I/O thread is ending already.
            let _ = self.end(Err(self.if_lost.clone()));
        }
    }
}

thread_local! {
    static IS_IO_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Marks the calling thread as one that completes operations.
pub fn become_io_thread() {
    IS_IO_THREAD.set(true);
}

/// Calls `f` on a thread that completes operations meanwhile.
pub fn as_io_thread<R>(f: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IS_IO_THREAD.set(self.0);
        }
    }
    let _restore = Restore(IS_IO_THREAD.replace(true));
    f()
}

/// Whether the caller is a callback on a thread that completes operations.
pub fn on_io_thread() -> bool {
    IS_IO_THREAD.get()
}

/// The message of a panic.
pub fn panic_message(panic: &(dyn Any + Send)) -> Arc<str> {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("it did not say why").into()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    type TestCompleter = Completer<Vec<u8>, &'static str>;

    fn operation() -> (TestCompleter, Arc<Completion<Vec<u8>, &'static str>>) {
        Completer::new(vec![1, 2], |_| {}, "lost")
    }

    #[test]
    fn the_value_comes_back_to_a_waiter_on_another_thread() {
        let (completer, completion) = operation();
        assert!(!completion.is_done() && completer.is_of(&completion));
        assert_eq!(completion.poll(|_, value| value.len()), None);
        let waiter = {
            let completion = Arc::clone(&completion);
            std::thread::spawn(move || completion.wait(|outcome, value| (*outcome, std::mem::take(value))))
        };
        completer.finish(Ok(())).unwrap();
        assert_eq!(waiter.join().unwrap(), (Ok(()), vec![1, 2]));
        assert!(completion.is_done());
    }

    #[test]
    fn a_timeout_is_no_end() {
        let (completer, completion) = operation();
        assert_eq!(completion.wait_timeout(Duration::from_millis(1)), Ok(false));
        completer.finish(Ok(())).unwrap();
        assert_eq!(completion.wait_timeout(LONG), Ok(true));
        assert_eq!(completion.poll(|outcome, value| (*outcome, value.len())), Some((Ok(()), 2)));
    }

    #[test]
    fn a_lost_completer_fails_the_operation_and_returns_the_value() {
        let (completer, completion) = operation();
        drop(completer);
        assert_eq!(completion.wait_timeout(Duration::ZERO), Err("lost"));
        assert_eq!(completion.wait(|_, value| value.len()), 2);
    }

    #[test]
    fn callbacks_run_once_before_and_after_the_end() {
        let (completer, completion) = operation();
        let (ended, ends) = mpsc::channel();
        let early = ended.clone();
        completion.on_complete(move |outcome| early.send(("early", outcome.is_ok())).unwrap());
        assert!(ends.try_recv().is_err());
        completer.finish(Ok(())).unwrap();
        completion.on_complete(move |outcome| ended.send(("late", outcome.is_ok())).unwrap());
        assert_eq!(ends.iter().collect::<Vec<_>>(), [("early", true), ("late", true)]);
    }

    #[test]
    fn a_panicking_callback_is_reported_and_stops_no_other() {
        let (completer, completion) = operation();
        let (ended, ends) = mpsc::channel();
        completion.on_complete(|_| panic!("on purpose"));
        completion.on_complete(move |_| ended.send(()).unwrap());
        assert_eq!(&*completer.finish(Ok(())).unwrap_err(), "on purpose");
        ends.recv().unwrap();
        assert_eq!(completion.wait_timeout(Duration::ZERO), Ok(true));
    }

    #[test]
    fn the_value_is_released_before_a_callback_hears_of_the_end() {
        let held = Arc::new(());
        let (completer, completion) = Completer::new(Some(Arc::clone(&held)), |value| *value = None, "lost");
        let (ended, ends) = mpsc::channel();
        completion.on_complete(move |_| ended.send(Arc::strong_count(&held)).unwrap());
        completer.finish(Ok(())).unwrap();
        assert_eq!(ends.recv().unwrap(), 1);
    }

    #[test]
    fn a_callback_that_waits_panics_instead_of_hanging() {
        let (_completer, completion) = operation();
        let waits = std::thread::spawn(move || {
            become_io_thread();
            completion.wait_timeout(LONG)
        });
        assert!(panic_message(&*waits.join().unwrap_err()).contains("wait for itself"));
    }
}
