//! The forward and backward pass of a network as operations: `load` for the batch and `loss` for its loss,
//! and for each node one for its output, one for the gradients of its keys and one for those of its inputs.

use std::convert::Infallible;
use std::sync::Arc;

use paramhub_collective::engine::{Engine, Kind, PushError, Variable};
use paramhub_collective::kvstore::Array;

use super::meter::Meter;
use super::variable_cell::VariableCell;
use crate::data::{Data, Geometry};
use crate::net::{self, Activation, Matrix, Network, Node};

/// Priorities. Operations on which others wait run first: gradients have to travel, and a forward pass leads
/// to them. Updates fill the gaps; the forward pass waits for those that it needs. `load` has no priority.
const BACKWARD: i32 = 2;
const FORWARD: i32 = 1;

/// The result of an operation that cannot fail.
const SUCCESS: Result<(), Infallible> = Ok(());

/// Pushes the passes of a network to the engine as operations. It holds the network's nodes, and variables
/// for all data that their operations share.
pub(super) struct Passes {
    geometry: Geometry,
    /// Edges that carry the images.
    sources: Vec<usize>,
    node_states: Vec<NodeState>,
    edges: Vec<Edge>,
    /// The labels of the batch that is in the network.
    labels: VariableCell<Vec<u8>>,
    meter: Arc<Meter>,
}

/// A node, and what its operations keep.
struct NodeState {
    node: Arc<Node>,
    /// The gradient of the node's output: the operation that computes the gradients of the node's keys leaves
    /// it for the operation that computes those of its inputs. Its variable also stands for all that the
    /// layer keeps from its forward pass to its backward pass: no batch can overtake another in a node.
    output_gradient: VariableCell<Matrix>,
}

/// The data that two nodes share, or `load` and a first node, or the last node and `loss`: that edge carries
/// the logits.
struct Edge {
    activation: VariableCell<Activation>,
    gradient: VariableCell<Matrix>,
}

impl Passes {
    pub(super) fn new(engine: &Engine, network: &Network, meter: Arc<Meter>) -> Passes {
        let node_state = |node: &Arc<Node>| NodeState {
            node: Arc::clone(node),
            output_gradient: VariableCell::new(engine),
        };
        let edge = |_| Edge { activation: VariableCell::new(engine), gradient: VariableCell::new(engine) };
        Passes {
            geometry: network.geometry(),
            sources: network.sources().to_vec(),
            node_states: network.nodes().iter().map(node_state).collect(),
            edges: (0..network.edges()).map(edge).collect(),
            labels: VariableCell::new(engine),
            meter,
        }
    }

    /// Pushes the forward pass of a batch, which reads the parameters of each key. Returns the cell of
    /// its loss.
    pub(super) fn push_forward(
        &self,
        engine: &Engine,
        data: &Arc<Data>,
        examples: Vec<usize>,
        parameters: &[Variable],
    ) -> Result<VariableCell<f64>, PushError> {
        self.push_load(engine, data, examples)?;
        for NodeState { node, output_gradient } in &self.node_states {
            let inputs = self.activations(&node.inputs);
            let outputs = self.activations(&node.outputs);
            let (meter, here) = (Arc::clone(&self.meter), Arc::clone(node));
            engine
                .operation(format!("forward {}", node.name), Kind::Compute)
                .reads(parameter_variables(node, parameters))
                .mutates(variables(&inputs).chain(variables(&outputs)).chain([output_gradient.variable()]))
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
    /// With `count_as_sent`, the meter counts each key as being exchanged once its gradient exists.
    pub(super) fn push_backward(
        &self,
        engine: &Engine,
        parameters: &[Variable],
        gradients: &[Array],
        count_as_sent: bool,
    ) -> Result<(), PushError> {
        for node_state in self.node_states.iter().rev().filter(|node_state| node_state.node.is_trained) {
            let along_edges = self.gradients(&node_state.node.outputs);
            if let Some(first) = node_state.node.first_key {
                // The weight's gradient and the bias's.
                let gradient_arrays = &gradients[first..first + 2];
                self.push_parameter_gradients(
                    engine,
                    node_state,
                    along_edges,
                    gradient_arrays,
                    count_as_sent,
                )?;
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
        let (label_cell, data) = (self.labels.clone(), Arc::clone(data));
        engine
            .operation("load", Kind::Copy)
            .mutates(variables(&sources).chain([self.labels.variable()]))
            .push(move || {
                let (mut images, mut labels) = (Vec::new(), Vec::new());
                data.train.batch(examples, &mut images, &mut labels);
                let input = net::input_of(images, geometry);
                sources.iter().for_each(|edge| edge.put(Arc::clone(&input)));
                label_cell.put(labels);
                SUCCESS
            })
    }

    fn push_loss(&self, engine: &Engine) -> Result<VariableCell<f64>, PushError> {
        let Edge { activation, gradient } = &self.edges[self.edges.len() - 1];
        let (logits, of_logits, labels) = (activation.clone(), gradient.clone(), self.labels.clone());
        let (loss, meter) = (VariableCell::new(engine), Arc::clone(&self.meter));
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
        along_edges: Vec<VariableCell<Matrix>>,
        gradient_arrays: &[Array],
        count_as_sent: bool,
    ) -> Result<(), PushError> {
        let NodeState { node, .. } = node_state;
        let output_gradient = node_state.output_gradient.clone();
        let (here, meter) = (Arc::clone(node), Arc::clone(&self.meter));
        let (along, arrays) = (along_edges.clone(), gradient_arrays.to_vec());
        engine
            .operation(format!("gradient {}", node.name), Kind::Compute)
            .mutates(
                variables(&along_edges)
                    .chain([node_state.output_gradient.variable()])
                    .chain(gradient_arrays.iter().map(Array::variable)),
            )
            .priority(BACKWARD)
            .push(move || {
                let of_keys = meter.computes(|| {
                    let gradient = here.output_gradient(take(&along));
                    let of_keys = here.parameter_gradients(&gradient);
                    output_gradient.put(gradient);
                    of_keys
                });
                arrays.iter().zip(of_keys).for_each(|(array, values)| array.replace(values));
                if count_as_sent {
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
        along_edges: Option<Vec<VariableCell<Matrix>>>,
        parameters: &[Variable],
    ) -> Result<(), PushError> {
        let NodeState { node, .. } = node_state;
        let inputs = self.gradients(&node.inputs);
        let output_gradient = node_state.output_gradient.clone();
        let (here, meter) = (Arc::clone(node), Arc::clone(&self.meter));
        let (along, to) = (along_edges.clone(), inputs.clone());
        engine
            .operation(format!("backward {}", node.name), Kind::Compute)
            .reads(parameter_variables(node, parameters))
            .mutates(
                along_edges
                    .iter()
                    .flat_map(|edges| variables(edges))
                    .chain(variables(&inputs))
                    .chain([node_state.output_gradient.variable()]),
            )
            .priority(BACKWARD)
            .push(move || {
                let of_inputs = meter.computes(|| {
                    let gradient = match along {
                        Some(along) => here.output_gradient(take(&along)),
                        None => output_gradient.take(),
                    };
                    here.input_gradients(gradient)
                });
                to.iter().zip(of_inputs).for_each(|(edge, gradient)| edge.put(gradient));
                SUCCESS
            })
    }

    fn activations(&self, edges: &[usize]) -> Vec<VariableCell<Activation>> {
        edges.iter().map(|&edge| self.edges[edge].activation.clone()).collect()
    }

    fn gradients(&self, edges: &[usize]) -> Vec<VariableCell<Matrix>> {
        edges.iter().map(|&edge| self.edges[edge].gradient.clone()).collect()
    }
}

/// The variables of a node's parameters: its weight and bias, or none.
fn parameter_variables<'a>(node: &Node, parameters: &'a [Variable]) -> &'a [Variable] {
    node.first_key.map_or(&[], |first| &parameters[first..first + 2])
}

fn variables<T>(cells: &[VariableCell<T>]) -> impl Iterator<Item = &Variable> {
    cells.iter().map(VariableCell::variable)
}

fn take<T>(cells: &[VariableCell<T>]) -> Vec<T> {
    cells.iter().map(VariableCell::take).collect()
}
