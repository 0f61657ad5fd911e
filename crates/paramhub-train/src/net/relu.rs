use std::sync::Arc;

use super::layer::Layer;
use super::matrix::{Activation, Matrix};

/// max(x, 0), in the memory of its input if no other node has it. NaN stays NaN, so that it is noticed.
#[derive(Default)]
pub(super) struct Relu {
    output: Option<Activation>,
}

impl Layer for Relu {
    fn forward(&mut self, mut input: Activation, training: bool) -> Activation {
        let values = Arc::make_mut(&mut input).values_mut();
        values.iter_mut().for_each(|value| *value = if *value <= 0.0 { 0.0 } else { *value });
        self.output = training.then(|| Arc::clone(&input));
        input
    }

    fn input_gradient(&mut self, mut output_gradient: Matrix) -> Matrix {
        let output = self.output.take().expect("forward comes before backward");
        for (gradient, &output) in output_gradient.values_mut().iter_mut().zip(output.values()) {
            *gradient = if output <= 0.0 { 0.0 } else { *gradient };
        }
        output_gradient
    }
}
