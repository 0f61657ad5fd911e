//! What is to leave by one port of a route.

use std::collections::VecDeque;

use paramhub_core::exchange::Answer;
use paramhub_core::ready_set::ReadySet;
use paramhub_core::wire::{Header, Norm, Operation};

/// Answers and messages for one worker, most urgent first: messages, the norm, then acknowledgements, then parameters by slot,
/// then optimizer state. For another site: messages, what chunks begin with, then sums, up or down, by slot.
///
/// It holds no parameters: they leave straight from the model. Only where the model is about to change under a frame that
/// has begun to leave is that one chunk copied, into `spill`; so no worker ever receives a chunk torn between two steps,
/// and what has not begun leaves with the newest values. Optimizer state does not lie as it travels and is copied there
/// whenever it is about to leave, one chunk at a time.
#[derive(Debug)]
pub(crate) struct Outbox {
    pub(crate) parameters: ReadySet,
    pub(crate) applied: ReadySet,
    /// Which slot of it is in the exchange's books.
    pub(crate) state: ReadySet,
    /// Chunks that begin at the site there; one in parts is finished before the next.
    pub(crate) start: ReadySet,
    pub(crate) start_at: Option<(u32, u8)>,
    /// Failure, notices, heartbeats and, between sites, news of hyperparameters; few.
    pub(crate) messages: VecDeque<(Header, Vec<u8>)>,
    messages_max: usize,
    /// The route's part of the norm of the step that is held. There is one at most: the next step is not complete without
    /// this rank, which does not push it before it is answered, behind this.
    pub(crate) norm: Option<(Header, [u8; Norm::BYTES])>,
    /// The frame whose first bytes have left and whose last have not.
    pub(crate) begun: Option<Begun>,
    /// To a site above: nothing more will leave.
    pub(crate) said_farewell: bool,
    pub(crate) spill: Vec<u8>,
}

/// A frame on its way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Begun {
    pub(crate) header: Header,
    pub(crate) source: Source,
}

/// Where a frame's payload lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The front of `messages`.
    Message,
    /// `norm`.
    Norm,
    /// There is none.
    Empty,
    /// The model, at this slot.
    Model(u32),
    /// The newest answer of a quantised chunk, at this slot.
    Change(u32),
    /// The sum under way, at this slot.
    Sum(u32),
    /// The sum of the step that is over, at this slot.
    Total(u32),
    /// The outbox's `spill`.
    Spill,
}

/// Messages an outbox keeps beside two changes of each group's hyperparameters; who does not read them has other troubles than
/// missing the rest.
const MESSAGES_MAX: usize = 64;

impl Outbox {
    /// For a route of `slots` chunks whose largest payload has `payload_bytes_max` bytes, in a job of so many groups; allocates
    /// all it will need.
    pub(crate) fn new(slots: u32, payload_bytes_max: usize, groups: usize) -> Self {
        Outbox {
            parameters: ReadySet::new(slots),
            applied: ReadySet::new(slots),
            state: ReadySet::new(slots),
            start: ReadySet::new(slots),
            start_at: None,
            messages: VecDeque::new(),
            messages_max: MESSAGES_MAX + 2 * groups,
            norm: None,
            begun: None,
            said_farewell: false,
            spill: Vec::with_capacity(payload_bytes_max),
        }
    }

    /// Puts an answer in.
    pub(crate) fn owe(&mut self, slot: u32, answer: Answer) {
        match answer {
            Answer::Parameters => self.parameters.insert(slot),
            Answer::Applied => self.applied.insert(slot),
            Answer::State(_) => self.state.insert(slot),
        };
    }

    /// Puts a message in, unless there are too many already: then it says `false`.
    pub(crate) fn message(&mut self, header: Header, payload: Vec<u8>) -> bool {
        debug_assert_eq!(header.length as usize, payload.len());
        let has_room = self.messages.len() < self.messages_max;
        if has_room {
            self.messages.push_back((header, payload));
        }
        has_room
    }

    /// Puts in what a held step's chunks of this route add to its norm.
    pub(crate) fn tell_norm(&mut self, step: u32, norm: Norm) {
        let header = Header { step, length: Norm::BYTES as u32, ..Header::bare(Operation::Norm) };
        self.norm = Some((header, norm.encode()));
    }

    /// Whether `source` is that of a frame that has begun.
    pub(crate) fn has_begun(&self, source: Source) -> bool {
        self.begun.is_some_and(|begun| begun.source == source)
    }

    /// Whether nothing is left to send.
    pub(crate) fn is_empty(&self) -> bool {
        self.begun.is_none()
            && self.messages.is_empty()
            && self.norm.is_none()
            && self.applied.is_empty()
            && self.parameters.is_empty()
            && self.state.is_empty()
            && self.start.is_empty()
            && self.start_at.is_none()
    }

    /// Whether `spill` holds nothing of a frame that has begun.
    pub(crate) fn may_spill(&self) -> bool {
        !self.has_begun(Source::Spill)
    }

    /// Forgets how far a stream came that another takes the place of: answers, which will be asked for again, and where in a
    /// message it was.
    pub(crate) fn start_again(&mut self) {
        self.begun = None;
        while self.parameters.pop_first().is_some() {}
        while self.applied.pop_first().is_some() {}
        while self.state.pop_first().is_some() {}
    }

    /// Forgets all but what has begun: the job is over, and its last word finds room.
    pub(crate) fn forget(&mut self) {
        self.messages.truncate(usize::from(self.has_begun(Source::Message)));
        if !self.has_begun(Source::Norm) {
            self.norm = None;
        }
        while self.parameters.pop_first().is_some() {}
        while self.applied.pop_first().is_some() {}
        while self.state.pop_first().is_some() {}
        while self.start.pop_first().is_some() {}
        self.start_at = None;
    }
}
