//! The handshake that begins a stream: the caller's side, and the messages of either side on a socket that
//! does not block.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use paramhub_core::auth::StreamSecret;
use paramhub_core::wire::{
    CHALLENGE_MESSAGE_BYTES, CallerHandshake, Capabilities, Hello, VERDICT_BYTES, VerdictError, Welcome,
};
use paramhub_trust::{StreamKeys, StreamTls};
use rustix::io::Errno;
use rustix::net::SendFlags;
use thiserror::Error;

use crate::handshakes::DISCARDED_BYTES_MAX;
use crate::shm::{receive_segments, send_segments};

/// Why a stream was not opened.
#[derive(Debug, Error)]
pub enum GreetingError {
    /// The system gives no random numbers for the challenge.
    #[error("the system gives no random numbers: {0}")]
    Random(io::Error),
    /// The connection ended, or the peer did not answer in time.
    #[error("the handshake failed: {0}")]
    Connection(#[from] io::Error),
    /// The peer's verdict does not open the stream.
    #[error(transparent)]
    Verdict(#[from] VerdictError),
}

/// Opens a stream to a hub over a blocking connection: proves, both ways, knowledge of the secret. Draws the
/// challenge of `hello`. If the stream `encrypts`, returns its keys as well.
pub fn greet(
    stream: &mut TcpStream,
    secret: &StreamSecret,
    hello: Hello,
    encrypts: bool,
    deadline: Instant,
) -> Result<(Welcome, Option<StreamKeys>), GreetingError> {
    let mut messages = TcpMessages { stream, deadline };
    if !encrypts {
        return Ok((open_stream(&mut messages, secret, hello)?, None));
    }
    let offered = hello.offered.or(Capabilities::ENCRYPTED);
    let hello = Hello { offered, required: hello.required.or(Capabilities::ENCRYPTED), ..hello };
    let mut messages = EncryptedMessages { messages, tls: StreamTls::call()? };
    let welcome = open_stream(&mut messages, secret, hello)?;
    Ok((welcome, Some(messages.tls.keys())))
}

/// [`greet`] to a hub of this host, which receives the `offered` memory with the first message. Returns the
/// descriptor that comes with the hub's messages as well, if one does.
pub fn greet_locally(
    socket: &UnixStream,
    secret: &StreamSecret,
    hello: Hello,
    offered: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Result<(Welcome, Option<OwnedFd>), GreetingError> {
    let mut messages = LocalMessages { socket, deadline, offered, received: None };
    let welcome = open_stream(&mut messages, secret, hello)?;
    Ok((welcome, messages.received))
}

/// Random bytes from the system, as challenges, incarnations and tokens need them.
pub fn draw<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

fn open_stream(
    messages: &mut impl Messages,
    secret: &StreamSecret,
    hello: Hello,
) -> Result<Welcome, GreetingError> {
    let challenge = draw().map_err(GreetingError::Random)?;
    let mut handshake = CallerHandshake::begin(Hello { challenge, ..hello });
    messages.send(handshake.hello_message())?;
    let mut challenge_message = [0; CHALLENGE_MESSAGE_BYTES];
    messages.receive(&mut challenge_message)?;
    let secret = &messages.bind(secret);
    let proof = handshake.answer(secret, &challenge_message).map_err(VerdictError::from)?;
    messages.send(&proof.0)?;
    let mut verdict = [0; VERDICT_BYTES];
    messages.receive(&mut verdict)?;
    Ok(handshake.open(secret, &verdict)?)
}

/// Messages of known size over a blocking connection, each before a deadline.
trait Messages {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()>;
    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<()>;

    /// The secret for proofs over this connection, after the first message has come.
    fn bind(&self, secret: &StreamSecret) -> StreamSecret {
        *secret
    }
}

struct TcpMessages<'a> {
    stream: &'a mut TcpStream,
    deadline: Instant,
}

impl Messages for TcpMessages<'_> {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        write_all_by(self.stream, bytes, self.deadline)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        read_exact_by(self.stream, buffer, self.deadline)
    }
}

/// Messages inside TLS.
struct EncryptedMessages<'a> {
    messages: TcpMessages<'a>,
    tls: StreamTls,
}

impl EncryptedMessages<'_> {
    fn send_outgoing(&mut self) -> io::Result<()> {
        let mut outgoing = Vec::new();
        self.tls.take_outgoing(&mut outgoing);
        self.messages.send(&outgoing)
    }
}

impl Messages for EncryptedMessages<'_> {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.tls.write(bytes)?;
        self.send_outgoing()
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.tls.read(&mut buffer[filled..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => filled += read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let mut piece = vec![0; self.tls.wants()];
                    self.messages.receive(&mut piece)?;
                    self.tls.absorb(&piece)?;
                    self.send_outgoing()?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn bind(&self, secret: &StreamSecret) -> StreamSecret {
        secret.bound_to(&self.tls.binding())
    }
}

struct LocalMessages<'a> {
    socket: &'a UnixStream,
    deadline: Instant,
    /// Descriptors that go with the next message.
    offered: &'a [BorrowedFd<'a>],
    /// The first descriptor that came.
    received: Option<OwnedFd>,
}

impl Messages for LocalMessages<'_> {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.socket.set_write_timeout(Some(time_left(self.deadline)?))?;
        let sent = send_segments(self.socket, bytes, std::mem::take(&mut self.offered));
        sent.map_err(|error| if is_temporary(&error) { late() } else { error })
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let LocalMessages { socket, deadline, received, .. } = self;
        fill_by(buffer, *deadline, |rest, left| {
            socket.set_read_timeout(Some(left))?;
            let (read, descriptors) = receive_segments(*socket, rest)?;
            *received = received.take().or(descriptors.into_iter().next());
            Ok(read)
        })
    }
}

/// Fills `buffer` from a blocking stream, or fails with [`ErrorKind::TimedOut`] at `deadline`, however slowly
/// the peer sends. It takes no more bytes than `buffer` has.
pub fn read_exact_by(stream: &mut TcpStream, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    fill_by(buffer, deadline, |rest, left| {
        stream.set_read_timeout(Some(left))?;
        stream.read(rest)
    })
}

/// Fills `buffer` by reads that take at most the time that they are given.
fn fill_by(
    buffer: &mut [u8],
    deadline: Instant,
    mut read: impl FnMut(&mut [u8], Duration) -> io::Result<usize>,
) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        match read(&mut buffer[filled..], time_left(deadline)?) {
            Ok(0) => {
                return Err(io::Error::new(
                    ErrorKind::UnexpectedEof,
                    format!("the connection ended after {filled} of {} bytes", buffer.len()),
                ));
            }
            Ok(read) => filled += read,
            Err(error) if is_temporary(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all of `bytes` to a blocking stream, or fails with [`ErrorKind::TimedOut`] at `deadline`.
pub fn write_all_by(stream: &mut TcpStream, bytes: &[u8], deadline: Instant) -> io::Result<()> {
    let mut written = 0;
    while written < bytes.len() {
        stream.set_write_timeout(Some(time_left(deadline)?))?;
        match stream.write(&bytes[written..]) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(wrote) => written += wrote,
            Err(error) if is_temporary(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(late()),
        // The kernel counts in microseconds, and takes zero for "no timeout".
        left => Ok(left.max(Duration::from_micros(1))),
    }
}

fn late() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, "the peer did not answer in time")
}

/// Whether the error is a timeout or an interruption: the deadline decides, not the kernel's clock.
pub fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// The messages of a handshake on a socket that does not block: what is left to send, and what has come of the
/// message that is awaited.
#[derive(Debug)]
pub struct PendingMessages {
    inbox: Box<[u8]>,
    received: usize,
    outbox: Vec<u8>,
    discarded: usize,
    /// Present where the messages are inside TLS.
    tls: Option<Box<StreamTls>>,
}

/// What came of a peer whose further bytes are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discarded {
    /// It may send more.
    Waits,
    /// It has closed its side.
    Ended,
    /// It has sent more than an honest peer could.
    TooMuch,
}

impl PendingMessages {
    /// No messages; those that come have at most `bytes_max` bytes.
    pub fn new(bytes_max: usize) -> Self {
        PendingMessages {
            inbox: vec![0; bytes_max].into_boxed_slice(),
            received: 0,
            outbox: Vec::new(),
            discarded: 0,
            tls: None,
        }
    }

    /// Goes on inside TLS, whose first bytes have come as far as anything has.
    pub fn begin_tls(&mut self, mut tls: StreamTls) -> io::Result<()> {
        tls.absorb(self.received())?;
        self.forget_received();
        tls.take_outgoing(&mut self.outbox);
        self.tls = Some(Box::new(tls));
        Ok(())
    }

    /// Whether the messages are inside TLS.
    pub fn are_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// The keys of the stream that begins after the last message, if the messages are inside TLS.
    ///
    /// # Panics
    /// If none has come.
    pub fn keys(&self) -> Option<StreamKeys> {
        self.tls.as_ref().map(|tls| tls.keys())
    }

    /// The secret for proofs over this connection.
    ///
    /// # Panics
    /// If the messages are inside TLS and none has come.
    pub fn bind(&self, secret: &StreamSecret) -> StreamSecret {
        self.tls.as_ref().map_or(*secret, |tls| secret.bound_to(&tls.binding()))
    }

    /// Adds a message to those to send.
    pub fn queue(&mut self, message: &[u8]) {
        match &mut self.tls {
            None => self.outbox.extend_from_slice(message),
            Some(tls) => {
                tls.write(message).expect("a handshake's messages are short");
                tls.take_outgoing(&mut self.outbox);
            }
        }
    }

    /// Whether nothing is left to send.
    pub fn has_sent_all(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Sends what is queued; `true` when nothing is left.
    pub fn send(&mut self, socket: impl AsFd) -> io::Result<bool> {
        while !self.outbox.is_empty() {
            match rustix::net::send(&socket, &self.outbox, SendFlags::NOSIGNAL) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(sent) => drop(self.outbox.drain(..sent)),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }

    /// Sends what is queued over a Unix socket, with these descriptors.
    pub fn send_with(&mut self, socket: impl AsFd, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        send_segments(socket, &self.outbox, descriptors)?;
        self.outbox.clear();
        Ok(())
    }

    /// Reads up to `wanted` bytes and no more, since frames may follow. `true` when they are here.
    ///
    /// # Panics
    /// If `wanted` is more than the largest message.
    pub fn receive(
        &mut self,
        wanted: usize,
        mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<bool> {
        while self.received < wanted {
            let place = &mut self.inbox[self.received..wanted];
            let read = match &mut self.tls {
                None => read(place),
                Some(tls) => read_encrypted(tls, &mut self.outbox, place, &mut read),
            };
            match read {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.received += read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Whether the peer has sent more than was read. During a handshake each side waits for the other's answer, so
    /// unrequested bytes are not from an honest peer, and the connection is closed.
    pub fn has_unread_bytes(&mut self, socket: impl AsFd) -> io::Result<bool> {
        let is_unread = self.tls.as_mut().is_some_and(|tls| tls.has_unread());
        Ok(is_unread || rustix::io::ioctl_fionread(socket)? > 0)
    }

    /// What has come of the message that is awaited.
    pub fn received(&self) -> &[u8] {
        &self.inbox[..self.received]
    }

    /// Drops the message that has come, of which nothing is needed any more.
    pub fn forget_received(&mut self) {
        self.received = 0;
    }

    /// Takes a message of which all `N` bytes have come.
    ///
    /// # Panics
    /// If it has another size.
    pub fn take<const N: usize>(&mut self) -> [u8; N] {
        let message = self.received().try_into().expect("as many bytes as were wanted");
        self.received = 0;
        message
    }

    /// Reads and drops what a refused peer still sends, so that closing does not reset the connection before
    /// the peer has read the refusal.
    pub fn discard(&mut self, mut read: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<Discarded> {
        let mut ignored = [0; 4096];
        loop {
            match read(&mut ignored) {
                Ok(0) => return Ok(Discarded::Ended),
                Ok(read) => {
                    self.discarded += read;
                    if self.discarded > DISCARDED_BYTES_MAX {
                        return Ok(Discarded::TooMuch);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Discarded::Waits),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Reads what has come inside TLS. What TLS has to say goes to the outbox; then there is nothing to read before it is sent.
fn read_encrypted(
    tls: &mut StreamTls,
    outbox: &mut Vec<u8>,
    place: &mut [u8],
    read: &mut impl FnMut(&mut [u8]) -> io::Result<usize>,
) -> io::Result<usize> {
    let mut piece = [0; 512];
    loop {
        match tls.read(place) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            done => return done,
        }
        if !outbox.is_empty() {
            return Err(ErrorKind::WouldBlock.into());
        }
        let wants = tls.wants().min(piece.len());
        let came = read(&mut piece[..wants])?;
        if came == 0 {
            return Ok(0);
        }
        tls.absorb(&piece[..came])?;
        tls.take_outgoing(outbox);
    }
}
