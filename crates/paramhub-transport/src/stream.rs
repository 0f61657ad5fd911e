//! What every transport does: it sends and receives whole frames, and never waits.

use std::io;

use paramhub_core::resuming::StreamEnd;
use paramhub_core::wire::{FrameError, Header};
use thiserror::Error;

/// The default size of a [`Scratch`]. Bare loopback TCP is fastest with reads of 256 KiB, and these still fit
/// a core's L2.
pub const SCRATCH_BYTES_DEFAULT: usize = 256 << 10;

/// A frame to send. `header.length` equals `payload.len()`, or the payload is in an arena and this one is
/// empty.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// Sent before the payload.
    pub header: Header,
    /// Sent without a copy.
    pub payload: &'a [u8],
}

/// Where a receiver wants the payload of a frame whose header has arrived.
#[derive(Debug)]
pub enum Landing<'a> {
    /// In this slice of exactly `header.length` bytes. It is written there directly, with no copy in user
    /// space except of what a small read-ahead has already taken.
    InPlace(&'a mut [u8]),
    /// In the transport's own buffer, from which it is passed on whole while it is in cache.
    Staged,
}

/// Takes frames off a stream. It gets a frame only once its whole payload is here: a contribution is applied
/// whole or not at all.
pub trait FrameSink {
    /// Why the sink refuses a frame. It ends the receiving side of the stream.
    type Error;

    /// Called when a header has arrived, decoded and checked. If the answer is `Staged`, this is called once
    /// per frame. After `InPlace` it is called again for the same frame before every further read, and must
    /// return the same slice, or an error if the memory must no longer be written.
    fn landing(&mut self, header: &Header) -> Result<Landing<'_>, Self::Error>;

    /// Called when the whole frame is here. `payload` has `header.length` bytes of any alignment if the frame
    /// landed `Staged`, and is `None` if it landed `InPlace`.
    fn frame(&mut self, header: &Header, payload: Option<&[u8]>) -> Result<(), Self::Error>;

    /// Called when the whole frame is here and its payload is in the arena. Only streams with an arena call
    /// this, for frames that carry tensors; it replaces both `landing` and `frame`.
    fn placed(&mut self, header: &Header) -> Result<(), Self::Error> {
        unreachable!("{header:?} lies in an arena that this side does not have");
    }

    /// Bytes other than their own payloads that the frames since the last call made the sink copy. They count
    /// towards the budget of [`Stream::receive`]: a header of 16 bytes may request a whole chunk.
    fn moved(&mut self) -> usize {
        0
    }
}

/// One connection. Its directions are independent: one may fail while the other continues.
pub trait Stream {
    /// Receives until nothing is left to read for now, the peer closed, or about `budget` bytes were taken, so that one
    /// stream cannot starve the others. Frames go to `sink` in order.
    ///
    /// After an error the receiving side is closed: every later call returns [`StreamError::Closed`].
    fn receive<S: FrameSink>(
        &mut self,
        sink: &mut S,
        scratch: &mut Scratch,
        budget: usize,
    ) -> Result<Received, ReceiveError<S::Error>>;

    /// Writes `frames` in order with as few system calls as possible, until all are written or the peer takes
    /// no more.
    ///
    /// If the last write stopped inside a frame, the stream keeps how much of it has left
    /// ([`unfinished`](Self::unfinished)). The first frame of the next call must then be the same frame, with
    /// the same header and the same payload bytes, although these may be elsewhere in memory by then.
    ///
    /// # Panics
    /// If a header's length is not its payload's, or if the next call begins with a frame other than the
    /// unfinished one.
    fn send(&mut self, frames: &[Outgoing<'_>]) -> Result<Sent, StreamError>;

    /// Whether bytes of frames that `send` took are still here, because the socket had no room: `send` is to be called
    /// again once it has, with or without frames. Only encrypted streams keep any.
    fn has_unsent(&self) -> bool {
        false
    }

    /// Bytes, with the header, of the next `send`'s first frame that have already left. 0 at a frame
    /// boundary; otherwise that frame has begun and can no longer be replaced.
    fn unfinished(&self) -> usize;

    /// Bytes received since the stream began, headers included.
    fn bytes_received(&self) -> u64;

    /// Bytes sent since the stream began, headers included.
    fn bytes_sent(&self) -> u64;
}

/// The result of one [`Stream::receive`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Bytes taken off the stream.
    pub bytes: usize,
    /// Whether the budget stopped it and more may be waiting: call again without polling.
    pub more: bool,
    /// Whether the peer ended the stream in order, between two frames; nothing will follow.
    pub closed: bool,
}

/// The result of one [`Stream::send`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Frames whose last byte was written by this call.
    pub frames: usize,
    /// Bytes written, headers included.
    pub bytes: usize,
    /// Whether it stopped because the peer takes no more for now: wait until the stream is writable.
    pub blocked: bool,
}

/// A thread's receive buffer, which all its streams share. Frames are parsed in it and passed on from it
/// while they are in cache; only the incomplete end of a read is kept for each stream.
#[derive(Debug)]
pub struct Scratch {
    bytes: Box<[u8]>,
}

impl Scratch {
    /// A scratch of `bytes` bytes, at least 4 KiB. It bounds one read, not a frame.
    pub fn new(bytes: usize) -> Self {
        Scratch { bytes: vec![0; bytes.max(4 << 10)].into_boxed_slice() }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new(SCRATCH_BYTES_DEFAULT)
    }
}

/// Why a receive ended.
#[derive(Debug, Error)]
pub enum ReceiveError<E> {
    /// The connection broke.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The peer sent something that is not a valid frame. Nothing of it was passed on.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The sink refused a frame.
    #[error("{0}")]
    Sink(E),
}

/// Why a connection broke.
#[derive(Debug, Error)]
pub enum StreamError {
    /// The peer had closed the connection in order before this was written.
    #[error("the peer had closed the connection")]
    ClosedByPeer,
    /// The peer is gone.
    #[error("{}", if *.reset { "the connection was reset by the peer" } else { "the connection ended inside a frame" })]
    Closed {
        /// Whether it was reset; otherwise it ended inside a frame.
        reset: bool,
    },
    /// What came is not what the peer has encrypted, or not in whole frames.
    #[error("what came was altered on the way, or does not come from the peer: it cannot be decrypted")]
    Forged,
    /// An error of the operating system.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
}

impl StreamError {
    /// How the stream has ended; `None` if what came on it cannot be trusted.
    pub fn end(&self) -> Option<StreamEnd> {
        match self {
            StreamError::ClosedByPeer | StreamError::Closed { reset: false } => Some(StreamEnd::Closed),
            StreamError::Closed { reset: true } => Some(StreamEnd::Reset),
            StreamError::Io(_) => Some(StreamEnd::PathFailed),
            StreamError::Forged => None,
        }
    }

    pub(crate) fn from_errno(errno: rustix::io::Errno) -> Self {
        use rustix::io::Errno;
        match errno {
            // The system says so where the end of the peer's frames has come before the reset that the write provoked.
            Errno::PIPE => StreamError::ClosedByPeer,
            Errno::CONNRESET | Errno::CONNABORTED | Errno::NOTCONN => StreamError::Closed { reset: true },
            other => StreamError::Io(other.into()),
        }
    }
}
