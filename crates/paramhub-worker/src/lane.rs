//! One stream's sending side: control frames first, then chunks, the most urgent first, with a piece of a program state
//! between them.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use paramhub_core::chunk::Extent;
use paramhub_core::liveness::PeerLiveness;
use paramhub_core::placement::RouteId;
use paramhub_core::program_states::StateInPieces;
use paramhub_core::ready_set::ReadySet;
use paramhub_core::requests::{ExpectedAnswer, PieceId};
use paramhub_core::resuming::Cuts;
use paramhub_core::wire::{Header, Operation, State};
use paramhub_transport::{Connection, Outgoing, Stream, StreamError, WRITE_BYTES_MAX};

use crate::command::RETUNES_MAX;
use crate::requests_in_flight::RequestsInFlight;
use crate::staging::{PLACES, Staging};

/// The most frames of one write. Chunks of 32 KB reach WRITE_BYTES_MAX before.
const BATCH_FRAMES: usize = 128;
/// The maximum of waiting control frames: every change of hyperparameters that the inbox lets through, a
/// release, a heartbeat, a request for a program state and a Leave message.
const CONTROL_MAX: usize = RETUNES_MAX + 4;

/// One end of a stream: its connection, and what is being sent and received.
pub(crate) struct Lane {
    pub(crate) stream: Connection,
    pub(crate) route: RouteId,
    /// The hub's address, for messages.
    pub(crate) hub: Arc<str>,
    /// Slots whose chunks are to be sent; slots are numbered by urgency.
    ready: ReadySet,
    control: VecDeque<ControlFrame>,
    /// The chunk whose frame has begun to leave and must be finished first.
    begun: Option<ChunkFrame>,
    /// The program state that is being sent.
    program_state: Option<SendingState>,
    /// The answer whose frame has begun to come.
    pub(crate) begun_answer: Option<ExpectedAnswer>,
    batch: Vec<BatchItem>,
    staging: Staging,
    /// Room for chunks of optimizer state; allocated when the first is sent.
    state_staging: Staging,
    /// Whether the stream takes no more for now.
    pub(crate) blocked: bool,
    /// Whether the poller watches the stream for room to write.
    pub(crate) polls_writable: bool,
    /// Whether the stream holds data to read that the poller will not report again.
    pub(crate) has_more: bool,
    state: LaneState,
    /// The stream that this one replaced, kept open until a frame comes on this one.
    pub(crate) retired: Option<(Connection, Vec<std::net::TcpStream>)>,
    /// The address of this host that a stream over TCP leaves from.
    pub(crate) source: Option<IpAddr>,
    pub(crate) liveness: PeerLiveness,
    /// How often the stream was cut and opened again.
    pub(crate) cuts: Cuts,
}

/// What a lane's stream can still carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LaneState {
    /// Frames go both ways.
    Open,
    /// Nothing more can be sent, and frames may still come.
    SendClosed,
    /// The stream broke, and another is being opened in its place, which is not waited for any longer than this.
    Resuming { until: Instant },
    /// Nothing more is sent, and nothing more will come.
    Closed,
}

/// A frame without tensor data.
pub(crate) enum ControlFrame {
    Heartbeat,
    Leave,
    /// This worker cannot go on. The payload, shared by all lanes, has the reason for the other ranks.
    GiveUp(Arc<[u8]>),
    /// New hyperparameters of a group in their wire form, shared by all lanes.
    Retune {
        group: u16,
        first_step: u32,
        wire: Arc<[u8]>,
    },
    /// The hub ends a held step: with an update that takes the factor in this payload, or without one. One is sent at a time, since the next
    /// step is held until this one is released.
    Release {
        step: u32,
        wire: Option<Arc<[u8]>>,
    },
    /// Asks for the program state of a step.
    PullProgramState {
        step: u32,
    },
}

/// One frame of a batch. Control frames come in the order of their queue.
enum BatchItem {
    Control,
    Chunk(ChunkFrame),
    /// The piece of the program state with this number.
    StatePiece(u32),
}

/// A program state of which some pieces have not left.
struct SendingState {
    state: Arc<StateInPieces>,
    /// The next piece to leave, and the one after the last.
    next: u32,
    end: u32,
    /// Whether a part of the next piece has left, so that the rest must follow first.
    has_begun: bool,
}

#[derive(Clone, Copy)]
struct ChunkFrame {
    slot: u32,
    header: Header,
    extent: Extent,
    /// The frame's place in the staging, if it is converted before it is sent.
    place: Option<usize>,
    /// The piece of factors that the frame carries, for a layer whose first chunk this is; `None` where the
    /// frame is the chunk's own request.
    piece: Option<PieceId>,
}

impl Lane {
    pub(crate) fn new(
        stream: Connection,
        route: RouteId,
        hub: Arc<str>,
        slots: u32,
        staging: Staging,
        now: Instant,
    ) -> Self {
        Lane {
            stream,
            route,
            hub,
            ready: ReadySet::new(slots),
            control: VecDeque::with_capacity(CONTROL_MAX),
            begun: None,
            program_state: None,
            begun_answer: None,
            batch: Vec::with_capacity(BATCH_FRAMES),
            staging,
            state_staging: Staging::new(0),
            blocked: false,
            polls_writable: false,
            has_more: false,
            state: LaneState::Open,
            retired: None,
            source: None,
            liveness: PeerLiveness::new(now),
            cuts: Cuts::default(),
        }
    }

    /// Adds a chunk to those to be sent.
    pub(crate) fn mark_ready(&mut self, slot: u32) {
        self.ready.insert(slot);
    }

    /// Queues a control frame ahead of all chunks but the one that has begun.
    pub(crate) fn queue_control(&mut self, control: ControlFrame) {
        debug_assert!(self.control.len() < CONTROL_MAX, "the caller looks for room first");
        self.control.push_back(control);
    }

    /// Sends a program state, a piece with each write, and more where chunks leave room.
    pub(crate) fn send_program_state(&mut self, state: Arc<StateInPieces>) {
        debug_assert!(self.program_state.is_none(), "one state is saved at a time");
        let end = state.pieces();
        self.program_state = Some(SendingState { state, next: 0, end, has_begun: false });
    }

    /// Whether another change of hyperparameters may be queued.
    pub(crate) fn has_room_for_retune(&self) -> bool {
        self.control.len() < RETUNES_MAX
    }

    /// Whether the lane needs another turn although no event will say so: the poller reports data in shared
    /// memory once.
    pub(crate) fn needs_polling(&self) -> bool {
        self.stream.is_shm() && !self.is_closed() && (self.has_more || (self.has_work() && !self.blocked))
    }

    /// Whether any frame waits to be sent.
    pub(crate) fn has_work(&self) -> bool {
        self.state == LaneState::Open
            && (self.begun.is_some()
                || !self.control.is_empty()
                || !self.ready.is_empty()
                || self.program_state.is_some()
                || self.stream.has_unsent())
    }

    /// [`queue_control`](Self::queue_control), for a frame that was queued before on a stream that broke.
    pub(crate) fn requeue(&mut self, control: ControlFrame) {
        self.control.push_back(control);
    }

    /// Forgets how much of its frames a broken stream has sent. The caller queues all changes of
    /// hyperparameters again, what is under way of program states, and a Leave message after them.
    pub(crate) fn requeue_begun_chunks(&mut self) {
        // A write that failed leaves its frames in the batch.
        let gathered = self.batch.drain(..).filter_map(|item| match item {
            BatchItem::Chunk(chunk) => Some(chunk),
            BatchItem::Control | BatchItem::StatePiece(_) => None,
        });
        for chunk in gathered.chain(self.begun.take()) {
            self.ready.insert(chunk.slot);
        }
        self.control.clear();
        self.program_state = None;
    }

    /// Whether nothing more is to be sent and the sending side is still open.
    pub(crate) fn may_end(&self) -> bool {
        self.state == LaneState::Open && !self.has_work()
    }

    /// Whether nothing more will come.
    pub(crate) fn is_closed(&self) -> bool {
        self.state == LaneState::Closed
    }

    /// Whether frames may still come from the stream.
    pub(crate) fn may_receive(&self) -> bool {
        matches!(self.state, LaneState::Open | LaneState::SendClosed)
    }

    /// Whether another stream is being opened in the place of this one.
    pub(crate) fn is_resuming(&self) -> bool {
        matches!(self.state, LaneState::Resuming { .. })
    }

    /// Whether another stream was to be in the place of this one by now.
    pub(crate) fn is_resuming_overdue(&self, now: Instant) -> bool {
        matches!(self.state, LaneState::Resuming { until } if now >= until)
    }

    /// Sends nothing more; what still comes is received.
    pub(crate) fn close_sending(&mut self) {
        debug_assert!(self.may_receive(), "only a stream that is there sends");
        self.state = LaneState::SendClosed;
    }

    /// Sends nothing more and expects nothing more.
    pub(crate) fn close(&mut self) {
        self.state = LaneState::Closed;
    }

    /// Notes that the stream broke and another is to be opened in its place, which has failed if it is not there at
    /// `until`; `false` if that was known. The poller no longer watches the stream.
    pub(crate) fn begin_resuming(&mut self, until: Instant) -> bool {
        if self.is_resuming() {
            return false;
        }
        self.state = LaneState::Resuming { until };
        self.polls_writable = false;
        self.has_more = false;
        true
    }

    /// Notes that another stream is in the place of the broken one.
    pub(crate) fn reopen(&mut self) {
        self.state = LaneState::Open;
        self.blocked = false;
        self.begun_answer = None;
    }

    /// Forgets the chunks, and the pieces of a program state, that have not begun to leave.
    pub(crate) fn forget_chunks(&mut self) {
        while self.ready.pop_first().is_some() {}
        self.program_state = self.program_state.take().filter(|sending| sending.has_begun);
        if let Some(sending) = &mut self.program_state {
            sending.end = sending.next + 1;
        }
    }

    /// Sends until nothing is left, the hub takes no more, or about `budget` bytes have left. Returns the
    /// number of bytes.
    pub(crate) fn pump(
        &mut self,
        in_flight: &mut RequestsInFlight,
        budget: usize,
    ) -> Result<usize, StreamError> {
        let mut bytes = 0;
        while bytes < budget {
            self.gather(in_flight);
            if self.batch.is_empty() && !self.stream.has_unsent() {
                break;
            }
            let sent = self.write(in_flight)?;
            self.account_for_write(in_flight, sent.frames);
            bytes += sent.bytes;
            self.blocked = sent.blocked;
            if sent.blocked {
                break;
            }
        }
        Ok(bytes)
    }

    /// Chooses the frames of the next write, as many as one write takes, and converts those that travel in
    /// another encoding.
    fn gather(&mut self, in_flight: &mut RequestsInFlight) {
        let begun = self.begun.take();
        let mut next_place = begun.and_then(|chunk| chunk.place).map_or(0, |place| (place + 1) % PLACES);
        let mut places = PLACES - usize::from(begun.is_some_and(|chunk| chunk.place.is_some()));
        self.batch.extend(begun.map(BatchItem::Chunk));
        let mut bytes = 0;
        let has_begun = self.program_state.as_ref().is_some_and(|sending| sending.has_begun);
        let mut pieces = if has_begun { self.gather_state_piece(0, &mut bytes) } else { 0 };
        let control = self.control.len().min(BATCH_FRAMES - self.batch.len());
        self.batch.extend(std::iter::repeat_with(|| BatchItem::Control).take(control));
        // One goes before the chunks, so that it leaves although there are always some.
        if pieces == 0 && self.batch.len() < BATCH_FRAMES {
            pieces = self.gather_state_piece(0, &mut bytes);
        }
        while self.batch.len() < BATCH_FRAMES && bytes < WRITE_BYTES_MAX && places > 0 {
            let Some(slot) = self.ready.pop_first() else { break };
            let chunk = in_flight.placement.chunks(self.route)[slot as usize];
            if let Some(block) = in_flight.requests.block_at(chunk) {
                if let Some(piece) = self.gather_piece(in_flight, block, slot, next_place) {
                    bytes += piece.header.length as usize;
                    self.batch.push(BatchItem::Chunk(piece));
                    next_place = (next_place + 1) % PLACES;
                    places -= 1;
                }
                continue;
            }
            let (mut header, extent) = in_flight.header(chunk);
            let (mut travels_as, lies_as) = in_flight.codecs(extent.key);
            if travels_as.is_quantised() && self.stream.is_shm() {
                // It goes in its own type through shared memory.
                if header.codec == travels_as {
                    (header.codec, header.length) = (lies_as, extent.bytes(lies_as));
                }
                travels_as = lies_as;
            }
            let mut place = None;
            let of_tensor = header.operation.carries_tensor();
            if header.operation == Operation::InitialiseState {
                if self.state_staging.is_empty() {
                    let largest = State::bytes(in_flight.requests.map().chunk_elements());
                    self.state_staging = Staging::new(largest as usize);
                }
                let (updates, values) = in_flight.state_source(&extent);
                self.state_staging.fill_state(next_place, updates, values);
                place = Some(next_place);
            } else if travels_as.is_quantised() {
                in_flight.prepare(&header, &extent);
            } else if of_tensor && header.codec == travels_as && travels_as != lies_as {
                let mut exact = std::mem::take(&mut in_flight.exact);
                self.staging.fill(next_place, in_flight.source(&extent), lies_as, travels_as, &mut exact);
                in_flight.exact = exact;
                place = Some(next_place);
            }
            if place.is_some() {
                next_place = (next_place + 1) % PLACES;
                places -= 1;
            }
            if let Some(arena) = in_flight.arena.as_ref().filter(|_| self.stream.is_shm() && of_tensor) {
                match place {
                    Some(place) => {
                        arena.put(&header, &extent, self.staging.place(place, header.length as usize))
                    }
                    None => arena.put(&header, &extent, in_flight.source(&extent)),
                }
            }
            // Through shared memory a tensor does not pass through the stream.
            bytes += if self.stream.is_shm() && of_tensor { 0 } else { header.length as usize };
            self.batch.push(BatchItem::Chunk(ChunkFrame { slot, header, extent, place, piece: None }));
        }
        while self.batch.len() < BATCH_FRAMES && bytes < WRITE_BYTES_MAX {
            let gathered = self.gather_state_piece(pieces, &mut bytes);
            if gathered == 0 {
                break;
            }
            pieces += gathered;
        }
    }

    /// Adds the piece of the program state that follows so many in the batch, if there is one, and returns how many pieces
    /// it has added.
    fn gather_state_piece(&mut self, pieces: u32, bytes: &mut usize) -> u32 {
        let Some(sending) = &self.program_state else { return 0 };
        let number = sending.next + pieces;
        if number >= sending.end {
            return 0;
        }
        *bytes += sending.state.piece(number).1.len();
        self.batch.push(BatchItem::StatePiece(number));
        1
    }

    /// Stages the next piece of a layer's factors at this place, if one is left.
    fn gather_piece(
        &mut self,
        in_flight: &mut RequestsInFlight,
        block: usize,
        slot: u32,
        place: usize,
    ) -> Option<ChunkFrame> {
        let (id, header, piece) = in_flight.requests.next_piece(block)?;
        in_flight.put_piece(id, &piece, self.staging.place_mut(place, header.length as usize));
        if in_flight.requests.has_pieces(block) {
            self.ready.insert(slot);
        }
        let extent =
            in_flight.requests.map().extent(header.chunk).expect("a weight's first chunk is in the map");
        Some(ChunkFrame { slot, header, extent, place: Some(place), piece: Some(id) })
    }

    fn write(&mut self, in_flight: &RequestsInFlight) -> Result<paramhub_transport::Sent, StreamError> {
        let mut frames =
            [Outgoing { header: Header::bare(Operation::Heartbeat), payload: &[] }; BATCH_FRAMES];
        let mut control = self.control.iter();
        for (frame, item) in frames.iter_mut().zip(&self.batch) {
            *frame = match item {
                BatchItem::Control => control.next().expect("gathered from the queue").outgoing(),
                BatchItem::StatePiece(number) => {
                    let sending = self.program_state.as_ref().expect("gathered from there");
                    let (header, payload) = sending.state.piece(*number);
                    Outgoing { header, payload }
                }
                BatchItem::Chunk(chunk) => {
                    let (header, length) = (chunk.header, chunk.header.length as usize);
                    let payload = match chunk.place {
                        _ if length == 0 => &[],
                        _ if self.stream.is_shm() && header.operation.carries_tensor() => &[],
                        Some(place) if header.operation == Operation::InitialiseState => {
                            self.state_staging.place(place, length)
                        }
                        Some(place) => self.staging.place(place, length),
                        None => in_flight.payload(&header, &chunk.extent),
                    };
                    Outgoing { header, payload }
                }
            };
        }
        self.stream.send(&frames[..self.batch.len()])
    }

    /// Notes which frames the write finished, keeps the one it stopped in, and makes the rest ready again, so
    /// that something more urgent may go first.
    fn account_for_write(&mut self, in_flight: &mut RequestsInFlight, frames: usize) {
        let broken_off = (self.stream.unfinished() > 0).then_some(frames);
        for (index, item) in self.batch.drain(..).enumerate() {
            match item {
                BatchItem::Control if index < frames => drop(self.control.pop_front()),
                BatchItem::Control => {}
                BatchItem::StatePiece(_) => {
                    let sending = self.program_state.as_mut().expect("gathered from there");
                    if index < frames {
                        sending.next += 1;
                        sending.has_begun = false;
                    } else if broken_off == Some(index) {
                        sending.has_begun = true;
                    }
                    if sending.next == sending.state.pieces() {
                        in_flight.program_states.save_left();
                    }
                }
                // Only now: no valid answer can come to a frame that has not left whole.
                BatchItem::Chunk(chunk) if index < frames => match chunk.piece {
                    Some(piece) => in_flight.requests.piece_sent(piece),
                    None => in_flight.requests.sent(chunk.header.chunk),
                },
                BatchItem::Chunk(chunk) if broken_off == Some(index) => self.begun = Some(chunk),
                BatchItem::Chunk(chunk) => {
                    if let Some(piece) = chunk.piece {
                        in_flight.requests.piece_back(piece);
                    }
                    self.ready.insert(chunk.slot);
                }
            }
        }
        self.program_state = self.program_state.take().filter(|sending| sending.next < sending.end);
    }
}

impl ControlFrame {
    fn outgoing(&self) -> Outgoing<'_> {
        match self {
            ControlFrame::Heartbeat => Outgoing { header: Header::bare(Operation::Heartbeat), payload: &[] },
            ControlFrame::Leave => Outgoing { header: Header::bare(Operation::Leave), payload: &[] },
            ControlFrame::GiveUp(wire) => {
                let header = Header { length: wire.len() as u32, ..Header::bare(Operation::Failure) };
                Outgoing { header, payload: wire }
            }
            ControlFrame::Retune { group, first_step, wire } => {
                let header = Header {
                    chunk: u32::from(*group),
                    step: *first_step,
                    length: wire.len() as u32,
                    ..Header::bare(Operation::Retune)
                };
                Outgoing { header, payload: wire }
            }
            ControlFrame::PullProgramState { step } => {
                let header = Header { step: *step, ..Header::bare(Operation::PullProgramState) };
                Outgoing { header, payload: &[] }
            }
            ControlFrame::Release { step, wire: Some(wire) } => {
                let length = wire.len() as u32;
                let header = Header { step: *step, length, ..Header::bare(Operation::Release) };
                Outgoing { header, payload: wire }
            }
            ControlFrame::Release { step, wire: None } => {
                let header = Header { step: *step, ..Header::bare(Operation::Skip) };
                Outgoing { header, payload: &[] }
            }
        }
    }
}
