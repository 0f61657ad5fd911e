use std::sync::Arc;

use bytemuck::Pod;
use paramhub_transport::LendScope;

use crate::error::WorkerError;
use crate::handle::Handle;
use crate::job::{FactorBuffers, FactorHandle, FactorRegions, Shared};
use crate::region_request::RegionRequest;

/// Requests over borrowed slices; see [`Job::scope`](crate::Job::scope). A slice stays borrowed until the
/// scope ends, even after its handle was waited for.
#[derive(Clone)]
pub struct Scope<'scope, 'env: 'scope> {
    shared: Arc<Shared>,
    lending: &'scope LendScope<'scope, 'env>,
}

impl<'scope, 'env> Scope<'scope, 'env> {
    pub(crate) fn new(shared: Arc<Shared>, lending: &'scope LendScope<'scope, 'env>) -> Self {
        Scope { shared, lending }
    }

    /// See [`Job::initialise`](crate::Job::initialise).
    pub fn initialise<T: Pod>(
        &self,
        key: u32,
        parameters: &'env [T],
        version: u32,
    ) -> Result<Handle<(), ()>, WorkerError> {
        self.submit(key, RegionRequest::Initialise(self.lending.send(parameters), version))
    }

    /// See [`Job::push`](crate::Job::push).
    pub fn push<T: Pod>(&self, key: u32, gradient: &'env [T]) -> Result<Handle<(), ()>, WorkerError> {
        self.submit(key, RegionRequest::Push(self.lending.send(gradient)))
    }

    /// See [`Job::pull`](crate::Job::pull).
    pub fn pull<T: Pod>(&self, key: u32, out: &'env mut [T]) -> Result<Handle<(), ()>, WorkerError> {
        self.submit(key, RegionRequest::Pull(self.lending.receive(out)))
    }

    /// See [`Job::push_pull`](crate::Job::push_pull).
    pub fn push_pull<T: Pod, U: Pod>(
        &self,
        key: u32,
        gradient: &'env [T],
        out: &'env mut [U],
    ) -> Result<Handle<(), ()>, WorkerError> {
        self.submit(key, RegionRequest::PushPull(self.lending.send(gradient), self.lending.receive(out)))
    }

    /// [`push_pull`](Self::push_pull) of several keys as one request: for each its number, its gradient, and where its
    /// parameters go. It takes less time than a request for each, above all where the keys are small.
    ///
    /// # Errors
    /// If the request of one key is refused; then none is made.
    pub fn push_pull_many<T: Pod, U: Pod>(
        &self,
        exchanges: impl IntoIterator<Item = (u32, &'env [T], &'env mut [U])>,
    ) -> Result<Handle<(), ()>, WorkerError> {
        self.shared.submit_many(exchanges.into_iter().map(|(key, gradient, out)| {
            (key, RegionRequest::PushPull(self.lending.send(gradient), self.lending.receive(out)))
        }))
    }

    /// [`push_pull_shared`](Self::push_pull_shared) of several keys as one request, like
    /// [`push_pull_many`](Self::push_pull_many).
    ///
    /// # Errors
    /// See [`push_pull_many`](Self::push_pull_many).
    pub fn push_pull_shared_many<T: Pod>(
        &self,
        gradients: impl IntoIterator<Item = (u32, &'env [T])>,
    ) -> Result<Handle<(), ()>, WorkerError> {
        self.shared.submit_many(
            gradients
                .into_iter()
                .map(|(key, gradient)| (key, RegionRequest::PushPullShared(self.lending.send(gradient)))),
        )
    }

    /// See [`Job::push_pull_in_place`](crate::Job::push_pull_in_place).
    pub fn push_pull_in_place<T: Pod>(
        &self,
        key: u32,
        buffer: &'env mut [T],
    ) -> Result<Handle<(), ()>, WorkerError> {
        self.submit(key, RegionRequest::PushPullInPlace(self.lending.receive(buffer)))
    }

    /// See [`Job::push_pull_shared`](crate::Job::push_pull_shared).
    pub fn push_pull_shared<T: Pod>(
        &self,
        key: u32,
        gradient: &'env [T],
    ) -> Result<Handle<(), ()>, WorkerError> {
        self.submit(key, RegionRequest::PushPullShared(self.lending.send(gradient)))
    }

    /// See [`Job::push_pull_factors`](crate::Job::push_pull_factors).
    pub fn push_pull_factors<T: Pod, U: Pod>(
        &self,
        weight: u32,
        buffers: FactorBuffers<&'env [T], &'env mut [U]>,
    ) -> Result<FactorHandle<(), ()>, WorkerError> {
        let regions = FactorRegions {
            inputs: self.lending.send(buffers.inputs),
            output_gradients: self.lending.send(buffers.output_gradients),
            weight: self.lending.receive(buffers.weight),
            bias: buffers.bias.map(|bias| self.lending.receive(bias)),
        };
        self.shared.submit_factors(weight, regions, false, |_| (((), ()), ()), |_| ((), ()))
    }

    /// See [`Job::pull_state`](crate::Job::pull_state).
    pub fn pull_state(
        &self,
        key: u32,
        slot: u8,
        out: &'env mut [f32],
    ) -> Result<Handle<(), ()>, WorkerError> {
        self.submit(key, RegionRequest::PullState(self.lending.receive(out), slot))
    }

    /// See [`Job::initialise_state`](crate::Job::initialise_state).
    pub fn initialise_state(
        &self,
        key: u32,
        slot: u8,
        values: &'env [f32],
        updates: u64,
    ) -> Result<Handle<(), ()>, WorkerError> {
        self.submit(key, RegionRequest::InitialiseState(self.lending.send(values), slot, updates))
    }

    fn submit(&self, key: u32, request: RegionRequest) -> Result<Handle<(), ()>, WorkerError> {
        self.shared.submit(key, request, false, |_| ((), ()))
    }
}

impl std::fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope").field("job", &self.shared.who.job).finish_non_exhaustive()
    }
}
