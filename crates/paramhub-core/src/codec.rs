//! How tensor elements are typed at the worker ([`Dtype`]) and encoded on the wire ([`Codec`]).

use serde::{Deserialize, Serialize};

/// Element type of a key's gradient and parameters in the worker's memory. The hub sums and keeps f32 whatever it is.
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

/// Encoding of a frame's payload: little-endian elements, packed without padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Codec {
    /// Four bytes an element.
    F32 = 0,
    /// Two bytes an element, IEEE half.
    F16 = 1,
    /// Two bytes an element, bfloat16.
    BF16 = 2,
}

impl Codec {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Codec::F32 => 4,
            Codec::F16 | Codec::BF16 => 2,
        }
    }

    /// The codec with this number on the wire, if there is one.
    pub const fn from_wire(number: u8) -> Option<Codec> {
        match number {
            0 => Some(Codec::F32),
            1 => Some(Codec::F16),
            2 => Some(Codec::BF16),
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
        })
    }
}

impl std::str::FromStr for Codec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "f32" => Ok(Codec::F32),
            "f16" => Ok(Codec::F16),
            "bf16" => Ok(Codec::BF16),
            other => Err(format!("unknown codec `{other}`: expected f32, f16 or bf16")),
        }
    }
}
