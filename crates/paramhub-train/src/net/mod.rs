//! Networks as sequences of layers, computed forward and backward one layer at a time.

mod build;
mod convolution;
mod layer;
mod linear;
mod loss;
mod pool;
mod relu;
mod storage;
#[cfg(test)]
mod tests;
mod window;

use std::fmt;
use std::str::FromStr;

use candle_core::{Device, Tensor};
use paramhub_core::key::Key;
use thiserror::Error;

use crate::data::{Dataset, Geometry};
use layer::Layer;

/// A network by name, as given to `--net`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NetKind {
    /// Two hidden layers of 128 and 64 units with ReLU.
    Mlp,
    /// Caffe's LeNet with ReLU after each convolution: 5x5 convolutions of 20 and 50 channels, each with 2x2 max pooling,
    /// then fully connected layers of 500 and of the classes. Images below 28x28 get padded 3x3 convolutions instead.
    Lenet,
    /// Caffe's CIFAR-10 quick: three 5x5 convolutions of 32, 32 and 64 channels, each pooled by 3x3 windows with stride
    /// 2 (max, mean, mean), then fully connected layers of 64 and of the classes.
    CifarQuick,
}

/// Why a network cannot be built or computed.
#[derive(Debug, Error)]
pub enum NetError {
    /// The name is unknown.
    #[error("`{0}` is not a network: use `mlp`, `lenet` or `cifar-quick`")]
    UnknownKind(String),
    /// The images do not fit the network.
    #[error("images of {geometry} are too small for `{kind}`: nothing is left of them after {layer}")]
    TooSmall {
        /// The network.
        kind: NetKind,
        /// The images.
        geometry: Geometry,
        /// The layer that has no output.
        layer: String,
    },
    /// Candle refuses.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

/// A network with its parameters.
///
/// Parameters are *keys*, counted from the front: a layer's weight, then its bias, then those of the next layer. A weight is
/// outputs x inputs, that of a convolution outputs x rows x columns x channels.
pub struct Network {
    geometry: Geometry,
    stages: Vec<Stage>,
    keys: Vec<Key>,
}

/// What the backward pass makes for the parameters of one layer.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerGradient {
    /// The gradients of weight and bias.
    Dense([Vec<f32>; 2]),
    /// Of a fully connected layer, a row for each example: the gradient of the weight is the sum of their outer products, that of
    /// the bias the sum of the rows of output gradients.
    Factors {
        /// What came in.
        inputs: Vec<f32>,
        /// The gradient of what came out.
        output_gradients: Vec<f32>,
    },
}

struct Stage {
    layer: Box<dyn Layer>,
    /// The key of the layer's weight; its bias has the next one.
    first_key: Option<usize>,
}

impl Network {
    /// A network for these images, with the initial parameters of `seed`: weights uniform with He's variance 2 / inputs
    /// (He et al., "Delving Deep into Rectifiers", 2015), Glorot's 1 / inputs for the last layer, and zero biases.
    ///
    /// # Errors
    /// [`NetError::TooSmall`].
    pub fn new(kind: NetKind, geometry: Geometry, seed: u64) -> Result<Self, NetError> {
        build::network(kind, geometry, seed)
    }

    /// What the images look like.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Names and shapes of the parameters, front layers first.
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// Parameters of one key.
    pub fn parameters(&self, key: usize) -> Result<Vec<f32>, NetError> {
        Ok(storage::read(self.tensor(key), <[f32]>::to_vec)?)
    }

    /// All parameters, one vector per key.
    pub fn all_parameters(&self) -> Result<Vec<Vec<f32>>, NetError> {
        (0..self.keys.len()).map(|key| self.parameters(key)).collect()
    }

    /// Lends the parameters of one key to be changed in place, or exchanged for other memory of the same length. Not
    /// between a forward pass and its backward pass, which must see the same parameters.
    ///
    /// # Errors
    /// If the length has changed.
    pub fn lend_parameters<R>(
        &mut self,
        key: usize,
        borrower: impl FnOnce(&mut Vec<f32>) -> R,
    ) -> Result<R, NetError> {
        Ok(storage::lend(self.tensor(key), borrower)?)
    }

    /// The forward pass of a batch: normalised images, batch x height x width x channels, to logits, batch x classes.
    /// Keeps what the backward pass needs.
    ///
    /// `before` may change the parameters of each key, front layers first, immediately before their layer computes (as
    /// [`lend_parameters`](Self::lend_parameters) allows).
    ///
    /// # Errors
    /// The first error of `before`, or candle's.
    pub fn forward<E: From<NetError>>(
        &mut self,
        images: Vec<f32>,
        mut before: impl FnMut(usize, &mut Vec<f32>) -> Result<(), E>,
    ) -> Result<Tensor, E> {
        let mut activation = self.input(images)?;
        for stage in &mut self.stages {
            if let (Some(first), Some(parameters)) = (stage.first_key, stage.layer.parameters()) {
                for (key, tensor) in [(first, &parameters.weight), (first + 1, &parameters.bias)] {
                    storage::lend(tensor, |values| before(key, values)).map_err(NetError::from)??;
                }
            }
            activation = stage.layer.forward(activation, true).map_err(NetError::from)?;
        }
        Ok(activation)
    }

    /// Mean softmax cross-entropy of the batch, and its gradient with respect to the logits.
    ///
    /// # Errors
    /// Candle's.
    pub fn loss(&self, logits: Tensor, labels: &[u8]) -> Result<(f64, Tensor), NetError> {
        let mut loss = 0.0;
        storage::update(&logits, |values| loss = loss::softmax_cross_entropy(values, labels))?;
        Ok((loss, logits))
    }

    /// The fully connected layers: the key of the weight, which that of the bias follows, and how many outputs and inputs they
    /// have.
    pub fn fully_connected(&self) -> impl Iterator<Item = (usize, [usize; 2])> + '_ {
        self.stages.iter().filter_map(|stage| Some((stage.first_key?, stage.layer.fully_connected()?)))
    }

    /// The backward pass of the last forward pass, from the gradient of the logits.
    ///
    /// `emit` gets the key of each layer's weight with the layer's gradient, averaged over the batch, as soon as it exists: last
    /// layer first, and before the layer computes its input's gradient, let alone the layers below it (Poseidon, section 3.1).
    /// Those of which `takes_factors` says so, by the same key, are not multiplied out.
    ///
    /// # Errors
    /// The first error of `emit`, or candle's.
    pub fn backward<E: From<NetError>>(
        &mut self,
        logits_gradient: Tensor,
        takes_factors: impl Fn(usize) -> bool,
        mut emit: impl FnMut(usize, LayerGradient) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut gradient = logits_gradient;
        let lowest =
            self.stages.iter().position(|stage| stage.first_key.is_some()).unwrap_or(self.stages.len());
        for (position, stage) in self.stages.iter_mut().enumerate().skip(lowest).rev() {
            if let Some(first) = stage.first_key {
                let layer = &mut stage.layer;
                let made = if takes_factors(first) && layer.fully_connected().is_some() {
                    layer
                        .factors(&gradient)
                        .map(|[inputs, output_gradients]| LayerGradient::Factors { inputs, output_gradients })
                } else {
                    layer.parameter_gradients(&gradient).map(LayerGradient::Dense)
                };
                emit(first, made.map_err(NetError::from)?)?;
            }
            if position > lowest {
                gradient = stage.layer.input_gradient(gradient).map_err(NetError::from)?;
            }
        }
        Ok(())
    }

    /// The share of examples whose largest logit is their label's.
    ///
    /// # Errors
    /// Candle's.
    pub fn accuracy(&mut self, data: &Dataset) -> Result<f64, NetError> {
        let (mut labels, mut correct) = (Vec::new(), 0);
        for start in (0..data.len()).step_by(EVALUATION_BATCH) {
            let mut images = Vec::new();
            data.batch(start..(start + EVALUATION_BATCH).min(data.len()), &mut images, &mut labels);
            let mut activation = self.input(images)?;
            for stage in &mut self.stages {
                activation = stage.layer.forward(activation, false)?;
            }
            correct += storage::read(&activation, |logits| loss::correct(logits, &labels))?;
        }
        Ok(correct as f64 / data.len() as f64)
    }

    fn input(&self, images: Vec<f32>) -> Result<Tensor, NetError> {
        let features = self.geometry.features();
        Ok(Tensor::from_vec(images, ((), features), &Device::Cpu)?)
    }

    fn tensor(&self, key: usize) -> &Tensor {
        let owner = self.stages.iter().rfind(|stage| stage.first_key.is_some_and(|first| first <= key));
        let stage = owner.expect("key 0 belongs to the first layer with parameters");
        let parameters = stage.layer.parameters().expect("a stage with a key has parameters");
        if stage.first_key == Some(key) { &parameters.weight } else { &parameters.bias }
    }
}

/// Enough for the matrix products, little in memory.
const EVALUATION_BATCH: usize = 64;

impl NetKind {
    /// All networks.
    pub const ALL: [NetKind; 3] = [NetKind::Mlp, NetKind::Lenet, NetKind::CifarQuick];

    /// The name given to `--net`.
    pub fn name(self) -> &'static str {
        match self {
            NetKind::Mlp => "mlp",
            NetKind::Lenet => "lenet",
            NetKind::CifarQuick => "cifar-quick",
        }
    }
}

impl FromStr for NetKind {
    type Err = NetError;

    fn from_str(text: &str) -> Result<Self, NetError> {
        let known = Self::ALL.into_iter().find(|kind| kind.name() == text);
        known.ok_or_else(|| NetError::UnknownKind(text.to_owned()))
    }
}

impl fmt::Display for NetKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network")
            .field("geometry", &self.geometry)
            .field("keys", &self.keys)
            .finish_non_exhaustive()
    }
}
