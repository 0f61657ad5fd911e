//! Products of matrices.
//!
//! This is the only module of the crate whose arithmetic may use fused multiply-adds: the crate
//! matrixmultiply uses them if the processor has them. It computes every element in one way: it adds up the
//! terms in the order of the inner dimension, in partial sums of 256 terms, and adds each partial sum to the
//! element. So on processors with fused multiply-adds the bits depend only on the factors, and not on how the
//! product is divided into tiles or which threads compute these. Processors without them make other last
//! bits.

use std::ops::Range;

/// A matrix that is a factor of a product. Its elements lie in a slice at fixed distances.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Begins with the first element of the matrix. If the matrix has elements, the slice contains the last
    /// one: `(rows - 1) * row_stride + (columns - 1) * column_stride` is below the slice's length.
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Operand<'a> {
    /// Makes the matrix whose rows lie one after the other in `values`.
    ///
    /// # Panics
    /// If `values` does not have `rows` times `columns` elements.
    pub fn new(values: &'a [f32], rows: usize, columns: usize) -> Self {
        assert_eq!(Some(values.len()), rows.checked_mul(columns), "a matrix of {rows} x {columns}");
        Operand { values, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// Returns the transposed matrix, in the same memory.
    pub fn transposed(self) -> Self {
        Operand {
            values: self.values,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }

    /// Returns the part of the matrix that consists of these columns, in the same memory.
    ///
    /// # Panics
    /// If the matrix does not have all of these columns.
    pub fn columns(self, columns: Range<usize>) -> Self {
        assert!(
            columns.start <= columns.end && columns.end <= self.columns,
            "columns {columns:?} of {}",
            self.columns
        );
        // The start of a part without elements may be beyond the end of the slice.
        let start = (columns.start * self.column_stride).min(self.values.len());
        Operand { values: &self.values[start..], columns: columns.len(), ..self }
    }
}

/// Writes the product, a row for each of `left` and a column for each of `right`, to `target`. Each row
/// begins `stride` elements after the one before; the elements between the rows stay unchanged.
///
/// # Panics
/// If the number of columns of `left` is not the number of rows of `right`, if a row is longer than `stride`,
/// or if `target` is too short.
pub fn multiply(left: Operand<'_>, right: Operand<'_>, target: &mut [f32], stride: usize) {
    let (rows, inner, columns) = (left.rows, left.columns, right.columns);
    assert_eq!(inner, right.rows, "the columns of the left factor are as many as the rows of the right one");
    assert!(columns <= stride, "rows of {columns} elements, {stride} apart");
    if rows == 0 || columns == 0 {
        return;
    }
    let length = (rows - 1).checked_mul(stride).and_then(|start| start.checked_add(columns));
    let target = &mut target[..length.expect("a target in memory")];
    if inner == 0 {
        target.chunks_mut(stride).for_each(|row| row[..columns].fill(0.0));
        return;
    }
    // SAFETY: neither factor is empty here, so by the invariant of `Operand` every element that the product
    // reads is within the factor's slice. It writes `target[r * stride + c]` for r < rows and c < columns, at
    // most the last element of `target`, which was cut to that length above and is borrowed mutably, so that
    // it overlaps neither factor; all of these elements are distinct, because a row is at most `stride` long.
    // A stride is used only if there is a second row or column; then it is below the length of a slice, so it
    // fits isize.
    unsafe {
        matrixmultiply::sgemm(
            rows,
            inner,
            columns,
            1.0,
            left.values.as_ptr(),
            left.row_stride as isize,
            left.column_stride as isize,
            right.values.as_ptr(),
            right.row_stride as isize,
            right.column_stride as isize,
            0.0,
            target.as_mut_ptr(),
            stride as isize,
            1,
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The product in f64, element by element. Both factors are row by row.
    fn reference(left: &[f32], right: &[f32], [rows, inner, columns]: [usize; 3]) -> Vec<f64> {
        let element = |r: usize, c: usize| {
            (0..inner).map(|k| f64::from(left[r * inner + k]) * f64::from(right[k * columns + c])).sum()
        };
        (0..rows * columns).map(|at| element(at / columns, at % columns)).collect()
    }

    fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        (0..values.len()).map(|at| values[at % rows * columns + at / rows]).collect()
    }

    /// The shape `[rows, inner, columns]` of a product, and its factors row by row.
    fn problem() -> impl Strategy<Value = ([usize; 3], Vec<f32>, Vec<f32>)> {
        (0_usize..40, 0_usize..40, 0_usize..40).prop_flat_map(|(rows, inner, columns)| {
            let numbers = |count| proptest::collection::vec(-1.0_f32..1.0, count);
            (Just([rows, inner, columns]), numbers(rows * inner), numbers(inner * columns))
        })
    }

    proptest! {
        #[test]
        fn any_arrangement_of_the_factors_has_the_same_product((shape, left, right) in problem(), gap in 0_usize..3) {
            let [rows, inner, columns] = shape;
            let expected = reference(&left, &right, shape);
            let (left_turned, right_turned) = (transposed(&left, rows, inner), transposed(&right, inner, columns));
            let lefts = [Operand::new(&left, rows, inner), Operand::new(&left_turned, inner, rows).transposed()];
            let rights = [Operand::new(&right, inner, columns), Operand::new(&right_turned, columns, inner).transposed()];
            let stride = columns + gap;
            for (left, right) in lefts.into_iter().flat_map(|left| rights.map(|right| (left, right))) {
                let mut target = vec![7.0; rows * stride];
                multiply(left, right, &mut target, stride);
                for (at, &found) in target.iter().enumerate() {
                    let (row, column) = (at / stride, at % stride);
                    if column < columns {
                        let expected = expected[row * columns + column];
                        prop_assert!((f64::from(found) - expected).abs() < 1e-5, "{found} for {expected}");
                    } else {
                        prop_assert_eq!(found, 7.0);
                    }
                }
            }
        }

        #[test]
        fn parts_of_the_factors_make_parts_of_the_product(
            (shape, left, right) in problem(), first in 0_usize..40, length in 0_usize..40,
        ) {
            let [rows, inner, columns] = shape;
            let first = first % (columns + 1);
            let part = first..(first + length).min(columns);
            let (left, right) = (Operand::new(&left, rows, inner), Operand::new(&right, inner, columns));
            let (mut whole, mut found) = (vec![0.0; rows * columns], vec![0.0; rows * part.len()]);
            multiply(left, right, &mut whole, columns);
            multiply(left, right.columns(part.clone()), &mut found, part.len());
            for row in 0..rows {
                for column in part.clone() {
                    let (found, whole) =
                        (found[row * part.len() + column - first], whole[row * columns + column]);
                    prop_assert_eq!(found.to_bits(), whole.to_bits());
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "a matrix of 2 x 3")]
    fn a_matrix_of_another_shape_is_a_bug_of_the_caller() {
        Operand::new(&[0.0; 5], 2, 3);
    }

    #[test]
    #[should_panic(expected = "as many as the rows of the right one")]
    fn factors_that_do_not_fit_are_a_bug_of_the_caller() {
        multiply(Operand::new(&[0.0; 6], 2, 3), Operand::new(&[0.0; 8], 4, 2), &mut [0.0; 4], 2);
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn a_short_target_is_a_bug_of_the_caller() {
        multiply(Operand::new(&[0.0; 6], 2, 3), Operand::new(&[0.0; 6], 3, 2), &mut [0.0; 3], 2);
    }
}
