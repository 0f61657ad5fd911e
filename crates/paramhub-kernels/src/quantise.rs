//! Fewer bits per element, in blocks, with the loss kept for the next time.
//!
//! Here is what all [quantised codecs](QuantisedCodec) have in common: the walk over the blocks of a payload, and the
//! feedback of losses. Decoding needs no memory: [`convert::decode`](crate::convert::decode),
//! [`sum::assign`] and [`sum::add`] do it, as for every other codec.

mod int8;
mod levels;

use paramhub_core::codec::{BLOCK_ELEMENTS_MAX, Codec, QuantisedCodec, QuantisedFormat, registered};

use crate::dispatch::{Isa, kernel};
use crate::sum;
use int8::Int8;
use levels::Levels;

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
    let mut decoded = [0.0; BLOCK_ELEMENTS_MAX];
    by(isa, codec, |codec| {
        let (heads, elements) = parts_mut(wire, values.len(), codec.format());
        let values = values.chunks(codec.format().block_elements);
        let residual = residual.chunks_mut(codec.format().block_elements);
        for ((values, residual), (head, elements)) in values.zip(residual).zip(heads.zip(elements)) {
            let decoded = &mut decoded[..values.len()];
            sum::add_f32_with(isa, residual, values);
            codec.encode_and_decode(residual, head, elements, decoded);
            subtract(isa, residual, decoded);
        }
    });
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
    let (mut change, mut decoded) = ([0.0; BLOCK_ELEMENTS_MAX], [0.0; BLOCK_ELEMENTS_MAX]);
    by(isa, codec, |codec| {
        let (heads, elements) = parts_mut(wire, model.len(), codec.format());
        let model = model.chunks(codec.format().block_elements);
        let seen = seen.chunks_mut(codec.format().block_elements);
        for ((model, seen), (head, elements)) in model.zip(seen).zip(heads.zip(elements)) {
            let (change, decoded) = (&mut change[..model.len()], &mut decoded[..model.len()]);
            change.copy_from_slice(model);
            subtract(isa, change, seen);
            codec.encode_and_decode(change, head, elements, decoded);
            sum::add_f32_with(isa, seen, decoded);
        }
    });
}

/// The first element of the first block that is not finite, in a payload of `elements` elements.
///
/// # Panics
/// As [`encode`].
pub fn first_non_finite(wire: &[u8], elements: usize, codec: Codec) -> Option<usize> {
    by(Isa::best(), codec, |codec| {
        let (mut heads, _) = parts(wire, elements, codec.format());
        heads.position(|head| !codec.is_finite(head)).map(|block| block * codec.format().block_elements)
    })
}

/// `out[i] = wire[i]`.
pub(crate) fn decode(isa: Isa, wire: &[u8], out: &mut [f32], codec: Codec) {
    by(isa, codec, |codec| {
        let (heads, elements) = parts(wire, out.len(), codec.format());
        for (out, (head, elements)) in out.chunks_mut(codec.format().block_elements).zip(heads.zip(elements))
        {
            codec.decode(head, elements, out);
        }
    });
}

/// `sum[i] += wire[i]`.
pub(crate) fn add(isa: Isa, sum: &mut [f32], wire: &[u8], codec: Codec) {
    by_blocks(isa, sum, wire, codec, |sum, contribution| sum::add_f32_with(isa, sum, contribution));
}

/// Calls `combine` with each block of `sum` and the values that the same block of the payload decodes to.
pub(crate) fn by_blocks(
    isa: Isa,
    sum: &mut [f32],
    wire: &[u8],
    codec: Codec,
    combine: impl Fn(&mut [f32], &[f32]),
) {
    let mut decoded = [0.0; BLOCK_ELEMENTS_MAX];
    by(isa, codec, |codec| {
        let (heads, elements) = parts(wire, sum.len(), codec.format());
        for (sum, (head, elements)) in sum.chunks_mut(codec.format().block_elements).zip(heads.zip(elements))
        {
            let decoded = &mut decoded[..sum.len()];
            codec.decode(head, elements, decoded);
            combine(sum, decoded);
        }
    });
}

/// Calls `work` with the arithmetic of a quantised codec.
#[track_caller]
fn by<R>(isa: Isa, codec: Codec, work: impl FnOnce(&dyn QuantisedCodec) -> R) -> R {
    match codec {
        Codec::ONE_BIT => work(&Levels::<1>(isa)),
        Codec::TWO_BIT => work(&Levels::<2>(isa)),
        Codec::INT8 => work(&Int8(isa)),
        Codec::Quantised(format) => {
            work(registered(format.number).expect("such a codec comes from its registration"))
        }
        Codec::F32 | Codec::F16 | Codec::BF16 => panic!("{codec} is not quantised"),
    }
}

/// The heads and the elements of the blocks of a payload.
#[track_caller]
fn parts<'a>(
    wire: &'a [u8],
    elements: usize,
    format: &QuantisedFormat,
) -> (impl Iterator<Item = &'a [u8]>, impl Iterator<Item = &'a [u8]>) {
    assert_holds(format, elements, wire.len());
    let (heads, elements) = wire.split_at(format.heads_bytes(elements));
    (heads.chunks(format.head_bytes), elements.chunks(format.block_elements * format.element_bits / 8))
}

#[track_caller]
fn parts_mut<'a>(
    wire: &'a mut [u8],
    elements: usize,
    format: &QuantisedFormat,
) -> (impl Iterator<Item = &'a mut [u8]>, impl Iterator<Item = &'a mut [u8]>) {
    assert_holds(format, elements, wire.len());
    let (heads, elements) = wire.split_at_mut(format.heads_bytes(elements));
    (
        heads.chunks_mut(format.head_bytes),
        elements.chunks_mut(format.block_elements * format.element_bits / 8),
    )
}

#[track_caller]
fn assert_holds(format: &QuantisedFormat, elements: usize, wire_bytes: usize) {
    assert!(
        format.payload_bytes(elements) == wire_bytes,
        "{wire_bytes} wire bytes do not hold {elements} elements of {}",
        format.name
    );
}

kernel! {
    fn subtract(from: &mut [f32], values: &[f32]) {
        for (from, value) in from.iter_mut().zip(values) {
            *from -= value;
        }
    }
}
