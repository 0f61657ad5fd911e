//! What a rank does for a collective in shared memory: a run of chunks, each of which goes through the same three stages.
//!
//! A rank copies what others need of it into its slot; where the collective computes, it reduces its part of everybody's slots
//! and puts the result into its own; then it copies out what it needs. A plan is a plain value made from the rank, the number
//! of ranks and the lengths: all ranks cut a collective into the same chunks.

use crate::schedule::{Span, cut};

/// Chunks an operation is cut into, where it is large enough, so that one rank copies while another reduces.
const CHUNKS_MIN: usize = 4;
/// Smaller chunks than this do not pay for being waited for.
const CHUNK_BYTES_MIN: usize = 32 << 10;
/// Up to here every rank reduces all of an allreduce by itself: one wait instead of two.
const WHOLE_BYTES_MAX: usize = 16 << 10;
/// Parts begin at cache lines, and so at whole elements of any type.
const LINE_BYTES: usize = 64;

/// A rank's place, and how much a slot holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) slot_bytes: usize,
}

impl Room {
    /// Bytes of a slot for each rank's part.
    fn part_bytes(self) -> usize {
        self.slot_bytes / self.size as usize / LINE_BYTES * LINE_BYTES
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    room: Room,
    shape: Shape,
    /// Bytes of a chunk: of the buffer, or of every rank's block.
    step: usize,
    chunks: u64,
}

#[derive(Clone, Debug)]
enum Shape {
    Barrier,
    /// Buffer 0, from the root to all.
    Broadcast {
        root: u32,
        bytes: usize,
    },
    /// Buffer 0, every rank reduces a part of each chunk; all ranks, or one, get the whole.
    Parts {
        bytes: usize,
        width: usize,
        to: Option<u32>,
    },
    /// Buffer 0, every rank reduces all of it.
    Whole {
        bytes: usize,
    },
    /// Buffers of all ranks, then the output.
    Scatter {
        lengths: Box<[usize]>,
        in_place: bool,
    },
    /// Buffers of all ranks, then perhaps the own input.
    Gather {
        lengths: Box<[usize]>,
        has_input: bool,
    },
}

/// What is reduced at this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reduction {
    pub(crate) into: Span,
    /// Where in every slot it lies.
    pub(crate) offset: usize,
    /// What is copied to `into` first, of this rank.
    pub(crate) first: Option<Span>,
    /// The own contribution comes from the own slot, in the order of ranks, so that all ranks find the same bits.
    pub(crate) is_whole: bool,
    /// The result goes to the own slot, for the others.
    pub(crate) is_spread: bool,
}

impl Plan {
    pub(crate) fn barrier(room: Room) -> Plan {
        Plan { room, shape: Shape::Barrier, step: 0, chunks: 1 }
    }

    pub(crate) fn broadcast(room: Room, root: u32, bytes: usize) -> Plan {
        Plan::new(room, Shape::Broadcast { root, bytes }, bytes, room.slot_bytes)
    }

    /// Elements of `width` bytes, to all ranks or to one.
    pub(crate) fn reduce(room: Room, bytes: usize, width: usize, to: Option<u32>) -> Plan {
        if to.is_none() && bytes <= WHOLE_BYTES_MAX {
            return Plan::new(room, Shape::Whole { bytes }, bytes, room.slot_bytes);
        }
        let most = room.part_bytes() * room.size as usize;
        Plan::new(room, Shape::Parts { bytes, width, to }, bytes, most)
    }

    pub(crate) fn reduce_scatter(room: Room, lengths: &[usize], in_place: bool) -> Plan {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let shape = Shape::Scatter { lengths: lengths.into(), in_place };
        Plan::new(room, shape, longest, room.part_bytes())
    }

    pub(crate) fn allgather(room: Room, lengths: &[usize], has_input: bool) -> Plan {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let shape = Shape::Gather { lengths: lengths.into(), has_input };
        Plan::new(room, shape, longest, room.slot_bytes)
    }

    fn new(room: Room, shape: Shape, bytes: usize, most: usize) -> Plan {
        let lines = LINE_BYTES * room.size as usize;
        let wanted = (bytes / CHUNKS_MIN).max(CHUNK_BYTES_MIN).next_multiple_of(lines);
        let step = wanted.min(most);
        // One without bytes takes part as well: the others are to see that it was called.
        Plan { room, shape, step, chunks: bytes.div_ceil(step).max(1) as u64 }
    }

    pub(crate) fn chunks(&self) -> u64 {
        self.chunks
    }

    /// What of a chunk is copied to the own slot for rank `for_rank`'s part, and where it goes there.
    pub(crate) fn copied(&self, chunk: u64, for_rank: u32) -> Option<(Span, usize)> {
        let Room { rank, .. } = self.room;
        let is_own = for_rank == rank;
        match &self.shape {
            Shape::Barrier => None,
            Shape::Broadcast { root, bytes } => {
                (is_own && rank == *root).then(|| (self.slice(0, *bytes, chunk), 0))
            }
            Shape::Parts { .. } => (!is_own).then(|| (self.part(chunk, for_rank), self.offset(for_rank))),
            Shape::Whole { bytes } => is_own.then(|| (self.slice(0, *bytes, chunk), 0)),
            Shape::Scatter { lengths, .. } => {
                let slice = || self.slice(for_rank, lengths[for_rank as usize], chunk);
                (!is_own).then(|| (slice(), self.offset(for_rank)))
            }
            Shape::Gather { lengths, has_input } => {
                let buffer = if *has_input { self.room.size } else { rank };
                is_own.then(|| (self.slice(buffer, lengths[rank as usize], chunk), 0))
            }
        }
    }

    /// What of a chunk this rank copies to itself: where to, where from.
    pub(crate) fn kept(&self, chunk: u64) -> Option<(Span, Span)> {
        let rank = self.room.rank;
        match &self.shape {
            Shape::Gather { lengths, has_input: true } => {
                let slice = |buffer| self.slice(buffer, lengths[rank as usize], chunk);
                Some((slice(rank), slice(self.room.size)))
            }
            _ => None,
        }
    }

    /// What this rank reduces of a chunk.
    pub(crate) fn reduced(&self, chunk: u64) -> Option<Reduction> {
        let Room { rank, size, .. } = self.room;
        let offset = self.offset(rank);
        match &self.shape {
            Shape::Parts { to, .. } => {
                let is_spread = *to != Some(rank);
                let into = self.part(chunk, rank);
                Some(Reduction { into, offset, first: None, is_whole: false, is_spread })
            }
            Shape::Whole { bytes } => {
                let into = self.slice(0, *bytes, chunk);
                Some(Reduction { into, offset: 0, first: None, is_whole: true, is_spread: false })
            }
            Shape::Scatter { lengths, in_place } => {
                let slice = |buffer| self.slice(buffer, lengths[rank as usize], chunk);
                let first = (!in_place).then(|| slice(rank));
                Some(Reduction { into: slice(size), offset, first, is_whole: false, is_spread: false })
            }
            _ => None,
        }
    }

    /// The ranks that must have done their part of a chunk before this one can end it.
    pub(crate) fn sources(&self) -> u64 {
        let Room { rank, size, .. } = self.room;
        let others = (u64::MAX >> (u64::BITS - size)) & !(1 << rank);
        match &self.shape {
            Shape::Barrier | Shape::Gather { .. } | Shape::Parts { to: None, .. } => others,
            // The root waits for nothing but that all have called the same.
            Shape::Broadcast { root, .. } if *root == rank => others,
            Shape::Broadcast { root, .. } => others & (1 << root),
            Shape::Parts { to: Some(root), .. } if *root == rank => others,
            Shape::Parts { .. } | Shape::Whole { .. } | Shape::Scatter { .. } => 0,
        }
    }

    /// What this rank copies of a chunk from the slot of one of its sources, and where it lies there.
    pub(crate) fn taken(&self, chunk: u64, source: u32) -> Option<(Span, usize)> {
        match &self.shape {
            Shape::Broadcast { root, bytes } => (source == *root).then(|| (self.slice(0, *bytes, chunk), 0)),
            Shape::Parts { .. } => Some((self.part(chunk, source), self.offset(source))),
            Shape::Gather { lengths, .. } => Some((self.slice(source, lengths[source as usize], chunk), 0)),
            Shape::Barrier | Shape::Whole { .. } | Shape::Scatter { .. } => None,
        }
    }

    /// A chunk's bytes of a buffer.
    fn slice(&self, buffer: u32, bytes: usize, chunk: u64) -> Span {
        let start = (chunk as usize * self.step).min(bytes);
        Span { buffer, start, bytes: self.step.min(bytes - start) }
    }

    /// The part of a chunk of buffer 0 that a rank reduces.
    fn part(&self, chunk: u64, rank: u32) -> Span {
        let Shape::Parts { bytes, width, .. } = &self.shape else { unreachable!("only one shape has parts") };
        cut(self.slice(0, *bytes, chunk), *width, self.room.size as usize, rank as usize)
    }

    /// Where a rank's part lies in a slot.
    fn offset(&self, rank: u32) -> usize {
        rank as usize * self.room.part_bytes()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SLOT_BYTES: usize = 128 << 10;

    /// A rank's buffers, its plan and its slot of one chunk.
    struct Rank {
        plan: Plan,
        buffers: Vec<Vec<u8>>,
        slot: Vec<u8>,
    }

    impl Rank {
        fn bytes(&self, span: Span) -> Vec<u8> {
            self.buffers[span.buffer as usize][span.start..span.end()].to_vec()
        }

        fn set(&mut self, span: Span, bytes: &[u8]) {
            self.buffers[span.buffer as usize][span.start..span.end()].copy_from_slice(bytes);
        }
    }

    /// Runs all ranks' plans, a chunk at a time, with sums of bytes. What a rank reads of a slot must have been written.
    fn run(ranks: &mut [Rank]) {
        let size = ranks.len();
        let chunks = ranks[0].plan.chunks();
        assert!(ranks.iter().all(|rank| rank.plan.chunks() == chunks));
        for chunk in 0..chunks {
            for rank in ranks.iter_mut() {
                rank.slot = vec![0xee; SLOT_BYTES];
                for for_rank in 0..size as u32 {
                    if let Some((from, offset)) = rank.plan.copied(chunk, for_rank) {
                        let bytes = rank.bytes(from);
                        rank.slot[offset..][..bytes.len()].copy_from_slice(&bytes);
                    }
                }
                if let Some((into, from)) = rank.plan.kept(chunk) {
                    let bytes = rank.bytes(from);
                    rank.set(into, &bytes);
                }
            }
            for own in 0..size {
                let Some(reduction) = ranks[own].plan.reduced(chunk) else { continue };
                let mut sum = match (reduction.is_whole, reduction.first) {
                    (true, _) => vec![0; reduction.into.bytes],
                    (_, Some(first)) => ranks[own].bytes(first),
                    (_, None) => ranks[own].bytes(reduction.into),
                };
                for (other, rank) in ranks.iter().enumerate() {
                    if reduction.is_whole || other != own {
                        let from = &rank.slot[reduction.offset..][..sum.len()];
                        sum.iter_mut().zip(from).for_each(|(sum, byte)| *sum = sum.wrapping_add(*byte));
                    }
                }
                ranks[own].set(reduction.into, &sum);
                if reduction.is_spread {
                    ranks[own].slot[reduction.offset..][..sum.len()].copy_from_slice(&sum);
                }
            }
            for own in 0..size {
                let sources = ranks[own].plan.sources();
                for source in (0..size as u32).filter(|&rank| sources >> rank & 1 == 1) {
                    if let Some((into, offset)) = ranks[own].plan.taken(chunk, source) {
                        let bytes = ranks[source as usize].slot[offset..][..into.bytes].to_vec();
                        ranks[own].set(into, &bytes);
                    }
                }
            }
        }
    }

    fn content(rank: usize, buffer: usize, bytes: usize) -> Vec<u8> {
        (0..bytes).map(|at| (at * 7 + rank * 31 + buffer * 101) as u8).collect()
    }

    fn ranks(size: usize, plan: impl Fn(Room) -> Plan, buffers: impl Fn(usize) -> Vec<Vec<u8>>) -> Vec<Rank> {
        let rank = |rank: usize| {
            let room = Room { rank: rank as u32, size: size as u32, slot_bytes: SLOT_BYTES };
            Rank { plan: plan(room), buffers: buffers(rank), slot: Vec::new() }
        };
        (0..size).map(rank).collect()
    }

    fn sum(size: usize, bytes: usize, buffer: usize) -> Vec<u8> {
        let contents: Vec<Vec<u8>> = (0..size).map(|rank| content(rank, buffer, bytes)).collect();
        (0..bytes)
            .map(|at| contents.iter().fold(0_u8, |sum, content| sum.wrapping_add(content[at])))
            .collect()
    }

    /// Around every bound, and longer than a slot.
    fn lengths() -> impl Strategy<Value = usize> {
        let width = 4;
        prop_oneof![0..40_usize, 4000..4200_usize, 30_000..70_000_usize].prop_map(move |n| n * width)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn reductions_reach_whom_they_should(size in 2..7_usize, bytes in lengths(), to in 0..7_u32) {
            let to = (to < size as u32).then_some(to);
            let plan = |room| Plan::reduce(room, bytes, 4, to);
            let mut all = ranks(size, plan, |rank| vec![content(rank, 0, bytes)]);
            run(&mut all);
            for (rank, reached) in all.iter().enumerate() {
                if to.is_none_or(|to| to == rank as u32) {
                    prop_assert_eq!(&reached.buffers[0], &sum(size, bytes, 0));
                }
            }
        }

        #[test]
        fn blocks_are_reduced_and_gathered(size in 2..7_usize, seed in prop::collection::vec(lengths(), 6), has_own: bool) {
            let lengths = &seed[..size];
            let plan = |room| Plan::reduce_scatter(room, lengths, !has_own);
            let mut all = ranks(size, plan, |rank| {
                let inputs = (0..size).map(|block| match block == rank && !has_own {
                    true => Vec::new(),
                    false => content(rank, block, lengths[block]),
                });
                let output = if has_own { vec![0; lengths[rank]] } else { content(rank, rank, lengths[rank]) };
                inputs.chain([output]).collect()
            });
            run(&mut all);
            for (rank, reached) in all.iter().enumerate() {
                prop_assert_eq!(&reached.buffers[size], &sum(size, lengths[rank], rank));
            }
            let plan = |room| Plan::allgather(room, lengths, has_own);
            let mut all = ranks(size, plan, |rank| {
                let own = content(rank, 0, lengths[rank]);
                let mut outputs: Vec<Vec<u8>> = lengths.iter().map(|bytes| vec![0; *bytes]).collect();
                match has_own {
                    true => outputs.push(own),
                    false => outputs[rank] = own,
                }
                outputs
            });
            run(&mut all);
            for reached in &all {
                for (rank, length) in lengths.iter().enumerate() {
                    prop_assert_eq!(&reached.buffers[rank], &content(rank, 0, *length));
                }
            }
        }

        #[test]
        fn broadcasts_reach_all(size in 2..7_usize, bytes in lengths(), root in 0..6_u32) {
            let root = root % size as u32;
            let plan = |room| Plan::broadcast(room, root, bytes);
            let mut all = ranks(size, plan, |rank| vec![content(rank, 0, bytes)]);
            run(&mut all);
            prop_assert!(all.iter().all(|rank| rank.buffers[0] == content(root as usize, 0, bytes)));
        }
    }

    #[test]
    fn as_many_ranks_as_may_share_memory_have_room() {
        let size = super::super::commons::RANKS_MAX;
        let room = Room { rank: size - 1, size, slot_bytes: SLOT_BYTES };
        assert!(room.part_bytes() >= 8 * LINE_BYTES && room.part_bytes() * size as usize <= SLOT_BYTES);
        let plan = Plan::reduce(room, 100 << 20, 8, None);
        let (span, offset) = plan.copied(3, 0).unwrap();
        assert!(span.bytes <= room.part_bytes() && offset == 0);
    }
}
