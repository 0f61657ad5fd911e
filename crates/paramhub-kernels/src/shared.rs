//! Copies between a process's own memory and memory that another process may read and write meanwhile.
//!
//! No reference to such memory is ever made. These functions read it once, through raw pointers, into private
//! memory, and only that copy is used. If the other side writes meanwhile, the copy has arbitrary bytes, and
//! nothing worse happens.
//!
//! These loops replace `memcpy`, which copies as many bytes as a chunk has with `rep movsb`. On some
//! processors that instruction has a fifteenth of its usual speed if the target is less than 16 bytes behind
//! the source, modulo the page size.

#[cfg(target_arch = "x86_64")]
use crate::dispatch::Body;
use std::marker::PhantomData;

use crate::dispatch::Isa;

/// The bytes of a cache line. A turn of a copy loop moves two lines. Before a streaming copy moves whole
/// lines, it copies single bytes until its target is at the start of a line.
const LINE_BYTES: usize = 64;

/// The number of elements by which the prefetches of the sources run ahead of the sum. They reach into the
/// next block: without them, the memory would be idle for the time of an access after the work that lies
/// between the sums of two neighbouring blocks.
#[cfg(target_arch = "x86_64")]
const AHEAD_ELEMENTS: usize = 256;

/// Prefetches bytes that will soon be read.
pub fn prefetch(bytes: &[u8]) {
    for line in bytes.chunks(LINE_BYTES) {
        prefetch_line(line.as_ptr());
    }
}

/// Prefetches the cache line at an address. This is harmless at any address, even outside of an array.
#[inline(always)]
fn prefetch_line(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetches neither fault nor change anything; SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Copies `target.len()` bytes from `source`, which another process may write to meanwhile.
///
/// # Safety
/// `source` is valid for reads of `target.len()` bytes, mapped for as long as this runs, and does not overlap
/// `target`. Its bytes may change while they are read.
pub unsafe fn copy_in(source: *const u8, target: &mut [u8]) {
    // SAFETY: the duties are those of `copy`, and the caller's.
    unsafe { copy(source, target.as_mut_ptr(), target.len()) };
}

/// Copies `source` to `target`, which another process may read meanwhile.
///
/// # Safety
/// `target` is valid for writes of `source.len()` bytes, mapped for as long as this runs, and does not overlap `source`.
pub unsafe fn copy_out(source: &[u8], target: *mut u8) {
    // SAFETY: the duties are those of `copy`, and the caller's.
    unsafe { copy(source.as_ptr(), target, source.len()) };
}

/// Copies like [`copy_out`], but past the caches (with streaming stores): this side will not read the target
/// again, and lines that are overwritten whole need not be fetched first. Call [`fence`] before announcing
/// the data to the other side.
///
/// # Safety
/// As [`copy_out`].
pub unsafe fn stream_out(source: &[u8], target: *mut u8) {
    // SAFETY: the duties are those of `stream_bytes`, and the caller's.
    unsafe { stream_bytes(source.as_ptr(), target, source.len()) };
}

/// Copies like [`stream_out`], but into this process's own memory, for data that will not be read again soon.
/// Call [`fence`] before another thread reads it.
///
/// # Panics
/// If the lengths differ.
pub fn stream(source: &[u8], target: &mut [u8]) {
    assert_eq!(source.len(), target.len(), "a copy is as long as what is copied");
    // SAFETY: `target` has as many bytes, and is borrowed exclusively, so the two do not overlap.
    unsafe { stream_out(source, target.as_mut_ptr()) };
}

/// Little-endian f32 elements, at any alignment, that another process may write meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Floats<'a> {
    start: *const u8,
    len: usize,
    memory: PhantomData<&'a ()>,
}

impl Floats<'_> {
    /// No elements.
    pub const NONE: Self = Floats { start: std::ptr::null(), len: 0, memory: PhantomData };

    /// # Safety
    /// `start` is valid for reads of `len` elements, mapped for as long as the value lives, and no reference
    /// of this process to them allows writing. The elements may change meanwhile.
    pub unsafe fn new(start: *const u8, len: usize) -> Self {
        Floats { start, len, memory: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the elements.
    ///
    /// # Panics
    /// If `target` is not as long.
    pub fn read(&self, target: &mut [f32]) {
        assert_eq!(target.len(), self.len, "a copy is as long as what is copied");
        // SAFETY: `new`'s caller guarantees the source; `target` is borrowed exclusively, so the two do not
        // overlap.
        unsafe { copy(self.start, target.as_mut_ptr().cast(), size_of_val(target)) };
    }
}

/// Sets `sum[i]` to `sources[0][i] + sources[1][i] + ...`, or to `sum[i] + sources[0][i] + ...` if it `adds`.
///
/// It adds all contributions to a chunk in one pass. It takes them in order and rounds after each addition,
/// so the sum has the same bits as if they had been added in one pass each.
///
/// # Panics
/// If a source is not as long as the sum, or there is nothing to add up.
pub fn gather(sum: &mut [f32], adds: bool, sources: &[Floats<'_>]) {
    assert!(adds || !sources.is_empty(), "a sum needs a contribution");
    assert!(sources.iter().all(|source| source.len == sum.len()), "contributions are as long as their sum");
    match Isa::best().body() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the instruction set was detected; every source is as long as the sum and valid while
        // borrowed.
        Body::Avx512 => unsafe { x86::gather_avx512(sum, adds, sources) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Body::Avx2 => unsafe { x86::gather_avx2(sum, adds, sources) },
        _ => gather_from(0, sum, adds, sources),
    }
}

/// Does the work of [`gather`] for the elements from `first` on, a tile at a time. Bodies with vectors leave
/// it the elements that fill no more vectors.
fn gather_from(first: usize, sum: &mut [f32], adds: bool, sources: &[Floats<'_>]) {
    let mut tile = [0.0; 256];
    for start in (first..sum.len()).step_by(tile.len()) {
        let end = sum.len().min(start + tile.len());
        for (number, source) in sources.iter().enumerate() {
            let tile = &mut tile[..end - start];
            let from = source.start.wrapping_add(start * size_of::<f32>());
            // SAFETY: `start..end` is within the source, which is as long as the sum.
            unsafe { copy(from, tile.as_mut_ptr().cast(), size_of_val(tile)) };
            for (total, value) in sum[start..end].iter_mut().zip(tile) {
                *total = if number == 0 && !adds { *value } else { *total + *value };
            }
        }
    }
}

/// Orders every [`stream_out`] of this thread before its next writes: streaming stores overtake ordinary
/// ones, even those with release ordering.
pub fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Copies `length` bytes with the widest vectors that this CPU has.
///
/// # Safety
/// Both pointers are valid for `length` bytes and the ranges do not overlap.
unsafe fn copy(source: *const u8, target: *mut u8, length: usize) {
    match Isa::best().body() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's ranges; the instruction set was detected.
        Body::Avx512 => unsafe { x86::copy_avx512(source, target, length) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's ranges; the instruction set was detected.
        Body::Avx2 => unsafe { x86::copy_avx2(source, target, length) },
        // SAFETY: the caller's ranges.
        _ => unsafe { copy_volatile(source, target, length) },
    }
}

/// Copies `length` bytes: the whole lines of the target past the caches, and what is before and behind them
/// with ordinary stores.
///
/// # Safety
/// As [`copy`].
unsafe fn stream_bytes(source: *const u8, target: *mut u8, length: usize) {
    let head_bytes = (target.addr().next_multiple_of(LINE_BYTES) - target.addr()).min(length);
    let middle_bytes = (length - head_bytes) / LINE_BYTES * LINE_BYTES;
    let done_bytes = head_bytes + middle_bytes;
    // SAFETY: the three pieces follow each other within `length` bytes, which the caller guarantees.
    unsafe { copy_volatile(source, target, head_bytes) };
    // SAFETY: as above, and the middle's target is a multiple of 64, as streaming stores require.
    unsafe { stream_lines(source.wrapping_add(head_bytes), target.wrapping_add(head_bytes), middle_bytes) };
    // SAFETY: as above.
    unsafe {
        copy_volatile(source.wrapping_add(done_bytes), target.wrapping_add(done_bytes), length - done_bytes)
    };
}

/// Copies past the caches, with the widest vectors that this CPU has.
///
/// # Safety
/// As [`copy`], and `target` is a multiple of 64.
unsafe fn stream_lines(source: *const u8, target: *mut u8, length: usize) {
    match Isa::best().body() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's ranges and alignment; the instruction set was detected.
        Body::Avx512 => unsafe { x86::stream_avx512(source, target, length) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's ranges and alignment; the instruction set was detected.
        Body::Avx2 => unsafe { x86::stream_avx2(source, target, length) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's ranges and alignment; every x86-64 has the instruction set.
        Body::Baseline => unsafe { x86::stream_sse2(source, target, length) },
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: the caller's ranges.
        _ => unsafe { copy_volatile(source, target, length) },
    }
}

/// Copies word by word, and the rest byte by byte. The accesses are volatile, so that each byte is read once
/// and the compiler assumes nothing of its value.
///
/// # Safety
/// Both pointers are valid for `length` bytes and the ranges do not overlap.
unsafe fn copy_volatile(source: *const u8, target: *mut u8, length: usize) {
    type Word = [u8; 8];
    let words = length / size_of::<Word>() * size_of::<Word>();
    for at in (0..words).step_by(size_of::<Word>()) {
        // SAFETY: the word ends at or before `length`; bytes have no alignment.
        let word = unsafe { source.wrapping_add(at).cast::<Word>().read_volatile() };
        // SAFETY: as above.
        unsafe { target.wrapping_add(at).cast::<Word>().write_volatile(word) };
    }
    for at in words..length {
        // SAFETY: `at < length`.
        let byte = unsafe { source.wrapping_add(at).read_volatile() };
        // SAFETY: as above.
        unsafe { target.wrapping_add(at).write_volatile(byte) };
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{AHEAD_ELEMENTS, Floats, LINE_BYTES, copy_volatile, gather_from, prefetch_line};

    /// Defines a copy loop, which loads and stores whole vectors, and leaves the rest to [`copy_volatile`].
    macro_rules! copy {
        ($(#[$attribute:meta])* $name:ident, $vector:ty, $zero:ident, $load:ident, $store:ident) => {
            $(#[$attribute])*
            /// # Safety
            /// The CPU has the instruction set; both pointers are valid for `length` bytes and the ranges do
            /// not overlap; a streaming store's target is aligned to its vector.
            pub(super) unsafe fn $name(source: *const u8, target: *mut u8, length: usize) {
                const VECTOR: usize = size_of::<$vector>();
                const LOADS: usize = LINE_BYTES / VECTOR * 2;
                let mut at = 0;
                // Loops, not iterators: a closure that is not inlined here would lose the instruction set.
                while at + LOADS * VECTOR <= length {
                    let mut vectors = [$zero(); LOADS];
                    for i in 0..LOADS {
                        let from = source.wrapping_add(at + i * VECTOR);
                        // SAFETY: the vector ends at or before `length`; loads need no alignment.
                        vectors[i] = unsafe { $load(from.cast()) };
                    }
                    for i in 0..LOADS {
                        let to = target.wrapping_add(at + i * VECTOR);
                        // SAFETY: as above; a streaming store's alignment is the caller's duty.
                        unsafe { $store(to.cast(), vectors[i]) };
                    }
                    at += LOADS * VECTOR;
                }
                while at + VECTOR <= length {
                    // SAFETY: as above.
                    let vector = unsafe { $load(source.wrapping_add(at).cast()) };
                    // SAFETY: as above.
                    unsafe { $store(target.wrapping_add(at).cast(), vector) };
                    at += VECTOR;
                }
                // SAFETY: the rest of both ranges.
                unsafe { copy_volatile(source.wrapping_add(at), target.wrapping_add(at), length - at) };
            }
        };
    }

    copy!(
        #[target_feature(enable = "avx512f")]
        copy_avx512,
        __m512i,
        _mm512_setzero_si512,
        _mm512_loadu_si512,
        _mm512_storeu_si512
    );
    copy!(
        #[target_feature(enable = "avx2")]
        copy_avx2,
        __m256i,
        _mm256_setzero_si256,
        _mm256_loadu_si256,
        _mm256_storeu_si256
    );
    copy!(
        #[target_feature(enable = "avx512f")]
        stream_avx512,
        __m512i,
        _mm512_setzero_si512,
        _mm512_loadu_si512,
        _mm512_stream_si512
    );
    copy!(
        #[target_feature(enable = "avx2")]
        stream_avx2,
        __m256i,
        _mm256_setzero_si256,
        _mm256_loadu_si256,
        _mm256_stream_si256
    );
    copy!(
        #[target_feature(enable = "sse2")]
        stream_sse2,
        __m128i,
        _mm_setzero_si128,
        _mm_loadu_si128,
        _mm_stream_si128
    );

    /// Defines a sum loop, which keeps eight vectors of the sum in registers while it adds every source to
    /// them.
    macro_rules! gather {
        ($(#[$attribute:meta])* $name:ident, $vector:ty, $zero:ident, $load:ident, $store:ident, $add:ident) => {
            $(#[$attribute])*
            /// # Safety
            /// The CPU has the instruction set; every source is as long as the sum.
            pub(super) unsafe fn $name(sum: &mut [f32], adds: bool, sources: &[Floats<'_>]) {
                const LANES: usize = size_of::<$vector>() / size_of::<f32>();
                const VECTORS: usize = 8;
                let mut at = 0;
                while at + VECTORS * LANES <= sum.len() {
                    let into = sum[at..at + VECTORS * LANES].as_mut_ptr();
                    let mut total = [$zero(); VECTORS];
                    let first = if adds { into.cast_const() } else { sources[0].start.cast::<f32>().wrapping_add(at) };
                    for i in 0..VECTORS {
                        prefetch_line(first.wrapping_add(i * LANES + AHEAD_ELEMENTS).cast());
                        // SAFETY: within the sum, and so within a source as long; loads need no alignment.
                        total[i] = unsafe { $load(first.wrapping_add(i * LANES)) };
                    }
                    for source in &sources[usize::from(!adds)..] {
                        let from = source.start.cast::<f32>().wrapping_add(at);
                        for i in 0..VECTORS {
                            prefetch_line(from.wrapping_add(i * LANES + AHEAD_ELEMENTS).cast());
                            // SAFETY: as above.
                            let next = unsafe { $load(from.wrapping_add(i * LANES)) };
                            total[i] = $add(total[i], next);
                        }
                    }
                    for i in 0..VECTORS {
                        // SAFETY: within the slice `into` was made of; stores need no alignment.
                        unsafe { $store(into.wrapping_add(i * LANES), total[i]) };
                    }
                    at += VECTORS * LANES;
                }
                gather_from(at, sum, adds, sources);
            }
        };
    }

    gather!(
        #[target_feature(enable = "avx512f")]
        gather_avx512,
        __m512,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_add_ps
    );
    gather!(
        #[target_feature(enable = "avx2")]
        gather_avx2,
        __m256,
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_add_ps
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_arrives_and_nothing_beyond_it() {
        let source: Vec<u8> = (0..1200_u32).map(|at| (at * 31 % 251) as u8).collect();
        for length in (0..300).chain([511, 512, 513, 1024, 1100]) {
            for shift in [0, 1, 3, 4, 16, 63] {
                for out in [copy_out as unsafe fn(&[u8], *mut u8), stream_out] {
                    let (mut there, mut back) = (vec![0xee; 1300], vec![0xee; 1300]);
                    let at = there.as_mut_ptr().wrapping_add(shift);
                    // SAFETY: `there` has `shift + length` bytes.
                    unsafe { out(&source[shift..shift + length], at) };
                    fence();
                    // SAFETY: as above.
                    unsafe { copy_in(at, &mut back[..length]) };
                    assert_eq!(there[shift..shift + length], source[shift..shift + length]);
                    assert_eq!(back[..length], source[shift..shift + length]);
                    assert!(there[..shift].iter().chain(&there[shift + length..]).all(|&byte| byte == 0xee));
                    assert!(back[length..].iter().all(|&byte| byte == 0xee));
                }
            }
        }
    }

    #[test]
    fn one_pass_makes_the_bits_of_adding_one_after_the_other() {
        for len in [0, 1, 15, 64, 127, 128, 129, 700] {
            for shift in [0, 1, 4] {
                let contributions: Vec<Vec<u8>> = (0..5_u32)
                    .map(|rank| {
                        let values =
                            (0..len as u32).map(|at| ((at * 37 + rank * 101) % 997) as f32 / 7.0 - 60.0);
                        vec![0; shift].into_iter().chain(values.flat_map(f32::to_le_bytes)).collect()
                    })
                    .collect();
                let sources: Vec<Floats<'_>> = contributions
                    .iter()
                    // SAFETY: each has `shift` bytes and `len` elements, and outlives the sources.
                    .map(|bytes| unsafe { Floats::new(bytes[shift..].as_ptr(), len) })
                    .collect();
                for adds in [false, true] {
                    let begin = vec![0.1_f32; len];
                    let mut expected = begin.clone();
                    for (number, bytes) in contributions.iter().enumerate() {
                        for (total, value) in expected.iter_mut().zip(bytes[shift..].chunks(4)) {
                            let value = f32::from_le_bytes(value.try_into().unwrap());
                            *total = if number == 0 && !adds { value } else { *total + value };
                        }
                    }
                    type Body = unsafe fn(&mut [f32], bool, &[Floats<'_>]);
                    let mut bodies: Vec<Body> =
                        vec![gather, |sum, adds, from| gather_from(0, sum, adds, from)];
                    #[cfg(target_arch = "x86_64")]
                    if is_x86_feature_detected!("avx2") {
                        bodies.push(x86::gather_avx2);
                    }
                    for body in bodies {
                        let mut sum = begin.clone();
                        // SAFETY: the sources are as long as the sum; the CPU has the set.
                        unsafe { body(&mut sum, adds, &sources) };
                        assert_eq!(sum, expected, "{len} elements, adds {adds}");
                    }
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_body_copies_alike() {
        let source: Vec<u8> = (0..777_u32).map(|at| (at * 7) as u8).collect();
        type Body = unsafe fn(*const u8, *mut u8, usize);
        let mut bodies: Vec<(bool, Body)> = vec![(true, copy_volatile), (true, x86::stream_sse2)];
        let (avx2, avx512) = (is_x86_feature_detected!("avx2"), is_x86_feature_detected!("avx512f"));
        bodies.extend([(avx2, x86::copy_avx2 as Body), (avx2, x86::stream_avx2)]);
        bodies.extend([(avx512, x86::copy_avx512 as Body), (avx512, x86::stream_avx512)]);
        for (_, body) in bodies.into_iter().filter(|(present, _)| *present) {
            let mut target = vec![0_u8; 1024];
            let start = target.as_ptr().align_offset(64);
            let at = target.as_mut_ptr().wrapping_add(start);
            // SAFETY: the CPU has the set; `start` is at most 63, so that 777 bytes fit; `at` is a multiple
            // of 64.
            unsafe { body(source.as_ptr(), at, source.len()) };
            fence();
            assert_eq!(target[start..start + source.len()], source);
        }
    }
}
