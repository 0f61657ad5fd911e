//! The arrays of a job: aligned, and touched by the thread that uses them, a part at a time.

use std::ops::{Deref, DerefMut, Range};

use bytemuck::Zeroable;

/// Cache lines start at multiples of this; vector loads must not straddle them.
pub(super) const LINE_BYTES: usize = 64;
const LINE_ELEMENTS: usize = LINE_BYTES / size_of::<f32>();

/// A zeroed array that starts on a cache line. It can be read and written once it has been touched.
#[derive(Debug, Default)]
pub(crate) struct Buffer<T = f32> {
    /// The part that has been touched.
    storage: Vec<T>,
    room: usize,
    start: usize,
    len: usize,
}

/// The allocator has no room.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutOfMemory {
    pub(crate) bytes: u64,
}

/// Memory that is taken and given back in parts, so that a core can serve other work in between: the system
/// clears each page when it is first written, and reclaims each one when it is freed.
pub(crate) trait Pages {
    /// Writes the next pages, about `bytes` bytes. Returns how many there were; 0 when all have been written.
    fn touch_some(&mut self, bytes: usize) -> usize;

    /// Gives back about `bytes` bytes of pages. Returns how many there were; 0 when none are left. Nothing
    /// can be read any more.
    fn free_some(&mut self, bytes: usize) -> usize;

    /// Bytes that have been written.
    #[cfg(test)]
    fn touched_bytes(&self) -> usize;
}

impl<T: Zeroable + Copy> Buffer<T> {
    /// Room for `len` zeros, `skew` cache lines past a boundary of the allocator's; none has been written.
    ///
    /// Arrays that are read together need different skews: if they are a multiple of the page size apart,
    /// some processors mistake the addresses of one for those of the other and stall.
    pub(crate) fn reserved(len: usize, skew: usize) -> Result<Self, OutOfMemory> {
        let line = LINE_BYTES / size_of::<T>();
        let room = len + line * (skew + 1);
        let mut storage: Vec<T> = Vec::new();
        let full = |_| OutOfMemory { bytes: room as u64 * size_of::<T>() as u64 };
        storage.try_reserve_exact(room).map_err(full)?;
        let to_line = storage.as_ptr().align_offset(LINE_BYTES).min(line - 1);
        Ok(Buffer { start: to_line + line * skew, len, room, storage })
    }
}

impl<T: Copy> Buffer<T> {
    /// Returns whether its first `len` values have been touched.
    pub(crate) fn reaches(&self, len: usize) -> bool {
        self.storage.len() >= self.start + len
    }

    /// A range of its values. These must have been touched; others need not have been.
    pub(crate) fn part_mut(&mut self, range: Range<usize>) -> &mut [T] {
        &mut self.storage[self.start + range.start..self.start + range.end]
    }
}

impl<T: Zeroable + Copy> Pages for Buffer<T> {
    fn touch_some(&mut self, bytes: usize) -> usize {
        let more = (self.room - self.storage.len()).min((bytes / size_of::<T>()).max(1));
        // This runs on the calling thread, so that the first step has no page faults and the memory is in
        // this thread's NUMA node. The memory was reserved, so nothing moves.
        self.storage.resize(self.storage.len() + more, T::zeroed());
        more * size_of::<T>()
    }

    fn free_some(&mut self, bytes: usize) -> usize {
        (self.start, self.len, self.room) = (0, 0, 0);
        let left = self.storage.len().saturating_sub((bytes / size_of::<T>()).max(1));
        let freed = self.storage.len() - left;
        self.storage.truncate(left);
        // An array of this size has a mapping of its own, whose end can be freed without a move of the rest.
        match left {
            0 => self.storage = Vec::new(),
            _ => self.storage.shrink_to(left),
        }
        freed * size_of::<T>()
    }

    #[cfg(test)]
    fn touched_bytes(&self) -> usize {
        self.storage.len() * size_of::<T>()
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.storage[self.start..self.start + self.len]
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.storage[self.start..self.start + self.len]
    }
}

/// Elements rounded up so that the next chunk starts on a cache line.
pub(crate) fn whole_lines(elements: usize) -> usize {
    elements.next_multiple_of(LINE_ELEMENTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_start_on_cache_lines_and_hold_zeros() {
        for (len, skew) in [(0, 0), (1, 0), (1000, 1), (1 << 20, 5)] {
            let mut buffer = Buffer::<f32>::reserved(len, skew).unwrap();
            while buffer.touch_some(4096) > 0 {}
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|&value| value == 0.0));
            assert_eq!(buffer.as_ptr() as usize % 64, 0);
        }
        assert!(Buffer::<f32>::reserved(usize::MAX / 8, 0).is_err());
        assert_eq!([whole_lines(0), whole_lines(1), whole_lines(16), whole_lines(17)], [0, 16, 16, 32]);
    }

    #[test]
    fn pages_are_taken_and_given_back_in_parts() {
        let mut buffer = Buffer::<u8>::reserved(1 << 20, 0).unwrap();
        let counted = |mut part: Box<dyn FnMut() -> usize + '_>| {
            std::iter::from_fn(|| Some(part()).filter(|&bytes| bytes > 0)).collect::<Vec<usize>>()
        };
        let touched = counted(Box::new(|| buffer.touch_some(64 << 10)));
        assert_eq!((touched.len(), touched.iter().sum::<usize>()), (17, (1 << 20) + 64));
        let freed = counted(Box::new(|| buffer.free_some(64 << 10)));
        assert_eq!((freed.len(), freed.iter().sum::<usize>()), (17, (1 << 20) + 64));
        assert!(buffer.is_empty());
        let mut untouched = Buffer::<f32>::reserved(1 << 20, 0).unwrap();
        assert_eq!(untouched.free_some(1), 0, "nothing was written that could go");
    }
}
