//! Requests over regions of memory, and their submission: each is checked and claims its key on its way to
//! the I/O thread.

use paramhub_core::key::Key;
use paramhub_core::limits::STATE_UPDATES_MAX;
use paramhub_core::requests::Request;
use paramhub_transport::{ReceiveRegion, SendRegion};

use crate::command::JobCommand;
use crate::error::WorkerError;
use crate::handle::{Handle, RequestBuffers};
use crate::job::Shared;

/// A request over regions of memory, for bindings whose buffers are neither owned nor borrowed Rust slices.
#[derive(Debug)]
pub enum RegionRequest {
    /// Contributes a gradient.
    Push(SendRegion),
    /// [`RegionRequest::PushPull`] into the parameters that the workers of this host share.
    PushPullShared(SendRegion),
    /// [`RegionRequest::Pull`] into the parameters that the workers of this host share.
    PullShared,
    /// Receives parameters.
    Pull(ReceiveRegion),
    /// Contributes a gradient and receives the updated parameters.
    PushPull(SendRegion, ReceiveRegion),
    /// Contributes the gradient that lies in the region, and receives the updated parameters in its place.
    PushPullInPlace(ReceiveRegion),
    /// Rank 0: sends the initial parameters, and their version.
    Initialise(SendRegion, u32),
    /// Receives a slot of the optimizer's state.
    PullState(ReceiveRegion, u8),
    /// Rank 0: sends a slot of the initial optimizer state, and the number of updates it has had.
    InitialiseState(SendRegion, u8, u64),
}

impl Shared {
    /// Checks a request, claims its key and hands it to the I/O thread.
    pub(crate) fn submit<G, P>(
        &self,
        key: u32,
        request: RegionRequest,
        keep: bool,
        unpack: fn(RequestBuffers) -> (G, P),
    ) -> Result<Handle<G, P>, WorkerError> {
        let named = self.find(key)?;
        if matches!(request, RegionRequest::PushPullShared(_) | RegionRequest::PullShared) {
            self.check_shares_parameters()?;
        }
        let (request, number, mut buffers) = request.into_parts();
        if matches!(request, Request::Initialise | Request::InitialiseState) {
            self.check_has_parameters()?;
            if self.who.rank != 0 {
                return Err(self.misused(format!(
                    "key {named}: what training starts from comes from rank 0; other ranks pull it"
                )));
            }
            if let Some(step) = self.resumed_step {
                return Err(self.misused(format!(
                    "key {named}: the job goes on from its checkpoint of step {step}: rank 0, too, pulls what it starts from"
                )));
            }
        }
        if matches!(request, Request::Push | Request::PushPull)
            && let Some(block) = self.blocks.iter().find(|block| block.keys().any(|of_block| of_block == key))
        {
            let weight = &self.settings.keys.keys()[block.weight as usize].name;
            return Err(self.misused(format!(
                "key {named}: its layer goes by factors-to-hub: push the factors of its weight `{weight}`, which bring both"
            )));
        }
        if request == Request::Initialise
            && self.settings.is_two_phase()
            && let Err(start) = self.norms.start(number)
        {
            return Err(self.misused(format!(
                "key {named}: in two phases all parameters start from one version, but {number} came after {start}"
            )));
        }
        if request.is_of_state() {
            self.check_state(named, number, buffers.updates)?;
        }
        if request == Request::PullState {
            // The chunks that come lower this to the smallest of their numbers.
            buffers.updates = u64::MAX;
        }
        let gradient = buffers.send.as_ref().map(|region| region.bytes().len());
        let parameters = buffers.receive.as_ref().map(|region| region.bytes().len());
        let receive = if buffers.is_in_place { "gradient in place" } else { "parameters" };
        let (element_bytes, names) = match request.is_of_state() {
            true => (size_of::<f32>(), ["state", "state"]),
            false => (named.dtype.bytes(), ["gradient", receive]),
        };
        for (buffer, bytes) in names.into_iter().zip([gradient, parameters]) {
            let expected_bytes = named.elements().unwrap_or(0) * element_bytes as u64;
            if let Some(got_bytes) = bytes.filter(|&bytes| bytes as u64 != expected_bytes) {
                let (who, key) = (self.who.clone(), named.to_string().into());
                return Err(WorkerError::Length { who, key, buffer, expected_bytes, got_bytes });
            }
        }
        let claim = self.steps.claim(key, request, number).map_err(|request| WorkerError::KeyBusy {
            who: self.who.clone(),
            key: named.to_string().into(),
            request,
        })?;
        if let Some(arena) = self.arena.as_ref().filter(|_| !request.is_of_state()) {
            let (send, receive) = (buffers.sent_from(), buffers.receive.as_ref().map(ReceiveRegion::bytes));
            let claims = arena.claim(key, request, send, receive);
            buffers.claims = claims.ok_or_else(|| {
                self.steps.undo(key, claim);
                self.misused(format!(
                    "key {named}: a tensor was given out for memory this request would pass through: exchange that \
                     tensor, or drop it"
                ))
            })?;
        }
        let (ticket, completion) = buffers.ticket(keep, WorkerError::Left { who: self.who.clone() });
        match self.inbox.put(JobCommand::Request { key, request, step: claim.step, ticket }) {
            Ok(()) => Ok(Handle::new(completion, unpack)),
            Err(error) => {
                self.steps.undo(key, claim);
                Err(error)
            }
        }
    }

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

    pub(crate) fn misused(&self, reason: String) -> WorkerError {
        WorkerError::Misused { who: self.who.clone(), reason: reason.into() }
    }
}

impl RegionRequest {
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
