//! Layers whose factors come to the hub: their blocks, and how much of their gradients is made.

use std::ops::Range;

use paramhub_core::exchange::Gathering;
use paramhub_core::factors::FactorBlock;
use paramhub_kernels::factors::Tiling;

use super::buffer::{Buffer, OutOfMemory, Pages};
use super::layout::Layout;
use super::plan::ShardPlan;

/// All such layers of a shard, most urgent first.
pub(super) struct FactorLayers {
    pub(super) gathering: Gathering,
    pub(super) layers: Vec<Layer>,
}

pub(super) struct Layer {
    /// The inputs of all ranks' samples, in rank order, with room for the largest number of each rank.
    pub(super) inputs: Buffer,
    pub(super) output_gradients: Buffer,
    pub(super) tiling: Tiling,
    pub(super) making: Option<MakeProgress>,
}

/// The part of a gradient that is made.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MakeProgress {
    /// Elements of the bias that are made.
    pub(super) bias: usize,
    /// Rows of the weight that are made, and columns of the next band that are made.
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Chunks that are complete, counted first through the bias' and then through the weight's.
    pub(super) chunks: u32,
}

impl FactorLayers {
    pub(super) fn new(plan: &ShardPlan, layout: &Layout) -> Result<Self, OutOfMemory> {
        let members = plan.ports.workers();
        let layers = layout.factor_layers.iter().map(|layer| {
            let [inputs, output_gradients] = elements(&layer.block, members).map(|count| count as usize);
            Ok(Layer {
                inputs: Buffer::reserved(inputs, 6)?,
                output_gradients: Buffer::reserved(output_gradients, 7)?,
                tiling: Tiling::new(layer.block.inputs, members as usize * layer.block.samples as usize),
                making: None,
            })
        });
        let layers = layers.collect::<Result<_, _>>()?;
        Ok(FactorLayers { gathering: Gathering::new(layout.factor_layers.clone(), members), layers })
    }

    /// Calls `each` for its arrays.
    pub(super) fn each_array(&mut self, each: &mut dyn FnMut(&mut dyn Pages)) {
        for layer in &mut self.layers {
            each(&mut layer.inputs);
            each(&mut layer.output_gradients);
        }
    }

    /// Stops all work on gradients.
    pub(super) fn stop(&mut self) {
        self.layers.iter_mut().for_each(|layer| layer.making = None);
    }

    /// Bytes that [`new`](Self::new) will take.
    pub(super) fn memory_bytes(plan: &ShardPlan, layout: &Layout) -> u64 {
        let members = plan.ports.workers();
        let counts = layout.factor_layers.iter().flat_map(|layer| elements(&layer.block, members));
        let bytes = counts.fold(0_u64, |sum, count| sum.saturating_add(count.saturating_mul(4)));
        bytes.saturating_add(Gathering::memory_bytes(layout.factor_layers.len(), members))
    }

    pub(super) fn resume(&mut self, member: u32) {
        self.gathering.resume(member);
    }
}

/// Elements of the inputs and of the output gradients of this many workers.
fn elements(block: &FactorBlock, members: u32) -> [u64; 2] {
    let samples = u64::from(block.samples) * u64::from(members);
    [block.inputs, block.outputs].map(|row| samples.saturating_mul(row as u64))
}

impl MakeProgress {
    /// The next chunk whose gradient is made entirely; `end` gives the end of a chunk in its key.
    pub(super) fn next_chunk(
        &self,
        block: &FactorBlock,
        weight: &Range<u32>,
        bias: &Range<u32>,
        end: impl Fn(u32) -> usize,
    ) -> Option<u32> {
        let of_bias = bias.len() as u32;
        if self.chunks < of_bias {
            let index = bias.start + self.chunks;
            return (end(index) <= self.bias).then_some(index);
        }
        let index = weight.start + self.chunks - of_bias;
        (index < weight.end && end(index) <= self.rows * block.inputs).then_some(index)
    }
}

impl Layer {
    /// Zeroes the rest of a block with fewer samples than it may have: it still has older numbers, and zeros
    /// add nothing.
    pub(super) fn clear_missing(&mut self, block: &FactorBlock, member: u32, samples: u32) {
        let (first, most) = (member as usize * block.samples as usize, block.samples as usize);
        for (row, target) in [(block.outputs, &mut self.output_gradients), (block.inputs, &mut self.inputs)] {
            target[(first + samples as usize) * row..(first + most) * row].fill(0.0);
        }
    }
}
