//! What a worker sends again when a stream takes the place of another.

use super::{ChunkProgress, Request, Requests};
use crate::chunk::ChunkId;
use crate::placement::{Placement, RouteId};

impl Requests {
    /// Notes that the stream of a route was replaced, and returns the slots whose frames must be sent again:
    /// those of chunks that have left and were not answered whole, and of blocks of factors whose request is in
    /// flight. The hub drops what it has already taken, and answers it again.
    pub fn resend_route(&mut self, placement: &Placement, route: RouteId) -> Vec<u32> {
        let chunks = (0..).zip(placement.chunks(route));
        let mut slots: Vec<u32> =
            chunks.filter(|&(_, &chunk)| self.resend(chunk)).map(|(slot, _)| slot).collect();
        for block in 0..self.blocks.len() {
            let place = placement.locate(self.chunk_of_block(block));
            if let Some((_, slot)) = place.filter(|&(at, _)| at == route)
                && self.resend_block(block)
            {
                slots.push(slot);
            }
        }
        slots
    }

    /// Notes that a chunk's stream was cut, and returns whether its request must be sent again: it must if it
    /// has left and was not answered whole. For chunks of [blocks](Self::resend_block) it returns `false`.
    pub(super) fn resend(&mut self, chunk: ChunkId) -> bool {
        let key = self.map.extent(chunk).expect("a chunk on a stream is in the map").key;
        if self.keys[key as usize].is_some_and(|underway| underway.request == Request::Factors) {
            return false;
        }
        let progress = &mut self.chunks[chunk as usize];
        let was_sent = *progress == ChunkProgress::Sent;
        if was_sent {
            *progress = ChunkProgress::Unsent;
        }
        was_sent
    }

    /// Notes that the stream of a block's layer was cut, and returns whether the whole block must be sent
    /// again: it must if its request is in flight. The hub then answers every chunk again.
    pub(super) fn resend_block(&mut self, block: usize) -> bool {
        let is_underway = self.is_underway(block);
        if is_underway {
            self.start_block(block);
        }
        is_underway
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::ChunkMap;
    use crate::codec::{Codec, Dtype};
    use crate::key::{Key, KeyTable};
    use crate::placement::{HubShape, InterfaceShape};

    #[test]
    fn what_left_by_the_route_without_an_answer_is_sent_again() {
        let table = KeyTable::new(vec![Key::new("w", [1024])]).unwrap();
        let map = ChunkMap::new(&table, 1024).unwrap();
        let hub = HubShape {
            interfaces: vec![InterfaceShape { address: "a:1".into(), cores: vec![0, 1], weight: 1 }],
            local: None,
            between_hubs: None,
        };
        let placement = Placement::new(&table, &map, &[hub]).unwrap();
        let mut requests = Requests::new(map, vec![Dtype::F32], vec![Codec::F32]);
        requests.begin(0, Request::PushPull, 0).unwrap();
        let [cut, other] = [0, 1].map(|route| placement.chunks(route).to_vec());
        assert!(cut.len() == 2 && other.len() == 2, "each route has half of the four chunks");
        requests.sent(cut[1]);
        requests.sent(other[0]);
        assert_eq!(
            requests.resend_route(&placement, 0),
            [1],
            "the other chunk of the route is still to be sent"
        );
        assert!(requests.resend_route(&placement, 0).is_empty(), "it has not left again");
        assert_eq!(requests.resend_route(&placement, 1), [0]);
    }
}
