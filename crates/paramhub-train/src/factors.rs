//! The layers of a training run that go by their factors.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, sync_channel};

use paramhub_syncer::{FactorExchange, LayerFactors, Outputs, PlannedFactors, SyncError};
use paramhub_transport::ReceiveRegion;

/// What a run needs to exchange some of its layers by factors.
pub struct FactorLayers {
    exchange: FactorExchange,
    layers: Vec<Layer>,
    /// By key, weights and biases: the layer, and whether it is the weight.
    part_of: HashMap<usize, (usize, bool)>,
}

struct Layer {
    weight: Part,
    bias: Option<Part>,
    under_way: Option<Receiver<Result<Outputs, SyncError>>>,
}

#[derive(Default)]
struct Part {
    /// For the parameters to come; those that have come, until they are asked for.
    memory: Vec<f32>,
    has_come: bool,
    /// Whether the initial parameters are known.
    has_begun: bool,
}

impl FactorLayers {
    /// These layers, whose positions in `planned` are those in the exchange.
    pub fn new(exchange: FactorExchange, planned: &[PlannedFactors]) -> Self {
        let mut part_of = HashMap::new();
        let layers = planned.iter().enumerate().map(|(number, planned)| {
            part_of.insert(planned.weight as usize, (number, true));
            let bias = planned.bias.map(|bias| {
                part_of.insert(bias as usize, (number, false));
                Part::default()
            });
            Layer { weight: Part::default(), bias, under_way: None }
        });
        let layers = layers.collect();
        FactorLayers { exchange, layers, part_of }
    }

    /// The exchange, for its numbers.
    pub fn exchange(&self) -> &FactorExchange {
        &self.exchange
    }

    /// Whether a key belongs to one of these layers.
    pub(crate) fn has(&self, key: usize) -> bool {
        self.part_of.contains_key(&key)
    }

    /// Whether the initial parameters of a key are known.
    pub(crate) fn has_begun(&mut self, key: usize) -> bool {
        self.part(key).has_begun
    }

    /// Takes a key's initial parameters.
    pub(crate) fn begin(&mut self, key: usize, parameters: &[f32]) -> Result<(), SyncError> {
        let (number, _) = self.part_of[&key];
        *self.part(key) = Part { memory: parameters.to_vec(), has_come: false, has_begun: true };
        let Layer { weight, bias, .. } = &self.layers[number];
        if weight.has_begun && bias.as_ref().is_none_or(|bias| bias.has_begun) {
            let bias = bias.as_ref().map_or(&[][..], |bias| &bias.memory);
            self.exchange.initialise(number, &weight.memory, bias, 0)?;
        }
        Ok(())
    }

    /// Sends a layer's factors. `end` is called when its parameters have come, or will not.
    pub(crate) fn push(
        &mut self,
        weight: usize,
        factors: LayerFactors<'_>,
        end: impl FnOnce() + Send + 'static,
    ) -> Result<(), SyncError> {
        let (number, _) = self.part_of[&weight];
        let layer = &mut self.layers[number];
        let region = |part: &mut Part| ReceiveRegion::owned(std::mem::take(&mut part.memory));
        let outputs = Outputs { weight: region(&mut layer.weight), bias: layer.bias.as_mut().map(region) };
        let (tell, told) = sync_channel(1);
        self.exchange.push(number, factors, outputs, move |outcome| {
            end();
            // A run that has ended needs no parameters.
            let _ = tell.send(outcome);
        })?;
        layer.under_way = Some(told);
        Ok(())
    }

    /// Whether the parameters of a key's layer are under way.
    pub(crate) fn is_under_way(&self, key: usize) -> bool {
        self.layers[self.part_of[&key].0].under_way.is_some()
    }

    /// Waits for the parameters of a key's layer.
    pub(crate) fn wait(&mut self, key: usize) -> Result<(), SyncError> {
        let layer = &mut self.layers[self.part_of[&key].0];
        let Some(told) = layer.under_way.take() else { return Ok(()) };
        let outputs = told.recv().expect("every push is answered")?;
        let memory = |region: ReceiveRegion| region.into_owned().expect("it was given as a vector");
        (layer.weight.memory, layer.weight.has_come) = (memory(outputs.weight), true);
        if let (Some(part), Some(region)) = (&mut layer.bias, outputs.bias) {
            (part.memory, part.has_come) = (memory(region), true);
        }
        Ok(())
    }

    /// Gives the parameters of a key that have come since they were last asked for, for memory of the same length.
    pub(crate) fn swap(&mut self, key: usize, parameters: &mut Vec<f32>) {
        let part = self.part(key);
        if std::mem::take(&mut part.has_come) {
            std::mem::swap(&mut part.memory, parameters);
        }
    }

    fn part(&mut self, key: usize) -> &mut Part {
        let (number, is_weight) = self.part_of[&key];
        let layer = &mut self.layers[number];
        if is_weight {
            &mut layer.weight
        } else {
            layer.bias.as_mut().expect("its key is one of the layer's")
        }
    }
}
