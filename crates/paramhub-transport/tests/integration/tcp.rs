//! TCP over real loopback sockets: the conformance suite, and what only TCP can promise.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream as StdTcpStream};
use std::time::Duration;

use paramhub_core::wire::{Direction, Header, Operation};
use paramhub_transport::{Outgoing, ReceiveMode, Scratch, Stream, StreamError, TcpStream};

use crate::conformance;
use crate::conformance::{Collector, Frame, Options, Peer, Policy, Transport};

struct Tcp;

fn sockets() -> (StdTcpStream, StdTcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let near = StdTcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    near.set_nodelay(true).unwrap();
    (near, far)
}

fn stream(socket: StdTcpStream, options: Options) -> TcpStream {
    // With less than loopback's segments of 64 KiB, the speed would depend on the kernel's timers, not on the
    // reader.
    let send_bytes = options.tight.then_some(128 << 10);
    TcpStream::new(socket, options.direction, options.frame_bytes_max)
        .and_then(|stream| stream.with_receive_mode(options.mode).with_buffer_bytes(send_bytes, None))
        .unwrap()
}

impl Transport for Tcp {
    type Stream = TcpStream;
    type Peer = StdTcpStream;

    fn pair(options: Options) -> (TcpStream, TcpStream) {
        let (near, far) = sockets();
        let back = match options.direction {
            Direction::ToHub => Direction::ToWorker,
            _ => Direction::ToHub,
        };
        (stream(near, Options { direction: back, ..options }), stream(far, options))
    }

    fn with_peer(options: Options) -> (StdTcpStream, TcpStream) {
        let (near, far) = sockets();
        (near, stream(far, options))
    }
}

impl Peer for StdTcpStream {
    fn write(&mut self, bytes: &[u8]) {
        self.write_all(bytes).unwrap();
    }

    fn close(self) {}

    fn reset(self) {
        socket2::SockRef::from(&self).set_linger(Some(Duration::ZERO)).unwrap();
    }
}

conformance!(Tcp);

fn parameters(chunk: u32, length: usize) -> Frame {
    let header =
        Header { chunk, length: length as u32, ..Header { step: 1, ..Header::bare(Operation::Parameters) } };
    Frame { header, payload: vec![chunk as u8; length] }
}

/// Sends everything before anything is received, so that the calls counted do not depend on timing.
fn calls_to_receive(mode: ReceiveMode, policy: Policy, frames: &[Frame]) -> u64 {
    let (near, far) = sockets();
    let bytes = frames.iter().map(Frame::wire).collect::<Vec<_>>().concat();
    let mut from = TcpStream::new(near, Direction::ToHub, 1 << 20).unwrap();
    let to = TcpStream::new(far, Direction::ToWorker, 1 << 20).unwrap();
    let mut to = to.with_receive_mode(mode).with_buffer_bytes(None, Some(4 << 20)).unwrap();
    let outgoing: Vec<_> = frames.iter().map(Frame::outgoing).collect();
    let sent = from.send(&outgoing).unwrap();
    assert!(!sent.blocked, "the socket buffers hold {} bytes", bytes.len());
    let (mut sink, mut scratch) = (Collector::new(policy), Scratch::default());
    // Loopback delivers inside the sender's call, but the kernel does not promise it.
    while (rustix::io::ioctl_fionread(&to).unwrap() as usize) < bytes.len() {
        std::thread::yield_now();
    }
    while sink.frames.len() < frames.len() {
        to.receive(&mut sink, &mut scratch, usize::MAX).unwrap();
    }
    assert!(sink.frames == frames);
    to.receive_calls()
}

#[test]
fn bulk_in_place_costs_one_read_a_chunk() {
    let frames: Vec<_> = (0..6).map(|chunk| parameters(chunk, 32 << 10)).collect();
    let calls = calls_to_receive(ReceiveMode::InPlace, Policy::Mixed, &frames);
    assert!(calls <= frames.len() as u64 + 2, "{calls} reads for {} chunks", frames.len());
}

#[test]
fn staged_frames_come_many_to_a_read() {
    let frames: Vec<_> = (0..6).map(|chunk| parameters(chunk, 32 << 10)).collect();
    let calls = calls_to_receive(ReceiveMode::Staged, Policy::Staged, &frames);
    assert!(calls <= 2, "{calls} reads for {} chunks", frames.len());
}

#[test]
fn writing_to_a_closed_peer_is_an_error_and_no_signal() {
    let (near, far) = sockets();
    let mut stream = TcpStream::new(near, Direction::ToWorker, 1 << 10).unwrap();
    drop(far);
    let heartbeat = Outgoing { header: Header::bare(Operation::Heartbeat), payload: &[] };
    // The first write provokes the reset; one of the next must meet it.
    let end = (0..1000).find_map(|_| {
        std::thread::sleep(Duration::from_millis(1));
        stream.send(&[heartbeat]).err()
    });
    assert!(matches!(end, Some(StreamError::ClosedByPeer)), "{end:?}");
}
