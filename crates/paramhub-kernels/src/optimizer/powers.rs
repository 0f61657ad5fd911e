//! Powers whose bits are the same on every CPU. The platform's `pow` and `exp` may differ in the last bit between CPUs, and
//! hubs that repeat a step must get the same values.

/// `base` to the power of `exponent` by squaring.
pub(super) fn power(base: f64, mut exponent: u64) -> f64 {
    let mut result = 1.0;
    let mut square = base;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= square;
        }
        square *= square;
        exponent >>= 1;
    }
    result
}

/// e to the power of `x`, by Taylor's series of a small part of `x` and squaring.
pub(super) fn exponential(x: f64) -> f64 {
    let (mut part, mut squarings) = (x, 0);
    while part.is_finite() && part.abs() > 0.5 {
        part *= 0.5;
        squarings += 1;
    }
    let (mut term, mut sum) = (1.0, 1.0);
    for number in 1..=20 {
        term *= part / f64::from(number);
        sum += term;
    }
    (0..squarings).fold(sum, |value, _| value * value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_agree_with_pow_where_bias_correction_needs_it() {
        for base in [0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 0.999_999] {
            for exponent in (1..2000).chain([10_000, 1_000_000, u64::MAX]) {
                let exact = f64::powf(base, exponent as f64);
                assert!(
                    ((1.0 - power(base, exponent)) / (1.0 - exact) - 1.0).abs() < 1e-9,
                    "{base}^{exponent}"
                );
            }
        }
    }

    #[test]
    fn the_exponential_agrees_with_exp() {
        for x in [0.0, -1e-9, -0.000_163, -0.04, 0.3, -0.5, -3.0, -40.0, 20.0] {
            assert!((exponential(x) / f64::exp(x) - 1.0).abs() < 1e-12, "{x}");
        }
        assert_eq!(exponential(-1e9), 0.0);
    }
}
