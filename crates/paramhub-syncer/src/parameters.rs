//! A layer's parameters and optimizer state, as every worker keeps them, and their update from the step's factors.

use std::cell::RefCell;

use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_kernels::factors::{Factors, Tiling};
use paramhub_kernels::{Codec, Optimizer, Step, convert};
use rayon::prelude::*;

use crate::layer::{FactorLayer, Outputs};

/// One layer's, in f32.
pub(crate) struct Parameters {
    shape: (usize, usize),
    codec: Codec,
    slots: usize,
    weight: Vec<f32>,
    /// Of each band of rows: its segments' state back to back, each with its slots back to back. A segment is what one row has in
    /// one tile.
    weight_state: Vec<Vec<f32>>,
    bias: Vec<f32>,
    bias_state: Vec<f32>,
    /// How often they were updated.
    pub(crate) updates: u64,
}

/// What an update takes beside the factors.
pub(crate) struct Update<'a> {
    pub(crate) optimizer: &'a dyn Optimizer,
    /// For weight and bias.
    pub(crate) hyperparameters: &'a [Hyperparameters; 2],
    pub(crate) contributions: u32,
}

impl Parameters {
    /// Zeros. `slots` values of state a parameter.
    pub(crate) fn new(layer: &FactorLayer, slots: usize) -> Self {
        let (rows, columns) = layer.shape;
        let elements = rows * columns;
        let band = band_rows(columns) * columns;
        let bias = layer.bias_elements();
        Parameters {
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

    /// Begins with these and fresh state, after so many updates.
    pub(crate) fn begin(&mut self, weight: &[f32], bias: &[f32], updates: u64) {
        self.weight.copy_from_slice(weight);
        self.bias.copy_from_slice(bias);
        self.weight_state.iter_mut().for_each(|state| state.fill(0.0));
        self.bias_state.fill(0.0);
        self.updates = updates;
    }

    /// Values of state a parameter.
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

    /// Puts one slot of the optimizer's state in.
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

    /// Updates all of it from a step's factors, tile by tile on the threads of the pool this is called in, and gives the result
    /// back. Which thread does what changes no bit.
    pub(crate) fn update(&mut self, factors: &Factors<'_>, update: &Update<'_>, outputs: &mut Outputs) {
        self.updates += 1;
        let step = |hyperparameters| Step {
            hyperparameters,
            number: self.updates,
            contributions: update.contributions,
            factor: 1.0,
        };
        let [of_weight, of_bias] = update.hyperparameters;
        let (step, bias_step) = (step(of_weight), step(of_bias));
        let (columns, slots, codec) = (self.shape.1, self.slots, self.codec);
        let band = band_rows(columns) * columns;
        let bands = self
            .weight
            .par_chunks_mut(band.max(1))
            .zip(&mut self.weight_state)
            .zip(outputs.weight.bytes_mut().par_chunks_mut(band.max(1) * codec.bytes()));
        bands.enumerate().for_each(|(number, ((weight, state), output))| {
            let first_row = number * band_rows(columns);
            let band = Band { weight, state, output, columns, slots, codec };
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

/// Some rows of a weight with what belongs to them.
struct Band<'a> {
    weight: &'a mut [f32],
    state: &'a mut [f32],
    output: &'a mut [u8],
    columns: usize,
    slots: usize,
    codec: Codec,
}

impl Band<'_> {
    fn update(self, factors: &Factors<'_>, first_row: usize, optimizer: &dyn Optimizer, step: &Step<'_>) {
        let Band { weight, state, output, columns, slots, codec } = self;
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
    /// A tile of gradient, of each thread of the pool.
    static TILE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// How a weight of so many columns is updated. Its state lies in this order, so that it does not depend on what a step brings.
fn tiling(columns: usize) -> Tiling {
    Tiling::new(columns, 0)
}

/// Rows that are updated together.
fn band_rows(columns: usize) -> usize {
    tiling(columns).rows
}

/// How wide the tiles of a row are, left to right.
fn tile_widths(columns: usize) -> impl Iterator<Item = usize> {
    tiling(columns).across(columns).map(|tile| tile.len())
}
