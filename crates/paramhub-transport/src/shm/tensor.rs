//! Tensors in memory that the other side of a stream can reach.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;

use super::segment::Segment;
use crate::memory::StableBytes;

/// A segment whose parts are given out as tensors, each part to one owner at a time.
#[derive(Clone)]
pub struct Arena {
    segment: Arc<Segment>,
    taken: Arc<Mutex<BTreeMap<usize, usize>>>,
}

impl Arena {
    /// An arena that gives out parts of `segment`.
    pub fn new(segment: Arc<Segment>) -> Self {
        Arena { segment, taken: Arc::default() }
    }

    /// The memory.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// The bytes of `range`, unless some of them are given out already. They return to the arena when the
    /// tensor is dropped.
    ///
    /// # Panics
    /// If the range is beyond the segment.
    pub fn take(&self, range: Range<usize>) -> Option<Tensor> {
        assert!(range.start <= range.end && range.end <= self.segment.len(), "{range:?} is beyond the arena");
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let before = taken.range(..range.end).next_back();
        if before.is_some_and(|(_, &end)| end > range.start) {
            return None;
        }
        if !range.is_empty() {
            taken.insert(range.start, range.end);
        }
        Some(Tensor { memory: TensorMemory::Arena { arena: self.clone(), range } })
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Arena").field(&self.segment).finish()
    }
}

/// Memory for a tensor. If it is in an arena, its owner's process does not copy what it sends and receives.
#[derive(Debug)]
pub struct Tensor {
    memory: TensorMemory,
}

#[derive(Debug)]
enum TensorMemory {
    Arena {
        arena: Arena,
        range: Range<usize>,
    },
    /// The memory consists of words, for the alignment of every element type.
    Heap {
        words: Vec<u64>,
        bytes: usize,
    },
}

impl Tensor {
    /// Zeros that no other process shares.
    pub fn on_heap(bytes: usize) -> Self {
        Tensor { memory: TensorMemory::Heap { words: vec![0; bytes.div_ceil(size_of::<u64>())], bytes } }
    }

    /// The elements, to read.
    ///
    /// # Panics
    /// If the bytes are not a whole number of `T`.
    pub fn elements<T: Pod>(&self) -> &[T] {
        bytemuck::cast_slice(self.as_bytes())
    }

    /// The elements, to write.
    ///
    /// # Panics
    /// If the bytes are not a whole number of `T`.
    pub fn elements_mut<T: Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.as_bytes_mut())
    }
}

// SAFETY: heap words stay where they are when the value moves, and so does a mapping, which lives as long as
// the `Arc` in `arena`. Address and length never change. Within this process the bytes are the value's alone:
// `take` gives none out twice, and any other writer to an arena takes the range first. The hub at the other
// end, which a worker trusts with its memory, writes them only between a request that passes the tensor to it
// and its answer; in a tensor that is exchanged in place it writes only chunks that were sent whole. Nothing
// here reads them during that time. In a job that has failed the hub may still write an answer that was under
// way, and then only numbers change. Mapped bytes are initialised, and any bytes are valid.
unsafe impl StableBytes for Tensor {
    fn as_bytes(&self) -> &[u8] {
        match &self.memory {
            TensorMemory::Heap { words, bytes } => &bytemuck::cast_slice(words)[..*bytes],
            TensorMemory::Arena { arena, range } => {
                let start = arena.segment.pointer(range.start);
                // SAFETY: mapped while `arena` lives, within the segment (`take` checked it), and nothing
                // writes the bytes while they are read, as argued above.
                unsafe { std::slice::from_raw_parts(start, range.len()) }
            }
        }
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            TensorMemory::Heap { words, bytes } => &mut bytemuck::cast_slice_mut(words)[..*bytes],
            TensorMemory::Arena { arena, range } => {
                let start = arena.segment.pointer(range.start);
                // SAFETY: as in `as_bytes`; nothing else in this process has these bytes.
                unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
            }
        }
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        if let TensorMemory::Arena { arena, range } = &self.memory
            && !range.is_empty()
        {
            arena.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&range.start);
        }
    }
}

/// Parameters that a hub keeps for all workers of its host to read, and that it may write at any time.
///
/// A worker may rely on them from the answer to one of its requests until it requests the next step of the
/// same key: a hub that is in step with its workers changes them no sooner.
#[derive(Clone, Debug)]
pub struct SharedTensor {
    segment: Arc<Segment>,
    range: Range<usize>,
}

impl SharedTensor {
    /// The bytes of `range`.
    ///
    /// # Panics
    /// If the range is beyond the segment.
    pub fn new(segment: Arc<Segment>, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= segment.len(), "{range:?} is beyond the segment");
        SharedTensor { segment, range }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Copies the tensor as it is now. If the hub writes meanwhile, the copy may be torn between two steps.
    ///
    /// # Panics
    /// If `target` is not as long as the tensor.
    pub fn read<T: Pod>(&self, target: &mut [T]) {
        let target: &mut [u8] = bytemuck::cast_slice_mut(target);
        assert_eq!(target.len(), self.range.len(), "a copy is as long as its tensor");
        self.segment.read(self.range.start, target);
    }

    /// The bytes in memory.
    ///
    /// # Safety
    /// Until the slice is gone the hub does not write them: the caller has the answer to its last request for
    /// this key and has not requested the key's next step since, and rank 0 has sent no initial parameters.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: mapped while `self` lives and within the segment; unwritten by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.segment.pointer(self.range.start), self.range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_byte_has_two_owners() {
        let arena = Arena::new(Arc::new(Segment::create("arena", 4096).unwrap()));
        let mut first = arena.take(128..256).unwrap();
        for overlapping in [128..256, 0..129, 255..300, 130..140, 0..4096] {
            assert!(arena.take(overlapping).is_none());
        }
        let mut neighbours = [arena.take(0..128).unwrap(), arena.take(256..4096).unwrap()];
        neighbours.iter_mut().for_each(|tensor| tensor.as_bytes_mut().fill(7));
        first.elements_mut::<f32>().fill(1.5);
        assert_eq!(neighbours[0].elements::<u8>(), [7; 128]);
        assert_eq!(first.elements::<f32>(), [1.5; 32]);
        let mut seen = [0; 4];
        arena.segment().read(252, &mut seen);
        assert_eq!(f32::from_le_bytes(seen), 1.5);
        drop(first);
        assert_eq!(arena.take(128..256).unwrap().elements::<f32>()[0], 1.5);
    }

    #[test]
    fn heap_tensors_hold_any_number_of_bytes() {
        for bytes in [0, 1, 7, 8, 100] {
            let mut tensor = Tensor::on_heap(bytes);
            tensor.as_bytes_mut().fill(3);
            assert_eq!(tensor.as_bytes(), vec![3; bytes]);
        }
    }

    #[test]
    fn a_shared_tensor_shows_what_the_hub_writes() {
        let segment = Arc::new(Segment::create("shared", 64).unwrap());
        let tensor = SharedTensor::new(segment.clone(), 16..32);
        segment.write(16, &[1.0_f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat());
        let mut copy = [0.0_f32; 4];
        tensor.read(&mut copy);
        assert_eq!(copy, [1.0, 2.0, 3.0, 4.0]);
        // SAFETY: nothing writes.
        assert_eq!(unsafe { tensor.bytes() }.len(), 16);
    }
}
