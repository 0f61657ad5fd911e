use std::sync::Arc;

use paramhub_kernels::product::Operand;

/// Rows x columns of numbers, row by row in one piece of memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    values: Vec<f32>,
    rows: usize,
    columns: usize,
}

/// The output of a node, or the images: a row for each example, its features in row, column, channel order
/// (channels last). Several nodes may hold it; one that changes it gets memory of its own if it is not the
/// last.
pub(crate) type Activation = Arc<Matrix>;

impl Matrix {
    /// A matrix of these values, with as many rows as they make.
    ///
    /// # Panics
    /// If there are no columns, or the values do not fill the last row.
    pub fn new(values: Vec<f32>, columns: usize) -> Matrix {
        assert!(values.len().is_multiple_of(columns), "{} values in rows of {columns}", values.len());
        Matrix { rows: values.len() / columns, columns, values }
    }

    pub(super) fn zeros(rows: usize, columns: usize) -> Matrix {
        Matrix { values: vec![0.0; rows * columns], rows, columns }
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The values, row by row.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    pub(super) fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// The values, row by row, in the matrix's own memory.
    pub(super) fn into_values(self) -> Vec<f32> {
        self.values
    }

    /// The same values in another number of rows, which must divide theirs.
    pub(super) fn with_rows(self, rows: usize) -> Matrix {
        let columns = self.values.len() / rows;
        assert_eq!(rows * columns, self.values.len(), "the rows have the same length");
        Matrix { rows, columns, ..self }
    }

    /// The matrix as a factor of a product.
    pub(super) fn operand(&self) -> Operand<'_> {
        Operand::new(&self.values, self.rows, self.columns)
    }
}
