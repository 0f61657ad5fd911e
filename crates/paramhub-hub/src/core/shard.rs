//! One job's chunks on one route: their memory, their books, and what arrives for them.

use std::ops::Range;

use paramhub_core::codec::Codec;
use paramhub_core::consistency::Consistency;
use paramhub_core::exchange::{Answer, Exchange, Fold, Offence, Update};
use paramhub_core::hyperparameters::Schedule;
use paramhub_core::ready_set::ReadySet;
use paramhub_core::service::JobCounters;
use paramhub_core::wire::{Header, Norm, Operation, Release, Retune, State};
use paramhub_kernels::squares::squares;
use paramhub_kernels::{Aggregator, Step, TILE_ELEMENTS, convert, finite, mean_factor, shared};

use super::arenas::Arenas;
use super::buffer::{Buffer, OutOfMemory};
use super::fault::Fault;
use super::outbox::{Outbox, Source};
use super::plan::{Layout, ShardPlan, Slot, memory_bytes};
use crate::local::RankArenas;

/// Elements worked on at once: few enough that a sum, a model and its state stay in the first cache while contributions
/// stream in from arenas and parameters stream out to them, so that reads and writes overlap.
pub(super) const BLOCK_ELEMENTS: usize = TILE_ELEMENTS;

/// Where a frame's tensor is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Payload<'a> {
    /// Received.
    Here(&'a [u8]),
    /// In the arena of the rank that sent the frame.
    InArena,
}

/// One route's chunks. Slots number them by urgency.
pub(crate) struct Shard {
    plan: ShardPlan,
    slots: Vec<Slot>,
    exchange: Exchange,
    /// One a group.
    schedules: Vec<Schedule>,
    /// The newest step of which an update was made.
    newest_step: u32,
    state_slots: usize,
    /// What the optimizer is given at once, at most.
    block_elements: usize,
    model: Buffer,
    /// Apart from `model`, so that a fast worker's next step never meets a slow worker's unsent parameters.
    merge: Buffer,
    state: Buffer,
    /// Reproducible mode: contributions of ranks 1 and up that came before a lower rank's, rank by rank.
    parked: Vec<Buffer>,
    /// Of every slot: whether `merge` holds a part of the step under way. Not kept in reproducible mode.
    merged: Vec<bool>,
    /// In two phases, of every slot that is held: the squares of its mean gradient, added up.
    squares: Vec<f64>,
    /// What the step being released multiplies its mean gradient with.
    factor: f32,
    arenas: Arenas,
    /// The model encoded for keys that are not f32, at the same offsets; empty where all are.
    encoded: Vec<u8>,
    pub(crate) outboxes: Vec<Outbox>,
    /// Ranks whose outbox has something new.
    pub(crate) dirty: ReadySet,
    left: Vec<bool>,
    counters: JobCounters,
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
            schedules: plan.groups.iter().copied().map(Schedule::new).collect(),
            newest_step: 0,
            state_slots: layout.state_slots,
            block_elements: if plan.optimizer.needs_whole_chunks() { usize::MAX } else { BLOCK_ELEMENTS },
            model: Buffer::zeroed(layout.elements, 0)?,
            merge: Buffer::zeroed(layout.elements, 1)?,
            state: Buffer::zeroed(layout.elements * layout.state_slots, 2)?,
            parked: (0..layout.parked_ranks)
                .map(|rank| Buffer::zeroed(layout.elements, 3 + rank % 8))
                .collect::<Result<_, _>>()?,
            merged: vec![false; layout.slots.len()],
            squares: vec![0.0; if layout.rules.two_phase { layout.slots.len() } else { 0 }],
            factor: 1.0,
            arenas: Arenas::new(plan.workers),
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

    /// From now on `rank` exchanges through its arena.
    pub(crate) fn attach(&mut self, rank: u32, arenas: RankArenas) {
        if self.arenas.attach(rank, arenas) {
            for index in 0..self.slots.len() {
                self.deliver(self.slots[index], true);
            }
        }
    }

    /// Whether tensors to and from `rank` stay in an arena.
    pub(crate) fn has_arena(&self, rank: u32) -> bool {
        self.arenas.has(rank)
    }

    pub(crate) fn has_left(&self, rank: u32) -> bool {
        self.left[rank as usize]
    }

    /// Refuses a header before its payload is read.
    pub(crate) fn check(&self, rank: u32, header: &Header) -> Result<(), Fault> {
        if self.has_left(rank) {
            return Err(Fault::AfterLeave(header.operation));
        }
        if !header.operation.is_about_a_chunk() {
            return Ok(());
        }
        let slot = self.slot(header.chunk)?.1;
        let of_state = matches!(header.operation, Operation::PullState | Operation::InitialiseState);
        if of_state && header.step as usize >= self.state_slots {
            let (key, slots) = (self.key_name(slot.key), self.state_slots);
            return Err(Fault::StateSlot { chunk: header.chunk, key, slot: header.step, slots });
        }
        let (expected_codec, expected) = match header.operation {
            Operation::Push | Operation::PushPull => (slot.gradient, slot.extent().bytes(slot.gradient)),
            Operation::Initialise => (slot.parameter, slot.extent().bytes(slot.parameter)),
            Operation::InitialiseState => (Codec::F32, State::bytes(slot.elements)),
            // Without a payload.
            _ => return Ok(()),
        };
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
    pub(crate) fn frame(&mut self, rank: u32, header: &Header, payload: Payload<'_>) -> Result<(), Fault> {
        match header.operation {
            Operation::PushPull => self.contribute(rank, header, payload, Answer::Parameters),
            Operation::Push => self.contribute(rank, header, payload, Answer::Applied),
            Operation::Pull => {
                let (index, slot) = self.slot(header.chunk)?;
                let pulled = self.exchange.pull(index, rank, header.step);
                pulled.map_err(|offence| self.offence(header.chunk, slot.key, offence))?;
                self.settle(index);
                if self.arenas.has_targets() {
                    self.deliver(slot, false);
                }
                self.exchange.stranded_at(index).map_err(Fault::Stranded)
            }
            Operation::Initialise => self.initialise(rank, header, payload),
            Operation::PullState => {
                let (index, slot) = self.slot(header.chunk)?;
                // Every slot has a number that fits: `check` compared.
                let pulled = self.exchange.pull_state(index, rank, header.step as u8);
                pulled.map_err(|offence| self.offence(header.chunk, slot.key, offence))?;
                self.settle(index);
                self.exchange.stranded_at(index).map_err(Fault::Stranded)
            }
            Operation::InitialiseState => self.initialise_state(rank, header, payload.here()),
            Operation::Retune => self.retune(header.chunk, header.step, payload.here()),
            Operation::Release => self.release(rank, header.step, payload.here()),
            Operation::Leave => self.leave(rank),
            Operation::Failure => Err(Fault::gave_up(payload.here())),
            // Hearing it was all it was for. Answers never reach here: the header's direction was checked.
            _ => Ok(()),
        }
    }

    fn contribute(
        &mut self,
        rank: u32,
        header: &Header,
        payload: Payload<'_>,
        answer: Answer,
    ) -> Result<(), Fault> {
        let (index, slot) = self.slot(header.chunk)?;
        if self.plan.settings.reject_non_finite
            && let Some(element) = self.first_non_finite(rank, slot, payload)
        {
            return Err(Fault::NonFinite {
                key: self.key_name(slot.key),
                element: slot.first + element as u64,
            });
        }
        let arrival = self
            .exchange
            .push(index, rank, header.step, answer)
            .map_err(|offence| self.offence(header.chunk, slot.key, offence))?;
        self.counters.contributions += 1;
        self.fold(index, slot, rank, payload, &arrival.fold);
        if let Some(update) = arrival.update {
            let is_of_all = self.plan.settings.consistency == Consistency::Synchronous;
            self.arenas.find_sources(&slot.extent(), (!is_of_all).then_some(rank));
            self.optimise(index, slot, update);
            return Ok(());
        }
        if arrival.is_held {
            self.hold(index, slot);
        }
        self.exchange.stranded_at(index).map_err(Fault::Stranded)
    }

    /// Takes a contribution's payload where it must not stay. What lies in an arena stays there until the step is complete,
    /// unless sums are made in rank order.
    fn fold(&mut self, index: u32, slot: Slot, rank: u32, payload: Payload<'_>, fold: &Fold) {
        let aggregator = &*self.plan.aggregator;
        let sum = &mut self.merge[slot.range()];
        match (fold, payload) {
            (Fold::Park, Payload::InArena) => {}
            (Fold::Park, Payload::Here(wire)) => {
                aggregator.assign(&mut self.parked[rank as usize - 1][slot.range()], wire, slot.gradient);
            }
            (Fold::Sum { first, parked }, _) if self.plan.settings.reproducible => {
                match payload {
                    Payload::Here(wire) if *first => aggregator.assign(sum, wire, slot.gradient),
                    Payload::Here(wire) => aggregator.add(sum, wire, slot.gradient),
                    Payload::InArena => add_from_arena(&self.arenas, rank, aggregator, slot, sum, *first),
                }
                for rank in parked.clone() {
                    match self.arenas.has(rank) {
                        true => add_from_arena(&self.arenas, rank, aggregator, slot, sum, false),
                        false => aggregator.add_f32(sum, &self.parked[rank as usize - 1][slot.range()]),
                    }
                }
            }
            (Fold::Sum { .. }, Payload::InArena) => {}
            (Fold::Sum { .. }, Payload::Here(wire)) => {
                match std::mem::replace(&mut self.merged[index as usize], true) {
                    false => aggregator.assign(sum, wire, slot.gradient),
                    true => aggregator.add(sum, wire, slot.gradient),
                }
            }
        }
    }

    /// Completes the sum with what lies in arenas and looks at its norm, block by block; with the last chunk of the step, tells
    /// everybody.
    fn hold(&mut self, index: u32, slot: Slot) {
        let settings = &self.plan.settings;
        let merged = std::mem::replace(&mut self.merged[index as usize], true) || settings.reproducible;
        let factor = mean_factor(self.plan.workers);
        self.arenas.find_sources(&slot.extent(), None);
        let mut total = 0.0;
        for block in slot.blocks(BLOCK_ELEMENTS) {
            let sum = &mut self.merge[slot.offset + block.start..slot.offset + block.end];
            if !settings.reproducible {
                self.arenas.gather(&*self.plan.aggregator, slot.gradient, block.start, sum, merged);
            }
            total += squares(sum, factor);
        }
        self.squares[index as usize] = total;
        if let Some(step) = self.exchange.held_step() {
            // In the order of slots, whatever the order of arrival.
            let norm = Norm(self.squares.iter().sum());
            for (outbox, rank) in self.outboxes.iter_mut().zip(0..) {
                outbox.tell_norm(step, norm);
                self.dirty.insert(rank);
            }
        }
    }

    fn release(&mut self, rank: u32, step: u32, payload: &[u8]) -> Result<(), Fault> {
        let short = || Fault::Frame(format!("a Release of {} bytes, not {}", payload.len(), Release::BYTES));
        let Release(factor) = Release::decode(payload).ok_or_else(short)?;
        self.exchange.release(rank, step).map_err(Fault::Release)?;
        self.factor = factor;
        Ok(())
    }

    /// Whether chunks of a released step wait for [`Shard::update_released`].
    pub(crate) fn is_releasing(&self) -> bool {
        self.exchange.is_releasing()
    }

    /// Updates the next chunks of a released step, about so many elements.
    pub(crate) fn update_released(&mut self, elements: usize) {
        let mut done = 0;
        while done < elements
            && let Some((index, update)) = self.exchange.release_next()
        {
            let slot = self.slots[index as usize];
            // The sum has been complete since the chunk was held.
            self.arenas.find_no_sources();
            self.optimise(index, slot, update);
            done += slot.elements as usize;
        }
    }

    /// Completes the sum with what lies in arenas, where sources were found there, runs the optimizer and hands out the new
    /// parameters, block by block while each is in cache (PHub section 3.2.2).
    fn optimise(&mut self, index: u32, slot: Slot, update: Update) {
        // Whom the new parameters are for is known before they are made, so that they are handed out while in cache.
        self.settle(index);
        self.spill(index, slot);
        self.newest_step = self.newest_step.max(update.step);
        let step = Step {
            hyperparameters: self.schedules[usize::from(slot.group)].at(update.step),
            number: update.number,
            contributions: update.contributions,
            factor: self.factor,
        };
        let settings = &self.plan.settings;
        let merged = std::mem::take(&mut self.merged[index as usize]) || settings.reproducible;
        let (aggregator, optimizer) = (&*self.plan.aggregator, &*self.plan.optimizer);
        let extent = slot.extent();
        let is_whole = self.block_elements > BLOCK_ELEMENTS;
        let mut total = [0.0_f32; BLOCK_ELEMENTS];
        for block in slot.blocks(self.block_elements) {
            let at = slot.offset + block.start..slot.offset + block.end;
            let sum =
                if merged || is_whole { &mut self.merge[at.clone()] } else { &mut total[..block.len()] };
            if !settings.reproducible {
                for (first, sum) in
                    (block.start..).step_by(BLOCK_ELEMENTS).zip(sum.chunks_mut(BLOCK_ELEMENTS))
                {
                    self.arenas.gather(aggregator, slot.gradient, first, sum, merged);
                }
            }
            let next = at.end..slot.range().end.min(at.end + BLOCK_ELEMENTS);
            shared::prefetch(bytemuck::cast_slice(&self.model[next.clone()]));
            let next = next.start * self.state_slots..next.end * self.state_slots;
            shared::prefetch(bytemuck::cast_slice(&self.state[next]));
            let state = &mut self.state[at.start * self.state_slots..at.end * self.state_slots];
            let model = &mut self.model[at.clone()];
            optimizer.apply(&step, model, sum, state);
            let parameters = encode(model, &mut self.encoded, at, slot.parameter);
            self.arenas.hand_out(&extent, block.start, slot.parameter, parameters, true);
        }
        self.arenas.forget_targets();
        self.counters.updates += 1;
    }

    fn initialise(&mut self, rank: u32, header: &Header, payload: Payload<'_>) -> Result<(), Fault> {
        let (index, slot) = self.slot(header.chunk)?;
        self.exchange
            .initialise(index, rank, header.step)
            .map_err(|offence| self.offence(header.chunk, slot.key, offence))?;
        let model = &mut self.model[slot.range()];
        match payload {
            Payload::Here(wire) => convert::decode(wire, model, slot.parameter),
            Payload::InArena => {
                let place = self.arenas.parameters_place(rank, &slot.extent());
                read_blocks(&self.arenas, rank, place, slot, slot.parameter, |block, wire| {
                    convert::decode(wire, &mut model[block], slot.parameter);
                });
            }
        }
        self.settle(index);
        self.deliver(slot, true);
        Ok(())
    }

    fn initialise_state(&mut self, rank: u32, header: &Header, payload: &[u8]) -> Result<(), Fault> {
        let (index, slot) = self.slot(header.chunk)?;
        let state = State::decode(payload).expect("its length was compared");
        self.exchange
            .initialise_state(index, rank, state.updates)
            .map_err(|offence| self.offence(header.chunk, slot.key, offence))?;
        let mut values = state.values;
        for block in slot.state_blocks(self.state_slots, header.step as usize, self.block_elements) {
            let (wire, rest) = values.split_at(block.len() * size_of::<f32>());
            convert::decode(wire, &mut self.state[block], Codec::F32);
            values = rest;
        }
        self.outboxes[rank as usize].owe(index, Answer::Applied);
        self.dirty.insert(rank);
        Ok(())
    }

    /// Copies the state owed to `rank` to where it leaves from, and says which slot it is. Nothing that has begun to leave
    /// may lie there.
    pub(crate) fn stage_state(&mut self, rank: u32, index: u32) -> Answer {
        let answer = self.exchange.owed(index, rank).expect("what is in the outbox is owed");
        let Answer::State(state_slot) = answer else { unreachable!("{answer:?} is in another set") };
        let slot = self.slots[index as usize];
        let wire = &mut self.outboxes[rank as usize].spill;
        wire.clear();
        wire.extend_from_slice(&State::head(self.exchange.updates(index)));
        for block in slot.state_blocks(self.state_slots, usize::from(state_slot), self.block_elements) {
            wire.extend_from_slice(bytemuck::cast_slice(&self.state[block]));
        }
        answer
    }

    /// Hands the chunk's parameters out as they are.
    fn deliver(&mut self, slot: Slot, are_new: bool) {
        for block in slot.blocks(BLOCK_ELEMENTS) {
            let at = slot.offset + block.start..slot.offset + block.end;
            let parameters = encode(&self.model[at.clone()], &mut self.encoded, at, slot.parameter);
            self.arenas.hand_out(&slot.extent(), block.start, slot.parameter, parameters, are_new);
        }
        self.arenas.forget_targets();
    }

    fn first_non_finite(&self, rank: u32, slot: Slot, payload: Payload<'_>) -> Option<usize> {
        match payload {
            Payload::Here(wire) => finite::first_non_finite(wire, slot.gradient),
            Payload::InArena => {
                let place = self.arenas.gradient_place(rank, &slot.extent());
                let mut found = None;
                read_blocks(&self.arenas, rank, place, slot, slot.gradient, |block, wire| {
                    let here = finite::first_non_finite(wire, slot.gradient);
                    found = found.or(here.map(|element| block.start + element));
                });
                found
            }
        }
    }

    fn retune(&mut self, group: u32, first_step: u32, payload: &[u8]) -> Result<(), Fault> {
        let refused = |reason: String| Fault::Retune { group, reason };
        let groups = self.plan.groups.len();
        let initial = self
            .plan
            .groups
            .get(group as usize)
            .ok_or_else(|| refused(format!("the job has no such group, but {groups}, counted from 0")))?;
        let Retune(next) = Retune::decode(payload)
            .ok_or_else(|| refused("they are not finite numbers in the agreed layout".to_string()))?;
        // Against the group's own: state that another group needs begins at zero here, not where it would have.
        let checked = self.plan.optimizer.check_change(initial, &next);
        checked.map_err(|error| refused(error.to_string()))?;
        let changed = self.schedules[group as usize].change(self.newest_step, first_step, next);
        changed.map_err(|error| refused(error.to_string()))
    }

    fn leave(&mut self, rank: u32) -> Result<(), Fault> {
        self.left[rank as usize] = true;
        let (outboxes, dirty) = (&mut self.outboxes, &mut self.dirty);
        let mut answers = Vec::new();
        let freed = |slot: u32, rank: u32, answer: Answer| {
            outboxes[rank as usize].owe(slot, answer);
            dirty.insert(rank);
            answers.push((slot, rank, answer));
        };
        let left = self.exchange.leave(rank, freed).map_err(Fault::Stranded);
        for (slot, rank, answer) in answers {
            self.arenas.aim(rank, answer);
            if self.arenas.has_targets() {
                self.deliver(self.slots[slot as usize], false);
            }
        }
        left
    }

    /// Owes every answer that is due, and notes the ranks in whose arenas parameters must be before theirs leaves.
    fn settle(&mut self, index: u32) {
        let (outboxes, dirty, arenas) = (&mut self.outboxes, &mut self.dirty, &mut self.arenas);
        self.exchange.settle(index, |rank, answer| {
            outboxes[rank as usize].owe(index, answer);
            dirty.insert(rank);
            arenas.aim(rank, answer);
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
            Answer::State(state_slot) => {
                let staged = &self.outboxes[rank as usize].spill[..];
                let (step, length) = (u32::from(state_slot), staged.len() as u32);
                (Header { chunk, step, length, ..Header::bare(Operation::State) }, staged)
            }
            Answer::Parameters => {
                let payload = self.payload(slot);
                let length = payload.len() as u32;
                let header =
                    Header { operation: Operation::Parameters, codec: slot.parameter, chunk, step, length };
                (header, if self.has_arena(rank) { &[] } else { payload })
            }
        }
    }

    /// The payload of a frame that has begun to leave to `rank`.
    pub(crate) fn begun_payload(&self, rank: u32, source: Source) -> &[u8] {
        let outbox = &self.outboxes[rank as usize];
        match source {
            Source::Empty => &[],
            Source::Message => &outbox.messages.front().expect("a begun message stays in front").1,
            Source::Norm => &outbox.norm.as_ref().expect("a begun norm stays").1,
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
        self.squares = Vec::new();
        self.state = Buffer::default();
        self.parked = Vec::new();
        self.encoded = Vec::new();
        self.arenas = Arenas::new(self.plan.workers);
        self.counters.memory_bytes = 0;
    }
}

impl<'a> Payload<'a> {
    /// Of a frame that carries no tensor.
    fn here(self) -> &'a [u8] {
        match self {
            Payload::Here(bytes) => bytes,
            Payload::InArena => unreachable!("only tensors lie in arenas"),
        }
    }
}

/// The parameters of a block as they travel; `at` is where it lies in the shard's arrays.
fn encode<'a>(model: &'a [f32], encoded: &'a mut [u8], at: Range<usize>, codec: Codec) -> &'a [u8] {
    match codec {
        Codec::F32 => bytemuck::cast_slice(model),
        _ => {
            let wire = &mut encoded[at.start * 2..at.end * 2];
            convert::encode(model, wire, codec);
            wire
        }
    }
}

/// Adds the contribution that lies in the arena of `rank` to `sum`, or begins it where it is the `first`.
fn add_from_arena(
    arenas: &Arenas,
    rank: u32,
    aggregator: &dyn Aggregator,
    slot: Slot,
    sum: &mut [f32],
    first: bool,
) {
    let place = arenas.gradient_place(rank, &slot.extent());
    read_blocks(arenas, rank, place, slot, slot.gradient, |block, wire| match first {
        true => aggregator.assign(&mut sum[block], wire, slot.gradient),
        false => aggregator.add(&mut sum[block], wire, slot.gradient),
    });
}

/// Copies a chunk that starts at `place` in the arena of `rank`, block by block.
fn read_blocks(
    arenas: &Arenas,
    rank: u32,
    place: usize,
    slot: Slot,
    codec: Codec,
    mut each: impl FnMut(Range<usize>, &[u8]),
) {
    let mut wire = [0_u8; BLOCK_ELEMENTS * Codec::F32.bytes()];
    for block in slot.blocks(BLOCK_ELEMENTS) {
        let wire = &mut wire[..block.len() * codec.bytes()];
        arenas.read(rank, place + block.start * codec.bytes(), wire);
        each(block, wire);
    }
}

#[cfg(test)]
#[path = "shard_tests.rs"]
pub(super) mod tests;
