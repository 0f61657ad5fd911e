//! The steps of a rank for a collective in shared memory: a run of chunks, each of which goes through the
//! same three stages.
//!
//! A rank copies the bytes that other ranks need into its slot; in a collective that computes, it reduces its
//! part of all ranks' slots and puts the result into its own; then it copies the bytes that it needs from the
//! slots. A plan is a plain value made from the rank, the number of ranks and the lengths: all ranks cut a
//! collective into the same chunks.

use crate::schedule::{BufferRange, cut};

/// The number of chunks that a large operation is cut into at least, so that one rank copies while another
/// reduces.
const CHUNKS_MIN: usize = 4;
/// The least bytes of a chunk: a smaller one costs more in waiting than it saves.
const CHUNK_BYTES_MIN: usize = 32 << 10;
/// The largest allreduce of which every rank reduces all by itself: it takes one wait instead of two.
const WHOLE_BYTES_MAX: usize = 16 << 10;
/// Parts begin at cache lines, and so at whole elements of any type.
const LINE_BYTES: usize = 64;

/// The rank, the number of ranks, and the bytes of a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotLayout {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) slot_bytes: usize,
}

impl SlotLayout {
    /// Bytes of each rank's part in a slot.
    fn part_bytes(self) -> usize {
        self.slot_bytes / self.size as usize / LINE_BYTES * LINE_BYTES
    }
}

/// The plan of one collective; see the module.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    layout: SlotLayout,
    shape: PlanShape,
    /// Bytes of a chunk, either of the whole buffer or of every rank's block.
    step: usize,
    chunks: u64,
}

#[derive(Clone, Debug)]
enum PlanShape {
    Barrier,
    /// Buffer 0 goes from the root to all ranks.
    Broadcast {
        root: u32,
        bytes: usize,
    },
    /// Every rank reduces a part of each chunk of buffer 0; all ranks, or one, get the whole.
    Parts {
        bytes: usize,
        width: usize,
        to: Option<u32>,
    },
    /// Every rank reduces all of buffer 0.
    Whole {
        bytes: usize,
    },
    /// The buffers of all ranks, then the output.
    Scatter {
        lengths: Box<[usize]>,
        in_place: bool,
    },
    /// The buffers of all ranks, then this rank's own input if it has one.
    Gather {
        lengths: Box<[usize]>,
        has_input: bool,
    },
}

/// The part of a chunk that this rank reduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkReduction {
    pub(crate) into: BufferRange,
    /// The offset of the part in every slot.
    pub(crate) offset: usize,
    /// The range of this rank's own buffers that is copied to `into` first.
    pub(crate) first: Option<BufferRange>,
    /// `true` if this rank's own contribution comes from its own slot, in the order of ranks, so that all
    /// ranks get the same bits.
    pub(crate) is_whole: bool,
    /// `true` if the result goes to this rank's own slot, for the others.
    pub(crate) is_spread: bool,
}

impl Plan {
    pub(crate) fn barrier(layout: SlotLayout) -> Plan {
        Plan { layout, shape: PlanShape::Barrier, step: 0, chunks: 1 }
    }

    pub(crate) fn broadcast(layout: SlotLayout, root: u32, bytes: usize) -> Plan {
        Plan::new(layout, PlanShape::Broadcast { root, bytes }, bytes, layout.slot_bytes)
    }

    /// Reduces elements of `width` bytes, to all ranks or to one.
    pub(crate) fn reduce(layout: SlotLayout, bytes: usize, width: usize, to: Option<u32>) -> Plan {
        if to.is_none() && bytes <= WHOLE_BYTES_MAX {
            return Plan::new(layout, PlanShape::Whole { bytes }, bytes, layout.slot_bytes);
        }
        let most = layout.part_bytes() * layout.size as usize;
        Plan::new(layout, PlanShape::Parts { bytes, width, to }, bytes, most)
    }

    pub(crate) fn reduce_scatter(layout: SlotLayout, lengths: &[usize], in_place: bool) -> Plan {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let shape = PlanShape::Scatter { lengths: lengths.into(), in_place };
        Plan::new(layout, shape, longest, layout.part_bytes())
    }

    pub(crate) fn allgather(layout: SlotLayout, lengths: &[usize], has_input: bool) -> Plan {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let shape = PlanShape::Gather { lengths: lengths.into(), has_input };
        Plan::new(layout, shape, longest, layout.slot_bytes)
    }

    fn new(layout: SlotLayout, shape: PlanShape, bytes: usize, most: usize) -> Plan {
        let lines = LINE_BYTES * layout.size as usize;
        let wanted = (bytes / CHUNKS_MIN).max(CHUNK_BYTES_MIN).next_multiple_of(lines);
        let step = wanted.min(most);
        // A collective without bytes has one chunk as well, whose label shows the others that it was called.
        Plan { layout, shape, step, chunks: bytes.div_ceil(step).max(1) as u64 }
    }

    pub(crate) fn chunks(&self) -> u64 {
        self.chunks
    }

    /// The range of a chunk that is copied to this rank's slot for `for_rank`'s part, and its offset there.
    pub(crate) fn copied(&self, chunk: u64, for_rank: u32) -> Option<(BufferRange, usize)> {
        let SlotLayout { rank, .. } = self.layout;
        let is_own = for_rank == rank;
        match &self.shape {
            PlanShape::Barrier => None,
            PlanShape::Broadcast { root, bytes } => {
                (is_own && rank == *root).then(|| (self.slice(0, *bytes, chunk), 0))
            }
            PlanShape::Parts { .. } => (!is_own).then(|| (self.part(chunk, for_rank), self.offset(for_rank))),
            PlanShape::Whole { bytes } => is_own.then(|| (self.slice(0, *bytes, chunk), 0)),
            PlanShape::Scatter { lengths, .. } => {
                let slice = || self.slice(for_rank, lengths[for_rank as usize], chunk);
                (!is_own).then(|| (slice(), self.offset(for_rank)))
            }
            PlanShape::Gather { lengths, has_input } => {
                let buffer = if *has_input { self.layout.size } else { rank };
                is_own.then(|| (self.slice(buffer, lengths[rank as usize], chunk), 0))
            }
        }
    }

    /// The copy of a chunk within this rank's own buffers: target, then source.
    pub(crate) fn own_copy(&self, chunk: u64) -> Option<(BufferRange, BufferRange)> {
        let rank = self.layout.rank;
        match &self.shape {
            PlanShape::Gather { lengths, has_input: true } => {
                let slice = |buffer| self.slice(buffer, lengths[rank as usize], chunk);
                Some((slice(rank), slice(self.layout.size)))
            }
            _ => None,
        }
    }

    /// The reduction of a chunk at this rank.
    pub(crate) fn reduced(&self, chunk: u64) -> Option<ChunkReduction> {
        let SlotLayout { rank, size, .. } = self.layout;
        let offset = self.offset(rank);
        match &self.shape {
            PlanShape::Parts { to, .. } => {
                let is_spread = *to != Some(rank);
                let into = self.part(chunk, rank);
                Some(ChunkReduction { into, offset, first: None, is_whole: false, is_spread })
            }
            PlanShape::Whole { bytes } => {
                let into = self.slice(0, *bytes, chunk);
                Some(ChunkReduction { into, offset: 0, first: None, is_whole: true, is_spread: false })
            }
            PlanShape::Scatter { lengths, in_place } => {
                let slice = |buffer| self.slice(buffer, lengths[rank as usize], chunk);
                let first = (!in_place).then(|| slice(rank));
                Some(ChunkReduction { into: slice(size), offset, first, is_whole: false, is_spread: false })
            }
            _ => None,
        }
    }

    /// The ranks that must have brought a chunk past their stage before this one can end it.
    pub(crate) fn sources(&self) -> u64 {
        let SlotLayout { rank, size, .. } = self.layout;
        let others = (u64::MAX >> (u64::BITS - size)) & !(1 << rank);
        match &self.shape {
            PlanShape::Barrier | PlanShape::Gather { .. } | PlanShape::Parts { to: None, .. } => others,
            // The root waits only to compare that all ranks have called the same collective.
            PlanShape::Broadcast { root, .. } if *root == rank => others,
            PlanShape::Broadcast { root, .. } => others & (1 << root),
            PlanShape::Parts { to: Some(root), .. } if *root == rank => others,
            PlanShape::Parts { .. } | PlanShape::Whole { .. } | PlanShape::Scatter { .. } => 0,
        }
    }

    /// The range that this rank copies from a source's slot of a chunk, and the offset in the slot.
    pub(crate) fn taken(&self, chunk: u64, source: u32) -> Option<(BufferRange, usize)> {
        match &self.shape {
            PlanShape::Broadcast { root, bytes } => {
                (source == *root).then(|| (self.slice(0, *bytes, chunk), 0))
            }
            PlanShape::Parts { .. } => Some((self.part(chunk, source), self.offset(source))),
            PlanShape::Gather { lengths, .. } => {
                Some((self.slice(source, lengths[source as usize], chunk), 0))
            }
            PlanShape::Barrier | PlanShape::Whole { .. } | PlanShape::Scatter { .. } => None,
        }
    }

    /// The bytes of a buffer that belong to a chunk.
    fn slice(&self, buffer: u32, bytes: usize, chunk: u64) -> BufferRange {
        let start = (chunk as usize * self.step).min(bytes);
        BufferRange { buffer, start, bytes: self.step.min(bytes - start) }
    }

    /// The part of a chunk of buffer 0 that a rank reduces.
    fn part(&self, chunk: u64, rank: u32) -> BufferRange {
        let PlanShape::Parts { bytes, width, .. } = &self.shape else {
            unreachable!("only one shape has parts")
        };
        cut(self.slice(0, *bytes, chunk), *width, self.layout.size as usize, rank as usize)
    }

    /// The offset of a rank's part in a slot.
    fn offset(&self, rank: u32) -> usize {
        rank as usize * self.layout.part_bytes()
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
        fn bytes(&self, span: BufferRange) -> Vec<u8> {
            self.buffers[span.buffer as usize][span.start..span.end()].to_vec()
        }

        fn set(&mut self, span: BufferRange, bytes: &[u8]) {
            self.buffers[span.buffer as usize][span.start..span.end()].copy_from_slice(bytes);
        }
    }

    /// Runs the plans of all ranks, chunk by chunk, with sums of bytes. Asserts that every byte read from a
    /// slot was written.
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
                if let Some((into, from)) = rank.plan.own_copy(chunk) {
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

    fn ranks(
        size: usize,
        plan: impl Fn(SlotLayout) -> Plan,
        buffers: impl Fn(usize) -> Vec<Vec<u8>>,
    ) -> Vec<Rank> {
        let rank = |rank: usize| {
            let layout = SlotLayout { rank: rank as u32, size: size as u32, slot_bytes: SLOT_BYTES };
            Rank { plan: plan(layout), buffers: buffers(rank), slot: Vec::new() }
        };
        (0..size).map(rank).collect()
    }

    fn sum(size: usize, bytes: usize, buffer: usize) -> Vec<u8> {
        let contents: Vec<Vec<u8>> = (0..size).map(|rank| content(rank, buffer, bytes)).collect();
        (0..bytes)
            .map(|at| contents.iter().fold(0_u8, |sum, content| sum.wrapping_add(content[at])))
            .collect()
    }

    /// Lengths around every bound, and some longer than a slot.
    fn lengths() -> impl Strategy<Value = usize> {
        let width = 4;
        prop_oneof![0..40_usize, 4000..4200_usize, 30_000..70_000_usize].prop_map(move |n| n * width)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn reductions_reach_their_ranks(size in 2..7_usize, bytes in lengths(), to in 0..7_u32) {
            let to = (to < size as u32).then_some(to);
            let plan = |layout| Plan::reduce(layout, bytes, 4, to);
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
            let plan = |layout| Plan::reduce_scatter(layout, lengths, !has_own);
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
            let plan = |layout| Plan::allgather(layout, lengths, has_own);
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
            let plan = |layout| Plan::broadcast(layout, root, bytes);
            let mut all = ranks(size, plan, |rank| vec![content(rank, 0, bytes)]);
            run(&mut all);
            prop_assert!(all.iter().all(|rank| rank.buffers[0] == content(root as usize, 0, bytes)));
        }
    }

    #[test]
    fn as_many_ranks_as_may_share_memory_have_room() {
        let size = super::super::shared_segment::RANKS_MAX;
        let layout = SlotLayout { rank: size - 1, size, slot_bytes: SLOT_BYTES };
        assert!(layout.part_bytes() >= 8 * LINE_BYTES && layout.part_bytes() * size as usize <= SLOT_BYTES);
        let plan = Plan::reduce(layout, 100 << 20, 8, None);
        let (span, offset) = plan.copied(3, 0).unwrap();
        assert!(span.bytes <= layout.part_bytes() && offset == 0);
    }
}
