//! The memory that all ranks of a host map, and how they tell one another how far they are in it.
//!
//! ```text
//! 0            256                   size x 256, rounded up to pages
//! +------------+------------+-- - - -+---------------+---------------+-- - - -
//! | rank 0's   | rank 1's   |        | rank 0's      | rank 0's      |   SLOTS of each rank,
//! | counters   | counters   |        | slot 0        | slot 1        |   rank by rank
//! +------------+------------+-- - - -+---------------+---------------+-- - - -
//! ```
//! A rank writes its own counters and its own slots. Others only read them, but for the `asleep` of a rank, which who rings
//! its bell sets back.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};

use paramhub_kernels::shared::Floats;
use paramhub_transport::shm::{Bell, Segment};

use super::plan::Room;
use crate::descriptor::{DESCRIPTOR_BYTES, Descriptor};

/// Ranks that may share memory: a set of them is one word.
pub(crate) const RANKS_MAX: u32 = 64;
/// Chunks that a rank may have copied in before the slowest has taken the first.
pub(crate) const SLOTS: u64 = 8;
/// Tensor bytes of a slot.
pub(crate) const SLOT_BYTES: usize = 128 << 10;

/// Before a slot's bytes: the collective and which it is.
const LABEL_BYTES: usize = 64;
const LABEL_USED: usize = DESCRIPTOR_BYTES + 8;
const COUNTERS_BYTES: usize = 256;
/// In a rank's counters, where those begin that say what it sleeps for. Of their own lines: everybody reads them.
const ASLEEP: usize = 128;
const PAGE_BYTES: usize = 4096;

/// What a rank does to a chunk, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its own contribution is in its slot.
    Copied,
    /// Its part of the result is in its slot.
    Reduced,
    /// It needs nothing of the others' slots any more.
    Taken,
}

impl Stage {
    pub(crate) const ALL: [Stage; 3] = [Stage::Copied, Stage::Reduced, Stage::Taken];
}

/// What a rank sleeps for: that these have brought so many chunks past a stage. A count of 0 is waited for by nobody.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wish {
    pub(crate) count: u64,
    pub(crate) ranks: u64,
}

pub(crate) struct Commons {
    segment: Segment,
    bells: Vec<Bell>,
    rank: u32,
    size: u32,
}

impl Commons {
    /// New memory for so many ranks, for rank 0 to make.
    pub(crate) fn create(size: u32) -> io::Result<Commons> {
        let bells = (0..size).map(|_| Bell::new()).collect::<Result<_, _>>()?;
        let segment = Segment::create("paramhub-mesh", total_bytes(size))?;
        Ok(Commons { segment, bells, rank: 0, size })
    }

    /// What another rank needs to [`adopt`](Self::adopt) it: the memory, then every rank's bell.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        std::iter::once(self.segment.as_fd()).chain(self.bells.iter().map(AsFd::as_fd)).collect()
    }

    pub(crate) fn adopt(rank: u32, size: u32, descriptors: Vec<OwnedFd>) -> io::Result<Commons> {
        let mut descriptors = descriptors.into_iter();
        let memory = descriptors.next().ok_or(io::ErrorKind::InvalidData)?;
        let segment = Segment::adopt(memory, total_bytes(size))?;
        let bells = descriptors.map(Bell::adopt).collect::<Result<Vec<_>, _>>()?;
        match bells.len() == size as usize {
            true => Ok(Commons { segment, bells, rank, size }),
            false => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    pub(crate) fn room(&self) -> Room {
        Room { rank: self.rank, size: self.size, slot_bytes: SLOT_BYTES }
    }

    /// This rank's own bell, to wait for.
    pub(crate) fn bell(&self) -> &Bell {
        &self.bells[self.rank as usize]
    }

    /// The others, as a set.
    pub(crate) fn others(&self) -> u64 {
        (u64::MAX >> (u64::BITS - self.size)) & !(1 << self.rank)
    }

    /// How many chunks a rank has brought so far.
    #[inline]
    pub(crate) fn reached(&self, rank: u32, stage: Stage) -> u64 {
        self.counter(rank, stage as usize * 8).load(Acquire)
    }

    /// Those of `ranks` that have not brought so many chunks so far.
    pub(crate) fn behind(&self, stage: Stage, count: u64, ranks: u64) -> u64 {
        let mut behind = 0;
        for rank in members(ranks) {
            behind |= u64::from(self.reached(rank, stage) < count) << rank;
        }
        behind
    }

    /// This rank has brought so many chunks so far. What it wrote before is seen by whoever sees this.
    #[inline]
    pub(crate) fn reach(&self, stage: Stage, count: u64) {
        self.counter(self.rank, stage as usize * 8).store(count, Release);
    }

    /// Rings for those who sleep until what is now so.
    pub(crate) fn wake_others(&self) {
        // Either the sleeper, who looks once more after it said that it sleeps, sees what was reached, or this sees it asleep.
        fence(SeqCst);
        for rank in members(self.others()) {
            let asleep = self.counter(rank, ASLEEP);
            if asleep.load(Relaxed) == 1 && self.is_granted(rank) && asleep.swap(0, Relaxed) == 1 {
                self.bells[rank as usize].ring();
            }
        }
    }

    /// Whether one of a sleeper's wishes has come true.
    fn is_granted(&self, sleeper: u32) -> bool {
        fence(Acquire);
        Stage::ALL.into_iter().any(|stage| {
            let at = ASLEEP + 8 + 16 * stage as usize;
            let count = self.counter(sleeper, at).load(Relaxed);
            // Whatever a process writes here, only ranks of the mesh are looked at.
            let ranks = self.counter(sleeper, at + 8).load(Relaxed) & (u64::MAX >> (u64::BITS - self.size));
            count > 0 && self.behind(stage, count, ranks) == 0
        })
    }

    /// Lets the others know that this rank sleeps until one of its wishes, by the others' stage, comes true. It has to look once more
    /// whether that is so already before it does.
    pub(crate) fn sleep(&self, wishes: [Wish; 3]) {
        for (stage, wish) in wishes.into_iter().enumerate() {
            let at = ASLEEP + 8 + 16 * stage;
            self.counter(self.rank, at).store(wish.count, Relaxed);
            self.counter(self.rank, at + 8).store(wish.ranks, Relaxed);
        }
        self.counter(self.rank, ASLEEP).store(1, Release);
        fence(SeqCst);
    }

    /// It sleeps no more.
    pub(crate) fn rise(&self) {
        self.counter(self.rank, ASLEEP).store(0, Relaxed);
    }

    /// Says on this rank's slot of a chunk what its bytes belong to.
    pub(crate) fn label(&self, chunk: u64, number: u64, descriptor: &Descriptor) {
        let mut label = [0; LABEL_USED];
        label[..DESCRIPTOR_BYTES].copy_from_slice(&descriptor.encode());
        label[DESCRIPTOR_BYTES..].copy_from_slice(&number.to_le_bytes());
        self.segment.write(self.slot(self.rank, chunk), &label);
    }

    /// What a rank's slot of a chunk belongs to; `None` where that is no collective.
    pub(crate) fn label_of(&self, rank: u32, chunk: u64) -> Option<(u64, Descriptor)> {
        let mut label = [0; LABEL_USED];
        self.segment.read(self.slot(rank, chunk), &mut label);
        let (descriptor, number) = label.split_at(DESCRIPTOR_BYTES);
        let descriptor = Descriptor::decode(descriptor.try_into().expect("a fixed length"))?;
        Some((u64::from_le_bytes(number.try_into().expect("a fixed length")), descriptor))
    }

    /// Writes to this rank's slot of a chunk.
    #[inline]
    pub(crate) fn put(&self, chunk: u64, offset: usize, bytes: &[u8]) {
        self.segment.write(self.within(self.rank, chunk, offset, bytes.len()), bytes);
    }

    /// Copies from a rank's slot of a chunk.
    #[inline]
    pub(crate) fn take(&self, rank: u32, chunk: u64, offset: usize, into: &mut [u8]) {
        self.segment.read(self.within(rank, chunk, offset, into.len()), into);
    }

    /// The same bytes as numbers, to add up where they are.
    #[inline]
    pub(crate) fn floats(&self, rank: u32, chunk: u64, offset: usize, len: usize) -> Floats<'_> {
        self.segment.floats(self.within(rank, chunk, offset, 4 * len), len)
    }

    fn within(&self, rank: u32, chunk: u64, offset: usize, bytes: usize) -> usize {
        assert!(offset + bytes <= SLOT_BYTES, "{bytes} bytes at {offset} are beyond a slot");
        self.slot(rank, chunk) + LABEL_BYTES + offset
    }

    fn slot(&self, rank: u32, chunk: u64) -> usize {
        let number = u64::from(rank) * SLOTS + chunk % SLOTS;
        slots_begin(self.size) + number as usize * (LABEL_BYTES + SLOT_BYTES)
    }

    #[inline]
    fn counter(&self, rank: u32, at: usize) -> &AtomicU64 {
        self.segment.counter(rank as usize * COUNTERS_BYTES + at)
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

fn slots_begin(size: u32) -> usize {
    (size as usize * COUNTERS_BYTES).next_multiple_of(PAGE_BYTES)
}

fn total_bytes(size: u32) -> usize {
    slots_begin(size) + size as usize * SLOTS as usize * (LABEL_BYTES + SLOT_BYTES)
}
