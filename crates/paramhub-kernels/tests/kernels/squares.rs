use paramhub_kernels::Isa;
use paramhub_kernels::squares::{squares, squares_with};
use proptest::prelude::*;

#[test]
fn squares_of_the_scaled_values_are_added_in_double_precision() {
    assert_eq!(squares(&[], 1.0), 0.0);
    assert_eq!(squares(&[3.0, 4.0], 1.0), 25.0);
    assert_eq!(squares(&[3.0, 4.0], 0.5), 6.25);
    // In single precision the squares would overflow, and the small value would be lost.
    assert_eq!(squares(&[1e30], 1.0), f64::from(1e30_f32).powi(2));
    assert_eq!(squares(&[1e5, 1e-2], 1.0), 1e10 + f64::from(1e-2_f32).powi(2));
    // A third is rounded as an optimizer rounds it.
    assert_eq!(squares(&[1.0], 1.0 / 3.0), f64::from(1.0_f32 / 3.0).powi(2));
    assert!(squares(&[1.0, f32::NAN], 1.0).is_nan());
    assert_eq!(squares(&[1.0, f32::NEG_INFINITY], 1.0), f64::INFINITY);
}

proptest! {
    #[test]
    fn every_body_gives_the_same_bits_near_those_of_a_plain_loop(
        values in prop::collection::vec(-1e3_f32..1e3, 0..700),
        factor in 1e-3_f32..2.0,
    ) {
        let plain: f64 = values.iter().map(|value| f64::from(value * factor).powi(2)).sum();
        let first = squares_with(Isa::baseline(), &values, factor);
        prop_assert!((first - plain).abs() <= plain * 1e-12);
        for isa in Isa::available() {
            prop_assert_eq!(squares_with(isa, &values, factor).to_bits(), first.to_bits(), "{}", isa);
        }
    }
}
