//! The f32 arrays of a job: aligned, and touched by the thread that will use them.

use std::ops::{Deref, DerefMut};

/// Cache lines start at multiples of this; vector loads must not straddle them.
const LINE_ELEMENTS: usize = 16;

/// A zeroed array of f32 that starts on a cache line.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    storage: Vec<f32>,
    start: usize,
    len: usize,
}

/// The allocator has no room.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutOfMemory {
    pub(crate) bytes: u64,
}

impl Buffer {
    /// `len` zeros, `skew` cache lines past a boundary of the allocator's.
    ///
    /// Arrays that are read together want different skews: where they lie a multiple of the page size apart, some
    /// processors mistake one's addresses for the other's and stall.
    pub(crate) fn zeroed(len: usize, skew: usize) -> Result<Self, OutOfMemory> {
        let room = len + LINE_ELEMENTS * (skew + 1);
        let mut storage = Vec::new();
        let full = |_| OutOfMemory { bytes: room as u64 * 4 };
        storage.try_reserve_exact(room).map_err(full)?;
        // Writes every page now, on the calling thread, so that the first step pays no page faults and the memory lies
        // in this thread's NUMA node.
        storage.resize(room, 0.0f32);
        let to_line = storage.as_ptr().align_offset(LINE_ELEMENTS * size_of::<f32>()).min(LINE_ELEMENTS - 1);
        Ok(Buffer { start: to_line + LINE_ELEMENTS * skew, len, storage })
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.storage[self.start..self.start + self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.storage[self.start..self.start + self.len]
    }
}

/// Elements rounded up so that the next chunk starts on a cache line again.
pub(crate) fn whole_lines(elements: usize) -> usize {
    elements.next_multiple_of(LINE_ELEMENTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_start_on_cache_lines_and_hold_zeros() {
        for (len, skew) in [(0, 0), (1, 0), (1000, 1), (1 << 20, 5)] {
            let buffer = Buffer::zeroed(len, skew).unwrap();
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|&value| value == 0.0));
            assert_eq!(buffer.as_ptr() as usize % 64, 0);
        }
        assert!(Buffer::zeroed(usize::MAX / 8, 0).is_err());
        assert_eq!([whole_lines(0), whole_lines(1), whole_lines(16), whole_lines(17)], [0, 16, 16, 32]);
    }
}
