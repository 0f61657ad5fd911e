//! Reductions of one buffer into another, on bytes of any alignment.

use paramhub_core::codec::Codec;
use paramhub_kernels::{convert, sum};

use crate::element::{ElementType, ReduceOp};

/// The number of f16 or bf16 elements that are converted to f32 at a time: two such tiles stay in the first
/// cache.
const TILE: usize = 1024;

/// `into[i] = into[i] op from[i]`; [`ReduceOp::Average`] adds.
///
/// # Panics
/// If the lengths differ or are no multiple of the element's size, or if the operation does not support the
/// element.
pub(crate) fn reduce(element: ElementType, op: ReduceOp, into: &mut [u8], from: &[u8]) {
    assert_eq!(into.len(), from.len(), "both sides of a reduction have one length");
    assert_eq!(into.len() % element.bytes(), 0, "a reduction takes whole elements");
    match element {
        ElementType::F32 => reduce_f32(op, into, from),
        ElementType::F64 => floats_f64(op, into, from),
        ElementType::F16 => reduce_half(Codec::F16, op, into, from),
        ElementType::BF16 => reduce_half(Codec::BF16, op, into, from),
        ElementType::I8 => integers_i8(op, into, from),
        ElementType::U8 => integers_u8(op, into, from),
        ElementType::I16 => integers_i16(op, into, from),
        ElementType::I32 => integers_i32(op, into, from),
        ElementType::I64 => integers_i64(op, into, from),
        ElementType::Bool => reduce_bool(op, into, from),
    }
}

/// `into[i] = into[i] op sources[0][i] op ...`, or the same without `into[i]` unless `takes_part`. `read`
/// copies bytes of a source, from an offset on, to the slice that it is given. f16 and bf16 stay f32 in
/// between and are rounded once.
///
/// # Panics
/// See [`reduce`]; also if nothing takes part.
pub(crate) fn reduce_all(
    element: ElementType,
    op: ReduceOp,
    into: &mut [u8],
    takes_part: bool,
    sources: impl Iterator<Item = u32> + Clone,
    read: impl Fn(u32, usize, &mut [u8]),
) {
    assert_eq!(into.len() % element.bytes(), 0, "a reduction takes whole elements");
    let mut copy = [0_u8; TILE * size_of::<f32>()];
    let half = match element {
        ElementType::F16 => Some(Codec::F16),
        ElementType::BF16 => Some(Codec::BF16),
        _ => None,
    };
    let tile_bytes = half.map_or(copy.len(), |codec| TILE * codec.bytes());
    for (number, into) in into.chunks_mut(tile_bytes).enumerate() {
        let copy = &mut copy[..into.len()];
        let mut sources = sources.clone();
        if !takes_part {
            read(sources.next().expect("something is reduced"), number * tile_bytes, into);
        }
        let mut wide = [0.0_f32; TILE];
        let wide = half.map(|codec| {
            let wide = &mut wide[..into.len() / codec.bytes()];
            convert::decode(into, wide, codec);
            (codec, wide)
        });
        match wide {
            Some((codec, wide)) => {
                for source in sources {
                    read(source, number * tile_bytes, copy);
                    fold_half(codec, op, wide, copy);
                }
                convert::encode(wide, into, codec);
            }
            None => {
                for source in sources {
                    read(source, number * tile_bytes, copy);
                    reduce(element, op, into, copy);
                }
            }
        }
    }
}

/// `bytes[i] = bytes[i] / ranks`.
///
/// # Panics
/// If the element is no float or the length is no multiple of its size.
pub(crate) fn divide(element: ElementType, bytes: &mut [u8], ranks: u32) {
    assert_eq!(bytes.len() % element.bytes(), 0, "a division takes whole elements");
    match element {
        ElementType::F32 => {
            each(bytes, |value: [u8; 4]| (f32::from_le_bytes(value) / ranks as f32).to_le_bytes());
        }
        ElementType::F64 => {
            each(bytes, |value: [u8; 8]| (f64::from_le_bytes(value) / f64::from(ranks)).to_le_bytes());
        }
        ElementType::F16 => divide_half(Codec::F16, bytes, ranks),
        ElementType::BF16 => divide_half(Codec::BF16, bytes, ranks),
        other => unsupported(other, ReduceOp::Average),
    }
}

fn reduce_f32(op: ReduceOp, into: &mut [u8], from: &[u8]) {
    match (op, bytemuck::try_cast_slice_mut::<u8, f32>(into)) {
        (ReduceOp::Sum | ReduceOp::Average, Ok(into)) => sum::add(into, from, Codec::F32),
        _ => floats_f32(op, into, from),
    }
}

fn reduce_half(codec: Codec, op: ReduceOp, into: &mut [u8], from: &[u8]) {
    let mut left = [0.0_f32; TILE];
    for (into, from) in into.chunks_mut(TILE * codec.bytes()).zip(from.chunks(TILE * codec.bytes())) {
        let left = &mut left[..into.len() / codec.bytes()];
        convert::decode(into, left, codec);
        fold_half(codec, op, left, from);
        convert::encode(left, into, codec);
    }
}

/// `left[i] = left[i] op from[i]`, for at most one tile.
fn fold_half(codec: Codec, op: ReduceOp, left: &mut [f32], from: &[u8]) {
    if matches!(op, ReduceOp::Sum | ReduceOp::Average) {
        return sum::add(left, from, codec);
    }
    let mut right = [0.0_f32; TILE];
    let right = &mut right[..left.len()];
    convert::decode(from, right, codec);
    let pairs = left.iter_mut().zip(right.iter());
    match op {
        ReduceOp::Product => pairs.for_each(|(left, right)| *left *= right),
        ReduceOp::Min => pairs.for_each(|(left, right)| *left = minimum_f32(*left, *right)),
        ReduceOp::Max => pairs.for_each(|(left, right)| *left = maximum_f32(*left, *right)),
        _ => unsupported(ElementType::F16, op),
    }
}

fn divide_half(codec: Codec, bytes: &mut [u8], ranks: u32) {
    let mut tile = [0.0_f32; TILE];
    for bytes in bytes.chunks_mut(TILE * codec.bytes()) {
        let tile = &mut tile[..bytes.len() / codec.bytes()];
        convert::decode(bytes, tile, codec);
        tile.iter_mut().for_each(|value| *value /= ranks as f32);
        convert::encode(tile, bytes, codec);
    }
}

fn reduce_bool(op: ReduceOp, into: &mut [u8], from: &[u8]) {
    let truth = |value: [u8; 1]| u8::from(value[0] != 0);
    match op {
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => {
            pairs(into, from, |left, right| [truth(left) | truth(right)]);
        }
        ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => {
            pairs(into, from, |left, right| [truth(left) & truth(right)]);
        }
        ReduceOp::BitXor => pairs(into, from, |left, right| [truth(left) ^ truth(right)]),
        ReduceOp::Average => unsupported(ElementType::Bool, op),
    }
}

macro_rules! floats {
    ($name:ident, $type:ty, $minimum:ident, $maximum:ident) => {
        fn $name(op: ReduceOp, into: &mut [u8], from: &[u8]) {
            let value = <$type>::from_le_bytes;
            match op {
                ReduceOp::Sum | ReduceOp::Average => {
                    pairs(into, from, |left, right| (value(left) + value(right)).to_le_bytes());
                }
                ReduceOp::Product => {
                    pairs(into, from, |left, right| (value(left) * value(right)).to_le_bytes())
                }
                ReduceOp::Min => {
                    pairs(into, from, |left, right| $minimum(value(left), value(right)).to_le_bytes());
                }
                ReduceOp::Max => {
                    pairs(into, from, |left, right| $maximum(value(left), value(right)).to_le_bytes());
                }
                ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => unsupported(ElementType::F32, op),
            }
        }

        // The minimum and maximum of IEEE 754-2019 are symmetric, so both partners of an exchange get the
        // same bits.
        #[inline(always)]
        fn $minimum(left: $type, right: $type) -> $type {
            if left < right {
                left
            } else if right < left {
                right
            } else if left == right {
                <$type>::from_bits(left.to_bits() | right.to_bits())
            } else {
                <$type>::NAN
            }
        }

        #[inline(always)]
        fn $maximum(left: $type, right: $type) -> $type {
            if left > right {
                left
            } else if right > left {
                right
            } else if left == right {
                <$type>::from_bits(left.to_bits() & right.to_bits())
            } else {
                <$type>::NAN
            }
        }
    };
}

floats!(floats_f32, f32, minimum_f32, maximum_f32);
floats!(floats_f64, f64, minimum_f64, maximum_f64);

macro_rules! integers {
    ($name:ident, $type:ty, $element:expr) => {
        fn $name(op: ReduceOp, into: &mut [u8], from: &[u8]) {
            let value = <$type>::from_le_bytes;
            match op {
                ReduceOp::Sum => {
                    pairs(into, from, |left, right| value(left).wrapping_add(value(right)).to_le_bytes());
                }
                ReduceOp::Product => {
                    pairs(into, from, |left, right| value(left).wrapping_mul(value(right)).to_le_bytes());
                }
                ReduceOp::Min => pairs(into, from, |left, right| value(left).min(value(right)).to_le_bytes()),
                ReduceOp::Max => pairs(into, from, |left, right| value(left).max(value(right)).to_le_bytes()),
                ReduceOp::BitAnd => {
                    pairs(into, from, |left, right| (value(left) & value(right)).to_le_bytes())
                }
                ReduceOp::BitOr => {
                    pairs(into, from, |left, right| (value(left) | value(right)).to_le_bytes())
                }
                ReduceOp::BitXor => {
                    pairs(into, from, |left, right| (value(left) ^ value(right)).to_le_bytes())
                }
                ReduceOp::Average => unsupported($element, op),
            }
        }
    };
}

integers!(integers_i8, i8, ElementType::I8);
integers!(integers_u8, u8, ElementType::U8);
integers!(integers_i16, i16, ElementType::I16);
integers!(integers_i32, i32, ElementType::I32);
integers!(integers_i64, i64, ElementType::I64);

/// The loop that the compiler vectorises: fixed-size pieces of unaligned bytes are plain unaligned loads.
#[inline(always)]
fn pairs<const N: usize>(into: &mut [u8], from: &[u8], f: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    for (left, right) in into.as_chunks_mut::<N>().0.iter_mut().zip(from.as_chunks::<N>().0) {
        *left = f(*left, *right);
    }
}

#[inline(always)]
fn each<const N: usize>(bytes: &mut [u8], f: impl Fn([u8; N]) -> [u8; N]) {
    for value in bytes.as_chunks_mut::<N>().0 {
        *value = f(*value);
    }
}

fn unsupported(element: ElementType, op: ReduceOp) -> ! {
    panic!("{op} of {element} was let in")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<T: bytemuck::Pod>(element: ElementType, op: ReduceOp, left: &[T], right: &[T]) -> Vec<T> {
        // Run it on aligned and on unaligned bytes: the two may take different loops.
        let mut odd = vec![0_u8; 1 + size_of_val(left)];
        odd[1..].copy_from_slice(bytemuck::cast_slice(left));
        reduce(element, op, &mut odd[1..], bytemuck::cast_slice(right));
        let mut even = left.to_vec();
        reduce(element, op, bytemuck::cast_slice_mut(&mut even), bytemuck::cast_slice(right));
        assert_eq!(&odd[1..], bytemuck::cast_slice::<T, u8>(&even), "{op} of {element}");
        even
    }

    #[test]
    fn floats_follow_ieee_and_nan_wins() {
        let left = [1.5_f32, -0.0, f32::NAN, f32::INFINITY, 0.0];
        let right = [2.5_f32, 0.0, 1.0, f32::NAN, -0.0];
        assert_eq!(reduced(ElementType::F32, ReduceOp::Sum, &left, &right)[..2], [4.0, 0.0]);
        let least = reduced(ElementType::F32, ReduceOp::Min, &left, &right);
        assert_eq!(least[0], 1.5);
        assert!(least[1].is_sign_negative() && least[2].is_nan() && least[3].is_nan());
        assert!(least[4].is_sign_negative());
        let most = reduced(ElementType::F32, ReduceOp::Max, &left, &right);
        assert!(
            most[1].is_sign_positive() && most[2].is_nan() && most[3].is_nan() && most[4].is_sign_positive()
        );
        assert_eq!(reduced(ElementType::F64, ReduceOp::Product, &[3.0_f64], &[0.5]), [1.5]);
    }

    #[test]
    fn halves_are_summed_in_f32_and_rounded_to_even() {
        let half = |value: f32| half::f16::from_f32(value).to_bits();
        // 2048 + 1 is a tie and goes to the even 2048; 2048 + 3 is a tie and goes to 2052.
        let sum =
            reduced(ElementType::F16, ReduceOp::Sum, &[half(2048.0), half(2048.0)], &[half(1.0), half(3.0)]);
        assert_eq!(sum, [half(2048.0), half(2052.0)]);
        let bf = |value: f32| half::bf16::from_f32(value).to_bits();
        let many = vec![bf(1.0); 3 * TILE + 7];
        let sum = reduced(ElementType::BF16, ReduceOp::Sum, &many, &many);
        assert!(sum.iter().all(|bits| *bits == bf(2.0)));
        let least = reduced(ElementType::BF16, ReduceOp::Min, &[bf(-1.0), bf(f32::NAN)], &[bf(3.0), bf(0.0)]);
        assert_eq!(least[0], bf(-1.0));
        assert!(half::bf16::from_bits(least[1]).is_nan());
    }

    #[test]
    fn integers_wrap_and_bool_is_logic() {
        assert_eq!(reduced(ElementType::I8, ReduceOp::Sum, &[127_i8, -3], &[1, 1]), [-128, -2]);
        assert_eq!(reduced(ElementType::U8, ReduceOp::Max, &[200_u8], &[100]), [200]);
        assert_eq!(reduced(ElementType::I16, ReduceOp::BitXor, &[0b1100_i16], &[0b1010]), [0b0110]);
        assert_eq!(reduced(ElementType::I32, ReduceOp::Product, &[i32::MAX], &[2]), [-2]);
        assert_eq!(reduced(ElementType::I64, ReduceOp::Min, &[-5_i64], &[4]), [-5]);
        assert_eq!(reduced(ElementType::Bool, ReduceOp::Sum, &[2_u8, 0, 0], &[3, 0, 9]), [1, 0, 1]);
        assert_eq!(reduced(ElementType::Bool, ReduceOp::Product, &[2_u8, 0, 1], &[3, 0, 0]), [1, 0, 0]);
        assert_eq!(reduced(ElementType::Bool, ReduceOp::BitXor, &[2_u8, 0, 1], &[3, 1, 0]), [0, 1, 1]);
    }

    #[test]
    fn an_average_divides() {
        let mut values = [9.0_f32, 1.0];
        divide(ElementType::F32, bytemuck::cast_slice_mut(&mut values), 4);
        assert_eq!(values, [2.25, 0.25]);
        let mut halves = [half::f16::from_f32(9.0).to_bits(); 5];
        divide(ElementType::F16, bytemuck::cast_slice_mut(&mut halves), 4);
        assert_eq!(halves, [half::f16::from_f32(2.25).to_bits(); 5]);
    }

    #[test]
    fn all_at_once_is_one_after_the_other() {
        // The length is odd, and longer than a tile of any element.
        let sources: Vec<Vec<u8>> =
            (1..4_u8).map(|k| (0..8 * 3 * TILE).map(|at| (at % 5) as u8 * k % 7).collect()).collect();
        for element in ElementType::ALL.into_iter().filter(|element| !element.is_float()) {
            for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(element)) {
                let mut expected = sources[0].clone();
                reduce(element, op, &mut expected, &sources[1]);
                reduce(element, op, &mut expected, &sources[2]);
                let read = |source: u32, at: usize, into: &mut [u8]| {
                    into.copy_from_slice(&sources[source as usize][at..at + into.len()]);
                };
                let mut with_own = sources[0].clone();
                reduce_all(element, op, &mut with_own, true, 1..3, read);
                let mut without = vec![0xff; expected.len()];
                reduce_all(element, op, &mut without, false, 0..3, read);
                assert_eq!((&with_own, &without), (&expected, &expected), "{op} of {element}");
            }
        }
    }

    #[test]
    fn halves_reduced_at_once_are_rounded_once() {
        let half = |value: f32| half::f16::from_f32(value).to_bits();
        // 2048 + 1 + 1 would stay 2048 if every sum were rounded.
        let read = |_: u32, _: usize, into: &mut [u8]| {
            into.copy_from_slice(&bytemuck::cast_slice(&[half(1.0); 3])[..into.len()]);
        };
        let mut sum = [half(2048.0); 3];
        reduce_all(ElementType::F16, ReduceOp::Sum, bytemuck::cast_slice_mut(&mut sum), true, 0..2, read);
        assert_eq!(sum, [half(2050.0); 3]);
    }

    #[test]
    fn every_supported_pair_has_a_loop() {
        for element in ElementType::ALL {
            for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(element)) {
                reduce(element, op, &mut [1; 16], &[1; 16]);
            }
        }
    }
}
