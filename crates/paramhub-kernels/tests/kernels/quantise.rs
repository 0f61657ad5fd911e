use half::bf16;
use paramhub_kernels::{Aggregator, Codec, Isa, Sum, convert, quantise, sum};
use proptest::prelude::*;

use crate::support::{Random, assert_same, lengths};

const LEVELS: [Codec; 2] = [Codec::ONE_BIT, Codec::TWO_BIT];
const QUANTISED: [Codec; 3] = [Codec::ONE_BIT, Codec::TWO_BIT, Codec::INT8];
const BLOCK: usize = 1024;
const LANES: usize = 16;

/// The mean of those values of a block that belong, added up as the kernels do: in sixteen running sums.
fn mean_of(block: &[f32], belongs: impl Fn(f32) -> bool) -> f32 {
    let mut sums = [0.0_f32; LANES];
    let mut count = 0;
    for (at, &value) in block.iter().enumerate() {
        sums[at % LANES] += if belongs(value) { value } else { 0.0 };
        count += u32::from(belongs(value));
    }
    if count == 0 { 0.0 } else { sums.iter().sum::<f32>() / count as f32 }
}

/// Wire bytes and the values that they decode to, one value after the other.
fn reference(values: &[f32], codec: Codec) -> (Vec<u8>, Vec<f32>) {
    if codec == Codec::INT8 {
        return reference_in_bytes(values);
    }
    let (mut wire_levels, mut classes, mut rebuilt) = (Vec::new(), Vec::new(), Vec::new());
    for block in values.chunks(BLOCK) {
        let mean = mean_of(block, |_| true);
        let is_upper = |value: f32| value > mean;
        let (low, high) = (mean_of(block, |v| !is_upper(v)), mean_of(block, is_upper));
        let splits = if codec == Codec::ONE_BIT { vec![mean] } else { vec![low, mean, high] };
        let class = |value: f32| splits.iter().filter(|&&split| value > split).count();
        let levels: Vec<bf16> = match codec {
            Codec::ONE_BIT => vec![low, high],
            _ => (0..4).map(|number| mean_of(block, |v| class(v) == number)).collect(),
        }
        .into_iter()
        .map(bf16::from_f32)
        .collect();
        wire_levels.extend(levels.iter().flat_map(|level| level.to_le_bytes()));
        for &value in block {
            classes.push(class(value));
            rebuilt.push(levels[class(value)].to_f32());
        }
    }
    let bits = if codec == Codec::ONE_BIT { 1 } else { 2 };
    let mut numbers = vec![0_u8; (values.len() * bits).div_ceil(8)];
    for (at, class) in classes.into_iter().enumerate() {
        numbers[at * bits / 8] |= (class as u8) << (at * bits % 8);
    }
    ([wire_levels, numbers].concat(), rebuilt)
}

/// The same for int8.
fn reference_in_bytes(values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let (mut scales, mut elements, mut rebuilt) = (Vec::new(), Vec::new(), Vec::new());
    for block in values.chunks(256) {
        let most = block.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        let (scale, inverse) = if most > 1e-30 { (most / 127.0, 127.0 / most) } else { (0.0, 0.0) };
        scales.extend(scale.to_le_bytes());
        for value in block {
            let number = (value * inverse).round_ties_even();
            assert!(number.abs() <= 127.0);
            elements.push(number as i8 as u8);
            // Zero has no sign in an element.
            rebuilt.push((number + 0.0) * scale);
        }
    }
    ([scales, elements].concat(), rebuilt)
}

/// Values like those of gradients: some near one another, some far away, some zero.
fn gradient(random: &mut Random, len: usize) -> Vec<f32> {
    let number = |random: &mut Random| if random.bits().is_multiple_of(3) { 0.0 } else { random.number() };
    (0..len).map(|_| number(random)).collect()
}

#[test]
fn every_body_encodes_and_decodes_as_the_reference_does() {
    let mut random = Random(61);
    for codec in QUANTISED {
        for len in lengths() {
            let values = gradient(&mut random, len);
            let before = gradient(&mut random, len);
            let total: Vec<f32> = values.iter().zip(&before).map(|(v, r)| r + v).collect();
            let (want, rebuilt) = reference(&total, codec);
            let lost: Vec<f32> = total.iter().zip(&rebuilt).map(|(v, q)| v - q).collect();
            for isa in Isa::available() {
                let what = format!("{codec}, {len} elements, {isa}");
                let mut wire = vec![0xee; codec.payload_bytes(len) + 1];
                let mut residual = before.clone();
                quantise::encode_with(isa, &values, &mut residual, &mut wire[1..], codec);
                assert_eq!(wire[1..], want, "{what}");
                assert_same(&residual, &lost, &what);
                let mut out = vec![0.5; len];
                convert::decode_with(isa, &wire[1..], &mut out, codec);
                assert_same(&out, &rebuilt, &what);
                let mut added = values.clone();
                sum::add_with(isa, &mut added, &wire[1..], codec);
                let want: Vec<f32> = values.iter().zip(&rebuilt).map(|(v, q)| v + q).collect();
                assert_same(&added, &want, &what);
                assert_eq!(quantise::first_non_finite(&wire[1..], len, codec), None, "{what}");
            }
        }
    }
}

#[test]
fn changes_add_up_to_what_was_seen_and_leave_the_rest_for_later() {
    let mut random = Random(62);
    for codec in QUANTISED {
        let mut model = gradient(&mut random, 3000);
        let (mut seen, mut elsewhere) = (model.clone(), model.clone());
        let bodies: Vec<Isa> = Isa::available().collect();
        for isa in bodies.iter().cycle().take(6).copied() {
            for value in &mut model {
                *value += random.number();
            }
            let change: Vec<f32> = model.iter().zip(&seen).map(|(m, s)| m - s).collect();
            let mut wire = vec![0; codec.payload_bytes(model.len())];
            quantise::encode_change_with(isa, &model, &mut seen, &mut wire, codec);
            assert_eq!(wire, reference(&change, codec).0);
            sum::add(&mut elsewhere, &wire, codec);
            assert_same(&elsewhere, &seen, &codec);
        }
        assert_ne!(model, seen);
        // If the model stands still, the loss is made up for, block by block.
        let far = |seen: &[f32]| model.iter().zip(seen).map(|(m, s)| (m - s).powi(2)).sum::<f32>();
        let before = far(&seen);
        for _ in 0..60 {
            let mut wire = vec![0; codec.payload_bytes(model.len())];
            quantise::encode_change(&model, &mut seen, &mut wire, codec);
        }
        assert!(far(&seen) < before / 10.0, "{codec}: {before} to {}", far(&seen));
    }
}

/// The reason why one bit is enough: over many steps only the loss of the last one remains.
#[test]
fn many_steps_add_up_to_the_exact_sum_with_feedback_and_not_without() {
    let gradient: Vec<f32> = (0..2048).map(|at| ((at * 37 % 101) as f32 - 40.0) / 60.0).collect();
    for codec in QUANTISED {
        let mean_error = |feeds_back: bool, steps: usize| {
            let mut residual = vec![0.0; gradient.len()];
            let mut total = vec![0.0_f32; gradient.len()];
            let mut wire = vec![0; codec.payload_bytes(gradient.len())];
            for _ in 0..steps {
                quantise::encode(&gradient, &mut residual, &mut wire, codec);
                sum::add(&mut total, &wire, codec);
                if !feeds_back {
                    residual.fill(0.0);
                }
            }
            let apart = |(total, exact): (&f32, &f32)| (total / steps as f32 - exact).abs();
            total.iter().zip(&gradient).map(apart).fold(0.0_f32, f32::max)
        };
        let (early, late) = (mean_error(true, 40), mean_error(true, 4000));
        // The sum itself is rounded, too, which is all that is left of a byte's loss.
        let least = if codec == Codec::INT8 { 1e-4 } else { 0.0 };
        assert!(
            (late < early / 20.0 || late < least) && late < 0.01,
            "{codec}: {early} after 40 steps, {late} after 4000"
        );
        let (early, late) = (mean_error(false, 40), mean_error(false, 4000));
        let least = if codec == Codec::INT8 { 0.002 } else { 0.05 };
        assert!(late > least && (late / early - 1.0).abs() < 0.01, "{codec} without: {early}, {late}");
    }
}

#[test]
fn two_bits_lose_less_than_half_of_what_one_does_and_a_flat_block_loses_nothing() {
    let mut random = Random(64);
    let values = gradient(&mut random, 8192);
    let lost = |values: &[f32], codec: Codec| {
        let mut residual = vec![0.0; values.len()];
        let mut wire = vec![0; codec.payload_bytes(values.len())];
        quantise::encode(values, &mut residual, &mut wire, codec);
        residual.iter().map(|r| r * r).sum::<f32>() / values.iter().map(|v| v * v).sum::<f32>()
    };
    let [one, two, byte] = QUANTISED.map(|codec| lost(&values, codec));
    println!("lost squares: {one} in one bit, {two} in two, {byte} in a byte");
    assert!(two < one / 2.0 && one < 1.0 && byte < two / 1000.0, "{one}, {two} and {byte}");
    for codec in LEVELS {
        assert_eq!(lost(&[-2.5; 1500], codec), 0.0);
        let halves: Vec<f32> = (0..2000).map(|at| if at % 7 < 3 { 1.0 } else { -0.5 }).collect();
        assert_eq!(lost(&halves, codec), 0.0);
    }
}

#[test]
fn a_value_that_is_not_finite_shows_in_its_block_and_in_no_other() {
    let mut random = Random(65);
    for codec in QUANTISED {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = gradient(&mut random, 3 * BLOCK + 5);
            values[BLOCK + 77] = bad;
            let mut residual = vec![0.0; values.len()];
            let mut wire = vec![0; codec.payload_bytes(values.len())];
            quantise::encode(&values, &mut residual, &mut wire, codec);
            assert_eq!(quantise::first_non_finite(&wire, values.len(), codec), Some(BLOCK));
            let mut out = vec![0.0; values.len()];
            convert::decode(&wire, &mut out, codec);
            let is_hurt = |at: usize| (BLOCK..2 * BLOCK).contains(&at);
            assert!(out.iter().enumerate().all(|(at, value)| value.is_finite() || is_hurt(at)));
            assert!(!out[BLOCK + 77].is_finite(), "{codec} {bad}");
        }
    }
}

#[test]
fn values_too_small_for_a_scale_are_lost_until_they_add_up() {
    let mut residual = vec![0.0; 300];
    let mut wire = vec![0; Codec::INT8.payload_bytes(300)];
    quantise::encode(&[4e-31; 300], &mut residual, &mut wire, Codec::INT8);
    assert!(wire.iter().all(|byte| *byte == 0) && residual == [4e-31; 300]);
    (0..2).for_each(|_| quantise::encode(&[4e-31; 300], &mut residual, &mut wire, Codec::INT8));
    let mut decoded = vec![0.0; 300];
    convert::decode(&wire, &mut decoded, Codec::INT8);
    assert!(decoded.iter().all(|value| (value / 12e-31 - 1.0).abs() < 1e-3), "{}", decoded[0]);
}

/// Sums in f32 by the default wire forms, tile by tile.
struct Plain;

impl Aggregator for Plain {
    fn add_f32(&self, sum: &mut [f32], contribution: &[f32]) {
        sum.iter_mut().zip(contribution).for_each(|(sum, value)| *sum += value);
    }
}

proptest! {
    #[test]
    fn whatever_arrives_decodes_alike_whole_and_in_tiles(len in 0_usize..3000, seed: u64, codec in 0..3_usize) {
        let codec = QUANTISED[codec];
        let mut random = Random(seed);
        let wire = random.bytes(codec.payload_bytes(len));
        let before = random.numbers(len);
        let (mut whole, mut tiled) = (before.clone(), before.clone());
        Sum::new().add(&mut whole, &wire, codec);
        Plain.add(&mut tiled, &wire, codec);
        assert_same(&tiled, &whole, &codec);
        Plain.assign(&mut tiled, &wire, codec);
        for isa in Isa::available() {
            Sum::with_isa(isa).assign(&mut whole, &wire, codec);
            assert_same(&tiled, &whole, &isa);
        }
    }

    #[test]
    fn the_rebuilt_value_and_the_residual_add_up_to_the_value(values in prop::collection::vec(-1e3_f32..1e3, 1..1500), codec in 0..3_usize) {
        let codec = QUANTISED[codec];
        let mut residual = vec![0.0; values.len()];
        let mut wire = vec![0; codec.payload_bytes(values.len())];
        quantise::encode(&values, &mut residual, &mut wire, codec);
        let mut rebuilt = vec![0.0; values.len()];
        convert::decode(&wire, &mut rebuilt, codec);
        for ((value, rebuilt), lost) in values.iter().zip(&rebuilt).zip(&residual) {
            prop_assert_eq!(value - rebuilt, *lost);
        }
        // With levels only their rounding to bf16 changes a block's sum.
        let moved: f64 = residual.iter().map(|&lost| f64::from(lost)).sum();
        let size: f64 = values.iter().map(|&value| f64::from(value.abs())).sum();
        prop_assert!(codec == Codec::INT8 || moved.abs() <= size / 200.0, "{} of {}", moved, size);
    }
}
