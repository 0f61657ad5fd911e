//! The outgoing data of a shard: frames that answer, sums that go up, the place of their bytes, and parameters for arenas.

use paramhub_core::codec::Codec;
use paramhub_core::exchange::Answer;
use paramhub_core::ports::Side;
use paramhub_core::wire::{Header, Operation, State};

use super::Shard;
use crate::core::layout::{BLOCK_ELEMENTS, ChunkPlace};
use crate::core::outbox::Source;

impl Shard {
    /// The frame that is due at a port for a slot, with its payload: an answer, or a sum for the site above.
    pub(crate) fn answer(&self, port: u32, index: u32, answer: Answer) -> (Header, &[u8]) {
        let slot = self.slots[index as usize];
        let chunk = self.plan.placement().chunks(self.plan.route)[index as usize];
        let side = self.plan.ports.side(port);
        let step = match side {
            Side::Worker(member) | Side::Below(member) => self.exchange.answer_version(index, member),
            Side::Above | Side::Standby | Side::Serving => self.exchange.step(index),
        };
        match answer {
            Answer::Applied => (Header { chunk, step, ..Header::bare(Operation::Applied) }, &[]),
            Answer::State(state_slot) => {
                let staged = &self.outboxes[port as usize].spill[..];
                let (step, length) = (u32::from(state_slot), staged.len() as u32);
                (Header { chunk, step, length, ..Header::bare(Operation::State) }, staged)
            }
            Answer::Parameters => {
                let source = self.source(port, index);
                let (operation, codec) = match side {
                    Side::Worker(_) if source == Source::Change(index) => {
                        (Operation::Parameters, slot.gradient)
                    }
                    Side::Above => (Operation::PushPull, slot.between_sites),
                    Side::Standby => (Operation::Push, Codec::F32),
                    Side::Below(_) if self.plan.optimizes_here() => (Operation::Total, slot.between_sites),
                    // All ranks have the same bits, which the key's own type may not have.
                    Side::Worker(_) if slot.gradient.is_quantised() && !self.has_arena(port) => {
                        (Operation::Parameters, Codec::F32)
                    }
                    _ => (Operation::Parameters, slot.parameter),
                };
                let payload = if self.has_arena(port) { &[] } else { self.of_source(port, source) };
                let header = Header { operation, codec, chunk, step, length: slot.extent().bytes(codec) };
                debug_assert!(self.has_arena(port) || header.length as usize == payload.len());
                (header, payload)
            }
        }
    }

    /// The place of the tensor that is due at a port for a slot.
    pub(crate) fn source(&self, port: u32, index: u32) -> Source {
        match self.plan.ports.side(port) {
            Side::Above | Side::Standby => Source::Sum(index),
            Side::Below(_) if self.plan.optimizes_here() => Source::Total(index),
            Side::Worker(rank) if !self.has_arena(port) && self.lacks_last_change(index, rank) => {
                Source::Change(index)
            }
            _ => Source::Model(index),
        }
    }

    /// Returns whether a rank can make a quantised chunk's newest parameters from those that it has and the
    /// newest answer.
    fn lacks_last_change(&self, index: u32, rank: u32) -> bool {
        self.slots[index as usize].gradient.is_quantised()
            && self.quantised.lacks_last(index, rank, self.exchange.answer_version(index, rank))
    }

    /// The payload of a frame that has begun to leave by a port.
    pub(crate) fn of_source(&self, port: u32, source: Source) -> &[u8] {
        let outbox = &self.outboxes[port as usize];
        let slot = |index: u32| self.slots[index as usize];
        match source {
            Source::Empty => &[],
            Source::Message => &outbox.messages.front().expect("a begun message stays in front").1,
            Source::Norm => &outbox.norm.as_ref().expect("a begun norm stays").1,
            Source::Spill => &outbox.spill,
            Source::Model(index) => self.payload(slot(index)),
            Source::Change(index) => self.quantised.answer(&slot(index)),
            Source::Sum(index) => self.sums.raised(slot(index)),
            Source::Total(index) => self.sums.total(slot(index)),
        }
    }

    /// Notes that the frame which was due at a port has begun to leave.
    pub(crate) fn answer_begun(&mut self, port: u32, index: u32) {
        match self.plan.ports.side(port) {
            Side::Worker(member) | Side::Below(member) => {
                let is_quantised = self.slots[index as usize].gradient.is_quantised();
                if is_quantised && self.exchange.owed(index, member) == Some(Answer::Parameters) {
                    self.quantised.has(index, member, self.exchange.answer_version(index, member));
                }
                self.exchange.answer_begun(index, member);
            }
            // The exchange waits for the answer of the site above, or of the standby. A standby that acknowledges waits for
            // nothing.
            Side::Above | Side::Standby | Side::Serving => {}
        }
    }

    /// Copies the state that is owed to a worker to the buffer from which it leaves, and returns its slot.
    /// The buffer must hold nothing that has begun to leave.
    pub(crate) fn stage_state(&mut self, worker: u32, index: u32) -> Answer {
        let answer = self.exchange.owed(index, worker).expect("what is in the outbox is owed");
        let Answer::State(state_slot) = answer else { unreachable!("{answer:?} is in another set") };
        self.spill_state(worker, index, usize::from(state_slot));
        answer
    }

    /// Copies a slot of a chunk's state, as it travels, to the buffer from which it leaves by a port.
    pub(super) fn spill_state(&mut self, port: u32, index: u32, state_slot: usize) {
        let slot = self.slots[index as usize];
        let wire = &mut self.outboxes[port as usize].spill;
        wire.clear();
        wire.extend_from_slice(&State::head(self.exchange.updates(index)));
        for block in slot.state_blocks(self.model.state_slots, state_slot, self.model.block_elements) {
            wire.extend_from_slice(bytemuck::cast_slice(&self.model.state[block]));
        }
    }

    /// Saves the unsent rest of this chunk's old parameters; at most one frame per port.
    pub(super) fn spill(&mut self, index: u32) {
        for port in 0..self.outboxes.len() as u32 {
            for source in [Source::Model(index), Source::Change(index)] {
                if self.outboxes[port as usize].has_begun(source) {
                    self.spill_begun(port, source);
                }
            }
        }
    }

    /// Saves every frame that has begun to leave, so that the arrays can be freed.
    pub(crate) fn spill_all(&mut self) {
        for port in 0..self.outboxes.len() as u32 {
            let begun = self.outboxes[port as usize].begun.map(|begun| begun.source);
            let of_arrays = |source: &Source| {
                !matches!(source, Source::Message | Source::Norm | Source::Empty | Source::Spill)
            };
            if let Some(source) = begun.filter(of_arrays) {
                self.spill_begun(port, source);
            }
        }
    }

    pub(super) fn spill_begun(&mut self, port: u32, source: Source) {
        let mut spill = std::mem::take(&mut self.outboxes[port as usize].spill);
        spill.clear();
        spill.extend_from_slice(self.of_source(port, source));
        let outbox = &mut self.outboxes[port as usize];
        outbox.spill = spill;
        outbox.begun.as_mut().expect("a frame has begun").source = Source::Spill;
    }

    /// The chunk's parameters in the codec in which they travel: those of a quantised key in f32.
    pub(super) fn payload(&self, slot: ChunkPlace) -> &[u8] {
        let quantised = slot.gradient.is_quantised().then(|| self.quantised.parameters(&slot)).flatten();
        quantised.map_or_else(|| self.model.encoded(&slot), bytemuck::cast_slice)
    }

    /// Hands out the chunk's parameters unchanged.
    pub(super) fn deliver(&mut self, slot: ChunkPlace, are_new: bool) {
        self.copied += self.arenas.copies(are_new) * slot.extent().bytes(slot.parameter) as usize;
        self.hand_out(slot, are_new);
        self.arenas.forget_targets();
    }

    /// Writes the chunk's parameters to the arenas that are noted: those of a quantised key as all ranks have them.
    pub(super) fn hand_out(&mut self, slot: ChunkPlace, are_new: bool) {
        let of_ranks = slot.gradient.is_quantised().then(|| self.quantised.parameters(&slot)).flatten();
        let parameters = match of_ranks {
            Some(_) if self.arenas.copies(are_new) == 0 => return,
            Some(values) => self.model.encode_of_ranks(values, slot.range(), slot.parameter),
            None => self.model.encode(slot.range(), slot.parameter),
        };
        for block in slot.blocks(BLOCK_ELEMENTS) {
            let bytes = block.start * slot.parameter.bytes()..block.end * slot.parameter.bytes();
            self.arenas.hand_out(&slot.extent(), block.start, slot.parameter, &parameters[bytes], are_new);
        }
    }
}
