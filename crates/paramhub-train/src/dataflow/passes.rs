//! The forward and backward pass of a network as operations: one for a node's output, one for the gradients
//! of its keys, one for those of its inputs.

use std::convert::Infallible;
use std::sync::Arc;

use paramhub_collective::engine::{Engine, Kind, PushError, Variable};
use paramhub_collective::kvstore::Array;

use super::meter::Meter;
use super::slot::Slot;
use crate::data::{Data, Geometry};
use crate::net::{self, Activation, Matrix, Network, Node};

/// Priorities. Operations on which others wait run first: gradients have to travel, and a forward pass leads
/// to them. Updates fill the gaps; the forward pass waits for those that it needs.
const BACKWARD: i32 = 2;
const FORWARD: i32 = 1;

/// The result of an operation that cannot fail.
const SUCCESS: Result<(), Infallible> = Ok(());

/// A network, with variables for all data that its operations share.
pub(super) struct Passes {
    geometry: Geometry,
    /// Edges that carry the images.
    sources: Vec<usize>,
    node_states: Vec<NodeState>,
    edges: Vec<Edge>,
    /// The labels of the batch that is in the network.
    labels: Slot<Vec<u8>>,
    meter: Arc<Meter>,
}

/// The variables of a node, and the node.
struct NodeState {
    node: Arc<Node>,
    /// The gradient of the node's output, between the two operations of its backward pass. Its variable also
    /// stands for all that the layer keeps from its forward pass to its backward pass: no batch can overtake
    /// another in a node.
    gradient: Slot<Matrix>,
}

/// The data that two nodes share.
struct Edge {
    activation: Slot<Activation>,
    gradient: Slot<Matrix>,
}

impl Passes {
    pub(super) fn new(engine: &Engine, network: &Network, meter: Arc<Meter>) -> Passes {
        let node_state = |node: &Arc<Node>| NodeState { node: Arc::clone(node), gradient: Slot::new(engine) };
        let edge = |_| Edge { activation: Slot::new(engine), gradient: Slot::new(engine) };
        Passes {
            geometry: network.geometry(),
            sources: network.sources().to_vec(),
            node_states: network.nodes().iter().map(node_state).collect(),
            edges: (0..network.edges()).map(edge).collect(),
            labels: Slot::new(engine),
            meter,
        }
    }

    /// Pushes the forward pass of a batch, which reads the parameters of each key. Returns the slot of its
    /// loss.
    pub(super) fn push_forward(
        &self,
        engine: &Engine,
        data: &Arc<Data>,
        examples: Vec<usize>,
        parameters: &[Variable],
    ) -> Result<Slot<f64>, PushError> {
        self.push_load(engine, data, examples)?;
        for NodeState { node, gradient: kept } in &self.node_states {
            let inputs = self.activations(&node.inputs);
            let outputs = self.activations(&node.outputs);
            let (meter, here) = (Arc::clone(&self.meter), Arc::clone(node));
            engine
                .operation(format!("forward {}", node.name), Kind::Compute)
                .reads(keys(node, parameters))
                .mutates(variables(&inputs).chain(variables(&outputs)).chain([kept.variable()]))
                .priority(FORWARD)
                .push(move || {
                    let output = meter.computes(|| here.forward(take(&inputs), true));
                    outputs.iter().for_each(|edge| edge.put(Arc::clone(&output)));
                    SUCCESS
                })?;
        }
        self.push_loss(engine)
    }

    /// Pushes the backward pass of the batch whose forward pass was pushed last. It puts each key's gradient
    /// into the key's array.
    ///
    /// With `leave`, keys count as under way once their gradients are there.
    pub(super) fn push_backward(
        &self,
        engine: &Engine,
        parameters: &[Variable],
        gradients: &[Array],
        leave: bool,
    ) -> Result<(), PushError> {
        for node_state in self.node_states.iter().rev().filter(|node_state| node_state.node.is_trained) {
            let along_edges = self.gradients(&node_state.node.outputs);
            if let Some(first) = node_state.node.first_key {
                let keys = &gradients[first..first + 2];
                self.push_parameter_gradients(engine, node_state, along_edges, keys, leave)?;
                if node_state.node.passes_gradient {
                    self.push_input_gradients(engine, node_state, None, parameters)?;
                }
            } else {
                self.push_input_gradients(engine, node_state, Some(along_edges), parameters)?;
            }
        }
        Ok(())
    }

    fn push_load(&self, engine: &Engine, data: &Arc<Data>, examples: Vec<usize>) -> Result<(), PushError> {
        let (sources, geometry) = (self.activations(&self.sources), self.geometry);
        let (labels, data) = (self.labels.clone(), Arc::clone(data));
        engine
            .operation("load", Kind::Copy)
            .mutates(variables(&sources).chain([self.labels.variable()]))
            .push(move || {
                let (mut images, mut own) = (Vec::new(), Vec::new());
                data.train.batch(examples, &mut images, &mut own);
                let input = net::input_of(images, geometry);
                sources.iter().for_each(|edge| edge.put(Arc::clone(&input)));
                labels.put(own);
                SUCCESS
            })
    }

    fn push_loss(&self, engine: &Engine) -> Result<Slot<f64>, PushError> {
        let Edge { activation, gradient } = &self.edges[self.edges.len() - 1];
        let (logits, of_logits, labels) = (activation.clone(), gradient.clone(), self.labels.clone());
        let (loss, meter) = (Slot::new(engine), Arc::clone(&self.meter));
        let loss_of_step = loss.clone();
        engine
            .operation("loss", Kind::Compute)
            .mutates([activation.variable(), self.labels.variable(), gradient.variable(), loss.variable()])
            .priority(FORWARD)
            .push(move || {
                let (value, gradient) = meter.computes(|| {
                    let logits = Arc::unwrap_or_clone(logits.take());
                    net::loss_of(logits, &labels.take())
                });
                of_logits.put(gradient);
                loss_of_step.put(value);
                SUCCESS
            })?;
        Ok(loss)
    }

    fn push_parameter_gradients(
        &self,
        engine: &Engine,
        node_state: &NodeState,
        along_edges: Vec<Slot<Matrix>>,
        keys: &[Array],
        leave: bool,
    ) -> Result<(), PushError> {
        let NodeState { node, gradient } = node_state;
        let (here, total, meter) = (Arc::clone(node), gradient.clone(), Arc::clone(&self.meter));
        let (along, arrays) = (along_edges.clone(), keys.to_vec());
        engine
            .operation(format!("gradient {}", node.name), Kind::Compute)
            .mutates(
                variables(&along_edges).chain([gradient.variable()]).chain(keys.iter().map(Array::variable)),
            )
            .priority(BACKWARD)
            .push(move || {
                let of_keys = meter.computes(|| {
                    let gradient = here.output_gradient(take(&along));
                    let of_keys = here.parameter_gradients(&gradient);
                    total.put(gradient);
                    of_keys
                });
                arrays.iter().zip(of_keys).for_each(|(array, values)| array.replace(values));
                if leave {
                    meter.leave(arrays.len() as u32);
                }
                SUCCESS
            })
    }

    /// Pushes the computation of the inputs' gradients, from the gradients along the node's edges, or from
    /// their sum if the node has it already.
    fn push_input_gradients(
        &self,
        engine: &Engine,
        node_state: &NodeState,
        along_edges: Option<Vec<Slot<Matrix>>>,
        parameters: &[Variable],
    ) -> Result<(), PushError> {
        let NodeState { node, gradient } = node_state;
        let inputs = self.gradients(&node.inputs);
        let (here, total, meter) = (Arc::clone(node), gradient.clone(), Arc::clone(&self.meter));
        let (along, to) = (along_edges.clone(), inputs.clone());
        engine
            .operation(format!("backward {}", node.name), Kind::Compute)
            .reads(keys(node, parameters))
            .mutates(
                along_edges
                    .iter()
                    .flat_map(|edges| variables(edges))
                    .chain(variables(&inputs))
                    .chain([gradient.variable()]),
            )
            .priority(BACKWARD)
            .push(move || {
                let of_inputs = meter.computes(|| {
                    let gradient = match along {
                        Some(along) => here.output_gradient(take(&along)),
                        None => total.take(),
                    };
                    here.input_gradients(gradient)
                });
                to.iter().zip(of_inputs).for_each(|(edge, gradient)| edge.put(gradient));
                SUCCESS
            })
    }

    fn activations(&self, edges: &[usize]) -> Vec<Slot<Activation>> {
        edges.iter().map(|&edge| self.edges[edge].activation.clone()).collect()
    }

    fn gradients(&self, edges: &[usize]) -> Vec<Slot<Matrix>> {
        edges.iter().map(|&edge| self.edges[edge].gradient.clone()).collect()
    }
}

/// The variables of a node's parameters.
fn keys<'a>(node: &Node, parameters: &'a [Variable]) -> &'a [Variable] {
    node.first_key.map_or(&[], |first| &parameters[first..first + 2])
}

fn variables<T>(slots: &[Slot<T>]) -> impl Iterator<Item = &Variable> {
    slots.iter().map(Slot::variable)
}

fn take<T>(slots: &[Slot<T>]) -> Vec<T> {
    slots.iter().map(Slot::take).collect()
}
