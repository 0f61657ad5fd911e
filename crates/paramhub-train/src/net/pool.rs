use std::sync::Arc;

use super::layer::Layer;
use super::matrix::{Activation, Matrix};
use super::window::Window;

/// The largest value under each window, for each channel; of equal ones the first.
pub(super) struct MaxPool {
    window: Window,
    /// For each output, which input it came from, counted within its image.
    sources: Vec<u32>,
}

impl MaxPool {
    pub(super) fn new(window: Window) -> Self {
        MaxPool { window, sources: Vec::new() }
    }
}

impl Layer for MaxPool {
    fn forward(&mut self, input: Activation, _training: bool) -> Activation {
        let sources = &mut self.sources;
        sources.clear();
        pool(&self.window, &input, |image, places, output| {
            let channels = output.len();
            let first = sources.len();
            for (nth, place) in places.enumerate() {
                let candidates = &image[place..][..channels];
                if nth == 0 {
                    output.copy_from_slice(candidates);
                    sources.extend((place..place + channels).map(|source| source as u32));
                    continue;
                }
                let winners = output.iter_mut().zip(&mut sources[first..]);
                for ((channel, &value), (best, source)) in candidates.iter().enumerate().zip(winners) {
                    if value > *best {
                        (*best, *source) = (value, (place + channel) as u32);
                    }
                }
            }
        })
    }

    fn input_gradient(&mut self, output_gradient: Matrix) -> Matrix {
        let (outputs, features) = (output_gradient.columns(), self.window.features());
        let mut gradient = Matrix::zeros(output_gradient.rows(), features);
        let images = gradient.values_mut().chunks_exact_mut(features);
        let rows = output_gradient.values().chunks_exact(outputs).zip(self.sources.chunks_exact(outputs));
        for (image, (values, sources)) in images.zip(rows) {
            values.iter().zip(sources).for_each(|(value, &source)| image[source as usize] += value);
        }
        gradient
    }
}

/// The mean under each window, for each channel. As in Caffe, a window that sticks out divides by the number
/// of values that it covers.
pub(super) struct AveragePool {
    window: Window,
}

impl AveragePool {
    pub(super) fn new(window: Window) -> Self {
        AveragePool { window }
    }
}

impl Layer for AveragePool {
    fn forward(&mut self, input: Activation, _training: bool) -> Activation {
        pool(&self.window, &input, |image, places, output| {
            let mut count = 0.0;
            for place in places {
                count += 1.0;
                output.iter_mut().zip(&image[place..]).for_each(|(sum, value)| *sum += value);
            }
            output.iter_mut().for_each(|sum| *sum /= count);
        })
    }

    fn input_gradient(&mut self, output_gradient: Matrix) -> Matrix {
        let (window, features) = (&self.window, self.window.features());
        let mut gradient = Matrix::zeros(output_gradient.rows(), features);
        let images = gradient.values_mut().chunks_exact_mut(features);
        for (image, values) in images.zip(output_gradient.values().chunks_exact(output_gradient.columns())) {
            for (at, values) in values.chunks_exact(window.channels).enumerate() {
                let count = places(window, at).count() as f32;
                for place in places(window, at) {
                    let sums = &mut image[place..][..window.channels];
                    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value / count);
                }
            }
        }
        gradient
    }
}

/// Reduces every window. `reduce` gets the image, the positions of the window's pixels in it, and the
/// output's channels.
fn pool(
    window: &Window,
    input: &Matrix,
    mut reduce: impl FnMut(&[f32], &mut dyn Iterator<Item = usize>, &mut [f32]),
) -> Activation {
    let (rows, columns) = window.output().expect("checked when the network was built");
    let outputs = rows * columns * window.channels;
    let mut output = Matrix::zeros(input.rows(), outputs);
    let images = input.values().chunks_exact(input.columns());
    for (image, output) in images.zip(output.values_mut().chunks_exact_mut(outputs)) {
        for (at, output) in output.chunks_exact_mut(window.channels).enumerate() {
            reduce(image, &mut places(window, at), output);
        }
    }
    Arc::new(output)
}

/// The positions at which the pixels under one window begin in their image, row by row.
fn places(window: &Window, at: usize) -> impl Iterator<Item = usize> + use<> {
    let (_, columns) = window.output().expect("checked when the network was built");
    let Window { width, channels, .. } = *window;
    let across = window.span(at % columns, width);
    window
        .span(at / columns, window.height)
        .flat_map(move |y| across.clone().map(move |x| (y * width + x) * channels))
}
