//! Encrypted streams: frames arrive whole in whatever pieces records come, and nothing that somebody on the way changes
//! is taken for the peer's.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream as StdTcpStream};

use paramhub_core::wire::{Direction, Header, Operation};
use paramhub_transport::{Outgoing, ReceiveError, Received, Scratch, Stream, StreamError, TcpStream};
use paramhub_trust::{Cipher, StreamKeys};

use crate::conformance::{Collector, Frame, Options, Policy, Random, Refused};

const CIPHERS: [Cipher; 2] = [Cipher::Aes128Gcm, Cipher::ChaCha20Poly1305];
/// Bytes of a record before its frames, and of the tag behind them.
const HEAD_BYTES: usize = 4;
const TAG_BYTES: usize = 16;

fn sockets() -> (StdTcpStream, StdTcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let near = StdTcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    near.set_nodelay(true).unwrap();
    (near, far)
}

/// Two ends of an encrypted stream, with somebody in the middle who has a socket to each.
struct Middle {
    from: TcpStream,
    to: TcpStream,
    near: StdTcpStream,
    far: StdTcpStream,
}

impl Middle {
    fn new(cipher: Cipher, frame_bytes_max: usize) -> Middle {
        let keys = StreamKeys { cipher, sending: [1; 32], receiving: [2; 32] };
        let ((from, near), (far, to)) = (sockets(), sockets());
        near.set_nonblocking(true).unwrap();
        let from = TcpStream::new(from, Direction::ToHub, frame_bytes_max).unwrap();
        let from = from.with_buffer_bytes(Some(128 << 10), None).unwrap();
        let to = TcpStream::new(to, Direction::ToWorker, frame_bytes_max).unwrap();
        Middle {
            from: from.with_encryption(Some(&keys)),
            to: to.with_encryption(Some(&keys.mirrored())),
            near,
            far,
        }
    }

    /// What has come from the sender.
    fn take(&mut self) -> Vec<u8> {
        let (mut taken, mut piece) = (Vec::new(), [0; 64 << 10]);
        loop {
            match self.near.read(&mut piece) {
                Ok(0) => return taken,
                Ok(read) => taken.extend_from_slice(&piece[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return taken,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// The bytes in which these frames travel.
    fn records_of(&mut self, frames: &[Frame]) -> Vec<u8> {
        let (mut sent, mut taken) = (0, Vec::new());
        while sent < frames.len() || self.from.has_unsent() {
            sent += self.from.send(&outgoing(&frames[sent..])).unwrap().frames;
            taken.extend(self.take());
        }
        // The last bytes may still be on their way.
        let bytes = |taken: &[u8]| -> usize {
            split(taken).0.iter().map(|record| record.len() - HEAD_BYTES - TAG_BYTES).sum()
        };
        let expected: usize = frames.iter().map(|frame| frame.wire().len()).sum();
        while bytes(&taken) < expected {
            taken.extend(self.take());
        }
        taken
    }

    /// Passes bytes on and receives until all of them have come, or the stream is over.
    fn pass(&mut self, bytes: &[u8], sink: &mut Collector) -> Result<Received, ReceiveError<Refused>> {
        let (before, mut scratch) = (self.to.bytes_received(), Scratch::default());
        let (mut passed, mut received) = (0, Received::default());
        // As much at a time as the sockets take.
        for piece in bytes.chunks(32 << 10) {
            self.far.write_all(piece).unwrap();
            passed += piece.len() as u64;
            while !received.closed && self.to.bytes_received() - before < passed {
                received = self.to.receive(sink, &mut scratch, usize::MAX)?;
            }
        }
        Ok(received)
    }
}

fn frame(chunk: u32, length: usize) -> Frame {
    let header = Header { chunk, length: length as u32, step: 1, ..Header::bare(Operation::Parameters) };
    Frame { header, payload: (0..length).map(|at| (at as u32 ^ chunk) as u8).collect() }
}

fn frames(lengths: impl IntoIterator<Item = usize>) -> Vec<Frame> {
    lengths.into_iter().enumerate().map(|(chunk, length)| frame(chunk as u32, length)).collect()
}

fn outgoing(frames: &[Frame]) -> Vec<Outgoing<'_>> {
    frames.iter().map(Frame::outgoing).collect()
}

/// The whole records in these bytes, and what is left.
fn split(mut bytes: &[u8]) -> (Vec<&[u8]>, &[u8]) {
    let mut records = Vec::new();
    while let Some(head) = bytes.first_chunk::<HEAD_BYTES>() {
        let end = HEAD_BYTES + u32::from_le_bytes(*head) as usize;
        if bytes.len() < end {
            break;
        }
        records.push(&bytes[..end]);
        bytes = &bytes[end..];
    }
    (records, bytes)
}

#[test]
fn frames_arrive_whole_in_whatever_pieces_they_come() {
    let mut random = Random::new();
    for cipher in CIPHERS {
        for policy in [Policy::Staged, Policy::InPlace, Policy::Mixed] {
            let mut middle = Middle::new(cipher, Options::MAX);
            let frames = frames((0..40).map(|_| {
                let end = [1, 20, 600, Options::MAX][random.below(4)];
                random.below(end + 1)
            }));
            let bytes = middle.records_of(&frames);
            let (mut sink, mut scratch) = (Collector::new(policy), Scratch::new(random.below(64 << 10)));
            let mut at = 0;
            while at < bytes.len() {
                let end = [1, 3, 700, 90_000][random.below(4)];
                let next = bytes.len().min(at + 1 + random.below(end));
                middle.far.write_all(&bytes[at..next]).unwrap();
                at = next;
                let budget = 1 + random.below(40_000);
                while middle.to.bytes_received() < at as u64 && random.below(3) > 0 {
                    middle.to.receive(&mut sink, &mut scratch, budget).expect("good records");
                }
            }
            while middle.to.bytes_received() < bytes.len() as u64 {
                middle.to.receive(&mut sink, &mut scratch, usize::MAX).expect("good records");
            }
            assert!(sink.frames == frames, "{cipher:?} {policy:?}");
        }
    }
}

#[test]
fn a_frame_may_exceed_what_is_read_or_written_at_once() {
    let frames = frames([1 << 20, 7, (1 << 20) - 1, 0]);
    let mut middle = Middle::new(Cipher::Aes128Gcm, 1 << 20);
    let bytes = middle.records_of(&frames);
    let mut sink = Collector::new(Policy::Mixed);
    middle.pass(&bytes, &mut sink).unwrap();
    assert!(sink.frames == frames);
}

#[test]
fn what_was_sent_no_longer_depends_on_the_senders_memory() {
    let frames = frames([30_001; 200]);
    let mut middle = Middle::new(Cipher::Aes128Gcm, Options::MAX);
    let (mut done, mut kept, mut bytes) = (0, 0, Vec::new());
    while done < frames.len() || middle.from.has_unsent() {
        // Each call uses new memory; the old memory is overwritten before it is freed.
        let mut moved = frames[done..].to_vec();
        let sent = middle.from.send(&outgoing(&moved)).unwrap();
        done += sent.frames;
        moved.iter_mut().for_each(|frame| frame.payload.fill(0xdd));
        assert_eq!((sent.blocked, middle.from.unfinished()), (middle.from.has_unsent(), 0));
        kept += usize::from(middle.from.has_unsent());
        if !sent.blocked || sent.frames == 0 {
            // The receiver reads nothing until nothing more can be sent.
            bytes.extend(middle.take());
        }
    }
    assert!(kept > 0, "the socket took everything at once");
    while split(&bytes).0.len() < frames.len() {
        bytes.extend(middle.take());
    }
    let mut sink = Collector::new(Policy::Staged);
    middle.pass(&bytes, &mut sink).unwrap();
    assert!(sink.frames == frames);
}

/// What somebody in the middle does to the records of a stream.
type Attack = fn(&mut Vec<Vec<u8>>, &mut Random);

#[test]
fn nothing_that_was_changed_on_the_way_is_taken() {
    const ATTACKS: [(&str, Attack); 8] = [
        ("a bit is flipped", |records, random| {
            let record = random.below(records.len());
            let at = HEAD_BYTES + random.below(records[record].len() - HEAD_BYTES);
            records[record][at] ^= 1 << random.below(8);
        }),
        ("a length is changed", |records, random| {
            let record = random.below(records.len());
            records[record][0] ^= 1 << random.below(8);
        }),
        ("a record is left out", |records, random| drop(records.remove(random.below(records.len() - 1)))),
        ("a record is repeated", |records, random| {
            let record = random.below(records.len());
            records.insert(record, records[record].clone());
        }),
        ("two records change places", |records, random| {
            let record = random.below(records.len() - 1);
            records.swap(record, record + 1);
        }),
        ("a record is made up", |records, random| {
            let at = random.below(records.len());
            let length = (20 + TAG_BYTES) as u32;
            records.insert(at, [&length.to_le_bytes()[..], &[7; 20 + TAG_BYTES]].concat());
        }),
        ("a length that no record has", |records, random| {
            let record = random.below(records.len());
            records[record][..HEAD_BYTES].copy_from_slice(&u32::MAX.to_le_bytes());
        }),
        ("a frame in clear", |records, random| {
            let at = random.below(records.len());
            records.insert(at, frame(1, 300).wire());
        }),
    ];
    let mut random = Random::new();
    for (attack, change) in ATTACKS {
        for _ in 0..20 {
            // Each has a record of its own.
            let frames = frames((0..6).map(|at| 5000 + at));
            let mut middle = Middle::new(CIPHERS[random.below(2)], Options::MAX);
            let bytes = middle.records_of(&frames);
            let (records, _) = split(&bytes);
            let mut records: Vec<Vec<u8>> = records.into_iter().map(<[u8]>::to_vec).collect();
            assert_eq!(records.len(), frames.len());
            change(&mut records, &mut random);
            let mut sink = Collector::new(Policy::Staged);
            // What follows completes a record whose length was made larger.
            let bytes = [records.concat(), vec![0; 2 * Options::MAX]].concat();
            let refused = middle.pass(&bytes, &mut sink).unwrap_err();
            assert!(matches!(refused, ReceiveError::Stream(StreamError::Forged)), "{attack}: {refused}");
            assert!(frames.starts_with(&sink.frames), "{attack}: frames in order, up to the attack");
        }
    }
}

#[test]
fn an_end_inside_a_record_is_none_in_order() {
    for kept in [1, HEAD_BYTES, HEAD_BYTES + 10, usize::MAX] {
        let frames = frames([9000, 9000]);
        let mut middle = Middle::new(Cipher::Aes128Gcm, Options::MAX);
        let bytes = middle.records_of(&frames);
        let first = split(&bytes).0[0].len();
        let mut sink = Collector::new(Policy::Staged);
        middle.pass(&bytes[..first.saturating_add(kept).min(bytes.len())], &mut sink).unwrap();
        middle.far.shutdown(std::net::Shutdown::Write).unwrap();
        let end = loop {
            match middle.to.receive(&mut sink, &mut Scratch::default(), usize::MAX) {
                Ok(Received { closed: false, .. }) => {}
                end => break end,
            }
        };
        match end {
            Ok(_) => assert_eq!(kept, usize::MAX, "it ended in order"),
            Err(ReceiveError::Stream(StreamError::Closed { reset: false })) => assert_ne!(kept, usize::MAX),
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn nothing_of_the_frames_can_be_seen() {
    let frame = Frame { payload: vec![0x5a; 20_000], ..frame(3, 20_000) };
    let mut middle = Middle::new(Cipher::Aes128Gcm, Options::MAX);
    let bytes = middle.records_of(&[frame.clone(), frame.clone()]);
    assert!(!bytes.windows(4).any(|bytes| bytes == [0x5a; 4]));
    let header = frame.header.encode();
    assert!(!bytes.windows(header.len()).any(|bytes| bytes == header));
    let (records, _) = split(&bytes);
    assert_ne!(records[0][HEAD_BYTES..], records[1][HEAD_BYTES..], "equal frames differ");
}
