use std::sync::Arc;

use super::layer::Layer;
use super::matrix::{Activation, Matrix};
use super::parameters::LinearMap;

/// A fully connected layer: y = x Wᵀ + b.
pub(super) struct Linear {
    parameters: LinearMap,
    input: Option<Activation>,
}

impl Linear {
    pub(super) fn new(parameters: LinearMap) -> Self {
        Linear { parameters, input: None }
    }
}

impl Layer for Linear {
    fn forward(&mut self, input: Activation, training: bool) -> Activation {
        let output = self.parameters.apply(&input);
        self.input = training.then_some(input);
        Arc::new(output)
    }

    fn input_gradient(&mut self, output_gradient: Matrix) -> Matrix {
        self.parameters.input_gradient(&output_gradient)
    }

    fn parameters(&self) -> Option<&LinearMap> {
        Some(&self.parameters)
    }

    fn fully_connected(&self) -> Option<[usize; 2]> {
        Some([self.parameters.outputs, self.parameters.inputs])
    }

    fn factors(&mut self, output_gradient: &Matrix) -> [Vec<f32>; 2] {
        let input = self.input.take().expect("forward comes before backward");
        [Arc::unwrap_or_clone(input).into_values(), output_gradient.values().to_vec()]
    }

    fn parameter_gradients(&mut self, output_gradient: &Matrix) -> [Vec<f32>; 2] {
        let input = self.input.take().expect("forward comes before backward");
        self.parameters.gradients(&input, output_gradient.values())
    }
}
