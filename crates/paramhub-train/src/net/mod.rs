//! Networks as graphs of layers, computed forward and backward one node at a time.
//!
//! A network without branches is a chain. If an activation goes to several nodes, the gradients that come
//! back are added in the order of the edges, in whatever order they came.

mod build;
mod convolution;
mod join;
mod kinds;
mod layer;
mod linear;
mod loss;
mod matrix;
mod node;
mod parameters;
mod pool;
mod relu;
#[cfg(test)]
mod tests;
mod window;

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use paramhub_core::key::Key;
use thiserror::Error;

use crate::data::{Dataset, Geometry};
pub(crate) use matrix::Activation;
pub use matrix::Matrix;
pub(crate) use node::Node;
pub(crate) use parameters::SharedParameters;

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
    /// An Inception (Szegedy et al., "Going Deeper with Convolutions", 2015) for small images, without normalisation: a 3x3
    /// convolution of 16 channels, pooled where images have 16 pixels or more a side; three blocks of four branches (1x1; 3x3; two
    /// 3x3; 3x3 average pooling, then 1x1) of 48, 88 and 112 channels in all, pooled after the first; the mean of each channel; and a
    /// fully connected layer of the classes.
    Inception,
}

/// The reason why a network cannot be built, or its parameters not be changed.
#[derive(Debug, Error)]
pub enum NetError {
    /// The name is unknown.
    #[error("`{0}` is not a network: use `mlp`, `lenet`, `cifar-quick` or `inception`")]
    UnknownKind(String),
    /// The images are too small for the network.
    #[error("images of {geometry} are too small for `{kind}`: nothing is left of them after {layer}")]
    TooSmall {
        /// The network.
        kind: NetKind,
        /// The images.
        geometry: Geometry,
        /// The layer that has no output.
        layer: String,
    },
    /// The number of a key's parameters was changed.
    #[error(
        "key `{key}`: expected {expected} parameters, found {found}: change them in place or exchange them for as many"
    )]
    ParameterCount {
        /// The key's name.
        key: String,
        /// Elements of the key.
        expected: usize,
        /// Elements after the change.
        found: usize,
    },
}

/// A network with its parameters.
///
/// Parameters are *keys*, counted from the front: a layer's weight, then its bias, then those of the next layer. A weight is
/// outputs x inputs, that of a convolution outputs x rows x columns x channels.
pub struct Network {
    geometry: Geometry,
    /// The nodes, each after all from which it takes its inputs.
    nodes: Vec<Arc<Node>>,
    /// The number of edges. The last edge carries the logits.
    edges: usize,
    /// Edges that carry the images.
    sources: Vec<usize>,
    keys: Vec<Key>,
    /// The parameters of each key, shared with its layer.
    parameters: Vec<SharedParameters>,
}

/// The gradient of the parameters of one layer.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerGradient {
    /// The gradients of weight and bias.
    Dense([Vec<f32>; 2]),
    /// The factors of a fully connected layer's gradients, a row for each example. The gradient of the weight
    /// is the sum of the outer products of their rows, that of the bias the sum of the rows of
    /// `output_gradients`.
    Factors {
        /// The input.
        inputs: Vec<f32>,
        /// The gradient of the output.
        output_gradients: Vec<f32>,
    },
}

impl Network {
    /// A network for these images, with the initial parameters of `seed`: weights uniform with He's variance 2 / inputs
    /// (He et al., "Delving Deep into Rectifiers", 2015), Glorot's 1 / inputs for the last layer, and zero biases.
    ///
    /// # Errors
    /// [`NetError::TooSmall`].
    pub fn new(kind: NetKind, geometry: Geometry, seed: u64) -> Result<Self, NetError> {
        kinds::network(kind, geometry, seed)
    }

    fn new_graph(
        geometry: Geometry,
        nodes: Vec<Node>,
        edges: usize,
        sources: Vec<usize>,
        keys: Vec<Key>,
        parameters: Vec<SharedParameters>,
    ) -> Self {
        let nodes = nodes.into_iter().map(Arc::new).collect();
        Network { geometry, nodes, edges, sources, keys, parameters }
    }

    /// The shape of the images.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Names and shapes of the parameters, front layers first.
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// Parameters of one key.
    pub fn parameters(&self, key: usize) -> Vec<f32> {
        self.parameters[key].read().clone()
    }

    /// All parameters, one vector per key.
    pub fn all_parameters(&self) -> Vec<Vec<f32>> {
        (0..self.keys.len()).map(|key| self.parameters(key)).collect()
    }

    /// Lends the parameters of one key to be changed in place, or exchanged for other memory of the same
    /// length. It must not be called between a forward pass and its backward pass, which must have the same
    /// parameters.
    ///
    /// # Errors
    /// [`NetError::ParameterCount`] if the length has changed.
    pub fn lend_parameters<R>(
        &mut self,
        key: usize,
        borrower: impl FnOnce(&mut Vec<f32>) -> R,
    ) -> Result<R, NetError> {
        self.lend(key, borrower)
    }

    /// The forward pass of a batch: normalised images, batch x height x width x channels, to logits, batch x classes.
    /// Keeps what the backward pass needs.
    ///
    /// `before` may change the parameters of each key, front layers first, immediately before their layer computes (as
    /// [`lend_parameters`](Self::lend_parameters) allows).
    ///
    /// # Errors
    /// The first error of `before`, or [`NetError::ParameterCount`] if it has changed the length.
    ///
    /// # Panics
    /// If the last image is not whole.
    pub fn forward<E: From<NetError>>(
        &mut self,
        images: Vec<f32>,
        mut before: impl FnMut(usize, &mut Vec<f32>) -> Result<(), E>,
    ) -> Result<Matrix, E> {
        self.run(images, true, |node| {
            for key in node.first_key.into_iter().flat_map(|first| [first, first + 1]) {
                self.lend(key, |values| before(key, values))??;
            }
            Ok(())
        })
    }

    /// Mean softmax cross-entropy of the batch, and its gradient with respect to the logits.
    pub fn loss(&self, logits: Matrix, labels: &[u8]) -> (f64, Matrix) {
        loss_of(logits, labels)
    }

    /// The fully connected layers: the key of the weight, and the outputs and inputs. The bias has the next
    /// key.
    pub fn fully_connected(&self) -> impl Iterator<Item = (usize, [usize; 2])> + '_ {
        self.nodes.iter().filter_map(|node| Some((node.first_key?, node.fully_connected?)))
    }

    /// The backward pass of the last forward pass, from the gradient of the logits.
    ///
    /// `emit` gets the key of each layer's weight with the layer's gradient, averaged over the batch, as soon
    /// as it exists: last layer first, and before the layer computes its input's gradient (Poseidon, section
    /// 3.1). Gradients are emitted as factors if `takes_factors` is true for the weight's key.
    ///
    /// # Errors
    /// The first error of `emit`.
    pub fn backward<E>(
        &mut self,
        logits_gradient: Matrix,
        takes_factors: impl Fn(usize) -> bool,
        mut emit: impl FnMut(usize, LayerGradient) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut edges = vec![None; self.edges];
        edges[self.edges - 1] = Some(logits_gradient);
        for node in self.nodes.iter().rev().filter(|node| node.is_trained) {
            let gradient = node.output_gradient(take(&mut edges, &node.outputs));
            if let Some(first) = node.first_key {
                let made = if takes_factors(first) && node.fully_connected.is_some() {
                    let [inputs, output_gradients] = node.factors(&gradient);
                    LayerGradient::Factors { inputs, output_gradients }
                } else {
                    LayerGradient::Dense(node.parameter_gradients(&gradient))
                };
                emit(first, made)?;
            }
            if node.passes_gradient {
                let gradients = node.input_gradients(gradient);
                node.inputs.iter().zip(gradients).for_each(|(&edge, gradient)| edges[edge] = Some(gradient));
            }
        }
        Ok(())
    }

    /// The share of examples whose largest logit is at their label.
    pub fn accuracy(&mut self, data: &Dataset) -> f64 {
        let (mut labels, mut correct) = (Vec::new(), 0);
        for start in (0..data.len()).step_by(EVALUATION_BATCH) {
            let mut images = Vec::new();
            data.batch(start..(start + EVALUATION_BATCH).min(data.len()), &mut images, &mut labels);
            let Ok(logits) = self.run(images, false, |_| Ok::<(), Infallible>(()));
            correct += loss::correct(logits.values(), &labels);
        }
        correct as f64 / data.len() as f64
    }

    /// The nodes, each after all from which it takes its inputs.
    pub(crate) fn nodes(&self) -> &[Arc<Node>] {
        &self.nodes
    }

    /// The number of edges. The last edge carries the logits.
    pub(crate) fn edges(&self) -> usize {
        self.edges
    }

    /// Edges that carry the images.
    pub(crate) fn sources(&self) -> &[usize] {
        &self.sources
    }

    /// A handle of the parameters of a key.
    pub(crate) fn shared_parameters(&self, key: usize) -> SharedParameters {
        self.parameters[key].clone()
    }

    /// Runs the forward pass through all nodes, in order.
    fn run<E>(
        &self,
        images: Vec<f32>,
        training: bool,
        mut before: impl FnMut(&Node) -> Result<(), E>,
    ) -> Result<Matrix, E> {
        let mut edges = vec![None; self.edges];
        put(&mut edges, &self.sources, input_of(images, self.geometry));
        for node in &self.nodes {
            before(node)?;
            let output = node.forward(take(&mut edges, &node.inputs), training);
            put(&mut edges, &node.outputs, output);
        }
        let logits = edges.pop().flatten().expect("the last node's output is on the last edge");
        Ok(Arc::unwrap_or_clone(logits))
    }

    fn lend<R>(&self, key: usize, borrower: impl FnOnce(&mut Vec<f32>) -> R) -> Result<R, NetError> {
        let parameters = &self.parameters[key];
        parameters.lend(borrower).map_err(|found| NetError::ParameterCount {
            key: self.keys[key].name.clone(),
            expected: parameters.read().len(),
            found,
        })
    }
}

/// A batch as an activation: a row for each image.
pub(crate) fn input_of(images: Vec<f32>, geometry: Geometry) -> Activation {
    Arc::new(Matrix::new(images, geometry.features()))
}

/// Does the same as [`Network::loss`].
pub(crate) fn loss_of(mut logits: Matrix, labels: &[u8]) -> (f64, Matrix) {
    let loss = loss::softmax_cross_entropy(logits.values_mut(), labels);
    (loss, logits)
}

/// Puts handles of one activation on all of these edges.
fn put(edges: &mut [Option<Activation>], of: &[usize], activation: Activation) {
    of.iter().for_each(|&edge| edges[edge] = Some(Arc::clone(&activation)));
}

/// Takes what is on these edges.
fn take<T>(edges: &mut [Option<T>], of: &[usize]) -> Vec<T> {
    of.iter().map(|&edge| edges[edge].take().expect("nodes are in the order of their edges")).collect()
}

/// Large enough for efficient matrix products, small in memory.
const EVALUATION_BATCH: usize = 64;

impl NetKind {
    /// All networks.
    pub const ALL: [NetKind; 4] = [NetKind::Mlp, NetKind::Lenet, NetKind::CifarQuick, NetKind::Inception];

    /// The name given to `--net`.
    pub fn name(self) -> &'static str {
        match self {
            NetKind::Mlp => "mlp",
            NetKind::Lenet => "lenet",
            NetKind::CifarQuick => "cifar-quick",
            NetKind::Inception => "inception",
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
