//! The checks for which a shard refuses a frame: those of its header, and that its numbers are finite.

use paramhub_core::between_sites;
use paramhub_core::codec::Codec;
use paramhub_core::exchange::ProtocolViolation;
use paramhub_core::ports::Side;
use paramhub_core::wire::{Header, Operation, State};
use paramhub_kernels::{finite, quantise};

use super::Shard;
use super::payload::{Payload, read_blocks};
use crate::core::fault::Fault;
use crate::core::layout::ChunkPlace;

/// A header that [`Shard::check`] has accepted, with its sender and the place of its chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckedHeader {
    pub(super) header: Header,
    pub(super) side: Side,
    /// The slot of the chunk; `None` if the operation is about no chunk.
    index: Option<u32>,
}

impl CheckedHeader {
    /// The slot of the chunk.
    pub(super) fn index(&self) -> u32 {
        self.index.expect("`check` locates the chunk of every operation that is about one")
    }
}

impl Shard {
    /// Checks a frame's header before the payload is read, and locates its chunk.
    pub(crate) fn check(&self, port: u32, header: &Header) -> Result<CheckedHeader, Fault> {
        let side = self.plan.ports.side(port);
        let index = self.check_sender(port, side, header)?;
        if let Some(index) = index {
            self.check_chunk(side, header, index)?;
        }
        Ok(CheckedHeader { header: *header, side, index })
    }

    /// Refuses what may not come by this port. Returns the slot of the frame's chunk, if it is about one.
    fn check_sender(&self, port: u32, side: Side, header: &Header) -> Result<Option<u32>, Fault> {
        let may_repeat =
            self.plan.resuming.resumes() && between_sites::repeats_after_leave(side, header.operation);
        if self.has_left(port) && !side.takes_sums() && !may_repeat {
            return Err(Fault::AfterLeave(header.operation));
        }
        if !may_come(side, header.operation) {
            return Err(Fault::NotFromThere(header.operation));
        }
        if matches!(header.operation, Operation::SaveProgramState | Operation::PullProgramState) {
            self.check_program_state(header)?;
        }
        if !header.operation.is_about_a_chunk() {
            return Ok(None);
        }
        let index = self.locate(header.chunk)?;
        match self.plan.ports.carries(port, side, index) {
            true => Ok(Some(index)),
            false => Err(Fault::Chunk(header.chunk)),
        }
    }

    /// Refuses what does not fit the chunk in this slot.
    fn check_chunk(&self, side: Side, header: &Header, index: u32) -> Result<(), Fault> {
        let slot = self.slots[index as usize];
        if header.operation == Operation::PullState
            && !self.plan.optimizes_here()
            && self.plan.ports.above(index).is_some()
        {
            return Err(Fault::StateElsewhere { key: self.key_name(slot.key) });
        }
        let of_state = matches!(header.operation, Operation::PullState | Operation::InitialiseState);
        if of_state && header.step as usize >= self.model.state_slots {
            let (key, slots) = (self.key_name(slot.key), self.model.state_slots);
            return Err(Fault::StateSlot { chunk: header.chunk, key, slot: header.step, slots });
        }
        let (expected_codec, expected) = match header.operation {
            Operation::Factors => return self.check_factors(index, header),
            Operation::Push | Operation::PushPull if self.exchange.takes_factors(index) => {
                return Err(self.violation(header.chunk, slot.key, ProtocolViolation::ByFactors));
            }
            Operation::Push | Operation::PushPull => {
                let codec = self.contribution_codec(side, &slot);
                (codec, slot.extent().bytes(codec))
            }
            Operation::Total => (slot.between_sites, slot.extent().bytes(slot.between_sites)),
            Operation::Initialise | Operation::Parameters => {
                (slot.parameter, slot.extent().bytes(slot.parameter))
            }
            Operation::InitialiseState => (Codec::F32, State::bytes(slot.elements)),
            // Frames without a payload.
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

    /// The codec in which contributions arrive.
    fn contribution_codec(&self, side: Side, slot: &ChunkPlace) -> Codec {
        match side {
            Side::Worker(member) if self.arenas.has(member) => slot.in_arena,
            Side::Worker(_) => slot.gradient,
            Side::Below(_) => slot.between_sites,
            Side::Above | Side::Standby | Side::Serving => Codec::F32,
        }
    }

    /// Returns the first element of a member's contribution that is NaN or infinite, counted within the chunk.
    /// If it came quantised, it is the first element of a block that is not finite.
    pub(super) fn first_non_finite(
        &self,
        member: u32,
        slot: ChunkPlace,
        payload: Payload<'_>,
    ) -> Option<usize> {
        match payload {
            // A member that is a site has checked the contributions in its sum.
            Payload::Here(_) if member >= self.plan.ports.workers() => None,
            Payload::Here(wire) if slot.gradient.is_quantised() => {
                quantise::first_non_finite(wire, slot.elements as usize, slot.gradient)
            }
            Payload::Here(wire) => finite::first_non_finite(wire, slot.gradient),
            Payload::InArena => {
                let place = self.arenas.gradient_place(member, &slot.extent());
                let mut found = None;
                read_blocks(&self.arenas, member, place, slot, slot.in_arena, |block, wire| {
                    let here = finite::first_non_finite(wire, slot.in_arena);
                    found = found.or(here.map(|element| block.start + element));
                });
                found
            }
        }
    }
}

/// Returns whether a frame of this operation may arrive by a port.
fn may_come(side: Side, operation: Operation) -> bool {
    match (side, operation) {
        // A worker's stream has refused already what workers may not send.
        (Side::Worker(_), _) => true,
        // A hub that has ended the job sends the reason to all hubs around it.
        (_, Operation::Failure | Operation::Heartbeat)
        | (Side::Below(_), Operation::PushPull | Operation::Leave)
        | (Side::Above, Operation::Total | Operation::Parameters | Operation::Notice)
        | (
            Side::Below(_) | Side::Above,
            Operation::Initialise
            | Operation::InitialiseState
            | Operation::Retune
            | Operation::Release
            | Operation::Skip,
        )
        | (Side::Standby, Operation::Applied)
        | (
            Side::Serving,
            Operation::Push
            | Operation::Initialise
            | Operation::InitialiseState
            | Operation::Retune
            | Operation::Leave,
        ) => true,
        _ => false,
    }
}
