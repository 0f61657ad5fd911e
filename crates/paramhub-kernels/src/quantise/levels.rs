//! One or two bits an element (Seide et al., "1-bit stochastic gradient descent and its application to
//! data-parallel distributed training of speech DNNs", Interspeech 2014).
//!
//! The values of a block are split at their mean; with two bits each half is split at its own mean again. Each
//! class decodes to the mean of its values, rounded to bf16, so a block keeps its sum except for that rounding.
//!
//! A block with a NaN or an infinity has at least one level that is not finite, and so does a block in which a
//! sum of values overflows or a mean rounds to an infinite bf16. The values of that class decode to it, while
//! others of the block may stay finite.

use paramhub_core::codec::{BLOCK_ELEMENTS_MAX, Codec, QuantisedCodec, QuantisedFormat};

use crate::dispatch::{Isa, kernel};
use crate::half_precision::{bf16_to_f32, f32_to_bf16};

/// The number of running sums. It is the same in every body, so that all of them round alike.
const LANES: usize = 16;

/// One bit (`BITS` is 1) or two bits an element, by the bodies for an instruction set.
pub(super) struct Levels<const BITS: usize>(pub(super) Isa);

impl<const BITS: usize> QuantisedCodec for Levels<BITS> {
    fn format(&self) -> &'static QuantisedFormat {
        match if BITS == 1 { Codec::ONE_BIT } else { Codec::TWO_BIT } {
            Codec::Quantised(format) => format,
            _ => unreachable!("both are quantised"),
        }
    }

    fn encode(&self, values: &[f32], head: &mut [u8], elements: &mut [u8]) {
        self.encode_and_decode(values, head, elements, &mut [0.0; BLOCK_ELEMENTS_MAX][..values.len()]);
    }

    fn encode_and_decode(&self, values: &[f32], head: &mut [u8], elements: &mut [u8], decoded: &mut [f32]) {
        let levels = head.as_chunks_mut().0;
        match BITS {
            1 => encode_1(self.0, values, decoded, levels, elements),
            _ => encode_2(self.0, values, decoded, levels, elements),
        }
    }

    fn decode(&self, head: &[u8], elements: &[u8], out: &mut [f32]) {
        let levels = head.as_chunks().0;
        match BITS {
            1 => decode_1(self.0, levels, elements, out),
            _ => decode_2(self.0, levels, elements, out),
        }
    }

    fn is_finite(&self, head: &[u8]) -> bool {
        head.as_chunks().0.iter().all(|level| bf16_to_f32(u16::from_le_bytes(*level)).is_finite())
    }
}

kernel! {
    fn encode_1(values: &[f32], rebuilt: &mut [f32], levels: &mut [[u8; 2]], numbers: &mut [u8]) {
        quantise::<1>(values, rebuilt, levels, numbers);
    }
}

kernel! {
    fn encode_2(values: &[f32], rebuilt: &mut [f32], levels: &mut [[u8; 2]], numbers: &mut [u8]) {
        quantise::<2>(values, rebuilt, levels, numbers);
    }
}

kernel! {
    fn decode_1(levels: &[[u8; 2]], numbers: &[u8], out: &mut [f32]) {
        rebuild::<1>(levels, numbers, out);
    }
}

kernel! {
    fn decode_2(levels: &[[u8; 2]], numbers: &[u8], out: &mut [f32]) {
        rebuild::<2>(levels, numbers, out);
    }
}

/// Splits a block into classes, and writes their levels, the class of each value and the value that it
/// decodes to.
#[inline(always)]
fn quantise<const BITS: usize>(
    values: &[f32],
    rebuilt: &mut [f32],
    levels: &mut [[u8; 2]],
    numbers: &mut [u8],
) {
    let mean = mean_where(values, |_| true);
    // The comparison is not `<=`: a NaN must belong to a class.
    let low = mean_where(values, |value| u32::from(value > mean) == 0);
    let high = mean_where(values, |value| value > mean);
    // The class of a value is the number of splits below it; with one bit there is a single split, at the
    // mean. There are no branches, since random values cannot be predicted.
    let class_of = move |value: f32| match BITS {
        1 => u32::from(value > mean),
        _ => u32::from(value > low) + u32::from(value > mean) + u32::from(value > high),
    };
    let mut means = [low, high, 0.0, 0.0];
    if BITS == 2 {
        for (mean, class) in means.iter_mut().zip(0..) {
            *mean = mean_where(values, |value| class_of(value) == class);
        }
    }
    let encoded = means.map(f32_to_bf16);
    let level = encoded.map(bf16_to_f32);
    for (wire, encoded) in levels.iter_mut().zip(encoded) {
        *wire = encoded.to_le_bytes();
    }
    let mut classes = [0_u8; BLOCK_ELEMENTS_MAX];
    for (class, value) in classes.iter_mut().zip(values) {
        *class = class_of(*value) as u8;
    }
    for (rebuilt, class) in rebuilt.iter_mut().zip(&classes) {
        *rebuilt = pick::<BITS>(level, u32::from(*class));
    }
    pack::<BITS>(&classes, numbers);
}

/// The mean of the values for which `belongs` holds, 0 if there are none.
#[inline(always)]
fn mean_where(values: &[f32], belongs: impl Fn(f32) -> bool) -> f32 {
    let mut sums = [0.0_f32; LANES];
    let (strides, left) = values.as_chunks::<LANES>();
    for stride in strides {
        for (sum, value) in sums.iter_mut().zip(stride) {
            *sum += if belongs(*value) { *value } else { 0.0 };
        }
    }
    for (sum, value) in sums.iter_mut().zip(left) {
        *sum += if belongs(*value) { *value } else { 0.0 };
    }
    // Wrapping, although it cannot wrap: a check of every addition would prevent vectorisation.
    let count = values.iter().fold(0_u32, |count, value| count.wrapping_add(u32::from(belongs(*value))));
    if count == 0 { 0.0 } else { sums.iter().sum::<f32>() / count as f32 }
}

#[inline(always)]
fn pick<const BITS: usize>(levels: [f32; 4], class: u32) -> f32 {
    let (low, high) = (class & 1 == 0, class & 2 == 0);
    let lower = if low { levels[0] } else { levels[1] };
    if BITS == 1 {
        return lower;
    }
    let upper = if low { levels[2] } else { levels[3] };
    if high { lower } else { upper }
}

/// Packs classes side by side, the first in the lowest bits. A multiplication collects the classes of one
/// byte in its highest bits: every class meets every shift, and no two results share a bit.
#[inline(always)]
fn pack<const BITS: usize>(classes: &[u8; BLOCK_ELEMENTS_MAX], packed: &mut [u8]) {
    if BITS == 1 {
        for (byte, eight) in packed.iter_mut().zip(classes.as_chunks().0) {
            *byte = (u64::from_le_bytes(*eight).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8;
        }
    } else {
        for (byte, four) in packed.iter_mut().zip(classes.as_chunks().0) {
            *byte = (u32::from_le_bytes(*four).wrapping_mul(0x0104_1040) >> 24) as u8;
        }
    }
}

/// Decodes a block.
#[inline(always)]
fn rebuild<const BITS: usize>(levels: &[[u8; 2]], numbers: &[u8], out: &mut [f32]) {
    let mut level = [0.0; 4];
    for (level, wire) in level.iter_mut().zip(levels) {
        *level = bf16_to_f32(u16::from_le_bytes(*wire));
    }
    let per_byte = 8 / BITS;
    let in_byte = |values: &mut [f32], byte: u8| {
        for (index, value) in values.iter_mut().enumerate() {
            *value = pick::<BITS>(level, u32::from(byte) >> (index * BITS));
        }
    };
    let whole = out.len() / per_byte;
    let mut chunks = out.chunks_exact_mut(per_byte);
    for (values, byte) in chunks.by_ref().zip(numbers) {
        in_byte(values, *byte);
    }
    if let Some(last) = numbers.get(whole) {
        in_byte(chunks.into_remainder(), *last);
    }
}
