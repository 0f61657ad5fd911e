//! The element types and operators of collectives.

use std::fmt;

/// The type of the elements of a buffer, little-endian as they lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ElementType {
    /// IEEE 754 single precision.
    F32 = 1,
    /// IEEE 754 double precision.
    F64 = 2,
    /// IEEE 754 half precision.
    F16 = 3,
    /// The upper half of an f32.
    BF16 = 4,
    /// Signed, 1 byte.
    I8 = 5,
    /// Unsigned, 1 byte.
    U8 = 6,
    /// Signed, 2 bytes.
    I16 = 7,
    /// Signed, 4 bytes.
    I32 = 8,
    /// Signed, 8 bytes.
    I64 = 9,
    /// One byte; everything but 0 is true, results are 0 or 1.
    Bool = 10,
}

impl ElementType {
    /// All element types.
    pub const ALL: [ElementType; 10] = {
        use ElementType::*;
        [F32, F64, F16, BF16, I8, U8, I16, I32, I64, Bool]
    };

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        use ElementType::*;
        match self {
            I8 | U8 | Bool => 1,
            F16 | BF16 | I16 => 2,
            F32 | I32 => 4,
            F64 | I64 => 8,
        }
    }

    /// Returns whether the type has fractions.
    pub const fn is_float(self) -> bool {
        matches!(self, ElementType::F32 | ElementType::F64 | ElementType::F16 | ElementType::BF16)
    }

    pub(crate) fn from_wire(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|element| *element as u8 == number)
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use ElementType::*;
        f.write_str(match self {
            F32 => "f32",
            F64 => "f64",
            F16 => "f16",
            BF16 => "bf16",
            I8 => "i8",
            U8 => "u8",
            I16 => "i16",
            I32 => "i32",
            I64 => "i64",
            Bool => "bool",
        })
    }
}

/// The way in which a collective reduces the elements of the ranks to one.
///
/// | | floats | integers | bool |
/// | --- | --- | --- | --- |
/// | `Sum`, `Product` | IEEE, rounded at every step | modulo 2^bits | or, and |
/// | `Min`, `Max` | a NaN on any rank gives NaN; -0 is below 0 | as numbers | and, or |
/// | `Average` | the sum divided by the number of ranks | - | - |
/// | `BitAnd`, `BitOr`, `BitXor` | - | bit by bit | and, or, exclusive or |
///
/// f16 and bf16 are computed in f32 and rounded to the nearest, ties to even: after each contribution over
/// TCP, once in shared memory. An average is rounded once more. The payload of a NaN is not specified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    /// The sum.
    Sum = 1,
    /// The product.
    Product = 2,
    /// The least.
    Min = 3,
    /// The greatest.
    Max = 4,
    /// The mean.
    Average = 5,
    /// The bits that are set at all ranks.
    BitAnd = 6,
    /// The bits that are set at any rank.
    BitOr = 7,
    /// The bits that are set at an odd number of ranks.
    BitXor = 8,
}

impl ReduceOp {
    /// All operators.
    pub const ALL: [ReduceOp; 8] = {
        use ReduceOp::*;
        [Sum, Product, Min, Max, Average, BitAnd, BitOr, BitXor]
    };

    /// Returns whether the operator can reduce elements of this type.
    pub const fn supports(self, element: ElementType) -> bool {
        use ReduceOp::*;
        match self {
            Sum | Product | Min | Max => true,
            Average => element.is_float(),
            BitAnd | BitOr | BitXor => !element.is_float(),
        }
    }

    pub(crate) fn from_wire(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|op| *op as u8 == number)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use ReduceOp::*;
        f.write_str(match self {
            Sum => "sum",
            Product => "product",
            Min => "min",
            Max => "max",
            Average => "average",
            BitAnd => "bitwise and",
            BitOr => "bitwise or",
            BitXor => "bitwise exclusive or",
        })
    }
}
