//! The frames that are to leave by one port of a route.

use std::collections::VecDeque;
use std::sync::Arc;

use paramhub_core::exchange::Answer;
use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::ready_set::ReadySet;
use paramhub_core::wire::{Header, Operation};

/// Answers and messages for one worker, most urgent first: messages, the norm, then acknowledgements, then
/// parameters by slot, then optimizer state, then a program state. For another site: messages, the initial state of chunks, then
/// sums, up or down, by slot.
///
/// It holds no parameters: they leave straight from the model. Only if the model is about to change under a
/// frame that has begun to leave, that one chunk is copied into `spill`. So no worker ever receives a chunk
/// torn between two steps, and a frame that has not begun leaves with the newest values. Optimizer state is
/// stored in another form than it travels in; it is copied there whenever it is about to leave, one chunk at
/// a time. Pieces of program states leave from there as well; the shard's
/// [`ProgramStates`](paramhub_core::program_states::ProgramStates) know which is due.
#[derive(Debug)]
pub(crate) struct Outbox {
    pub(crate) parameters: ReadySet,
    pub(crate) applied: ReadySet,
    /// The slots of chunks whose optimizer state is due; the exchange knows which slot of the state.
    pub(crate) state: ReadySet,
    /// The chunks that begin at the other site; one that is sent in parts is completed before the next.
    pub(crate) start: ReadySet,
    pub(crate) start_at: Option<(u32, u8)>,
    /// Failures, notices, heartbeats and, between sites, changes of hyperparameters and the end of the last held step; there
    /// are few.
    pub(crate) messages: VecDeque<(Header, Vec<u8>)>,
    messages_max: usize,
    /// The route's part of the norm of a step. There is at most one: the next step is not complete without this rank, which
    /// does not push the chunk that was held last before the answer that follows this norm.
    pub(crate) norm: Option<(Header, Arc<[u8]>)>,
    /// The frame whose first bytes have left and whose last bytes have not.
    pub(crate) begun: Option<Begun>,
    /// For a site above: whether Leave was sent, so that nothing more will leave by this stream.
    pub(crate) sent_leave: bool,
    pub(crate) spill: Vec<u8>,
}

/// A frame that has begun to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Begun {
    pub(crate) header: Header,
    pub(crate) source: Source,
}

/// The place of a frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The front of `messages`.
    Message,
    /// `norm`.
    Norm,
    /// No payload.
    Empty,
    /// The model, at this slot.
    Model(u32),
    /// The newest answer of a quantised chunk, at this slot.
    Change(u32),
    /// The sum under way, at this slot.
    Sum(u32),
    /// The sum of the previous step, at this slot.
    Total(u32),
    /// The outbox's `spill`.
    Spill,
}

/// Frames combined into one write. Large chunks reach `WRITE_BYTES_MAX` before.
pub(crate) const BATCH_FRAMES: usize = 128;

/// A frame chosen for the next write.
#[derive(Clone, Copy)]
pub(crate) enum NextFrame {
    Begun(Begun),
    Message,
    Norm,
    /// A part of a chunk's initial state and parameters, for another site.
    Start(u32, u8),
    Answer(u32, Answer),
    /// The answer to a program state that was saved.
    ProgramStateSaved,
    /// The next piece of a program state.
    ProgramState,
}

/// Messages that an outbox keeps besides two changes of each group's hyperparameters. A peer that does not
/// read even these has more serious problems than the missing ones.
const MESSAGES_MAX: usize = 64;

impl Outbox {
    /// An outbox for a route of `slots` chunks whose largest payload has `payload_bytes_max` bytes, in a job
    /// of this many groups. It allocates all the memory it will need.
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
            sent_leave: false,
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

    /// Adds a message, unless there are too many already: it then returns `false`.
    pub(crate) fn message(&mut self, header: Header, payload: Vec<u8>) -> bool {
        debug_assert_eq!(header.length as usize, payload.len());
        let has_room = self.messages.len() < self.messages_max;
        if has_room {
            self.messages.push_back((header, payload));
        }
        has_room
    }

    /// Adds changes of a group's hyperparameters, by their first steps, unless they wait already, and however many there are.
    pub(crate) fn retune_once<'a>(
        &mut self,
        group: u32,
        changes: impl Iterator<Item = &'a (u32, Hyperparameters)>,
    ) {
        for &(first_step, hyperparameters) in changes {
            let payload = hyperparameters.to_wire().to_vec();
            let length = payload.len() as u32;
            let header = Header { chunk: group, step: first_step, length, ..Header::bare(Operation::Retune) };
            let message = (header, payload);
            if !self.messages.contains(&message) {
                self.messages.push_back(message);
            }
        }
    }

    /// Adds the frame with which a held step ends. That of a former step need not leave any more: the other site has it from
    /// elsewhere, since it has contributed to this step.
    pub(crate) fn end_held(&mut self, end: (Header, Vec<u8>)) {
        let begun = usize::from(self.has_begun(Source::Message));
        let mut at = 0;
        self.messages.retain(|(header, _)| {
            at += 1;
            at <= begun || !matches!(header.operation, Operation::Release | Operation::Skip)
        });
        self.messages.push_back(end);
    }

    /// Forgets everything, and has room for what a standby hears of each worker that leaves: the stream to it is still to
    /// come.
    pub(crate) fn begin_stream_to_standby(&mut self, workers: u32) {
        self.begun = None;
        self.forget();
        self.sent_leave = false;
        self.messages_max = self.messages_max.max(MESSAGES_MAX + 2 * workers as usize);
    }

    /// Whether the frames with which a chunk begins have not all begun to leave.
    pub(crate) fn starts(&self, slot: u32) -> bool {
        self.start.contains(slot) || self.start_at.is_some_and(|(at, _)| at == slot)
    }

    /// Adds the payload of the Norm of a held step's chunks on this route.
    pub(crate) fn send_norm(&mut self, step: u32, norm: Arc<[u8]>) {
        let header = Header { step, length: norm.len() as u32, ..Header::bare(Operation::Norm) };
        self.norm = Some((header, norm));
    }

    /// Returns whether `source` is that of the frame that has begun.
    pub(crate) fn has_begun(&self, source: Source) -> bool {
        self.begun.is_some_and(|begun| begun.source == source)
    }

    /// Returns whether nothing is left to send.
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

    /// Returns whether `spill` is free of a frame that has begun.
    pub(crate) fn may_spill(&self) -> bool {
        !self.has_begun(Source::Spill)
    }

    /// Forgets what a replaced stream had to send: answers, which the worker will request again, and how much
    /// of a message has left.
    pub(crate) fn start_again(&mut self) {
        self.begun = None;
        while self.parameters.pop_first().is_some() {}
        while self.applied.pop_first().is_some() {}
        while self.state.pop_first().is_some() {}
    }

    /// Forgets everything except the frame that has begun: the job is over, and its last message needs room.
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
