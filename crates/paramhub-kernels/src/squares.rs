//! The sum of squares for the norm of a gradient.

use crate::dispatch::{Isa, kernel};

/// The number of running sums, so that additions do not wait for one another.
const LANES: usize = 16;

/// The sum of the squares of `values[i] * factor`. The products are rounded to f32, as an optimizer rounds a
/// mean. Their squares are exact in f64, in which they are added in an order that depends on `values.len()`
/// alone.
pub fn squares(values: &[f32], factor: f32) -> f64 {
    squares_with(Isa::best(), values, factor)
}

kernel! {
    /// [`squares`] by the body for `isa`.
    pub fn squares_with(values: &[f32], factor: f32) -> f64 {
        let mut sums = [0.0_f64; LANES];
        let (blocks, rest) = values.as_chunks::<LANES>();
        for block in blocks {
            for (sum, value) in sums.iter_mut().zip(block) {
                let scaled = f64::from(value * factor);
                *sum += scaled * scaled;
            }
        }
        for (sum, value) in sums.iter_mut().zip(rest) {
            let scaled = f64::from(value * factor);
            *sum += scaled * scaled;
        }
        sums.iter().sum()
    }
}
