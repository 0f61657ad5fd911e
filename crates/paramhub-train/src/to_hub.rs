//! The layers of a training run whose factors go to the hub that has them.

use std::collections::HashMap;

use paramhub_core::factors::FactorBlock;
use paramhub_worker::{FactorBuffers, FactorHandle, Job, WorkerError};

/// What is under way of such layers, and memory for what is next.
#[derive(Default)]
pub(crate) struct ToHubLayers {
    layers: Vec<Layer>,
    /// By key, weights and biases.
    layer_of: HashMap<usize, usize>,
}

struct Layer {
    weight: usize,
    bias: Option<usize>,
    /// For the trainer's own is free again as soon as it has given them.
    inputs: Vec<f32>,
    output_gradients: Vec<f32>,
    under_way: Option<FactorHandle<Vec<f32>, Vec<f32>>>,
}

impl ToHubLayers {
    /// Those of a job.
    pub(crate) fn of(job: &Job) -> Self {
        let layers = job.factor_blocks().iter().map(|block: &FactorBlock| Layer {
            weight: block.weight as usize,
            bias: block.bias.map(|bias| bias as usize),
            inputs: Vec::new(),
            output_gradients: Vec::new(),
            under_way: None,
        });
        let layers: Vec<Layer> = layers.collect();
        let keys = |(number, layer): (usize, &Layer)| {
            [Some(layer.weight), layer.bias].into_iter().flatten().map(move |key| (key, number))
        };
        ToHubLayers { layer_of: layers.iter().enumerate().flat_map(keys).collect(), layers }
    }

    /// Whether a key belongs to one of them.
    pub(crate) fn has(&self, key: usize) -> bool {
        self.layer_of.contains_key(&key)
    }

    /// The bias that goes with a weight.
    pub(crate) fn bias(&self, weight: usize) -> Option<usize> {
        self.layers[self.layer_of[&weight]].bias
    }

    /// Sends a layer's factors, with memory for the parameters of weight and bias. `end` is called when they have come, or will
    /// not.
    pub(crate) fn push(
        &mut self,
        job: &Job,
        weight: usize,
        [inputs, output_gradients]: [&[f32]; 2],
        (weight_memory, bias): (Vec<f32>, Option<Vec<f32>>),
        end: impl FnOnce() + Send + 'static,
    ) -> Result<(), WorkerError> {
        let layer = &mut self.layers[self.layer_of[&weight]];
        let copied = |memory: &mut Vec<f32>, values: &[f32]| {
            let mut copy = std::mem::take(memory);
            copy.clear();
            copy.extend_from_slice(values);
            copy
        };
        let buffers = FactorBuffers {
            inputs: copied(&mut layer.inputs, inputs),
            output_gradients: copied(&mut layer.output_gradients, output_gradients),
            weight: weight_memory,
            bias,
        };
        let handle = job.push_pull_factors(weight as u32, buffers)?;
        handle.on_complete(move |_| end());
        layer.under_way = Some(handle);
        Ok(())
    }

    /// Waits for the layer of a key, if its parameters are under way; weight and bias with their new parameters.
    pub(crate) fn wait(&mut self, key: usize) -> Result<Vec<(usize, Vec<f32>)>, WorkerError> {
        let Some(&number) = self.layer_of.get(&key) else { return Ok(Vec::new()) };
        let layer = &mut self.layers[number];
        let Some(handle) = layer.under_way.take() else { return Ok(Vec::new()) };
        let done = handle.wait()?;
        (layer.inputs, layer.output_gradients) = (done.inputs, done.output_gradients);
        let bias = layer.bias.zip(done.bias);
        Ok([(layer.weight, done.weight)].into_iter().chain(bias).collect())
    }

    /// Whether the parameters of a key's layer are under way.
    pub(crate) fn is_under_way(&self, key: usize) -> bool {
        self.layer_of.get(&key).is_some_and(|&number| self.layers[number].under_way.is_some())
    }
}
