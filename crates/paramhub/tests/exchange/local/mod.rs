//! A worker of this host that speaks the protocol through shared memory by hand, and so can break it. Invalid
//! memory is refused with a reason, and its acts harm its own job at most.

mod neighbours;
mod offences;
mod offers;

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Instant;

use paramhub_core::arena::ArenaLayout;
use paramhub_core::codec::Codec;
use paramhub_core::settings::Settings;
use paramhub_core::wire::{
    CHALLENGE_MESSAGE_BYTES, Direction, Failure, HEADER_BYTES, Header, Hello, Operation, VERDICT_BYTES,
    Verdict,
};
use paramhub_transport::shm::{RING_BYTES_DEFAULT, Segment, create_rings, send_segments};
use rustix::fs::{FallocateFlags, fallocate};

use crate::cluster::{Cluster, Ticket, WAIT_TIMEOUT, await_true};
use crate::raw::{Raw, proof};

/// The positions of a ring's parts, as drawn in `paramhub-transport/src/shm/ring.rs`; the hub's ring follows
/// the worker's.
const WRITTEN: usize = 0;
const READ: usize = 64;
const READER_SLEEPS: usize = 128;
const WRITER_SLEEPS: usize = 192;
const ENDED: usize = 196;
const BYTES: usize = 256;
const HUBS: usize = BYTES + RING_BYTES_DEFAULT;

/// A new connection to the hub's local socket.
fn dial(cluster: &Cluster) -> UnixStream {
    let name = cluster.client.hubs().unwrap().remove(0).shape.local.expect("the hub offers shared memory");
    let socket = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    socket.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    socket
}

fn shake_hands(
    mut socket: &UnixStream,
    hello: &Hello,
    ticket: &Ticket,
    descriptors: &[BorrowedFd<'_>],
) -> Verdict {
    send_segments(socket, &hello.encode(), descriptors).unwrap();
    let mut challenge = [0; CHALLENGE_MESSAGE_BYTES];
    socket.read_exact(&mut challenge).unwrap();
    socket.write_all(&proof(ticket, hello, &challenge).0).unwrap();
    let mut verdict = [0; VERDICT_BYTES];
    socket.read_exact(&mut verdict).unwrap();
    Verdict::decode(&verdict).unwrap()
}

/// The Hello of the same rank's stream to another core.
fn at_core(hello: &Hello, core: u16) -> Hello {
    Hello { core, ..*hello }
}

fn arena(settings: &Settings) -> Segment {
    Segment::create("arena", ArenaLayout::new(settings).bytes() as usize).unwrap()
}

fn rings() -> Segment {
    create_rings(RING_BYTES_DEFAULT).unwrap()
}

/// A worker that the hub has accepted.
struct LocalRaw {
    socket: UnixStream,
    rings: Segment,
    written: u64,
    read: u64,
}

impl LocalRaw {
    fn join(cluster: &Cluster, ticket: &Ticket, rank: u32, settings: &Settings) -> LocalRaw {
        let (_, hello) = Raw::join_with(cluster, ticket, rank, settings);
        let (socket, arena, rings) = (dial(cluster), arena(settings), rings());
        match shake_hands(&socket, &hello, ticket, &[arena.as_fd(), rings.as_fd()]) {
            Verdict::Welcome { .. } => LocalRaw { socket, rings, written: 0, read: 0 },
            Verdict::Refused { message, .. } => panic!("refused: {message}"),
        }
    }

    /// Puts bytes into the ring and wakes the hub.
    fn send(&mut self, bytes: &[u8]) {
        for byte in bytes {
            let at = self.written as usize % RING_BYTES_DEFAULT;
            self.rings.write(BYTES + at, &[*byte]);
            self.written += 1;
        }
        self.claim(self.written);
    }

    /// Claims that so many bytes were written, and wakes the hub.
    fn claim(&mut self, written: u64) {
        self.rings.write(WRITTEN, &written.to_le_bytes());
        self.wake();
    }

    fn wake(&mut self) {
        // A hub that has hung up needs no waking.
        let _ = self.socket.write(&[1]);
    }

    /// The next frame. Of frames with a tensor only the header.
    fn next_frame(&mut self) -> (Header, Vec<u8>) {
        let wire: [u8; HEADER_BYTES] = self.take(HEADER_BYTES).try_into().unwrap();
        let header = Header::decode(&wire, Direction::ToWorker).unwrap();
        let length = if header.operation == Operation::Parameters { 0 } else { header.length as usize };
        (header, self.take(length))
    }

    fn await_frame(&mut self, operation: Operation) -> (Header, Vec<u8>) {
        loop {
            let (header, payload) = self.next_frame();
            if header.operation == operation {
                return (header, payload);
            }
        }
    }

    fn await_failure(&mut self) -> Failure {
        Failure::decode(&self.await_frame(Operation::Failure).1).unwrap()
    }

    fn take(&mut self, length: usize) -> Vec<u8> {
        let begun = Instant::now();
        let written = || {
            let mut count = [0; 8];
            self.rings.read(HUBS + WRITTEN, &mut count);
            u64::from_le_bytes(count)
        };
        while ((written() - self.read) as usize) < length {
            assert!(begun.elapsed() < WAIT_TIMEOUT, "the hub says nothing");
            std::thread::yield_now();
        }
        let mut bytes = vec![0; length];
        for byte in &mut bytes {
            let at = self.read as usize % RING_BYTES_DEFAULT;
            self.rings.read(HUBS + BYTES + at, std::slice::from_mut(byte));
            self.read += 1;
        }
        self.rings.write(HUBS + READ, &self.read.to_le_bytes());
        bytes
    }

    /// Returns whether the hub has closed its ring or hung up.
    fn is_closed(&mut self) -> bool {
        self.socket.set_nonblocking(true).unwrap();
        await_true("the hub closes", || {
            let mut ended = [0; 4];
            self.rings.read(HUBS + ENDED, &mut ended);
            let hung_up = loop {
                match (&self.socket).read(&mut [0; 256]) {
                    // Bytes of earlier wake-ups.
                    Ok(1..) => {}
                    Ok(0) => break true,
                    Err(error) => break error.kind() != ErrorKind::WouldBlock,
                }
            };
            (hung_up || u32::from_le_bytes(ended) != 0).then_some(true)
        })
    }
}

/// A push of chunk 0 of [`settings`], whose gradient is in the arena.
fn push(step: u32) -> Vec<u8> {
    let header = Header { operation: Operation::PushPull, codec: Codec::F32, chunk: 0, step, length: 16 };
    header.encode().to_vec()
}

/// Removes the pages of a segment.
fn punch(segment: &Segment) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(segment, flags, 0, segment.len() as u64).unwrap();
}
