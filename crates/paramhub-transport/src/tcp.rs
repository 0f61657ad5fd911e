//! Frames over a TCP connection.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use paramhub_core::wire::{Direction, HEADER_BYTES};
use paramhub_kernels::shared;
use paramhub_trust::StreamKeys;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg, sockopt};

use crate::assembly::{Assembly, Filled};
use crate::encryption::{Encryption, EncryptionError};
use crate::socket;
use crate::stream::{FrameSink, Outgoing, ReceiveError, Received, Scratch, Sent, Stream, StreamError};
use crate::unsent_limit::UnsentLimit;

/// Frames of one `sendmsg`. Their headers take two kilobytes of stack; the kernel takes 1,024 parts.
const BATCH_FRAMES: usize = 128;

/// What an in-place receiver reads beyond the current frame: the next header and whole cache lines of its
/// payload, so that the bulk keeps its alignment. One read still brings many small control frames.
const AHEAD_BYTES: usize = HEADER_BYTES + 256;

/// Bytes of one write: as much as a socket takes at once, and as a cache has room for besides other data. A sender
/// that chooses the frames of a write needs no more of them.
pub const WRITE_BYTES_MAX: usize = 256 << 10;

/// How far a stream reads ahead. Either mode serves either [`Landing`](crate::Landing); the mode decides
/// which of these needs no extra copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveMode {
    /// It reads as much as the scratch takes: for frames that are processed as they arrive and then dropped.
    Staged,
    /// It reads the next header and little more: bulk payloads are read straight to where they land.
    InPlace,
}

/// A [`Stream`] over TCP.
///
/// A read or write that is shorter than requested ends a call without another system call: with a
/// level-triggered [`Poller`](crate::Poller) nothing is lost, and half of the system calls are saved.
#[derive(Debug)]
pub struct TcpStream {
    socket: OwnedFd,
    mode: ReceiveMode,
    assembly: Assembly,
    encryption: Option<Box<Encryption>>,
    /// The bound on what waits in the socket; `None` inside one host, where the send buffer is small.
    unsent_limit: Option<UnsentLimit>,
    receiving_is_over: bool,
    unfinished: usize,
    /// The header of the unfinished frame.
    begun: [u8; HEADER_BYTES],
    bytes_received: u64,
    bytes_sent: u64,
    receive_calls: u64,
    send_calls: u64,
}

impl TcpStream {
    /// Takes a connected socket (a `std::net::TcpStream` or an `OwnedFd`) whose handshake is over, makes it
    /// non-blocking and switches Nagle's delay off. The kernel sizes its buffers. Only the send buffer of a
    /// connection inside one host is fixed, small enough for the processor's cache. Between hosts little waits
    /// that has not been sent, so that what is urgent leaves soon.
    ///
    /// `direction` is that of the frames received: [`Direction::ToHub`] on a hub, [`Direction::ToWorker`] on
    /// a worker, [`Direction::Both`] between hubs. `frame_bytes_max` bounds the tensor payload of a frame
    /// (the job's largest chunk on the wire); a frame that announces more is an error. Room for one such
    /// frame is allocated here and nothing later.
    pub fn new(socket: impl Into<OwnedFd>, direction: Direction, frame_bytes_max: usize) -> io::Result<Self> {
        let socket = socket.into();
        socket::prepare(&socket)?;
        let unsent_limit = (!socket::is_inside_one_host(&socket)).then(UnsentLimit::new);
        if let Some(limit) = &unsent_limit {
            socket::limit_unsent(&socket, limit.bytes())?;
        }
        Ok(TcpStream {
            socket,
            mode: ReceiveMode::Staged,
            assembly: Assembly::new(direction, frame_bytes_max),
            encryption: None,
            unsent_limit,
            receiving_is_over: false,
            unfinished: 0,
            begun: [0; HEADER_BYTES],
            bytes_received: 0,
            bytes_sent: 0,
            receive_calls: 0,
            send_calls: 0,
        })
    }

    /// Selects another mode than [`ReceiveMode::Staged`], which was measured to be faster in both directions:
    /// a copy from a buffer in cache costs less than a system call per chunk.
    pub fn with_receive_mode(mut self, mode: ReceiveMode) -> Self {
        self.mode = mode;
        self
    }

    /// Encrypts the frames in both directions, if there are keys. What is received is then always
    /// [`ReceiveMode::Staged`].
    pub fn with_encryption(self, keys: Option<&StreamKeys>) -> Self {
        let Some(keys) = keys else { return self };
        let encryption = Some(Box::new(Encryption::new(keys, self.assembly.frame_bytes_max())));
        TcpStream { encryption, assembly: self.assembly.of_whole_frames(), ..self }
    }

    /// Fixes the sizes of the socket buffers, which switches the kernel's own sizing off; `None` leaves them
    /// as they are. The kernel doubles the number and caps it (`net.core.wmem_max`, `rmem_max`). With a
    /// buffer smaller than the largest segment (64 KiB on loopback), the speed depends on acknowledgement
    /// timers.
    pub fn with_buffer_bytes(self, send: Option<usize>, receive: Option<usize>) -> io::Result<Self> {
        if let Some(bytes) = send {
            sockopt::set_socket_send_buffer_size(&self.socket, bytes)?;
        }
        if let Some(bytes) = receive {
            sockopt::set_socket_recv_buffer_size(&self.socket, bytes)?;
        }
        Ok(self)
    }

    /// Whether what it carries is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.encryption.is_some()
    }

    /// System calls made to receive.
    pub fn receive_calls(&self) -> u64 {
        self.receive_calls
    }

    /// System calls made to send.
    pub fn send_calls(&self) -> u64 {
        self.send_calls
    }

    fn receive_frames<S: FrameSink>(
        &mut self,
        sink: &mut S,
        scratch: &mut Scratch,
        budget: usize,
    ) -> Result<Received, ReceiveError<S::Error>> {
        let scratch = scratch.bytes_mut();
        let ahead = match self.mode {
            ReceiveMode::Staged => scratch,
            ReceiveMode::InPlace => {
                let bytes = AHEAD_BYTES.min(scratch.len());
                &mut scratch[..bytes]
            }
        };
        let (mut received, mut moved) = (Received::default(), 0);
        loop {
            let left = budget.saturating_sub(received.bytes + moved).max(HEADER_BYTES);
            let filled = match self.read(sink, ahead, left) {
                Ok(filled) => filled,
                Err(ReadError::WouldBlock) => return Ok(received),
                Err(ReadError::Interrupted) => continue,
                Err(ReadError::Failed(error)) => return Err(error),
            };
            if filled.bytes == 0 {
                if !self.assembly.at_boundary() {
                    return Err(StreamError::Closed { reset: false }.into());
                }
                received.closed = true;
                return Ok(received);
            }
            received.bytes += filled.bytes;
            self.bytes_received += filled.bytes as u64;
            self.assembly.absorb(sink, &filled, ahead)?;
            moved += sink.moved();
            if filled.bytes < filled.wanted {
                return Ok(received);
            }
            if received.bytes + moved >= budget {
                received.more = true;
                return Ok(received);
            }
        }
    }

    fn receive_encrypted<S: FrameSink>(
        &mut self,
        sink: &mut S,
        scratch: &mut Scratch,
        budget: usize,
    ) -> Result<Received, ReceiveError<S::Error>> {
        let TcpStream { socket, assembly, encryption, .. } = self;
        let encryption = encryption.as_mut().expect("the stream is encrypted");
        let scratch = scratch.bytes_mut();
        let (mut received, mut moved) = (Received::default(), 0);
        loop {
            let left = budget.saturating_sub(received.bytes + moved).max(HEADER_BYTES).min(scratch.len());
            self.receive_calls += 1;
            let read = encryption.receive(&*socket, &mut scratch[..left], |frames| {
                match assembly.take_whole(sink, frames)? {
                    true => Ok(()),
                    false => Err(EncryptionError::Forged.into()),
                }
            });
            let read = match read {
                Ok(read) => read,
                Err(ReadError::WouldBlock) => return Ok(received),
                Err(ReadError::Interrupted) => continue,
                Err(ReadError::Failed(error)) => return Err(error),
            };
            if read.bytes == 0 {
                if !encryption.at_boundary() {
                    return Err(StreamError::Closed { reset: false }.into());
                }
                received.closed = true;
                return Ok(received);
            }
            received.bytes += read.bytes;
            self.bytes_received += read.bytes as u64;
            moved += sink.moved();
            if read.bytes < read.wanted {
                return Ok(received);
            }
            if received.bytes + moved >= budget {
                received.more = true;
                return Ok(received);
            }
        }
    }

    fn read<S: FrameSink>(
        &mut self,
        sink: &mut S,
        ahead: &mut [u8],
        budget: usize,
    ) -> Result<Filled, ReadError<S::Error>> {
        self.assembly.fill(sink, ahead, budget, |slices| {
            self.receive_calls += 1;
            rustix::io::readv(&self.socket, slices).map_err(ReadError::from)
        })
    }

    fn send_plain(&mut self, frames: &[Outgoing<'_>]) -> Result<Sent, StreamError> {
        let mut sent = Sent::default();
        while sent.frames < frames.len() && !sent.blocked {
            let batch = &frames[sent.frames..];
            let batch = &batch[..batch.len().min(BATCH_FRAMES)];
            let mut heads = [[0; HEADER_BYTES]; BATCH_FRAMES];
            for (head, frame) in heads.iter_mut().zip(batch) {
                assert_eq!(frame.header.length as usize, frame.payload.len(), "{:?} lies", frame.header);
                *head = frame.header.encode();
            }
            if self.unfinished > 0 {
                assert_eq!(heads[0], self.begun, "the frame that has begun must be finished first");
            }
            let mut slices = [IoSlice::new(&[]); 2 * BATCH_FRAMES];
            let (mut used, mut bytes, mut gone) = (0, 0, self.unfinished);
            for part in heads.iter().zip(batch).flat_map(|(head, frame)| [&head[..], frame.payload]) {
                let left = &part[gone.min(part.len())..];
                gone -= part.len() - left.len();
                if !left.is_empty() && bytes < WRITE_BYTES_MAX {
                    slices[used] = IoSlice::new(left);
                    used += 1;
                    bytes += left.len();
                }
            }
            self.send_calls += 1;
            // NOSIGNAL: an embedding process may not ignore SIGPIPE, as Rust's own start-up does.
            let flags = SendFlags::NOSIGNAL;
            let wrote =
                match sendmsg(&self.socket, &slices[..used], &mut SendAncillaryBuffer::default(), flags) {
                    Ok(wrote) => wrote,
                    Err(Errno::INTR) => continue,
                    Err(Errno::AGAIN) => 0,
                    Err(errno) => return Err(send_error(errno, self.receiving_is_over)),
                };
            sent.bytes += wrote;
            sent.blocked = wrote < bytes;
            self.bytes_sent += wrote as u64;
            self.advance(&mut sent, wrote, batch, &heads);
        }
        Ok(sent)
    }

    fn send_encrypted(&mut self, frames: &[Outgoing<'_>]) -> Result<Sent, StreamError> {
        let receiving_is_over = self.receiving_is_over;
        let encryption = self.encryption.as_mut().expect("the stream is encrypted");
        let mut sent = Sent::default();
        loop {
            let batch = &frames[sent.frames..];
            let batch = &batch[..batch.len().min(BATCH_FRAMES)];
            let mut heads = [[0; HEADER_BYTES]; BATCH_FRAMES];
            for (head, frame) in heads.iter_mut().zip(batch) {
                assert_eq!(frame.header.length as usize, frame.payload.len(), "{:?} lies", frame.header);
                *head = frame.header.encode();
            }
            let pairs = heads.iter().zip(batch).map(|(head, frame)| (&head[..], frame.payload));
            self.send_calls += 1;
            let taken =
                encryption.send(&self.socket, pairs).map_err(|errno| send_error(errno, receiving_is_over))?;
            let bytes: usize = batch[..taken].iter().map(|frame| HEADER_BYTES + frame.payload.len()).sum();
            self.bytes_sent += bytes as u64;
            sent.frames += taken;
            sent.bytes += bytes;
            sent.blocked = encryption.has_unsent();
            if sent.blocked || sent.frames == frames.len() {
                return Ok(sent);
            }
        }
    }
}

impl Stream for TcpStream {
    fn receive<S: FrameSink>(
        &mut self,
        sink: &mut S,
        scratch: &mut Scratch,
        budget: usize,
    ) -> Result<Received, ReceiveError<S::Error>> {
        if self.receiving_is_over {
            return Err(StreamError::Closed { reset: true }.into());
        }
        let result = match self.encryption {
            None => self.receive_frames(sink, scratch, budget),
            Some(_) => self.receive_encrypted(sink, scratch, budget),
        };
        // Data that was landed past the caches is visible before this thread announces it.
        shared::fence();
        self.receiving_is_over = result.is_err();
        result
    }

    fn send(&mut self, frames: &[Outgoing<'_>]) -> Result<Sent, StreamError> {
        let sent = match self.encryption {
            None => self.send_plain(frames)?,
            Some(_) => self.send_encrypted(frames)?,
        };
        if let Some(limit) = &mut self.unsent_limit
            && let Some(bytes) = limit.sent(sent.bytes, Instant::now())
        {
            // If the bound stays as it is, the stream is only a little slower, or less prompt.
            let _ = socket::limit_unsent(&self.socket, bytes);
        }
        Ok(sent)
    }

    fn has_unsent(&self) -> bool {
        self.encryption.as_ref().is_some_and(|encryption| encryption.has_unsent())
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

impl TcpStream {
    /// Counts the frames that `wrote` bytes completed, and keeps how much of the next one has left.
    fn advance(
        &mut self,
        sent: &mut Sent,
        wrote: usize,
        batch: &[Outgoing<'_>],
        heads: &[[u8; HEADER_BYTES]],
    ) {
        self.unfinished += wrote;
        for (frame, head) in batch.iter().zip(heads) {
            let whole = HEADER_BYTES + frame.payload.len();
            if self.unfinished < whole {
                self.begun = *head;
                return;
            }
            self.unfinished -= whole;
            sent.frames += 1;
        }
    }
}

impl AsFd for TcpStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The error of a write. Once reading has failed, the system forgets that the stream was reset.
fn send_error(errno: Errno, receiving_is_over: bool) -> StreamError {
    match errno {
        Errno::PIPE if receiving_is_over => StreamError::Closed { reset: true },
        other => StreamError::from_errno(other),
    }
}

enum ReadError<E> {
    WouldBlock,
    Interrupted,
    Failed(ReceiveError<E>),
}

impl<E> From<Errno> for ReadError<E> {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::AGAIN => ReadError::WouldBlock,
            Errno::INTR => ReadError::Interrupted,
            other => ReadError::Failed(StreamError::from_errno(other).into()),
        }
    }
}

impl<E> From<EncryptionError> for ReadError<E> {
    fn from(error: EncryptionError) -> Self {
        match error {
            EncryptionError::Errno(errno) => errno.into(),
            EncryptionError::Forged => ReadError::Failed(StreamError::Forged.into()),
        }
    }
}

impl<E> From<ReceiveError<E>> for ReadError<E> {
    fn from(error: ReceiveError<E>) -> Self {
        ReadError::Failed(error)
    }
}
