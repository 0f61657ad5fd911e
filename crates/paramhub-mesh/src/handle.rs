//! The end of an operation: a caller waits for it, polls it or has it call back.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use paramhub_transport::runtime::{Completer, Completion, on_io_thread};

use crate::command::{MeshCommand, MeshInbox};
use crate::error::MeshError;
use crate::progress_engine::SharedEngine;

/// The time that [`Handle::awaited_ranks`] waits for the answer of the mesh's thread.
const INQUIRY: Duration = Duration::from_secs(1);

/// The state of an operation that a handle and the mesh's thread share. Its value is the rank that a receive
/// got its bytes from; `None` for other operations.
pub(crate) type OperationCompletion = Completion<Option<u32>, MeshError>;

/// The mesh's end of an operation.
pub(crate) type OperationCompleter = Completer<Option<u32>, MeshError>;

/// An operation under way. It ends whether or not anyone waits, also after its handle is dropped.
///
/// The mesh drops the regions given to the operation before it reports the end. After a failure a region that
/// was received into may have been written in part.
pub struct Handle {
    completion: Arc<OperationCompletion>,
    /// A handle may outlive its mesh, whose descriptors are then to be closed.
    inbox: Weak<MeshInbox>,
    /// For a small operation, which its caller runs while it waits. The mesh's thread runs the others, from their start.
    engine: Option<Weak<SharedEngine>>,
}

impl Handle {
    pub(crate) fn new(
        completion: Arc<OperationCompletion>,
        inbox: Weak<MeshInbox>,
        engine: Option<Weak<SharedEngine>>,
    ) -> Self {
        Handle { completion, inbox, engine }
    }

    /// Waits for the end. While it waits for a small operation this thread does the mesh's work; callbacks of operations that
    /// end then run on it.
    ///
    /// # Panics
    /// In a callback: the thread would wait for itself.
    pub fn wait(&self) -> Result<(), MeshError> {
        self.advance(None);
        self.completion.wait(|outcome, _| outcome.clone())
    }

    /// Waits at most `timeout`; `Ok(true)` if the operation has ended well, `Ok(false)` if it goes on, and
    /// the error if it failed. [`awaited_ranks`](Self::awaited_ranks) names the ranks that an operation under
    /// way waits for.
    ///
    /// # Panics
    /// See [`Handle::wait`].
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool, MeshError> {
        let deadline = Instant::now().checked_add(timeout);
        self.advance(deadline);
        let timeout = deadline.map_or(timeout, |deadline| deadline.saturating_duration_since(Instant::now()));
        self.completion.wait_timeout(timeout)
    }

    /// If this is a small operation, does the mesh's work on this thread until it has ended or until `deadline`.
    /// [`wait`](Self::wait) begins with this; it is for callers that wait by other means.
    pub fn advance(&self, deadline: Option<Instant>) {
        if !self.is_done()
            && let Some(engine) = self.engine.as_ref().and_then(Weak::upgrade)
        {
            engine.advance(|| self.is_done(), deadline);
        }
    }

    /// Returns whether the operation has ended, well or not.
    pub fn is_done(&self) -> bool {
        self.completion.is_done()
    }

    /// Calls `callback` once when the operation has ended: on the mesh's thread, on that of a caller that begins
    /// an operation or waits for one, or here if the operation has ended already. The callback must be quick, for every
    /// transfer waits meanwhile, and may not wait for another operation. A panic in it fails the mesh.
    pub fn on_complete(&self, callback: impl FnOnce(&Result<(), MeshError>) + Send + 'static) {
        self.completion.on_complete(callback);
    }

    /// The peer that a receive got its bytes from, once the receive has ended well; `None` for other
    /// operations.
    pub fn source(&self) -> Option<u32> {
        self.completion.poll(|outcome, source| outcome.is_ok().then_some(*source)).flatten().flatten()
    }

    /// The ranks that the operation waits for now, ascending. The list is empty once the operation has ended,
    /// and before it has begun if it waits for earlier collectives.
    ///
    /// # Panics
    /// See [`Handle::wait`].
    pub fn awaited_ranks(&self) -> Vec<u32> {
        assert!(!on_io_thread(), "a callback must not wait for the mesh's thread: it would wait for itself");
        if self.is_done() {
            return Vec::new();
        }
        let (answer, asked) = std::sync::mpsc::sync_channel(1);
        let completion = Arc::clone(&self.completion);
        let Some(inbox) = self.inbox.upgrade() else { return Vec::new() };
        match inbox.put(MeshCommand::QueryAwaitedRanks { completion, answer }) {
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
