//! This module defines how tensor elements are typed at the worker ([`Dtype`]) and encoded on the wire
//! ([`Codec`]).

use serde::{Deserialize, Serialize};

/// Element type of a key's gradient and parameters in the worker's memory. The hub always sums and keeps f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE 754 single precision.
    #[default]
    F32,
    /// IEEE 754 half precision.
    F16,
    /// The upper half of an f32.
    BF16,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        self.codec().bytes()
    }

    /// The codec that sends this type as it lies in memory.
    pub const fn codec(self) -> Codec {
        match self {
            Dtype::F32 => Codec::F32,
            Dtype::F16 => Codec::F16,
            Dtype::BF16 => Codec::BF16,
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.codec().fmt(f)
    }
}

/// Elements of a [quantised](Codec::is_quantised) payload that share reconstruction levels. The last block of
/// a payload may have fewer.
///
/// With levels of two bytes, 1,024 elements make 1.03 bits an element in one bit. On gradients of fully
/// connected layers the squared error is half of that with 2,048 elements and levels of four bytes, which
/// have the same length.
pub const QUANTISED_BLOCK_ELEMENTS: usize = 1024;

/// Encoding of a frame's payload, little-endian and packed without padding: elements in one of the [`Dtype`]s, or quantised
/// to one or two bits with error feedback (Seide et al., "1-bit stochastic gradient descent", 2014).
///
/// A quantised payload begins with the levels of all blocks of [`QUANTISED_BLOCK_ELEMENTS`] elements, in
/// bf16: two per block with one bit, four with two bits. The number of each element's level follows, the
/// first element in the lowest bits of the first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(
    feature = "openapi",
    derive(utoipa::ToSchema),
    schema(description = "Encoding of a frame's payload; docs/protocol.md has its bytes.")
)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Codec {
    /// Four bytes an element.
    #[serde(rename = "f32")]
    F32 = 0,
    /// Two bytes an element, IEEE half.
    #[serde(rename = "f16")]
    F16 = 1,
    /// Two bytes an element, bfloat16.
    #[serde(rename = "bf16")]
    BF16 = 2,
    /// One bit an element, and two levels a block.
    OneBit = 3,
    /// Two bits an element, and four levels a block.
    TwoBit = 4,
}

impl Codec {
    const ALL: [Codec; 5] = [Codec::F32, Codec::F16, Codec::BF16, Codec::OneBit, Codec::TwoBit];

    /// Bytes of one element.
    ///
    /// # Panics
    /// If the codec is quantised: one byte then holds several elements. See
    /// [`payload_bytes`](Self::payload_bytes).
    pub const fn bytes(self) -> usize {
        match self {
            Codec::F32 => 4,
            Codec::F16 | Codec::BF16 => 2,
            Codec::OneBit | Codec::TwoBit => panic!("a quantised element has no bytes of its own"),
        }
    }

    /// Bits of an element that is the number of one of its block's levels; `None` where elements travel as
    /// values.
    pub const fn quantised_bits(self) -> Option<usize> {
        match self {
            Codec::F32 | Codec::F16 | Codec::BF16 => None,
            Codec::OneBit => Some(1),
            Codec::TwoBit => Some(2),
        }
    }

    /// Returns whether elements travel as numbers of levels, so that the loss needs error feedback.
    pub const fn is_quantised(self) -> bool {
        self.quantised_bits().is_some()
    }

    /// Bytes of the levels at the start of a quantised payload of this many elements; 0 for other codecs.
    pub const fn level_bytes(self, elements: usize) -> usize {
        match self.quantised_bits() {
            Some(bits) => elements.div_ceil(QUANTISED_BLOCK_ELEMENTS) * (2 << bits),
            None => 0,
        }
    }

    /// Bytes of a payload of this many elements.
    pub const fn payload_bytes(self, elements: usize) -> usize {
        match self.quantised_bits() {
            Some(bits) => self.level_bytes(elements) + (elements * bits).div_ceil(8),
            None => elements * self.bytes(),
        }
    }

    /// The codec with this number on the wire, if there is one.
    pub const fn from_wire(number: u8) -> Option<Codec> {
        match number {
            0 => Some(Codec::F32),
            1 => Some(Codec::F16),
            2 => Some(Codec::BF16),
            3 => Some(Codec::OneBit),
            4 => Some(Codec::TwoBit),
            _ => None,
        }
    }
}

impl std::fmt::Display for Codec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Codec::F32 => "f32",
            Codec::F16 => "f16",
            Codec::BF16 => "bf16",
            Codec::OneBit => "one-bit",
            Codec::TwoBit => "two-bit",
        })
    }
}

impl std::str::FromStr for Codec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|codec| codec.to_string() == text);
        named.ok_or_else(|| format!("unknown codec `{text}`: expected f32, f16, bf16, one-bit or two-bit"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codecs_have_one_name_and_one_number() {
        for (number, codec) in (0..).zip(Codec::ALL) {
            assert_eq!(codec.to_string().parse(), Ok(codec));
            assert_eq!(serde_json::to_string(&codec).unwrap(), format!("\"{codec}\""));
            assert_eq!((codec as u8, Codec::from_wire(number)), (number, Some(codec)));
        }
        assert_eq!(Codec::from_wire(Codec::ALL.len() as u8), None);
    }

    #[test]
    fn a_quantised_chunk_is_a_thirtieth_or_a_fifteenth_of_its_floats() {
        let chunk = 8192;
        assert_eq!(Codec::OneBit.payload_bytes(chunk), 8 * 4 + 1024);
        assert_eq!(Codec::TwoBit.payload_bytes(chunk), 8 * 8 + 2048);
        // Both lengths include headers.
        assert!((Codec::OneBit.payload_bytes(chunk) + 16) * 30 < Codec::F32.payload_bytes(chunk) + 16);
        assert_eq!([1, 8, 9, 1025].map(|n| Codec::OneBit.payload_bytes(n)), [5, 5, 6, 8 + 129]);
        assert_eq!([1, 4, 5].map(|n| Codec::TwoBit.payload_bytes(n)), [9, 9, 10]);
    }
}
