//! One job's chunks on one route: their memory, their state, and the handling of frames for them.

mod awaited;
mod between;
mod checks;
mod copying;
mod factors;
mod late;
mod losses;
mod memory;
mod model;
mod new_standby;
mod outgoing;
mod payload;
mod program_states;
mod rewind;
mod sending;
mod standby;
mod start;
mod sums;
mod timing;
mod two_phases;

use std::time::Instant;

use paramhub_core::between_sites::Departures;
use paramhub_core::exchange::{Answer, Exchange, LeftWhileAwaited, ProtocolViolation, SumAction, Update};
use paramhub_core::hyperparameters::{ChangesOfMembers, Hyperparameters, Schedule};
use paramhub_core::lateness::LatenessMonitor;
use paramhub_core::ports::Side;
use paramhub_core::program_states::ProgramStates;
use paramhub_core::ready_set::ReadySet;
use paramhub_core::service::JobCounters;
use paramhub_core::wire::Operation;
use paramhub_kernels::Step;

pub(crate) use self::checks::CheckedHeader;
pub(crate) use self::memory::memory_bytes;
pub(crate) use self::payload::Payload;
use super::arenas::Arenas;
use super::buffer::OutOfMemory;
use super::factor_layers::FactorLayers;
use super::fault::Fault;
use super::layout::{BLOCK_ELEMENTS, ChunkPlace, Layout, block_elements};
use super::outbox::Outbox;
use super::plan::ShardPlan;
use super::quantised::Quantised;
use super::restored::{RestoreProgress, Restored};
use super::snapshot::{ArmedSnapshot, Snapshot};
use crate::local::RankArenas;
use model::Model;
use new_standby::Copying;
use rewind::{Copies, Rewind};
use sums::{Contribution, Sums};
use timing::UpdateTiming;

/// The chunks of one route. Slots number them by urgency.
pub(crate) struct Shard {
    plan: ShardPlan,
    slots: Vec<ChunkPlace>,
    exchange: Exchange,
    /// The schedule of each group.
    schedules: Vec<Schedule>,
    /// For each group, which worker's changes hold; empty unless the job goes on without lost workers.
    changes_of_members: Vec<ChangesOfMembers>,
    /// The newest step that was updated.
    newest_step: u32,
    model: Model,
    sums: Sums,
    copies: Copies,
    rewind: Rewind,
    timing: UpdateTiming,
    arenas: Arenas,
    quantised: Quantised,
    factors: FactorLayers,
    program_states: ProgramStates,
    /// The first version of which this hub is to have the program states of all ranks: another has got earlier ones.
    program_states_from: u32,
    outboxes: Vec<Outbox>,
    /// The ports whose outbox has something new.
    dirty: ReadySet,
    departures: Departures,
    counters: JobCounters,
    /// The time of the newest frames, if steps end by time.
    pub(crate) now: Instant,
    /// The next slot whose step may wait to be ended because the membership has changed, if any may.
    steps_to_end: Option<u32>,
    /// The next slot whose sum may wait to be ended because its standby is lost, if any may.
    sums_to_end: Option<u32>,
    /// The chunks that a new standby has still to get.
    copying: Option<Copying>,
    /// At a standby: the workers that have left the hub which it follows, for the core to report.
    leaves_to_report: Vec<u32>,
    /// The time that members have waited for others.
    watch: LatenessMonitor,
    /// The snapshot that is being taken.
    armed: Option<ArmedSnapshot>,
    /// Memory for snapshots that was not requested yet.
    spare_snapshot: Option<Box<Snapshot>>,
    /// The values that the chunks begin with, until all have been restored.
    restoring: Option<RestoreProgress>,
    /// For each slot: whether its parameters are missing from the memory that the ranks of this host read in
    /// common.
    unshared: Vec<bool>,
    /// Bytes copied to arenas since the last [`take_copied`](Self::take_copied).
    copied: usize,
}

impl Shard {
    /// Reserves all memory that the shard will need; [`open_some`](Self::open_some) takes it. `memory_bytes`
    /// is its sum. The chunks begin with what was `restored`, if it is not with rank 0's parameters.
    pub(crate) fn reserve(plan: ShardPlan, restored: Option<Restored>) -> Result<Self, OutOfMemory> {
        let layout = Layout::new(&plan);
        let memory_bytes = memory_bytes(&plan);
        let spare_snapshot = match plan.checkpoints {
            true => Snapshot::new(&plan, &layout, block_elements(&plan))?,
            false => None,
        };
        let groups: &[Hyperparameters] = match &restored {
            Some(restored) => &restored.hyperparameters,
            None => &plan.groups,
        };
        let slots = layout.slots.len() as u32;
        let now = Instant::now();
        let mut exchange = Exchange::among_sites(layout.rules, plan.ports.reach(layout.rules.consistency));
        exchange.set_role(plan.role);
        exchange.set_workers_of(plan.ports.workers_of());
        layout.factor_layers.iter().for_each(|layer| exchange.take_factors(layer.slots()));
        let mut shard = Shard {
            exchange,
            schedules: groups.iter().copied().map(Schedule::new).collect(),
            changes_of_members: match plan.loses_workers() {
                true => vec![ChangesOfMembers::default(); groups.len()],
                false => Vec::new(),
            },
            newest_step: 0,
            model: Model::new(&plan, &layout)?,
            sums: Sums::new(&plan, &layout)?,
            copies: Copies::new(&plan, &layout)?,
            rewind: Rewind::NotNeeded,
            timing: UpdateTiming::new(&plan, &layout, now),
            arenas: Arenas::new(plan.ports.workers()),
            quantised: Quantised::new(&layout, plan.ports.workers())?,
            factors: FactorLayers::new(&plan, &layout)?,
            program_states: plan.program_states(),
            program_states_from: 0,
            outboxes: (0..plan.ports.len())
                .map(|port| {
                    let sender = plan.ports.side(port);
                    // A standby hears of each worker that leaves.
                    let leaves = if sender == Side::Standby { plan.ports.workers() } else { 0 };
                    Outbox::new(slots, layout.payload_bytes_max, plan.groups.len() + leaves as usize)
                })
                .collect(),
            dirty: ReadySet::new(plan.ports.len()),
            // Nothing leaves by the port of a worker that has not come yet.
            departures: Departures::new(&plan.ports, &(layout.rules.first_members..layout.rules.members)),
            counters: JobCounters::default(),
            now,
            steps_to_end: None,
            sums_to_end: None,
            copying: None,
            leaves_to_report: Vec::new(),
            watch: LatenessMonitor::new(layout.slots.len(), plan.progress_timeout),
            armed: None,
            spare_snapshot,
            restoring: None,
            unshared: vec![false; layout.slots.len()],
            copied: 0,
            slots: layout.slots,
            plan,
        };
        if let Some(restored) = restored {
            shard.begin_restoring(restored);
        }
        shard.counters.memory_bytes = memory_bytes;
        Ok(shard)
    }

    /// A shard that is open and begins with rank 0's parameters.
    #[cfg(test)]
    pub(crate) fn new(plan: ShardPlan) -> Result<Self, OutOfMemory> {
        let mut shard = Shard::reserve(plan, None)?;
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

    /// Has the worker that is this member exchange through its arenas from now on.
    pub(crate) fn attach(&mut self, member: u32, arenas: RankArenas) {
        if self.arenas.attach(member, arenas) {
            // Zeroed memory is right for parameters that have not begun. Others are copied when they are
            // first requested, not all of a large model at once.
            for (unshared, index) in self.unshared.iter_mut().zip(0..) {
                *unshared = self.exchange.has_begun(index);
            }
        }
    }

    /// Bytes copied to arenas since the last call.
    pub(crate) fn take_copied(&mut self) -> usize {
        std::mem::take(&mut self.copied)
    }

    /// Notes that another stream has replaced that of a port. Everything that was to leave by the old one is
    /// dropped, except messages: a worker and a site below repeat the requests that are not answered, and a site above gets
    /// the sums again that it has not answered.
    pub(crate) fn resume(&mut self, port: u32) {
        self.outboxes[port as usize].start_again();
        match self.plan.ports.side(port) {
            Side::Worker(member) => {
                self.exchange.resume(member);
                self.quantised.forget(member);
                self.factors.resume(member);
                self.program_states.cut(member);
                self.repeat_norm(port);
            }
            Side::Below(_) | Side::Above | Side::Standby | Side::Serving => self.resume_site(port),
        }
        self.counters.streams_moved += 1;
    }

    /// Returns whether the tensors of this port stay in an arena.
    pub(crate) fn has_arena(&self, port: u32) -> bool {
        port < self.plan.ports.workers() && self.arenas.has(port)
    }

    /// Returns whether the stream of this port may end: its neighbour has left or, for a site above, this hub
    /// has.
    pub(crate) fn has_left(&self, port: u32) -> bool {
        self.departures.has_left(port)
    }

    /// Returns whether this hub has just sent Leave to a site above, the last frame of the stream. It returns `true` once for
    /// each stream.
    pub(crate) fn has_sent_leave(&mut self, port: u32) -> bool {
        let has_sent = self.leaves_above(port) && self.outboxes[port as usize].is_empty();
        has_sent && !std::mem::replace(&mut self.outboxes[port as usize].sent_leave, true)
    }

    /// Returns whether this hub leaves a site above, or its standby, by this port. It has left when that closes the stream.
    pub(crate) fn leaves_above(&self, port: u32) -> bool {
        self.plan.ports.side(port).takes_sums() && self.departures.has_left(port)
    }

    /// Does what a whole frame requests.
    pub(crate) fn frame(
        &mut self,
        port: u32,
        checked: &CheckedHeader,
        payload: Payload<'_>,
    ) -> Result<(), Fault> {
        let header = &checked.header;
        match header.operation {
            Operation::PushPull => self.contribute(checked, payload, Answer::Parameters),
            Operation::Push if checked.side == Side::Serving => self.follow(port, checked, payload.here()),
            Operation::Push => self.contribute(checked, payload, Answer::Applied),
            Operation::Factors => match checked.side {
                Side::Worker(member) => self.gather_factors(member, checked, payload.here()),
                Side::Below(_) | Side::Above | Side::Standby | Side::Serving => {
                    unreachable!("`check` lets factors in from workers alone")
                }
            },
            Operation::Pull => {
                let (index, slot) = self.located(checked);
                let pulled = self.exchange.pull(index, port, header.step);
                pulled.map_err(|violation| self.violation(header.chunk, slot.key, violation))?;
                self.settle(index);
                let is_unshared = std::mem::take(&mut self.unshared[index as usize]);
                if is_unshared || self.arenas.has_targets() {
                    self.deliver(slot, is_unshared);
                }
                self.stranded_at(index)
            }
            Operation::Initialise => self.initialise(port, checked, payload),
            Operation::PullState => {
                let (index, slot) = self.located(checked);
                // `check` has compared the slot's number, so it fits.
                let pulled = self.exchange.pull_state(index, port, header.step as u8);
                pulled.map_err(|violation| self.violation(header.chunk, slot.key, violation))?;
                self.settle(index);
                self.stranded_at(index)
            }
            Operation::InitialiseState => self.initialise_state(port, checked, payload.here()),
            Operation::Retune => self.retune(port, header, payload.here()),
            Operation::Release => self.release(port, header.step, payload.here()),
            Operation::Skip => self.skip(port, header.step),
            Operation::SaveProgramState => self.save_program_state(port, header, payload.here()),
            Operation::PullProgramState => self.pull_program_state(port, header.step),
            Operation::Leave if checked.side == Side::Serving && header.step > 0 => {
                self.left_elsewhere(header.step - 1)
            }
            Operation::Leave if self.has_left(port) => Ok(()),
            Operation::Leave => self.leave(port),
            Operation::Applied => self.acknowledged(port, checked),
            Operation::Total => self.lower(checked, payload.here()),
            Operation::Parameters => self.lower_parameters(checked, payload.here()),
            Operation::Notice => {
                self.pass_on_notice(payload.here());
                Ok(())
            }
            Operation::Failure => Err(Fault::reported(checked.side, payload.here())),
            // A heartbeat has done its work by arriving.
            _ => Ok(()),
        }
    }

    fn contribute(
        &mut self,
        checked: &CheckedHeader,
        payload: Payload<'_>,
        answer: Answer,
    ) -> Result<(), Fault> {
        let (header, (index, slot)) = (&checked.header, self.located(checked));
        let member = match checked.side {
            Side::Worker(member) | Side::Below(member) => member,
            Side::Above | Side::Standby | Side::Serving => {
                unreachable!("`check` lets contributions in from members alone")
            }
        };
        // A repeated contribution is not checked: an answer may have begun to overwrite it at the worker.
        if slot.rejects_non_finite
            && !self.exchange.is_repeat(index, member, header.step)
            && let Some(element) = self.first_non_finite(member, slot, payload)
        {
            let (key, element) = (self.key_name(slot.key), slot.key_offset + element as u64);
            let comes_quantised = slot.gradient.is_quantised() && matches!(payload, Payload::Here(_));
            return Err(match comes_quantised {
                true => Fault::NonFiniteBlock { key, element, codec: slot.gradient },
                false => Fault::NonFinite { key, element },
            });
        }
        if checked.side != Side::Worker(member) {
            // The total has left for the site before the update, and it goes on with the release, which has come before this.
            self.update_if_released(index);
        }
        let arrival = self
            .exchange
            .push(index, member, header.step, answer)
            .map_err(|violation| self.violation(header.chunk, slot.key, violation))?;
        if arrival.then == SumAction::Repeated {
            self.settle(index);
            return self.stranded_at(index);
        }
        if arrival.then == SumAction::Late {
            self.answer_late(index, slot);
            return Ok(());
        }
        self.counters.contributions += 1;
        let contribution = Contribution { member, codec: header.codec, payload };
        self.sums.fold(index, slot, &contribution, &arrival.fold, &self.arenas, &*self.plan.aggregator);
        if let SumAction::Update(update) = arrival.then
            && !self.sums.keeps_totals()
        {
            // Contributions that still lie in arenas are summed in the pass that updates the parameters.
            match update.is_apart {
                true => self.arenas.find_sources(&slot.extent(), |other| other == member),
                false => self.find_sources(index, slot, header.step),
            }
            self.optimise(index, slot, update);
            return Ok(());
        }
        if arrival.then == SumAction::Wait {
            self.look_at_median(index);
        }
        if !matches!(arrival.then, SumAction::Wait) {
            self.sums.gather(index, slot, &mut self.arenas, &*self.plan.aggregator);
        }
        self.go_on(index, slot, arrival.then)
    }

    /// Finds the contributions to `step` that still lie in arenas.
    fn find_sources(&mut self, index: u32, slot: ChunkPlace, step: u32) {
        let (exchange, waits_for_all) = (&self.exchange, self.plan.quorum.is_none());
        self.sums.find_sources(&mut self.arenas, &slot, |member| {
            waits_for_all || exchange.has_contributed(index, member, step)
        });
    }

    /// Continues with a sum that lacks contributions, or that is complete and at its place.
    fn go_on(&mut self, index: u32, slot: ChunkPlace, then: SumAction) -> Result<(), Fault> {
        match then {
            SumAction::Wait => {}
            SumAction::Hold => self.hold(index, slot),
            SumAction::Raise => self.raise(index),
            SumAction::Repeated | SumAction::Late | SumAction::Make => {
                unreachable!("it ends where it is taken")
            }
            SumAction::Update(update) => {
                self.keep_total(index);
                self.arenas.find_no_sources();
                self.optimise(index, slot, update);
                return Ok(());
            }
        }
        self.stranded_at(index)
    }

    /// Completes the sum with the contributions in arenas, if any were found, runs the optimizer and hands
    /// out the new parameters, block by block while each block is in cache (PHub section 3.2.2).
    fn optimise(&mut self, index: u32, slot: ChunkPlace, update: Update) {
        self.before_update(index);
        let keeps_version = self.exchange.keeps_version(index);
        // The receivers of the new parameters are determined before these are made, so that they are handed
        // out while in cache.
        self.settle(index);
        self.spill(index);
        self.newest_step = self.newest_step.max(update.step);
        self.counters.steps = u64::from(self.newest_step) + 1;
        let step = Step {
            hyperparameters: self.schedules[usize::from(slot.group)].at(update.step),
            number: update.number,
            contributions: update.contributions,
            factor: self.timing.factor(),
            tensor: self.timing.tensor(slot.key),
        };
        let has_part = match update.is_apart {
            true => self.sums.take_apart(),
            false => self.sums.end_step(index),
        };
        let has_array = has_part || self.model.is_by_chunk();
        let (aggregator, optimizer) = (&*self.plan.aggregator, &*self.plan.optimizer);
        let extent = slot.extent();
        let mut total = [0.0_f32; BLOCK_ELEMENTS];
        for block in slot.blocks(self.model.block_elements) {
            let at = slot.array_offset + block.start..slot.array_offset + block.end;
            let sum = match has_array {
                true => self.sums.of_update(slot, &block, update.is_apart),
                false => &mut total[..block.len()],
            };
            for (first, sum) in (block.start..).step_by(BLOCK_ELEMENTS).zip(sum.chunks_mut(BLOCK_ELEMENTS)) {
                self.arenas.gather(aggregator, slot.in_arena, first, sum, has_part);
            }
            self.model.prefetch(at.end..slot.range().end.min(at.end + BLOCK_ELEMENTS));
            let (parameters, state) = self.model.block_mut(at.clone());
            if keeps_version {
                self.copies.take(at.start, parameters, state);
            }
            if !self.exchange.skips() {
                optimizer.apply(&step, parameters, sum, state);
            }
            if !slot.gradient.is_quantised() {
                let parameters = self.model.encode(at, slot.parameter);
                self.arenas.hand_out(&extent, block.start, slot.parameter, parameters, true);
            }
        }
        if slot.gradient.is_quantised() {
            self.quantised.make_answer(&slot, &mut self.model.parameters[slot.range()]);
            self.hand_out(slot, true);
        }
        self.arenas.forget_targets();
        self.unshared[index as usize] = false;
        self.after_update(index);
        // The hub that serves the chunk has counted it.
        self.counters.updates += u64::from(!self.exchange.stands_by());
        self.begin_step(index);
    }

    /// Owes every answer that is due, and notes the ranks whose arenas must have the parameters before the
    /// answer leaves.
    fn settle(&mut self, index: u32) {
        let (outboxes, dirty, arenas) = (&mut self.outboxes, &mut self.dirty, &mut self.arenas);
        let ports = &self.plan.ports;
        self.exchange.mark_due_answers(index, |member, answer| {
            let port = ports.of_member(index, member);
            outboxes[port as usize].owe(index, answer);
            dirty.insert(port);
            if member < ports.workers() {
                arenas.aim(member, answer);
            }
        });
    }

    fn locate(&self, chunk: u32) -> Result<u32, Fault> {
        match self.plan.placement().locate(chunk) {
            Some((route, index)) if route == self.plan.route => Ok(index),
            _ => Err(Fault::Chunk(chunk)),
        }
    }

    fn located(&self, checked: &CheckedHeader) -> (u32, ChunkPlace) {
        let index = checked.index();
        (index, self.slots[index as usize])
    }

    fn key_name(&self, key: u32) -> String {
        self.plan.settings.keys.keys()[key as usize].name.clone()
    }

    fn stranded_at(&self, index: u32) -> Result<(), Fault> {
        self.exchange.check_waits(index).map_err(|stranded| self.stranded(stranded))
    }

    fn stranded(&self, LeftWhileAwaited { member, awaited }: LeftWhileAwaited) -> Fault {
        Fault::LeftWhileAwaited { culprit: self.plan.ports.member(member), awaited }
    }

    fn violation(&self, chunk: u32, key: u32, violation: ProtocolViolation) -> Fault {
        Fault::Rules { chunk, key: self.key_name(key), violation }
    }
}

#[cfg(test)]
#[path = "copying_tests.rs"]
mod copying_tests;
#[cfg(test)]
mod cut_sites_tests;
#[cfg(test)]
mod cut_streams;
#[cfg(test)]
#[path = "factors_tests.rs"]
mod factors_tests;
#[cfg(test)]
mod standby_tests;
#[cfg(test)]
#[path = "shard_tests.rs"]
pub(super) mod tests;
