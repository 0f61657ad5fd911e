//! One stream's sending side: control frames first, then chunks, the most urgent first.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use paramhub_core::chunk::Extent;
use paramhub_core::placement::RouteId;
use paramhub_core::ready_set::ReadySet;
use paramhub_core::requests::PieceId;
use paramhub_core::wire::{Header, Operation, Release, State};
use paramhub_transport::{Connection, Outgoing, Stream, StreamError};

use crate::desk::Desk;
use crate::inbox::RETUNES_MAX;
use crate::staging::{PLACES, Staging};

/// Frames gathered into one write; a write of 32 KB chunks fills most socket buffers.
const BATCH_FRAMES: usize = 32;
/// Control frames that may wait: every change of hyperparameters the inbox lets through, a release, a heartbeat and a
/// farewell.
const CONTROL_MAX: usize = RETUNES_MAX + 3;

/// One stream of a job, as its I/O thread sees it.
pub(crate) struct Lane {
    pub(crate) stream: Connection,
    pub(crate) route: RouteId,
    /// The hub's address, for messages.
    pub(crate) hub: Arc<str>,
    /// Slots whose chunks are to be sent; slots are numbered by urgency.
    ready: ReadySet,
    control: VecDeque<Control>,
    /// The chunk whose frame has begun to leave and must be finished first.
    begun: Option<Chunk>,
    batch: Vec<Item>,
    staging: Staging,
    /// Of chunks of optimizer state; without room until some is sent.
    state_staging: Staging,
    /// The stream takes no more for now.
    pub(crate) blocked: bool,
    /// The stream is polled for room to write.
    pub(crate) polls_writable: bool,
    /// Something waits to be read that the poller will not report again.
    pub(crate) has_more: bool,
    /// Nothing more can be sent.
    pub(crate) deaf: bool,
    /// Nothing more will come.
    pub(crate) closed: bool,
    /// The stream was cut, and another is being opened in its place.
    pub(crate) is_moving: bool,
    /// What this stream took the place of, open until this one is heard.
    pub(crate) retired: Option<(Connection, Vec<std::net::TcpStream>)>,
    /// The address of this host's that a stream over TCP leaves from.
    pub(crate) source: Option<IpAddr>,
    pub(crate) last_sent: Instant,
    pub(crate) last_heard: Instant,
}

/// A frame without tensor data.
pub(crate) enum Control {
    Heartbeat,
    Leave,
    /// This worker cannot go on; why, for the others, shared by all lanes.
    GiveUp(Arc<[u8]>),
    /// New hyperparameters of a group in their wire form, shared by all lanes.
    Retune {
        group: u16,
        first_step: u32,
        wire: Arc<[u8]>,
    },
    /// A held step may be updated; one at a time, since the next is held behind it.
    Release {
        step: u32,
        wire: [u8; Release::BYTES],
    },
}

/// One frame of a batch. Control frames stand in the order of their queue.
enum Item {
    Control,
    Chunk(Chunk),
}

#[derive(Clone, Copy)]
struct Chunk {
    slot: u32,
    header: Header,
    extent: Extent,
    /// Where it was staged, if it is not sent as it lies in memory.
    place: Option<usize>,
    /// What it is of the factors of the layer that begins with the chunk; the frame is the chunk's own request where it is none.
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
            batch: Vec::with_capacity(BATCH_FRAMES),
            staging,
            state_staging: Staging::new(0),
            blocked: false,
            polls_writable: false,
            has_more: false,
            deaf: false,
            closed: false,
            is_moving: false,
            retired: None,
            source: None,
            last_sent: now,
            last_heard: now,
        }
    }

    /// A chunk is to be sent.
    pub(crate) fn ask(&mut self, slot: u32) {
        self.ready.insert(slot);
    }

    /// Queues a control frame ahead of all chunks but the one that has begun.
    pub(crate) fn say(&mut self, control: Control) {
        debug_assert!(self.control.len() < CONTROL_MAX, "the caller looks for room first");
        self.control.push_back(control);
    }

    /// Whether another change of hyperparameters may be queued.
    pub(crate) fn has_room_for_retune(&self) -> bool {
        self.control.len() < RETUNES_MAX
    }

    /// Whether it is to be served again although no event will say so: what lies in shared memory is reported once.
    pub(crate) fn is_restless(&self) -> bool {
        self.stream.is_shm() && !self.closed && (self.has_more || (self.has_work() && !self.blocked))
    }

    /// Whether anything waits to be sent.
    pub(crate) fn has_work(&self) -> bool {
        !self.deaf
            && !self.is_moving
            && (self.begun.is_some() || !self.control.is_empty() || !self.ready.is_empty())
    }

    /// [`say`](Self::say), for what was said before on a stream that was cut.
    pub(crate) fn say_again(&mut self, control: Control) {
        self.control.push_back(control);
    }

    /// Forgets how far a stream came that was cut. Changes of hyperparameters are the caller's to say again, all of them; who
    /// says goodbye says it last.
    pub(crate) fn start_again(&mut self) {
        // A write that failed has left its frames where they were gathered.
        let gathered = self.batch.drain(..).filter_map(|item| match item {
            Item::Chunk(chunk) => Some(chunk),
            Item::Control => None,
        });
        for chunk in gathered.chain(self.begun.take()) {
            self.ready.insert(chunk.slot);
        }
        self.control.clear();
    }

    /// Whether nothing more is to be sent, but this has not been said.
    pub(crate) fn may_end(&self) -> bool {
        !self.deaf && !self.is_moving && !self.has_work()
    }

    /// Gives up what has not begun to leave.
    pub(crate) fn forget_chunks(&mut self) {
        while self.ready.pop_first().is_some() {}
    }

    /// Sends until nothing is left, the hub takes no more, or about `budget` bytes have left. Returns the bytes.
    pub(crate) fn pump(&mut self, desk: &mut Desk, budget: usize) -> Result<usize, StreamError> {
        let mut bytes = 0;
        while bytes < budget {
            self.gather(desk);
            if self.batch.is_empty() {
                break;
            }
            let sent = self.write(desk)?;
            self.settle(desk, sent.frames);
            bytes += sent.bytes;
            self.blocked = sent.blocked;
            if sent.blocked {
                break;
            }
        }
        Ok(bytes)
    }

    /// Chooses the next write's frames, and converts those that travel in another encoding.
    fn gather(&mut self, desk: &mut Desk) {
        let begun = self.begun.take();
        let mut next_place = begun.and_then(|chunk| chunk.place).map_or(0, |place| (place + 1) % PLACES);
        let mut places = PLACES - usize::from(begun.is_some_and(|chunk| chunk.place.is_some()));
        self.batch.extend(begun.map(Item::Chunk));
        let control = self.control.len().min(BATCH_FRAMES - self.batch.len());
        self.batch.extend(std::iter::repeat_with(|| Item::Control).take(control));
        while self.batch.len() < BATCH_FRAMES && places > 0 {
            let Some(slot) = self.ready.pop_first() else { break };
            let chunk = desk.placement.chunks(self.route)[slot as usize];
            if let Some(block) = desk.requests.block_at(chunk) {
                if let Some(piece) = self.gather_piece(desk, block, slot, next_place) {
                    self.batch.push(Item::Chunk(piece));
                    next_place = (next_place + 1) % PLACES;
                    places -= 1;
                }
                continue;
            }
            let (header, extent) = desk.header(chunk);
            let (travels_as, lies_as) = desk.codecs(extent.key);
            let mut place = None;
            let of_tensor = header.operation.carries_tensor();
            if header.operation == Operation::InitialiseState {
                if self.state_staging.is_empty() {
                    let largest = State::bytes(desk.requests.map().chunk_elements());
                    self.state_staging = Staging::new(largest as usize);
                }
                let (updates, values) = desk.state_source(&extent);
                self.state_staging.fill_state(next_place, updates, values);
                place = Some(next_place);
            } else if travels_as.is_quantised() {
                desk.prepare(&header, &extent);
            } else if of_tensor && header.codec == travels_as && travels_as != lies_as {
                let mut exact = std::mem::take(&mut desk.exact);
                self.staging.fill(next_place, desk.source(&extent), lies_as, travels_as, &mut exact);
                desk.exact = exact;
                place = Some(next_place);
            }
            if place.is_some() {
                next_place = (next_place + 1) % PLACES;
                places -= 1;
            }
            if let Some(arena) = desk.arena.as_ref().filter(|_| self.stream.is_shm() && of_tensor) {
                match place {
                    Some(place) => {
                        arena.put(&header, &extent, self.staging.place(place, header.length as usize))
                    }
                    None => arena.put(&header, &extent, desk.source(&extent)),
                }
            }
            self.batch.push(Item::Chunk(Chunk { slot, header, extent, place, piece: None }));
        }
    }

    /// The next piece of a layer's factors, at this place, if one is left.
    fn gather_piece(&mut self, desk: &mut Desk, block: usize, slot: u32, place: usize) -> Option<Chunk> {
        let (id, header, piece) = desk.requests.next_piece(block)?;
        desk.put_piece(id, &piece, self.staging.place_mut(place, header.length as usize));
        if desk.requests.has_pieces(block) {
            self.ready.insert(slot);
        }
        let extent = desk.requests.map().extent(header.chunk).expect("a weight's first chunk is in the map");
        Some(Chunk { slot, header, extent, place: Some(place), piece: Some(id) })
    }

    fn write(&mut self, desk: &Desk) -> Result<paramhub_transport::Sent, StreamError> {
        let mut frames =
            [Outgoing { header: Header::bare(Operation::Heartbeat), payload: &[] }; BATCH_FRAMES];
        let mut control = self.control.iter();
        for (frame, item) in frames.iter_mut().zip(&self.batch) {
            *frame = match item {
                Item::Control => control.next().expect("gathered from the queue").outgoing(),
                Item::Chunk(chunk) => {
                    let (header, length) = (chunk.header, chunk.header.length as usize);
                    let payload = match chunk.place {
                        _ if length == 0 => &[],
                        _ if self.stream.is_shm() && header.operation.carries_tensor() => &[],
                        Some(place) if header.operation == Operation::InitialiseState => {
                            self.state_staging.place(place, length)
                        }
                        Some(place) => self.staging.place(place, length),
                        None => desk.payload(&header, &chunk.extent),
                    };
                    Outgoing { header, payload }
                }
            };
        }
        self.stream.send(&frames[..self.batch.len()])
    }

    /// Notes what the write finished, keeps the frame it broke off in, and puts the rest back among what is ready, so
    /// that something more urgent may go first.
    fn settle(&mut self, desk: &mut Desk, frames: usize) {
        let broken_off = (self.stream.unfinished() > 0).then_some(frames);
        for (index, item) in self.batch.drain(..).enumerate() {
            match item {
                Item::Control if index < frames => drop(self.control.pop_front()),
                Item::Control => {}
                // Only now: an answer to a frame that has not left whole is none.
                Item::Chunk(chunk) if index < frames => match chunk.piece {
                    Some(piece) => desk.requests.piece_sent(piece),
                    None => desk.requests.sent(chunk.header.chunk),
                },
                Item::Chunk(chunk) if broken_off == Some(index) => self.begun = Some(chunk),
                Item::Chunk(chunk) => {
                    if let Some(piece) = chunk.piece {
                        desk.requests.piece_back(piece);
                    }
                    self.ready.insert(chunk.slot);
                }
            }
        }
    }
}

impl Control {
    fn outgoing(&self) -> Outgoing<'_> {
        match self {
            Control::Heartbeat => Outgoing { header: Header::bare(Operation::Heartbeat), payload: &[] },
            Control::Leave => Outgoing { header: Header::bare(Operation::Leave), payload: &[] },
            Control::GiveUp(wire) => {
                let header = Header { length: wire.len() as u32, ..Header::bare(Operation::Failure) };
                Outgoing { header, payload: wire }
            }
            Control::Retune { group, first_step, wire } => {
                let header = Header {
                    chunk: u32::from(*group),
                    step: *first_step,
                    length: wire.len() as u32,
                    ..Header::bare(Operation::Retune)
                };
                Outgoing { header, payload: wire }
            }
            Control::Release { step, wire } => {
                let length = Release::BYTES as u32;
                let header = Header { step: *step, length, ..Header::bare(Operation::Release) };
                Outgoing { header, payload: wire }
            }
        }
    }
}
