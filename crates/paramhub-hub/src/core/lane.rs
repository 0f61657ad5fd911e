//! One port's stream on a core: frames in to its shard, answers out from it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use paramhub_core::exchange::Answer;
use paramhub_core::wire::{Direction, Header, Operation};
use paramhub_transport::shm::RING_BYTES_DEFAULT;
use paramhub_transport::{
    Connection, FrameSink, Interest, Landing, Outgoing, ReceiveError, Scratch, ShmStream, Stream,
    StreamError, TcpStream,
};

use super::fault::Fault;
use super::outbox::{Begun, Source};
use super::shard::{Payload, Shard};
use crate::local::LocalMemory;

/// Bytes taken from one stream before the others get their turn: about one read of the scratch buffer, so that what a
/// chunk's last contribution sets free leaves while it is in cache.
const RECEIVE_BUDGET_BYTES: usize = 256 << 10;
/// Bytes sent to one stream before the others get their turn, unless a single write takes more.
const SEND_BUDGET_BYTES: usize = 1 << 20;
/// Bytes a worker over shared memory may be left asleep over: a third of a millisecond's work. A core wakes everybody
/// before it sleeps itself.
const PATIENCE_BYTES: usize = 4 << 20;
/// Frames gathered into one write.
const BATCH_FRAMES: usize = 32;
/// A stream on which nothing left for this long carries a heartbeat, or sooner where the job calls silence dead sooner.
const HEARTBEAT_MAX: Duration = Duration::from_secs(1);
/// A worker not heard for this long is named as silent, or sooner where the job calls silence dead sooner. It sends a
/// heartbeat a second.
const SILENT_AFTER: Duration = Duration::from_secs(3);
/// How long a stream of a job that is over may take to read the reason and close.
const DRAIN: Duration = Duration::from_secs(1);

/// A worker's stream. The shard's books say what is to be sent; the lane says how far it got.
pub(crate) struct Lane {
    stream: Connection,
    pub(crate) shard: usize,
    pub(crate) port: u32,
    last_heard: Instant,
    last_sent: Instant,
    reported_silent: bool,
    pub(crate) waits_writable: bool,
    pub(crate) due: Due,
    /// Broken, and another may take its place.
    is_cut: bool,
    draining: Option<Draining>,
}

/// Why a lane waits for its turn, if it does.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Due {
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

impl Due {
    pub(crate) fn is_any(self) -> bool {
        self.readable || self.writable
    }
}

/// What comes is thrown away: the worker broke the rules, or the job is over.
#[derive(Clone, Copy)]
struct Draining {
    until: Instant,
    /// Nothing will be put into the outbox any more: once it is empty, our side closes.
    last_word: LastWord,
}

#[derive(Clone, Copy, PartialEq)]
enum LastWord {
    Awaited,
    Queued,
    Said,
}

/// What a look at the clock says of a lane.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pulse {
    Silent(Duration),
    Dead(Duration),
    HeardAgain,
}

/// How a lane stands after it has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// More may come.
    Open,
    /// More waits already, and shared memory does not report it again.
    More,
    /// The peer has closed in order.
    Closed,
    /// It broke, and another may take its place.
    Cut,
}

struct ShardSink<'a> {
    shard: &'a mut Shard,
    port: u32,
}

impl FrameSink for ShardSink<'_> {
    type Error = Fault;

    fn landing(&mut self, header: &Header) -> Result<Landing<'_>, Fault> {
        self.shard.check(self.port, header)?;
        Ok(Landing::Staged)
    }

    fn frame(&mut self, header: &Header, payload: Option<&[u8]>) -> Result<(), Fault> {
        self.shard.frame(self.port, header, Payload::Here(payload.unwrap_or_default()))
    }

    fn placed(&mut self, header: &Header) -> Result<(), Fault> {
        self.shard.check(self.port, header)?;
        self.shard.frame(self.port, header, Payload::InArena)
    }

    fn moved(&mut self) -> usize {
        self.shard.take_copied()
    }
}

/// A stream whose handshake is done.
pub(crate) struct Arrival {
    pub(crate) socket: OwnedFd,
    pub(crate) memory: Option<LocalMemory>,
}

impl Arrival {
    /// `to` is the way of the frames that come.
    pub(crate) fn connect(self, to: Direction, frame_bytes_max: usize) -> io::Result<Connection> {
        let max = frame_bytes_max;
        Ok(match self.memory {
            None => Connection::Tcp(TcpStream::new(self.socket, to, max)?),
            Some(memory) => {
                let stream = ShmStream::new(self.socket, memory.rings, RING_BYTES_DEFAULT, to, max)?;
                Connection::Shm(stream.with_arena().with_patience(PATIENCE_BYTES))
            }
        })
    }
}

/// How far a flush came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flushed {
    All,
    /// As much as a turn allows.
    Some,
    /// As much as the peer takes.
    Blocked,
}

/// A frame chosen for the next write, and what becomes of it.
#[derive(Clone, Copy)]
enum Pick {
    Begun(Begun),
    Message,
    Norm,
    /// A part of what a chunk begins with at another site.
    Start(u32, u8),
    Answer(u32, Answer),
}

impl Lane {
    pub(crate) fn new(stream: Connection, shard: usize, port: u32, now: Instant) -> Self {
        Lane {
            stream,
            shard,
            port,
            last_heard: now,
            last_sent: now,
            reported_silent: false,
            waits_writable: false,
            due: Due::default(),
            is_cut: false,
            draining: None,
        }
    }

    /// Wakes a worker that was left asleep over something sent.
    pub(crate) fn announce(&mut self) -> Result<(), StreamError> {
        self.stream.announce()
    }

    /// Whether the worker may have been left asleep.
    pub(crate) fn is_unannounced(&self) -> bool {
        self.stream.is_unannounced()
    }

    pub(crate) fn is_shm(&self) -> bool {
        self.stream.is_shm()
    }

    /// What to poll for.
    pub(crate) fn interest(&self) -> Interest {
        self.stream.interest(self.waits_writable)
    }

    /// Whether any event may mean that there is room for what waits.
    pub(crate) fn waits_for_bell(&self) -> bool {
        self.waits_writable && self.stream.is_shm()
    }

    /// Notes that it is broken and waits for another to take its place; says whether it did already.
    pub(crate) fn cut(&mut self) -> bool {
        std::mem::replace(&mut self.is_cut, true)
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Whether the way is at fault rather than the worker: one that dies closes its streams or resets them.
    pub(crate) fn may_be_resumed(&self, shard: &Shard, error: &StreamError) -> bool {
        shard.plan().continues
            && !self.is_shm()
            && self.draining.is_none()
            && matches!(error, StreamError::Io(_))
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.is_some()
    }

    /// Takes what has come, up to the budget.
    pub(crate) fn receive(
        &mut self,
        shard: &mut Shard,
        scratch: &mut Scratch,
        now: Instant,
    ) -> Result<Taken, Fault> {
        if self.is_draining() {
            return Ok(if self.stream.discard() { Taken::Closed } else { Taken::Open });
        }
        shard.now = now;
        let mut sink = ShardSink { shard, port: self.port };
        match self.stream.receive(&mut sink, scratch, RECEIVE_BUDGET_BYTES) {
            Ok(received) => {
                if received.bytes > 0 {
                    self.last_heard = now;
                    shard.count_bytes(received.bytes, 0);
                }
                if received.closed && !shard.has_left(self.port) {
                    return Err(Fault::Lost("its connection ended without a goodbye".to_string()));
                }
                Ok(match received {
                    received if received.closed => Taken::Closed,
                    received if received.more && self.is_shm() => Taken::More,
                    _ => Taken::Open,
                })
            }
            // Having left, it owes nobody an orderly close.
            Err(ReceiveError::Stream(_)) if shard.has_left(self.port) => Ok(Taken::Closed),
            Err(ReceiveError::Stream(error)) if self.may_be_resumed(shard, &error) => Ok(Taken::Cut),
            Err(ReceiveError::Stream(error)) => Err(Fault::Lost(error.to_string())),
            Err(ReceiveError::Frame(error)) => Err(Fault::Frame(error.to_string())),
            Err(ReceiveError::Sink(fault)) => Err(fault),
        }
    }

    /// Sends what the shard owes this port until nothing is left, the peer takes no more or the budget is spent.
    pub(crate) fn flush(&mut self, shard: &mut Shard, now: Instant) -> Result<Flushed, StreamError> {
        let mut bytes = 0;
        loop {
            let mut picks = [Pick::Message; BATCH_FRAMES];
            let count = pick(shard, self.port, &mut picks);
            if count == 0 {
                self.shut_if_drained()?;
                return Ok(Flushed::All);
            }
            let picks = &picks[..count];
            let mut frames =
                [Outgoing { header: Header::bare(Operation::Heartbeat), payload: &[] }; BATCH_FRAMES];
            frame(shard, self.port, picks, &mut frames[..count]);
            let headers: [Header; BATCH_FRAMES] = std::array::from_fn(|index| frames[index].header);
            let sent = self.stream.send(&frames[..count])?;
            if sent.bytes > 0 {
                self.last_sent = now;
            }
            let begun = sent.frames + usize::from(self.stream.unfinished() > 0);
            settle(shard, self.port, picks, &headers, sent.frames, begun);
            shard.count_bytes(0, sent.bytes);
            bytes += sent.bytes;
            if sent.blocked {
                return Ok(Flushed::Blocked);
            }
            if bytes >= SEND_BUDGET_BYTES {
                return Ok(Flushed::Some);
            }
        }
    }

    /// From now on nothing this worker sends counts; the job's end, with its reason, will follow.
    pub(crate) fn mute(&mut self, now: Instant) {
        self.draining.get_or_insert(Draining { until: now + DRAIN, last_word: LastWord::Awaited });
    }

    /// Says why the job is over and closes our side. Of a frame that has `begun` to leave, zeros follow: its numbers do not count any
    /// more, and what they were may be half written.
    pub(crate) fn say_last(&mut self, begun: Option<Header>, failure: &[u8]) -> Result<(), StreamError> {
        let zeros;
        let mut frames = Vec::with_capacity(2);
        if let Some(header) = begun.filter(|_| self.stream.unfinished() > 0) {
            let is_placed = self.is_shm() && header.operation.carries_tensor();
            zeros = vec![0; if is_placed { 0 } else { header.length as usize }];
            frames.push(Outgoing { header, payload: &zeros });
        }
        let header = Header { length: failure.len() as u32, ..Header::bare(Operation::Failure) };
        frames.push(Outgoing { header, payload: failure });
        self.stream.send(&frames)?;
        self.stream.announce()?;
        Ok(self.stream.end_sending()?)
    }

    /// Throws away some of what has come; `true` once nothing more will come.
    pub(crate) fn discard(&mut self) -> bool {
        self.stream.discard()
    }

    /// From now on this lane only says what it still has to say, and closes.
    pub(crate) fn drain(&mut self, now: Instant) {
        self.draining = Some(Draining { until: now + DRAIN, last_word: LastWord::Queued });
    }

    /// Whether a draining lane has had its time.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        self.draining.is_some_and(|draining| now >= draining.until)
    }

    fn shut_if_drained(&mut self) -> Result<(), StreamError> {
        if let Some(draining) = &mut self.draining
            && draining.last_word == LastWord::Queued
        {
            draining.last_word = LastWord::Said;
            self.stream.end_sending()?;
        }
        Ok(())
    }

    /// Looks at the clock: whether a heartbeat is due.
    pub(crate) fn wants_heartbeat(&self, now: Instant, dead_after: Duration) -> bool {
        self.draining.is_none()
            && !self.is_cut
            && now.duration_since(self.last_sent) >= HEARTBEAT_MAX.min(dead_after / 4)
    }

    /// Looks at the clock: what is to be said about the worker, once per change.
    pub(crate) fn pulse(&mut self, now: Instant, dead_after: Duration) -> Option<Pulse> {
        if self.draining.is_some() {
            return None;
        }
        let silence = now.duration_since(self.last_heard);
        if silence >= dead_after {
            return Some(Pulse::Dead(silence));
        }
        let silent = silence >= SILENT_AFTER.min(dead_after / 2);
        let changed = silent != self.reported_silent;
        self.reported_silent = silent;
        changed.then_some(if silent { Pulse::Silent(silence) } else { Pulse::HeardAgain })
    }

    /// The core itself stood still for `pause`; that is no silence of the worker's.
    pub(crate) fn forgive(&mut self, pause: Duration) {
        self.last_heard += pause;
    }
}

impl AsFd for Lane {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.stream.close();
    }
}

/// Takes the most urgent frames out of the port's outbox.
fn pick(shard: &mut Shard, port: u32, picks: &mut [Pick; BATCH_FRAMES]) -> usize {
    let outbox = &mut shard.outboxes[port as usize];
    let mut count = 0;
    let mut add = |pick| {
        picks[count] = pick;
        count += 1;
        count < BATCH_FRAMES
    };
    let mut room = true;
    let mut messages = outbox.messages.len();
    if let Some(begun) = outbox.begun {
        messages -= usize::from(begun.source == Source::Message);
        room = add(Pick::Begun(begun));
    }
    for _ in 0..messages {
        room = room && add(Pick::Message);
    }
    if outbox.norm.is_some() && !outbox.has_begun(Source::Norm) {
        room = room && add(Pick::Norm);
    }
    if outbox.start_at.is_none() {
        outbox.start_at = outbox.start.pop_first().map(|slot| (slot, 0));
    }
    if let Some((slot, part)) = outbox.start_at {
        // One a write: there is one place for it to leave from. Sums wait behind all of them.
        if room && outbox.may_spill() {
            add(Pick::Start(slot, part));
            shard.stage_start(port, slot, part);
        }
        return count;
    }
    for (set, answer) in
        [(&mut outbox.applied, Answer::Applied), (&mut outbox.parameters, Answer::Parameters)]
    {
        while room && let Some(slot) = set.pop_first() {
            room = add(Pick::Answer(slot, answer));
        }
    }
    // One a write: there is one place for it to leave from.
    if room
        && outbox.may_spill()
        && let Some(slot) = outbox.state.pop_first()
    {
        picks[count] = Pick::Answer(slot, shard.stage_state(port, slot));
        count += 1;
    }
    count
}

fn frame<'a>(shard: &'a Shard, port: u32, picks: &[Pick], frames: &mut [Outgoing<'a>]) {
    let begun_message = matches!(picks[0], Pick::Begun(begun) if begun.source == Source::Message);
    let mut messages = shard.outboxes[port as usize].messages.iter().skip(usize::from(begun_message));
    for (frame, pick) in frames.iter_mut().zip(picks) {
        *frame = match *pick {
            Pick::Begun(begun) => {
                Outgoing { header: begun.header, payload: shard.of_source(port, begun.source) }
            }
            Pick::Message => {
                let (header, payload) = messages.next().expect("as many messages as were picked");
                Outgoing { header: *header, payload }
            }
            Pick::Norm => {
                let norm = &shard.outboxes[port as usize].norm;
                let (header, payload) = norm.as_ref().expect("it was picked");
                Outgoing { header: *header, payload }
            }
            Pick::Start(slot, part) => {
                let (header, payload) = shard.start_frame(port, slot, part);
                Outgoing { header, payload }
            }
            Pick::Answer(slot, answer) => {
                let (header, payload) = shard.answer(port, slot, answer);
                Outgoing { header, payload }
            }
        };
    }
}

/// Notes what has left whole (the first `whole`), what has begun (the first `begun`), and puts the rest back.
fn settle(shard: &mut Shard, port: u32, picks: &[Pick], headers: &[Header], whole: usize, begun: usize) {
    for (index, pick) in picks.iter().enumerate() {
        let (is_whole, has_begun) = (index < whole, index < begun);
        let has_arena = shard.has_arena(port);
        let parts = match *pick {
            Pick::Start(slot, _) => shard.start_parts(slot),
            _ => 0,
        };
        let source = match *pick {
            Pick::Answer(slot, Answer::Parameters) if !has_arena => shard.source(port, slot),
            Pick::Answer(_, Answer::State(_)) => Source::Spill,
            _ => Source::Empty,
        };
        // Behind the source, which may depend on what the rank had before.
        if let Pick::Answer(slot, _) = *pick
            && has_begun
        {
            shard.answer_begun(port, slot);
        }
        let outbox = &mut shard.outboxes[port as usize];
        match *pick {
            Pick::Start(slot, part) if has_begun => {
                outbox.start_at = (part + 1 < parts).then_some((slot, part + 1));
                if !is_whole {
                    outbox.begun = Some(Begun { header: headers[index], source: Source::Spill });
                }
            }
            Pick::Begun(first) if is_whole => {
                outbox.begun = None;
                match first.source {
                    Source::Message => drop(outbox.messages.pop_front()),
                    Source::Norm => outbox.norm = None,
                    Source::Model(_)
                    | Source::Change(_)
                    | Source::Sum(_)
                    | Source::Total(_)
                    | Source::Spill
                    | Source::Empty => {}
                }
            }
            Pick::Norm if is_whole => outbox.norm = None,
            Pick::Norm if has_begun => {
                outbox.begun = Some(Begun { header: headers[index], source: Source::Norm });
            }
            Pick::Message if is_whole => {
                outbox.messages.pop_front();
            }
            Pick::Answer(slot, answer) if !has_begun => outbox.owe(slot, answer),
            Pick::Message if has_begun => {
                outbox.begun = Some(Begun { header: headers[index], source: Source::Message });
            }
            Pick::Answer(..) if !is_whole => {
                outbox.begun = Some(Begun { header: headers[index], source });
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use paramhub_core::key::Key;

    use super::*;
    use crate::core::shard::tests::shard;

    #[test]
    fn a_rank_that_is_owed_much_lets_the_others_have_their_turn() {
        const CHUNKS: u32 = 1024;
        let mut shard = shard(1, vec![Key::new("w", [u64::from(CHUNKS) * 4096])], |settings| {
            settings.chunk_bytes = 16 << 10;
        });
        for slot in 0..CHUNKS {
            let header = Header { chunk: slot, ..Header::bare(Operation::Pull) };
            shard.frame(0, &header, Payload::Here(&[])).unwrap();
        }
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut worker = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = listener.accept().unwrap().0;
        // It takes whatever comes, so that nothing but the budget ends a turn before all has left.
        let reader = std::thread::spawn(move || std::io::copy(&mut worker, &mut io::sink()).unwrap());
        let now = Instant::now();
        let arrival = Arrival { socket: socket.into(), memory: None };
        let mut lane = Lane::new(arrival.connect(Direction::ToHub, 16 << 10).unwrap(), 0, 0, now);
        let (mut turns, mut sent_before) = (0, 0);
        while lane.flush(&mut shard, now).unwrap() != Flushed::All {
            let sent = shard.counters().bytes_sent;
            let most = (SEND_BUDGET_BYTES + BATCH_FRAMES * ((16 << 10) + 16)) as u64;
            assert!(sent - sent_before <= most, "{} bytes in one turn", sent - sent_before);
            (turns, sent_before) = (turns + 1, sent);
        }
        assert!(turns >= 8, "{turns} turns");
        drop(lane);
        assert_eq!(reader.join().unwrap(), u64::from(CHUNKS) * ((16 << 10) + 16));
    }
}
