//! The same bytes over the same number of streams, with nothing done to them.
//!
//! The server has a thread for each core of the hub, each with as many streams of every worker as a core has.
//! It reads into one buffer and answers with as many bytes from another, both ways at once. The worker serves
//! all its streams on one thread. Both move up to 256 KB a system call and sleep only if nothing can be read
//! or written.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use paramhub_transport::SAME_HOST_SEND_BYTES;
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

/// Larger reads and writes are no faster.
const PIECE_BYTES: usize = 256 << 10;
/// The time that all workers may take to connect, and how long a worker waits for a stream that stands
/// still.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Starts the server, with a thread for each core. Returns the address of each stream of a worker, which
/// carries `bytes` a turn each way.
pub(super) fn serve(
    workers: u32,
    core_streams: usize,
    stream_bytes: &[usize],
) -> anyhow::Result<Vec<SocketAddr>> {
    let mut addresses = Vec::new();
    for (core, stream_bytes) in stream_bytes.chunks(core_streams).enumerate() {
        let mut listeners = Vec::new();
        for &bytes in stream_bytes {
            let listener =
                TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("the raw server has no port")?;
            addresses.push(listener.local_addr()?);
            listeners.push((listener, bytes as u64));
        }
        let run = move || {
            if let Err(error) = answer(&listeners, workers) {
                eprintln!("the raw server has failed: {error}");
            }
        };
        std::thread::Builder::new().name(format!("raw-core-{core}")).spawn(run)?;
    }
    Ok(addresses)
}

/// A worker's end of all its streams.
pub(crate) struct RawStreams {
    ready: Ready,
    pipes: Vec<Pipe>,
    /// The bytes of each stream, one way.
    bytes: Vec<usize>,
}

impl RawStreams {
    pub(super) fn connect(addresses: &[SocketAddr], bytes: Vec<usize>) -> anyhow::Result<RawStreams> {
        let ready = Ready::new(addresses.len())?;
        let pipes = (0..).zip(addresses).map(|(number, address)| {
            let stream = TcpStream::connect_timeout(address, WAIT_TIMEOUT)?;
            Pipe::new(stream, &ready, number)
        });
        let pipes = pipes.collect::<io::Result<_>>().context("cannot reach the raw server")?;
        Ok(RawStreams { ready, pipes, bytes })
    }

    /// Sends every stream's share of `source` and fills `target` with what comes back.
    pub(super) fn exchange(&mut self, source: &[u8], target: &mut [u8]) -> anyhow::Result<()> {
        let (mut sources, mut targets) = (split(source, &self.bytes), split_mut(target, &self.bytes));
        loop {
            let (mut is_over, mut moved) = (true, 0);
            for ((pipe, source), target) in self.pipes.iter_mut().zip(&mut sources).zip(&mut targets) {
                if pipe.writable && !source.is_empty() {
                    let sent = pipe.write(&source[..source.len().min(PIECE_BYTES)])?;
                    *source = &source[sent..];
                    moved += sent;
                }
                if pipe.readable && !target.is_empty() {
                    let piece = target.len().min(PIECE_BYTES);
                    let received = pipe.read(&mut target[..piece])?;
                    *target = &mut std::mem::take(target)[received..];
                    moved += received;
                }
                is_over &= source.is_empty() && target.is_empty();
            }
            if is_over {
                return Ok(());
            }
            if moved == 0 {
                self.ready.wait(&mut self.pipes, Some(WAIT_TIMEOUT))?;
            }
        }
    }
}

fn answer(listeners: &[(TcpListener, u64)], workers: u32) -> anyhow::Result<()> {
    let mut ready = Ready::new(listeners.len() * workers as usize)?;
    let (mut pipes, mut books) = (Vec::new(), Vec::new());
    for (listener, bytes) in listeners {
        accept(listener, workers, &ready, &mut pipes)?;
        // Bytes yet to be answered, bytes yet to come in this turn, and bytes of each turn.
        books.resize(pipes.len(), (0_u64, *bytes, *bytes));
    }
    let (mut scratch, fixed) = (vec![0; PIECE_BYTES], vec![0; PIECE_BYTES]);
    loop {
        let mut moved = 0;
        for (pipe, (owed, coming, bytes)) in pipes.iter_mut().zip(&mut books) {
            if pipe.readable {
                let received = match pipe.read(&mut scratch) {
                    // The first worker that ends, ends this server.
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
                    received => received?,
                };
                moved += received;
                *owed += received as u64;
                *coming = coming.checked_sub(received as u64).context("a worker sent too much")?;
            }
            // The server makes only large writes, except for the last of a turn.
            if pipe.writable && (*owed >= PIECE_BYTES as u64 || (*coming == 0 && *owed > 0)) {
                let sent = pipe.write(&fixed[..PIECE_BYTES.min(*owed as usize)])?;
                moved += sent;
                *owed -= sent as u64;
                if *owed == 0 && *coming == 0 {
                    *coming = *bytes;
                }
            }
        }
        if moved == 0 {
            ready.wait(&mut pipes, None)?;
        }
    }
}

fn accept(listener: &TcpListener, workers: u32, ready: &Ready, pipes: &mut Vec<Pipe>) -> anyhow::Result<()> {
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + WAIT_TIMEOUT;
    let before = pipes.len();
    while pipes.len() < before + workers as usize {
        match listener.accept() {
            Ok((stream, _)) => pipes.push(Pipe::new(stream, ready, pipes.len() as u64)?),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if Instant::now() > deadline {
                    bail!("only {} of {workers} workers came", pipes.len() - before);
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// A stream and its readiness since the last event. Events come once per change, so a read or write that came
/// short has used up what there was, and the next event reports when there is more.
struct Pipe {
    stream: TcpStream,
    readable: bool,
    writable: bool,
    /// `true` if the other side has closed. The end is then read without another event.
    is_closing: bool,
}

impl Pipe {
    fn new(stream: TcpStream, ready: &Ready, number: u64) -> io::Result<Pipe> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        // The same buffer as the exchange's streams have inside one host.
        rustix::net::sockopt::set_socket_send_buffer_size(&stream, SAME_HOST_SEND_BYTES)?;
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&ready.epoll, &stream, EventData::new_u64(number), flags)?;
        Ok(Pipe { stream, readable: false, writable: true, is_closing: false })
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.stream.read(into) {
            Ok(0) => Err(io::Error::new(ErrorKind::UnexpectedEof, "the other side has closed a raw stream")),
            Ok(received) => {
                self.readable = received == into.len() || self.is_closing;
                Ok(received)
            }
            Err(error) => nothing_yet(error, &mut self.readable),
        }
    }

    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self.stream.write(from) {
            Ok(sent) => {
                self.writable = sent == from.len();
                Ok(sent)
            }
            Err(error) => nothing_yet(error, &mut self.writable),
        }
    }
}

fn nothing_yet(error: io::Error, is_ready: &mut bool) -> io::Result<usize> {
    match error.kind() {
        ErrorKind::WouldBlock => {
            *is_ready = false;
            Ok(0)
        }
        ErrorKind::Interrupted => Ok(0),
        _ => Err(error),
    }
}

/// Waits for changes of a thread's streams.
struct Ready {
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
}

impl Ready {
    fn new(streams: usize) -> io::Result<Ready> {
        Ok(Ready { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, events: Vec::with_capacity(streams) })
    }

    fn wait(&mut self, pipes: &mut [Pipe], timeout: Option<Duration>) -> io::Result<()> {
        if pipes.iter().any(|pipe| pipe.readable && pipe.is_closing) {
            return Ok(());
        }
        self.events.clear();
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(0) => return Err(io::Error::new(ErrorKind::TimedOut, "the raw streams stand still")),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        for event in &self.events {
            let pipe = &mut pipes[event.data.u64() as usize];
            let flags = event.flags;
            let gone = flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
            pipe.is_closing |= gone;
            pipe.readable |= gone || flags.contains(EventFlags::IN);
            pipe.writable |= flags.contains(EventFlags::OUT);
        }
        Ok(())
    }
}

fn split<'a>(mut buffer: &'a [u8], lengths: &[usize]) -> Vec<&'a [u8]> {
    let cut = |&length| {
        let (piece, rest) = buffer.split_at(length);
        buffer = rest;
        piece
    };
    lengths.iter().map(cut).collect()
}

fn split_mut<'a>(mut buffer: &'a mut [u8], lengths: &[usize]) -> Vec<&'a mut [u8]> {
    let cut = |&length| {
        let (piece, rest) = std::mem::take(&mut buffer).split_at_mut(length);
        buffer = rest;
        piece
    };
    lengths.iter().map(cut).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_answered_turn_after_turn() {
        let bytes = vec![3 * PIECE_BYTES + 7, 1, 2, 5];
        let addresses = serve(2, 2, &bytes).unwrap();
        let total = bytes.iter().sum();
        let both_are_done = std::sync::Barrier::new(2);
        std::thread::scope(|threads| {
            for _ in 0..2 {
                threads.spawn(|| {
                    let mut streams = RawStreams::connect(&addresses, bytes.clone()).unwrap();
                    let source = vec![1; total];
                    for _ in 0..3 {
                        let mut target = vec![1; total];
                        streams.exchange(&source, &mut target).unwrap();
                        assert!(target.iter().all(|&byte| byte == 0), "answers are zeros");
                    }
                    // The first stream that closes ends the server, so none may close while another is in
                    // use.
                    both_are_done.wait();
                });
            }
        });
    }

    #[test]
    fn a_server_that_is_gone_is_an_error() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let mut streams = RawStreams::connect(&[address], vec![100]).unwrap();
        drop(listener.accept().unwrap());
        let mut target = [0; 100];
        let refused = streams.exchange(&[1; 100], &mut target).unwrap_err();
        assert!(refused.is::<io::Error>(), "{refused:#}");
    }
}
