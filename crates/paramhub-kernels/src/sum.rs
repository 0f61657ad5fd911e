//! Sums of contributions in f32, straight from their wire bytes.

use paramhub_core::codec::Codec;

use crate::convert::{assert_holds, decode_with};
use crate::dispatch::{Isa, kernel};
use crate::half_precision::{add_f16, bf16_to_f32};
use crate::quantise;

/// `sum[i] = wire[i]`: the first contribution to a chunk, so that nothing must be zeroed.
///
/// `wire` holds `sum.len()` elements, little-endian, at any alignment.
///
/// # Panics
/// If `wire.len() != codec.payload_bytes(sum.len())`.
pub fn assign(sum: &mut [f32], wire: &[u8], codec: Codec) {
    assign_with(Isa::best(), sum, wire, codec);
}

/// [`assign`] by the body for `isa`.
pub fn assign_with(isa: Isa, sum: &mut [f32], wire: &[u8], codec: Codec) {
    decode_with(isa, wire, sum, codec);
}

/// `sum[i] += wire[i]`: a later contribution to a chunk (PHub section 3.2.2), added in f32 in whatever codec
/// it travelled.
///
/// `wire` holds `sum.len()` elements, little-endian, at any alignment.
///
/// # Panics
/// If `wire.len() != codec.payload_bytes(sum.len())`.
pub fn add(sum: &mut [f32], wire: &[u8], codec: Codec) {
    add_with(Isa::best(), sum, wire, codec);
}

/// [`add`] by the body for `isa`.
pub fn add_with(isa: Isa, sum: &mut [f32], wire: &[u8], codec: Codec) {
    assert_holds(codec, sum.len(), wire.len());
    match codec {
        Codec::F32 => add_wire_f32(isa, sum, wire.as_chunks().0),
        Codec::F16 => add_f16(isa, sum, wire.as_chunks().0),
        Codec::BF16 => add_bf16(isa, sum, wire.as_chunks().0),
        Codec::Quantised(_) => quantise::add(isa, sum, wire, codec),
    }
}

/// `sum[i] += contribution[i]`: a contribution that was parked as f32, as reproducible mode does in order to
/// sum in rank order.
///
/// # Panics
/// If the lengths differ.
pub fn add_f32(sum: &mut [f32], contribution: &[f32]) {
    add_f32_with(Isa::best(), sum, contribution);
}

/// [`add_f32`] by the body for `isa`.
pub fn add_f32_with(isa: Isa, sum: &mut [f32], contribution: &[f32]) {
    assert_eq!(sum.len(), contribution.len(), "a contribution is as long as its sum");
    add_slices(isa, sum, contribution);
}

kernel! {
    fn add_wire_f32(sum: &mut [f32], wire: &[[u8; 4]]) {
        for (total, bytes) in sum.iter_mut().zip(wire) {
            *total += f32::from_le_bytes(*bytes);
        }
    }
}

kernel! {
    fn add_bf16(sum: &mut [f32], wire: &[[u8; 2]]) {
        for (total, bytes) in sum.iter_mut().zip(wire) {
            *total += bf16_to_f32(u16::from_le_bytes(*bytes));
        }
    }
}

kernel! {
    fn add_slices(sum: &mut [f32], contribution: &[f32]) {
        for (total, value) in sum.iter_mut().zip(contribution) {
            *total += value;
        }
    }
}
