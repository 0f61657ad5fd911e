//! Factor blocks: what a worker sends in a step for a layer that is exchanged by [`Scheme::FactorsToHub`],
//! and how it is cut.
//!
//! With K samples of a layer of M outputs and N inputs, a block has K times M output gradients, then K times
//! N inputs, each sample by sample. It is cut into *pieces* of as many elements as a chunk has; the last may
//! be shorter. K may be less than in the job's settings, so a block may be short, but it has at least one
//! piece, which may be empty.

use std::ops::Range;

use crate::chunk::ChunkMap;
use crate::codec::Codec;
use crate::scheme::{LayerType, Plan, Scheme};
use crate::settings::Settings;

/// The way in which the blocks of one layer are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FactorBlock {
    /// The weight's position in the key table.
    pub weight: u32,
    /// The bias' position, if there is a bias.
    pub bias: Option<u32>,
    /// M.
    pub outputs: usize,
    /// N.
    pub inputs: usize,
    /// The largest K.
    pub samples: u32,
    /// The codec of the factors, which is also their type in memory.
    pub codec: Codec,
    /// Elements of a full piece.
    pub piece_elements: usize,
}

/// The place of a piece's elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The range among the worker's output gradients.
    pub output_gradients: Range<usize>,
    /// The range among its inputs, which follow the output gradients.
    pub inputs: Range<usize>,
}

impl Piece {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.output_gradients.len() + self.inputs.len()
    }
}

impl FactorBlock {
    /// The blocks of all layers of a plan that are exchanged by [`Scheme::FactorsToHub`], in the plan's
    /// order. `map` must be cut from the settings' table, and the settings must have been checked.
    pub fn planned(settings: &Settings, map: &ChunkMap, plan: &Plan) -> Vec<FactorBlock> {
        let block = plan.going_by(Scheme::FactorsToHub, settings).map(|(planned, layer)| {
            let LayerType::FullyConnected { outputs, inputs, samples, .. } = planned.layer.kind else {
                unreachable!("only fully connected layers are planned by factors");
            };
            let weight = planned.keys[0];
            FactorBlock {
                weight,
                bias: planned.keys.get(1).copied(),
                outputs: outputs as usize,
                inputs: inputs as usize,
                // The check of the settings ensures that 32 bits count all elements of a block.
                samples: samples as u32,
                codec: layer.factor_codec(settings.keys.keys()),
                piece_elements: map.chunk_elements() as usize,
            }
        });
        block.collect()
    }

    /// Elements of a block of this many samples.
    pub fn elements(&self, samples: u32) -> usize {
        samples as usize * (self.outputs + self.inputs)
    }

    /// Pieces of a block of this many samples.
    pub fn pieces(&self, samples: u32) -> u32 {
        self.elements(samples).div_ceil(self.piece_elements).max(1) as u32
    }

    /// A piece of a block of this many samples; `None` beyond the last.
    pub fn piece(&self, samples: u32, number: u32) -> Option<Piece> {
        if number >= self.pieces(samples) {
            return None;
        }
        let start = number as usize * self.piece_elements;
        let end = self.elements(samples).min(start + self.piece_elements);
        let gradients = samples as usize * self.outputs;
        Some(Piece {
            output_gradients: start.min(gradients)..end.min(gradients),
            inputs: start.max(gradients) - gradients..end.max(gradients) - gradients,
        })
    }

    /// The weight and, if there is one, the bias.
    pub fn keys(&self) -> impl Iterator<Item = u32> + use<> {
        [self.weight].into_iter().chain(self.bias)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::key::{Key, KeyTable};
    use crate::scheme::{Cluster, LayerSettings, SchemeChoice};

    /// The block of a weight of 30 times 20, key 1, and its bias, key 2, with up to 5 samples, in chunks of
    /// 256.
    pub(crate) fn block() -> (ChunkMap, FactorBlock) {
        let keys = vec![Key::new("first", [300]), Key::new("w", [30, 20]), Key::new("b", [30])];
        let layer = LayerSettings::fully_connected("fc", [1, 2], [30, 20, 5]);
        let settings = Settings {
            layers: vec![layer.by(SchemeChoice::Only(Scheme::FactorsToHub))],
            chunk_bytes: 1024,
            ..Settings::new(KeyTable::new(keys).unwrap())
        };
        settings.check().unwrap();
        let map = ChunkMap::new(&settings.keys, settings.chunk_bytes).unwrap();
        let plan = Plan::new(&settings, &Cluster::beside_workers(3));
        let blocks = FactorBlock::planned(&settings, &map, &plan);
        assert_eq!(blocks.len(), 1);
        (map, blocks[0])
    }

    #[test]
    fn a_short_block_has_fewer_pieces_and_an_empty_one_still_one() {
        let (_, block) = block();
        assert_eq!((block.weight, block.bias, block.samples), (1, Some(2), 5));
        assert_eq!([5, 1, 0].map(|samples| block.pieces(samples)), [1, 1, 1]);
        let block = FactorBlock { piece_elements: 100, ..block };
        assert_eq!([5, 2, 1].map(|samples| block.pieces(samples)), [3, 1, 1]);
        // 150 output gradients, then 100 inputs.
        assert_eq!(block.piece(5, 1), Some(Piece { output_gradients: 100..150, inputs: 0..50 }));
        assert_eq!(block.piece(5, 2), Some(Piece { output_gradients: 150..150, inputs: 50..100 }));
        assert_eq!(block.piece(5, 3), None);
        assert_eq!(block.piece(0, 0).unwrap().elements(), 0);
    }

    proptest! {
        #[test]
        fn pieces_make_up_the_block(
            outputs in 1usize..50, inputs in 1usize..50, samples in 0u32..20, piece_elements in 1usize..300,
        ) {
            let block = FactorBlock { outputs, inputs, piece_elements, ..block().1 };
            let (mut gradients, mut rows) = (0, 0);
            for number in 0..block.pieces(samples) {
                let piece = block.piece(samples, number).unwrap();
                prop_assert_eq!((piece.output_gradients.start, piece.inputs.start), (gradients, rows));
                (gradients, rows) = (piece.output_gradients.end, piece.inputs.end);
                prop_assert!(piece.elements() <= piece_elements);
            }
            prop_assert_eq!((gradients, rows), (samples as usize * outputs, samples as usize * inputs));
            prop_assert_eq!(block.piece(samples, block.pieces(samples)), None);
        }
    }
}
