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

/// What is taken from the ring at once where tensors lie in an arena: few headers, since each may stand for a chunk that
/// is worked on before the next is looked at.
const AHEAD_BYTES: usize = 8 * HEADER_BYTES;

/// Bytes of the segment that holds both rings of a stream, `capacity` bytes each, a power of two.
pub const fn rings_bytes(capacity: usize) -> usize {
    2 * ring_bytes(capacity)
}

/// A new segment with both rings of a stream, for one side to make and the other to
/// [`adopt`](Segment::adopt).
pub fn create_rings(capacity: usize) -> io::Result<Segment> {
    let rings = Segment::create("paramhub-rings", rings_bytes(capacity))?;
    for base in [0, ring_bytes(capacity)] {
        prepare(&rings, base);
    }
    Ok(rings)
}

/// A [`Stream`] between processes of one host.
///
/// With an arena ([`with_arena`](Self::with_arena), agreed on by both ends), the payloads of frames that carry tensors
/// lie there and do not travel: such frames are sent with an empty payload and are handed to [`FrameSink::placed`].
///
/// It differs from TCP in how a thread waits for it: the poller reports its socket readable when the other side has written
/// something or made room, and never writable. Something may be left to read without a report where a
/// [`receive`](Stream::receive) said `more`.
#[derive(Debug)]
pub struct ShmStream {
    socket: OwnedFd,
    reader: Reader,
    writer: Writer,
    assembly: Assembly,
    has_arena: bool,
    /// The other process has closed the socket, or died.
    hung_up: Option<HungUp>,
    receiving_is_over: bool,
    /// Bytes the other side may be left asleep over.
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
enum HungUp {
    InOrder,
    /// With bells unheard.
    Reset,
}

impl ShmStream {
    /// Takes a connected Unix socket, over which nothing else will be said, and the rings that one side has
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
            hung_up: None,
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

    /// Tensors lie in an arena, on both ends.
    pub fn with_arena(mut self) -> Self {
        self.has_arena = true;
        self.assembly = self.assembly.with_arena();
        self
    }

    /// Lets a sleeping peer sleep until `bytes` bytes, payloads in arenas included, have been sent, or until
    /// [`announce`](Self::announce): waking it costs both sides more than a few frames do.
    pub fn with_patience(mut self, bytes: usize) -> Self {
        self.patience_bytes = bytes;
        self
    }

    /// Wakes a peer that sleeps over something sent. To be called before this side waits for anything.
    pub fn announce(&mut self) -> Result<(), StreamError> {
        if std::mem::take(&mut self.unannounced) > 0 && self.writer.wakes_reader() {
            self.ring_bell()?;
        }
        Ok(())
    }

    /// Whether [`announce`](Self::announce) may have something to say.
    pub fn is_unannounced(&self) -> bool {
        self.unannounced > 0
    }

    /// Says that nothing more will be sent. The other direction goes on.
    pub fn end_sending(&mut self) -> io::Result<()> {
        if self.writer.end() {
            self.ring_bell().map_err(|error| io::Error::other(error.to_string()))?;
        }
        Ok(())
    }

    /// Throws away what has come; `true` once nothing more will.
    pub fn discard(&mut self) -> bool {
        // One that never stops sending must not keep the thread here.
        for _ in 0..16 {
            let ended = self.reader.has_ended();
            self.drain_bell();
            if self.reader.discard().is_err() || ended || self.hung_up.is_some() {
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

    /// Times the other side had to be woken, a system call each.
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
            // Before the ring is looked at: what was written before the end is read before it.
            let (ended, hung_up) = (self.reader.has_ended(), self.hung_up);
            let reader = &mut self.reader;
            let filled = self.assembly.fill(sink, ahead, left, |slices| {
                reader.read(slices).map_err(|error| ReceiveError::Stream(StreamError::Io(error)))
            })?;
            if filled.bytes == 0 {
                // One that has ended may leave bells unheard.
                if hung_up == Some(HungUp::Reset) && !ended {
                    return Err(StreamError::Closed { reset: true }.into());
                }
                if ended || hung_up.is_some() {
                    if !self.assembly.at_boundary() {
                        return Err(StreamError::Closed { reset: false }.into());
                    }
                    received.closed = true;
                    return Ok(received);
                }
                self.drain_bell();
                if self.hung_up.is_none() && self.reader.sleep().map_err(StreamError::Io)? {
                    return Ok(received);
                }
                continue;
            }
            self.bytes_received += filled.bytes as u64;
            received.bytes += filled.bytes;
            if self.reader.wakes_writer() {
                // A peer that cannot be woken has gone, which the next look at the socket tells.
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

    /// Takes from the socket what woke this side, and notes its end. More than an honest peer ever leaves there stays for
    /// the next report, so that one who rings without end keeps no thread here.
    fn drain_bell(&mut self) {
        let mut bytes = [0_u8; 256];
        let taken = rustix::io::retry_on_intr(|| {
            rustix::net::recv(&self.socket, &mut bytes, RecvFlags::DONTWAIT).map(|(taken, _)| taken)
        });
        match taken {
            Ok(0) => {
                self.hung_up.get_or_insert(HungUp::InOrder);
            }
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(_) => {
                self.hung_up.get_or_insert(HungUp::Reset);
            }
        }
    }

    fn ring_bell(&mut self) -> Result<(), StreamError> {
        self.bells_rung += 1;
        loop {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.socket, &[1], flags) {
                // Full of earlier bells: it will wake.
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
        if self.hung_up.is_some() {
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
                    // Whoever is to make room must be awake.
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
