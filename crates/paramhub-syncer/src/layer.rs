//! A fully connected layer, and what a worker gives for a step of it and gets.

use std::sync::Arc;

use paramhub_core::codec::Codec;
use paramhub_transport::ReceiveRegion;

/// A fully connected layer that is exchanged by its factors. All ranks say the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FactorLayer {
    /// For messages.
    pub name: Arc<str>,
    /// The weight's key, for messages.
    pub key: Arc<str>,
    /// Outputs, M, and inputs, N: rows and columns of the weight.
    pub shape: (usize, usize),
    /// K: the most samples that one worker has in a step.
    pub samples: usize,
    /// Whether there is a bias, of M elements. Its gradient follows from the output gradients.
    pub has_bias: bool,
    /// How factors are given and travel. What they add up to is f32 whatever it is.
    pub codec: Codec,
    /// How parameters are given back; those that are kept are f32.
    pub parameter_codec: Codec,
    /// Which of the optimizer's groups weight and bias are in.
    pub groups: [u16; 2],
}

impl FactorLayer {
    /// An f32 layer without a bias, in the optimizer's first group, whose weight is called as the layer is.
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

    /// The same with a bias.
    #[must_use]
    pub fn with_bias(self) -> Self {
        FactorLayer { has_bias: true, ..self }
    }

    /// Elements of the weight; none if they are too many to count.
    pub(crate) fn weight_elements(&self) -> Option<usize> {
        self.shape.0.checked_mul(self.shape.1)
    }

    pub(crate) fn bias_elements(&self) -> usize {
        if self.has_bias { self.shape.0 } else { 0 }
    }
}

/// One worker's factors of one layer and step: K rows each, in the layer's codec, little-endian, in one order of samples.
#[derive(Clone, Copy, Debug)]
pub struct LayerFactors<'a> {
    /// What went in: N elements a row.
    pub inputs: &'a [u8],
    /// The loss's gradient by what came out: M elements a row.
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

/// Where a layer's new parameters are to be put, in its parameters' codec.
#[derive(Debug)]
pub struct Outputs {
    /// M times N elements, row by row.
    pub weight: ReceiveRegion,
    /// M elements. None where there is no bias, or its owner does not want it.
    pub bias: Option<ReceiveRegion>,
}
