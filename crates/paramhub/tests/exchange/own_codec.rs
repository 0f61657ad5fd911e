//! A codec that a program registers: four bits an element, as multiples of a scale that a block has in common.

use std::sync::LazyLock;

use paramhub::{QuantisedCodec, QuantisedFormat, register_codec};
use paramhub_core::codec::Codec;

/// The registered codec.
pub(crate) fn four_bits() -> Codec {
    static CODEC: LazyLock<Codec> = LazyLock::new(|| register_codec(&FourBits).unwrap());
    *CODEC
}

struct FourBits;

static FORMAT: QuantisedFormat = QuantisedFormat {
    name: "four-bits",
    number: 177,
    block_elements: 40,
    head_bytes: 4,
    element_bits: 4,
    matrices_only: true,
};

fn scale_of(head: &[u8]) -> f32 {
    f32::from_le_bytes(head.try_into().unwrap())
}

impl QuantisedCodec for FourBits {
    fn format(&self) -> &'static QuantisedFormat {
        &FORMAT
    }

    fn encode(&self, values: &[f32], head: &mut [u8], elements: &mut [u8]) {
        let is_finite = values.iter().all(|value| value.is_finite());
        let most = values.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        let scale = if is_finite { most / 7.0 } else { f32::NAN };
        head.copy_from_slice(&scale.to_le_bytes());
        let number = |value: &f32| if scale > 0.0 { (value / scale).round() as i8 as u8 & 15 } else { 0 };
        for (byte, two) in elements.iter_mut().zip(values.chunks(2)) {
            *byte = number(&two[0]) | two.get(1).map_or(0, number) << 4;
        }
    }

    fn decode(&self, head: &[u8], elements: &[u8], out: &mut [f32]) {
        let scale = scale_of(head);
        for (byte, two) in elements.iter().zip(out.chunks_mut(2)) {
            let numbers = [(*byte << 4) as i8 >> 4, *byte as i8 >> 4];
            two.iter_mut().zip(numbers).for_each(|(value, number)| *value = f32::from(number) * scale);
        }
    }

    fn is_finite(&self, head: &[u8]) -> bool {
        scale_of(head).is_finite()
    }
}
