//! Copies between a process's own memory and memory that another process may read and write meanwhile.
//!
//! No reference to such memory is ever made: it is read once, through raw pointers, into memory nobody else can touch,
//! and only that copy is looked at. Whatever the other side writes meanwhile, the copy holds some bytes and nothing worse
//! happens.
//!
//! These loops stand where `memcpy` would: it picks `rep movsb` for such sizes, which some processors run at a fifteenth of
//! their speed where the target lies less than 16 bytes behind the source, modulo the page size.

#[cfg(target_arch = "x86_64")]
use crate::dispatch::Body;
use crate::dispatch::Isa;

/// Bytes moved by one turn of a loop; targets are brought to a multiple of it first.
const LINE_BYTES: usize = 64;

/// Copies `target.len()` bytes from `source`, which another process may write to meanwhile.
///
/// # Safety
/// `source` is valid for reads of `target.len()` bytes, mapped for as long as this runs, and does not overlap `target`.
/// That its bytes may change while they are read is allowed for.
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

/// [`copy_out`] past the caches: this side will not read the target again, and lines that are overwritten whole need not be
/// fetched first. Call [`fence`] before telling the other side.
///
/// # Safety
/// As [`copy_out`].
pub unsafe fn stream_out(source: &[u8], target: *mut u8) {
    let head = target.align_offset(LINE_BYTES).min(source.len());
    let body = (source.len() - head) / LINE_BYTES * LINE_BYTES;
    let pieces = [(0, head), (head, body), (head + body, source.len() - head - body)];
    let [first, middle, last] =
        pieces.map(|(at, length)| (source.as_ptr().wrapping_add(at), target.wrapping_add(at), length));
    // SAFETY: the three pieces lie one behind the other within `source.len()` bytes, which the caller vouches for at
    // `target`.
    unsafe { copy_volatile(first.0, first.1, first.2) };
    // SAFETY: as above, and the middle's target is a multiple of 64, as streaming stores want it.
    unsafe { stream(middle.0, middle.1, middle.2) };
    // SAFETY: as above.
    unsafe { copy_volatile(last.0, last.1, last.2) };
}

/// Orders every [`stream_out`] of this thread before whatever it writes next: streaming stores overtake ordinary ones, even
/// those with release ordering.
pub fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// # Safety
/// Both pointers are valid for `length` bytes and the ranges do not overlap.
unsafe fn copy(source: *const u8, target: *mut u8, length: usize) {
    match Isa::best().body() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's ranges; the set was detected.
        Body::Avx512 => unsafe { x86::copy_avx512(source, target, length) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's ranges; the set was detected.
        Body::Avx2 => unsafe { x86::copy_avx2(source, target, length) },
        // SAFETY: the caller's ranges.
        _ => unsafe { copy_volatile(source, target, length) },
    }
}

/// # Safety
/// As [`copy`], and `target` is a multiple of 64.
unsafe fn stream(source: *const u8, target: *mut u8, length: usize) {
    match Isa::best().body() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's ranges and alignment; the set was detected.
        Body::Avx512 => unsafe { x86::stream_avx512(source, target, length) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's ranges and alignment; the set was detected.
        Body::Avx2 => unsafe { x86::stream_avx2(source, target, length) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's ranges and alignment; every x86-64 has the set.
        Body::Baseline => unsafe { x86::stream_sse2(source, target, length) },
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: the caller's ranges.
        _ => unsafe { copy_volatile(source, target, length) },
    }
}

/// Word by word, then byte by byte; volatile, so that each is read once and nothing is assumed of it.
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

    use super::{LINE_BYTES, copy_volatile};

    /// One copy loop: load and store whole vectors, the rest byte by byte.
    macro_rules! copy {
        ($(#[$attribute:meta])* $name:ident, $vector:ty, $load:ident, $store:ident) => {
            $(#[$attribute])*
            /// # Safety
            /// The CPU has the set; both pointers are valid for `length` bytes and the ranges do not overlap; a
            /// streaming store's target is aligned to its vector.
            pub(super) unsafe fn $name(source: *const u8, target: *mut u8, length: usize) {
                const VECTOR: usize = size_of::<$vector>();
                const LOADS: usize = LINE_BYTES / VECTOR * 2;
                let mut at = 0;
                while at + LOADS * VECTOR <= length {
                    let vectors: [$vector; LOADS] = std::array::from_fn(|i| {
                        let from = source.wrapping_add(at + i * VECTOR);
                        // SAFETY: the vector ends at or before `length`; loads need no alignment.
                        unsafe { $load(from.cast()) }
                    });
                    for (i, vector) in vectors.into_iter().enumerate() {
                        let to = target.wrapping_add(at + i * VECTOR);
                        // SAFETY: as above; a streaming store's alignment is the caller's duty.
                        unsafe { $store(to.cast(), vector) };
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
                // SAFETY: what is left of both ranges.
                unsafe { copy_volatile(source.wrapping_add(at), target.wrapping_add(at), length - at) };
            }
        };
    }

    copy!(
        #[target_feature(enable = "avx512f")]
        copy_avx512,
        __m512i,
        _mm512_loadu_si512,
        _mm512_storeu_si512
    );
    copy!(
        #[target_feature(enable = "avx2")]
        copy_avx2,
        __m256i,
        _mm256_loadu_si256,
        _mm256_storeu_si256
    );
    copy!(
        #[target_feature(enable = "avx512f")]
        stream_avx512,
        __m512i,
        _mm512_loadu_si512,
        _mm512_stream_si512
    );
    copy!(
        #[target_feature(enable = "avx2")]
        stream_avx2,
        __m256i,
        _mm256_loadu_si256,
        _mm256_stream_si256
    );
    copy!(stream_sse2, __m128i, _mm_loadu_si128, _mm_stream_si128);
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
                    // SAFETY: `there` holds `shift + length` bytes.
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
            // SAFETY: the set is here; `start` is at most 63, so that 777 bytes fit; `at` is a multiple of 64.
            unsafe { body(source.as_ptr(), at, source.len()) };
            fence();
            assert_eq!(target[start..start + source.len()], source);
        }
    }
}
