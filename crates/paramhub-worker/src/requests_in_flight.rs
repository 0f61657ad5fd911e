//! This module has the I/O thread's table of requests in flight: the request of each key, with its buffers
//! and its state.

use std::num::NonZeroU32;
use std::sync::Arc;

use paramhub_core::chunk::{ChunkId, Extent};
use paramhub_core::codec::{Codec, Dtype};
use paramhub_core::factors::{FactorBlock, Piece};
use paramhub_core::norms::{Norms, UnexpectedNorm, clip_factor};
use paramhub_core::placement::Placement;
use paramhub_core::requests::{PieceId, Request, Requests};
use paramhub_core::settings::Settings;
use paramhub_core::wire::{FACTORS_HEAD_BYTES, Factors, Header, Operation, Release, State, Tensors};

use crate::arena::WorkerArena;
use crate::command::KeyRequest;
use crate::error::WorkerError;
use crate::handle::{RequestBuffers, Ticket};
use crate::job::Shared;
use crate::norms::NormStatus;
use crate::program_state::ProgramStatesInFlight;
use crate::quantisation::QuantisationState;
use crate::request_groups::{EndedGroup, GroupId, RequestGroups};

/// Everything about the job's requests that does not belong to one stream.
pub(crate) struct RequestsInFlight {
    pub(crate) shared: Arc<Shared>,
    pub(crate) requests: Requests,
    pub(crate) placement: Placement,
    pub(crate) arena: Option<WorkerArena>,
    /// The dtype of each key's values in memory.
    dtypes: Vec<Dtype>,
    /// The codec in which each key's gradients travel.
    codecs: Vec<Codec>,
    quantised: QuantisationState,
    /// The number of steps after which the residuals of quantised keys start again from zero.
    residuals_begin_every: Option<NonZeroU32>,
    /// The request of each key, if one is under way.
    keys: Vec<Option<KeyUnderway>>,
    groups: RequestGroups,
    /// The number of keys whose request is under way.
    underway: usize,
    /// Present only in a job with two-phase steps.
    norms: Option<Norms>,
    /// The requests that wait for a norm, each with the step that it wants the norm of.
    norm_waits: Vec<(u32, Ticket)>,
    /// The requests for program states.
    pub(crate) program_states: ProgramStatesInFlight,
    /// The step that is to be released on every stream, with the factor that its gradient is multiplied by.
    release: Option<(u32, f32)>,
    /// Bytes of whole frames that were received and are not in the counters yet.
    pub(crate) uncounted_bytes: usize,
    /// Scratch memory of one chunk for conversions whose source or target is not aligned f32; empty if no
    /// key's values are converted.
    pub(crate) exact: Vec<f32>,
}

/// The request of a key.
struct KeyUnderway {
    buffers: RequestBuffers,
    /// The group with which the request ends.
    group: GroupId,
}

impl RequestsInFlight {
    pub(crate) fn new(
        shared: Arc<Shared>,
        requests: Requests,
        placement: Placement,
        arena: Option<WorkerArena>,
        lanes: usize,
        residuals_begin_every: Option<NonZeroU32>,
    ) -> Self {
        let settings: &Settings = &shared.settings;
        let dtypes: Vec<Dtype> = settings.keys.keys().iter().map(|key| key.dtype).collect();
        let mut codecs: Vec<Codec> = settings.keys.keys().iter().map(|key| settings.codec_of(key)).collect();
        for key in requests.blocks().flat_map(FactorBlock::keys) {
            // The key's factors travel, not its gradient.
            codecs[key as usize] = dtypes[key as usize].codec();
        }
        let converts = codecs.iter().zip(&dtypes).any(|(&codec, dtype)| codec != dtype.codec());
        let exact_elements = if converts { requests.map().chunk_elements() as usize } else { 0 };
        RequestsInFlight {
            quantised: QuantisationState::new(requests.map(), &codecs, &dtypes, settings.has_parameters()),
            residuals_begin_every,
            requests,
            placement,
            arena,
            codecs,
            keys: std::iter::repeat_with(|| None).take(dtypes.len()).collect(),
            groups: RequestGroups::default(),
            dtypes,
            underway: 0,
            norms: settings.is_two_phase().then(|| Norms::new(lanes)),
            norm_waits: Vec::new(),
            program_states: ProgramStatesInFlight::new(shared.program_state_bytes),
            release: None,
            uncounted_bytes: 0,
            exact: vec![0.0; exact_elements],
            shared,
        }
    }

    /// Starts requests that end together, whose keys were claimed. Calls `ready` with the chunks to send of each.
    pub(crate) fn begin(
        &mut self,
        requests: Vec<KeyRequest>,
        ticket: Ticket,
        mut ready: impl FnMut(&Placement, std::ops::Range<ChunkId>),
    ) -> Result<(), Arc<str>> {
        if requests.is_empty() {
            return ticket.finish(Ok(()));
        }
        let group = self.groups.begin(requests.len(), ticket);
        for KeyRequest { key, request, claim, buffers } in requests {
            let chunks = self.requests.begin(key, request, claim.step);
            let chunks = chunks.expect("a claimed key has no other request");
            self.begin_key(key, buffers, group);
            self.quantised.begin(chunks.clone());
            ready(&self.placement, chunks);
        }
        Ok(())
    }

    fn begin_key(&mut self, key: u32, buffers: RequestBuffers, group: GroupId) {
        self.keys[key as usize] = Some(KeyUnderway { buffers, group });
        self.underway += 1;
        if self.underway == 1 {
            self.shared.counters.set_in_flight(true);
        }
    }

    /// Starts the request of a factor block whose keys were claimed, with the buffers and tickets of its weight and
    /// bias. The factors of `samples` samples travel. Returns the chunk that stands for the block.
    pub(crate) fn begin_block(
        &mut self,
        block: usize,
        samples: u32,
        step: u32,
        weight: (RequestBuffers, Ticket),
        bias: Option<(RequestBuffers, Ticket)>,
    ) -> ChunkId {
        let started = self.requests.begin_block(block, samples, step);
        let chunk = started.expect("claimed keys have no other request");
        let keys = self.shared.blocks[block].keys();
        for (key, (buffers, ticket)) in keys.zip([weight].into_iter().chain(bias)) {
            let group = self.groups.begin(1, ticket);
            self.begin_key(key, buffers, group);
        }
        chunk
    }

    /// Writes a piece of a block to `wire`: a head, then its output gradients, then its inputs.
    pub(crate) fn put_piece(&self, id: PieceId, piece: &Piece, wire: &mut [u8]) {
        let block = &self.shared.blocks[id.block];
        let buffers = self.buffers(block.weight);
        let bytes = block.codec.bytes();
        let (head, values) = wire.split_at_mut(FACTORS_HEAD_BYTES);
        head.copy_from_slice(&Factors::head(id.samples, id.number));
        let (gradients, inputs) = values.split_at_mut(piece.output_gradients.len() * bytes);
        let regions = [buffers.output_gradients.as_deref(), buffers.send.as_ref()];
        let parts = [(gradients, &piece.output_gradients), (inputs, &piece.inputs)];
        for (region, (part, range)) in regions.into_iter().zip(parts) {
            let source = region.expect("a block's request has both factors").bytes();
            part.copy_from_slice(&source[range.start * bytes..range.end * bytes]);
        }
    }

    /// Returns the number of keys whose request is under way.
    pub(crate) fn underway(&self) -> usize {
        self.underway
    }

    /// Returns the codec in which a key's gradients travel, and that of its values in memory.
    pub(crate) fn codecs(&self, key: u32) -> (Codec, Codec) {
        let memory = self.dtypes[key as usize].codec();
        (self.codecs[key as usize], memory)
    }

    /// Returns the header of a chunk's request, and where the chunk lies in its key.
    pub(crate) fn header(&self, chunk: ChunkId) -> (Header, Extent) {
        self.requests.header(chunk)
    }

    /// Prepares a chunk of a quantised key for sending. Encodes its gradient; a gradient that is sent again
    /// is not encoded again, because each encoding changes the residual. If the request initialises the key,
    /// takes the initial parameters as this worker's copy.
    pub(crate) fn prepare(&mut self, header: &Header, extent: &Extent) {
        let source =
            self.keys[extent.key as usize].as_ref().and_then(|key| key.buffers.sent_from()).unwrap_or(&[]);
        let range = extent.byte_range(self.dtypes[extent.key as usize].codec());
        if header.codec.is_quantised() {
            if self.residuals_begin_every.is_some_and(|every| header.step.is_multiple_of(every.get())) {
                self.quantised.forget(header.chunk, extent);
            }
            self.quantised.encode(header.chunk, extent, &source[range], &mut self.exact);
        } else if header.operation == Operation::Initialise && self.codecs[extent.key as usize].is_quantised()
        {
            self.quantised.adopt(extent, &source[range]);
        }
    }

    /// Returns the bytes that a chunk's frame carries, for a chunk that is sent without a conversion in
    /// staging memory.
    pub(crate) fn payload(&self, header: &Header, extent: &Extent) -> &[u8] {
        match header.codec.is_quantised() {
            true => self.quantised.payload(extent),
            false => self.source(extent),
        }
    }

    /// Applies an answer that encodes the difference between a chunk's new parameters and this worker's.
    pub(crate) fn take_change(&mut self, extent: &Extent, payload: &[u8]) {
        let lies_as = self.dtypes[extent.key as usize].codec();
        let target = received_into(&mut self.keys, extent, lies_as);
        self.quantised.decode(extent, payload, target, &mut self.exact);
    }

    /// Handles that a chunk's new parameters have come in full, not as a difference: for a quantised key they
    /// become this worker's copy. They are in the user's memory, or in f32 in `payload` if that has another type.
    pub(crate) fn took_whole(&mut self, extent: &Extent, payload: Option<&[u8]>) {
        if self.codecs[extent.key as usize].is_quantised() {
            let lies_as = self.dtypes[extent.key as usize].codec();
            let target = received_into(&mut self.keys, extent, lies_as);
            match payload {
                Some(payload) => self.quantised.take_whole(extent, payload, target),
                None => self.quantised.adopt(extent, target),
            }
        }
    }

    /// Returns whether a chunk's new parameters come as they lie in the user's memory.
    pub(crate) fn come_as_they_lie(&self, header: &Header, extent: &Extent) -> bool {
        header.codec == self.dtypes[extent.key as usize].codec()
    }

    /// Returns the bytes in the user's memory that a chunk is sent or encoded from; none for a pull.
    pub(crate) fn source(&self, extent: &Extent) -> &[u8] {
        // A pull sends nothing.
        let bytes = self.buffers(extent.key).sent_from().unwrap_or(&[]);
        if bytes.is_empty() { bytes } else { &bytes[extent.byte_range(self.codecs(extent.key).1)] }
    }

    /// Returns the number of updates that a chunk has had, and its initial optimizer state as f32.
    pub(crate) fn state_source(&self, extent: &Extent) -> (u64, &[u8]) {
        let buffers = self.buffers(extent.key);
        (buffers.updates, &buffers.sent_from().unwrap_or(&[])[extent.byte_range(Codec::F32)])
    }

    /// The buffers of a key that has chunks to send.
    fn buffers(&self, key: u32) -> &RequestBuffers {
        &self.keys[key as usize].as_ref().expect("a chunk to send has a request").buffers
    }

    /// Copies a chunk's optimizer state, which was expected, to the request's buffer. The request's number of
    /// updates becomes the least of all its chunks.
    pub(crate) fn take_state(&mut self, extent: &Extent, state: &State<'_>) {
        received_into(&mut self.keys, extent, Codec::F32).copy_from_slice(state.values);
        let updates = &mut answered(&mut self.keys, extent.key).updates;
        *updates = state.updates.min(*updates);
    }

    /// Returns the user's memory for a chunk's new parameters. An answer is expected only for a chunk that
    /// was sent whole, so a gradient exchanged in place has been read by then.
    pub(crate) fn destination(&mut self, extent: &Extent) -> &mut [u8] {
        let (_, lies_as) = self.codecs(extent.key);
        received_into(&mut self.keys, extent, lies_as)
    }

    /// Copies a chunk's new parameters from the arena to the request's buffer, if the buffer lies elsewhere.
    pub(crate) fn collect(&mut self, extent: &Extent) {
        let range = extent.byte_range(self.codecs(extent.key).1);
        if let (Some(region), Some(arena)) = (&mut answered(&mut self.keys, extent.key).receive, &self.arena)
        {
            arena.take(extent, &mut region.bytes_mut()[range]);
        }
    }

    /// Ends the request of a key that was answered in full, with `version`. Fails with a callback's panic.
    pub(crate) fn finish(&mut self, key: u32, request: Request, version: u32) -> Result<(), Arc<str>> {
        // If hubs may have gone on without this worker, only the answer tells which step is next.
        let may_jump = self.requests.has_steps_of_chunks() && request != Request::Initialise;
        if request == Request::Pull || (may_jump && !request.is_of_state()) {
            self.shared.steps.adopt(key, version);
        }
        if request == Request::Factors
            && let Some(bias) =
                self.shared.blocks.iter().find_map(|block| block.bias.filter(|_| block.weight == key))
        {
            let ended = self.end(bias, Ok(()));
            return self.end(key, Ok(())).and(ended);
        }
        self.end(key, Ok(()))
    }

    /// Notes that the stream of this lane was replaced: the hub sends its last part of a norm once more.
    pub(crate) fn norms_resume(&mut self, lane: usize) {
        if let Some(norms) = &mut self.norms {
            norms.resume(lane);
        }
    }

    /// Takes the part of a step's norm, a sum of squares, that the stream of this lane brings. With the last
    /// part every waiting request gets the norm, and rank 0 releases the step unless the program does. The inner
    /// result fails with a callback's panic.
    pub(crate) fn norm_part(
        &mut self,
        lane: usize,
        step: u32,
        squares: f64,
        tensors: Tensors<'_>,
    ) -> Result<Result<(), Arc<str>>, UnexpectedNorm> {
        let norms = self.norms.as_mut().ok_or(UnexpectedNorm(step))?;
        let Some(norm) = norms.part(lane, step, squares, tensors.iter())? else { return Ok(Ok(())) };
        self.shared.norms.keep(norm);
        if self.shared.settings.releases_by_itself() && self.shared.who.rank == 0 {
            let clips_to = self.shared.settings.clip_norm;
            self.release = Some((step, clips_to.map_or(1.0, |most| clip_factor(most, norm.norm))));
        }
        let mut outcome = Ok(());
        while let Some(position) = self.norm_waits.iter().position(|&(wanted, _)| wanted <= step) {
            let (wanted, ticket) = self.norm_waits.swap_remove(position);
            outcome = self.await_norm(wanted, ticket).and(outcome);
        }
        Ok(outcome)
    }

    /// Ends the request for a step's norm if the norm is known or no longer kept; otherwise lets it wait.
    /// Fails with a callback's panic.
    pub(crate) fn await_norm(&mut self, step: u32, mut ticket: Ticket) -> Result<(), Arc<str>> {
        let outcome = match self.shared.norms.known(step) {
            NormStatus::Pending => {
                self.norm_waits.push((step, ticket));
                return Ok(());
            }
            NormStatus::Known(norm) => {
                ticket.value.norm = norm;
                Ok(())
            }
            NormStatus::Forgotten => Err(self.shared.misused(format!(
                "the norm of step {step} is not kept any more: ask for it before its step or soon after"
            ))),
        };
        self.shared.norms.end_wait();
        ticket.finish(outcome)
    }

    /// The payload of a release of the step whose norm is the newest.
    pub(crate) fn release_payload(&self, step: u32, factor: f32) -> Arc<[u8]> {
        let mut payload = Release(factor).encode().to_vec();
        if let Some(norms) = &self.norms {
            Tensors::encode(&norms.tensors(step), &mut payload);
        }
        payload.into()
    }

    /// Takes the step that is to be released on every stream, with its factor. The next call returns `None`.
    pub(crate) fn take_release(&mut self) -> Option<(u32, f32)> {
        self.release.take()
    }

    /// Adds the received bytes to the counters.
    pub(crate) fn count_received(&mut self) {
        self.shared.counters.received(std::mem::take(&mut self.uncounted_bytes));
    }

    /// Fails every request under way. Ignores panics of callbacks, for the job has failed already.
    pub(crate) fn fail_all(&mut self, error: &WorkerError) {
        for key in 0..self.keys.len() as u32 {
            let _ = self.end(key, Err(error.clone()));
        }
        for (_, ticket) in std::mem::take(&mut self.norm_waits) {
            let _ = ticket.finish(Err(error.clone()));
        }
        self.program_states.fail_all(&self.shared.program_states, error);
    }

    /// Ends a key's request, if it has one, and its group if all of the group's keys have ended. Fails with a callback's
    /// panic.
    fn end(&mut self, key: u32, outcome: Result<(), WorkerError>) -> Result<(), Arc<str>> {
        let place = &mut self.keys[key as usize];
        let Some(KeyUnderway { buffers, group }) = place else { return Ok(()) };
        let ended = self.groups.end_key(*group).map(|mut ended| {
            // The handle of a request that has ended must not keep its places in the arena.
            buffers.claims = None;
            // Only a request of one key may give its buffers back.
            ended.ticket.value = std::mem::take(buffers);
            ended
        });
        *place = None;
        self.underway -= 1;
        if self.underway == 0 {
            self.shared.counters.set_in_flight(false);
        }
        // Release the key before finishing the handle: a caller who sees the end may use the key again at
        // once.
        self.shared.steps.release(key);
        let Some(EndedGroup { ticket, keys }) = ended else { return Ok(()) };
        if outcome.is_ok() {
            // Count before announcing the end, so that a caller who sees the end finds the requests counted.
            self.count_received();
            self.shared.counters.finished(keys);
        }
        ticket.finish(outcome)
    }
}

/// The buffers of a key for which an answer is expected.
fn answered(keys: &mut [Option<KeyUnderway>], key: u32) -> &mut RequestBuffers {
    &mut keys[key as usize].as_mut().expect("an expected answer has a request").buffers
}

/// The user's memory for a chunk that is received.
fn received_into<'a>(keys: &'a mut [Option<KeyUnderway>], extent: &Extent, lies_as: Codec) -> &'a mut [u8] {
    let region = answered(keys, extent.key).receive.as_mut().expect("a request that receives has where to");
    &mut region.bytes_mut()[extent.byte_range(lies_as)]
}
