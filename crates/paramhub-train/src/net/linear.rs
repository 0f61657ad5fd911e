use candle_core::{Result, Tensor};

use super::layer::{Layer, Parameters};

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

    fn parameter_gradients(&mut self, output_gradient: &Tensor) -> Result<[Vec<f32>; 2]> {
        let input = self.input.take().expect("forward comes before backward");
        self.parameters.gradients(&input, output_gradient)
    }
}
