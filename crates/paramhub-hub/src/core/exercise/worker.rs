//! A worker of an exercise.

use std::collections::VecDeque;
use std::rc::Rc;

use super::program_states::RankStates;
use paramhub_core::wire::Header;
use paramhub_transport::shm::Segment;
use paramhub_transport::{Connection, FrameSink, Landing, Outgoing, Stream};

/// A worker and its end of the stream.
pub(super) struct Worker {
    pub(super) stream: Connection,
    /// The stream's number among those of the worker.
    pub(super) attempt: u32,
    /// Streams that others have replaced, kept open until the newest has brought something.
    pub(super) retired: Vec<Connection>,
    /// The worker's arena, if it exchanges over shared memory.
    pub(super) arena: Option<Segment>,
    pub(super) to_send: VecDeque<(Header, Rc<[u8]>)>,
    /// The request for each chunk that was not answered.
    pub(super) asked: Vec<Option<(Header, Rc<[u8]>)>>,
    pub(super) steps: Vec<u32>,
    pub(super) program_states: RankStates,
    /// `true` if it has sent Leave, or is about to.
    pub(super) has_left: bool,
    /// `true` if the core has received that Leave.
    pub(super) is_gone: bool,
    pub(super) has_ended: bool,
}

impl Worker {
    pub(super) fn flush(&mut self) {
        let frames: Vec<Outgoing<'_>> =
            self.to_send.iter().map(|(header, payload)| Outgoing { header: *header, payload }).collect();
        match self.stream.send(&frames) {
            Ok(sent) => drop(self.to_send.drain(..sent.frames)),
            Err(_) => self.has_ended = true,
        }
        self.has_ended |= self.stream.announce().is_err();
    }
}

/// What a worker has received; a payload that lies in its arena is `None`.
#[derive(Default)]
pub(super) struct Inbox {
    pub(super) frames: Vec<(Header, Option<Vec<u8>>)>,
}

impl FrameSink for Inbox {
    type Error = ();

    fn landing(&mut self, _: &Header) -> Result<Landing<'_>, ()> {
        Ok(Landing::Staged)
    }

    fn frame(&mut self, header: &Header, payload: Option<&[u8]>) -> Result<(), ()> {
        self.frames.push((*header, Some(payload.unwrap_or_default().to_vec())));
        Ok(())
    }

    fn placed(&mut self, header: &Header) -> Result<(), ()> {
        self.frames.push((*header, None));
        Ok(())
    }
}
