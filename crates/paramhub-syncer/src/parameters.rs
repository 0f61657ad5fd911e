//! A layer's parameters and optimizer state, as every worker keeps them, and their update from the step's
//! factors.

use std::cell::RefCell;

use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_kernels::factors::{Factors, Tiling};
use paramhub_kernels::{Codec, Optimizer, Step, convert};
use rayon::prelude::*;

use crate::layer::{FactorLayer, Outputs};

/// One layer's parameters and optimizer state, in f32.
pub(crate) struct LayerParameters {
    shape: (usize, usize),
    codec: Codec,
    slots: usize,
    weight: Vec<f32>,
    /// The state of each band of rows: its segments' state back to back, each with its slots back to back. A
    /// segment is the part of one row in one tile.
    weight_state: Vec<Vec<f32>>,
    bias: Vec<f32>,
    bias_state: Vec<f32>,
    /// The number of updates they have had.
    pub(crate) updates: u64,
}

/// The inputs of an update beside the factors.
pub(crate) struct Update<'a> {
    pub(crate) optimizer: &'a dyn Optimizer,
    /// The hyperparameters of weight and bias.
    pub(crate) hyperparameters: &'a [Hyperparameters; 2],
    pub(crate) contributions: u32,
}

impl LayerParameters {
    /// Zeros, with `slots` values of state for each parameter.
    pub(crate) fn new(layer: &FactorLayer, slots: usize) -> Self {
        let (rows, columns) = layer.shape;
        let elements = rows * columns;
        let band = block_rows(columns) * columns;
        let bias = layer.bias_elements();
        LayerParameters {
            shape: layer.shape,
            codec: layer.parameter_codec,
            slots,
            weight: vec![0.0; elements],
            weight_state: (0..elements)
                .step_by(band.max(1))
                .map(|start| vec![0.0; slots * band.min(elements - start)])
                .collect(),
            bias: vec![0.0; bias],
            bias_state: vec![0.0; slots * bias],
            updates: 0,
        }
    }

    /// Sets the parameters, with fresh state, after so many updates.
    pub(crate) fn begin(&mut self, weight: &[f32], bias: &[f32], updates: u64) {
        self.weight.copy_from_slice(weight);
        self.bias.copy_from_slice(bias);
        self.weight_state.iter_mut().for_each(|state| state.fill(0.0));
        self.bias_state.fill(0.0);
        self.updates = updates;
    }

    /// The number of state values for each parameter.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    pub(crate) fn weight(&self) -> &[f32] {
        &self.weight
    }

    pub(crate) fn bias(&self) -> &[f32] {
        &self.bias
    }

    /// One slot of the optimizer's state, of the weight and then of the bias.
    pub(crate) fn state(&self, slot: usize) -> (Vec<f32>, Vec<f32>) {
        let columns = self.shape.1;
        let mut weight = Vec::with_capacity(self.weight.len());
        for band in &self.weight_state {
            let mut rest = band.as_slice();
            while !rest.is_empty() {
                for width in tile_widths(columns) {
                    let (segment, after) = rest.split_at(self.slots * width);
                    weight.extend_from_slice(&segment[slot * width..][..width]);
                    rest = after;
                }
            }
        }
        let bias = self.bias.len();
        (weight, self.bias_state[slot * bias..][..bias].to_vec())
    }

    /// Sets one slot of the optimizer's state.
    pub(crate) fn restore_state(&mut self, slot: usize, weight: &[f32], bias: &[f32]) {
        let (columns, slots) = (self.shape.1, self.slots);
        let mut from = weight;
        for band in &mut self.weight_state {
            let mut rest = band.as_mut_slice();
            while !rest.is_empty() {
                for width in tile_widths(columns) {
                    let (segment, after) = rest.split_at_mut(slots * width);
                    let (values, left) = from.split_at(width);
                    segment[slot * width..][..width].copy_from_slice(values);
                    (rest, from) = (after, left);
                }
            }
        }
        let elements = self.bias.len();
        self.bias_state[slot * elements..][..elements].copy_from_slice(bias);
    }

    /// Updates all parameters from a step's factors, tile by tile on the threads of the current pool, and
    /// writes the result to `outputs`. The bits do not depend on which thread does what.
    pub(crate) fn update(&mut self, factors: &Factors<'_>, update: &Update<'_>, outputs: &mut Outputs) {
        self.updates += 1;
        let step = |hyperparameters| Step {
            hyperparameters,
            number: self.updates,
            contributions: update.contributions,
            factor: 1.0,
            tensor: None,
        };
        let [of_weight, of_bias] = update.hyperparameters;
        let (step, bias_step) = (step(of_weight), step(of_bias));
        let (columns, slots, codec) = (self.shape.1, self.slots, self.codec);
        let band = block_rows(columns) * columns;
        let bands = self
            .weight
            .par_chunks_mut(band.max(1))
            .zip(&mut self.weight_state)
            .zip(outputs.weight.bytes_mut().par_chunks_mut(band.max(1) * codec.bytes()));
        bands.enumerate().for_each(|(number, ((weight, state), output))| {
            let first_row = number * block_rows(columns);
            let band = RowBlock { weight, state, output, columns, slots, codec };
            band.update(factors, first_row, update.optimizer, &step);
        });
        if !self.bias.is_empty() {
            let mut gradient = vec![0.0; self.bias.len()];
            factors.bias_gradient(&mut gradient);
            update.optimizer.apply(&bias_step, &mut self.bias, &gradient, &mut self.bias_state);
            if let Some(output) = &mut outputs.bias {
                convert::encode(&self.bias, output.bytes_mut(), codec);
            }
        }
    }
}

/// Some rows of a weight, with their state and outputs.
struct RowBlock<'a> {
    weight: &'a mut [f32],
    state: &'a mut [f32],
    output: &'a mut [u8],
    columns: usize,
    slots: usize,
    codec: Codec,
}

impl RowBlock<'_> {
    fn update(self, factors: &Factors<'_>, first_row: usize, optimizer: &dyn Optimizer, step: &Step<'_>) {
        let RowBlock { weight, state, output, columns, slots, codec } = self;
        let rows = weight.len() / columns;
        TILE.with_borrow_mut(|tile| {
            tile.resize(tiling(columns).elements(), 0.0);
            let mut first = 0;
            for width in tile_widths(columns) {
                factors.weight_gradient(first_row..first_row + rows, first..first + width, tile);
                for (row, gradient) in tile[..rows * width].chunks_exact(width).enumerate() {
                    let start = row * columns + first;
                    let segment = &mut weight[start..start + width];
                    optimizer.apply(step, segment, gradient, &mut state[slots * start..][..slots * width]);
                    let bytes = start * codec.bytes()..(start + width) * codec.bytes();
                    convert::encode(segment, &mut output[bytes], codec);
                }
                first += width;
            }
        });
    }
}

thread_local! {
    /// Each thread's tile of the gradient.
    static TILE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// The tiling of a weight of so many columns. The state lies in its order, so it must not depend on the
/// number of samples in a step.
fn tiling(columns: usize) -> Tiling {
    Tiling::new(columns, 0)
}

/// The number of rows that are updated together.
fn block_rows(columns: usize) -> usize {
    tiling(columns).rows
}

/// The widths of the tiles of a row, left to right.
fn tile_widths(columns: usize) -> impl Iterator<Item = usize> {
    tiling(columns).across(columns).map(|tile| tile.len())
}
