//! Requests for layers whose factors go to a hub: one for weight and bias together, in as many frames as its
//! block has pieces.

use super::{ChunkProgress, InFlightRequest, Request, RequestUnderway, Requests};
use crate::chunk::ChunkId;
use crate::factors::{FactorBlock, Piece};
use crate::wire::{FACTORS_HEAD_BYTES, Header, Operation};

/// A layer's block, and how much of it has been sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockProgress {
    pub(super) block: FactorBlock,
    samples: u32,
    /// The piece to send next.
    next: u32,
}

/// One piece of one layer's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceId {
    /// The block's position among the blocks.
    pub block: usize,
    /// Samples of the whole block.
    pub samples: u32,
    /// The piece's number, from 0.
    pub number: u32,
}

impl Requests {
    /// The same for a job with layers whose factors go to a hub.
    pub fn with_blocks(mut self, blocks: &[FactorBlock]) -> Self {
        let sending = |&block: &FactorBlock| BlockProgress { block, samples: 0, next: 0 };
        self.blocks = blocks.iter().map(sending).collect();
        self
    }

    /// The blocks, in the order of their numbers.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = &FactorBlock> {
        self.blocks.iter().map(|sending| &sending.block)
    }

    /// The chunk whose number names the block in frames.
    pub fn chunk_of_block(&self, block: usize) -> ChunkId {
        self.map.chunks_of(self.blocks[block].block.weight).start
    }

    /// Starts the request for a block of this many samples: its pieces are then to be sent, in order.
    ///
    /// # Errors
    /// If its weight or its bias has a request in flight.
    pub fn begin_block(&mut self, block: usize, samples: u32, step: u32) -> Result<ChunkId, RequestUnderway> {
        let cut = self.blocks[block].block;
        if let Some(underway) = cut.keys().find_map(|key| self.keys[key as usize]) {
            return Err(RequestUnderway { request: underway.request });
        }
        self.blocks[block].samples = samples;
        for key in cut.keys() {
            self.keys[key as usize] =
                Some(InFlightRequest { request: Request::Factors, step, unanswered: 0, newest: 0 });
        }
        self.start_block(block);
        Ok(self.chunk_of_block(block))
    }

    pub(super) fn start_block(&mut self, block: usize) {
        let sending = &mut self.blocks[block];
        sending.next = 0;
        let block = sending.block;
        let mut unanswered = 0;
        for key in block.keys() {
            let chunks = self.map.chunks_of(key);
            unanswered += chunks.len() as u32;
            self.chunks[chunks.start as usize..chunks.end as usize].fill(ChunkProgress::Unsent);
        }
        let weight = self.keys[block.weight as usize].as_mut().expect("its request is under way");
        (weight.unanswered, weight.newest) = (unanswered, 0);
    }

    /// The block that is in flight and that frames name by this chunk.
    pub fn block_at(&self, chunk: ChunkId) -> Option<usize> {
        let named = |sending: &BlockProgress| self.map.chunks_of(sending.block.weight).start == chunk;
        let block = self.blocks.iter().position(named)?;
        self.is_underway(block).then_some(block)
    }

    pub(super) fn is_underway(&self, block: usize) -> bool {
        let weight = self.keys[self.blocks[block].block.weight as usize];
        weight.is_some_and(|underway| underway.request == Request::Factors)
    }

    /// The next piece of a block in flight, with its header and the place of its values; `None` after the
    /// last. The following piece is next from then on.
    pub fn next_piece(&mut self, block: usize) -> Option<(PieceId, Header, Piece)> {
        let chunk = self.chunk_of_block(block);
        let BlockProgress { block: cut, samples, next } = &mut self.blocks[block];
        let piece = cut.piece(*samples, *next)?;
        let id = PieceId { block, samples: *samples, number: *next };
        *next += 1;
        let underway = self.keys[cut.weight as usize].expect("a block to send has a request");
        let length = (FACTORS_HEAD_BYTES + piece.elements() * cut.codec.bytes()) as u32;
        let header =
            Header { operation: Operation::Factors, codec: cut.codec, chunk, step: underway.step, length };
        Some((id, header, piece))
    }

    /// Returns whether pieces of a block in flight remain to be sent.
    pub fn has_pieces(&self, block: usize) -> bool {
        let BlockProgress { block: cut, samples, next } = self.blocks[block];
        self.is_underway(block) && next < cut.pieces(samples)
    }

    /// Notes that neither this piece nor the following ones have begun to leave: this one is next again.
    pub fn piece_back(&mut self, piece: PieceId) {
        let next = &mut self.blocks[piece.block].next;
        *next = piece.number.min(*next);
    }

    /// Notes that a piece has left whole. After the last one answers may come.
    pub fn piece_sent(&mut self, piece: PieceId) {
        let block = self.blocks[piece.block].block;
        if piece.number + 1 < block.pieces(piece.samples) {
            return;
        }
        for key in block.keys() {
            let chunks = self.map.chunks_of(key);
            self.chunks[chunks.start as usize..chunks.end as usize].fill(ChunkProgress::Sent);
        }
    }

    /// The key whose request counts the answers for this one: for a bias that goes with its weight's factors,
    /// the weight.
    pub(super) fn counted_at(&self, key: u32) -> u32 {
        match self.keys[key as usize] {
            Some(InFlightRequest { request: Request::Factors, .. }) => {
                let of_key = self.blocks.iter().find(|sending| sending.block.bias == Some(key));
                of_key.map_or(key, |sending| sending.block.weight)
            }
            _ => key,
        }
    }

    /// Ends the bias' request together with the weight's, which counted the answers for both.
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
    use crate::requests::{Answered, UnexpectedAnswer};

    /// Key 0 has chunks 0 and 1, the weight 2 to 4, the bias 5.
    fn requests() -> Requests {
        let (map, block) = block();
        let block = FactorBlock { piece_elements: 100, ..block };
        Requests::new(map, vec![Dtype::F32; 3], vec![Codec::F32; 3]).with_blocks(&[block])
    }

    /// Takes an answer that has come whole.
    fn take(requests: &mut Requests, header: &Header) -> Answered {
        let expected = requests.expect(header).unwrap();
        requests.answered(expected)
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
        // A write broke off before the second piece had begun.
        requests.piece_back(third);
        requests.piece_back(second);
        assert_eq!(requests.next_piece(0).unwrap().0, second);
        assert_eq!(requests.next_piece(0).unwrap().0, third);
        requests.piece_sent(second);
        assert!(
            matches!(requests.expect(&answer(5, 8, 30)), Err(UnexpectedAnswer::Answer { .. })),
            "too early"
        );
        requests.piece_sent(third);
        assert!(matches!(requests.expect(&answer(5, 7, 30)), Err(UnexpectedAnswer::Version { .. })));
        for (at, (chunk, elements)) in ANSWERS.into_iter().enumerate() {
            let answered = take(&mut requests, &answer(chunk, 8, elements));
            let finished = (at == 3).then_some(Request::Factors);
            assert_eq!((answered.key, answered.finished, answered.newest), (1, finished, 8));
        }
        assert_eq!(requests.underway().count(), 0);
        assert_eq!(requests.begin(2, Request::Pull, 8).unwrap(), 5..6, "both keys are free again");
    }

    #[test]
    fn a_block_is_sent_and_answered_again_after_a_cut() {
        let mut requests = requests();
        assert!(!requests.resend_block(0), "nothing is under way");
        requests.begin_block(0, 0, 0).unwrap();
        let (only, header, piece) = requests.next_piece(0).unwrap();
        assert_eq!((header.length, piece.elements()), (8, 0), "without samples one that is empty");
        requests.piece_sent(only);
        take(&mut requests, &answer(2, 1, 256));
        assert!(!requests.resend(3), "chunks are not asked for one by one");
        assert!(requests.resend_block(0));
        assert!(requests.expect(&answer(3, 1, 256)).is_err());
        let (again, ..) = requests.next_piece(0).unwrap();
        assert_eq!(again, only);
        requests.piece_sent(again);
        let finished = ANSWERS
            .map(|(chunk, elements)| take(&mut requests, &answer(chunk, 1, elements)).finished.is_some());
        assert_eq!(finished, [false, false, false, true]);
    }
}
