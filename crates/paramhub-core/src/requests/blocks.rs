//! Requests of layers whose factors go to a hub: one of weight and bias together, in as many frames as its block has pieces.

use super::{Progress, Request, Requests, Underway, Unfinished};
use crate::chunk::ChunkId;
use crate::factors::{FactorBlock, Piece};
use crate::wire::{FACTORS_HEAD_BYTES, Header, Operation};

/// A layer's block, and how far it is on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sending {
    pub(super) block: FactorBlock,
    samples: u32,
    /// The piece to be sent next.
    next: u32,
}

/// One piece of one layer's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceId {
    /// Position among the blocks.
    pub block: usize,
    /// Samples of the whole block.
    pub samples: u32,
    /// From 0.
    pub number: u32,
}

impl Requests {
    /// For a job with layers whose factors go to a hub.
    pub fn with_blocks(mut self, blocks: &[FactorBlock]) -> Self {
        let sending = |&block: &FactorBlock| Sending { block, samples: 0, next: 0 };
        self.blocks = blocks.iter().map(sending).collect();
        self
    }

    /// The blocks, in the order in which they are numbered.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = &FactorBlock> {
        self.blocks.iter().map(|sending| &sending.block)
    }

    /// The chunk that names a block in frames.
    pub fn chunk_of_block(&self, block: usize) -> ChunkId {
        self.map.chunks_of(self.blocks[block].block.weight).start
    }

    /// Starts the request of a block with so many samples: its pieces are then to be sent, in order.
    ///
    /// # Errors
    /// If its weight or its bias has a request already.
    pub fn begin_block(&mut self, block: usize, samples: u32, step: u32) -> Result<ChunkId, Unfinished> {
        let cut = self.blocks[block].block;
        if let Some(underway) = cut.keys().find_map(|key| self.keys[key as usize]) {
            return Err(Unfinished { request: underway.request });
        }
        self.blocks[block].samples = samples;
        for key in cut.keys() {
            self.keys[key as usize] =
                Some(Underway { request: Request::Factors, step, unanswered: 0, newest: 0 });
        }
        self.start_block(block);
        Ok(self.chunk_of_block(block))
    }

    fn start_block(&mut self, block: usize) {
        let sending = &mut self.blocks[block];
        sending.next = 0;
        let block = sending.block;
        let mut unanswered = 0;
        for key in block.keys() {
            let chunks = self.map.chunks_of(key);
            unanswered += chunks.len() as u32;
            self.chunks[chunks.start as usize..chunks.end as usize].fill(Progress::Unsent);
        }
        let weight = self.keys[block.weight as usize].as_mut().expect("its request is under way");
        (weight.unanswered, weight.newest) = (unanswered, 0);
    }

    /// The block that is under way and named by this chunk.
    pub fn block_at(&self, chunk: ChunkId) -> Option<usize> {
        let named = |sending: &Sending| self.map.chunks_of(sending.block.weight).start == chunk;
        let block = self.blocks.iter().position(named)?;
        self.is_underway(block).then_some(block)
    }

    fn is_underway(&self, block: usize) -> bool {
        let weight = self.keys[self.blocks[block].block.weight as usize];
        weight.is_some_and(|underway| underway.request == Request::Factors)
    }

    /// The next piece of a block that is under way, its header and where its values lie, if one is left; from then on the one
    /// behind it is next.
    pub fn next_piece(&mut self, block: usize) -> Option<(PieceId, Header, Piece)> {
        let chunk = self.chunk_of_block(block);
        let Sending { block: cut, samples, next } = &mut self.blocks[block];
        let piece = cut.piece(*samples, *next)?;
        let id = PieceId { block, samples: *samples, number: *next };
        *next += 1;
        let underway = self.keys[cut.weight as usize].expect("a block to send has a request");
        let length = (FACTORS_HEAD_BYTES + piece.elements() * cut.codec.bytes()) as u32;
        let header =
            Header { operation: Operation::Factors, codec: cut.codec, chunk, step: underway.step, length };
        Some((id, header, piece))
    }

    /// Whether pieces of a block that is under way are left to be sent.
    pub fn has_pieces(&self, block: usize) -> bool {
        let Sending { block: cut, samples, next } = self.blocks[block];
        self.is_underway(block) && next < cut.pieces(samples)
    }

    /// A piece did not begin to leave, nor do those behind it: it is next again.
    pub fn piece_back(&mut self, piece: PieceId) {
        let next = &mut self.blocks[piece.block].next;
        *next = piece.number.min(*next);
    }

    /// A piece has left whole. With the last one answers may come.
    pub fn piece_sent(&mut self, piece: PieceId) {
        let block = self.blocks[piece.block].block;
        if piece.number + 1 < block.pieces(piece.samples) {
            return;
        }
        for key in block.keys() {
            let chunks = self.map.chunks_of(key);
            self.chunks[chunks.start as usize..chunks.end as usize].fill(Progress::Sent);
        }
    }

    /// The stream of a block's layer was cut: if its request is under way, all of it must be sent again, and the hub answers every
    /// chunk again. Says so.
    pub fn resend_block(&mut self, block: usize) -> bool {
        let is_underway = self.is_underway(block);
        if is_underway {
            self.start_block(block);
        }
        is_underway
    }

    /// The key whose request counts the answers of this one's: of a bias that goes with its weight's factors the weight.
    pub(super) fn counted_at(&self, key: u32) -> u32 {
        match self.keys[key as usize] {
            Some(Underway { request: Request::Factors, .. }) => {
                let of_key = self.blocks.iter().find(|sending| sending.block.bias == Some(key));
                of_key.map_or(key, |sending| sending.block.weight)
            }
            _ => key,
        }
    }

    /// The request that was counted at this weight has ended: the bias' has, too.
    pub(super) fn end_bias(&mut self, weight: u32) {
        let of_weight = self.blocks.iter().find(|sending| sending.block.weight == weight);
        if let Some(bias) = of_weight.and_then(|sending| sending.block.bias) {
            self.keys[bias as usize] = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{Codec, Dtype};
    use crate::factors::tests::block;
    use crate::requests::Unasked;

    /// Key 0 has chunks 0 and 1, the weight 2 to 4, the bias 5.
    fn requests() -> Requests {
        let (map, block) = block();
        let block = FactorBlock { piece_elements: 100, ..block };
        Requests::new(map, vec![Dtype::F32; 3], vec![Codec::F32; 3]).with_blocks(&[block])
    }

    fn answer(chunk: ChunkId, step: u32, elements: u32) -> Header {
        Header { operation: Operation::Parameters, codec: Codec::F32, chunk, step, length: elements * 4 }
    }

    const ANSWERS: [(ChunkId, u32); 4] = [(5, 30), (2, 256), (3, 256), (4, 88)];

    #[test]
    fn a_block_is_sent_in_order_and_answered_chunk_by_chunk() {
        let mut requests = requests();
        assert_eq!(requests.begin_block(0, 5, 7).unwrap(), 2);
        assert_eq!(requests.begin(2, Request::Pull, 0).unwrap_err().request, Request::Factors);
        assert_eq!((requests.block_at(2), requests.block_at(3), requests.block_at(0)), (Some(0), None, None));
        let (first, header, piece) = requests.next_piece(0).unwrap();
        assert_eq!((header.chunk, header.step, header.length), (2, 7, 408));
        assert_eq!(piece.output_gradients, 0..100);
        let (second, ..) = requests.next_piece(0).unwrap();
        let (third, header, _) = requests.next_piece(0).unwrap();
        assert_eq!((third.number, header.length), (2, 208));
        assert!(!requests.has_pieces(0) && requests.next_piece(0).is_none());
        requests.piece_sent(first);
        // A write broke off before the second had begun.
        requests.piece_back(third);
        requests.piece_back(second);
        assert_eq!(requests.next_piece(0).unwrap().0, second);
        assert_eq!(requests.next_piece(0).unwrap().0, third);
        requests.piece_sent(second);
        assert!(matches!(requests.expect(&answer(5, 8, 30)), Err(Unasked::Answer { .. })), "too early");
        requests.piece_sent(third);
        assert!(matches!(requests.expect(&answer(5, 7, 30)), Err(Unasked::Version { .. })));
        for (at, (chunk, elements)) in ANSWERS.into_iter().enumerate() {
            let answered = requests.answered(&answer(chunk, 8, elements)).unwrap();
            let finished = (at == 3).then_some(Request::Factors);
            assert_eq!((answered.key, answered.finished, answered.newest), (1, finished, 8));
        }
        assert_eq!(requests.underway().count(), 0);
        assert_eq!(requests.begin(2, Request::Pull, 8).unwrap(), 5..6, "both keys are free again");
    }

    #[test]
    fn after_a_cut_all_of_it_is_sent_and_answered_again() {
        let mut requests = requests();
        assert!(!requests.resend_block(0), "nothing is under way");
        requests.begin_block(0, 0, 0).unwrap();
        let (only, header, piece) = requests.next_piece(0).unwrap();
        assert_eq!((header.length, piece.elements()), (8, 0), "without samples one that is empty");
        requests.piece_sent(only);
        requests.answered(&answer(2, 1, 256)).unwrap();
        assert!(!requests.resend(3), "chunks are not asked for one by one");
        assert!(requests.resend_block(0));
        assert!(requests.expect(&answer(3, 1, 256)).is_err());
        let (again, ..) = requests.next_piece(0).unwrap();
        assert_eq!(again, only);
        requests.piece_sent(again);
        let finished = ANSWERS.map(|(chunk, elements)| {
            requests.answered(&answer(chunk, 1, elements)).unwrap().finished.is_some()
        });
        assert_eq!(finished, [false, false, false, true]);
    }
}
