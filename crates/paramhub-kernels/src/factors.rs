//! Gradients of fully connected layers from their sufficient factors (Poseidon section 3.2).
//!
//! A layer of M outputs and N inputs has processed K samples. `inputs` are the K rows of N numbers that went
//! in; `output_gradients`, K rows of M numbers, are the gradient of the loss with respect to the layer's
//! output. The gradient of the weight, M rows of N numbers, is the sum of the K outer products, and that of
//! the bias is the sum of the K rows of output gradients.
//!
//! Every element is one chain over the samples in their order, as [`product`](crate::product) states. Workers
//! that must agree on the bits compare first: [`fingerprint`].

use std::ops::Range;

use crate::product::{Operand, multiply};

/// The factors of a step: all samples of all workers, in rank order.
#[derive(Clone, Copy, Debug)]
pub struct Factors<'a> {
    inputs: &'a [f32],
    output_gradients: &'a [f32],
    /// N.
    columns: usize,
    /// M.
    rows: usize,
    samples: usize,
}

impl<'a> Factors<'a> {
    /// Factors of `samples` samples of a weight of `rows` (outputs, M) times `columns` (inputs, N).
    ///
    /// # Panics
    /// If `inputs` does not have `samples` times `columns` elements, or `output_gradients` not `samples` times `rows`.
    pub fn new(
        samples: usize,
        (rows, columns): (usize, usize),
        inputs: &'a [f32],
        output_gradients: &'a [f32],
    ) -> Self {
        assert_eq!(Some(inputs.len()), samples.checked_mul(columns), "inputs are samples times columns");
        assert_eq!(
            Some(output_gradients.len()),
            samples.checked_mul(rows),
            "output gradients are samples times rows"
        );
        Factors { inputs, output_gradients, columns, rows, samples }
    }

    /// Writes a tile of the weight's gradient, the elements in these rows and columns, row by row, to the
    /// first `rows.len() * columns.len()` elements of `tile`.
    ///
    /// # Panics
    /// If the rows or columns are not within the matrix, or `tile` is too short.
    pub fn weight_gradient(&self, rows: Range<usize>, columns: Range<usize>, tile: &mut [f32]) {
        let stride = columns.len();
        self.weight_gradient_into(rows, columns, tile, stride);
    }

    /// Does the same as [`weight_gradient`](Self::weight_gradient), but each row of the tile begins `stride`
    /// elements after the one before, as in a part of a larger matrix. The elements between the rows stay
    /// unchanged.
    ///
    /// # Panics
    /// As there, or if a row is longer than `stride`.
    pub fn weight_gradient_into(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        target: &mut [f32],
        stride: usize,
    ) {
        let gradients = Operand::new(self.output_gradients, self.samples, self.rows).columns(rows);
        let inputs = Operand::new(self.inputs, self.samples, self.columns).columns(columns);
        multiply(gradients.transposed(), inputs, target, stride);
    }

    /// The bias's gradient, one element for each row of the weight, added up in the order of the samples.
    ///
    /// # Panics
    /// If `gradient` does not have M elements.
    pub fn bias_gradient(&self, gradient: &mut [f32]) {
        assert_eq!(gradient.len(), self.rows, "a bias has an element for each row");
        self.bias_gradient_of(0..self.rows, gradient);
    }

    /// Does the same as [`bias_gradient`](Self::bias_gradient), for some rows alone.
    ///
    /// # Panics
    /// If the rows are not within the matrix, or `gradient` does not have an element for each.
    pub fn bias_gradient_of(&self, rows: Range<usize>, gradient: &mut [f32]) {
        assert_eq!(gradient.len(), rows.len(), "an element for each row");
        gradient.fill(0.0);
        for sample in self.output_gradients.chunks_exact(self.rows.max(1)) {
            gradient.iter_mut().zip(&sample[rows.clone()]).for_each(|(sum, value)| *sum += value);
        }
    }
}

/// The most elements of a tile: with the parameters, the state and the answer it stays in a core's second
/// cache.
const TILE_ELEMENTS: usize = 1 << 17;
/// The most columns of a tile.
const TILE_COLUMNS: usize = 2048;
/// The number of samples with which a full tile takes about a millisecond.
const TILE_SAMPLES: usize = 256;
/// With fewer rows or columns a product would spend its time on arranging its factors.
const TILE_ROWS_MIN: usize = 64;
const TILE_COLUMNS_MIN: usize = 128;

/// The way in which a gradient is made piece by piece: in bands of rows, and each band in tiles of columns.
/// A tile is at most 512 KiB large and about a millisecond's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling {
    /// Rows of a band; the last may have fewer.
    pub rows: usize,
    /// Columns of a tile; the last of a band may have fewer.
    pub columns: usize,
}

impl Tiling {
    /// The tiling for a matrix of this many columns and products over this many samples.
    pub fn new(columns: usize, samples: usize) -> Tiling {
        let elements = TILE_ELEMENTS / samples.div_ceil(TILE_SAMPLES).max(1);
        let rows = (elements / columns.max(1)).max(TILE_ROWS_MIN);
        let width = (elements / rows).clamp(TILE_COLUMNS_MIN, TILE_COLUMNS);
        Tiling { rows, columns: width.min(columns.max(1)) }
    }

    /// Elements of the largest tile.
    pub fn elements(self) -> usize {
        self.rows * self.columns
    }

    /// The tiles of a row of this many elements, left to right.
    pub fn across(self, columns: usize) -> impl Iterator<Item = Range<usize>> {
        (0..columns).step_by(self.columns).map(move |start| start..columns.min(start + self.columns))
    }
}

/// A digest of the bits of a few products on this processor. If it is equal in two processes, so are their
/// products of equal factors.
pub fn fingerprint() -> u64 {
    // More samples than one chain has, and sides that the width of no register divides.
    const SHAPE: (usize, usize) = (37, 43);
    const SAMPLES: usize = 300;
    // Numbers whose products need rounding, from a linear congruential generator.
    let mut state = 0x9e37_79b9_u32;
    let mut draw = |count: usize| -> Vec<f32> {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    };
    let (inputs, gradients) = (draw(SAMPLES * SHAPE.1), draw(SAMPLES * SHAPE.0));
    let mut product = vec![0.0; SHAPE.0 * SHAPE.1];
    Factors::new(SAMPLES, SHAPE, &inputs, &gradients).weight_gradient(0..SHAPE.0, 0..SHAPE.1, &mut product);
    // FNV-1a.
    let bytes = product.iter().flat_map(|value| value.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The weight's gradient in f64, element by element.
    fn reference(factors: &Factors<'_>) -> Vec<f64> {
        let mut gradient = vec![0.0; factors.rows * factors.columns];
        for k in 0..factors.samples {
            for r in 0..factors.rows {
                for c in 0..factors.columns {
                    gradient[r * factors.columns + c] +=
                        f64::from(factors.output_gradients[k * factors.rows + r])
                            * f64::from(factors.inputs[k * factors.columns + c]);
                }
            }
        }
        gradient
    }

    fn numbers(count: usize) -> impl Strategy<Value = Vec<f32>> {
        proptest::collection::vec(-1.0_f32..1.0, count)
    }

    fn problem() -> impl Strategy<Value = (usize, (usize, usize), Vec<f32>, Vec<f32>)> {
        (0_usize..9, 1_usize..40, 1_usize..40).prop_flat_map(|(samples, rows, columns)| {
            (Just(samples), Just((rows, columns)), numbers(samples * columns), numbers(samples * rows))
        })
    }

    proptest! {
        #[test]
        fn the_gradient_is_the_sum_of_outer_products((samples, shape, inputs, gradients) in problem()) {
            let factors = Factors::new(samples, shape, &inputs, &gradients);
            let mut whole = vec![f32::NAN; shape.0 * shape.1];
            factors.weight_gradient(0..shape.0, 0..shape.1, &mut whole);
            for (&got, expected) in whole.iter().zip(reference(&factors)) {
                prop_assert!((f64::from(got) - expected).abs() < 1e-5, "{got} for {expected}");
            }
            let mut bias = vec![f32::NAN; shape.0];
            factors.bias_gradient(&mut bias);
            let mut parts = vec![f32::NAN; shape.0];
            let (upper, lower) = parts.split_at_mut(shape.0 / 2);
            factors.bias_gradient_of(0..shape.0 / 2, upper);
            factors.bias_gradient_of(shape.0 / 2..shape.0, lower);
            prop_assert_eq!(&parts, &bias);
            for (r, &got) in bias.iter().enumerate() {
                let expected: f64 = (0..samples).map(|k| f64::from(gradients[k * shape.0 + r])).sum();
                prop_assert!((f64::from(got) - expected).abs() < 1e-5);
            }
        }

        #[test]
        fn tiles_have_the_bits_of_the_whole(
            (samples, shape, inputs, gradients) in problem(), row in 0_usize..40, column in 0_usize..40,
        ) {
            let factors = Factors::new(samples, shape, &inputs, &gradients);
            let (row, column) = (row % (shape.0 + 1), column % (shape.1 + 1));
            let mut whole = vec![f32::NAN; shape.0 * shape.1];
            factors.weight_gradient(0..shape.0, 0..shape.1, &mut whole);
            let mut tile = vec![f32::NAN; shape.0 * shape.1];
            for rows in [0..row, row..shape.0] {
                for columns in [0..column, column..shape.1] {
                    factors.weight_gradient(rows.clone(), columns.clone(), &mut tile);
                    for (r, row) in rows.clone().enumerate() {
                        for (c, column) in columns.clone().enumerate() {
                            let (got, expected) = (tile[r * columns.len() + c], whole[row * shape.1 + column]);
                            prop_assert_eq!(got.to_bits(), expected.to_bits());
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_tile_in_a_larger_matrix_leaves_what_is_around_it() {
        let (samples, shape) = (3, (10, 20));
        let value = |i: usize| (i % 17) as f32 - 8.0;
        let inputs: Vec<f32> = (0..samples * shape.1).map(value).collect();
        let gradients: Vec<f32> = (0..samples * shape.0).map(|i| value(i + 3)).collect();
        for samples in [0, samples] {
            let factors =
                Factors::new(samples, shape, &inputs[..samples * shape.1], &gradients[..samples * shape.0]);
            let mut whole = vec![0.0; shape.0 * shape.1];
            factors.weight_gradient(0..shape.0, 0..shape.1, &mut whole);
            let mut matrix = vec![0.5; shape.0 * shape.1];
            factors.weight_gradient_into(2..7, 4..11, &mut matrix[2 * shape.1 + 4..], shape.1);
            for (at, &got) in matrix.iter().enumerate() {
                let is_inside = (2..7).contains(&(at / shape.1)) && (4..11).contains(&(at % shape.1));
                assert_eq!(got, if is_inside { whole[at] } else { 0.5 }, "element {at}");
            }
        }
    }

    #[test]
    fn tiles_are_small_and_not_narrow() {
        for columns in [1, 10, 784, 2048, 4096, 25_088] {
            for samples in [0, 1, 64, 256, 1000, 100_000] {
                let tiling = Tiling::new(columns, samples);
                assert!(
                    tiling.elements() <= TILE_ELEMENTS,
                    "{columns} columns, {samples} samples: {tiling:?}"
                );
                assert!(tiling.rows >= TILE_ROWS_MIN && tiling.columns >= columns.min(TILE_COLUMNS_MIN));
                let across: Vec<_> = tiling.across(columns).collect();
                assert_eq!((across[0].start, across.last().unwrap().end), (0, columns));
                assert!(across.windows(2).all(|pair| pair[0].end == pair[1].start));
            }
        }
        assert_eq!(Tiling::new(25_088, 256), Tiling { rows: 64, columns: 2048 });
        assert_eq!(Tiling::new(25_088, 2048), Tiling { rows: 64, columns: 256 });
    }

    /// The order of samples is the order of additions, and every tile cuts the chains at the same place.
    #[test]
    fn many_samples_have_the_same_bits_in_any_tile() {
        let (samples, shape) = (1000, (70, 130));
        let value = |i: usize| ((i * 7919) % 1000) as f32 / 500.0 - 1.0;
        let inputs: Vec<f32> = (0..samples * shape.1).map(value).collect();
        let gradients: Vec<f32> = (0..samples * shape.0).map(|i| value(i + 3)).collect();
        let factors = Factors::new(samples, shape, &inputs, &gradients);
        let mut whole = vec![0.0; shape.0 * shape.1];
        factors.weight_gradient(0..shape.0, 0..shape.1, &mut whole);
        let mut tile = vec![0.0; 33 * 65];
        factors.weight_gradient(20..53, 65..130, &mut tile);
        for r in 0..33 {
            assert_eq!(tile[r * 65..(r + 1) * 65], whole[(20 + r) * shape.1 + 65..(20 + r) * shape.1 + 130]);
        }
        assert_eq!(fingerprint(), fingerprint());
    }

    #[test]
    #[should_panic(expected = "inputs are samples times columns")]
    fn factors_of_another_shape_are_a_bug_of_the_caller() {
        Factors::new(2, (3, 4), &[0.0; 7], &[0.0; 6]);
    }
}
