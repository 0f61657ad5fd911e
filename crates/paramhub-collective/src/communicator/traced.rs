//! A communicator whose calls are spans of a timeline.

use std::sync::Arc;

use super::{Collective, Communicator, CommunicatorError};
use crate::engine::{Kind, Trace};

/// Records every collective in a [`Trace`], on the thread that calls it. An engine's observer sees only
/// operations, and not the calls of the pushing thread: all collectives of funnel, and concom's barriers.
pub struct TracedCommunicator<C> {
    inner: C,
    trace: Arc<Trace>,
}

impl<C: Communicator> TracedCommunicator<C> {
    /// Records all calls of `inner`, and of its duplicates.
    pub fn new(inner: C, trace: Arc<Trace>) -> Self {
        TracedCommunicator { inner, trace }
    }
}

impl<C: Communicator> Communicator for TracedCommunicator<C> {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn size(&self) -> u32 {
        self.inner.size()
    }

    fn transport(&self) -> &'static str {
        self.inner.transport()
    }

    fn call(&self, name: &str, collective: Collective<'_>) -> Result<(), CommunicatorError> {
        let title = format!("{} {name}", collective.kind());
        self.trace.note(title.trim_end(), Kind::Communicate, || self.inner.call(name, collective))
    }

    fn duplicate(&self) -> Result<Box<dyn Communicator>, CommunicatorError> {
        let trace = Arc::clone(&self.trace);
        Ok(Box::new(TracedCommunicator { inner: self.inner.duplicate()?, trace }))
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn leave(&self) -> Result<(), CommunicatorError> {
        self.inner.leave()
    }

    fn failure(&self) -> Option<CommunicatorError> {
        self.inner.failure()
    }

    fn check_threads(&self) -> Result<(), CommunicatorError> {
        self.inner.check_threads()
    }
}
