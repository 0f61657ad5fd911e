//! Frames over two rings and a Unix socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use paramhub_core::wire::{Direction, HEADER_BYTES};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::ring::{Reader, Writer, prepare, ring_bytes};
use super::segment::Segment;
use crate::assembly::Assembly;
use crate::stream::{FrameSink, Outgoing, ReceiveError, Received, Scratch, Sent, Stream, StreamError};

/// Bytes taken from the ring at once if tensors are in an arena: few headers, since each may stand for a
/// chunk that is processed before the next is read.
const AHEAD_BYTES: usize = 8 * HEADER_BYTES;

/// Bytes of the segment that holds both rings of a stream, `capacity` bytes each, a power of two.
pub const fn rings_bytes(capacity: usize) -> usize {
    2 * ring_bytes(capacity)
}

/// A new segment with both rings of a stream, which one side makes and the other [`adopts`](Segment::adopt).
pub fn create_rings(capacity: usize) -> io::Result<Segment> {
    let rings = Segment::create("paramhub-rings", rings_bytes(capacity))?;
    for base in [0, ring_bytes(capacity)] {
        prepare(&rings, base);
    }
    Ok(rings)
}

/// A [`Stream`] between processes of one host.
///
/// With an arena ([`with_arena`](Self::with_arena), on which both ends agree), the payloads of frames that
/// carry tensors are in it and do not travel: such frames are sent with an empty payload and passed to
/// [`FrameSink::placed`].
///
/// A thread waits for it differently than for TCP: the poller reports its socket readable when the other side
/// has written data or made room, and never writable. After a [`receive`](Stream::receive) that returned
/// `more`, data may be left without a report.
#[derive(Debug)]
pub struct ShmStream {
    socket: OwnedFd,
    reader: Reader,
    writer: Writer,
    assembly: Assembly,
    has_arena: bool,
    /// Whether and how the other process has closed the socket, or died.
    peer_closed: Option<PeerClosed>,
    receiving_is_over: bool,
    /// Bytes that may be sent while the other side sleeps.
    patience_bytes: usize,
    /// Bytes sent since the other side was last known to be awake or woken.
    unannounced: usize,
    unfinished: usize,
    /// The header of the unfinished frame.
    begun: [u8; HEADER_BYTES],
    bytes_received: u64,
    bytes_sent: u64,
    bells_rung: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerClosed {
    InOrder,
    /// The socket was closed with bells unread.
    Reset,
}

impl ShmStream {
    /// Takes a connected Unix socket that carries nothing else, and the rings that one side has
    /// [created](create_rings). The worker's ring comes first in them.
    ///
    /// `direction` is that of the frames received, `frame_bytes_max` bounds their tensor payload, as for
    /// [`TcpStream::new`](crate::TcpStream::new).
    ///
    /// # Panics
    /// If the segment has another size.
    pub fn new(
        socket: impl Into<OwnedFd>,
        rings: Arc<Segment>,
        capacity: usize,
        direction: Direction,
        frame_bytes_max: usize,
    ) -> io::Result<Self> {
        assert_eq!(rings.len(), rings_bytes(capacity), "the rings' segment has another size");
        let socket = socket.into();
        rustix::io::ioctl_fionbio(&socket, true)?;
        let (mine, theirs) = match direction {
            Direction::ToHub => (ring_bytes(capacity), 0),
            Direction::ToWorker => (0, ring_bytes(capacity)),
            Direction::Both => panic!("a stream receives from workers or from a hub"),
        };
        Ok(ShmStream {
            socket,
            reader: Reader::new(rings.clone(), theirs, capacity),
            writer: Writer::new(rings, mine, capacity),
            assembly: Assembly::new(direction, frame_bytes_max),
            has_arena: false,
            peer_closed: None,
            receiving_is_over: false,
            patience_bytes: 0,
            unannounced: 0,
            unfinished: 0,
            begun: [0; HEADER_BYTES],
            bytes_received: 0,
            bytes_sent: 0,
            bells_rung: 0,
        })
    }

    /// The same with tensors in an arena, on both ends.
    pub fn with_arena(mut self) -> Self {
        self.has_arena = true;
        self.assembly = self.assembly.with_arena();
        self
    }

    /// Leaves a sleeping peer asleep until `bytes` bytes, with payloads in arenas, have been sent, or until
    /// [`announce`](Self::announce): a wake-up costs both sides more than a few frames.
    pub fn with_patience(mut self, bytes: usize) -> Self {
        self.patience_bytes = bytes;
        self
    }

    /// Wakes a peer that sleeps although something was sent. Call it before this side waits for anything.
    pub fn announce(&mut self) -> Result<(), StreamError> {
        if std::mem::take(&mut self.unannounced) > 0 && self.writer.wakes_reader() {
            self.ring_bell()?;
        }
        Ok(())
    }

    /// Whether [`announce`](Self::announce) may have a peer to wake.
    pub fn is_unannounced(&self) -> bool {
        self.unannounced > 0
    }

    /// Announces that nothing more will be sent. The other direction continues.
    pub fn end_sending(&mut self) -> io::Result<()> {
        if self.writer.end() {
            self.ring_bell().map_err(|error| io::Error::other(error.to_string()))?;
        }
        Ok(())
    }

    /// Drops what has arrived; `true` once no more will arrive.
    pub fn discard(&mut self) -> bool {
        // A peer that never stops sending must not block the thread here.
        for _ in 0..16 {
            let ended = self.reader.has_ended();
            self.drain_bell();
            if self.reader.discard().is_err() || ended || self.peer_closed.is_some() {
                return true;
            }
            match self.reader.sleep() {
                Ok(true) => return false,
                Ok(false) => {}
                Err(_) => return true,
            }
        }
        false
    }

    /// How often the other side had to be woken, with a system call each time.
    pub fn bells_rung(&self) -> u64 {
        self.bells_rung
    }

    fn receive_frames<S: FrameSink>(
        &mut self,
        sink: &mut S,
        scratch: &mut Scratch,
        budget: usize,
    ) -> Result<Received, ReceiveError<S::Error>> {
        let scratch = scratch.bytes_mut();
        let ahead = if self.has_arena { &mut scratch[..AHEAD_BYTES] } else { scratch };
        let (mut received, mut moved) = (Received::default(), 0);
        loop {
            let left = budget.saturating_sub(received.bytes + moved).max(HEADER_BYTES);
            // This precedes the look at the ring, so that everything written before the end is read before
            // it.
            let (ended, peer_closed) = (self.reader.has_ended(), self.peer_closed);
            let reader = &mut self.reader;
            let filled = self.assembly.fill(sink, ahead, left, |slices| {
                reader.read(slices).map_err(|error| ReceiveError::Stream(StreamError::Io(error)))
            })?;
            if filled.bytes == 0 {
                // A peer that has ended in order may leave bells unread.
                if peer_closed == Some(PeerClosed::Reset) && !ended {
                    return Err(StreamError::Closed { reset: true }.into());
                }
                if ended || peer_closed.is_some() {
                    if !self.assembly.at_boundary() {
                        return Err(StreamError::Closed { reset: false }.into());
                    }
                    received.closed = true;
                    return Ok(received);
                }
                self.drain_bell();
                if self.peer_closed.is_none() && self.reader.sleep().map_err(StreamError::Io)? {
                    return Ok(received);
                }
                continue;
            }
            self.bytes_received += filled.bytes as u64;
            received.bytes += filled.bytes;
            if self.reader.wakes_writer() {
                // A peer that cannot be woken is gone, as the next look at the socket shows.
                let _ = self.ring_bell();
            }
            let placed = self.assembly.absorb(sink, &filled, ahead)?;
            received.bytes += placed;
            self.bytes_received += placed as u64;
            moved += sink.moved();
            if received.bytes + moved >= budget {
                received.more = true;
                return Ok(received);
            }
        }
    }

    /// Takes from the socket the bells that woke this side, and notes its end. More bells than an honest peer
    /// ever leaves there stay for the next report, so that a peer that rings without end does not block the
    /// thread here.
    fn drain_bell(&mut self) {
        let mut bytes = [0_u8; 256];
        let taken = rustix::io::retry_on_intr(|| {
            rustix::net::recv(&self.socket, &mut bytes, RecvFlags::DONTWAIT).map(|(taken, _)| taken)
        });
        match taken {
            Ok(0) => {
                self.peer_closed.get_or_insert(PeerClosed::InOrder);
            }
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(_) => {
                self.peer_closed.get_or_insert(PeerClosed::Reset);
            }
        }
    }

    fn ring_bell(&mut self) -> Result<(), StreamError> {
        self.bells_rung += 1;
        loop {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.socket, &[1], flags) {
                // The socket is full of earlier bells: the peer will wake.
                Ok(_) | Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(StreamError::from_errno(errno)),
            }
        }
    }

    fn publish(&mut self, bytes: usize) -> Result<(), StreamError> {
        self.writer.publish();
        self.unannounced += bytes;
        if self.unannounced > self.patience_bytes { self.announce() } else { Ok(()) }
    }
}

impl Stream for ShmStream {
    fn receive<S: FrameSink>(
        &mut self,
        sink: &mut S,
        scratch: &mut Scratch,
        budget: usize,
    ) -> Result<Received, ReceiveError<S::Error>> {
        if self.receiving_is_over {
            return Err(StreamError::Closed { reset: true }.into());
        }
        let result = self.receive_frames(sink, scratch, budget);
        self.receiving_is_over = result.is_err();
        result
    }

    fn send(&mut self, frames: &[Outgoing<'_>]) -> Result<Sent, StreamError> {
        if self.peer_closed.is_some() {
            return Err(StreamError::Closed { reset: true });
        }
        let mut sent = Sent::default();
        for frame in frames {
            let is_placed = self.has_arena && frame.header.operation.carries_tensor();
            let length = if is_placed { 0 } else { frame.header.length as usize };
            assert_eq!(length, frame.payload.len(), "{:?} lies", frame.header);
            let head = frame.header.encode();
            if self.unfinished > 0 {
                assert_eq!(head, self.begun, "the frame that has begun must be finished first");
            }
            let whole = HEADER_BYTES + length;
            while self.unfinished < whole {
                let part = match self.unfinished.checked_sub(HEADER_BYTES) {
                    None => &head[self.unfinished..],
                    Some(gone) => &frame.payload[gone..],
                };
                let wrote = self.writer.write(part)?;
                self.unfinished += wrote;
                sent.bytes += wrote;
                if wrote == 0 {
                    // The peer must be awake to make room.
                    self.publish(sent.bytes)?;
                    self.announce()?;
                    if self.writer.sleep()? {
                        self.begun = head;
                        sent.blocked = true;
                        self.bytes_sent += sent.bytes as u64;
                        return Ok(sent);
                    }
                }
            }
            self.unfinished = 0;
            sent.frames += 1;
            sent.bytes += frame.header.length as usize - length;
        }
        self.bytes_sent += sent.bytes as u64;
        self.publish(sent.bytes)?;
        Ok(sent)
    }

    fn unfinished(&self) -> usize {
        self.unfinished
    }

    fn bytes_received(&self) -> u64 {
        self.bytes_received
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }
}

impl AsFd for ShmStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
