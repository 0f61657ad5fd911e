//! Converts f32 to and from f16 and bf16, and slices to and from f16.
//!
//! The scalar forms have no branches, so a loop over them vectorises. Those of f16 give the same bits as the F16C
//! instructions for every input, including NaNs. All give the same bits in a process that flushes subnormals
//! (`torch.set_flush_denormal`): a subnormal f32 rounds to zero in f16 either way.

use crate::dispatch::{Body, Isa};

const F32_INFINITY: u32 = 0x7f80_0000;
const F32_QUIET: u32 = 0x0040_0000;
const F32_SIGN: u32 = 0x8000_0000;
const F16_INFINITY: u32 = 0x7c00;
const F16_QUIET: u32 = 0x0200;
/// 2^-14, the smallest normal f16, as f32 bits.
const F16_NORMAL_MIN: u32 = (127 - 14) << 23;
/// 2^16, from which on every f32 rounds to an infinite f16, as f32 bits.
const F16_OVERFLOW: u32 = (127 + 16) << 23;

/// Exact. A signalling NaN becomes quiet and keeps its payload.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let sign = (u32::from(bits) & 0x8000) << 16;
    let shifted = (u32::from(bits) & 0x7fff) << 13;
    let normal = shifted + ((127 - 15) << 23);
    let not_finite = shifted | F32_INFINITY;
    let not_finite = if shifted > F16_INFINITY << 13 { not_finite | F32_QUIET } else { not_finite };
    // Read with the exponent -14, the mantissa is the subnormal plus 2^-14; subtracting that is exact.
    let subnormal = (f32::from_bits(shifted | F16_NORMAL_MIN) - f32::from_bits(F16_NORMAL_MIN)).to_bits();
    let magnitude = if shifted >= F16_INFINITY << 13 {
        not_finite
    } else if shifted >= 0x0400 << 13 {
        normal
    } else {
        subnormal
    };
    f32::from_bits(sign | magnitude)
}

/// Rounds to the nearest, ties to even; overflow gives infinity. A NaN becomes quiet and keeps the upper
/// nine bits of its payload.
#[inline(always)]
pub(crate) fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits & F32_SIGN) >> 16;
    let magnitude = bits & !F32_SIGN;
    let nan = F16_INFINITY | F16_QUIET | ((magnitude >> 13) & 0x03ff);
    let not_finite = if magnitude > F32_INFINITY { nan } else { F16_INFINITY };
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0x0fff + odd) >> 13;
    // Adding 0.5 puts the last bit of the sum at 2^-24, the smallest f16, so the adder does the rounding.
    let half = 0.5_f32;
    let subnormal = (f32::from_bits(magnitude) + half).to_bits().wrapping_sub(half.to_bits());
    let rounded = if magnitude >= F16_OVERFLOW {
        not_finite
    } else if magnitude >= F16_NORMAL_MIN {
        normal
    } else {
        subnormal
    };
    (sign | rounded) as u16
}

/// Exact: it keeps every bit, also those of a NaN.
#[inline(always)]
pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds to the nearest, ties to even; overflow gives infinity. A NaN becomes quiet and keeps the upper
/// six bits of its payload.
#[inline(always)]
pub(crate) fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let odd = (bits >> 16) & 1;
    let rounded = bits.wrapping_add(0x7fff + odd) >> 16;
    let nan = (bits | F32_QUIET) >> 16;
    (if bits & !F32_SIGN > F32_INFINITY { nan } else { rounded }) as u16
}

/// `out[i] = wire[i]`; both have the same length.
pub(crate) fn decode_f16(isa: Isa, out: &mut [f32], wire: &[[u8; 2]]) {
    match isa.body() {
        Body::Baseline => decode_f16_portable(out, wire),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this kind exists only where its features were detected.
        Body::Avx2 => unsafe { avx2::decode(out, wire) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this kind exists only where its features were detected.
        Body::Avx512 => unsafe { avx512::decode(out, wire) },
    }
}

/// `sum[i] += wire[i]`; both have the same length.
pub(crate) fn add_f16(isa: Isa, sum: &mut [f32], wire: &[[u8; 2]]) {
    match isa.body() {
        Body::Baseline => add_f16_portable(sum, wire),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this kind exists only where its features were detected.
        Body::Avx2 => unsafe { avx2::add(sum, wire) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this kind exists only where its features were detected.
        Body::Avx512 => unsafe { avx512::add(sum, wire) },
    }
}

/// `wire[i] = model[i]`, rounded; both have the same length.
pub(crate) fn encode_f16(isa: Isa, model: &[f32], wire: &mut [[u8; 2]]) {
    match isa.body() {
        Body::Baseline => encode_f16_portable(model, wire),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this kind exists only where its features were detected.
        Body::Avx2 => unsafe { avx2::encode(model, wire) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this kind exists only where its features were detected.
        Body::Avx512 => unsafe { avx512::encode(model, wire) },
    }
}

fn decode_f16_portable(out: &mut [f32], wire: &[[u8; 2]]) {
    for (value, bytes) in out.iter_mut().zip(wire) {
        *value = f16_to_f32(u16::from_le_bytes(*bytes));
    }
}

fn add_f16_portable(sum: &mut [f32], wire: &[[u8; 2]]) {
    for (total, bytes) in sum.iter_mut().zip(wire) {
        *total += f16_to_f32(u16::from_le_bytes(*bytes));
    }
}

fn encode_f16_portable(model: &[f32], wire: &mut [[u8; 2]]) {
    for (value, bytes) in model.iter().zip(wire) {
        *bytes = f32_to_f16(*value).to_le_bytes();
    }
}

/// The three loops over one module's vectors, with the scalar forms for the tail.
#[cfg(target_arch = "x86_64")]
macro_rules! f16c_loops {
    ($features:literal, $lanes:literal) => {
        #[target_feature(enable = $features)]
        pub(super) fn decode(out: &mut [f32], wire: &[[u8; 2]]) {
            let (out_blocks, out_tail) = out.as_chunks_mut::<$lanes>();
            let (wire_blocks, wire_tail) = wire.as_chunks::<$lanes>();
            for (values, halves) in out_blocks.iter_mut().zip(wire_blocks) {
                store(values, widen(halves));
            }
            for (value, bytes) in out_tail.iter_mut().zip(wire_tail) {
                *value = f16_to_f32(u16::from_le_bytes(*bytes));
            }
        }

        #[target_feature(enable = $features)]
        pub(super) fn add(sum: &mut [f32], wire: &[[u8; 2]]) {
            let (sum_blocks, sum_tail) = sum.as_chunks_mut::<$lanes>();
            let (wire_blocks, wire_tail) = wire.as_chunks::<$lanes>();
            for (totals, halves) in sum_blocks.iter_mut().zip(wire_blocks) {
                store(totals, plus(load(totals), widen(halves)));
            }
            for (total, bytes) in sum_tail.iter_mut().zip(wire_tail) {
                *total += f16_to_f32(u16::from_le_bytes(*bytes));
            }
        }

        #[target_feature(enable = $features)]
        pub(super) fn encode(model: &[f32], wire: &mut [[u8; 2]]) {
            let (model_blocks, model_tail) = model.as_chunks::<$lanes>();
            let (wire_blocks, wire_tail) = wire.as_chunks_mut::<$lanes>();
            for (values, halves) in model_blocks.iter().zip(wire_blocks) {
                narrow(load(values), halves);
            }
            for (value, bytes) in model_tail.iter().zip(wire_tail) {
                *bytes = f32_to_f16(*value).to_le_bytes();
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{f16_to_f32, f32_to_f16};

    f16c_loops!("avx2,f16c", 8);

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn load(values: &[f32; 8]) -> __m256 {
        // SAFETY: the reference covers the 32 bytes read; the load needs no alignment.
        unsafe { _mm256_loadu_ps(values.as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn store(values: &mut [f32; 8], vector: __m256) {
        // SAFETY: the reference covers the 32 bytes written; the store needs no alignment.
        unsafe { _mm256_storeu_ps(values.as_mut_ptr(), vector) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn plus(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn widen(halves: &[[u8; 2]; 8]) -> __m256 {
        // SAFETY: the reference covers the 16 bytes read; the load needs no alignment.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(halves.as_ptr().cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn narrow(vector: __m256, halves: &mut [[u8; 2]; 8]) {
        let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector);
        // SAFETY: the reference covers the 16 bytes written; the store needs no alignment.
        unsafe { _mm_storeu_si128(halves.as_mut_ptr().cast(), rounded) }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::{f16_to_f32, f32_to_f16};

    f16c_loops!("avx512f,avx512bw,avx512dq,avx512vl", 16);

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(values: &[f32; 16]) -> __m512 {
        // SAFETY: the reference covers the 64 bytes read; the load needs no alignment.
        unsafe { _mm512_loadu_ps(values.as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store(values: &mut [f32; 16], vector: __m512) {
        // SAFETY: the reference covers the 64 bytes written; the store needs no alignment.
        unsafe { _mm512_storeu_ps(values.as_mut_ptr(), vector) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn plus(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn widen(halves: &[[u8; 2]; 16]) -> __m512 {
        // SAFETY: the reference covers the 32 bytes read; the load needs no alignment.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(halves.as_ptr().cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn narrow(vector: __m512, halves: &mut [[u8; 2]; 16]) {
        let rounded = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector);
        // SAFETY: the reference covers the 32 bytes written; the store needs no alignment.
        unsafe { _mm256_storeu_si256(halves.as_mut_ptr().cast(), rounded) }
    }
}
