//! Layers whose factors come to the hub: which pieces of which rank's block are here, and when a gradient can be made.
//!
//! Pieces of a block come in order. With the last one the block counts as this rank's contribution to every chunk of the layer,
//! and with the last rank's block the chunks are *made*: see [`Exchange::made`].

use std::ops::Range;

use super::{Answer, Exchange, Offence, Then};
use crate::factors::{FactorBlock, Piece};

/// The books of one route's layers whose factors come here.
#[derive(Clone, Debug)]
pub struct Gathering {
    members: u32,
    layers: Vec<GatheredLayer>,
    /// Of layer `l` and member `m`, at `l * members + m`: the block that is coming.
    coming: Vec<Option<Coming>>,
}

/// A layer, and the slots of its chunks on the route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatheredLayer {
    /// How its blocks are cut.
    pub block: FactorBlock,
    /// Of the weight; the first one's chunk names the layer in frames.
    pub weight: Range<u32>,
    /// Of the bias; empty where there is none.
    pub bias: Range<u32>,
}

impl GatheredLayer {
    /// The bias', then the weight's: the order in which they are made.
    pub fn slots(&self) -> impl Iterator<Item = u32> + use<> {
        self.bias.clone().chain(self.weight.clone())
    }
}

#[derive(Clone, Copy, Debug)]
struct Coming {
    step: u32,
    samples: u32,
    /// The piece that is due.
    piece: u32,
    /// All of it was here before the member's stream was cut.
    is_repeat: bool,
}

/// What to do with a piece that is here whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gathered {
    /// Where its elements belong in the member's place; `None` if they were here before.
    pub piece: Option<Piece>,
    /// The block is here whole, all chunks of the layer have this contribution, and this is what becomes of each.
    pub then: Option<Then>,
}

impl Gathering {
    /// Books for these layers of an exchange with so many members.
    pub fn new(layers: Vec<GatheredLayer>, members: u32) -> Self {
        Gathering { members, coming: vec![None; layers.len() * members as usize], layers }
    }

    /// The layers, in the order in which they are numbered.
    pub fn layers(&self) -> &[GatheredLayer] {
        &self.layers
    }

    /// The layer that frames name by this slot.
    pub fn layer_at(&self, slot: u32) -> Option<usize> {
        self.layers.iter().position(|layer| layer.weight.start == slot)
    }

    /// Bytes these books take.
    pub fn memory_bytes(layers: usize, members: u32) -> u64 {
        let per_layer = size_of::<GatheredLayer>() + members as usize * size_of::<Option<Coming>>();
        (layers * per_layer) as u64
    }

    /// Takes a piece of `elements` elements of a member's block for `step`. The caller copies the elements where
    /// [`Gathered::piece`] says and, with a block that is whole, calls [`Exchange::settle`] for all slots of the layer if it was
    /// [repeated](Then::Repeated), or begins to make them.
    ///
    /// # Errors
    /// [`Offence`], and nothing has changed but for the last piece of a block.
    pub fn piece(
        &mut self,
        exchange: &mut Exchange,
        (layer, member): (usize, u32),
        step: u32,
        (samples, number): (u32, u32),
        elements: usize,
    ) -> Result<Gathered, Offence> {
        let GatheredLayer { block, weight, .. } = &self.layers[layer];
        // The chunk that is made last: as long as it is not, what it is made of must stay.
        let last = weight.end - 1;
        let coming = match self.coming[layer * self.members as usize + member as usize] {
            None if samples > block.samples => {
                return Err(Offence::Samples { most: block.samples, got: samples });
            }
            None => {
                let is_repeat = exchange.is_repeat(last, member, step);
                if !is_repeat {
                    exchange.may_push(last, member, step)?;
                }
                Coming { step, samples, piece: 0, is_repeat }
            }
            Some(coming) if coming.step != step => {
                return Err(Offence::StepAhead { expected: coming.step, got: step });
            }
            Some(coming) if coming.samples != samples => {
                return Err(Offence::OtherSamples { expected: coming.samples, got: samples });
            }
            Some(coming) => coming,
        };
        if coming.piece != number {
            return Err(Offence::Piece { expected: coming.piece, got: number });
        }
        let piece = block.piece(samples, number).expect("the one due is none behind the last");
        if piece.elements() != elements {
            return Err(Offence::PieceElements { piece: number, expected: piece.elements(), got: elements });
        }
        let is_last = number + 1 == block.pieces(samples);
        self.coming[layer * self.members as usize + member as usize] =
            (!is_last).then_some(Coming { piece: number + 1, ..coming });
        let then = is_last.then(|| self.contribute(exchange, layer, member, step)).transpose()?;
        Ok(Gathered { piece: (!coming.is_repeat).then_some(piece), then })
    }

    fn contribute(
        &self,
        exchange: &mut Exchange,
        layer: usize,
        member: u32,
        step: u32,
    ) -> Result<Then, Offence> {
        let mut then = Then::Wait;
        for slot in self.layers[layer].slots() {
            then = exchange.push(slot, member, step, Answer::Parameters)?.then;
        }
        Ok(then)
    }

    /// Notes that a member's stream was cut and another takes its place, as [`Exchange::resume`] does: it sends its blocks again
    /// from the beginning.
    pub fn resume(&mut self, member: u32) {
        for layer in 0..self.layers.len() {
            self.coming[layer * self.members as usize + member as usize] = None;
        }
    }
}
