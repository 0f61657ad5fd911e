use super::matrix::{Activation, Matrix};
use super::parameters::LinearMap;

/// One step of a network, with hand-written derivatives.
///
/// `forward` keeps what the derivatives need; the gradient arrives later, after the layers above have had
/// theirs. Parameter gradients and the input's gradient are two calls, so that the former can be sent before
/// the latter is computed.
pub(super) trait Layer: Send {
    /// The layer's output for `input`. It must keep what the derivatives need only with `training`.
    fn forward(&mut self, input: Activation, training: bool) -> Activation;

    /// The gradient of the input, from that of the output.
    fn input_gradient(&mut self, output_gradient: Matrix) -> Matrix;

    /// The layer's parameters, if it has any.
    fn parameters(&self) -> Option<&LinearMap> {
        None
    }

    /// Outputs and inputs of a fully connected layer, whose gradient has factors.
    fn fully_connected(&self) -> Option<[usize; 2]> {
        None
    }

    /// The factors of a fully connected layer's gradient: the input and the gradient of the output, a row for
    /// each example.
    fn factors(&mut self, _output_gradient: &Matrix) -> [Vec<f32>; 2] {
        unreachable!("only a fully connected layer is asked for its factors")
    }

    /// The gradients of weight and bias, from that of the output. Only for layers with parameters.
    fn parameter_gradients(&mut self, _output_gradient: &Matrix) -> [Vec<f32>; 2] {
        unreachable!("only a layer with parameters is asked for their gradients")
    }
}
