use std::sync::{Mutex, MutexGuard, PoisonError};

use super::join::{Join, total};
use super::layer::Layer;
use super::matrix::{Activation, Matrix};
use super::parameters::SharedParameters;

/// One operation of a network, between edges that carry an activation forward and its gradient back.
///
/// Its memory is behind a lock, so that threads can share the network. A caller with several
/// threads must order the calls of one node itself; then no thread waits for the lock.
pub(crate) struct Node {
    pub(crate) name: String,
    /// The incoming edges.
    pub(crate) inputs: Vec<usize>,
    /// The outgoing edges, to later nodes. Each carries the same activation.
    pub(crate) outputs: Vec<usize>,
    /// The key of the layer's weight. Its bias has the next key.
    pub(crate) first_key: Option<usize>,
    /// `true` if this node or one before it has a key. If not, it needs no gradient.
    pub(crate) is_trained: bool,
    /// `true` if a node directly before it is trained.
    pub(crate) passes_gradient: bool,
    /// Outputs and inputs, if the layer is fully connected.
    pub(crate) fully_connected: Option<[usize; 2]>,
    work: Mutex<Work>,
}

/// The computation of a node.
pub(super) enum Work {
    /// A layer, with one input.
    Layer(Box<dyn Layer>),
    /// A join of several inputs.
    Join(Join),
}

impl Node {
    /// A node without edges yet.
    pub(super) fn new(name: String, first_key: Option<usize>, work: Work) -> Node {
        let fully_connected = match &work {
            Work::Layer(layer) => layer.fully_connected(),
            Work::Join(_) => None,
        };
        Node {
            name,
            inputs: Vec::new(),
            outputs: Vec::new(),
            first_key,
            is_trained: false,
            passes_gradient: false,
            fully_connected,
            work: Mutex::new(work),
        }
    }

    /// The output for these inputs, one for each incoming edge. It keeps what the gradients need only with
    /// `training`.
    pub(crate) fn forward(&self, inputs: Vec<Activation>, training: bool) -> Activation {
        match &mut *self.work() {
            Work::Layer(layer) => layer.forward(only(inputs), training),
            Work::Join(join) => join.forward(inputs),
        }
    }

    /// The gradient of the output: the sum of the gradients along the outgoing edges, in their order.
    pub(crate) fn output_gradient(&self, along_edges: Vec<Matrix>) -> Matrix {
        total(along_edges)
    }

    /// The gradients of weight and bias. Only for a node with keys, before
    /// [`input_gradients`](Self::input_gradients).
    pub(crate) fn parameter_gradients(&self, output_gradient: &Matrix) -> [Vec<f32>; 2] {
        match &mut *self.work() {
            Work::Layer(layer) => layer.parameter_gradients(output_gradient),
            Work::Join(_) => unreachable!("a join has no keys"),
        }
    }

    /// The factors of these gradients. Only for a fully connected layer.
    pub(super) fn factors(&self, output_gradient: &Matrix) -> [Vec<f32>; 2] {
        match &mut *self.work() {
            Work::Layer(layer) => layer.factors(output_gradient),
            Work::Join(_) => unreachable!("a join has no factors"),
        }
    }

    /// The gradient of each input.
    pub(crate) fn input_gradients(&self, output_gradient: Matrix) -> Vec<Matrix> {
        match &mut *self.work() {
            Work::Layer(layer) => vec![layer.input_gradient(output_gradient)],
            Work::Join(join) => join.input_gradients(output_gradient, self.inputs.len()),
        }
    }

    /// Handles of weight and bias.
    pub(super) fn parameters(&self) -> Option<[SharedParameters; 2]> {
        match &*self.work() {
            Work::Layer(layer) => layer.parameters().map(|map| [map.weight.clone(), map.bias.clone()]),
            Work::Join(_) => None,
        }
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn only(inputs: Vec<Activation>) -> Activation {
    let [input] = <[Activation; 1]>::try_from(inputs).expect("a layer has one input");
    input
}
