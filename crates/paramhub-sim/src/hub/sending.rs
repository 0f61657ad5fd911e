//! The frames that leave by the ports of a route.

use paramhub_core::between_sites::may_lack_start;
use paramhub_core::codec::Codec;
use paramhub_core::exchange::Answer;
use paramhub_core::ports::Side;
use paramhub_core::wire::{Header, Operation};

use super::route::{Chunk, Leave, Route};
use crate::message::Content;
use crate::network::StreamId;

impl Route {
    /// Takes everything that is to leave by a stream that works, each frame with its port.
    pub(super) fn take_due_frames(&mut self) -> Vec<(u32, Header, Content)> {
        let mut frames = Vec::new();
        for port in 0..self.ports.len() as u32 {
            let side = self.neighbours.side(port);
            let state = &mut self.ports[port as usize];
            if state.stream.is_none() || state.is_cut || state.is_muted {
                continue;
            }
            let (starts, owed) = (std::mem::take(&mut state.starts), std::mem::take(&mut state.owed));
            let (leaves, leavers) = (state.leave == Leave::Due, std::mem::take(&mut state.leavers));
            // They go before the sums of their chunks. A chunk that has moved on is sent once more where a stream was
            // replaced, and the other site has begun it.
            for slot in starts.into_iter().filter(|&slot| may_lack_start(&self.exchange, side, slot)) {
                let step = self.exchange.step(slot);
                let header = self.header(Operation::Initialise, slot, step);
                frames.push((port, header, Content::Parameters(self.chunks[slot as usize].parameters)));
            }
            for (slot, answer) in owed {
                let (header, content) = self.answer(port, slot, answer);
                if let Some(member) = self.member(port) {
                    self.exchange.answer_begun(slot, member);
                }
                frames.push((port, header, content));
            }
            for member in leavers {
                let header = Header { step: member + 1, ..Header::bare(Operation::Leave) };
                frames.push((port, header, Content::Nothing));
            }
            if leaves {
                frames.push((port, Header::bare(Operation::Leave), Content::Nothing));
            }
        }
        frames
    }

    /// The answer that is due at a port, or the sum that goes to the site above.
    fn answer(&self, port: u32, slot: u32, answer: Answer) -> (Header, Content) {
        let chunk = &self.chunks[slot as usize];
        let version = |member| self.exchange.answer_version(slot, member);
        match (self.neighbours.side(port), answer) {
            (Side::Above, _) => {
                let header = self.header(Operation::PushPull, slot, self.exchange.step(slot));
                (header, Content::Sum(chunk.sum.clone()))
            }
            (Side::Standby, _) => {
                let header = self.header(Operation::Push, slot, self.exchange.step(slot));
                (header, Content::Sum(chunk.sum.clone()))
            }
            (Side::Serving, _) => {
                let step = self.exchange.step(slot);
                (Header { chunk: chunk.id, step, ..Header::bare(Operation::Applied) }, Content::Nothing)
            }
            (Side::Below(member), _) if self.optimizes_here => {
                let header = self.header(Operation::Total, slot, version(member));
                (header, Content::Sum(chunk.total.clone()))
            }
            (Side::Worker(member) | Side::Below(member), Answer::Parameters) => {
                let header = self.header(Operation::Parameters, slot, version(member));
                (header, Content::Parameters(chunk.parameters))
            }
            (Side::Worker(member) | Side::Below(member), Answer::Applied | Answer::State(_)) => {
                let header =
                    Header { chunk: chunk.id, step: version(member), ..Header::bare(Operation::Applied) };
                (header, Content::Nothing)
            }
        }
    }

    fn header(&self, operation: Operation, slot: u32, step: u32) -> Header {
        let Chunk { id, length, .. } = self.chunks[slot as usize];
        Header { operation, codec: Codec::F32, chunk: id, step, length }
    }

    /// The ports of sites above, and their streams, by which this hub has sent everything, its Leave last. Each is returned once.
    pub(super) fn take_left_above(&mut self) -> Vec<(u32, StreamId)> {
        let left = (0..).zip(&mut self.ports).filter_map(|(number, port)| {
            let works = port.leave == Leave::Due && !port.is_cut && !port.is_muted;
            let stream = port.stream.filter(|_| works)?;
            port.leave = Leave::Sent;
            Some((number, stream))
        });
        left.collect()
    }
}
