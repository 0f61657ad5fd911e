//! Frames over loopback TCP against bare 256 KB writes and reads, interleaved in one run:
//! `cargo run --release -p paramhub-transport --example loopback [megabytes per round] [rounds] [socket buffer bytes]`
//!
//! One thread sends, one receives. It prints, as medians, GB/s of each way and its ratio to the bare one, CPU
//! seconds per GB of both threads, and system calls per MB.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream as StdTcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use paramhub_core::wire::{Direction, HEADER_BYTES, Header, Operation};
use paramhub_transport::{
    Events, FrameSink, Interest, Landing, Outgoing, Poller, ReceiveMode, Scratch, Stream, TcpStream,
};
use paramhub_trust::{Cipher, StreamKeys};

const CHUNK: usize = 32 << 10;
const RAW: usize = 256 << 10;

/// The buffer size of each socket; 0 leaves the kernel's own sizing on.
static BUFFER_BYTES: AtomicUsize = AtomicUsize::new(0);

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<usize>().expect("a number"));
    let megabytes = arguments.next().unwrap_or(512);
    let rounds = arguments.next().unwrap_or(11);
    let bytes = megabytes << 20;
    if let Some(buffer_bytes) = arguments.next() {
        BUFFER_BYTES.store(buffer_bytes, Ordering::Relaxed);
    }
    // Each side has a model's worth of distinct memory, so that neither works from cache alone.
    let source = vec![1_u8; 100 << 20];
    let mut target = vec![0_u8; 100 << 20];

    type Way = fn(usize, &[u8], &mut [u8]) -> Measured;
    let ways: [(&str, Way); 7] = [
        ("bare 256 KB, read into one buffer", |bytes, source, target| {
            bare(bytes, source, &mut target[..RAW])
        }),
        ("bare 256 KB, read into place", bare),
        ("32 KB frames, staged", |bytes, source, _| framed(bytes, source, ReceiveMode::Staged, Staged)),
        ("32 KB frames, in place", |bytes, source, target| {
            framed(bytes, source, ReceiveMode::InPlace, InPlace { target, at: 0 })
        }),
        ("32 KB frames, copied into place", |bytes, source, target| {
            framed(bytes, source, ReceiveMode::Staged, InPlace { target, at: 0 })
        }),
        ("32 KB frames, encrypted, staged", |bytes, source, _| encrypted(bytes, source, Staged)),
        ("32 KB frames, encrypted, into place", |bytes, source, target| {
            encrypted(bytes, source, InPlace { target, at: 0 })
        }),
    ];
    let mut measured: Vec<Vec<Measured>> = ways.iter().map(|_| Vec::new()).collect();
    for round in 0..=rounds {
        for ((_, way), measured) in ways.iter().zip(&mut measured) {
            let one = way(bytes, &source, &mut target);
            if round > 0 {
                measured.push(one);
            }
        }
    }
    println!("{megabytes} MB a round, medians of {rounds} interleaved rounds");
    let bare = [rate(&mut measured[0]), rate(&mut measured[1])];
    for (((name, _), measured), bare) in
        ways.iter().zip(&mut measured).zip([bare[0], bare[1], bare[0], bare[1], bare[1], bare[0], bare[1]])
    {
        let rate = rate(measured);
        let mut cpu: Vec<_> = measured.iter().map(|one| one.cpu_seconds).collect();
        cpu.sort_by(f64::total_cmp);
        let cpu = cpu[cpu.len() / 2] / (bytes as f64 / 1e9);
        let median = &measured[measured.len() / 2];
        let per_mb = |calls: u64| calls as f64 / (bytes as f64 / 1e6);
        println!(
            "{name:36} {rate:6.2} GB/s  {:5.3} of bare  {cpu:5.3} CPU s/GB  per MB: {:6.2} sends {:6.2} receives {:6.2} waits",
            rate / bare,
            per_mb(median.sends),
            per_mb(median.receives),
            per_mb(median.waits),
        );
    }
}

struct Measured {
    gigabytes_per_second: f64,
    cpu_seconds: f64,
    sends: u64,
    receives: u64,
    waits: u64,
}

fn rate(measured: &mut [Measured]) -> f64 {
    measured.sort_by(|a, b| a.gigabytes_per_second.total_cmp(&b.gigabytes_per_second));
    measured[measured.len() / 2].gigabytes_per_second
}

fn sockets() -> (StdTcpStream, StdTcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback");
    let near = StdTcpStream::connect(listener.local_addr().expect("bound")).expect("loopback");
    let far = listener.accept().expect("a connection").0;
    let buffer_bytes = BUFFER_BYTES.load(Ordering::Relaxed);
    if buffer_bytes > 0 {
        for socket in [&near, &far] {
            let socket = socket2::SockRef::from(socket);
            socket.set_send_buffer_size(buffer_bytes).expect("a size");
            socket.set_recv_buffer_size(buffer_bytes).expect("a size");
        }
    }
    (near, far)
}

/// Blocking writes and reads, nothing in between.
fn bare(bytes: usize, source: &[u8], target: &mut [u8]) -> Measured {
    let (mut near, mut far) = sockets();
    let start = Instant::now();
    let cpu = cpu_seconds();
    let (sends, sender_cpu, receives) = std::thread::scope(|threads| {
        let sender = threads.spawn(move || {
            let mut sends = 0;
            for at in (0..bytes).step_by(RAW) {
                let mut piece = &source[at % (source.len() - RAW)..][..RAW];
                while !piece.is_empty() {
                    sends += 1;
                    piece = &piece[near.write(piece).expect("an open stream")..];
                }
            }
            (sends, cpu_seconds())
        });
        let (mut received, mut receives) = (0, 0);
        while received < bytes {
            let at = received % target.len();
            let end = target.len().min(at + RAW);
            receives += 1;
            received += far.read(&mut target[at..end]).expect("an open stream");
        }
        let (sends, sender_cpu) = sender.join().expect("the sender");
        (sends, sender_cpu, receives)
    });
    let gigabytes_per_second = bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
    Measured {
        gigabytes_per_second,
        cpu_seconds: sender_cpu + cpu_seconds() - cpu,
        sends,
        receives,
        waits: 0,
    }
}

/// The same bytes, including headers, as frames on event loops.
fn framed<S: FrameSink<Error = ()>>(bytes: usize, source: &[u8], mode: ReceiveMode, sink: S) -> Measured {
    let (near, far) = sockets();
    let from = TcpStream::new(near, Direction::ToHub, CHUNK).expect("a socket");
    let to = TcpStream::new(far, Direction::ToWorker, CHUNK).expect("a socket").with_receive_mode(mode);
    exchange(bytes, source, sink, from, to)
}

fn encrypted<S: FrameSink<Error = ()>>(bytes: usize, source: &[u8], sink: S) -> Measured {
    let (near, far) = sockets();
    let cipher = if std::env::var("CHACHA").is_ok() { Cipher::ChaCha20Poly1305 } else { Cipher::Aes128Gcm };
    let keys = StreamKeys { cipher, sending: [1; 32], receiving: [2; 32] };
    let from = TcpStream::new(near, Direction::ToHub, CHUNK).expect("a socket").with_encryption(Some(&keys));
    let to = TcpStream::new(far, Direction::ToWorker, CHUNK)
        .expect("a socket")
        .with_encryption(Some(&keys.mirrored()));
    exchange(bytes, source, sink, from, to)
}

fn exchange<S: FrameSink<Error = ()>>(
    bytes: usize,
    source: &[u8],
    mut sink: S,
    mut from: TcpStream,
    mut to: TcpStream,
) -> Measured {
    let frames = bytes / (CHUNK + HEADER_BYTES);
    let start = Instant::now();
    let cpu = cpu_seconds();
    let (sends, receives, waits, sender_cpu) = std::thread::scope(|threads| {
        let sender = threads.spawn(move || {
            let (poller, mut events, mut waits) = loop_of(&from, Interest::WRITABLE);
            let outgoing: Vec<_> = (0..frames)
                .map(|frame| Outgoing {
                    header: Header { length: CHUNK as u32, ..Header::bare(Operation::Parameters) },
                    payload: &source[frame * CHUNK % (source.len() - CHUNK)..][..CHUNK],
                })
                .collect();
            let mut sent = 0;
            while sent < frames || from.has_unsent() {
                let now = from.send(&outgoing[sent..]).expect("an open stream");
                sent += now.frames;
                if now.blocked {
                    waits += 1;
                    poller.wait(&mut events, None).expect("a poller");
                }
            }
            (from.send_calls(), waits, cpu_seconds(), from)
        });
        let (poller, mut events, mut waits) = loop_of(&to, Interest::READABLE);
        let mut scratch = Scratch::default();
        let per_frame = CHUNK + HEADER_BYTES + if to.is_encrypted() { 20 } else { 0 };
        let total = (frames * per_frame) as u64;
        while to.bytes_received() < total {
            let received = to.receive(&mut sink, &mut scratch, 1 << 20).expect("good frames");
            if !received.more && to.bytes_received() < total {
                waits += 1;
                poller.wait(&mut events, None).expect("a poller");
            }
        }
        let (sends, more_waits, sender_cpu, _open) = sender.join().expect("the sender");
        (sends, to.receive_calls(), waits + more_waits, sender_cpu)
    });
    let gigabytes_per_second = bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
    let cpu_seconds = sender_cpu + cpu_seconds() - cpu;
    Measured { gigabytes_per_second, cpu_seconds, sends, receives, waits }
}

/// CPU time that the calling thread has used so far.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("schedstat");
    text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).expect("nanoseconds") / 1e9
}

fn loop_of(stream: &TcpStream, interest: Interest) -> (Poller, Events, u64) {
    let poller = Poller::new().expect("a poller");
    poller.add(stream, 0, interest).expect("a poller");
    (poller, Events::with_capacity(1), 0)
}

struct Staged;

impl FrameSink for Staged {
    type Error = ();

    fn landing(&mut self, _: &Header) -> Result<Landing<'_>, ()> {
        Ok(Landing::Staged)
    }

    fn frame(&mut self, _: &Header, payload: Option<&[u8]>) -> Result<(), ()> {
        payload.map(|_| ()).ok_or(())
    }
}

struct InPlace<'a> {
    target: &'a mut [u8],
    at: usize,
}

impl FrameSink for InPlace<'_> {
    type Error = ();

    fn landing(&mut self, header: &Header) -> Result<Landing<'_>, ()> {
        Ok(Landing::InPlace(&mut self.target[self.at..][..header.length as usize]))
    }

    fn frame(&mut self, header: &Header, _: Option<&[u8]>) -> Result<(), ()> {
        self.at = (self.at + header.length as usize) % (self.target.len() - CHUNK);
        Ok(())
    }
}
