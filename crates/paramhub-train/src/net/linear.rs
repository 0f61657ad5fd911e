use candle_core::{Result, Tensor};

use super::layer::{Layer, Parameters};
use super::storage;

/// A fully connected layer: y = x Wᵀ + b.
pub(super) struct Linear {
    parameters: Parameters,
    input: Option<Tensor>,
}

impl Linear {
    pub(super) fn new(parameters: Parameters) -> Self {
        Linear { parameters, input: None }
    }
}

impl Layer for Linear {
    fn forward(&mut self, input: Tensor, training: bool) -> Result<Tensor> {
        let output = self.parameters.apply(&input)?;
        self.input = training.then_some(input);
        Ok(output)
    }

    fn input_gradient(&mut self, output_gradient: Tensor) -> Result<Tensor> {
        self.parameters.input_gradient(&output_gradient)
    }

    fn parameters(&self) -> Option<&Parameters> {
        Some(&self.parameters)
    }

    fn fully_connected(&self) -> Option<[usize; 2]> {
        self.parameters.weight.dims2().ok().map(<[usize; 2]>::from)
    }

    fn factors(&mut self, output_gradient: &Tensor) -> Result<[Vec<f32>; 2]> {
        let input = self.input.take().expect("forward comes before backward");
        Ok([storage::read(&input, <[f32]>::to_vec)?, storage::read(output_gradient, <[f32]>::to_vec)?])
    }

    fn parameter_gradients(&mut self, output_gradient: &Tensor) -> Result<[Vec<f32>; 2]> {
        let input = self.input.take().expect("forward comes before backward");
        self.parameters.gradients(&input, output_gradient)
    }
}
