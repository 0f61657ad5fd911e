//! A stream of either transport, for event loops that serve both.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::poll::Interest;
use crate::shm::ShmStream;
use crate::stream::{FrameSink, Outgoing, ReceiveError, Received, Scratch, Sent, Stream, StreamError};
use crate::tcp::TcpStream;

/// A stream over TCP or shared memory.
#[derive(Debug)]
pub enum Connection {
    /// TCP, between any two hosts.
    Tcp(TcpStream),
    /// Shared memory, between processes of one host.
    Shm(ShmStream),
}

impl Connection {
    /// The events to poll for; `wants_room` if something is left to send. Shared memory reports room by
    /// readability: an event loop that waits for room calls [`Stream::send`] again at every event.
    pub fn interest(&self, wants_room: bool) -> Interest {
        match self {
            Connection::Tcp(_) if wants_room => Interest::BOTH,
            _ => Interest::READABLE,
        }
    }

    /// Whether every event may mean that there is room to send.
    pub fn is_shm(&self) -> bool {
        matches!(self, Connection::Shm(_))
    }

    /// Wakes a peer that sleeps although something was sent: see [`ShmStream::announce`].
    pub fn announce(&mut self) -> Result<(), StreamError> {
        match self {
            Connection::Tcp(_) => Ok(()),
            Connection::Shm(stream) => stream.announce(),
        }
    }

    /// Whether [`announce`](Self::announce) may have a peer to wake.
    pub fn is_unannounced(&self) -> bool {
        matches!(self, Connection::Shm(stream) if stream.is_unannounced())
    }

    /// Announces that nothing more will be sent; the other direction continues.
    pub fn end_sending(&mut self) -> io::Result<()> {
        match self {
            Connection::Tcp(stream) => Ok(rustix::net::shutdown(stream, Shutdown::Write)?),
            Connection::Shm(stream) => stream.end_sending(),
        }
    }

    /// Ends both directions.
    pub fn close(&mut self) {
        // If this fails, the connection is closed already.
        let _ = rustix::net::shutdown(&*self, Shutdown::Both);
    }

    /// Drops some of what has arrived, so that closing does not reset the connection before the other end has
    /// read everything; `true` once no more will arrive.
    pub fn discard(&mut self) -> bool {
        match self {
            Connection::Tcp(stream) => discard(stream),
            Connection::Shm(stream) => stream.discard(),
        }
    }
}

fn discard(stream: &TcpStream) -> bool {
    let mut ignored = [0; 16 << 10];
    // A peer that never stops sending must not block the thread here.
    for _ in 0..16 {
        match rustix::io::read(stream, &mut ignored) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::INTR) => return false,
            Err(_) => return true,
        }
    }
    false
}

impl Stream for Connection {
    fn receive<S: FrameSink>(
        &mut self,
        sink: &mut S,
        scratch: &mut Scratch,
        budget: usize,
    ) -> Result<Received, ReceiveError<S::Error>> {
        match self {
            Connection::Tcp(stream) => stream.receive(sink, scratch, budget),
            Connection::Shm(stream) => stream.receive(sink, scratch, budget),
        }
    }

    fn send(&mut self, frames: &[Outgoing<'_>]) -> Result<Sent, StreamError> {
        match self {
            Connection::Tcp(stream) => stream.send(frames),
            Connection::Shm(stream) => stream.send(frames),
        }
    }

    fn has_unsent(&self) -> bool {
        match self {
            Connection::Tcp(stream) => stream.has_unsent(),
            Connection::Shm(stream) => stream.has_unsent(),
        }
    }

    fn unfinished(&self) -> usize {
        match self {
            Connection::Tcp(stream) => stream.unfinished(),
            Connection::Shm(stream) => stream.unfinished(),
        }
    }

    fn bytes_received(&self) -> u64 {
        match self {
            Connection::Tcp(stream) => stream.bytes_received(),
            Connection::Shm(stream) => stream.bytes_received(),
        }
    }

    fn bytes_sent(&self) -> u64 {
        match self {
            Connection::Tcp(stream) => stream.bytes_sent(),
            Connection::Shm(stream) => stream.bytes_sent(),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Connection::Tcp(stream) => stream.as_fd(),
            Connection::Shm(stream) => stream.as_fd(),
        }
    }
}
