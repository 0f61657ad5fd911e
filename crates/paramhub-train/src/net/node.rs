use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{Result, Tensor};

use super::join::{Join, total};
use super::layer::{Layer, Parameters};

/// One operation of a network, between edges that carry an activation forward and its gradient back.
///
/// What it computes with is behind a lock, so that threads can share the network. Whoever uses several threads puts the
/// calls of one node in order by other means; nobody waits for the lock then.
pub(crate) struct Node {
    pub(crate) name: String,
    /// Edges that come in.
    pub(crate) inputs: Vec<usize>,
    /// Edges that go out, to later nodes; each carries the same activation.
    pub(crate) outputs: Vec<usize>,
    /// The key of the layer's weight; its bias has the next one.
    pub(crate) first_key: Option<usize>,
    /// Whether a key stands at this node or before it: if not, no gradient need come here.
    pub(crate) is_trained: bool,
    /// Whether that is so of a node right before it.
    pub(crate) passes_gradient: bool,
    /// Outputs and inputs of a fully connected layer.
    pub(crate) fully_connected: Option<[usize; 2]>,
    work: Mutex<Work>,
}

/// What a node computes.
pub(super) enum Work {
    /// With one input.
    Layer(Box<dyn Layer>),
    /// With several.
    Join(Join),
}

impl Node {
    /// Without edges yet.
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

    /// The output for these inputs, one for each edge that comes in, whose memory it may use. Only with `training` does it
    /// remember what the gradients need.
    pub(crate) fn forward(&self, inputs: Vec<Tensor>, training: bool) -> Result<Tensor> {
        match &mut *self.work() {
            Work::Layer(layer) => layer.forward(only(inputs), training),
            Work::Join(join) => join.forward(inputs),
        }
    }

    /// The gradient of the output, from those that came back along the edges that go out, in their order.
    pub(crate) fn output_gradient(&self, along_edges: Vec<Tensor>) -> Result<Tensor> {
        total(along_edges)
    }

    /// The gradients of weight and bias. Only of a node with keys, before [`input_gradients`](Self::input_gradients).
    pub(crate) fn parameter_gradients(&self, output_gradient: &Tensor) -> Result<[Vec<f32>; 2]> {
        match &mut *self.work() {
            Work::Layer(layer) => layer.parameter_gradients(output_gradient),
            Work::Join(_) => unreachable!("a join has no keys"),
        }
    }

    /// The factors of these. Only of a fully connected layer.
    pub(super) fn factors(&self, output_gradient: &Tensor) -> Result<[Vec<f32>; 2]> {
        match &mut *self.work() {
            Work::Layer(layer) => layer.factors(output_gradient),
            Work::Join(_) => unreachable!("a join has no factors"),
        }
    }

    /// The gradient of each input, each in memory that nobody else has.
    pub(crate) fn input_gradients(&self, output_gradient: Tensor) -> Result<Vec<Tensor>> {
        match &mut *self.work() {
            Work::Layer(layer) => Ok(vec![layer.input_gradient(output_gradient)?]),
            Work::Join(join) => join.input_gradients(output_gradient, self.inputs.len()),
        }
    }

    /// Handles of weight and bias.
    pub(super) fn parameters(&self) -> Option<Parameters> {
        match &*self.work() {
            Work::Layer(layer) => layer.parameters().cloned(),
            Work::Join(_) => None,
        }
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Work {
    /// Whether it writes to the memory of its input, which must then go to no other node.
    pub(super) fn is_in_place(&self) -> bool {
        matches!(self, Work::Layer(layer) if layer.is_in_place())
    }
}

fn only(inputs: Vec<Tensor>) -> Tensor {
    let [input] = <[Tensor; 1]>::try_from(inputs).expect("a layer has one input");
    input
}
