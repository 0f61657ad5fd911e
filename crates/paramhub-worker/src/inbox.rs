//! What user threads hand to the I/O thread.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::requests::Request;
use paramhub_core::wire::Failure;
use paramhub_transport::Waker;

use crate::error::{Who, WorkerError};
use crate::handle::{Ticket, on_io_thread};

/// Hyperparameter changes that may wait: as many as a hub remembers.
pub(crate) const RETUNES_MAX: usize = 64;
/// How long one that finds the inbox full waits.
const RETUNE_PATIENCE: Duration = Duration::from_secs(10);

/// One thing for the I/O thread to do.
pub(crate) enum Command {
    Request {
        key: u32,
        request: Request,
        step: u32,
        ticket: Ticket,
    },
    /// Of a layer's factors, by the number of its block.
    Factors {
        block: usize,
        samples: u32,
        step: u32,
        /// Of the weight, and of the bias if there is one.
        tickets: Box<(Ticket, Option<Ticket>)>,
    },
    Retune(Change),
    AwaitNorm {
        step: u32,
        ticket: Ticket,
    },
    Release {
        step: u32,
        factor: f32,
    },
    Leave {
        deadline: Instant,
    },
    /// This worker cannot go on, with what the other ranks are told.
    GiveUp {
        error: WorkerError,
        told: Failure,
    },
}

/// A change of a group's hyperparameters.
#[derive(Clone, Copy)]
pub(crate) struct Change {
    pub(crate) group: u16,
    pub(crate) first_step: u32,
    pub(crate) hyperparameters: Hyperparameters,
}

/// A queue in order of arrival. It is bounded without counting requests: a key has one at a time. Waits for norms are counted
/// where they are made, and a step is released once.
pub(crate) struct Inbox {
    state: Mutex<State>,
    retune_taken: Condvar,
    waker: Waker,
}

struct State {
    commands: VecDeque<Command>,
    retunes: usize,
    /// Why nothing is accepted any more.
    closed: Option<WorkerError>,
}

impl Inbox {
    pub(crate) fn new(waker: Waker) -> Self {
        let state = State { commands: VecDeque::with_capacity(64), retunes: 0, closed: None };
        Inbox { state: Mutex::new(state), retune_taken: Condvar::new(), waker }
    }

    /// Queues a command and wakes the I/O thread, or says why the job takes no more. A refused request's ticket is dropped.
    pub(crate) fn put(&self, command: Command) -> Result<(), WorkerError> {
        let mut state = self.lock();
        if let Some(error) = &state.closed {
            let error = error.clone();
            // A ticket's end may call back, and callbacks may come here.
            drop(state);
            return Err(error);
        }
        state.commands.push_back(command);
        drop(state);
        self.waker.wake();
        Ok(())
    }

    /// [`Inbox::put`] for a change of hyperparameters: waits, within bounds, where too many wait already.
    pub(crate) fn put_retune(&self, who: &Who, change: Change) -> Result<(), WorkerError> {
        let deadline = Instant::now() + if on_io_thread() { Duration::ZERO } else { RETUNE_PATIENCE };
        let mut state = self.lock();
        while state.closed.is_none() && state.retunes == RETUNES_MAX {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let seconds = RETUNE_PATIENCE.as_secs_f64();
                return Err(WorkerError::Congested { who: who.clone(), seconds });
            }
            state = self.retune_taken.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.retunes += usize::from(state.closed.is_none());
        drop(state);
        self.put(Command::Retune(change))
    }

    /// Moves everything queued into `commands`.
    pub(crate) fn take(&self, commands: &mut VecDeque<Command>) {
        commands.append(&mut self.lock().commands);
    }

    /// A change of hyperparameters has gone to every stream.
    pub(crate) fn retune_taken(&self) {
        self.lock().retunes -= 1;
        self.retune_taken.notify_one();
    }

    /// Accepts nothing any more, for this reason; the first one stays. Returns what was queued.
    pub(crate) fn close(&self, reason: &WorkerError) -> VecDeque<Command> {
        let mut state = self.lock();
        state.closed.get_or_insert_with(|| reason.clone());
        self.retune_taken.notify_all();
        std::mem::take(&mut state.commands)
    }

    /// Why the job takes no more, if it does not.
    pub(crate) fn closed(&self) -> Option<WorkerError> {
        self.lock().closed.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_inbox_says_why_and_a_full_one_waits_for_room() {
        let inbox = Inbox::new(Waker::new().unwrap());
        let who = Who { job: "j".into(), rank: 1 };
        let change =
            |first_step| Change { group: 0, first_step, hyperparameters: Hyperparameters::default() };
        for step in 0..RETUNES_MAX as u32 {
            inbox.put_retune(&who, change(step)).unwrap();
        }
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| inbox.put_retune(&who, change(99)));
            inbox.retune_taken();
            waiting.join().unwrap().unwrap();
            let waiting = scope.spawn(|| inbox.put_retune(&who, change(100)));
            assert_eq!(inbox.close(&WorkerError::Left { who: who.clone() }).len(), RETUNES_MAX + 1);
            assert!(matches!(waiting.join().unwrap(), Err(WorkerError::Left { .. })));
        });
        let late = inbox.put(Command::Leave { deadline: Instant::now() });
        assert!(matches!(late, Err(WorkerError::Left { .. })));
    }
}
