//! Forward and backward of a network as operations: one for a node's output, one for the gradients of its keys, one for those of its
//! inputs.

use std::sync::Arc;

use candle_core::Tensor;
use paramhub_collective::engine::{Engine, Kind, PushError, Variable};
use paramhub_collective::kvstore::Array;

use super::meter::Meter;
use super::slot::Slot;
use crate::data::{Data, Geometry};
use crate::net::{self, NetError, Network, Node};

/// Of operations that could run, those whose results others wait for come first: gradients have to travel, and a forward pass
/// leads to them. Updates fill the gaps; the forward pass waits for those it needs.
const BACKWARD: i32 = 2;
const FORWARD: i32 = 1;

/// A network, with variables for all that its operations share.
pub(super) struct Passes {
    geometry: Geometry,
    /// Edges that carry the images.
    sources: Vec<usize>,
    stations: Vec<Station>,
    edges: Vec<Edge>,
    /// Of the batch on its way through the network.
    labels: Slot<Vec<u8>>,
    meter: Arc<Meter>,
}

/// A node's place among the operations.
struct Station {
    node: Arc<Node>,
    /// The gradient of its output, between the two operations of its backward pass. The variable stands as well for all that the
    /// layer remembers from its forward pass to its backward pass: no batch can overtake another in a node.
    gradient: Slot<Tensor>,
}

/// What two nodes share.
struct Edge {
    activation: Slot<Tensor>,
    gradient: Slot<Tensor>,
}

impl Passes {
    pub(super) fn new(engine: &Engine, network: &Network, meter: Arc<Meter>) -> Passes {
        let station = |node: &Arc<Node>| Station { node: Arc::clone(node), gradient: Slot::new(engine) };
        let edge = |_| Edge { activation: Slot::new(engine), gradient: Slot::new(engine) };
        Passes {
            geometry: network.geometry(),
            sources: network.sources().to_vec(),
            stations: network.nodes().iter().map(station).collect(),
            edges: (0..network.edges()).map(edge).collect(),
            labels: Slot::new(engine),
            meter,
        }
    }

    /// Pushes the forward pass of a batch, which reads the parameters of each key. The answer is where its loss will be.
    pub(super) fn push_forward(
        &self,
        engine: &Engine,
        data: &Arc<Data>,
        examples: Vec<usize>,
        parameters: &[Variable],
    ) -> Result<Slot<f64>, PushError> {
        self.push_load(engine, data, examples)?;
        for Station { node, gradient: kept } in &self.stations {
            let inputs = self.activations(&node.inputs);
            let outputs = self.activations(&node.outputs);
            let (meter, here) = (Arc::clone(&self.meter), Arc::clone(node));
            engine
                .operation(format!("forward {}", node.name), Kind::Compute)
                .reads(keys(node, parameters))
                .mutates(variables(&inputs).chain(variables(&outputs)).chain([kept.variable()]))
                .priority(FORWARD)
                .push(move || -> candle_core::Result<()> {
                    let output = meter.computes(|| here.forward(take(&inputs), true))?;
                    outputs.iter().for_each(|edge| edge.put(output.clone()));
                    Ok(())
                })?;
        }
        self.push_loss(engine)
    }

    /// Pushes the backward pass of the batch whose forward pass was pushed last. It leaves each key's gradient in its array.
    ///
    /// With `leave`, keys count as under way from then on.
    pub(super) fn push_backward(
        &self,
        engine: &Engine,
        parameters: &[Variable],
        gradients: &[Array],
        leave: bool,
    ) -> Result<(), PushError> {
        for station in self.stations.iter().rev().filter(|station| station.node.is_trained) {
            let along_edges = self.gradients(&station.node.outputs);
            if let Some(first) = station.node.first_key {
                let keys = &gradients[first..first + 2];
                self.push_parameter_gradients(engine, station, along_edges, keys, leave)?;
                if station.node.passes_gradient {
                    self.push_input_gradients(engine, station, None, parameters)?;
                }
            } else {
                self.push_input_gradients(engine, station, Some(along_edges), parameters)?;
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
            .push(move || -> Result<(), NetError> {
                let (mut images, mut own) = (Vec::new(), Vec::new());
                data.train.batch(examples, &mut images, &mut own);
                let input = net::input_of(images, geometry)?;
                sources.iter().for_each(|edge| edge.put(input.clone()));
                labels.put(own);
                Ok(())
            })
    }

    fn push_loss(&self, engine: &Engine) -> Result<Slot<f64>, PushError> {
        let Edge { activation, gradient } = &self.edges[self.edges.len() - 1];
        let (logits, of_logits, labels) = (activation.clone(), gradient.clone(), self.labels.clone());
        let (loss, meter) = (Slot::new(engine), Arc::clone(&self.meter));
        let told = loss.clone();
        engine
            .operation("loss", Kind::Compute)
            .mutates([activation.variable(), self.labels.variable(), gradient.variable(), loss.variable()])
            .priority(FORWARD)
            .push(move || -> Result<(), NetError> {
                let (value, gradient) = meter.computes(|| net::loss_of(logits.take(), &labels.take()))?;
                of_logits.put(gradient);
                told.put(value);
                Ok(())
            })?;
        Ok(loss)
    }

    fn push_parameter_gradients(
        &self,
        engine: &Engine,
        station: &Station,
        along_edges: Vec<Slot<Tensor>>,
        keys: &[Array],
        leave: bool,
    ) -> Result<(), PushError> {
        let Station { node, gradient } = station;
        let (here, total, meter) = (Arc::clone(node), gradient.clone(), Arc::clone(&self.meter));
        let (along, arrays) = (along_edges.clone(), keys.to_vec());
        engine
            .operation(format!("gradient {}", node.name), Kind::Compute)
            .mutates(
                variables(&along_edges).chain([gradient.variable()]).chain(keys.iter().map(Array::variable)),
            )
            .priority(BACKWARD)
            .push(move || -> candle_core::Result<()> {
                let of_keys = meter.computes(|| -> candle_core::Result<_> {
                    let gradient = here.output_gradient(take(&along))?;
                    let of_keys = here.parameter_gradients(&gradient)?;
                    total.put(gradient);
                    Ok(of_keys)
                })?;
                arrays.iter().zip(of_keys).for_each(|(array, values)| array.replace(values));
                if leave {
                    meter.leave(arrays.len() as u32);
                }
                Ok(())
            })
    }

    /// From the gradients along the edges, or from their sum where the node has it already.
    fn push_input_gradients(
        &self,
        engine: &Engine,
        station: &Station,
        along_edges: Option<Vec<Slot<Tensor>>>,
        parameters: &[Variable],
    ) -> Result<(), PushError> {
        let Station { node, gradient } = station;
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
            .push(move || -> candle_core::Result<()> {
                let of_inputs = meter.computes(|| {
                    let gradient = match along {
                        Some(along) => here.output_gradient(take(&along))?,
                        None => total.take(),
                    };
                    here.input_gradients(gradient)
                })?;
                to.iter().zip(of_inputs).for_each(|(edge, gradient)| edge.put(gradient));
                Ok(())
            })
    }

    fn activations(&self, edges: &[usize]) -> Vec<Slot<Tensor>> {
        edges.iter().map(|&edge| self.edges[edge].activation.clone()).collect()
    }

    fn gradients(&self, edges: &[usize]) -> Vec<Slot<Tensor>> {
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
