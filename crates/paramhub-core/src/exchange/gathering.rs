//! Layers whose factors come to the hub: which pieces of each rank's block are here, and when the gradient
//! can be made.
//!
//! Pieces of a block come in order. With the last piece the block counts as this rank's contribution to every
//! chunk of the layer. With the last rank's block the sums of the chunks are *made*: see [`Exchange::made`].

use std::ops::Range;

use super::{Answer, Exchange, ProtocolViolation, SumAction};
use crate::factors::{FactorBlock, Piece};

/// The state of one route's layers whose factors come to the hub.
#[derive(Clone, Debug)]
pub struct Gathering {
    members: u32,
    layers: Vec<GatheredLayer>,
    /// The block that is coming for layer `l` and member `m`, at `l * members + m`.
    coming: Vec<Option<IncomingBlock>>,
}

/// A layer, and the slots of its chunks on the route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatheredLayer {
    /// The way in which the layer's blocks are cut.
    pub block: FactorBlock,
    /// The slots of the weight; in frames the first one's chunk names the layer.
    pub weight: Range<u32>,
    /// The slots of the bias; empty if there is none.
    pub bias: Range<u32>,
}

impl GatheredLayer {
    /// The slots of the bias, then those of the weight: the order in which their sums are made.
    pub fn slots(&self) -> impl Iterator<Item = u32> + use<> {
        self.bias.clone().chain(self.weight.clone())
    }
}

#[derive(Clone, Copy, Debug)]
struct IncomingBlock {
    step: u32,
    samples: u32,
    /// The piece that is due.
    piece: u32,
    /// `true` if the whole block was here before the member's stream was cut.
    is_repeat: bool,
}

/// The handling of a piece that has arrived whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gathered {
    /// The place of its elements in the member's block; `None` if they were here before.
    pub piece: Option<Piece>,
    /// The action for the sum of each chunk of the layer, with the last piece of a block: all of them have
    /// this contribution now.
    pub then: Option<SumAction>,
}

impl Gathering {
    /// The state of these layers in an exchange with this many members.
    pub fn new(layers: Vec<GatheredLayer>, members: u32) -> Self {
        Gathering { members, coming: vec![None; layers.len() * members as usize], layers }
    }

    /// The layers, in the order of their numbers.
    pub fn layers(&self) -> &[GatheredLayer] {
        &self.layers
    }

    /// The layer whose frames name this slot.
    pub fn layer_at(&self, slot: u32) -> Option<usize> {
        self.layers.iter().position(|layer| layer.weight.start == slot)
    }

    /// Bytes that this state takes.
    pub fn memory_bytes(layers: usize, members: u32) -> u64 {
        let per_layer = size_of::<GatheredLayer>() + members as usize * size_of::<Option<IncomingBlock>>();
        (layers * per_layer) as u64
    }

    /// Takes a piece of `elements` elements of a member's block for `step`. The caller copies the elements to
    /// the place in [`Gathered::piece`]. With the last piece of a block, it calls [`Exchange::settle`] for
    /// all slots of the layer if the block was [repeated](SumAction::Repeated), or begins to make their sums.
    ///
    /// # Errors
    /// A [`ProtocolViolation`]. Nothing has changed then, unless the piece was the last of its block.
    pub fn piece(
        &mut self,
        exchange: &mut Exchange,
        (layer, member): (usize, u32),
        step: u32,
        (samples, number): (u32, u32),
        elements: usize,
    ) -> Result<Gathered, ProtocolViolation> {
        let GatheredLayer { block, weight, .. } = &self.layers[layer];
        // The slot whose sum is made last: until it is made, the factors must stay.
        let last = weight.end - 1;
        let coming = match self.coming[layer * self.members as usize + member as usize] {
            None if samples > block.samples => {
                return Err(ProtocolViolation::Samples { most: block.samples, got: samples });
            }
            None => {
                let is_repeat = exchange.is_repeat(last, member, step);
                if !is_repeat {
                    exchange.may_push(last, member, step)?;
                }
                IncomingBlock { step, samples, piece: 0, is_repeat }
            }
            Some(coming) if coming.step != step => {
                return Err(ProtocolViolation::StepAhead { expected: coming.step, got: step });
            }
            Some(coming) if coming.samples != samples => {
                return Err(ProtocolViolation::OtherSamples { expected: coming.samples, got: samples });
            }
            Some(coming) => coming,
        };
        if coming.piece != number {
            return Err(ProtocolViolation::Piece { expected: coming.piece, got: number });
        }
        let piece = block.piece(samples, number).expect("the one due is none behind the last");
        if piece.elements() != elements {
            return Err(ProtocolViolation::PieceElements {
                piece: number,
                expected: piece.elements(),
                got: elements,
            });
        }
        let is_last = number + 1 == block.pieces(samples);
        self.coming[layer * self.members as usize + member as usize] =
            (!is_last).then_some(IncomingBlock { piece: number + 1, ..coming });
        let then = is_last.then(|| self.contribute(exchange, layer, member, step)).transpose()?;
        Ok(Gathered { piece: (!coming.is_repeat).then_some(piece), then })
    }

    fn contribute(
        &self,
        exchange: &mut Exchange,
        layer: usize,
        member: u32,
        step: u32,
    ) -> Result<SumAction, ProtocolViolation> {
        let mut then = SumAction::Wait;
        for slot in self.layers[layer].slots() {
            then = exchange.push(slot, member, step, Answer::Parameters)?.then;
        }
        Ok(then)
    }

    /// Notes that a member's stream was cut and another replaces it, as [`Exchange::resume`] does. The member
    /// sends its blocks again from the beginning.
    pub fn resume(&mut self, member: u32) {
        for layer in 0..self.layers.len() {
            self.coming[layer * self.members as usize + member as usize] = None;
        }
    }
}
