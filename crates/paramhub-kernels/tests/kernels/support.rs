use paramhub_kernels::Codec;

/// The codecs whose elements have whole bytes.
pub(crate) const CODECS: [Codec; 3] = [Codec::F32, Codec::F16, Codec::BF16];

/// Every length around the vector widths, some around the scan's block, and a chunk with a tail.
pub(crate) fn lengths() -> impl Iterator<Item = usize> {
    (0..=200).chain([255, 256, 257, 1000, 1023, 1024, 1025, 2049, 8192, 8195, 40_001])
}

/// SplitMix64: fixed seeds, so that a failure repeats.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.bits() as u8).collect()
    }

    /// Ordinary numbers of many magnitudes.
    pub(crate) fn number(&mut self) -> f32 {
        let exponent = 110 + self.bits() as u32 % 24;
        f32::from_bits((self.bits() as u32 & 0x807f_ffff) | exponent << 23)
    }

    pub(crate) fn numbers(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.number()).collect()
    }

    /// Any bit pattern, including NaN, infinity and subnormals.
    pub(crate) fn patterns(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| f32::from_bits(self.bits() as u32)).collect()
    }
}

/// Element `at` of wire bytes, by the `half` crate.
pub(crate) fn element_at(wire: &[u8], at: usize, codec: Codec) -> f32 {
    match codec {
        Codec::F32 => f32::from_le_bytes(wire[4 * at..][..4].try_into().unwrap()),
        Codec::F16 => half::f16::from_le_bytes(wire[2 * at..][..2].try_into().unwrap()).to_f32_const(),
        Codec::BF16 => half::bf16::from_le_bytes(wire[2 * at..][..2].try_into().unwrap()).to_f32_const(),
        Codec::Quantised(_) => unreachable!("several share a byte"),
    }
}

/// Equal to the bit, except that any NaN equals any other: IEEE 754 leaves a NaN's payload open.
pub(crate) fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

#[track_caller]
pub(crate) fn assert_same(got: &[f32], want: &[f32], what: &dyn std::fmt::Display) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            same(*got, *want),
            "{what}: element {at} is {got:e} ({:08x}), not {want:e} ({:08x})",
            got.to_bits(),
            want.to_bits()
        );
    }
}
