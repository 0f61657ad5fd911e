//! One job's chunks on one route: their memory, their books, and what arrives for them.

mod awaited;
mod between;
mod copying;
mod factors;
mod late;
mod memory;
mod outgoing;
mod start;

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use paramhub_core::codec::Codec;
use paramhub_core::consistency::Consistency;
use paramhub_core::exchange::{Answer, Exchange, Fold, Offence, Stranded, Then, Update};
use paramhub_core::hyperparameters::{Hyperparameters, Schedule};
use paramhub_core::lateness::Watch;
use paramhub_core::ready_set::ReadySet;
use paramhub_core::service::JobCounters;
use paramhub_core::wire::{Header, Norm, Operation, Release, State};
use paramhub_kernels::squares::squares;
use paramhub_kernels::{Aggregator, Step, convert, finite, mean_factor, quantise, shared};

pub(crate) use self::awaited::{Absence, AwaitedNews};
pub(super) use self::factors::FactorLayers;
pub(crate) use self::late::Late;
use super::arenas::Arenas;
use super::buffer::{Buffer, OutOfMemory};
use super::deadlines::Deadlines;
use super::fault::Fault;
use super::outbox::Outbox;
use super::plan::{BLOCK_ELEMENTS, Layout, ShardPlan, Slot};
use super::ports::Side;
use super::quantised::Quantised;
use super::snapshot::Snapshot;
use crate::local::RankArenas;
use copying::Armed;
use memory::Restoring;

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
    /// The sum that the last update was made of, for sites below that have not been sent it yet; empty where there are none.
    total: Buffer,
    /// Reproducible mode: contributions of members 1 and up that came before a lower one's, member by member.
    parked: Vec<Buffer>,
    /// Of every slot: whether `merge` holds a part of the step under way. Not kept in reproducible mode.
    merged: Vec<bool>,
    /// In two phases, of every slot that is held: the squares of its mean gradient, added up.
    squares: Vec<f64>,
    /// What the step being released multiplies its mean gradient with.
    factor: f32,
    arenas: Arenas,
    quantised: Quantised,
    factors: FactorLayers,
    /// The model encoded for keys that are not f32, at the same offsets; empty where all are.
    encoded: Buffer<u8>,
    pub(crate) outboxes: Vec<Outbox>,
    /// Ports whose outbox has something new.
    pub(crate) dirty: ReadySet,
    /// Of every port: a member has left; we have, where a site is above.
    left: Vec<bool>,
    counters: JobCounters,
    /// When the newest frames came, as far as steps end by time.
    pub(crate) now: Instant,
    /// Of a job that leaves late workers out.
    deadlines: Option<Deadlines>,
    /// Of every rank, the updates it will have been left out of when somebody is told next.
    late_from: Vec<u64>,
    /// How long others have waited for somebody.
    watch: Watch,
    /// The snapshot being taken.
    armed: Option<Armed>,
    /// Memory for snapshots that nobody has asked for yet.
    spare_snapshot: Option<Box<Snapshot>>,
    /// What chunks begin with, until all have it.
    restoring: Option<Restoring>,
    /// Whether each slot's parameters are missing where ranks of this host read them in common.
    unshared: Vec<bool>,
    /// Bytes copied to arenas since somebody asked.
    copied: usize,
}

impl Shard {
    /// Reserves all it will need; [`open_some`](Self::open_some) takes it. `memory_bytes` is what that comes to.
    pub(crate) fn reserve(mut plan: ShardPlan) -> Result<Self, OutOfMemory> {
        let layout = Layout::new(&plan);
        let memory_bytes = layout.memory_bytes(&plan);
        let block_elements = plan.block_elements();
        let spare_snapshot = match plan.checkpoints {
            true => Snapshot::new(&plan, &layout, block_elements)?,
            false => None,
        };
        let restored = plan.restored.take();
        let groups: &[Hyperparameters] = match &restored {
            Some(restored) => &restored.hyperparameters,
            None => &plan.groups,
        };
        let slots = layout.slots.len() as u32;
        let (now, leaves_out) = (Instant::now(), plan.stragglers.leaves_out());
        let mut exchange = Exchange::among_sites(layout.rules, plan.ports.reach());
        layout.factors.iter().for_each(|layer| exchange.take_factors(layer.slots()));
        let mut shard = Shard {
            exchange,
            schedules: groups.iter().copied().map(Schedule::new).collect(),
            newest_step: 0,
            state_slots: layout.state_slots,
            block_elements,
            model: Buffer::reserved(layout.elements, 0)?,
            merge: Buffer::reserved(layout.elements, 1)?,
            state: Buffer::reserved(layout.elements * layout.state_slots, 2)?,
            total: Buffer::reserved(if layout.keeps_totals { layout.elements } else { 0 }, 3)?,
            parked: (0..layout.parked_members)
                .map(|member| Buffer::reserved(layout.elements, 4 + member % 8))
                .collect::<Result<_, _>>()?,
            merged: vec![false; layout.slots.len()],
            squares: vec![0.0; if layout.rules.two_phase { layout.slots.len() } else { 0 }],
            factor: 1.0,
            arenas: Arenas::new(plan.ports.workers()),
            quantised: Quantised::new(&layout, plan.ports.workers())?,
            factors: FactorLayers::new(&plan, &layout)?,
            encoded: Buffer::reserved(layout.encoded_bytes, 0)?,
            outboxes: (0..plan.ports.len())
                .map(|_| Outbox::new(slots, layout.payload_bytes_max, plan.groups.len()))
                .collect(),
            dirty: ReadySet::new(plan.ports.len()),
            left: vec![false; plan.ports.len() as usize],
            counters: JobCounters::default(),
            now,
            deadlines: leaves_out.then(|| Deadlines::new(plan.stragglers, layout.slots.len(), now)),
            late_from: vec![u64::from(slots); if leaves_out { plan.ports.workers() as usize } else { 0 }],
            watch: Watch::new(layout.slots.len(), plan.progress_timeout),
            armed: None,
            spare_snapshot,
            restoring: None,
            unshared: vec![false; layout.slots.len()],
            copied: 0,
            slots: layout.slots,
            plan,
        };
        if let Some(restored) = restored {
            // Who read it has handed it over.
            shard.begin_restoring(Arc::into_inner(restored).expect("the shard alone has it"));
        }
        shard.counters.memory_bytes = memory_bytes;
        Ok(shard)
    }

    /// One that is open.
    #[cfg(test)]
    pub(crate) fn new(plan: ShardPlan) -> Result<Self, OutOfMemory> {
        let mut shard = Shard::reserve(plan)?;
        while shard.open_some(1 << 20) {}
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
            // Its memory is zeroed, as parameters are that have not begun. Others are copied when they are first asked for, not
            // all of a large model at once.
            for (unshared, index) in self.unshared.iter_mut().zip(0..) {
                *unshared = self.exchange.has_begun(index);
            }
        }
    }

    /// Bytes copied to arenas since the last call.
    pub(crate) fn take_copied(&mut self) -> usize {
        std::mem::take(&mut self.copied)
    }

    /// Another stream has taken the place of a worker's. All that was to leave by the old one is forgotten but for messages:
    /// the worker asks again for what it lacks.
    pub(crate) fn resume(&mut self, worker: u32) {
        self.exchange.resume(worker);
        self.quantised.forget(worker);
        self.factors.resume(worker);
        self.outboxes[worker as usize].start_again();
        self.counters.streams_moved += 1;
    }

    /// Whether tensors to and from there stay in an arena.
    pub(crate) fn has_arena(&self, port: u32) -> bool {
        port < self.plan.ports.workers() && self.arenas.has(port)
    }

    /// Whether the stream of this port may end: who is at its other end has said goodbye, or we have to a site above.
    pub(crate) fn has_left(&self, port: u32) -> bool {
        self.left[port as usize]
    }

    /// Whether all has been said to a site above, which is told once.
    pub(crate) fn says_farewell(&mut self, port: u32) -> bool {
        let is_due = self.plan.ports.side(port) == Side::Above
            && self.left[port as usize]
            && self.outboxes[port as usize].is_empty();
        is_due && !std::mem::replace(&mut self.outboxes[port as usize].said_farewell, true)
    }

    /// Refuses a header before its payload is read.
    pub(crate) fn check(&self, port: u32, header: &Header) -> Result<(), Fault> {
        let side = self.plan.ports.side(port);
        if self.has_left(port) && self.plan.continues && header.operation == Operation::Leave {
            // Its stream was cut behind its goodbye, which it could not know.
            return Ok(());
        }
        if self.has_left(port) && side != Side::Above {
            return Err(Fault::AfterLeave(header.operation));
        }
        if !between::may_come(side, header.operation) {
            return Err(Fault::NotFromThere(header.operation));
        }
        if !header.operation.is_about_a_chunk() {
            return Ok(());
        }
        let (index, slot) = self.slot(header.chunk)?;
        if !self.plan.ports.carries(port, index) {
            return Err(Fault::Chunk(header.chunk));
        }
        if header.operation == Operation::PullState
            && !self.plan.optimizes_here()
            && self.plan.ports.above(index).is_some()
        {
            return Err(Fault::StateElsewhere { key: self.key_name(slot.key) });
        }
        let of_state = matches!(header.operation, Operation::PullState | Operation::InitialiseState);
        if of_state && header.step as usize >= self.state_slots {
            let (key, slots) = (self.key_name(slot.key), self.state_slots);
            return Err(Fault::StateSlot { chunk: header.chunk, key, slot: header.step, slots });
        }
        let (expected_codec, expected) = match header.operation {
            Operation::Factors => return self.check_factors(index, header),
            Operation::Push | Operation::PushPull if self.exchange.takes_factors(index) => {
                return Err(self.offence(header.chunk, slot.key, Offence::ByFactors));
            }
            Operation::Push | Operation::PushPull => {
                let codec = contributed_as(side, &slot);
                (codec, slot.extent().bytes(codec))
            }
            Operation::Total => (Codec::F32, slot.extent().bytes(Codec::F32)),
            Operation::Initialise | Operation::Parameters => {
                (slot.parameter, slot.extent().bytes(slot.parameter))
            }
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
    pub(crate) fn frame(&mut self, port: u32, header: &Header, payload: Payload<'_>) -> Result<(), Fault> {
        match header.operation {
            Operation::PushPull => self.contribute(port, header, payload, Answer::Parameters),
            Operation::Push => self.contribute(port, header, payload, Answer::Applied),
            Operation::Factors => match self.plan.ports.side(port) {
                Side::Worker(member) => self.gather_factors(member, header, payload.here()),
                Side::Below(_) | Side::Above => unreachable!("`check` lets factors in from workers alone"),
            },
            Operation::Pull => {
                let (index, slot) = self.slot(header.chunk)?;
                let pulled = self.exchange.pull(index, port, header.step);
                pulled.map_err(|offence| self.offence(header.chunk, slot.key, offence))?;
                self.settle(index);
                let is_unshared = std::mem::take(&mut self.unshared[index as usize]);
                if is_unshared || self.arenas.has_targets() {
                    self.deliver(slot, is_unshared);
                }
                self.stranded_at(index)
            }
            Operation::Initialise => self.initialise(port, header, payload),
            Operation::PullState => {
                let (index, slot) = self.slot(header.chunk)?;
                // Every slot has a number that fits: `check` compared.
                let pulled = self.exchange.pull_state(index, port, header.step as u8);
                pulled.map_err(|offence| self.offence(header.chunk, slot.key, offence))?;
                self.settle(index);
                self.stranded_at(index)
            }
            Operation::InitialiseState => self.initialise_state(port, header, payload.here()),
            Operation::Retune => self.retune(port, header, payload.here()),
            Operation::Release => self.release(port, header.step, payload.here()),
            Operation::Leave if self.has_left(port) => Ok(()),
            Operation::Leave => self.leave(port),
            Operation::Total => self.lower(header, payload.here()),
            Operation::Parameters => self.lower_parameters(header, payload.here()),
            Operation::Failure => Err(between::failure(self.plan.ports.side(port), payload.here())),
            // Hearing it was all it was for.
            _ => Ok(()),
        }
    }

    fn contribute(
        &mut self,
        port: u32,
        header: &Header,
        payload: Payload<'_>,
        answer: Answer,
    ) -> Result<(), Fault> {
        let (index, slot) = self.slot(header.chunk)?;
        let (member, codec) = match self.plan.ports.side(port) {
            Side::Worker(member) => (member, slot.gradient),
            Side::Below(member) => (member, Codec::F32),
            Side::Above => unreachable!("`check` lets no contribution in from above"),
        };
        // What is repeated is not looked at: an answer may have begun to land on it at the worker.
        let rejects = self.plan.settings.reject_non_finite || slot.gradient.is_quantised();
        if rejects
            && !self.exchange.is_repeat(index, member, header.step)
            && let Some(element) = self.first_non_finite(port, slot, payload)
        {
            let (key, element) = (self.key_name(slot.key), slot.first + element as u64);
            return Err(match slot.gradient.is_quantised() {
                true => Fault::NonFiniteBlock { key, element, codec: slot.gradient },
                false => Fault::NonFinite { key, element },
            });
        }
        let arrival = self
            .exchange
            .push(index, member, header.step, answer)
            .map_err(|offence| self.offence(header.chunk, slot.key, offence))?;
        if arrival.then == Then::Repeated {
            self.settle(index);
            return self.stranded_at(index);
        }
        if arrival.then == Then::Late {
            self.answer_late(index, slot);
            return Ok(());
        }
        self.counters.contributions += 1;
        self.fold(index, slot, member, codec, payload, &arrival.fold);
        if let Then::Update(update) = arrival.then
            && self.total.is_empty()
        {
            let is_of_all = self.plan.settings.consistency == Consistency::Synchronous;
            match self.plan.stragglers.leaves_out() {
                true => self.arenas.find_no_sources(),
                false => self.arenas.find_sources(&slot.extent(), (!is_of_all).then_some(member)),
            }
            self.optimise(index, slot, update);
            return Ok(());
        }
        if arrival.then == Then::Wait {
            self.look_at_median(index);
        }
        if !matches!(arrival.then, Then::Wait) {
            self.gather(index, slot);
        }
        self.go_on(index, slot, arrival.then)
    }

    /// What becomes of a sum that waits for more, or that is whole and lies where it belongs.
    fn go_on(&mut self, index: u32, slot: Slot, then: Then) -> Result<(), Fault> {
        match then {
            Then::Wait => {}
            Then::Hold => self.hold(index, slot),
            Then::Raise => self.raise(index),
            Then::Repeated | Then::Late | Then::Make => unreachable!("it ends where it is taken"),
            Then::Update(update) => {
                self.keep_total(slot);
                self.arenas.find_no_sources();
                self.optimise(index, slot, update);
                return Ok(());
            }
        }
        self.stranded_at(index)
    }

    /// Takes a contribution's payload where it must not stay. What lies in an arena stays there until the step is complete,
    /// unless sums are made in rank order, or of those alone who are in time.
    fn fold(&mut self, index: u32, slot: Slot, member: u32, codec: Codec, payload: Payload<'_>, fold: &Fold) {
        let workers = self.plan.ports.workers();
        let aggregator = &*self.plan.aggregator;
        let sum = &mut self.merge[slot.range()];
        match (fold, payload) {
            (Fold::Drop, _) | (Fold::Park, Payload::InArena) => {}
            (Fold::Park, Payload::Here(wire)) => {
                aggregator.assign(&mut self.parked[member as usize - 1][slot.range()], wire, codec);
            }
            (Fold::Sum { first, parked }, _) if self.plan.settings.reproducible => {
                match payload {
                    Payload::Here(wire) if *first => aggregator.assign(sum, wire, codec),
                    Payload::Here(wire) => aggregator.add(sum, wire, codec),
                    Payload::InArena => add_from_arena(&self.arenas, member, aggregator, slot, sum, *first),
                }
                for member in parked.clone() {
                    match member < workers && self.arenas.has(member) {
                        true => add_from_arena(&self.arenas, member, aggregator, slot, sum, false),
                        false => aggregator.add_f32(sum, &self.parked[member as usize - 1][slot.range()]),
                    }
                }
            }
            (Fold::Sum { .. }, Payload::InArena) if self.plan.stragglers.leaves_out() => {
                let first = !std::mem::replace(&mut self.merged[index as usize], true);
                add_from_arena(&self.arenas, member, aggregator, slot, sum, first);
            }
            (Fold::Sum { .. }, Payload::InArena) => {}
            (Fold::Sum { .. }, Payload::Here(wire)) => {
                match std::mem::replace(&mut self.merged[index as usize], true) {
                    false => aggregator.assign(sum, wire, codec),
                    true => aggregator.add(sum, wire, codec),
                }
            }
        }
    }

    /// Completes the sum with what lies in arenas.
    fn gather(&mut self, index: u32, slot: Slot) {
        let reproducible = self.plan.settings.reproducible;
        let merged = std::mem::replace(&mut self.merged[index as usize], true);
        if reproducible {
            return;
        }
        self.arenas.find_sources(&slot.extent(), None);
        for block in slot.blocks(BLOCK_ELEMENTS) {
            let sum = &mut self.merge[slot.offset + block.start..slot.offset + block.end];
            self.arenas.gather(&*self.plan.aggregator, slot.gradient, block.start, sum, merged);
        }
    }

    /// Looks at the norm of a sum; with the last chunk of the step, tells everybody.
    fn hold(&mut self, index: u32, slot: Slot) {
        let factor = mean_factor(self.plan.workers());
        let blocks = slot.blocks(BLOCK_ELEMENTS);
        let total = blocks
            .map(|block| squares(&self.merge[slot.offset + block.start..slot.offset + block.end], factor));
        self.squares[index as usize] = total.sum();
        if let Some(step) = self.exchange.held_step() {
            // In the order of slots, whatever the order of arrival.
            let norm = Norm(self.squares.iter().sum());
            for (outbox, port) in self.outboxes.iter_mut().zip(0..) {
                outbox.tell_norm(step, norm);
                self.dirty.insert(port);
            }
        }
    }

    fn release(&mut self, port: u32, step: u32, payload: &[u8]) -> Result<(), Fault> {
        let short = || Fault::Frame(format!("a Release of {} bytes, not {}", payload.len(), Release::BYTES));
        let Release(factor) = Release::decode(payload).ok_or_else(short)?;
        self.exchange.release(port, step).map_err(Fault::Release)?;
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
        self.before_update(index);
        // Whom the new parameters are for is known before they are made, so that they are handed out while in cache.
        self.settle(index);
        self.spill(index);
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
        if slot.gradient.is_quantised() {
            match settings.has_parameters() {
                true => self.quantised.answer_change(&slot, &self.model[slot.range()]),
                false => self.quantised.answer_whole(&slot, &mut self.model[slot.range()]),
            }
        }
        self.arenas.forget_targets();
        self.unshared[index as usize] = false;
        self.after_update(index);
        self.counters.updates += 1;
        self.begin_step(index);
    }

    /// Hands the chunk's parameters out as they are.
    fn deliver(&mut self, slot: Slot, are_new: bool) {
        self.copied += self.arenas.copies(are_new) * slot.extent().bytes(slot.parameter) as usize;
        for block in slot.blocks(BLOCK_ELEMENTS) {
            let at = slot.offset + block.start..slot.offset + block.end;
            let parameters = encode(&self.model[at.clone()], &mut self.encoded, at, slot.parameter);
            self.arenas.hand_out(&slot.extent(), block.start, slot.parameter, parameters, are_new);
        }
        self.arenas.forget_targets();
    }

    fn first_non_finite(&self, worker: u32, slot: Slot, payload: Payload<'_>) -> Option<usize> {
        match payload {
            // A site has looked at its own.
            Payload::Here(_) if worker >= self.plan.ports.workers() => None,
            Payload::Here(wire) if slot.gradient.is_quantised() => {
                quantise::first_non_finite(wire, slot.elements as usize, slot.gradient)
            }
            Payload::Here(wire) => finite::first_non_finite(wire, slot.gradient),
            Payload::InArena => {
                let place = self.arenas.gradient_place(worker, &slot.extent());
                let mut found = None;
                read_blocks(&self.arenas, worker, place, slot, slot.gradient, |block, wire| {
                    let here = finite::first_non_finite(wire, slot.gradient);
                    found = found.or(here.map(|element| block.start + element));
                });
                found
            }
        }
    }

    /// Owes every answer that is due, and notes the ranks in whose arenas parameters must be before theirs leaves.
    fn settle(&mut self, index: u32) {
        let (outboxes, dirty, arenas) = (&mut self.outboxes, &mut self.dirty, &mut self.arenas);
        let ports = &self.plan.ports;
        self.exchange.settle(index, |member, answer| {
            let port = ports.of_member(index, member);
            outboxes[port as usize].owe(index, answer);
            dirty.insert(port);
            if member < ports.workers() {
                arenas.aim(member, answer);
            }
        });
    }

    fn slot(&self, chunk: u32) -> Result<(u32, Slot), Fault> {
        match self.plan.placement().locate(chunk) {
            Some((route, index)) if route == self.plan.route => Ok((index, self.slots[index as usize])),
            _ => Err(Fault::Chunk(chunk)),
        }
    }

    fn key_name(&self, key: u32) -> String {
        self.plan.settings.keys.keys()[key as usize].name.clone()
    }

    fn stranded_at(&self, index: u32) -> Result<(), Fault> {
        self.exchange.stranded_at(index).map_err(|stranded| self.stranded(stranded))
    }

    fn stranded(&self, Stranded { member, awaited }: Stranded) -> Fault {
        Fault::Stranded { who: self.plan.ports.member(member), awaited }
    }

    fn offence(&self, chunk: u32, key: u32, offence: Offence) -> Fault {
        Fault::Rules { chunk, key: self.key_name(key), offence }
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

/// How contributions come in.
fn contributed_as(side: Side, slot: &Slot) -> Codec {
    match side {
        Side::Worker(_) => slot.gradient,
        Side::Below(_) | Side::Above => Codec::F32,
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
#[path = "copying_tests.rs"]
mod copying_tests;
#[cfg(test)]
#[path = "factors_tests.rs"]
mod factors_tests;
#[cfg(test)]
#[path = "shard_tests.rs"]
pub(super) mod tests;
