//! f32 to wire bytes and back.

use paramhub_core::codec::Codec;

use crate::dispatch::{Isa, kernel};
use crate::half_precision::{bf16_to_f32, decode_f16, encode_f16, f32_to_bf16};
use crate::quantise;

/// `wire[i] = model[i]`, rounded to the nearest number of `codec`, ties to even.
///
/// Values beyond the range become infinite. A NaN stays a NaN of the same sign; in f16 and bf16 it becomes
/// quiet and keeps the upper bits of its payload. `wire` may have any alignment.
///
/// # Panics
/// If `wire.len() != model.len() * codec.bytes()`, or the codec is quantised: see
/// [`quantise`](mod@crate::quantise).
pub fn encode(model: &[f32], wire: &mut [u8], codec: Codec) {
    encode_with(Isa::best(), model, wire, codec);
}

/// [`encode`] by the body for `isa`.
pub fn encode_with(isa: Isa, model: &[f32], wire: &mut [u8], codec: Codec) {
    assert_holds(codec, model.len(), wire.len());
    match codec {
        Codec::F32 => encode_f32(isa, model, wire.as_chunks_mut().0),
        Codec::F16 => encode_f16(isa, model, wire.as_chunks_mut().0),
        Codec::BF16 => encode_bf16(isa, model, wire.as_chunks_mut().0),
        Codec::Quantised(_) => panic!("what {codec} loses must be kept: see `quantise`"),
    }
}

/// `out[i] = wire[i]`, exactly. A signalling f16 NaN becomes quiet; f32 and bf16 keep every bit.
///
/// `wire` holds `out.len()` elements, little-endian, at any alignment.
///
/// # Panics
/// If `wire.len() != codec.payload_bytes(out.len())`.
pub fn decode(wire: &[u8], out: &mut [f32], codec: Codec) {
    decode_with(Isa::best(), wire, out, codec);
}

/// [`decode`] by the body for `isa`.
pub fn decode_with(isa: Isa, wire: &[u8], out: &mut [f32], codec: Codec) {
    assert_holds(codec, out.len(), wire.len());
    match codec {
        Codec::F32 => decode_f32(isa, wire.as_chunks().0, out),
        Codec::F16 => decode_f16(isa, out, wire.as_chunks().0),
        Codec::BF16 => decode_bf16(isa, wire.as_chunks().0, out),
        Codec::Quantised(_) => quantise::decode(isa, wire, out, codec),
    }
}

kernel! {
    fn encode_f32(model: &[f32], wire: &mut [[u8; 4]]) {
        for (value, bytes) in model.iter().zip(wire) {
            *bytes = value.to_le_bytes();
        }
    }
}

kernel! {
    fn encode_bf16(model: &[f32], wire: &mut [[u8; 2]]) {
        for (value, bytes) in model.iter().zip(wire) {
            *bytes = f32_to_bf16(*value).to_le_bytes();
        }
    }
}

kernel! {
    fn decode_f32(wire: &[[u8; 4]], out: &mut [f32]) {
        for (value, bytes) in out.iter_mut().zip(wire) {
            *value = f32::from_le_bytes(*bytes);
        }
    }
}

kernel! {
    fn decode_bf16(wire: &[[u8; 2]], out: &mut [f32]) {
        for (value, bytes) in out.iter_mut().zip(wire) {
            *value = bf16_to_f32(u16::from_le_bytes(*bytes));
        }
    }
}

/// Panics unless `wire_bytes` bytes are exactly `elements` elements: the caller has checked input from
/// outside, so anything else is the caller's bug.
#[track_caller]
pub(crate) fn assert_holds(codec: Codec, elements: usize, wire_bytes: usize) {
    assert!(
        codec.payload_bytes(elements) == wire_bytes,
        "{wire_bytes} wire bytes do not hold {elements} elements of {codec}"
    );
}
