use std::time::{Duration, Instant};

use paramhub_core::codec::Codec;
use paramhub_core::limits::CONTROL_BYTES_MAX;
use paramhub_core::wire::{FrameError, HEADER_BYTES, Header, Operation};
use paramhub_transport::{Outgoing, ReceiveError, ReceiveMode, Scratch, Sent, Stream, StreamError};

use super::{Collector, Frame, Options, Peer, Policy, Random, Refused, Transport, wire};

const MODES: [ReceiveMode; 2] = [ReceiveMode::Staged, ReceiveMode::InPlace];
const POLICIES: [Policy; 3] = [Policy::Staged, Policy::InPlace, Policy::Mixed];

/// Every combination of mode and landing, since either mode must serve either landing.
fn ways() -> impl Iterator<Item = (Options, Policy)> {
    MODES.into_iter().flat_map(|mode| POLICIES.map(|policy| (Options::with_mode(mode), policy)))
}

/// A frame that a worker may receive, with a payload that differs from all others.
fn frame(chunk: u32, length: usize) -> Frame {
    let operation = match length {
        0 if chunk.is_multiple_of(2) => Operation::Applied,
        _ if chunk % 3 == 2 && length <= CONTROL_BYTES_MAX as usize => Operation::Notice,
        _ => Operation::Parameters,
    };
    let payload =
        (0..length).map(|at| (at.wrapping_mul(31) as u32 ^ chunk.wrapping_mul(0x9d)) as u8).collect();
    Frame {
        header: Header { operation, codec: Codec::F32, chunk, step: !chunk, length: length as u32 },
        payload,
    }
}

fn frames(lengths: impl IntoIterator<Item = usize>) -> Vec<Frame> {
    (0..).zip(lengths).map(|(chunk, length)| frame(chunk, length)).collect()
}

fn outgoing(frames: &[Frame]) -> Vec<Outgoing<'_>> {
    frames.iter().map(Frame::outgoing).collect()
}

/// Calls `step` until it is done; a hang fails.
fn until(what: &str, mut step: impl FnMut() -> bool) {
    let hung = Instant::now() + Duration::from_secs(60);
    while !step() {
        assert!(Instant::now() < hung, "nothing moves: {what}");
        std::thread::yield_now();
    }
}

fn receive_bytes<S: Stream>(stream: &mut S, sink: &mut Collector, scratch: &mut Scratch, total: usize) {
    until("bytes to arrive", || {
        stream.receive(sink, scratch, usize::MAX).expect("good frames");
        assert!(stream.bytes_received() <= total as u64);
        stream.bytes_received() == total as u64
    });
}

/// Receives until the stream ends in any way.
fn receive_end<S: Stream>(stream: &mut S, sink: &mut Collector) -> Result<(), ReceiveError<Refused>> {
    let mut scratch = Scratch::default();
    let mut end = None;
    until("the stream to end", || {
        end = match stream.receive(sink, &mut scratch, usize::MAX) {
            Ok(received) => received.closed.then_some(Ok(())),
            Err(error) => Some(Err(error)),
        };
        end.is_some()
    });
    end.expect("it has ended")
}

fn exchange<S: Stream>(
    from: &mut S,
    to: &mut S,
    frames: &[Frame],
    sink: &mut Collector,
    scratch: &mut Scratch,
) {
    let outgoing = outgoing(frames);
    let (mut sent, before) = (0, sink.frames.len());
    until("frames to arrive", || {
        let Sent { frames: more, blocked, .. } = from.send(&outgoing[sent..]).expect("an open stream");
        sent += more;
        assert_eq!(blocked, sent < frames.len(), "all is sent unless it blocks");
        to.receive(sink, scratch, usize::MAX).expect("good frames");
        sink.frames.len() - before == frames.len()
    });
    assert_eq!(sink.frames[before..], *frames);
    assert_eq!((from.unfinished(), from.bytes_sent()), (0, to.bytes_received()));
}

pub(crate) fn every_size_arrives_whole_and_in_order<T: Transport>() {
    let lengths = (0..=300).chain([1023, 4079, 4080, 4081, 4096, 32_768, 32_767, Options::MAX, 0, 1]);
    let frames = frames(lengths);
    for (options, policy) in ways() {
        for scratch in [4 << 10, 256 << 10] {
            let (mut from, mut to) = T::pair(options);
            let (mut sink, mut scratch) = (Collector::new(policy), Scratch::new(scratch));
            exchange(&mut from, &mut to, &frames, &mut sink, &mut scratch);
            assert_eq!(to.bytes_received(), wire(&frames).len() as u64);
        }
    }
}

pub(crate) fn a_frame_may_exceed_the_scratch<T: Transport>() {
    let frames = frames([1 << 20, 7, (1 << 20) - 1, 0]);
    for (options, policy) in ways() {
        let (mut from, mut to) = T::pair(Options { frame_bytes_max: 1 << 20, ..options });
        exchange(&mut from, &mut to, &frames, &mut Collector::new(policy), &mut Scratch::new(0));
    }
}

pub(crate) fn frames_survive_a_split_at_every_byte<T: Transport>() {
    let frames = frames([0, 1, 17, 0, 40]);
    let bytes = wire(&frames);
    for (options, policy) in ways() {
        let mut scratch = Scratch::default();
        for split in 0..=bytes.len() {
            let (mut peer, mut stream) = T::with_peer(options);
            let mut sink = Collector::new(policy);
            peer.write(&bytes[..split]);
            receive_bytes(&mut stream, &mut sink, &mut scratch, split);
            let whole = whole_frames(&frames, split);
            assert_eq!(sink.frames, frames[..whole], "{options:?} {policy:?}, {split} bytes are here");
            peer.write(&bytes[split..]);
            receive_bytes(&mut stream, &mut sink, &mut scratch, bytes.len());
            assert_eq!(sink.frames, frames, "{options:?} {policy:?}, split after {split} bytes");
        }
    }
}

/// Returns how many of `frames` the first `bytes` bytes contain.
fn whole_frames(frames: &[Frame], bytes: usize) -> usize {
    let mut end = 0;
    frames
        .iter()
        .take_while(|frame| {
            end += HEADER_BYTES + frame.payload.len();
            end <= bytes
        })
        .count()
}

pub(crate) fn frames_survive_single_bytes<T: Transport>() {
    let frames = frames([3, 0, 65, 300]);
    let bytes = wire(&frames);
    for (options, policy) in ways() {
        let (mut peer, mut stream) = T::with_peer(options);
        let (mut sink, mut scratch) = (Collector::new(policy), Scratch::default());
        for (at, byte) in bytes.iter().enumerate() {
            peer.write(&[*byte]);
            receive_bytes(&mut stream, &mut sink, &mut scratch, at + 1);
            assert_eq!(sink.frames.len(), whole_frames(&frames, at + 1));
        }
        assert_eq!(sink.frames, frames);
    }
}

pub(crate) fn frames_survive_random_fragments<T: Transport>() {
    let mut random = Random::new();
    for (options, policy) in ways() {
        for _ in 0..20 {
            let small = |random: &mut Random| if random.below(4) == 0 { Options::MAX } else { 600 };
            let frames = frames((0..30).map(|_| {
                let end = small(&mut random);
                random.below(end + 1)
            }));
            let bytes = wire(&frames);
            let (mut peer, mut stream) = T::with_peer(options);
            let (mut sink, mut scratch) = (Collector::new(policy), Scratch::new(random.below(64 << 10)));
            let mut at = 0;
            while at < bytes.len() {
                let end = small(&mut random);
                let next = bytes.len().min(at + 1 + random.below(end));
                peer.write(&bytes[at..next]);
                at = next;
                let budget = 1 + random.below(40_000);
                until("a fragment to arrive", || {
                    let received = stream.receive(&mut sink, &mut scratch, budget).expect("good frames");
                    assert!(!received.closed);
                    // Sometimes fragments accumulate.
                    stream.bytes_received() == at as u64 || (random.below(3) == 0 && at < bytes.len())
                });
            }
            receive_bytes(&mut stream, &mut sink, &mut scratch, bytes.len());
            assert_eq!(sink.frames, frames);
        }
    }
}

pub(crate) fn one_call_sends_many_frames<T: Transport>() {
    let frames = frames((0..1000).map(|at| at % 7));
    for (options, policy) in ways() {
        let (mut from, mut to) = T::pair(options);
        exchange(&mut from, &mut to, &frames, &mut Collector::new(policy), &mut Scratch::default());
        assert_eq!(from.send(&[]).expect("an open stream"), Sent::default());
    }
}

pub(crate) fn both_directions_work_at_once<T: Transport>() {
    let there = frames([500, 0, 9000]);
    let mut back = there.clone();
    for frame in &mut back {
        frame.header.operation = if frame.payload.is_empty() { Operation::Pull } else { Operation::Push };
    }
    let (mut hub, mut worker) = T::pair(Options::with_mode(ReceiveMode::InPlace));
    let (mut at_hub, mut at_worker) = (Collector::new(Policy::Staged), Collector::new(Policy::Mixed));
    let mut scratch = Scratch::default();
    for _ in 0..20 {
        exchange(&mut hub, &mut worker, &there, &mut at_worker, &mut scratch);
        exchange(&mut worker, &mut hub, &back, &mut at_hub, &mut scratch);
    }
}

pub(crate) fn back_pressure_blocks_and_the_frame_goes_on_from_other_memory<T: Transport>() {
    let frames = frames([30_001; 60]);
    for (options, policy) in ways() {
        let (mut from, mut to) = T::pair(Options { tight: true, ..options });
        let (mut sink, mut scratch) = (Collector::new(policy), Scratch::default());
        let (mut done, mut interrupted) = (0, 0);
        until("frames to arrive", || {
            // Each call uses new memory; the old memory is overwritten before it is freed.
            let mut moved = frames[done..].to_vec();
            let before = from.bytes_sent();
            let sent = from.send(&outgoing(&moved)).expect("an open stream");
            done += sent.frames;
            assert_eq!(from.bytes_sent() - before, sent.bytes as u64);
            assert_eq!(sent.blocked, done < frames.len());
            let here = (frames[0].payload.len() + HEADER_BYTES) * done;
            assert_eq!(from.unfinished() as u64, from.bytes_sent() - here as u64);
            interrupted += usize::from(from.unfinished() > 0);
            moved.iter_mut().for_each(|frame| frame.payload.fill(0xdd));
            if sent.blocked && sent.bytes > 0 {
                return false; // The receiver reads nothing until nothing more can be sent.
            }
            to.receive(&mut sink, &mut scratch, usize::MAX).expect("good frames");
            sink.frames.len() == frames.len()
        });
        assert!(interrupted > 0, "no send stopped inside a frame");
        assert!(sink.frames == frames);
    }
}

pub(crate) fn another_frame_after_an_unfinished_one<T: Transport>() {
    let (mut from, _to) = T::pair(Options { tight: true, ..Options::with_mode(ReceiveMode::Staged) });
    let frames = frames([30_001; 60]);
    let mut sent = 0;
    until("the stream to block inside a frame", || {
        sent += from.send(&outgoing(&frames[sent..])).expect("an open stream").frames;
        from.unfinished() > 0
    });
    let _ = from.send(&outgoing(&frames[sent + 1..]));
}

pub(crate) fn a_lying_header<T: Transport>() {
    let (mut from, _to) = T::pair(Options::with_mode(ReceiveMode::Staged));
    let frame = frame(0, 9);
    let _ = from.send(&[Outgoing { header: frame.header, payload: &frame.payload[1..] }]);
}

pub(crate) fn an_end_between_frames_is_orderly_and_inside_one_is_not<T: Transport>() {
    let frames = frames([0, 5, 33]);
    let bytes = wire(&frames);
    for (options, policy) in ways() {
        for end in 0..=bytes.len() {
            let (mut peer, mut stream) = T::with_peer(options);
            peer.write(&bytes[..end]);
            peer.close();
            let mut sink = Collector::new(policy);
            let result = receive_end(&mut stream, &mut sink);
            let whole = whole_frames(&frames, end);
            assert_eq!(sink.frames, frames[..whole]);
            match result {
                Ok(()) => assert_eq!(end, wire(&frames[..whole]).len(), "an end inside a frame is no end"),
                Err(ReceiveError::Stream(StreamError::Closed { reset: false })) => {
                    assert!(end > wire(&frames[..whole]).len());
                }
                other => panic!("an end after {end} bytes gives {other:?}"),
            }
        }
    }
}

pub(crate) fn a_reset_is_reported_and_stays<T: Transport>() {
    for (options, policy) in ways() {
        let (mut peer, mut stream) = T::with_peer(options);
        let mut sink = Collector::new(policy);
        let bytes = frame(0, 100).wire();
        peer.write(&bytes[..50]);
        receive_bytes(&mut stream, &mut sink, &mut Scratch::default(), 50);
        peer.reset();
        for _ in 0..2 {
            let end = receive_end(&mut stream, &mut sink);
            assert!(
                matches!(end, Err(ReceiveError::Stream(StreamError::Closed { reset: true }))),
                "{options:?} {end:?}"
            );
        }
        assert_eq!(sink.frames, []);
        let heartbeat = Outgoing { header: Header::bare(Operation::Heartbeat), payload: &[] };
        assert!(matches!(stream.send(&[heartbeat]), Err(StreamError::Closed { reset: true })));
    }
}

/// A name, the bytes, and the error they must give.
type Violation = (&'static str, [u8; HEADER_BYTES], fn(&FrameError) -> bool);

pub(crate) fn a_bad_header_ends_the_stream_and_hands_nothing_over<T: Transport>() {
    let good = frame(0, 21);
    let changed = |at: usize, byte: u8| {
        let mut bytes = frame(1, 21).header.encode();
        bytes[at] = byte;
        bytes
    };
    let too_long = Header { length: Options::MAX as u32 + 1, ..good.header }.encode();
    let cases: [Violation; 6] = [
        ("operation", changed(0, 200), |e| matches!(e, FrameError::Operation(200))),
        ("direction", changed(0, Operation::Push as u8), |e| matches!(e, FrameError::Direction(_))),
        ("codec", changed(1, 77), |e| matches!(e, FrameError::Codec(77))),
        ("reserved", changed(3, 1), |e| matches!(e, FrameError::Reserved(_))),
        ("length", changed(15, 0xff), |e| matches!(e, FrameError::Length { .. })),
        ("frame_bytes_max", too_long, |e| {
            matches!(e, FrameError::Length { length: 33_002, max: 33_001, .. })
        }),
    ];
    for (options, policy) in ways() {
        for (what, bad, expected) in &cases {
            // The bytes come after a good frame and before another, all at once and byte by byte.
            let bytes = [&good.wire()[..], bad, &good.wire()].concat();
            for pieces in [bytes.len(), 1] {
                let (mut peer, mut stream) = T::with_peer(options);
                let mut sink = Collector::new(policy);
                bytes.chunks(pieces).for_each(|piece| peer.write(piece));
                match receive_end(&mut stream, &mut sink) {
                    Err(ReceiveError::Frame(error)) => assert!(expected(&error), "{what}: {error}"),
                    other => panic!("{what}: {other:?}"),
                }
                assert_eq!(sink.frames, std::slice::from_ref(&good), "{what}");
                let after = receive_end(&mut stream, &mut sink);
                assert!(matches!(after, Err(ReceiveError::Stream(StreamError::Closed { .. }))), "{what}");
                assert_eq!(sink.frames.len(), 1, "{what}: a frame after the bad one");
            }
        }
    }
}

pub(crate) fn control_frames_fit_beside_tiny_chunks<T: Transport>() {
    let mut notice = frame(2, CONTROL_BYTES_MAX as usize);
    notice.header.operation = Operation::Notice;
    for (options, policy) in ways() {
        let (mut from, mut to) = T::pair(Options { frame_bytes_max: 8, ..options });
        let frames = [frame(1, 8), notice.clone(), frame(4, 8)];
        exchange(&mut from, &mut to, &frames, &mut Collector::new(policy), &mut Scratch::default());
    }
}

pub(crate) fn a_refusing_sink_ends_the_stream<T: Transport>() {
    let frames = frames([10, 20, 30, 40]);
    for (options, policy) in ways() {
        for at_landing in [true, false] {
            let (mut peer, mut stream) = T::with_peer(options);
            let mut sink = Collector::new(policy);
            *(if at_landing { &mut sink.refuse_landing } else { &mut sink.refuse_frame }) = Some(2);
            peer.write(&wire(&frames));
            let end = receive_end(&mut stream, &mut sink);
            assert!(matches!(end, Err(ReceiveError::Sink(Refused(2)))), "{end:?}");
            assert_eq!(sink.frames, frames[..2]);
            let after = receive_end(&mut stream, &mut sink);
            assert!(matches!(after, Err(ReceiveError::Stream(StreamError::Closed { .. }))));
            // The other direction is not affected: it can still send.
            let heartbeat = Outgoing { header: Header::bare(Operation::Heartbeat), payload: &[] };
            assert_eq!(stream.send(&[heartbeat]).expect("sending goes on").frames, 1);
        }
    }
}

pub(crate) fn withdrawn_memory_is_not_written<T: Transport>() {
    for mode in MODES {
        let (mut peer, mut stream) = T::with_peer(Options::with_mode(mode));
        let (mut sink, mut scratch) = (Collector::new(Policy::InPlace), Scratch::default());
        let bytes = frame(0, 5000).wire();
        peer.write(&bytes[..1000]);
        receive_bytes(&mut stream, &mut sink, &mut scratch, 1000);
        let slot = sink.slot.clone();
        sink.withdrawn = true;
        peer.write(&bytes[1000..]);
        assert!(matches!(receive_end(&mut stream, &mut sink), Err(ReceiveError::Sink(Refused(0)))));
        assert!(sink.frames.is_empty() && sink.slot == slot);
    }
}

pub(crate) fn the_budget_shares_a_thread_fairly<T: Transport>() {
    const BUDGET: usize = 20_000;
    let frames = frames([5000; 30]);
    for (options, policy) in ways() {
        let mut ends: Vec<_> = (0..2)
            .map(|_| {
                let (mut from, to) = T::pair(options);
                let sent = from.send(&outgoing(&frames)).expect("an open stream");
                (from, to, Collector::new(policy), sent)
            })
            .collect();
        // Everything must be there already, or the sender would determine the streams' shares.
        assert!(ends.iter().all(|(.., sent)| !sent.blocked));
        let mut scratch = Scratch::default();
        let mut turns = 0;
        until("both streams to arrive", || {
            turns += 1;
            for (_, to, sink, _) in &mut ends {
                let received = to.receive(sink, &mut scratch, BUDGET).expect("good frames");
                assert!(received.bytes <= BUDGET + HEADER_BYTES, "{received:?} over a budget of {BUDGET}");
                assert!(!received.more || received.bytes >= BUDGET);
            }
            ends.iter().all(|(_, _, sink, _)| sink.frames.len() == frames.len())
        });
        assert!(turns >= wire(&frames).len() / (BUDGET + HEADER_BYTES));
        for (_, _, sink, _) in &ends {
            assert!(sink.frames == frames);
        }
    }
}
