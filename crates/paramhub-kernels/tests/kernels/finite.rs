use paramhub_kernels::{Codec, Isa, finite};
use proptest::prelude::*;

use crate::support::{CODECS, Random, element_at, lengths};

#[test]
fn finds_each_kind_of_non_finite_number_at_each_place() {
    for (codec, bad) in [
        (Codec::F32, &[0x7f80_0000_u32, 0xff80_0000, 0x7fc0_0000, 0xff80_0001][..]),
        (Codec::F16, &[0x7c00, 0xfc00, 0x7e00, 0xfc01]),
        (Codec::BF16, &[0x7f80, 0xff80, 0x7fc0, 0xff81]),
    ] {
        let bytes = codec.bytes();
        for len in lengths().filter(|len| *len <= 2100) {
            let mut buffer = largest_finite(codec, len);
            for isa in Isa::available() {
                assert_eq!(finite::first_non_finite_with(isa, &buffer[1..], codec), None);
            }
            let stride = if len > 200 { 97 } else { 1 };
            for at in (0..len).step_by(stride).chain(len.checked_sub(1)) {
                let place = 1 + at * bytes..1 + (at + 1) * bytes;
                let saved = buffer[place.clone()].to_vec();
                buffer[place.clone()].copy_from_slice(&bad[at % bad.len()].to_le_bytes()[..bytes]);
                for isa in Isa::available() {
                    let found = finite::first_non_finite_with(isa, &buffer[1..], codec);
                    assert_eq!(found, Some(at), "{codec}, {len} elements, {isa}");
                }
                buffer[place].copy_from_slice(&saved);
            }
        }
    }
}

#[test]
#[should_panic(expected = "do not hold")]
fn a_torn_element_is_a_bug_of_the_caller() {
    finite::first_non_finite(&[0; 7], Codec::F32);
}

/// The pattern one below infinity, with both signs, one byte into the buffer.
fn largest_finite(codec: Codec, len: usize) -> Vec<u8> {
    let pattern = match codec {
        Codec::F32 => 0x7f7f_ffff_u32,
        Codec::F16 => 0x7bff,
        Codec::BF16 => 0x7f7f,
        Codec::Quantised(_) => unreachable!("several share a byte"),
    };
    let mut buffer = vec![0xff];
    for at in 0..len {
        let mut bytes = pattern.to_le_bytes()[..codec.bytes()].to_vec();
        *bytes.last_mut().unwrap() |= if at % 2 == 0 { 0x80 } else { 0 };
        buffer.extend(bytes);
    }
    buffer
}

proptest! {
    #[test]
    fn finds_what_a_plain_search_finds(
        len in 0_usize..3000,
        codec in prop::sample::select(&CODECS[..]),
        seed: u64,
        rare in any::<bool>(),
    ) {
        let mut random = Random(seed);
        let mut wire = random.bytes(len * codec.bytes());
        if rare {
            // Clears an exponent bit in all but one element in a thousand: these are finite.
            for bytes in wire.chunks_mut(codec.bytes()) {
                if !random.bits().is_multiple_of(1000) {
                    *bytes.last_mut().unwrap() &= 0xbf;
                }
            }
        }
        let want = (0..len).find(|at| !element_at(&wire, *at, codec).is_finite());
        for isa in Isa::available() {
            prop_assert_eq!(finite::first_non_finite_with(isa, &wire, codec), want);
        }
    }
}
