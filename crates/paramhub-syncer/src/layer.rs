//! A fully connected layer, its factors, and the memory for its new parameters.

use std::sync::Arc;

use paramhub_core::codec::Codec;
use paramhub_transport::ReceiveRegion;

/// A fully connected layer that is exchanged by its factors. All ranks must pass the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FactorLayer {
    /// The layer's name in messages.
    pub name: Arc<str>,
    /// The weight's key in messages.
    pub key: Arc<str>,
    /// The number of outputs, M, and of inputs, N: rows and columns of the weight.
    pub shape: (usize, usize),
    /// The most samples, K, that one worker has in a step.
    pub samples: usize,
    /// `true` if there is a bias, of M elements. Its gradient follows from the output gradients.
    pub has_bias: bool,
    /// The codec in which factors are passed and travel. Their sum is f32 in any case.
    pub codec: Codec,
    /// The codec in which parameters are given back; the exchange keeps them in f32.
    pub parameter_codec: Codec,
    /// The optimizer's groups of weight and bias.
    pub groups: [u16; 2],
}

impl FactorLayer {
    /// An f32 layer without a bias, in the optimizer's first group, whose weight has the layer's name.
    pub fn new(name: &str, shape: (usize, usize), samples: usize) -> Self {
        FactorLayer {
            name: name.into(),
            key: name.into(),
            shape,
            samples,
            has_bias: false,
            codec: Codec::F32,
            parameter_codec: Codec::F32,
            groups: [0, 0],
        }
    }

    /// The same layer with a bias.
    #[must_use]
    pub fn with_bias(self) -> Self {
        FactorLayer { has_bias: true, ..self }
    }

    /// The number of elements in the weight; `None` if it overflows.
    pub(crate) fn weight_elements(&self) -> Option<usize> {
        self.shape.0.checked_mul(self.shape.1)
    }

    pub(crate) fn bias_elements(&self) -> usize {
        if self.has_bias { self.shape.0 } else { 0 }
    }
}

/// One worker's factors of one layer and step: K rows each, in the layer's codec, little-endian, in one order
/// of samples.
#[derive(Clone, Copy, Debug)]
pub struct LayerFactors<'a> {
    /// The layer's inputs: N elements a row.
    pub inputs: &'a [u8],
    /// The loss's gradient with respect to the layer's outputs: M elements a row.
    pub output_gradients: &'a [u8],
}

impl<'a> LayerFactors<'a> {
    /// Factors of a layer whose codec is f32.
    pub fn of_f32(inputs: &'a [f32], output_gradients: &'a [f32]) -> Self {
        LayerFactors {
            inputs: bytemuck::cast_slice(inputs),
            output_gradients: bytemuck::cast_slice(output_gradients),
        }
    }
}

/// The buffers for a layer's new parameters, in its parameters' codec.
#[derive(Debug)]
pub struct Outputs {
    /// The buffer for the weight: M times N elements, row by row.
    pub weight: ReceiveRegion,
    /// The buffer for the bias: M elements. `None` where there is no bias, or the caller does not want it.
    pub bias: Option<ReceiveRegion>,
}
