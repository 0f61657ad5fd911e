//! One port's stream on a core: it takes frames to its shard and sends answers from it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use paramhub_core::between_sites;
use paramhub_core::liveness::{FINAL_MESSAGE_TIMEOUT, LivenessChange, LivenessRules, PeerLiveness};
use paramhub_core::resuming::{HubWait, StreamEnd};
use paramhub_core::wire::{Direction, Header, Operation};
use paramhub_transport::shm::RING_BYTES_DEFAULT;
use paramhub_transport::{
    Connection, FrameSink, Interest, Landing, Outgoing, ReceiveError, Scratch, ShmStream, Stream,
    StreamError, TcpStream,
};

use paramhub_trust::StreamKeys;

use super::fault::Fault;
use super::outbox::{BATCH_FRAMES, NextFrame};
use super::shard::{CheckedHeader, Payload, Shard};
use crate::local::LocalMemory;

/// The bytes that a core takes from one stream before it serves the others: about one read into the scratch
/// buffer. So the answers that a chunk's last contribution causes leave while they are in cache.
const RECEIVE_BUDGET_BYTES: usize = 256 << 10;
/// The bytes that a core sends to one stream before it serves the others, unless a single write takes more.
const SEND_BUDGET_BYTES: usize = 1 << 20;
/// The bytes that may be sent to a worker through shared memory while it sleeps, because to wake it costs
/// both sides more than a few frames. They are about a third of a millisecond's work. The core wakes such
/// workers at the latest before it sleeps itself.
const PATIENCE_BYTES: usize = 4 << 20;

/// The hub's state of the stream of one port. The shard's exchange decides what to send; the lane keeps how
/// much has been sent.
pub(crate) struct Lane {
    stream: Connection,
    /// The number of the shard on its core.
    pub(crate) shard: usize,
    pub(crate) port: u32,
    liveness: PeerLiveness,
    /// The header of the frame of which a part has arrived.
    begun: Option<CheckedHeader>,
    /// Whether frames wait until the peer takes more.
    pub(crate) waits_writable: bool,
    pub(crate) readiness: Readiness,
    /// Set once the stream is broken and another may replace it.
    cut: Option<Cut>,
    /// `None` while the stream is in use.
    draining: Option<Draining>,
}

/// What a lane can do at its next turn on the core.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Readiness {
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

impl Readiness {
    pub(crate) fn is_any(self) -> bool {
        self.readable || self.writable
    }
}

/// The end of a stream whose input the lane drops, because the worker violated the protocol or the job is
/// over.
#[derive(Clone, Copy)]
struct Draining {
    /// The time at which the stream is closed, whatever has been sent by then.
    until: Instant,
    /// How far the lane is with the last message; once it is sent, the hub closes its side.
    final_message: FinalMessage,
}

#[derive(Clone, Copy, PartialEq)]
enum FinalMessage {
    /// The job controller has not decided yet what the peer is told.
    Awaited,
    /// The message is in the outbox.
    Queued,
    Sent,
}

/// The state of a lane after a receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ReceiveOutcome {
    /// More may come.
    Open,
    /// More is there already, and shared memory does not report it again.
    More,
    /// The peer has closed the stream in order.
    Closed,
    /// The stream broke, and another may replace it.
    Cut(Cut),
}

/// The end of a stream that another may replace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// When the worker is lost; `None` if its silence decides that.
    until: Option<Instant>,
    reason: String,
}

/// Hands the frames that arrive at a port to the port's shard.
struct ShardSink<'a> {
    shard: &'a mut Shard,
    port: u32,
    /// The [`Lane`]'s field, which keeps the header from one receive to the next.
    begun: &'a mut Option<CheckedHeader>,
}

impl FrameSink for ShardSink<'_> {
    type Error = Fault;

    fn landing(&mut self, header: &Header) -> Result<Landing<'_>, Fault> {
        *self.begun = Some(self.shard.check(self.port, header)?);
        Ok(Landing::Staged)
    }

    fn frame(&mut self, _: &Header, payload: Option<&[u8]>) -> Result<(), Fault> {
        let checked = self.begun.take().expect("a frame lands before it is whole");
        self.shard.frame(self.port, &checked, Payload::Here(payload.unwrap_or_default()))
    }

    fn placed(&mut self, header: &Header) -> Result<(), Fault> {
        let checked = self.shard.check(self.port, header)?;
        self.shard.frame(self.port, &checked, Payload::InArena)
    }

    fn moved(&mut self) -> usize {
        self.shard.take_copied()
    }
}

/// A stream whose handshake is done.
#[derive(Debug)]
pub(crate) struct AcceptedStream {
    pub(crate) socket: OwnedFd,
    pub(crate) carrier: Carrier,
}

/// The way in which the frames of a stream travel.
#[derive(Debug)]
pub(crate) enum Carrier {
    /// Over TCP; encrypted, if there are keys.
    Tcp(Option<StreamKeys>),
    /// Through memory that a worker on this host shares.
    Memory(LocalMemory),
}

impl AcceptedStream {
    /// The memory that carries the tensors; `None` if the frames go over TCP.
    pub(crate) fn memory(&self) -> Option<&LocalMemory> {
        match &self.carrier {
            Carrier::Tcp(_) => None,
            Carrier::Memory(memory) => Some(memory),
        }
    }

    /// Makes the connection over which the port exchanges frames. `direction` is that of the frames which
    /// arrive here, and `frame_bytes_max` bounds the bytes of their payloads.
    pub(crate) fn connect(self, direction: Direction, frame_bytes_max: usize) -> io::Result<Connection> {
        let max = frame_bytes_max;
        Ok(match self.carrier {
            Carrier::Tcp(keys) => {
                let stream = TcpStream::new(self.socket, direction, max)?;
                Connection::Tcp(stream.with_encryption(keys.as_ref()))
            }
            Carrier::Memory(memory) => {
                let stream = ShmStream::new(self.socket, memory.rings, RING_BYTES_DEFAULT, direction, max)?;
                Connection::Shm(stream.with_arena().with_patience(PATIENCE_BYTES))
            }
        })
    }
}

/// How much a flush has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flushed {
    /// Everything that the shard owed the port has been sent.
    All,
    /// As much has been sent as one turn allows.
    Some,
    /// As much has been sent as the peer takes for now.
    Blocked,
}

impl Lane {
    pub(crate) fn new(stream: Connection, shard: usize, port: u32, now: Instant) -> Self {
        Lane {
            stream,
            shard,
            port,
            liveness: PeerLiveness::new(now),
            begun: None,
            waits_writable: false,
            readiness: Readiness::default(),
            cut: None,
            draining: None,
        }
    }

    /// Wakes the worker if something was sent while it may have slept.
    pub(crate) fn announce(&mut self) -> Result<(), StreamError> {
        self.stream.announce()
    }

    /// Returns whether something was sent while the worker may have slept, so that it must be woken.
    pub(crate) fn is_unannounced(&self) -> bool {
        self.stream.is_unannounced()
    }

    /// Returns whether the frames go through shared memory.
    pub(crate) fn is_shm(&self) -> bool {
        self.stream.is_shm()
    }

    /// The events of the stream for which to poll.
    pub(crate) fn interest(&self) -> Interest {
        self.stream.interest(self.waits_writable)
    }

    /// Returns whether frames wait for room in a ring. Its peer rings the doorbell both for room and for
    /// data, so any event may then mean that there is room.
    pub(crate) fn waits_for_doorbell(&self) -> bool {
        self.waits_writable && self.stream.is_shm()
    }

    /// Notes that the stream is broken and another may replace it; returns whether that was not known.
    pub(crate) fn cut(&mut self, cut: Cut) -> bool {
        let is_new = self.cut.is_none();
        self.cut.get_or_insert(cut);
        is_new
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.cut.is_some()
    }

    /// When the worker is lost unless another stream has replaced this one, if there is such a time.
    pub(crate) fn cut_until(&self) -> Option<Instant> {
        self.cut.as_ref()?.until
    }

    /// Why the stream was cut.
    pub(crate) fn cut_reason(&self) -> &str {
        self.cut.as_ref().map_or("", |cut| &cut.reason)
    }

    /// Returns the cut, if the error may be the network's fault, so that another stream may replace this one.
    pub(crate) fn cut_by(&self, shard: &Shard, error: &StreamError, now: Instant) -> Option<Cut> {
        self.cut_at_end(shard, error.end()?, error.to_string(), now)
    }

    fn cut_at_end(&self, shard: &Shard, end: StreamEnd, reason: String, now: Instant) -> Option<Cut> {
        if self.is_shm() || self.draining.is_some() {
            return None;
        }
        let plan = shard.plan();
        let side = plan.ports.side(self.port);
        let until = match between_sites::hub_waits(&plan.resuming, side, end)? {
            HubWait::For(grace) => Some(now + grace),
            HubWait::UntilDead => None,
        };
        Some(Cut { until, reason })
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.is_some()
    }

    /// Takes what has arrived to the shard, up to the budget. A draining lane drops it.
    pub(crate) fn receive(
        &mut self,
        shard: &mut Shard,
        scratch: &mut Scratch,
        now: Instant,
    ) -> Result<ReceiveOutcome, Fault> {
        if self.is_draining() {
            return Ok(if self.stream.discard() { ReceiveOutcome::Closed } else { ReceiveOutcome::Open });
        }
        shard.now = now;
        let mut sink = ShardSink { shard, port: self.port, begun: &mut self.begun };
        match self.stream.receive(&mut sink, scratch, RECEIVE_BUDGET_BYTES) {
            Ok(received) => {
                if received.bytes > 0 {
                    self.liveness.heard(now);
                    shard.count_bytes(received.bytes, 0);
                }
                if received.closed && !shard.has_left(self.port) {
                    let reason = "its connection ended without a leave message".to_string();
                    return match self.cut_at_end(shard, StreamEnd::Closed, reason.clone(), now) {
                        Some(cut) => Ok(ReceiveOutcome::Cut(cut)),
                        None => Err(Fault::Lost(reason)),
                    };
                }
                Ok(match received {
                    received if received.closed => ReceiveOutcome::Closed,
                    received if received.more && self.is_shm() => ReceiveOutcome::More,
                    _ => ReceiveOutcome::Open,
                })
            }
            // A neighbour that has left need not close in order. A site above may lack this hub's Leave.
            Err(ReceiveError::Stream(_)) if shard.has_left(self.port) && !shard.leaves_above(self.port) => {
                Ok(ReceiveOutcome::Closed)
            }
            Err(ReceiveError::Stream(error)) => match self.cut_by(shard, &error, now) {
                Some(cut) => Ok(ReceiveOutcome::Cut(cut)),
                None => Err(Fault::Lost(error.to_string())),
            },
            Err(ReceiveError::Frame(error)) => Err(Fault::Frame(error.to_string())),
            // The worker may have made later steps with the standby, while this hub was cut off from the manager.
            Err(ReceiveError::Sink(fault)) if fault.is_ahead() && shard.has_standby() => {
                Err(Fault::Lost(fault.to_string()))
            }
            Err(ReceiveError::Sink(fault)) => Err(fault),
        }
    }

    /// Sends what the shard owes this port until nothing is left, the peer takes no more or the budget is
    /// used up.
    pub(crate) fn flush(&mut self, shard: &mut Shard, now: Instant) -> Result<Flushed, StreamError> {
        let mut turn_bytes = 0;
        if self.stream.has_unsent() && self.stream.send(&[])?.blocked {
            return Ok(Flushed::Blocked);
        }
        loop {
            let mut picks = [NextFrame::Message; BATCH_FRAMES];
            let count = shard.pick(self.port, &mut picks);
            if count == 0 {
                self.shut_if_drained()?;
                return Ok(Flushed::All);
            }
            let picks = &picks[..count];
            let mut frames =
                [Outgoing { header: Header::bare(Operation::Heartbeat), payload: &[] }; BATCH_FRAMES];
            shard.frames(self.port, picks, &mut frames[..count]);
            let headers: [Header; BATCH_FRAMES] = std::array::from_fn(|index| frames[index].header);
            let sent = self.stream.send(&frames[..count])?;
            if sent.bytes > 0 {
                self.liveness.sent(now);
            }
            let begun_frames = sent.frames + usize::from(self.stream.unfinished() > 0);
            shard.note_sent(self.port, picks, &headers, sent.frames, begun_frames);
            shard.count_bytes(0, sent.bytes);
            turn_bytes += sent.bytes;
            if sent.blocked {
                return Ok(Flushed::Blocked);
            }
            if turn_bytes >= SEND_BUDGET_BYTES {
                return Ok(Flushed::Some);
            }
        }
    }

    /// Ignores whatever the peer sends from now on. The stream stays open for a while, so that the peer can
    /// still be told why the job ends.
    pub(crate) fn mute(&mut self, now: Instant) {
        self.draining.get_or_insert(Draining {
            until: now + FINAL_MESSAGE_TIMEOUT,
            final_message: FinalMessage::Awaited,
        });
    }

    /// Sends the reason why the job is over and closes the hub's side. A frame that has `begun` to leave is
    /// completed with zeros: its numbers no longer count, and the originals may be half overwritten.
    pub(crate) fn send_final(
        &mut self,
        begun: Option<Header>,
        operation: Operation,
        payload: &[u8],
    ) -> Result<(), StreamError> {
        let zeros;
        let mut frames = Vec::with_capacity(2);
        if let Some(header) = begun.filter(|_| self.stream.unfinished() > 0) {
            let is_placed = self.is_shm() && header.operation.carries_tensor();
            zeros = vec![0; if is_placed { 0 } else { header.length as usize }];
            frames.push(Outgoing { header, payload: &zeros });
        }
        let header = Header { length: payload.len() as u32, ..Header::bare(operation) };
        frames.push(Outgoing { header, payload });
        self.stream.send(&frames)?;
        self.stream.announce()?;
        Ok(self.stream.end_sending()?)
    }

    /// Drops some of what has arrived. Returns whether nothing more can arrive.
    pub(crate) fn discard(&mut self) -> bool {
        self.stream.discard()
    }

    /// Ends what the hub sends, after what has been sent.
    pub(crate) fn end_sending(&mut self) -> io::Result<()> {
        self.stream.end_sending()
    }

    /// Lets the lane send what is in its outbox, and nothing after that; it then closes the hub's side.
    /// Whatever arrives is dropped.
    pub(crate) fn drain(&mut self, now: Instant) {
        self.draining =
            Some(Draining { until: now + FINAL_MESSAGE_TIMEOUT, final_message: FinalMessage::Queued });
    }

    /// Returns whether the time of a draining lane is over.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        self.draining.is_some_and(|draining| now >= draining.until)
    }

    /// Closes the hub's side if the final message, which was the last in the outbox, has been sent.
    fn shut_if_drained(&mut self) -> Result<(), StreamError> {
        if let Some(draining) = &mut self.draining
            && draining.final_message == FinalMessage::Queued
        {
            draining.final_message = FinalMessage::Sent;
            self.stream.end_sending()?;
        }
        Ok(())
    }

    /// Returns whether a heartbeat is due.
    pub(crate) fn wants_heartbeat(&self, now: Instant, rules: &LivenessRules) -> bool {
        self.draining.is_none() && !self.is_cut() && self.liveness.is_heartbeat_due(now, rules)
    }

    /// Returns the change in the peer's liveness that is to be reported, if there is one. It returns each
    /// change once.
    pub(crate) fn liveness(&mut self, now: Instant, rules: &LivenessRules) -> Option<LivenessChange> {
        if self.draining.is_some() {
            return None;
        }
        self.liveness.check(now, rules)
    }

    /// Notes that the core itself stood still for `pause`, so that this does not count as silence of the
    /// peer.
    pub(crate) fn forgive(&mut self, pause: Duration, now: Instant) {
        self.liveness.forgive(pause, now);
        if let Some(until) = self.cut.as_mut().and_then(|cut| cut.until.as_mut()) {
            *until += pause;
        }
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
            let checked = shard.check(0, &header).unwrap();
            shard.frame(0, &checked, Payload::Here(&[])).unwrap();
        }
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut worker = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = listener.accept().unwrap().0;
        // The reader takes everything, so only the budget ends a turn before all has left.
        let reader = std::thread::spawn(move || std::io::copy(&mut worker, &mut io::sink()).unwrap());
        let now = Instant::now();
        let accepted = AcceptedStream { socket: socket.into(), carrier: Carrier::Tcp(None) };
        let mut lane = Lane::new(accepted.connect(Direction::ToHub, 16 << 10).unwrap(), 0, 0, now);
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
