use candle_core::{Result, Tensor};

use super::layer::Layer;
use super::storage;

/// max(x, 0), in place: no layer before it needs its own output again. NaN stays NaN, so that it is noticed.
#[derive(Default)]
pub(super) struct Relu {
    output: Option<Tensor>,
}

impl Layer for Relu {
    fn forward(&mut self, input: Tensor, training: bool) -> Result<Tensor> {
        storage::update(&input, |values| {
            values.iter_mut().for_each(|value| *value = if *value <= 0.0 { 0.0 } else { *value })
        })?;
        self.output = training.then(|| input.clone());
        Ok(input)
    }

    fn input_gradient(&mut self, output_gradient: Tensor) -> Result<Tensor> {
        let output = self.output.take().expect("forward comes before backward");
        storage::read(&output, |output| {
            storage::update(&output_gradient, |gradient| {
                for (gradient, &output) in gradient.iter_mut().zip(output) {
                    *gradient = if output <= 0.0 { 0.0 } else { *gradient };
                }
            })
        })??;
        Ok(output_gradient)
    }

    fn is_in_place(&self) -> bool {
        true
    }
}
