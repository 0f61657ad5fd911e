use half::{bf16, f16};
use paramhub_kernels::{Codec, Isa, convert};

use crate::support::{CODECS, Random, lengths};

#[test]
fn every_half_pattern_decodes_to_its_value() {
    let patterns: Vec<u16> = (0..=u16::MAX).collect();
    let wire: Vec<u8> = patterns.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    for isa in Isa::available() {
        let mut out = vec![0.0; patterns.len()];
        convert::decode_with(isa, &wire, &mut out, Codec::F16);
        for (bits, value) in patterns.iter().zip(&out) {
            let want = f16::from_bits(*bits).to_f32_const();
            assert_eq!(value.to_bits(), want.to_bits(), "f16 {bits:04x}, {isa}");
        }
        convert::decode_with(isa, &wire, &mut out, Codec::BF16);
        for (bits, value) in patterns.iter().zip(&out) {
            assert_eq!(value.to_bits(), u32::from(*bits) << 16, "bf16 {bits:04x}, {isa}");
            assert_eq!(value.is_nan(), bf16::from_bits(*bits).is_nan(), "bf16 {bits:04x}, {isa}");
        }
    }
}

#[test]
fn every_half_pattern_survives_the_way_through_f32() {
    let wire: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for isa in Isa::available() {
        for (codec, infinity, quiet) in [(Codec::F16, 0x7c00, 0x0200), (Codec::BF16, 0x7f80, 0x0040)] {
            let mut values = vec![0.0; wire.len() / 2];
            let mut back = vec![0; wire.len()];
            convert::decode_with(isa, &wire, &mut values, codec);
            convert::encode_with(isa, &values, &mut back, codec);
            for (bits, bytes) in (0..=u16::MAX).zip(back.as_chunks().0) {
                let want = if bits & 0x7fff > infinity { bits | quiet } else { bits };
                assert_eq!(u16::from_le_bytes(*bytes), want, "{codec} {bits:04x}, {isa}");
            }
        }
    }
}

#[test]
fn encoding_rounds_to_the_nearest_even() {
    let values = values_around_every_half();
    let mut wire = vec![0; 2 * values.len()];
    for isa in Isa::available() {
        convert::encode_with(isa, &values, &mut wire, Codec::F16);
        for (value, bytes) in values.iter().zip(wire.as_chunks().0) {
            let want = f16::from_f32_const(*value).to_bits();
            let got = u16::from_le_bytes(*bytes);
            assert_eq!(got, want, "f16 of {value:e} ({:08x}), {isa}", value.to_bits());
        }
        convert::encode_with(isa, &values, &mut wire, Codec::BF16);
        for (value, bytes) in values.iter().zip(wire.as_chunks().0) {
            let want = bf16::from_f32_const(*value).to_bits();
            let got = u16::from_le_bytes(*bytes);
            assert_eq!(got, want, "bf16 of {value:e} ({:08x}), {isa}", value.to_bits());
        }
    }
}

#[test]
fn conversions_work_at_every_length_and_offset() {
    let mut random = Random(3);
    for codec in CODECS {
        for len in lengths() {
            let offsets = if len > 300 { 1..2 } else { 0..9 };
            for offset in offsets {
                let shift = offset % 4;
                let model = random.numbers(shift + len);
                let model = &model[shift..];
                let want: Vec<u8> = model.iter().flat_map(|value| reference(*value, codec)).collect();
                for isa in Isa::available() {
                    let mut buffer = vec![0xa5; offset + want.len() + 3];
                    convert::encode_with(isa, model, &mut buffer[offset..][..want.len()], codec);
                    let (before, rest) = buffer.split_at(offset);
                    let (wire, after) = rest.split_at(want.len());
                    assert!(wire == want, "encode {codec}, {len} elements, offset {offset}, {isa}");
                    assert!(before.iter().chain(after).all(|byte| *byte == 0xa5), "what lies around");
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "4 wire bytes do not hold 3 elements of f16")]
fn a_wrong_length_is_a_bug_of_the_caller() {
    convert::decode(&[0; 4], &mut [0.0; 3], Codec::F16);
}

fn reference(value: f32, codec: Codec) -> Vec<u8> {
    match codec {
        Codec::F32 => value.to_le_bytes().into(),
        Codec::F16 => f16::from_f32_const(value).to_le_bytes().into(),
        Codec::BF16 => bf16::from_f32_const(value).to_le_bytes().into(),
        Codec::Quantised(_) => unreachable!("several share a byte"),
    }
}

/// For every f16 and every bf16: the value, the tie above it, their neighbours; and many random patterns.
fn values_around_every_half() -> Vec<f32> {
    let mut patterns = Vec::new();
    for bits in 0..=u16::MAX {
        let exact = f16::from_bits(bits).to_f32_const().to_bits();
        let next = f16::from_bits(bits.wrapping_add(1)).to_f32_const().to_bits();
        let tie = exact / 2 + next / 2 + (exact & next & 1);
        // Above the largest f16, the tie is where it would be if there were a next one.
        let tie = if bits & 0x7fff == 0x7bff { exact + 0x1000 } else { tie };
        let truncated = u32::from(bits) << 16;
        for pattern in [exact, tie, truncated, truncated | 0x8000] {
            patterns.extend([pattern.wrapping_sub(1), pattern, pattern.wrapping_add(1)]);
        }
    }
    // f16's subnormals are 2^-24 apart, so their ties are the odd multiples of 2^-25.
    for odd in (1..2048).step_by(2) {
        let tie = (odd as f32 * 2.0_f32.powi(-25)).to_bits();
        patterns.extend([tie - 1, tie, tie + 1, 0x8000_0000 | (tie - 1), 0x8000_0000 | tie]);
    }
    let mut random = Random(4);
    patterns.extend((0..1_000_000).map(|_| random.bits() as u32));
    patterns.into_iter().map(f32::from_bits).collect()
}
