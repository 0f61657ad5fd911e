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
    /// Between any two hosts.
    Tcp(TcpStream),
    /// Between processes of one host.
    Shm(ShmStream),
}

impl Connection {
    /// What to poll for; `wants_room` where something is left to send. Shared memory says by readability that there is
    /// room: an event loop that wants some asks [`Stream::send`] again at every event.
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

    /// Wakes a peer that was left asleep over something sent: see [`ShmStream::announce`].
    pub fn announce(&mut self) -> Result<(), StreamError> {
        match self {
            Connection::Tcp(_) => Ok(()),
            Connection::Shm(stream) => stream.announce(),
        }
    }

    /// Whether [`announce`](Self::announce) may have something to say.
    pub fn is_unannounced(&self) -> bool {
        matches!(self, Connection::Shm(stream) if stream.is_unannounced())
    }

    /// Says that nothing more will be sent; the other direction goes on.
    pub fn end_sending(&mut self) -> io::Result<()> {
        match self {
            Connection::Tcp(stream) => Ok(rustix::net::shutdown(stream, Shutdown::Write)?),
            Connection::Shm(stream) => stream.end_sending(),
        }
    }

    /// Ends both directions.
    pub fn close(&mut self) {
        // One that is closed already is closed.
        let _ = rustix::net::shutdown(&*self, Shutdown::Both);
    }

    /// Throws away some of what has come, so that closing does not reset the connection over something unread at the other
    /// end; `true` once nothing more will come.
    pub fn discard(&mut self) -> bool {
        match self {
            Connection::Tcp(stream) => discard(stream),
            Connection::Shm(stream) => stream.discard(),
        }
    }
}

fn discard(stream: &TcpStream) -> bool {
    let mut ignored = [0; 16 << 10];
    // One that never stops sending must not keep the thread here.
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
