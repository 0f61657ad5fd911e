//! What user threads hand to the mesh's thread.

use std::collections::VecDeque;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use paramhub_transport::Waker;

use crate::error::{MeshError, Who};
use crate::handle::Completion;
use crate::operation::Request;

/// Operations that may be outstanding at a time.
pub(crate) const OUTSTANDING_MAX: usize = 1 << 16;

/// One thing for the mesh's thread to do.
pub(crate) enum Command {
    Run(Box<Request>),
    /// Which ranks does the operation of this completion wait for?
    Inquire {
        completion: Arc<Completion>,
        answer: SyncSender<Vec<u32>>,
    },
    Leave {
        timeout: Duration,
    },
    /// The program gives up, for this reason.
    Abort {
        reason: Arc<str>,
    },
}

/// A queue in order of arrival, bounded by the operations that may be outstanding.
pub(crate) struct Inbox {
    state: Mutex<State>,
    waker: Waker,
}

struct State {
    commands: VecDeque<Command>,
    outstanding: usize,
    /// Why nothing is accepted any more.
    closed: Option<MeshError>,
}

impl Inbox {
    pub(crate) fn new(waker: Waker) -> Self {
        let state = State { commands: VecDeque::with_capacity(64), outstanding: 0, closed: None };
        Inbox { state: Mutex::new(state), waker }
    }

    /// Queues a command and wakes the mesh's thread, or says why nothing is taken any more.
    pub(crate) fn put(&self, command: Command) -> Result<(), MeshError> {
        self.put_if(command, |_| Ok(()))
    }

    /// [`Inbox::put`] for an operation: counts it.
    pub(crate) fn put_request(&self, who: &Who, request: Request) -> Result<(), MeshError> {
        self.put_if(Command::Run(Box::new(request)), |outstanding| {
            if *outstanding == OUTSTANDING_MAX {
                return Err(MeshError::Congested { who: who.clone(), outstanding: OUTSTANDING_MAX });
            }
            *outstanding += 1;
            Ok(())
        })
    }

    fn put_if(
        &self,
        command: Command,
        admit: impl FnOnce(&mut usize) -> Result<(), MeshError>,
    ) -> Result<(), MeshError> {
        let mut state = self.lock();
        let refused = match &state.closed {
            Some(error) => Err(error.clone()),
            None => admit(&mut state.outstanding),
        };
        if let Err(error) = refused {
            // The end of a refused operation may call back, and callbacks may come here.
            drop(state);
            return Err(error);
        }
        state.commands.push_back(command);
        drop(state);
        self.waker.wake();
        Ok(())
    }

    /// Moves everything queued into `commands`.
    pub(crate) fn take(&self, commands: &mut VecDeque<Command>) {
        commands.append(&mut self.lock().commands);
    }

    /// An operation has ended.
    pub(crate) fn ended(&self) {
        self.lock().outstanding -= 1;
    }

    /// Accepts nothing any more, for this reason; the first one stays. Returns what was queued.
    pub(crate) fn close(&self, reason: &MeshError) -> VecDeque<Command> {
        let mut state = self.lock();
        state.closed.get_or_insert_with(|| reason.clone());
        std::mem::take(&mut state.commands)
    }

    /// Why nothing is accepted any more, if so.
    pub(crate) fn closed(&self) -> Option<MeshError> {
        self.lock().closed.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
