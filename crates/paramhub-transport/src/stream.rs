//! What every transport does: whole frames in, frames out, never waiting.

use std::io;

use paramhub_core::wire::{FrameError, Header};
use thiserror::Error;

/// Bytes a [`Scratch`] has by default. 256 KiB reads are where bare loopback TCP peaks; it still fits a core's L2.
pub const SCRATCH_BYTES_DEFAULT: usize = 256 << 10;

/// A frame to send. `header.length` equals `payload.len()`, or the payload lies in an arena and is empty here.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// Sent ahead of the payload.
    pub header: Header,
    /// Sent from where it lies.
    pub payload: &'a [u8],
}

/// What a receiver wants done with a frame whose header has arrived.
#[derive(Debug)]
pub enum Landing<'a> {
    /// The payload is written straight into this slice of exactly `header.length` bytes: no copy in user space beyond
    /// what a small read-ahead has already taken.
    InPlace(&'a mut [u8]),
    /// The payload stays in the transport's own buffer and is handed over whole, cache-hot.
    Staged,
}

/// Takes frames off a stream. A frame is handed over only once its whole payload is here: a contribution is applied whole
/// or not at all.
pub trait FrameSink {
    /// Why the sink refuses a frame. It ends the receiving side of the stream.
    type Error;

    /// A header arrived, decoded and bounded. Asked once per frame if the answer is `Staged`; after `InPlace` it is asked
    /// again for the same frame before every further read, and must answer with the same slice, or with an error if the
    /// memory is no longer to be written.
    fn landing(&mut self, header: &Header) -> Result<Landing<'_>, Self::Error>;

    /// The whole frame is here. `payload` holds `header.length` bytes of any alignment if it landed `Staged`, and is
    /// `None` if it landed `InPlace`.
    fn frame(&mut self, header: &Header, payload: Option<&[u8]>) -> Result<(), Self::Error>;

    /// The whole frame is here, and its payload lies where both ends agreed. Only streams with an arena call it, for frames
    /// that carry tensors; it is their `landing` and their `frame` in one.
    fn placed(&mut self, header: &Header) -> Result<(), Self::Error> {
        unreachable!("{header:?} lies in an arena that this side does not have");
    }

    /// Bytes that the frames since the last call made the sink copy beside their own payloads. They count for the budget of
    /// [`Stream::receive`]: a header of 16 bytes may ask for a whole chunk.
    fn moved(&mut self) -> usize {
        0
    }
}

/// One connection. Both directions are independent: one may fail while the other goes on.
pub trait Stream {
    /// Receives until nothing is left to read for now, the peer closed, or about `budget` bytes were taken, so that one
    /// stream cannot starve the others. Frames go to `sink` in order.
    ///
    /// After an error the receiving side is over: every later call reports [`StreamError::Closed`].
    fn receive<S: FrameSink>(
        &mut self,
        sink: &mut S,
        scratch: &mut Scratch,
        budget: usize,
    ) -> Result<Received, ReceiveError<S::Error>>;

    /// Writes `frames` in order with as few system calls as possible, until all are written or the peer takes no more.
    ///
    /// Where the last write stopped inside a frame the stream remembers how far it came ([`unfinished`](Self::unfinished)):
    /// the first frame of the next call must be that very frame, with the same header and the same payload bytes, though
    /// they may lie elsewhere in memory by then.
    ///
    /// # Panics
    /// If a header's length is not its payload's, or if the next call begins with another frame than the unfinished one.
    fn send(&mut self, frames: &[Outgoing<'_>]) -> Result<Sent, StreamError>;

    /// Bytes, header included, of the next `send`'s first frame that have already left. 0 at a frame boundary; above it
    /// that frame has begun and can no longer be replaced.
    fn unfinished(&self) -> usize;

    /// Bytes received since the stream began, headers included.
    fn bytes_received(&self) -> u64;

    /// Bytes sent since the stream began, headers included.
    fn bytes_sent(&self) -> u64;
}

/// What one [`Stream::receive`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Bytes taken off the stream.
    pub bytes: usize,
    /// It stopped because of the budget and more may be waiting: call again without polling.
    pub more: bool,
    /// The peer ended the stream in order, between two frames; nothing will follow.
    pub closed: bool,
}

/// What one [`Stream::send`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Frames whose last byte was written by this call.
    pub frames: usize,
    /// Bytes written, headers included.
    pub bytes: usize,
    /// It stopped because the peer takes no more for now: wait until the stream is writable.
    pub blocked: bool,
}

/// A thread's receive buffer, shared by all its streams: frames are parsed and handed over straight from it while they
/// are in cache, and only the incomplete tail of a read is kept back per stream.
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
    /// The peer sent something that is no frame. Nothing of it was handed over.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The sink refused a frame.
    #[error("{0}")]
    Sink(E),
}

/// Why a connection broke.
#[derive(Debug, Error)]
pub enum StreamError {
    /// The peer is gone.
    #[error("{}", if *.reset { "the connection was reset by the peer" } else { "the connection ended inside a frame" })]
    Closed {
        /// It was reset, or written to after the peer had closed; otherwise it ended inside a frame.
        reset: bool,
    },
    /// The operating system says.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
}

impl StreamError {
    pub(crate) fn from_errno(errno: rustix::io::Errno) -> Self {
        use rustix::io::Errno;
        match errno {
            Errno::PIPE | Errno::CONNRESET | Errno::CONNABORTED | Errno::NOTCONN => {
                StreamError::Closed { reset: true }
            }
            other => StreamError::Io(other.into()),
        }
    }
}
