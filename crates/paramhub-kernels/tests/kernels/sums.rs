use paramhub_kernels::{Aggregator, Codec, Isa, Sum, sum};
use proptest::prelude::*;

use crate::support::{CODECS, Random, assert_same, element_at, lengths};

#[test]
fn wire_sums_equal_the_scalar_reference_at_every_length_and_offset() {
    let mut random = Random(1);
    for codec in CODECS {
        for len in lengths() {
            let offsets = if len > 300 { 1..2 } else { 0..9 };
            for offset in offsets {
                let buffer = random.bytes(offset + len * codec.bytes());
                let wire = &buffer[offset..];
                let values: Vec<f32> = (0..len).map(|at| element_at(wire, at, codec)).collect();
                let shift = offset % 4;
                let before = random.patterns(shift + len);
                let added: Vec<f32> = before[shift..].iter().zip(&values).map(|(a, b)| a + b).collect();
                for isa in Isa::available() {
                    let what = format!("{codec}, {len} elements, offset {offset}, {isa}");
                    let mut total = before.clone();
                    sum::add_with(isa, &mut total[shift..], wire, codec);
                    assert_same(&total[shift..], &added, &format!("add {what}"));
                    assert_same(&total[..shift], &before[..shift], &"what lies before");
                    sum::assign_with(isa, &mut total[shift..], wire, codec);
                    assert_same(&total[shift..], &values, &format!("assign {what}"));
                    assert_same(&total[..shift], &before[..shift], &"what lies before");
                }
            }
        }
    }
}

#[test]
fn f32_sums_equal_the_scalar_reference_at_every_length_and_offset() {
    let mut random = Random(2);
    for len in lengths() {
        for (left, right) in [(0, 0), (1, 0), (0, 1), (2, 3), (3, 1)] {
            let before = random.patterns(left + len);
            let contribution = random.patterns(right + len);
            let want: Vec<f32> =
                before[left..].iter().zip(&contribution[right..]).map(|(a, b)| a + b).collect();
            for isa in Isa::available() {
                let mut total = before.clone();
                sum::add_f32_with(isa, &mut total[left..], &contribution[right..]);
                assert_same(&total[left..], &want, &format!("{len} elements, {left}, {right}, {isa}"));
            }
        }
    }
}

#[test]
fn the_built_in_aggregator_is_the_sum() {
    let wire: Vec<u8> = [1.5_f32, -2.0, 0.25].iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut total = [f32::NAN; 3];
    Sum::new().assign(&mut total, &wire, Codec::F32);
    Sum::new().add(&mut total, &wire, Codec::F32);
    Sum::new().add_f32(&mut total, &[1.0, 1.0, 1.0]);
    assert_eq!(total, [4.0, -3.0, 1.5]);
    Sum::new().assign_f32(&mut total, &[7.0, 8.0, 9.0]);
    assert_eq!(total, [7.0, 8.0, 9.0]);
}

#[test]
#[should_panic(expected = "11 wire bytes do not hold 3 elements of f32")]
fn a_wrong_length_is_a_bug_of_the_caller() {
    sum::add(&mut [0.0; 3], &[0; 11], Codec::F32);
}

proptest! {
    /// The sum is the same however a chunk is cut, and whether or not its contributions were parked as f32.
    #[test]
    fn sums_do_not_depend_on_cuts(
        len in 0_usize..3000,
        cut in 0.0_f64..1.0,
        workers in 1_usize..5,
        codec in prop::sample::select(&CODECS[..]),
        seed: u64,
    ) {
        let mut random = Random(seed);
        let wires: Vec<Vec<u8>> =
            (0..workers).map(|_| random.bytes(len * codec.bytes())).collect();
        let cut = (cut * len as f64) as usize;

        let mut whole = vec![0.0; len];
        let mut pieces = vec![0.0; len];
        let mut parked = vec![0.0; len];
        for (rank, wire) in wires.iter().enumerate() {
            let (head, tail) = wire.split_at(cut * codec.bytes());
            let (first, second) = pieces.split_at_mut(cut);
            let mut contribution = vec![0.0; len];
            sum::assign(&mut contribution, wire, codec);
            if rank == 0 {
                sum::assign(&mut whole, wire, codec);
                sum::assign(first, head, codec);
                sum::assign(second, tail, codec);
                parked.copy_from_slice(&contribution);
            } else {
                sum::add(&mut whole, wire, codec);
                sum::add(first, head, codec);
                sum::add(second, tail, codec);
                sum::add_f32(&mut parked, &contribution);
            }
        }
        assert_same(&pieces, &whole, &"cut");
        assert_same(&parked, &whole, &"parked");
    }
}
