use std::sync::Arc;

use super::layer::Layer;
use super::matrix::{Activation, Matrix};
use super::parameters::LinearMap;
use super::window::Window;

/// A convolution as one matrix product per batch (im2col): each row of `columns` is the input under one window.
///
/// With channels last, a row of a window is one contiguous run of the image, the product's result already is the next
/// activation, and its gradient already is the matrix that the weight's gradient needs: nothing is transposed.
pub(super) struct Convolution {
    window: Window,
    parameters: LinearMap,
    columns: Option<Matrix>,
}

impl Convolution {
    /// A convolution; its weight is outputs x (side x side x channels).
    pub(super) fn new(window: Window, parameters: LinearMap) -> Self {
        Convolution { window, parameters, columns: None }
    }

    fn window_values(&self) -> usize {
        self.window.side * self.window.side * self.window.channels
    }

    fn positions(&self) -> usize {
        let (rows, columns) = self.window.output().expect("checked when the network was built");
        rows * columns
    }
}

impl Layer for Convolution {
    fn forward(&mut self, input: Activation, _training: bool) -> Activation {
        let batch = input.rows();
        let mut columns = self.columns.take().map_or_else(Vec::new, Matrix::into_values);
        columns.resize(batch * self.positions() * self.window_values(), 0.0);
        gather(&self.window, input.values(), &mut columns);
        let columns = Matrix::new(columns, self.window_values());
        let output = self.parameters.apply(&columns).with_rows(batch);
        self.columns = Some(columns);
        Arc::new(output)
    }

    fn input_gradient(&mut self, output_gradient: Matrix) -> Matrix {
        let batch = output_gradient.rows();
        let columns = self.parameters.input_gradient(&output_gradient.with_rows(batch * self.positions()));
        let mut images = Matrix::zeros(batch, self.window.features());
        scatter(&self.window, columns.values(), images.values_mut());
        images
    }

    fn parameters(&self) -> Option<&LinearMap> {
        Some(&self.parameters)
    }

    fn parameter_gradients(&mut self, output_gradient: &Matrix) -> [Vec<f32>; 2] {
        let columns = self.columns.as_ref().expect("forward comes before backward");
        self.parameters.gradients(columns, output_gradient.values())
    }
}

/// Copies the input under each window, zeros where it sticks out, into that window's row.
fn gather(window: &Window, images: &[f32], columns: &mut [f32]) {
    let mut column_runs = columns.chunks_exact_mut(window.side * window.channels);
    for_each_run(window, images.len(), |left, image, length, right| {
        let run = column_runs.next().expect("one run per row of a window");
        let (before, rest) = run.split_at_mut(left);
        let (inside, after) = rest.split_at_mut(length);
        debug_assert_eq!(after.len(), right);
        before.fill(0.0);
        inside.copy_from_slice(&images[image..][..length]);
        after.fill(0.0);
    });
}

/// Adds each window's row back to where it came from.
fn scatter(window: &Window, columns: &[f32], images: &mut [f32]) {
    let mut column_runs = columns.chunks_exact(window.side * window.channels);
    for_each_run(window, images.len(), |left, image, length, _right| {
        let run = column_runs.next().expect("one run per row of a window");
        let sums = &mut images[image..][..length];
        sums.iter_mut().zip(&run[left..][..length]).for_each(|(sum, value)| *sum += value);
    });
}

/// Calls `run` for every row of every window, in order, with the values of padding before it, its position in
/// the images, its length, and the values of padding after it.
fn for_each_run(window: &Window, values: usize, mut run: impl FnMut(usize, usize, usize, usize)) {
    let (rows, columns) = window.output().expect("checked when the network was built");
    let (channels, run_values) = (window.channels, window.side * window.channels);
    for image in (0..values).step_by(window.features()) {
        for row in 0..rows {
            for column in 0..columns {
                let span = window.span(column, window.width);
                let left = (window.padding.saturating_sub(column * window.stride) * channels).min(run_values);
                let length = span.len() * channels;
                for offset in 0..window.side {
                    let y = (row * window.stride + offset).wrapping_sub(window.padding);
                    match y < window.height && length > 0 {
                        true => {
                            let start = image + (y * window.width + span.start) * channels;
                            run(left, start, length, run_values - left - length);
                        }
                        false => run(run_values, 0, 0, 0),
                    }
                }
            }
        }
    }
}
