//! Requests over regions of memory. This file checks a request, claims its key and hands it to the I/O
//! thread.

use std::sync::Arc;

use paramhub_core::key::Key;
use paramhub_core::limits::STATE_UPDATES_MAX;
use paramhub_core::requests::Request;
use paramhub_transport::{ReceiveRegion, SendRegion};

use crate::command::{JobCommand, KeyRequest};
use crate::error::WorkerError;
use crate::handle::{Handle, RequestBuffers, RequestCompletion, new_request};
use crate::job::Shared;

/// A request over regions of memory, for bindings whose buffers are neither owned nor borrowed Rust slices.
#[derive(Debug)]
pub enum RegionRequest {
    /// Contributes a gradient.
    Push(SendRegion),
    /// Contributes a gradient, and receives the updated parameters into the copy that the workers of this
    /// host share.
    PushPullShared(SendRegion),
    /// Receives parameters into the copy that the workers of this host share.
    PullShared,
    /// Receives parameters.
    Pull(ReceiveRegion),
    /// Contributes a gradient and receives the updated parameters.
    PushPull(SendRegion, ReceiveRegion),
    /// Contributes the gradient that lies in the region, and receives the updated parameters in its place.
    PushPullInPlace(ReceiveRegion),
    /// Sends the initial parameters, and their version. Only rank 0 may make this request.
    Initialise(SendRegion, u32),
    /// Receives one of the values of state that the optimizer keeps for each parameter. The number of that
    /// state slot counts from 0.
    PullState(ReceiveRegion, u8),
    /// Sends a slot of the initial optimizer state: its number, as in [`RegionRequest::PullState`], and the
    /// number of updates that it has had. Only rank 0 may make this request.
    InitialiseState(SendRegion, u8, u64),
}

impl Shared {
    /// Checks a request, claims its key and hands it to the I/O thread. The handle gives the buffers back if
    /// it `keeps_buffers`, in the form that `unpack` makes of them; otherwise they are dropped when the
    /// request ends.
    pub(crate) fn submit<G, P>(
        &self,
        key: u32,
        request: RegionRequest,
        keeps_buffers: bool,
        unpack: fn(RequestBuffers) -> (G, P),
    ) -> Result<Handle<G, P>, WorkerError> {
        let request = self.claim(key, request)?;
        Ok(Handle::new(self.hand_over(vec![request], keeps_buffers)?, unpack))
    }

    /// Checks all requests, claims their keys and hands them to the I/O thread together. If one is refused, none is
    /// made. The buffers are dropped when the request of their key ends.
    pub(crate) fn submit_many(
        &self,
        requests: impl IntoIterator<Item = (u32, RegionRequest)>,
    ) -> Result<Handle<(), ()>, WorkerError> {
        let requests = requests.into_iter();
        let mut claimed = Vec::with_capacity(requests.size_hint().0);
        for (key, request) in requests {
            match self.claim(key, request) {
                Ok(request) => claimed.push(request),
                Err(error) => {
                    claimed.iter().for_each(|request| self.steps.undo(request.key, request.claim));
                    return Err(error);
                }
            }
        }
        Ok(Handle::new(self.hand_over(claimed, false)?, |_| ((), ())))
    }

    /// Hands requests whose keys are claimed to the I/O thread; they end together.
    fn hand_over(
        &self,
        requests: Vec<KeyRequest>,
        keeps_buffers: bool,
    ) -> Result<Arc<RequestCompletion>, WorkerError> {
        let if_lost = WorkerError::Left { who: self.who.clone() };
        let (ticket, completion) = new_request(keeps_buffers, if_lost);
        match self.inbox.offer(JobCommand::Requests { requests, ticket }) {
            Ok(()) => Ok(completion),
            Err((refused, error)) => {
                if let JobCommand::Requests { requests, .. } = refused {
                    requests.iter().for_each(|request| self.steps.undo(request.key, request.claim));
                }
                Err(error)
            }
        }
    }

    /// Checks a request and claims its key.
    fn claim(&self, key: u32, request: RegionRequest) -> Result<KeyRequest, WorkerError> {
        let table_key = self.find(key)?;
        if matches!(request, RegionRequest::PushPullShared(_) | RegionRequest::PullShared) {
            self.check_shares_parameters()?;
        }
        let (request, number, mut buffers) = request.into_parts();
        if matches!(request, Request::Initialise | Request::InitialiseState) {
            self.check_has_parameters()?;
            if self.who.rank != 0 {
                return Err(self.misused(format!(
                    "key {table_key}: what training starts from comes from rank 0; other ranks pull it"
                )));
            }
            if let Some(step) = self.resumed_step {
                return Err(self.misused(format!(
                    "key {table_key}: the job goes on from its checkpoint of step {step}: rank 0, too, pulls what it starts from"
                )));
            }
        }
        if matches!(request, Request::Push | Request::PushPull)
            && let Some(block) = self.blocks.iter().find(|block| block.keys().any(|of_block| of_block == key))
        {
            let weight = &self.settings.keys.keys()[block.weight as usize].name;
            return Err(self.misused(format!(
                "key {table_key}: its layer goes by factors-to-hub: push the factors of its weight `{weight}`, which bring both"
            )));
        }
        if request == Request::Initialise
            && self.settings.is_two_phase()
            && let Err(start) = self.norms.start(number)
        {
            return Err(self.misused(format!(
                "key {table_key}: in two phases all parameters start from one version, but {number} came after {start}"
            )));
        }
        if request.is_of_state() {
            self.check_state(table_key, number, buffers.updates)?;
        }
        if request == Request::PullState {
            // Each chunk that arrives lowers this to the number of its own updates, if that is smaller.
            buffers.updates = u64::MAX;
        }
        let sent_bytes = buffers.send.as_ref().map(|region| region.bytes().len());
        let received_bytes = buffers.receive.as_ref().map(|region| region.bytes().len());
        let received_name = if buffers.is_in_place { "gradient in place" } else { "parameters" };
        let (element_bytes, buffer_names) = match request.is_of_state() {
            true => (size_of::<f32>(), ["state", "state"]),
            false => (table_key.dtype.bytes(), ["gradient", received_name]),
        };
        let expected_bytes = table_key.elements().unwrap_or(0) * element_bytes as u64;
        for (buffer, bytes) in buffer_names.into_iter().zip([sent_bytes, received_bytes]) {
            if let Some(got_bytes) = bytes.filter(|&bytes| bytes as u64 != expected_bytes) {
                let (who, key) = (self.who.clone(), table_key.to_string().into());
                return Err(WorkerError::Length { who, key, buffer, expected_bytes, got_bytes });
            }
        }
        let claim = self.steps.claim(key, request, number).map_err(|request| WorkerError::KeyBusy {
            who: self.who.clone(),
            key: table_key.to_string().into(),
            request,
        })?;
        if let Some(arena) = self.arena.as_ref().filter(|_| !request.is_of_state()) {
            let (send, receive) = (buffers.sent_from(), buffers.receive.as_ref().map(ReceiveRegion::bytes));
            let claims = arena.claim(key, request, send, receive);
            buffers.claims = claims.ok_or_else(|| {
                self.steps.undo(key, claim);
                self.misused(format!(
                    "key {table_key}: a tensor was given out for memory this request would pass through: exchange that \
                     tensor, or drop it"
                ))
            })?;
        }
        Ok(KeyRequest { key, request, claim, buffers })
    }

    /// Finds the entry of the key table at a position.
    pub(crate) fn find(&self, key: u32) -> Result<&Key, WorkerError> {
        let keys = self.settings.keys.keys();
        let who = || self.who.clone();
        keys.get(key as usize).ok_or_else(|| WorkerError::NoSuchKey { who: who(), key, keys: keys.len() })
    }

    pub(crate) fn check_has_parameters(&self) -> Result<(), WorkerError> {
        if self.settings.has_parameters() {
            return Ok(());
        }
        Err(self.misused(
            "the hubs of a job without an optimizer keep no parameters to start from: every rank starts from its own"
                .into(),
        ))
    }

    /// Checks the number of a state slot, and the number of updates that its values have had.
    fn check_state(&self, key: &Key, slot: u32, updates: u64) -> Result<(), WorkerError> {
        let slots = u32::from(self.state_slots);
        if slot >= slots {
            let optimizer = &self.settings.optimizer.name;
            return Err(self.misused(format!(
                "key {key}: optimizer `{optimizer}` keeps {slots} values of state a parameter, counted from 0: there is no slot {slot}"
            )));
        }
        if updates > STATE_UPDATES_MAX {
            return Err(self.misused(format!(
                "key {key}: state to start from may have had {STATE_UPDATES_MAX} updates at most, but {updates} were given"
            )));
        }
        Ok(())
    }

    /// The error of a caller who breaks the rules of the job, with the reason.
    pub(crate) fn misused(&self, reason: String) -> WorkerError {
        WorkerError::Misused { who: self.who.clone(), reason: reason.into() }
    }
}

impl RegionRequest {
    /// The kind of request, its number and its buffers. The number is the version of initial parameters, the
    /// slot of a request about optimizer state, and 0 in all others.
    fn into_parts(self) -> (Request, u32, RequestBuffers) {
        let buffers = |send, receive| RequestBuffers { send, receive, ..Default::default() };
        match self {
            RegionRequest::Push(send) => (Request::Push, 0, buffers(Some(send), None)),
            RegionRequest::PushPullShared(send) => (Request::PushPull, 0, buffers(Some(send), None)),
            RegionRequest::PullShared => (Request::Pull, 0, buffers(None, None)),
            RegionRequest::Pull(receive) => (Request::Pull, 0, buffers(None, Some(receive))),
            RegionRequest::PushPull(send, receive) => {
                (Request::PushPull, 0, buffers(Some(send), Some(receive)))
            }
            RegionRequest::PushPullInPlace(receive) => {
                (Request::PushPull, 0, RequestBuffers { is_in_place: true, ..buffers(None, Some(receive)) })
            }
            RegionRequest::Initialise(send, version) => {
                (Request::Initialise, version, buffers(Some(send), None))
            }
            RegionRequest::PullState(receive, slot) => {
                (Request::PullState, slot.into(), buffers(None, Some(receive)))
            }
            RegionRequest::InitialiseState(send, slot, updates) => {
                let buffers = RequestBuffers { updates, ..buffers(Some(send), None) };
                (Request::InitialiseState, slot.into(), buffers)
            }
        }
    }
}
