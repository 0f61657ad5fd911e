//! A signed byte an element and a scale a block: the largest magnitude of the block is 127 times the scale.
//!
//! A block with a NaN or an infinity has a scale that is not finite, and decodes to no finite value.

use paramhub_core::codec::{Codec, QuantisedCodec, QuantisedFormat};

use crate::dispatch::{Isa, kernel};

/// The largest element.
const MOST: f32 = 127.0;
/// A block without a larger magnitude than this encodes as zeros, since the inverse of its scale could overflow. Nothing is
/// gone: its values are losses, which are kept.
const LEAST_MAGNITUDE: f32 = 1e-30;
/// An f32 of this size has no bits left for fractions, so adding it to a small number rounds that to an integer, ties to
/// even, which then is in the lowest bits as two's complement.
const ROUNDING: f32 = 12_582_912.0;

/// A byte an element, by the bodies for an instruction set.
pub(super) struct Int8(pub(super) Isa);

impl QuantisedCodec for Int8 {
    fn format(&self) -> &'static QuantisedFormat {
        match Codec::INT8 {
            Codec::Quantised(format) => format,
            _ => unreachable!("it is quantised"),
        }
    }

    fn encode(&self, values: &[f32], head: &mut [u8], elements: &mut [u8]) {
        let scale = quantise(self.0, values, elements);
        head.copy_from_slice(&scale.to_le_bytes());
    }

    fn decode(&self, head: &[u8], elements: &[u8], out: &mut [f32]) {
        rebuild(self.0, scale_of(head), elements, out);
    }

    fn is_finite(&self, head: &[u8]) -> bool {
        // An element is at least -128, which only a faulty peer sends.
        (scale_of(head) * 128.0).is_finite()
    }
}

fn scale_of(head: &[u8]) -> f32 {
    f32::from_le_bytes(head.try_into().expect("a head is a scale"))
}

kernel! {
    fn quantise(values: &[f32], elements: &mut [u8]) -> f32 {
        // The order of magnitudes is that of their bits, in which infinity is above all numbers and NaN above infinity.
        let bits = |value: &f32| (value.to_bits() & 0x7fff_ffff) as i32;
        let magnitude = f32::from_bits(values.iter().fold(0, |most, value| most.max(bits(value))) as u32);
        let (scale, inverse) = match magnitude <= LEAST_MAGNITUDE {
            true => (0.0, 0.0),
            false => (magnitude / MOST, MOST / magnitude),
        };
        for (element, value) in elements.iter_mut().zip(values) {
            *element = (value * inverse + ROUNDING).to_bits() as u8;
        }
        scale
    }
}

kernel! {
    fn rebuild(scale: f32, elements: &[u8], out: &mut [f32]) {
        for (value, element) in out.iter_mut().zip(elements) {
            *value = f32::from(*element as i8) * scale;
        }
    }
}
