//! This module defines how tensor elements are typed at the worker ([`Dtype`]) and encoded on the wire
//! ([`Codec`]).

mod quantised;

use serde::{Deserialize, Serialize};

pub use quantised::{
    BLOCK_ELEMENTS_MAX, QuantisedCodec, QuantisedFormat, REGISTERED_NUMBERS_FROM, RegisterCodecError,
    register, registered,
};

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

/// Encoding of a frame's payload, little-endian and packed without padding: elements in one of the [`Dtype`]s, or quantised
/// in blocks, with error feedback.
///
/// One bit and two bits an element are from Seide et al., "1-bit stochastic gradient descent", 2014. Their blocks have 1,024
/// elements. A head is the levels that elements decode to, in bf16: two with one bit, four with two bits. An element is the
/// number of its level. With levels of two bytes, 1,024 elements make 1.03 bits an element in one bit. On gradients of fully
/// connected layers the squared error is half of that with 2,048 elements and levels of four bytes, which have the same
/// length.
///
/// The blocks of int8 have 256 elements. A head is a scale in f32, and an element is a signed byte that is multiplied by it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Codec {
    /// Four bytes an element.
    F32,
    /// Two bytes an element, IEEE half.
    F16,
    /// Two bytes an element, bfloat16.
    BF16,
    /// Blocks of fewer bits an element.
    Quantised(&'static QuantisedFormat),
}

impl Codec {
    /// One bit an element, and two levels a block.
    pub const ONE_BIT: Codec = Codec::Quantised(&QuantisedFormat {
        name: "one-bit",
        number: 3,
        block_elements: 1024,
        head_bytes: 2 * 2,
        element_bits: 1,
        matrices_only: true,
    });
    /// Two bits an element, and four levels a block.
    pub const TWO_BIT: Codec = Codec::Quantised(&QuantisedFormat {
        name: "two-bit",
        number: 4,
        block_elements: 1024,
        head_bytes: 4 * 2,
        element_bits: 2,
        matrices_only: true,
    });
    /// A byte an element, and a scale a block.
    pub const INT8: Codec = Codec::Quantised(&QuantisedFormat {
        name: "int8",
        number: 5,
        block_elements: 256,
        head_bytes: 4,
        element_bits: 8,
        matrices_only: false,
    });

    const BUILT_IN: [Codec; 6] =
        [Codec::F32, Codec::F16, Codec::BF16, Codec::ONE_BIT, Codec::TWO_BIT, Codec::INT8];

    /// Bytes of one element.
    ///
    /// # Panics
    /// If the codec is quantised: elements then share the heads of their blocks. See
    /// [`payload_bytes`](Self::payload_bytes).
    pub const fn bytes(self) -> usize {
        match self {
            Codec::F32 => 4,
            Codec::F16 | Codec::BF16 => 2,
            Codec::Quantised(_) => panic!("a quantised element has no bytes of its own"),
        }
    }

    /// Returns whether elements travel in blocks of fewer bits, so that the loss needs error feedback.
    pub const fn is_quantised(self) -> bool {
        matches!(self, Codec::Quantised(_))
    }

    /// Returns whether the codec applies to keys of this shape if a whole job asks for it.
    pub const fn is_for_shape(self, shape: &[u64]) -> bool {
        match self {
            Codec::Quantised(format) => !format.matrices_only || shape.len() == 2,
            Codec::F32 | Codec::F16 | Codec::BF16 => true,
        }
    }

    /// Bytes of a payload of this many elements.
    pub const fn payload_bytes(self, elements: usize) -> usize {
        match self {
            Codec::Quantised(format) => format.payload_bytes(elements),
            Codec::F32 | Codec::F16 | Codec::BF16 => elements * self.bytes(),
        }
    }

    /// The codec's number in frames.
    pub const fn number(self) -> u8 {
        match self {
            Codec::F32 => 0,
            Codec::F16 => 1,
            Codec::BF16 => 2,
            Codec::Quantised(format) => format.number,
        }
    }

    /// The codec with this number in frames, if there is one.
    pub fn from_wire(number: u8) -> Option<Codec> {
        match Self::BUILT_IN.get(usize::from(number)) {
            Some(codec) => Some(*codec),
            None => registered(number).map(|codec| Codec::Quantised(codec.format())),
        }
    }

    /// The codec's name.
    pub const fn name(self) -> &'static str {
        match self {
            Codec::F32 => "f32",
            Codec::F16 => "f16",
            Codec::BF16 => "bf16",
            Codec::Quantised(format) => format.name,
        }
    }

    /// The codecs that this process knows, the built-in ones first.
    pub fn all() -> impl Iterator<Item = Codec> {
        Self::BUILT_IN.into_iter().chain(quantised::all_registered())
    }
}

impl std::fmt::Display for Codec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::fmt::Debug for Codec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Codec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Self::all().find(|codec| codec.name() == text);
        named.ok_or_else(|| {
            let known: Vec<&str> = Self::all().map(Codec::name).collect();
            format!("unknown codec `{text}`: expected {}", known.join(", "))
        })
    }
}

impl TryFrom<String> for Codec {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        // The name may come from another program, which knows more codecs.
        text.parse().map_err(|unknown| {
            format!("{unknown}; if another program has registered it, this one must register it, too")
        })
    }
}

impl From<Codec> for String {
    fn from(codec: Codec) -> String {
        codec.name().to_owned()
    }
}

#[cfg(feature = "openapi")]
impl utoipa::PartialSchema for Codec {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        utoipa::openapi::ObjectBuilder::new()
            .schema_type(utoipa::openapi::schema::Type::String)
            .enum_values(Some(Self::BUILT_IN.map(Codec::name)))
            .description(Some(
                "Encoding of a frame's payload; docs/protocol.md has its bytes. A hub may know more of them than these.",
            ))
            .into()
    }
}

#[cfg(feature = "openapi")]
impl utoipa::ToSchema for Codec {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codecs_have_one_name_and_one_number() {
        for (number, codec) in (0..).zip(Codec::BUILT_IN) {
            assert_eq!(codec.to_string().parse(), Ok(codec));
            assert_eq!(serde_json::to_string(&codec).unwrap(), format!("\"{codec}\""));
            assert_eq!((codec.number(), Codec::from_wire(number)), (number, Some(codec)));
        }
        assert_eq!(Codec::from_wire(Codec::BUILT_IN.len() as u8), None);
    }

    #[test]
    fn a_quantised_chunk_is_a_thirtieth_or_a_fifteenth_of_its_floats() {
        let chunk = 8192;
        assert_eq!(Codec::ONE_BIT.payload_bytes(chunk), 8 * 4 + 1024);
        assert_eq!(Codec::TWO_BIT.payload_bytes(chunk), 8 * 8 + 2048);
        // Both lengths include headers.
        assert!((Codec::ONE_BIT.payload_bytes(chunk) + 16) * 30 < Codec::F32.payload_bytes(chunk) + 16);
        assert_eq!([1, 8, 9, 1025].map(|n| Codec::ONE_BIT.payload_bytes(n)), [5, 5, 6, 8 + 129]);
        assert_eq!([1, 4, 5].map(|n| Codec::TWO_BIT.payload_bytes(n)), [9, 9, 10]);
        assert_eq!([1, 256, 257, chunk].map(|n| Codec::INT8.payload_bytes(n)), [5, 260, 265, 32 * 260]);
    }

    #[test]
    fn one_bit_and_two_bit_are_for_matrices_and_the_others_for_every_key() {
        for codec in Codec::BUILT_IN {
            let is_for = [&[9][..], &[4, 5], &[4, 5, 3, 3]].map(|shape| codec.is_for_shape(shape));
            let matrices_only = [Codec::ONE_BIT, Codec::TWO_BIT].contains(&codec);
            assert_eq!(is_for, [!matrices_only, true, !matrices_only], "{codec}");
        }
    }
}
