use candle_core::{Device, Result, Tensor};

use super::storage;

/// One step of a network, with hand-written derivatives.
///
/// An activation is a contiguous matrix: one row per example, its features in row, column, channel order (channels last).
/// `forward` keeps what the derivatives need; the gradient arrives later, after the layers above have had theirs.
/// Parameter gradients and the input's gradient are two calls, so that the former leave before the latter is computed.
pub(super) trait Layer: Send {
    /// The layer's output for `input`. Only with `training` must it remember anything.
    fn forward(&mut self, input: Tensor, training: bool) -> Result<Tensor>;

    /// The gradient of the input, from that of the output.
    fn input_gradient(&mut self, output_gradient: Tensor) -> Result<Tensor>;

    /// Whether `forward` writes to its input's memory.
    fn is_in_place(&self) -> bool {
        false
    }

    /// The layer's parameters, if it has any.
    fn parameters(&self) -> Option<&Parameters> {
        None
    }

    /// Outputs and inputs of a fully connected layer, whose gradient has factors.
    fn fully_connected(&self) -> Option<[usize; 2]> {
        None
    }

    /// The factors of a fully connected layer's gradient: what came in and the gradient of the output, a row for each example.
    fn factors(&mut self, _output_gradient: &Tensor) -> Result<[Vec<f32>; 2]> {
        unreachable!("only a fully connected layer is asked for its factors")
    }

    /// The gradients of weight and bias, from that of the output. Only for layers with parameters.
    fn parameter_gradients(&mut self, _output_gradient: &Tensor) -> Result<[Vec<f32>; 2]> {
        unreachable!("only a layer with parameters is asked for their gradients")
    }
}

/// The weight, outputs x inputs, and the bias, one per output, of a linear map. Clones share both.
#[derive(Clone)]
pub(super) struct Parameters {
    pub(super) weight: Tensor,
    pub(super) bias: Tensor,
}

impl Parameters {
    pub(super) fn new(weight: Vec<f32>, outputs: usize) -> Result<Self> {
        let inputs = weight.len() / outputs;
        Ok(Parameters {
            weight: Tensor::from_vec(weight, (outputs, inputs), &Device::Cpu)?,
            bias: Tensor::zeros(outputs, candle_core::DType::F32, &Device::Cpu)?,
        })
    }

    /// rows x inputs -> rows x outputs.
    pub(super) fn apply(&self, inputs: &Tensor) -> Result<Tensor> {
        let outputs = inputs.matmul(&self.weight.t()?)?;
        storage::read(&self.bias, |bias| {
            storage::update(&outputs, |values| {
                for row in values.chunks_exact_mut(bias.len()) {
                    row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
                }
            })
        })??;
        Ok(outputs)
    }

    /// The gradients of weight and bias, from the inputs and the gradient of the outputs.
    pub(super) fn gradients(&self, inputs: &Tensor, output_gradient: &Tensor) -> Result<[Vec<f32>; 2]> {
        let weight = storage::into_values(output_gradient.t()?.matmul(inputs)?)?;
        let mut bias = vec![0.0; output_gradient.dim(1)?];
        storage::read(output_gradient, |values| {
            for row in values.chunks_exact(bias.len()) {
                bias.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
            }
        })?;
        Ok([weight, bias])
    }

    /// The gradient of the inputs.
    pub(super) fn input_gradient(&self, output_gradient: &Tensor) -> Result<Tensor> {
        output_gradient.matmul(&self.weight)
    }
}
