//! The memory that all ranks of a host map, and the counters with which they show their progress in it.
//!
//! ```text
//! 0            256                   size x 256, rounded up to pages
//! +------------+------------+-- - - -+---------------+---------------+-- - - -
//! | rank 0's   | rank 1's   |        | rank 0's      | rank 0's      |   SLOTS of each rank,
//! | counters   | counters   |        | slot 0        | slot 1        |   rank by rank
//! +------------+------------+-- - - -+---------------+---------------+-- - - -
//! ```
//! A rank writes its own counters and its own slots. The others only read them, with one exception: the rank
//! that rings another's doorbell resets that rank's `asleep`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};

use paramhub_kernels::shared::Floats;
use paramhub_transport::shm::{Doorbell, Segment};

use super::plan::SlotLayout;
use crate::descriptor::{DESCRIPTOR_BYTES, Descriptor};

/// The largest number of ranks that share memory. A set of ranks is a `u64` that has a bit for each.
pub(crate) const RANKS_MAX: u32 = 64;
/// The number of slots that each rank has. It may copy as many chunks in before the slowest rank has read the
/// first.
pub(crate) const SLOTS: u64 = 8;
/// The bytes of a slot that hold a part of a tensor; its label comes before them.
pub(crate) const SLOT_BYTES: usize = 128 << 10;

/// The bytes of the label before a slot's tensor bytes. It says which collective the slot serves.
const LABEL_BYTES: usize = 64;
/// The bytes of a label that are used: for the collective's descriptor and its number.
const LABEL_USED_BYTES: usize = DESCRIPTOR_BYTES + 8;
/// The bytes of each rank's counters: one for each stage, then the flag `asleep` and the wake conditions.
const COUNTERS_BYTES: usize = 256;
/// The offset of the flag `asleep` in a rank's counters, in bytes. The wake conditions follow it. These have
/// cache lines of their own, since all ranks read them.
const ASLEEP_OFFSET: usize = 128;
const PAGE_BYTES: usize = 4096;

/// The stages through which a rank brings each chunk of a collective, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkStage {
    /// The rank's contribution is in its slot.
    Copied,
    /// The rank's part of the result is in its slot.
    Reduced,
    /// The rank needs no more bytes of the others' slots.
    ReadByRank,
}

impl ChunkStage {
    pub(crate) const ALL: [ChunkStage; 3] = [ChunkStage::Copied, ChunkStage::Reduced, ChunkStage::ReadByRank];
}

/// The condition on which to wake a rank: all of `ranks` have brought `count` chunks past a stage. A count of
/// 0 stands for no condition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WakeCondition {
    pub(crate) count: u64,
    /// A set, with a bit for each rank.
    pub(crate) ranks: u64,
}

/// A rank's view of the memory that all ranks of its host share; the module says how the memory is laid out.
pub(crate) struct SharedSegment {
    segment: Segment,
    /// The doorbell of each rank.
    doorbells: Vec<Doorbell>,
    /// This rank.
    rank: u32,
    /// The number of ranks.
    size: u32,
}

impl SharedSegment {
    /// Allocates memory for `size` ranks. Rank 0 does this, and the others [`adopt`](Self::adopt) its
    /// segment.
    pub(crate) fn create(size: u32) -> io::Result<SharedSegment> {
        let doorbells = (0..size).map(|_| Doorbell::new()).collect::<Result<_, _>>()?;
        let segment = Segment::create("paramhub-mesh", total_bytes(size))?;
        Ok(SharedSegment { segment, doorbells, rank: 0, size })
    }

    /// The file descriptors with which another rank can [`adopt`](Self::adopt) the segment: that of the
    /// memory, then that of every rank's doorbell.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        std::iter::once(self.segment.as_fd()).chain(self.doorbells.iter().map(AsFd::as_fd)).collect()
    }

    /// Maps the segment of `size` ranks whose [`descriptors`](Self::descriptors) came from rank 0.
    ///
    /// # Errors
    /// The system's, and `InvalidData` if the number of file descriptors is wrong.
    pub(crate) fn adopt(rank: u32, size: u32, file_descriptors: Vec<OwnedFd>) -> io::Result<SharedSegment> {
        let mut file_descriptors = file_descriptors.into_iter();
        let memory = file_descriptors.next().ok_or(io::ErrorKind::InvalidData)?;
        let segment = Segment::adopt(memory, total_bytes(size))?;
        let doorbells = file_descriptors.map(Doorbell::adopt).collect::<Result<Vec<_>, _>>()?;
        match doorbells.len() == size as usize {
            true => Ok(SharedSegment { segment, doorbells, rank, size }),
            false => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    /// The number of ranks.
    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    pub(crate) fn layout(&self) -> SlotLayout {
        SlotLayout { rank: self.rank, size: self.size, slot_bytes: SLOT_BYTES }
    }

    /// This rank's own doorbell.
    pub(crate) fn doorbell(&self) -> &Doorbell {
        &self.doorbells[self.rank as usize]
    }

    /// The other ranks, as a set.
    pub(crate) fn others(&self) -> u64 {
        (u64::MAX >> (u64::BITS - self.size)) & !(1 << self.rank)
    }

    /// The number of chunks that a rank has brought past a stage.
    #[inline]
    pub(crate) fn reached(&self, rank: u32, stage: ChunkStage) -> u64 {
        self.counter(rank, stage as usize * 8).load(Acquire)
    }

    /// The ranks of `ranks` that have brought fewer than `count` chunks past a stage.
    pub(crate) fn behind(&self, stage: ChunkStage, count: u64, ranks: u64) -> u64 {
        let mut behind = 0;
        for rank in members(ranks) {
            behind |= u64::from(self.reached(rank, stage) < count) << rank;
        }
        behind
    }

    /// Publishes that this rank has brought `count` chunks past a stage. A rank that reads this sees what was
    /// written before.
    #[inline]
    pub(crate) fn reach(&self, stage: ChunkStage, count: u64) {
        self.counter(self.rank, stage as usize * 8).store(count, Release);
    }

    /// Rings the doorbells of sleepers whose condition now holds.
    pub(crate) fn wake_others(&self) {
        // The sleeper checks its conditions once more after it has announced its sleep: either it sees this
        // progress, or this rank sees it asleep.
        fence(SeqCst);
        for rank in members(self.others()) {
            let asleep = self.counter(rank, ASLEEP_OFFSET);
            if asleep.load(Relaxed) == 1 && self.is_due(rank) && asleep.swap(0, Relaxed) == 1 {
                self.doorbells[rank as usize].wake();
            }
        }
    }

    /// Returns whether one of a sleeper's conditions holds.
    fn is_due(&self, sleeper: u32) -> bool {
        fence(Acquire);
        ChunkStage::ALL.into_iter().any(|stage| {
            let offset = condition_offset(stage as usize);
            let count = self.counter(sleeper, offset).load(Relaxed);
            // Whatever another process writes here, only ranks of the mesh are read.
            let ranks =
                self.counter(sleeper, offset + 8).load(Relaxed) & (u64::MAX >> (u64::BITS - self.size));
            count > 0 && self.behind(stage, count, ranks) == 0
        })
    }

    /// Announces that this rank sleeps until one of its conditions holds. The position of a condition is the
    /// number of the stage that the other ranks must have passed. Before it sleeps, this rank must check once
    /// more whether one of them holds already.
    pub(crate) fn announce_sleep(&self, conditions: [WakeCondition; 3]) {
        for (stage, wake_condition) in conditions.into_iter().enumerate() {
            let offset = condition_offset(stage);
            self.counter(self.rank, offset).store(wake_condition.count, Relaxed);
            self.counter(self.rank, offset + 8).store(wake_condition.ranks, Relaxed);
        }
        self.counter(self.rank, ASLEEP_OFFSET).store(1, Release);
        fence(SeqCst);
    }

    /// Withdraws the announcement: this rank is awake.
    pub(crate) fn clear_sleep(&self) {
        self.counter(self.rank, ASLEEP_OFFSET).store(0, Relaxed);
    }

    /// Labels this rank's slot of a chunk with the collective that its bytes belong to.
    pub(crate) fn write_label(&self, chunk: u64, number: u64, descriptor: &Descriptor) {
        let mut label = [0; LABEL_USED_BYTES];
        label[..DESCRIPTOR_BYTES].copy_from_slice(&descriptor.encode());
        label[DESCRIPTOR_BYTES..].copy_from_slice(&number.to_le_bytes());
        self.segment.write(self.slot(self.rank, chunk), &label);
    }

    /// Reads the label on a rank's slot of a chunk: the number and the descriptor of its collective. `None`
    /// if the bytes are no descriptor, since another process may have written anything there.
    pub(crate) fn read_label(&self, rank: u32, chunk: u64) -> Option<(u64, Descriptor)> {
        let mut label = [0; LABEL_USED_BYTES];
        self.segment.read(self.slot(rank, chunk), &mut label);
        let (descriptor, number) = label.split_at(DESCRIPTOR_BYTES);
        let descriptor = Descriptor::decode(descriptor.try_into().expect("a fixed length"))?;
        Some((u64::from_le_bytes(number.try_into().expect("a fixed length")), descriptor))
    }

    /// Writes to this rank's slot of a chunk, from byte `offset` of its tensor bytes on.
    #[inline]
    pub(crate) fn put(&self, chunk: u64, offset: usize, bytes: &[u8]) {
        self.segment.write(self.within(self.rank, chunk, offset, bytes.len()), bytes);
    }

    /// Copies from a rank's slot of a chunk, from byte `offset` of its tensor bytes on.
    #[inline]
    pub(crate) fn take(&self, rank: u32, chunk: u64, offset: usize, into: &mut [u8]) {
        self.segment.read(self.within(rank, chunk, offset, into.len()), into);
    }

    /// The bytes that [`take`](Self::take) would copy as `len` f32 elements, which can be added where they
    /// are.
    #[inline]
    pub(crate) fn floats(&self, rank: u32, chunk: u64, offset: usize, len: usize) -> Floats<'_> {
        self.segment.floats(self.within(rank, chunk, offset, 4 * len), len)
    }

    /// The place of tensor bytes of a slot: their offset in the segment.
    ///
    /// # Panics
    /// If they reach beyond the slot.
    fn within(&self, rank: u32, chunk: u64, offset: usize, bytes: usize) -> usize {
        assert!(offset + bytes <= SLOT_BYTES, "{bytes} bytes at {offset} are beyond a slot");
        self.slot(rank, chunk) + LABEL_BYTES + offset
    }

    /// The offset in the segment, in bytes, of the slot that a rank uses for a chunk. It begins with the
    /// label.
    fn slot(&self, rank: u32, chunk: u64) -> usize {
        let number = u64::from(rank) * SLOTS + chunk % SLOTS;
        slots_begin(self.size) + number as usize * (LABEL_BYTES + SLOT_BYTES)
    }

    /// The counter at byte `offset` of a rank's counters.
    #[inline]
    fn counter(&self, rank: u32, offset: usize) -> &AtomicU64 {
        self.segment.counter(rank as usize * COUNTERS_BYTES + offset)
    }
}

/// The ranks of a set.
pub(crate) fn members(mut ranks: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let rank = (ranks != 0).then(|| ranks.trailing_zeros())?;
        ranks &= ranks - 1;
        Some(rank)
    })
}

/// The offset of a stage's wake condition in a rank's counters, in bytes: its count, and its ranks 8 bytes
/// on.
fn condition_offset(stage: usize) -> usize {
    ASLEEP_OFFSET + 8 + 16 * stage
}

/// The offset of the first slot in a segment of `size` ranks, in bytes.
fn slots_begin(size: u32) -> usize {
    (size as usize * COUNTERS_BYTES).next_multiple_of(PAGE_BYTES)
}

/// The bytes of a segment of `size` ranks.
fn total_bytes(size: u32) -> usize {
    slots_begin(size) + size as usize * SLOTS as usize * (LABEL_BYTES + SLOT_BYTES)
}
