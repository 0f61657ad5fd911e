//! One job's chunks on one route: their memory, their books, and what arrives for them.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use paramhub_core::auth::Namespace;
use paramhub_core::chunk::ChunkMap;
use paramhub_core::codec::Codec;
use paramhub_core::exchange::{Answer, Exchange, Fold, Offence, Rules, Update};
use paramhub_core::hyperparameters::{Hyperparameters, Schedule};
use paramhub_core::limits::CONTROL_BYTES_MAX;
use paramhub_core::placement::{Placement, RouteId};
use paramhub_core::ready_set::ReadySet;
use paramhub_core::service::JobCounters;
use paramhub_core::settings::Settings;
use paramhub_core::wire::{Header, Operation, Retune};
use paramhub_kernels::{Aggregator, Optimizer, Step, convert, finite};

use super::buffer::{Buffer, OutOfMemory, whole_lines};
use super::fault::Fault;
use super::outbox::{Outbox, Source};

/// What a core must know to serve one route of a job.
#[derive(Clone)]
pub(crate) struct ShardPlan {
    pub(crate) name: String,
    pub(crate) namespace: Namespace,
    pub(crate) workers: u32,
    pub(crate) dead_after: Duration,
    pub(crate) settings: Arc<Settings>,
    pub(crate) map: Arc<ChunkMap>,
    pub(crate) placement: Arc<Placement>,
    pub(crate) route: RouteId,
    pub(crate) aggregator: Arc<dyn Aggregator>,
    pub(crate) optimizer: Arc<dyn Optimizer>,
    pub(crate) hyperparameters: Hyperparameters,
}

impl ShardPlan {
    /// Bytes of the largest payload a worker may send.
    pub(crate) fn frame_bytes_max(&self) -> usize {
        self.settings.chunk_bytes.max(CONTROL_BYTES_MAX) as usize
    }
}

impl std::fmt::Debug for ShardPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShardPlan")
            .field("name", &self.name)
            .field("route", &self.route)
            .finish_non_exhaustive()
    }
}

/// One route's chunks. Slots number them by urgency.
pub(crate) struct Shard {
    plan: ShardPlan,
    slots: Vec<Slot>,
    exchange: Exchange,
    schedule: Schedule,
    /// The newest step of which an update was made.
    newest_step: u32,
    state_slots: usize,
    model: Buffer,
    /// Apart from `model`, so that a fast worker's next step never meets a slow worker's unsent parameters.
    merge: Buffer,
    state: Buffer,
    /// Reproducible mode: contributions of ranks 1 and up that came before a lower rank's, rank by rank.
    parked: Vec<Buffer>,
    /// The model encoded for keys that are not f32, at the same offsets; empty where all are.
    encoded: Vec<u8>,
    pub(crate) outboxes: Vec<Outbox>,
    /// Ranks whose outbox has something new.
    pub(crate) dirty: ReadySet,
    left: Vec<bool>,
    counters: JobCounters,
}

/// Where a chunk lies in the shard's arrays.
#[derive(Clone, Copy, Debug)]
struct Slot {
    key: u32,
    elements: u32,
    /// First element in `model` and `merge`; a multiple of a cache line.
    offset: usize,
    /// How gradients come.
    gradient: Codec,
    /// How parameters leave.
    parameter: Codec,
}

impl Slot {
    fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.elements as usize
    }

    fn state_range(&self, state_slots: usize) -> Range<usize> {
        let start = self.offset * state_slots;
        start..start + self.elements as usize * state_slots
    }

    fn encoded_range(&self) -> Range<usize> {
        let start = self.offset * 2;
        start..start + self.elements as usize * 2
    }
}

/// Bytes a shard will take, so that a job can be refused before anything is allocated.
pub(crate) fn memory_bytes(plan: &ShardPlan) -> u64 {
    let layout = Layout::new(plan);
    let arrays = 2 + layout.state_slots + layout.parked_ranks;
    let books = Exchange::memory_bytes(layout.rules, layout.slots.len() as u32);
    let slots = layout.slots.len() as u64 * size_of::<Slot>() as u64;
    // Of each stream: the frame it is about to spill, and the one a read cut off.
    let streams = u64::from(plan.workers) * (layout.payload_bytes_max + plan.frame_bytes_max()) as u64;
    layout.elements as u64 * 4 * arrays as u64 + layout.encoded_bytes as u64 + books + slots + streams
}

/// How a plan turns into arrays.
struct Layout {
    slots: Vec<Slot>,
    elements: usize,
    state_slots: usize,
    parked_ranks: usize,
    encoded_bytes: usize,
    payload_bytes_max: usize,
    rules: Rules,
}

impl Layout {
    fn new(plan: &ShardPlan) -> Self {
        let settings = &plan.settings;
        let mut offset = 0;
        let slots: Vec<Slot> = plan
            .placement
            .chunks(plan.route)
            .iter()
            .map(|&chunk| {
                let extent = plan.map.extent(chunk).expect("a placed chunk is in the map");
                let dtype = settings.keys.keys()[extent.key as usize].dtype;
                let slot = Slot {
                    key: extent.key,
                    elements: extent.elements,
                    offset,
                    gradient: settings.gradient_codec(dtype),
                    parameter: dtype.codec(),
                };
                offset += whole_lines(extent.elements as usize);
                slot
            })
            .collect();
        let any_encoded = slots.iter().any(|slot| slot.parameter != Codec::F32);
        Layout {
            elements: offset,
            state_slots: plan.optimizer.state_slots(&plan.hyperparameters),
            parked_ranks: if settings.reproducible { plan.workers as usize - 1 } else { 0 },
            encoded_bytes: if any_encoded { offset * 2 } else { 0 },
            payload_bytes_max: slots.iter().map(|slot| slot.elements as usize * 4).max().unwrap_or(0),
            rules: Rules {
                workers: plan.workers,
                consistency: settings.consistency,
                reproducible: settings.reproducible,
                has_parameters: settings.has_parameters(),
            },
            slots,
        }
    }
}

impl Shard {
    /// Allocates and touches everything, on the calling thread.
    pub(crate) fn new(plan: ShardPlan) -> Result<Self, OutOfMemory> {
        let layout = Layout::new(&plan);
        let slots = layout.slots.len() as u32;
        let mut encoded = Vec::new();
        let full = |_| OutOfMemory { bytes: layout.encoded_bytes as u64 };
        encoded.try_reserve_exact(layout.encoded_bytes).map_err(full)?;
        encoded.resize(layout.encoded_bytes, 0);
        let mut shard = Shard {
            exchange: Exchange::new(layout.rules, slots),
            schedule: Schedule::new(plan.hyperparameters),
            newest_step: 0,
            state_slots: layout.state_slots,
            model: Buffer::zeroed(layout.elements, 0)?,
            merge: Buffer::zeroed(layout.elements, 1)?,
            state: Buffer::zeroed(layout.elements * layout.state_slots, 2)?,
            parked: (0..layout.parked_ranks)
                .map(|rank| Buffer::zeroed(layout.elements, 3 + rank % 8))
                .collect::<Result<_, _>>()?,
            encoded,
            outboxes: (0..plan.workers).map(|_| Outbox::new(slots, layout.payload_bytes_max)).collect(),
            dirty: ReadySet::new(plan.workers),
            left: vec![false; plan.workers as usize],
            counters: JobCounters::default(),
            slots: layout.slots,
            plan,
        };
        shard.counters.memory_bytes = memory_bytes(&shard.plan);
        Ok(shard)
    }

    pub(crate) fn plan(&self) -> &ShardPlan {
        &self.plan
    }

    pub(crate) fn counters(&self) -> JobCounters {
        self.counters
    }

    pub(crate) fn count_bytes(&mut self, received: usize, sent: usize) {
        self.counters.bytes_received += received as u64;
        self.counters.bytes_sent += sent as u64;
    }

    pub(crate) fn has_left(&self, rank: u32) -> bool {
        self.left[rank as usize]
    }

    /// Refuses a header before its payload is read.
    pub(crate) fn check(&self, rank: u32, header: &Header) -> Result<(), Fault> {
        if self.has_left(rank) {
            return Err(Fault::AfterLeave(header.operation));
        }
        let Some(expected_codec) = (match header.operation {
            Operation::Push | Operation::PushPull => Some(self.slot(header.chunk)?.1.gradient),
            Operation::Initialise => Some(self.slot(header.chunk)?.1.parameter),
            Operation::Pull => {
                self.slot(header.chunk)?;
                None
            }
            _ => None,
        }) else {
            return Ok(());
        };
        let slot = self.slot(header.chunk)?.1;
        let expected = slot.elements * expected_codec.bytes() as u32;
        if header.codec != expected_codec || header.length != expected {
            return Err(Fault::Payload {
                chunk: header.chunk,
                key: self.key_name(slot.key),
                got: header.length,
                codec: header.codec,
                expected,
                expected_codec,
            });
        }
        Ok(())
    }

    /// Does what a whole frame asks. The header has passed [`Shard::check`].
    pub(crate) fn frame(&mut self, rank: u32, header: &Header, payload: &[u8]) -> Result<(), Fault> {
        match header.operation {
            Operation::PushPull => self.contribute(rank, header, payload, Answer::Parameters),
            Operation::Push => self.contribute(rank, header, payload, Answer::Applied),
            Operation::Pull => {
                let (index, slot) = self.slot(header.chunk)?;
                let pulled = self.exchange.pull(index, rank, header.step);
                pulled.map_err(|offence| self.offence(header.chunk, slot.key, offence))?;
                self.settle(index);
                self.exchange.stranded_at(index).map_err(Fault::Stranded)
            }
            Operation::Initialise => self.initialise(rank, header, payload),
            Operation::Retune => self.retune(header.step, payload),
            Operation::Leave => self.leave(rank),
            // Hearing it was all it was for. Answers never reach here: the header's direction was checked.
            _ => Ok(()),
        }
    }

    fn contribute(
        &mut self,
        rank: u32,
        header: &Header,
        payload: &[u8],
        answer: Answer,
    ) -> Result<(), Fault> {
        let (index, slot) = self.slot(header.chunk)?;
        if self.plan.settings.reject_non_finite
            && let Some(element) = finite::first_non_finite(payload, header.codec)
        {
            let offset = self.plan.map.extent(header.chunk).map_or(0, |extent| extent.offset);
            return Err(Fault::NonFinite { key: self.key_name(slot.key), element: offset + element as u64 });
        }
        let arrival = self
            .exchange
            .push(index, rank, header.step, answer)
            .map_err(|offence| self.offence(header.chunk, slot.key, offence))?;
        self.counters.contributions += 1;
        let aggregator = &*self.plan.aggregator;
        match arrival.fold {
            Fold::Park => {
                let place = &mut self.parked[rank as usize - 1][slot.range()];
                aggregator.assign(place, payload, header.codec);
            }
            Fold::Sum { first, parked } => {
                let sum = &mut self.merge[slot.range()];
                if first {
                    aggregator.assign(sum, payload, header.codec);
                } else {
                    aggregator.add(sum, payload, header.codec);
                }
                for rank in parked {
                    aggregator.add_f32(sum, &self.parked[rank as usize - 1][slot.range()]);
                }
            }
        }
        match arrival.update {
            Some(update) => {
                self.optimise(index, slot, update);
                self.settle(index);
                Ok(())
            }
            None => self.exchange.stranded_at(index).map_err(Fault::Stranded),
        }
    }

    /// Runs the optimizer on a chunk while its sum is in cache.
    fn optimise(&mut self, index: u32, slot: Slot, update: Update) {
        self.spill(index, slot);
        self.newest_step = self.newest_step.max(update.step);
        let step = Step {
            hyperparameters: self.schedule.at(update.step),
            number: update.number,
            contributions: update.contributions,
        };
        let state = &mut self.state[slot.state_range(self.state_slots)];
        self.plan.optimizer.apply(&step, &mut self.model[slot.range()], &self.merge[slot.range()], state);
        self.encode(slot);
        self.counters.updates += 1;
    }

    fn initialise(&mut self, rank: u32, header: &Header, payload: &[u8]) -> Result<(), Fault> {
        let (index, slot) = self.slot(header.chunk)?;
        self.exchange
            .initialise(index, rank, header.step)
            .map_err(|offence| self.offence(header.chunk, slot.key, offence))?;
        convert::decode(payload, &mut self.model[slot.range()], header.codec);
        self.encode(slot);
        self.settle(index);
        Ok(())
    }

    fn retune(&mut self, first_step: u32, payload: &[u8]) -> Result<(), Fault> {
        let refused = |reason: String| Fault::Retune(reason);
        let Retune(next) = Retune::decode(payload)
            .ok_or_else(|| refused("they are not finite numbers in the agreed layout".to_string()))?;
        self.plan
            .optimizer
            .check_change(&self.plan.hyperparameters, &next)
            .map_err(|error| refused(error.to_string()))?;
        let changed = self.schedule.change(self.newest_step, first_step, next);
        changed.map_err(|error| refused(error.to_string()))
    }

    fn leave(&mut self, rank: u32) -> Result<(), Fault> {
        self.left[rank as usize] = true;
        let (outboxes, dirty) = (&mut self.outboxes, &mut self.dirty);
        let freed = |slot: u32, rank: u32, answer: Answer| {
            outboxes[rank as usize].owe(slot, answer);
            dirty.insert(rank);
        };
        self.exchange.leave(rank, freed).map_err(Fault::Stranded)
    }

    fn settle(&mut self, index: u32) {
        let (outboxes, dirty) = (&mut self.outboxes, &mut self.dirty);
        self.exchange.settle(index, |rank, answer| {
            outboxes[rank as usize].owe(index, answer);
            dirty.insert(rank);
        });
    }

    /// Saves what is still to leave of this chunk's old parameters; at most one frame a rank.
    fn spill(&mut self, index: u32, slot: Slot) {
        for rank in 0..self.outboxes.len() {
            let begun = self.outboxes[rank].begun;
            if let Some(begun) = begun
                && begun.source == Source::Model(index)
            {
                let mut spill = std::mem::take(&mut self.outboxes[rank].spill);
                spill.clear();
                spill.extend_from_slice(self.payload(slot));
                self.outboxes[rank].spill = spill;
                self.outboxes[rank].begun.as_mut().expect("it was there").source = Source::Spill;
            }
        }
    }

    /// Saves every frame that has begun to leave, so that the arrays can be freed.
    pub(crate) fn spill_all(&mut self) {
        for rank in 0..self.outboxes.len() {
            if let Some(Source::Model(index)) = self.outboxes[rank].begun.map(|begun| begun.source) {
                self.spill(index, self.slots[index as usize]);
            }
        }
    }

    fn encode(&mut self, slot: Slot) {
        if slot.parameter != Codec::F32 {
            convert::encode(
                &self.model[slot.range()],
                &mut self.encoded[slot.encoded_range()],
                slot.parameter,
            );
        }
    }

    /// The chunk's parameters as they travel.
    fn payload(&self, slot: Slot) -> &[u8] {
        match slot.parameter {
            Codec::F32 => bytemuck::cast_slice(&self.model[slot.range()]),
            _ => &self.encoded[slot.encoded_range()],
        }
    }

    /// The frame that answers `rank` for a slot, and its payload.
    pub(crate) fn answer(&self, rank: u32, index: u32, answer: Answer) -> (Header, &[u8]) {
        let slot = self.slots[index as usize];
        let chunk = self.plan.placement.chunks(self.plan.route)[index as usize];
        let step = self.exchange.answer_version(index, rank);
        match answer {
            Answer::Applied => (Header { chunk, step, ..Header::bare(Operation::Applied) }, &[]),
            Answer::Parameters => {
                let payload = self.payload(slot);
                let length = payload.len() as u32;
                (
                    Header { operation: Operation::Parameters, codec: slot.parameter, chunk, step, length },
                    payload,
                )
            }
        }
    }

    /// The payload of a frame that has begun to leave to `rank`.
    pub(crate) fn begun_payload(&self, rank: u32, source: Source) -> &[u8] {
        let outbox = &self.outboxes[rank as usize];
        match source {
            Source::Empty => &[],
            Source::Message => &outbox.messages.front().expect("a begun message stays in front").1,
            Source::Spill => &outbox.spill,
            Source::Model(index) => self.payload(self.slots[index as usize]),
        }
    }

    /// An answer to `rank` has begun to leave.
    pub(crate) fn answer_begun(&mut self, rank: u32, index: u32) {
        self.exchange.answer_begun(index, rank);
    }

    fn slot(&self, chunk: u32) -> Result<(u32, Slot), Fault> {
        match self.plan.placement.locate(chunk) {
            Some((route, index)) if route == self.plan.route => Ok((index, self.slots[index as usize])),
            _ => Err(Fault::Chunk(chunk)),
        }
    }

    fn key_name(&self, key: u32) -> String {
        self.plan.settings.keys.keys()[key as usize].name.clone()
    }

    fn offence(&self, chunk: u32, key: u32, offence: Offence) -> Fault {
        Fault::Rules { chunk, key: self.key_name(key), offence }
    }

    /// Frees the arrays of a job that is over; begun frames stay.
    pub(crate) fn free(&mut self) {
        self.spill_all();
        for outbox in &mut self.outboxes {
            outbox.forget();
        }
        self.model = Buffer::default();
        self.merge = Buffer::default();
        self.state = Buffer::default();
        self.parked = Vec::new();
        self.encoded = Vec::new();
        self.counters.memory_bytes = 0;
    }
}

#[cfg(test)]
#[path = "shard_tests.rs"]
pub(super) mod tests;
