use std::fmt;

/// How one number of a contribution is written on the wire, always little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE 754 binary32, 4 bytes.
    F32,
    /// IEEE 754 binary16, 2 bytes.
    F16,
    /// The upper half of a binary32, 2 bytes.
    Bf16,
}

impl Element {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Panics unless `wire_bytes` bytes hold exactly `elements` elements: the caller has checked what came
    /// from outside, so anything else is its bug.
    #[track_caller]
    pub(crate) fn assert_holds(self, elements: usize, wire_bytes: usize) {
        assert!(
            elements.checked_mul(self.bytes()) == Some(wire_bytes),
            "{wire_bytes} wire bytes do not hold {elements} elements of {self}"
        );
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}
