//! A communicator whose calls are spans of a timeline.

use std::sync::Arc;

use paramhub_core::codec::Dtype;

use super::{Communicator, CommunicatorError};
use crate::engine::{Kind, Trace};

/// Notes every collective in a [`Trace`], on the thread that calls it. An engine sees its operations alone, and not what the
/// thread that pushes them calls: all that funnel exchanges, and concom's barriers.
pub struct Tracing<C> {
    inner: C,
    trace: Arc<Trace>,
}

impl<C: Communicator> Tracing<C> {
    /// Notes all calls of `inner`, and of its duplicates.
    pub fn new(inner: C, trace: Arc<Trace>) -> Self {
        Tracing { inner, trace }
    }

    fn note<R>(&self, kind: &str, name: &str, call: impl FnOnce(&C) -> R) -> R {
        self.trace.note(&format!("{kind} {name}"), Kind::Communicate, || call(&self.inner))
    }
}

impl<C: Communicator> Communicator for Tracing<C> {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn size(&self) -> u32 {
        self.inner.size()
    }

    fn transport(&self) -> &'static str {
        self.inner.transport()
    }

    fn allreduce(&self, name: &str, values: &mut [u8], dtype: Dtype) -> Result<(), CommunicatorError> {
        self.note("allreduce", name, |inner| inner.allreduce(name, values, dtype))
    }

    fn broadcast(&self, name: &str, bytes: &mut [u8], root: u32) -> Result<(), CommunicatorError> {
        self.note("broadcast", name, |inner| inner.broadcast(name, bytes, root))
    }

    fn reduce_scatter(
        &self,
        name: &str,
        values: &[u8],
        sum: &mut [u8],
        dtype: Dtype,
    ) -> Result<(), CommunicatorError> {
        self.note("reduce-scatter", name, |inner| inner.reduce_scatter(name, values, sum, dtype))
    }

    fn allgather(&self, name: &str, block: &[u8], all: &mut [u8]) -> Result<(), CommunicatorError> {
        self.note("allgather", name, |inner| inner.allgather(name, block, all))
    }

    fn barrier(&self) -> Result<(), CommunicatorError> {
        self.trace.note("barrier", Kind::Communicate, || self.inner.barrier())
    }

    fn duplicate(&self) -> Result<Box<dyn Communicator>, CommunicatorError> {
        let trace = Arc::clone(&self.trace);
        Ok(Box::new(Tracing { inner: self.inner.duplicate()?, trace }))
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
