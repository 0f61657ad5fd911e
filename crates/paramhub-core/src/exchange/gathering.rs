//! The rules for layers whose factors come to the hub. They say which piece of each member's block is due,
//! and when the hub can make the layer's gradient out of the factors.
//!
//! The pieces of a block come in order. With its last piece the block counts as the member's contribution to
//! every chunk of the layer. Once the blocks of all members are here, the hub *makes* the sums of these
//! chunks: it multiplies the factors, and calls [`Exchange::made`] for each chunk.

use std::ops::Range;

use super::{Answer, Exchange, ProtocolViolation, SumAction};
use crate::factors::{FactorBlock, Piece};

/// The progress of the blocks that come to the hub for the layers of one route.
#[derive(Clone, Debug)]
pub struct Gathering {
    members: u32,
    layers: Vec<GatheredLayer>,
    /// The block of which some pieces have come, for layer `l` and member `m` at `l * members + m`.
    incoming: Vec<Option<IncomingBlock>>,
}

/// A layer whose factors come to the hub, and the slots of its chunks on the route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatheredLayer {
    /// The way in which the layer's blocks are cut.
    pub block: FactorBlock,
    /// The slots of the weight. Frames name the layer by the chunk of the first one.
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

/// A block of which some pieces have come, and others not.
#[derive(Clone, Copy, Debug)]
struct IncomingBlock {
    step: u32,
    samples: u32,
    /// The number of the piece that is due.
    next_piece: u32,
    /// Whether the whole block was here before the member's stream was cut, so that its elements are here.
    is_repeat: bool,
}

/// What the caller does with a piece that has arrived whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gathered {
    /// The place of its elements in the member's block; `None` if they were here before.
    pub piece: Option<Piece>,
    /// The action for the sum of each chunk of the layer, since the block now counts as a contribution to all
    /// of them. `None` if this was not the last piece of its block.
    pub then: Option<SumAction>,
}

impl Gathering {
    /// The state of these layers in an exchange with this many members.
    pub fn new(layers: Vec<GatheredLayer>, members: u32) -> Self {
        Gathering { members, incoming: vec![None; layers.len() * members as usize], layers }
    }

    /// The layers, in the order of their numbers.
    pub fn layers(&self) -> &[GatheredLayer] {
        &self.layers
    }

    /// The layer whose frames name this slot.
    pub fn layer_at(&self, slot: u32) -> Option<usize> {
        self.layers.iter().position(|layer| layer.weight.start == slot)
    }

    /// The bytes that this state takes.
    pub fn memory_bytes(layers: usize, members: u32) -> u64 {
        let per_layer = size_of::<GatheredLayer>() + members as usize * size_of::<Option<IncomingBlock>>();
        (layers * per_layer) as u64
    }

    /// Takes a piece of a member's block for `step`: piece `number`, with `elements` elements, of a block of
    /// `samples` samples. The caller copies the elements to the place in [`Gathered::piece`].
    ///
    /// With the last piece of a block comes an action. If the block was [repeated](SumAction::Repeated), the
    /// caller calls [`Exchange::mark_due_answers`] for all slots of the layer; if it was the last that was missing, the
    /// caller begins to [make](SumAction::Make) their sums.
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
        // The sum of this slot is made last. Until then the factors must stay, so this slot says whether the
        // member's next block may come.
        let last_made = weight.end - 1;
        let place = layer * self.members as usize + member as usize;
        let incoming = match self.incoming[place] {
            None if samples > block.samples => {
                return Err(ProtocolViolation::Samples { most: block.samples, got: samples });
            }
            None => {
                let is_repeat = exchange.is_repeat(last_made, member, step);
                if !is_repeat {
                    exchange.check_push(last_made, member, step)?;
                }
                IncomingBlock { step, samples, next_piece: 0, is_repeat }
            }
            Some(incoming) if incoming.step != step => {
                return Err(ProtocolViolation::StepAhead { expected: incoming.step, got: step });
            }
            Some(incoming) if incoming.samples != samples => {
                return Err(ProtocolViolation::OtherSamples { expected: incoming.samples, got: samples });
            }
            Some(incoming) => incoming,
        };
        if incoming.next_piece != number {
            return Err(ProtocolViolation::Piece { expected: incoming.next_piece, got: number });
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
        self.incoming[place] = (!is_last).then_some(IncomingBlock { next_piece: number + 1, ..incoming });
        let then = is_last.then(|| self.contribute(exchange, layer, member, step)).transpose()?;
        Ok(Gathered { piece: (!incoming.is_repeat).then_some(piece), then })
    }

    /// Counts a whole block as the member's contribution to every chunk of the layer.
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
            self.incoming[layer * self.members as usize + member as usize] = None;
        }
    }
}
