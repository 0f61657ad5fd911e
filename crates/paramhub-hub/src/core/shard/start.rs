//! This part starts chunks: with rank 0's parameters and optimizer state, which the hub passes on to the
//! other sites.

use paramhub_core::codec::Codec;
use paramhub_core::exchange::Answer;
use paramhub_core::ports::Side;
use paramhub_core::wire::{Header, Operation, State};
use paramhub_kernels::convert;

use super::Shard;
use super::checks::CheckedHeader;
use super::payload::{Payload, read_blocks};
use crate::core::fault::Fault;

impl Shard {
    pub(super) fn initialise(
        &mut self,
        port: u32,
        checked: &CheckedHeader,
        payload: Payload<'_>,
    ) -> Result<(), Fault> {
        let (header, (index, slot)) = (&checked.header, self.located(checked));
        let is_new = self
            .exchange
            .initialise(index, self.member(port), header.step)
            .map_err(|violation| self.violation(header.chunk, slot.key, violation))?;
        if checked.side == Side::Serving {
            self.acknowledge(port, index);
        }
        if !is_new {
            self.settle(index);
            return Ok(());
        }
        let model = &mut self.model.parameters[slot.range()];
        match payload {
            Payload::Here(wire) => convert::decode(wire, model, slot.parameter),
            Payload::InArena => {
                let place = self.arenas.parameters_place(port, &slot.extent());
                read_blocks(&self.arenas, port, place, slot, slot.parameter, |block, wire| {
                    convert::decode(wire, &mut model[block], slot.parameter);
                });
            }
        }
        self.begin_step(index);
        if slot.gradient.is_quantised() {
            self.quantised.start(&slot, &self.model.parameters[slot.range()]);
            if let Some(rank_0) = self.member(port) {
                self.quantised.has(index, rank_0, header.step);
            }
        }
        self.settle(index);
        self.deliver(slot, true);
        let ports = self.plan.ports.clone();
        let is_told =
            |to, side| to != port && ports.carries(to, side, index) && !self.departures.has_left(to);
        let others: Vec<u32> =
            ports.to_sites().filter(|&(to, there)| is_told(to, there.side)).map(|(to, _)| to).collect();
        for to in others {
            self.outboxes[to as usize].start.insert(index);
            self.dirty.insert(to);
        }
        Ok(())
    }

    pub(super) fn initialise_state(
        &mut self,
        port: u32,
        checked: &CheckedHeader,
        payload: &[u8],
    ) -> Result<(), Fault> {
        let (header, (index, slot)) = (&checked.header, self.located(checked));
        let state = State::decode(payload).expect("its length was compared");
        let is_new = self
            .exchange
            .initialise_state(index, self.member(port), state.updates)
            .map_err(|violation| self.violation(header.chunk, slot.key, violation))?;
        if is_new {
            self.model.begin_state(slot, header.step as usize, state.values);
        }
        if matches!(self.plan.ports.side(port), Side::Worker(_)) {
            self.outboxes[port as usize].owe(index, Answer::Applied);
            self.dirty.insert(port);
        }
        Ok(())
    }

    /// The member that contributes by a port; `None` for a site above.
    fn member(&self, port: u32) -> Option<u32> {
        match self.plan.ports.side(port) {
            Side::Worker(member) | Side::Below(member) => Some(member),
            Side::Above | Side::Standby | Side::Serving => None,
        }
    }

    /// Frames that begin a chunk at another site: its optimizer state, slot by slot, if it has any yet, then
    /// its parameters.
    pub(crate) fn start_parts(&self, index: u32) -> u8 {
        match self.exchange.updates(index) {
            0 => 1,
            // A chunk has no more slots than a frame can number.
            _ => self.model.state_slots as u8 + 1,
        }
    }

    /// Copies one of these parts to the buffer from which it leaves by a port. Where every step needs all sites, neither
    /// parameters nor state change before all sites have them. Where a chunk moves on without some, a site begins with the newest
    /// parameters, and state is for the owner alone.
    pub(crate) fn stage_start(&mut self, port: u32, index: u32, part: u8) {
        if part + 1 < self.start_parts(index) {
            return self.spill_state(port, index, usize::from(part));
        }
        let slot = self.slots[index as usize];
        let parameters = self.model.encode(slot.range(), slot.parameter);
        let wire = &mut self.outboxes[port as usize].spill;
        wire.clear();
        wire.extend_from_slice(parameters);
    }

    /// The frame of the part that was copied.
    pub(crate) fn start_frame(&self, port: u32, index: u32, part: u8) -> (Header, &[u8]) {
        let payload = &self.outboxes[port as usize].spill[..];
        let chunk = self.plan.placement().chunks(self.plan.route)[index as usize];
        let is_last = part + 1 == self.start_parts(index);
        let first_step = match self.plan.ports.side(port) {
            Side::Below(member) if !self.exchange.steps_together(index, member) => {
                self.exchange.next_step(index, member)
            }
            _ => self.exchange.step(index),
        };
        let (operation, codec, step) = match is_last {
            true => (Operation::Initialise, self.slots[index as usize].parameter, first_step),
            false => (Operation::InitialiseState, Codec::F32, u32::from(part)),
        };
        (Header { operation, codec, chunk, step, length: payload.len() as u32 }, payload)
    }
}
