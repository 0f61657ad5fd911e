//! The memory a worker shares with the hubs of its host.

use std::ops::Range;
use std::sync::Arc;

use paramhub_core::arena::ArenaLayout;
use paramhub_core::chunk::Extent;
use paramhub_core::requests::Request;
use paramhub_core::wire::{Header, Operation};
use paramhub_transport::shm::{Arena, Segment, SharedTensor, Tensor};

/// A worker's arena and, where its hub keeps one copy of the parameters for all workers of the host, a view
/// of that copy.
#[derive(Clone, Debug)]
pub(crate) struct WorkerArena {
    pub(crate) own: Arena,
    pub(crate) layout: Arc<ArenaLayout>,
    pub(crate) common: Option<(Arc<Segment>, Arc<ArenaLayout>)>,
}

impl WorkerArena {
    /// Puts a chunk where the hub reads it, unless it lies there already.
    pub(crate) fn put(&self, header: &Header, extent: &Extent, source: &[u8]) {
        let place = match header.operation {
            Operation::Initialise => self.layout.parameters_chunk(extent),
            _ => self.layout.gradient_chunk(extent),
        };
        if source.as_ptr() != self.own.segment().pointer(place) {
            self.own.segment().write(place, source);
        }
    }

    /// Copies a chunk of parameters from where the hub has put it, unless it is to stay there.
    pub(crate) fn take(&self, extent: &Extent, target: &mut [u8]) {
        if let Some((segment, layout)) = &self.common {
            return segment.read(layout.parameters_chunk(extent), target);
        }
        let place = self.layout.parameters_chunk(extent);
        if target.as_ptr() != self.own.segment().pointer(place) {
            self.own.segment().read(place, target);
        }
    }

    /// Claims the places that a request's chunks pass through on their way to or from memory elsewhere, so
    /// that no tensor can be taken there meanwhile. The inner option is `None` if they pass through no place, and the outer
    /// one if one of the places is taken.
    pub(crate) fn claim(
        &self,
        key: u32,
        request: Request,
        send: Option<&[u8]>,
        receive: Option<&[u8]>,
    ) -> Option<Option<Box<[Option<Tensor>; 2]>>> {
        let (gradient, parameters) = (self.layout.gradient(key), self.layout.parameters(key));
        let from = if request == Request::Initialise { parameters.clone() } else { gradient };
        let into = parameters.start..if self.common.is_some() { parameters.start } else { parameters.end };
        let claim = |bytes: Option<&[u8]>, place: Range<usize>| match bytes {
            Some(bytes) if bytes.as_ptr() != self.own.segment().pointer(place.start) => {
                self.own.take(place).map(Some)
            }
            _ => Some(None),
        };
        let claims = [claim(send, from)?, claim(receive, into)?];
        let any = claims.iter().any(Option::is_some);
        Some(any.then(|| Box::new(claims)))
    }

    /// Memory for a key's gradient; `None` if it is taken.
    pub(crate) fn gradient(&self, key: u32) -> Option<Tensor> {
        self.own.take(self.layout.gradient(key))
    }

    /// Memory for a key's parameters; `None` if it is taken.
    pub(crate) fn parameters(&self, key: u32) -> Option<Tensor> {
        self.own.take(self.layout.parameters(key))
    }

    /// Memory for the gradients of neighbouring keys as one tensor; `None` if some of it is taken.
    ///
    /// # Errors
    /// If the keys do not lie back to back.
    pub(crate) fn gradients(&self, keys: Range<u32>) -> Result<Option<Tensor>, NotContiguous> {
        Ok(self.own.take(run(keys, |key| self.layout.gradient(key))?))
    }

    /// Memory for the parameters of neighbouring keys as one tensor; `None` if some of it is taken.
    ///
    /// # Errors
    /// See [`gradients`](Self::gradients).
    pub(crate) fn parameters_of(&self, keys: Range<u32>) -> Result<Option<Tensor>, NotContiguous> {
        Ok(self.own.take(run(keys, |key| self.layout.parameters(key))?))
    }

    /// The parameters of neighbouring keys as one tensor, as all workers of the host see them.
    ///
    /// # Errors
    /// See [`gradients`](Self::gradients).
    pub(crate) fn shared_parameters_of(
        &self,
        keys: Range<u32>,
    ) -> Result<Option<SharedTensor>, NotContiguous> {
        let Some((segment, layout)) = &self.common else { return Ok(None) };
        let place = run(keys, |key| layout.parameters(key))?;
        Ok(Some(SharedTensor::new(segment.clone(), place)))
    }

    /// A key's parameters as all workers of the host see them.
    pub(crate) fn shared_parameters(&self, key: u32) -> Option<SharedTensor> {
        let (segment, layout) = self.common.as_ref()?;
        Some(SharedTensor::new(segment.clone(), layout.parameters(key)))
    }
}

/// The tensors of several keys, requested as one, are not contiguous; the key is the second of two neighbours
/// that do not lie back to back.
pub(crate) struct NotContiguous(pub(crate) u32);

/// The place of all `keys`, one or more, where they lie back to back.
fn run(keys: Range<u32>, place: impl Fn(u32) -> Range<usize>) -> Result<Range<usize>, NotContiguous> {
    let mut whole = place(keys.start);
    for key in keys.start + 1..keys.end {
        let next = place(key);
        if next.start != whole.end {
            return Err(NotContiguous(key));
        }
        whole.end = next.end;
    }
    Ok(whole)
}
