use candle_core::{Device, Result, Tensor};

use super::layer::Layer;
use super::storage;
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
    fn forward(&mut self, input: Tensor, _training: bool) -> Result<Tensor> {
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

    fn input_gradient(&mut self, output_gradient: Tensor) -> Result<Tensor> {
        let (batch, outputs) = output_gradient.dims2()?;
        let features = self.window.features();
        let mut gradient = vec![0.0; batch * features];
        storage::read(&output_gradient, |values| {
            let images = gradient.chunks_exact_mut(features);
            let rows = values.chunks_exact(outputs).zip(self.sources.chunks_exact(outputs));
            for (image, (values, sources)) in images.zip(rows) {
                values.iter().zip(sources).for_each(|(value, &source)| image[source as usize] += value);
            }
        })?;
        Tensor::from_vec(gradient, (batch, features), &Device::Cpu)
    }
}

/// The mean under each window, for each channel. As in Caffe, a window that sticks out divides by what it covers.
pub(super) struct AveragePool {
    window: Window,
}

impl AveragePool {
    pub(super) fn new(window: Window) -> Self {
        AveragePool { window }
    }
}

impl Layer for AveragePool {
    fn forward(&mut self, input: Tensor, _training: bool) -> Result<Tensor> {
        pool(&self.window, &input, |image, places, output| {
            let mut count = 0.0;
            for place in places {
                count += 1.0;
                output.iter_mut().zip(&image[place..]).for_each(|(sum, value)| *sum += value);
            }
            output.iter_mut().for_each(|sum| *sum /= count);
        })
    }

    fn input_gradient(&mut self, output_gradient: Tensor) -> Result<Tensor> {
        let (batch, outputs) = output_gradient.dims2()?;
        let (window, features) = (&self.window, self.window.features());
        let mut gradient = vec![0.0; batch * features];
        storage::read(&output_gradient, |values| {
            for (image, values) in gradient.chunks_exact_mut(features).zip(values.chunks_exact(outputs)) {
                for (at, values) in values.chunks_exact(window.channels).enumerate() {
                    let count = places(window, at).count() as f32;
                    for place in places(window, at) {
                        let sums = &mut image[place..][..window.channels];
                        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value / count);
                    }
                }
            }
        })?;
        Tensor::from_vec(gradient, (batch, features), &Device::Cpu)
    }
}

/// Reduces every window: `reduce` gets the image, the places of the window's pixels in it, and the output's channels.
fn pool(
    window: &Window,
    input: &Tensor,
    mut reduce: impl FnMut(&[f32], &mut dyn Iterator<Item = usize>, &mut [f32]),
) -> Result<Tensor> {
    let (batch, features) = input.dims2()?;
    let (rows, columns) = window.output().expect("checked when the network was built");
    let outputs = rows * columns * window.channels;
    let mut output = vec![0.0; batch * outputs];
    storage::read(input, |images| {
        for (image, output) in images.chunks_exact(features).zip(output.chunks_exact_mut(outputs)) {
            for (at, output) in output.chunks_exact_mut(window.channels).enumerate() {
                reduce(image, &mut places(window, at), output);
            }
        }
    })?;
    Tensor::from_vec(output, (batch, outputs), &Device::Cpu)
}

/// Where the pixels under one window begin in their image, row by row.
fn places(window: &Window, at: usize) -> impl Iterator<Item = usize> + use<> {
    let (_, columns) = window.output().expect("checked when the network was built");
    let Window { width, channels, .. } = *window;
    let across = window.span(at % columns, width);
    window
        .span(at / columns, window.height)
        .flat_map(move |y| across.clone().map(move |x| (y * width + x) * channels))
}
