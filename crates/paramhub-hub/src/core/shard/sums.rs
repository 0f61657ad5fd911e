//! The sums of a shard's chunks, and how contributions are added to them.

use std::ops::Range;

use paramhub_core::codec::Codec;
use paramhub_core::exchange::Fold;
use paramhub_kernels::{Aggregator, convert, quantise};

use super::payload::{Payload, read_blocks};
use crate::core::arenas::Arenas;
use crate::core::buffer::{Buffer, OutOfMemory, Pages};
use crate::core::layout::{BLOCK_ELEMENTS, ChunkPlace, Layout};
use crate::core::plan::ShardPlan;

/// The way in which contributions are added up. It is fixed at InitService.
enum Accumulation {
    /// In the order of arrival. Contributions in arenas stay there until the step is complete, so that all of
    /// them are added in one pass over the sum.
    OnArrival,
    /// In the order of arrival, those in arenas too: a step may end without a rank, which then overwrites its
    /// arena.
    OnArrivalFromArenas,
    /// In the order of members, or with the last member [first](paramhub_core::exchange::ChunkReach::site_first). A
    /// contribution that comes before that of an earlier member waits in `parked`, which has a buffer for each member but
    /// the first in the order.
    InMemberOrder { parked: Vec<Buffer>, site_first: bool },
}

/// The sums of all chunks, each at its slot's offset.
pub(in crate::core) struct Sums {
    accumulation: Accumulation,
    /// The sums of the steps under way. They are apart from the model, so the next step of a fast worker never
    /// overwrites a slow worker's unsent parameters.
    merge: Buffer,
    /// For each slot: whether `merge` has a part of the step under way.
    has_part: Vec<bool>,
    /// `true` if the sums of the last updates are kept for sites below to which they have not been sent yet.
    keeps_totals: bool,
    /// The sums as they cross between sites: those of the last updates and, if they are not f32, those that go up. A site above
    /// has taken the sum before its answer comes, and sites below have taken the answer before the next sum is complete, so
    /// each chunk needs one place for both.
    crossing: Buffer<u8>,
    /// What the quantising of sums here has lost, which is added to the next: at the owner of a chunk of the sum of all workers'
    /// gradients, at other sites of the sum that goes up.
    lost: Buffer,
    /// A contribution that is an update of its own, until that is made, which is at once.
    apart: Buffer,
    /// `true` if `apart` has it: otherwise it lies in an arena.
    has_apart: bool,
}

/// A contribution that has arrived whole.
pub(super) struct Contribution<'a> {
    pub(super) member: u32,
    pub(super) codec: Codec,
    pub(super) payload: Payload<'a>,
}

impl Sums {
    pub(super) fn new(plan: &ShardPlan, layout: &Layout) -> Result<Sums, OutOfMemory> {
        let accumulation = if plan.settings.reproducible {
            let parked =
                (0..layout.parked_members).map(|member| Buffer::reserved(layout.elements, 4 + member % 8));
            let site_first = plan.ports.site_first();
            Accumulation::InMemberOrder { parked: parked.collect::<Result<_, _>>()?, site_first }
        } else if plan.stragglers.leaves_out() {
            Accumulation::OnArrivalFromArenas
        } else {
            Accumulation::OnArrival
        };
        Ok(Sums {
            accumulation,
            merge: Buffer::reserved(layout.elements, 1)?,
            has_part: vec![false; layout.slots.len()],
            keeps_totals: layout.keeps_totals,
            crossing: Buffer::reserved(layout.crossing_bytes, 3)?,
            lost: Buffer::reserved(layout.lost_elements, 2)?,
            apart: Buffer::reserved(layout.apart_elements, 2)?,
            has_apart: false,
        })
    }

    /// Takes a contribution's payload if it must not stay where it is.
    pub(super) fn fold(
        &mut self,
        index: u32,
        slot: ChunkPlace,
        contribution: &Contribution<'_>,
        fold: &Fold,
        arenas: &Arenas,
        aggregator: &dyn Aggregator,
    ) {
        let Contribution { member, codec, payload } = *contribution;
        let sum = &mut self.merge[slot.range()];
        match (fold, &mut self.accumulation) {
            (Fold::Drop, _) => {}
            (Fold::Apart, _) => {
                if let Payload::Here(wire) = payload {
                    aggregator.assign(&mut self.apart[..slot.elements as usize], wire, codec);
                    self.has_apart = true;
                }
            }
            (Fold::Park, Accumulation::InMemberOrder { parked, site_first }) => {
                // A contribution in an arena waits there.
                if let Payload::Here(wire) = payload {
                    let place = parking_place(member, *site_first);
                    aggregator.assign(&mut parked[place][slot.range()], wire, codec);
                }
            }
            (Fold::Park, _) => unreachable!("only sums in the order of members park contributions"),
            (Fold::Sum { starts_sum, parked: due }, Accumulation::InMemberOrder { parked, site_first }) => {
                match payload {
                    Payload::Here(wire) if *starts_sum => aggregator.assign(sum, wire, codec),
                    Payload::Here(wire) => aggregator.add(sum, wire, codec),
                    Payload::InArena => add_from_arena(arenas, member, aggregator, slot, sum, *starts_sum),
                }
                for member in due.clone() {
                    match arenas.has(member) {
                        true => add_from_arena(arenas, member, aggregator, slot, sum, false),
                        false => {
                            let place = parking_place(member, *site_first);
                            aggregator.add_f32(sum, &parked[place][slot.range()]);
                        }
                    }
                }
            }
            (Fold::Sum { .. }, accumulation) => match (payload, accumulation) {
                (Payload::Here(wire), _) => match std::mem::replace(&mut self.has_part[index as usize], true)
                {
                    false => aggregator.assign(sum, wire, codec),
                    true => aggregator.add(sum, wire, codec),
                },
                (Payload::InArena, Accumulation::OnArrivalFromArenas) => {
                    let first = !std::mem::replace(&mut self.has_part[index as usize], true);
                    add_from_arena(arenas, member, aggregator, slot, sum, first);
                }
                (Payload::InArena, _) => {}
            },
        }
    }

    /// Finds the contributions that still lie in arenas, of the step that ends: `has_contributed` says which members have
    /// contributed to it.
    pub(super) fn find_sources(
        &self,
        arenas: &mut Arenas,
        slot: &ChunkPlace,
        has_contributed: impl Fn(u32) -> bool,
    ) {
        match self.accumulation {
            Accumulation::OnArrival => arenas.find_sources(&slot.extent(), has_contributed),
            Accumulation::OnArrivalFromArenas | Accumulation::InMemberOrder { .. } => {
                arenas.find_no_sources()
            }
        }
    }

    /// Adds the contribution of a member that is lost, which still lies in its arena, to the sum under way.
    pub(super) fn take_from_arena(
        &mut self,
        index: u32,
        slot: ChunkPlace,
        member: u32,
        arenas: &Arenas,
        aggregator: &dyn Aggregator,
    ) {
        if let Accumulation::OnArrival = self.accumulation {
            let first = !std::mem::replace(&mut self.has_part[index as usize], true);
            add_from_arena(arenas, member, aggregator, slot, &mut self.merge[slot.range()], first);
        }
    }

    /// Completes a sum with the contributions that still lie in arenas.
    pub(super) fn gather(
        &mut self,
        index: u32,
        slot: ChunkPlace,
        arenas: &mut Arenas,
        aggregator: &dyn Aggregator,
    ) {
        let adds = std::mem::replace(&mut self.has_part[index as usize], true);
        // Where sums are gathered before they are complete, a step waits for all members.
        self.find_sources(arenas, &slot, |_| true);
        for block in slot.blocks(BLOCK_ELEMENTS) {
            let sum = &mut self.merge[slot.array_offset + block.start..slot.array_offset + block.end];
            arenas.gather(aggregator, slot.in_arena, block.start, sum, adds);
        }
    }

    /// Ends the step under way. Returns whether `merge` has a part of its sum; the rest lies in arenas.
    pub(super) fn end_step(&mut self, index: u32) -> bool {
        let has_part = std::mem::take(&mut self.has_part[index as usize]);
        has_part || matches!(self.accumulation, Accumulation::InMemberOrder { .. })
    }

    /// Begins the update with a contribution that is apart from the sum under way. Returns whether it is here, and not in an
    /// arena.
    pub(super) fn take_apart(&mut self) -> bool {
        std::mem::take(&mut self.has_apart)
    }

    /// A block of the sum that a chunk is updated with.
    pub(super) fn of_update(&mut self, slot: ChunkPlace, block: &Range<usize>, is_apart: bool) -> &mut [f32] {
        match is_apart {
            true => &mut self.apart[block.clone()],
            false => &mut self.merge[slot.array_offset + block.start..slot.array_offset + block.end],
        }
    }

    /// Drops the sums of all steps under way.
    pub(super) fn drop_parts(&mut self) {
        self.has_part.fill(false);
    }

    /// Notes that the sum was made at its place.
    pub(super) fn is_made(&mut self, index: u32) {
        self.has_part[index as usize] = true;
    }

    /// A part of the sums under way.
    pub(super) fn part(&self, range: Range<usize>) -> &[f32] {
        &self.merge[range]
    }

    /// A part of the sums under way, to be written.
    pub(super) fn part_mut(&mut self, range: Range<usize>) -> &mut [f32] {
        &mut self.merge[range]
    }

    /// Returns whether the sums of the last updates are kept for sites below.
    pub(super) fn keeps_totals(&self) -> bool {
        self.keeps_totals
    }

    /// Encodes a complete sum that goes up.
    pub(super) fn raise(&mut self, slot: ChunkPlace) {
        if slot.between_sites != Codec::F32 {
            self.cross(slot);
        }
    }

    /// A sum that goes up, as it crosses.
    pub(super) fn raised(&self, slot: ChunkPlace) -> &[u8] {
        match slot.between_sites {
            Codec::F32 => bytemuck::cast_slice(&self.merge[slot.range()]),
            _ => &self.crossing[slot.crossing_range()],
        }
    }

    /// Takes the sum of all workers' gradients from the site above, and keeps it for the sites below.
    pub(super) fn lower(&mut self, slot: ChunkPlace, payload: &[u8]) {
        convert::decode(payload, &mut self.merge[slot.range()], slot.between_sites);
        if self.keeps_totals {
            self.crossing[slot.crossing_range()].copy_from_slice(payload);
        }
    }

    /// At the owner of a chunk, keeps the sum of all workers' gradients for the sites below, and makes it what they get. The
    /// previous sum has left to all of them: without their next contributions, this sum would not be complete.
    pub(super) fn keep_total(&mut self, slot: ChunkPlace) {
        if self.keeps_totals {
            self.cross(slot);
            if slot.between_sites != Codec::F32 {
                let crossing = &self.crossing[slot.crossing_range()];
                convert::decode(crossing, &mut self.merge[slot.range()], slot.between_sites);
            }
        }
    }

    /// The sum of a chunk's last update, as it crosses.
    pub(super) fn total(&self, slot: ChunkPlace) -> &[u8] {
        &self.crossing[slot.crossing_range()]
    }

    /// Encodes a sum as it crosses between sites.
    fn cross(&mut self, slot: ChunkPlace) {
        let (sum, crossing) = (&self.merge[slot.range()], &mut self.crossing[slot.crossing_range()]);
        match slot.between_sites {
            codec if codec.is_quantised() => {
                quantise::encode(sum, &mut self.lost[slot.range()], crossing, codec);
            }
            codec => convert::encode(sum, crossing, codec),
        }
    }

    /// Calls `each` for its arrays.
    pub(super) fn each_array(&mut self, each: &mut dyn FnMut(&mut dyn Pages)) {
        each(&mut self.merge);
        each(&mut self.crossing);
        each(&mut self.lost);
        each(&mut self.apart);
        if let Accumulation::InMemberOrder { parked, .. } = &mut self.accumulation {
            parked.iter_mut().for_each(|array| each(array));
        }
    }
}

/// The buffer in which a member's contributions wait. The member whose contribution begins the sum never waits: it is
/// member 0, unless a site comes first.
fn parking_place(member: u32, site_first: bool) -> usize {
    if site_first { member as usize } else { member as usize - 1 }
}

/// Adds the contribution in the arena of `member` to `sum`, or begins `sum` with it if it is the `first`.
fn add_from_arena(
    arenas: &Arenas,
    member: u32,
    aggregator: &dyn Aggregator,
    slot: ChunkPlace,
    sum: &mut [f32],
    first: bool,
) {
    let place = arenas.gradient_place(member, &slot.extent());
    read_blocks(arenas, member, place, slot, slot.in_arena, |block, wire| match first {
        true => aggregator.assign(&mut sum[block], wire, slot.in_arena),
        false => aggregator.add(&mut sum[block], wire, slot.in_arena),
    });
}
