//! Shared memory between real segments and sockets: the conformance suite, tensors in arenas, and hostile
//! peers.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use paramhub_core::wire::{Direction, Header, Operation};
use paramhub_transport::shm::{RING_BYTES_DEFAULT, Segment, create_rings, receive_segments, send_segments};
use paramhub_transport::{
    Events, FrameSink, Interest, Landing, Outgoing, Poller, ReceiveError, ReceiveMode, Scratch, ShmStream,
    Stream, StreamError,
};

use crate::conformance;
use crate::conformance::{Frame, Options, Peer, Transport};

struct Shm;

/// The other end of a stream, which writes whatever it likes into the shared rings. It is implemented from
/// the documented layout alone.
struct ManualPeer {
    socket: UnixStream,
    rings: Arc<Segment>,
    base: usize,
    capacity: usize,
    written: u64,
}

const WRITTEN: usize = 0;
const READ: usize = 64;
const WRITER_SLEEPS: usize = 192;
const BYTES: usize = 256;

impl ManualPeer {
    fn count(&self, offset: usize) -> u64 {
        let mut bytes = [0; 8];
        self.rings.read(self.base + offset, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    fn claim(&mut self, written: u64) {
        self.rings.write(self.base + WRITTEN, &written.to_le_bytes());
        self.ring();
    }

    fn ring(&mut self) {
        use std::io::Write;
        // The socket is full of bells already, or its reader is gone.
        let _ = self.socket.write(&[1]);
    }
}

impl Peer for ManualPeer {
    fn write(&mut self, bytes: &[u8]) {
        // It asks to be woken, so it leaves bells unread when it breaks off.
        self.rings.write(self.base + WRITER_SLEEPS, &1_u32.to_le_bytes());
        for &byte in bytes {
            // Like any writer, it does not overwrite data that is not read yet.
            while self.written - self.count(READ) == self.capacity as u64 {
                std::thread::yield_now();
            }
            let at = self.written as usize % self.capacity;
            self.rings.write(self.base + BYTES + at, &[byte]);
            self.written += 1;
        }
        self.claim(self.written);
    }

    fn close(mut self) {
        // A bell that rings between here and the end would make the end a reset.
        self.rings.write(self.base + WRITER_SLEEPS, &0_u32.to_le_bytes());
        while matches!(std::io::Read::read(&mut self.socket, &mut [0; 64]), Ok(1..)) {}
    }

    fn reset(self) {}
}

fn capacity(options: Options) -> usize {
    if options.tight { 64 << 10 } else { 4 << 20 }
}

fn rings(capacity: usize) -> Arc<Segment> {
    Arc::new(create_rings(capacity).unwrap())
}

fn other(direction: Direction) -> Direction {
    if direction == Direction::ToHub { Direction::ToWorker } else { Direction::ToHub }
}

impl Transport for Shm {
    type Stream = ShmStream;
    type Peer = ManualPeer;

    fn pair(options: Options) -> (ShmStream, ShmStream) {
        let (near, far) = UnixStream::pair().unwrap();
        let (capacity, max) = (capacity(options), options.frame_bytes_max);
        let rings = rings(capacity);
        let back = other(options.direction);
        (
            ShmStream::new(near, rings.clone(), capacity, back, max).unwrap(),
            ShmStream::new(far, rings, capacity, options.direction, max).unwrap(),
        )
    }

    fn with_peer(options: Options) -> (ManualPeer, ShmStream) {
        let (socket, far) = UnixStream::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        let capacity = capacity(options);
        let rings = rings(capacity);
        let stream =
            ShmStream::new(far, rings.clone(), capacity, options.direction, options.frame_bytes_max).unwrap();
        // The worker's ring comes first, the hub's second.
        let base = if options.direction == Direction::ToWorker { BYTES + capacity } else { 0 };
        (ManualPeer { socket, rings, base, capacity, written: 0 }, stream)
    }
}

conformance!(Shm);

/// Notes the frames whose payload is in its arena.
#[derive(Default)]
struct Placed {
    headers: Vec<Header>,
    staged: Vec<Frame>,
}

impl FrameSink for Placed {
    type Error = std::convert::Infallible;

    fn landing(&mut self, header: &Header) -> Result<Landing<'_>, Self::Error> {
        assert!(!header.operation.carries_tensor());
        Ok(Landing::Staged)
    }

    fn frame(&mut self, header: &Header, payload: Option<&[u8]>) -> Result<(), Self::Error> {
        self.staged.push(Frame { header: *header, payload: payload.unwrap_or_default().to_vec() });
        Ok(())
    }

    fn placed(&mut self, header: &Header) -> Result<(), Self::Error> {
        self.headers.push(*header);
        Ok(())
    }
}

#[test]
fn tensors_stay_in_the_arena_and_control_frames_travel() {
    let options = Options::with_mode(paramhub_transport::ReceiveMode::Staged);
    let (from, to) = Shm::pair(Options { direction: Direction::ToHub, ..options });
    let (mut from, mut to) = (from.with_arena(), to.with_arena());
    let push = |chunk| Header { chunk, length: 32_768, ..Header::bare(Operation::PushPull) };
    let words = [7; 24];
    let retune = Header { step: 3, length: words.len() as u32, ..Header::bare(Operation::Retune) };
    let mut frames: Vec<_> = (0..40).map(|chunk| Outgoing { header: push(chunk), payload: &[] }).collect();
    frames.insert(20, Outgoing { header: retune, payload: &words });
    let sent = from.send(&frames).unwrap();
    assert_eq!((sent.frames, sent.bytes), (41, 40 * (16 + 32_768) + 16 + 24));

    let (mut sink, mut scratch) = (Placed::default(), Scratch::default());
    // The size of the tensor behind a header counts: tensors bound a turn's work, not headers.
    let first = to.receive(&mut sink, &mut scratch, 100_000).unwrap();
    assert!(first.more && sink.headers.len() <= 8, "{first:?}");
    while to.receive(&mut sink, &mut scratch, 100_000).unwrap().more {}
    assert_eq!(sink.headers, (0..40).map(push).collect::<Vec<_>>());
    assert_eq!(sink.staged, [Frame { header: retune, payload: words.to_vec() }]);
    assert_eq!(to.bytes_received(), from.bytes_sent());
}

#[test]
#[should_panic(expected = "lies")]
fn a_payload_beside_the_arena_is_a_bug() {
    let options = Options::with_mode(paramhub_transport::ReceiveMode::Staged);
    let (from, _to) = Shm::pair(Options { direction: Direction::ToHub, ..options });
    let header = Header { length: 4, ..Header::bare(Operation::Push) };
    let _ = from.with_arena().send(&[Outgoing { header, payload: &[0; 4] }]);
}

#[test]
fn an_announced_chunk_is_bounded_like_one_that_travels() {
    let options = Options::with_mode(paramhub_transport::ReceiveMode::Staged);
    let (mut hand, stream) = Shm::with_peer(Options { direction: Direction::ToHub, ..options });
    let mut stream = stream.with_arena();
    let too_long = Header { length: Options::MAX as u32 + 1, ..Header::bare(Operation::Push) };
    hand.write(&too_long.encode());
    let end = stream.receive(&mut Placed::default(), &mut Scratch::default(), usize::MAX);
    assert!(matches!(end, Err(ReceiveError::Frame(_))), "{end:?}");
}

#[test]
fn counts_that_cannot_be_end_the_stream() {
    for count in [RING_BYTES_DEFAULT as u64 * 1000, u64::MAX, 1 << 63] {
        let (mut hand, mut stream) =
            Shm::with_peer(Options::with_mode(paramhub_transport::ReceiveMode::Staged));
        hand.claim(count);
        let (mut sink, mut scratch) = (Placed::default(), Scratch::default());
        let end = stream.receive(&mut sink, &mut scratch, usize::MAX);
        assert!(matches!(end, Err(ReceiveError::Stream(StreamError::Io(_)))), "{end:?}");
        let end = stream.receive(&mut sink, &mut scratch, usize::MAX);
        assert!(matches!(end, Err(ReceiveError::Stream(StreamError::Closed { .. }))), "{end:?}");
        assert!(sink.headers.is_empty() && sink.staged.is_empty());
    }
}

#[test]
fn a_storm_of_bells_and_flags_disturbs_no_other_stream() {
    let options = Options::with_mode(paramhub_transport::ReceiveMode::Staged);
    let (mut hand, mut stream) = Shm::with_peer(options);
    let notice = Header { length: 5, ..Header::bare(Operation::Notice) };
    let (mut sink, mut scratch) = (Placed::default(), Scratch::default());
    for round in 0..50 {
        for offset in [128, 192] {
            hand.rings.write(offset, &u32::MAX.to_le_bytes());
            hand.rings.write(BYTES + hand.capacity + offset, &u32::MAX.to_le_bytes());
        }
        // The flag that shows the writer's end is 4 bytes further; it stays clear.
        (0..1000).for_each(|_| hand.ring());
        hand.write(&[&notice.encode()[..], b"hello"].concat());
        stream.receive(&mut sink, &mut scratch, usize::MAX).unwrap();
        let beat = Outgoing { header: Header::bare(Operation::Heartbeat), payload: &[] };
        assert_eq!(stream.send(&[beat]).unwrap().frames, 1);
        assert_eq!(sink.staged.len(), round + 1);
    }
}

#[test]
fn a_peer_that_never_stops_ringing_takes_no_more_than_its_turn() {
    use std::io::Write;
    let (mut hand, mut stream) = Shm::with_peer(Options::with_mode(paramhub_transport::ReceiveMode::Staged));
    // The peer could ring on while this side reads, so not all bells are read.
    while hand.socket.write(&[1; 4096]).is_ok() {}
    let waiting = |stream: &ShmStream| rustix::io::ioctl_fionread(stream).unwrap();
    let before = waiting(&stream);
    let (mut sink, mut scratch) = (Placed::default(), Scratch::default());
    assert_eq!(stream.receive(&mut sink, &mut scratch, usize::MAX).unwrap().bytes, 0);
    assert!(!stream.discard());
    assert!(before > 10_000 && waiting(&stream) > before - 2_000, "{} of {before}", waiting(&stream));
    // The rest is reported again, and the end is found after it.
    hand.write(&Header::bare(Operation::Heartbeat).encode());
    drop(hand);
    let poller = Poller::new().unwrap();
    poller.add(&stream, 7, Interest::READABLE).unwrap();
    let mut events = Events::with_capacity(4);
    loop {
        poller.wait(&mut events, Some(std::time::Duration::from_secs(20))).unwrap();
        assert_eq!(events.iter().count(), 1);
        if stream.receive(&mut sink, &mut scratch, usize::MAX).unwrap().closed {
            break;
        }
    }
    assert_eq!(sink.staged.len(), 1);
}

#[test]
fn a_late_listener_is_woken_for_the_first_byte() {
    let options = Options::with_mode(paramhub_transport::ReceiveMode::Staged);
    let (mut hub, worker) = Shm::pair(options);
    let beat = Outgoing { header: Header::bare(Operation::Heartbeat), payload: &[] };
    hub.send(&[beat]).unwrap();
    let poller = Poller::new().unwrap();
    poller.add(&worker, 7, Interest::READABLE).unwrap();
    let mut events = Events::with_capacity(4);
    poller.wait(&mut events, Some(std::time::Duration::from_secs(20))).unwrap();
    assert_eq!(events.iter().map(|event| event.token).collect::<Vec<_>>(), [7]);
}

#[test]
fn an_end_arrives_after_all_bytes_before_it_and_the_other_direction_goes_on() {
    let options = Options::with_mode(paramhub_transport::ReceiveMode::Staged);
    let (mut hub, mut worker) = Shm::pair(options);
    let notice = Header { length: 5, ..Header::bare(Operation::Notice) };
    hub.send(&[Outgoing { header: notice, payload: b"hello" }]).unwrap();
    hub.end_sending().unwrap();
    let (mut sink, mut scratch) = (Placed::default(), Scratch::default());
    let received = worker.receive(&mut sink, &mut scratch, usize::MAX).unwrap();
    assert!(received.closed && sink.staged.len() == 1);
    let leave = Outgoing { header: Header::bare(Operation::Leave), payload: &[] };
    worker.send(&[leave]).unwrap();
    let received = hub.receive(&mut sink, &mut scratch, usize::MAX).unwrap();
    assert!(!received.closed && sink.staged.len() == 2);
    worker.end_sending().unwrap();
    drop(worker);
    assert!(hub.receive(&mut sink, &mut scratch, usize::MAX).unwrap().closed);
}

#[test]
fn segments_cross_a_socket_with_their_message() {
    let (near, far) = UnixStream::pair().unwrap();
    let segments = [Segment::create("one", 5000).unwrap(), Segment::create("two", 100).unwrap()];
    segments[1].write(40, b"there");
    send_segments(&near, b"message", &[segments[0].as_fd(), segments[1].as_fd()]).unwrap();
    let mut bytes = [0; 20];
    let (received, descriptors) = receive_segments(&far, &mut bytes).unwrap();
    assert_eq!(&bytes[..received], b"message");
    let [one, two]: [OwnedFd; 2] = descriptors.try_into().unwrap();
    let (one, two) = (Segment::adopt(one, 5000).unwrap(), Segment::adopt(two, 100).unwrap());
    assert_eq!((one.identity(), two.identity()), (segments[0].identity(), segments[1].identity()));
    let mut word = [0; 5];
    two.read(40, &mut word);
    assert_eq!(&word, b"there");
    one.stream(0, &[9; 5000]);
    let mut all = vec![0; 5000];
    segments[0].read(0, &mut all);
    assert!(all.iter().all(|&byte| byte == 9));
    drop(near);
    assert_eq!(receive_segments(&far, &mut bytes).unwrap().0, 0);
}

#[test]
fn memory_that_could_vanish_is_refused() {
    use rustix::fs::{MemfdFlags, memfd_create};
    let memory = |flags| {
        let memory = memfd_create("hostile", flags).unwrap();
        rustix::fs::ftruncate(&memory, 4096).unwrap();
        memory
    };
    let reason = |memory: OwnedFd| Segment::adopt(memory, 4096).unwrap_err().to_string();
    assert!(reason(memory(MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)).contains("not sealed"));
    assert!(reason(memory(MemfdFlags::CLOEXEC)).contains("not sealed"));
    let short = Segment::create("short", 100).unwrap().as_fd().try_clone_to_owned().unwrap();
    assert!(reason(short).contains("100 bytes instead of 4096"));
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(reason(file.into()).contains("no ordinary memory file"));
    assert!(reason(UnixStream::pair().unwrap().0.into()).contains("no ordinary memory file"));
}

#[test]
fn a_reader_of_a_sealed_segment_cannot_write_it() {
    let segment = Segment::create("shared", 4096).unwrap();
    segment.seal_writing().unwrap();
    segment.write(0, b"before");
    let reader = || segment.as_fd().try_clone_to_owned().unwrap();
    assert!(Segment::adopt(reader(), 4096).is_err(), "no new mapping may write");
    let mut word = [0; 6];
    Segment::adopt_to_read(reader(), 4096).unwrap().read(0, &mut word);
    assert_eq!(&word, b"before");
}

/// Copies a chunk for every header that requests one.
struct Copying {
    asked: usize,
    copied: usize,
}

const COPIED: usize = 64 << 10;

impl FrameSink for Copying {
    type Error = ();

    fn landing(&mut self, _: &Header) -> Result<Landing<'_>, ()> {
        Ok(Landing::Staged)
    }

    fn frame(&mut self, header: &Header, _: Option<&[u8]>) -> Result<(), ()> {
        assert_eq!(header.operation, Operation::Pull);
        (self.asked, self.copied) = (self.asked + 1, self.copied + COPIED);
        Ok(())
    }

    fn moved(&mut self) -> usize {
        std::mem::take(&mut self.copied)
    }
}

#[test]
fn a_flood_of_pulls_counts_the_time_of_its_copies() {
    const PULLS: usize = 256;
    const BUDGET: usize = 4 * COPIED;
    let tight = Options::with_mode(ReceiveMode::Staged);
    let options = Options { direction: Direction::ToHub, tight: true, ..tight };
    let (mut worker, hub) = Shm::pair(options);
    let mut hub = hub.with_arena();
    let pulls: Vec<Outgoing<'_>> = (0..PULLS as u32)
        .map(|chunk| Outgoing { header: Header { chunk, ..Header::bare(Operation::Pull) }, payload: &[] })
        .collect();
    assert_eq!(worker.send(&pulls).unwrap().frames, PULLS);
    let (mut sink, mut scratch, mut turns) = (Copying { asked: 0, copied: 0 }, Scratch::default(), 0);
    while sink.asked < PULLS {
        let before = sink.asked;
        let received = hub.receive(&mut sink, &mut scratch, BUDGET).unwrap();
        // Headers that were read ahead when the budget was used up are still processed.
        assert!((1..=4 + 8).contains(&(sink.asked - before)), "{} Pulls in one turn", sink.asked - before);
        assert_eq!(received.bytes, (sink.asked - before) * 16, "what is charged is not counted as received");
        assert!(received.more || sink.asked == PULLS);
        turns += 1;
    }
    assert!(turns >= PULLS / 12, "{turns} turns");
}
