//! One or two bits per element, with the loss kept for the next time (Seide et al., "1-bit stochastic
//! gradient descent and its application to data-parallel distributed training of speech DNNs", Interspeech
//! 2014).
//!
//! The values of a block of [`QUANTISED_BLOCK_ELEMENTS`] are split at their mean; with two bits each half is
//! split at its own mean again. Each class decodes to the mean of its values, rounded to bf16, so a block
//! keeps its sum except for that rounding. Decoding needs no memory:
//! [`convert::decode`](crate::convert::decode), [`sum::assign`](crate::sum::assign) and
//! [`sum::add`](crate::sum::add) do it, as for every other codec.
//!
//! A block with a NaN or an infinity has at least one level that is not finite, and so does a block in which a
//! sum of values overflows or a mean rounds to an infinite bf16. The values of that class decode to it, while
//! others of the block may stay finite. [`first_non_finite`] finds the block.

use paramhub_core::codec::{Codec, QUANTISED_BLOCK_ELEMENTS};

use crate::dispatch::{Isa, kernel};
use crate::half_precision::{bf16_to_f32, f32_to_bf16};

const BLOCK: usize = QUANTISED_BLOCK_ELEMENTS;
/// The number of running sums. It is the same in every body, so that all of them round alike.
const LANES: usize = 16;

/// Quantises `values[i] + residual[i]` into `wire` and leaves the loss in `residual`.
///
/// # Panics
/// If the codec is not quantised, or the lengths do not fit one another.
pub fn encode(values: &[f32], residual: &mut [f32], wire: &mut [u8], codec: Codec) {
    encode_with(Isa::best(), values, residual, wire, codec);
}

/// [`encode`] by the body for `isa`.
pub fn encode_with(isa: Isa, values: &[f32], residual: &mut [f32], wire: &mut [u8], codec: Codec) {
    assert_eq!(values.len(), residual.len(), "every value has a residual");
    let (levels, numbers) = parts_mut(wire, values.len(), codec);
    match codec {
        Codec::OneBit => feed_back_1(isa, values, residual, levels, numbers),
        _ => feed_back_2(isa, values, residual, levels, numbers),
    }
}

/// Quantises `model[i] - seen[i]` into `wire` and adds the decoded result to `seen`. So `seen` is always what
/// a receiver has that adds up everything encoded here, and the loss remains in the difference.
///
/// # Panics
/// As [`encode`].
pub fn encode_change(model: &[f32], seen: &mut [f32], wire: &mut [u8], codec: Codec) {
    encode_change_with(Isa::best(), model, seen, wire, codec);
}

/// [`encode_change`] by the body for `isa`.
pub fn encode_change_with(isa: Isa, model: &[f32], seen: &mut [f32], wire: &mut [u8], codec: Codec) {
    assert_eq!(model.len(), seen.len(), "every parameter has been seen");
    let (levels, numbers) = parts_mut(wire, model.len(), codec);
    match codec {
        Codec::OneBit => change_1(isa, model, seen, levels, numbers),
        _ => change_2(isa, model, seen, levels, numbers),
    }
}

/// The first element of the first block with a level that is not finite, in a payload of `elements` elements.
///
/// # Panics
/// As [`encode`].
pub fn first_non_finite(wire: &[u8], elements: usize, codec: Codec) -> Option<usize> {
    let levels_a_block = 1 << bits(codec);
    let (levels, _) = parts(wire, elements, codec);
    let is_bad = |level: &[u8; 2]| !bf16_to_f32(u16::from_le_bytes(*level)).is_finite();
    levels.iter().position(is_bad).map(|level| level / levels_a_block * BLOCK)
}

/// `out[i] = wire[first + i]` for a payload of `elements`, where `first` is a multiple of eight.
pub(crate) fn decode_from(
    isa: Isa,
    wire: &[u8],
    elements: usize,
    first: usize,
    out: &mut [f32],
    codec: Codec,
) {
    let (levels, numbers) = parts(wire, elements, codec);
    match codec {
        Codec::OneBit => assign_1(isa, levels, numbers, first, out),
        _ => assign_2(isa, levels, numbers, first, out),
    }
}

/// `sum[i] += wire[i]`.
pub(crate) fn add(isa: Isa, sum: &mut [f32], wire: &[u8], codec: Codec) {
    let (levels, numbers) = parts(wire, sum.len(), codec);
    match codec {
        Codec::OneBit => add_1(isa, levels, numbers, sum),
        _ => add_2(isa, levels, numbers, sum),
    }
}

fn bits(codec: Codec) -> usize {
    codec.quantised_bits().expect("the codec is quantised")
}

/// The levels of a payload, which are the values that its classes decode to, and the packed numbers of the
/// elements' classes.
#[track_caller]
fn parts(wire: &[u8], elements: usize, codec: Codec) -> (&[[u8; 2]], &[u8]) {
    assert_holds(codec, elements, wire.len());
    let (levels, numbers) = wire.split_at(codec.level_bytes(elements));
    (levels.as_chunks().0, numbers)
}

#[track_caller]
fn parts_mut(wire: &mut [u8], elements: usize, codec: Codec) -> (&mut [[u8; 2]], &mut [u8]) {
    assert_holds(codec, elements, wire.len());
    let (levels, numbers) = wire.split_at_mut(codec.level_bytes(elements));
    (levels.as_chunks_mut().0, numbers)
}

#[track_caller]
fn assert_holds(codec: Codec, elements: usize, wire_bytes: usize) {
    assert!(codec.is_quantised(), "{codec} has no levels");
    assert!(
        codec.payload_bytes(elements) == wire_bytes,
        "{wire_bytes} wire bytes do not hold {elements} elements of {codec}"
    );
}

kernel! {
    fn feed_back_1(values: &[f32], residual: &mut [f32], levels: &mut [[u8; 2]], numbers: &mut [u8]) {
        feed_back::<1>(values, residual, levels, numbers);
    }
}

kernel! {
    fn feed_back_2(values: &[f32], residual: &mut [f32], levels: &mut [[u8; 2]], numbers: &mut [u8]) {
        feed_back::<2>(values, residual, levels, numbers);
    }
}

kernel! {
    fn change_1(model: &[f32], seen: &mut [f32], levels: &mut [[u8; 2]], numbers: &mut [u8]) {
        change::<1>(model, seen, levels, numbers);
    }
}

kernel! {
    fn change_2(model: &[f32], seen: &mut [f32], levels: &mut [[u8; 2]], numbers: &mut [u8]) {
        change::<2>(model, seen, levels, numbers);
    }
}

kernel! {
    fn assign_1(levels: &[[u8; 2]], numbers: &[u8], first: usize, out: &mut [f32]) {
        rebuild::<1>(levels, numbers, first, out, |_, value| value);
    }
}

kernel! {
    fn assign_2(levels: &[[u8; 2]], numbers: &[u8], first: usize, out: &mut [f32]) {
        rebuild::<2>(levels, numbers, first, out, |_, value| value);
    }
}

kernel! {
    fn add_1(levels: &[[u8; 2]], numbers: &[u8], sum: &mut [f32]) {
        rebuild::<1>(levels, numbers, 0, sum, |total, value| total + value);
    }
}

kernel! {
    fn add_2(levels: &[[u8; 2]], numbers: &[u8], sum: &mut [f32]) {
        rebuild::<2>(levels, numbers, 0, sum, |total, value| total + value);
    }
}

#[inline(always)]
fn feed_back<const BITS: usize>(
    values: &[f32],
    residual: &mut [f32],
    levels: &mut [[u8; 2]],
    numbers: &mut [u8],
) {
    let mut rebuilt = [0.0; BLOCK];
    let wire = levels.chunks_mut(1 << BITS).zip(numbers.chunks_mut(BLOCK * BITS / 8));
    for ((values, residual), (levels, numbers)) in
        values.chunks(BLOCK).zip(residual.chunks_mut(BLOCK)).zip(wire)
    {
        let rebuilt = &mut rebuilt[..values.len()];
        for (residual, value) in residual.iter_mut().zip(values) {
            *residual += value;
        }
        quantise::<BITS>(residual, rebuilt, levels, numbers);
        for (residual, rebuilt) in residual.iter_mut().zip(rebuilt) {
            *residual -= *rebuilt;
        }
    }
}

#[inline(always)]
fn change<const BITS: usize>(model: &[f32], seen: &mut [f32], levels: &mut [[u8; 2]], numbers: &mut [u8]) {
    let (mut change, mut rebuilt) = ([0.0; BLOCK], [0.0; BLOCK]);
    let wire = levels.chunks_mut(1 << BITS).zip(numbers.chunks_mut(BLOCK * BITS / 8));
    for ((model, seen), (levels, numbers)) in model.chunks(BLOCK).zip(seen.chunks_mut(BLOCK)).zip(wire) {
        let (change, rebuilt) = (&mut change[..model.len()], &mut rebuilt[..model.len()]);
        for (change, (model, seen)) in change.iter_mut().zip(model.iter().zip(seen.iter())) {
            *change = model - seen;
        }
        quantise::<BITS>(change, rebuilt, levels, numbers);
        for (seen, rebuilt) in seen.iter_mut().zip(rebuilt) {
            *seen += *rebuilt;
        }
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
    let mut classes = [0_u8; BLOCK];
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
fn pack<const BITS: usize>(classes: &[u8; BLOCK], packed: &mut [u8]) {
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

/// Combines each of `out` with its decoded value, from element `first` of the payload on.
#[inline(always)]
fn rebuild<const BITS: usize>(
    levels: &[[u8; 2]],
    numbers: &[u8],
    first: usize,
    out: &mut [f32],
    combine: impl Fn(f32, f32) -> f32 + Copy,
) {
    let per_byte = 8 / BITS;
    assert!(first.is_multiple_of(per_byte), "what is decoded begins with a byte");
    let (mut out, mut at) = (out, first);
    while !out.is_empty() {
        let here = out.len().min(BLOCK - at % BLOCK);
        let (block, rest) = out.split_at_mut(here);
        let mut level = [0.0; 4];
        for (level, wire) in level.iter_mut().zip(&levels[(at / BLOCK) << BITS..][..1 << BITS]) {
            *level = bf16_to_f32(u16::from_le_bytes(*wire));
        }
        let bytes = &numbers[at / per_byte..][..here.div_ceil(per_byte)];
        let (whole, left) = block.split_at_mut(here / per_byte * per_byte);
        let in_byte = |values: &mut [f32], byte: u8| {
            for (index, value) in values.iter_mut().enumerate() {
                *value = combine(*value, pick::<BITS>(level, u32::from(byte) >> (index * BITS)));
            }
        };
        for (values, byte) in whole.chunks_exact_mut(per_byte).zip(bytes) {
            in_byte(values, *byte);
        }
        if let Some(last) = bytes.last() {
            in_byte(left, *last);
        }
        (out, at) = (rest, at + here);
    }
}
