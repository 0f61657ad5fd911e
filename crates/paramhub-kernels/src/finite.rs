//! The search for NaN and infinity in a contribution.

use paramhub_core::codec::Codec;

use crate::convert::assert_holds;
use crate::dispatch::{Isa, kernel};

/// Elements per block, after each of which the search decides whether to go on: enough for the vector loop,
/// and few enough to stay in L1 for the second look.
const BLOCK_ELEMENTS: usize = 1024;

/// The index of the first NaN or infinity among the little-endian elements of `wire`, at any alignment.
///
/// # Panics
/// If `wire.len()` is not a multiple of `codec.bytes()`, or the codec is quantised: see
/// [`quantise::first_non_finite`](crate::quantise::first_non_finite).
pub fn first_non_finite(wire: &[u8], codec: Codec) -> Option<usize> {
    first_non_finite_with(Isa::best(), wire, codec)
}

/// [`first_non_finite`] by the body for `isa`.
pub fn first_non_finite_with(isa: Isa, wire: &[u8], codec: Codec) -> Option<usize> {
    assert_holds(codec, wire.len() / codec.bytes(), wire.len());
    match codec {
        Codec::F32 => first_in_words(isa, wire.as_chunks().0),
        Codec::F16 => first_in_halves(isa, wire.as_chunks().0, 0x7c00),
        Codec::BF16 => first_in_halves(isa, wire.as_chunks().0, 0x7f80),
        Codec::Quantised(_) => unreachable!("its elements have no bytes of their own"),
    }
}

kernel! {
    fn first_in_words(wire: &[[u8; 4]]) -> Option<usize> {
        const EXPONENT: u32 = 0x7f80_0000;
        let non_finite = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes) & EXPONENT == EXPONENT;
        for (block, words) in wire.chunks(BLOCK_ELEMENTS).enumerate() {
            let any = words.iter().fold(0, |any, word| any | u32::from(non_finite(word)));
            if any != 0 {
                return words.iter().position(non_finite).map(|at| block * BLOCK_ELEMENTS + at);
            }
        }
        None
    }
}

kernel! {
    fn first_in_halves(wire: &[[u8; 2]], exponent: u16) -> Option<usize> {
        let non_finite = |bytes: &[u8; 2]| u16::from_le_bytes(*bytes) & exponent == exponent;
        for (block, halves) in wire.chunks(BLOCK_ELEMENTS).enumerate() {
            let any = halves.iter().fold(0, |any, half| any | u16::from(non_finite(half)));
            if any != 0 {
                return halves.iter().position(non_finite).map(|at| block * BLOCK_ELEMENTS + at);
            }
        }
        None
    }
}
