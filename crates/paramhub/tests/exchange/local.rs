//! A worker of this host that speaks the protocol through shared memory by hand, and so can break it: what it brings is
//! refused with a reason, and what it does harms its own job at most.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use paramhub_core::arena::ArenaLayout;
use paramhub_core::auth::Nonce;
use paramhub_core::codec::Codec;
use paramhub_core::service::JobState;
use paramhub_core::settings::Settings;
use paramhub_core::wire::{
    CHALLENGE_BYTES, Direction, Failure, HEADER_BYTES, Header, Hello, Operation, Refusal, VERDICT_BYTES,
    Verdict, stream_proofs,
};
use paramhub_transport::shm::{RING_BYTES_DEFAULT, Segment, create_rings, send_segments};
use paramhub_worker::{Job, Member, Options, Sharing, Transport};
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};

use crate::bystander::beside_a_running_job;
use crate::cluster::{Cluster, PATIENCE, Ticket, await_true, keys};
use crate::raw::{Raw, settings};

/// Where the parts of a ring lie, as `paramhub-transport/src/shm/ring.rs` draws them; the hub's ring follows the worker's.
const WRITTEN: usize = 0;
const READ: usize = 64;
const READER_SLEEPS: usize = 128;
const WRITER_SLEEPS: usize = 192;
const ENDED: usize = 196;
const BYTES: usize = 256;
const HUBS: usize = BYTES + RING_BYTES_DEFAULT;

/// A connection to the hub's local socket over which nothing was said yet.
fn dial(cluster: &Cluster) -> UnixStream {
    let name = cluster.client.hubs().unwrap().remove(0).shape.local.expect("the hub offers shared memory");
    let socket = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn shake_hands(
    mut socket: &UnixStream,
    hello: &Hello,
    nonce: &Nonce,
    descriptors: &[BorrowedFd<'_>],
) -> Verdict {
    send_segments(socket, &hello.encode(), descriptors).unwrap();
    let mut challenge = [0; CHALLENGE_BYTES];
    socket.read_exact(&mut challenge).unwrap();
    socket.write_all(&stream_proofs(nonce, hello, &challenge).0.0).unwrap();
    let mut verdict = [0; VERDICT_BYTES];
    socket.read_exact(&mut verdict).unwrap();
    Verdict::decode(&verdict).unwrap()
}

/// The first word of the same rank's stream to another core.
fn at_core(hello: &Hello, core: u16) -> Hello {
    Hello { core, ..*hello }
}

fn arena(settings: &Settings) -> Segment {
    Segment::create("arena", ArenaLayout::new(settings).bytes() as usize).unwrap()
}

fn rings() -> Segment {
    create_rings(RING_BYTES_DEFAULT).unwrap()
}

/// A worker that was let in.
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
        match shake_hands(&socket, &hello, &ticket.nonce, &[arena.as_fd(), rings.as_fd()]) {
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

    /// Says that so many bytes were written, and wakes the hub.
    fn claim(&mut self, written: u64) {
        self.rings.write(WRITTEN, &written.to_le_bytes());
        self.wake();
    }

    fn wake(&mut self) {
        // A hub that has hung up needs no waking.
        let _ = self.socket.write(&[1]);
    }

    /// The next frame, of those that carry a tensor the header only.
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
            assert!(begun.elapsed() < PATIENCE, "the hub says nothing");
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

    /// Whether the hub says that nothing more will come, or hangs up.
    fn is_closed(&mut self) -> bool {
        self.socket.set_nonblocking(true).unwrap();
        await_true("the hub closes", || {
            let mut ended = [0; 4];
            self.rings.read(HUBS + ENDED, &mut ended);
            let hung_up = loop {
                match (&self.socket).read(&mut [0; 256]) {
                    // What woke us before.
                    Ok(1..) => {}
                    Ok(0) => break true,
                    Err(error) => break error.kind() != ErrorKind::WouldBlock,
                }
            };
            (hung_up || u32::from_le_bytes(ended) != 0).then_some(true)
        })
    }
}

/// A push of chunk 0 of [`settings`], whose gradient lies in the arena.
fn push(step: u32) -> Vec<u8> {
    let header = Header { operation: Operation::PushPull, codec: Codec::F32, chunk: 0, step, length: 16 };
    header.encode().to_vec()
}

fn memfd(flags: MemfdFlags, length: usize, seals: SealFlags) -> rustix::io::Result<OwnedFd> {
    let memory = memfd_create("by hand", flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, length as u64)?;
    fcntl_add_seals(&memory, seals)?;
    Ok(memory)
}

/// Takes the pages of a segment away.
fn punch(segment: &Segment) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(segment, flags, 0, segment.len() as u64).unwrap();
}

#[test]
fn descriptors_that_are_no_use_are_refused_and_harm_nobody() {
    let cluster = Cluster::new(1);
    let size = ArenaLayout::new(&settings()).bytes() as usize;
    let (good_arena, good_rings) = (arena(&settings()), rings());
    let unsealed = memfd(MemfdFlags::empty(), size, SealFlags::empty()).unwrap();
    let may_shrink = memfd(MemfdFlags::empty(), size, SealFlags::GROW).unwrap();
    let unwritable = memfd(MemfdFlags::empty(), size, SealFlags::SHRINK | SealFlags::WRITE).unwrap();
    let view = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&good_arena.as_fd()));
    let read_only = rustix::fs::open(view, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let (short, long) =
        (Segment::create("short", size - 4).unwrap(), Segment::create("long", 2 * size).unwrap());
    let (small_rings, large_rings) = (create_rings(4096).unwrap(), create_rings(1 << 20).unwrap());
    let file = tempfile::tempfile().unwrap();
    file.set_len(size as u64).unwrap();
    let (pipe, _writer) = std::io::pipe().unwrap();
    let (one_end, _other_end) = UnixStream::pair().unwrap();
    let (arena, rings) = (good_arena.as_fd(), good_rings.as_fd());
    let no_memory = "its arena cannot be used: the descriptor is no ordinary memory file";
    let unsafe_size = "its arena cannot be used: the memory file's size is not sealed";
    let mut offers = vec![
        ("none", vec![], "0 descriptors came with it instead of 2"),
        ("one", vec![arena], "1 descriptors came with it instead of 2"),
        ("three", vec![arena, rings, rings], "3 descriptors came with it instead of 2"),
        ("four", vec![arena; 4], "4 descriptors came with it instead of 2"),
        ("unsealed", vec![unsealed.as_fd(), rings], unsafe_size),
        ("may shrink", vec![may_shrink.as_fd(), rings], unsafe_size),
        (
            "sealed against writing",
            vec![unwritable.as_fd(), rings],
            "its arena cannot be used: Operation not",
        ),
        ("read only", vec![read_only.as_fd(), rings], "its arena cannot be used: Permission denied"),
        ("short", vec![short.as_fd(), rings], "bytes instead of"),
        ("long", vec![long.as_fd(), rings], "bytes instead of"),
        ("small rings", vec![arena, small_rings.as_fd()], "its rings cannot be used: the memory file has"),
        ("large rings", vec![arena, large_rings.as_fd()], "its rings cannot be used: the memory file has"),
        ("the wrong way round", vec![rings, arena], "its rings cannot be used: the memory file has"),
        ("a pipe", vec![pipe.as_fd(), rings], no_memory),
        ("a socket", vec![one_end.as_fd(), rings], no_memory),
        ("a file", vec![file.as_fd(), rings], "its arena cannot be used: "),
        ("a pipe for rings", vec![arena, pipe.as_fd()], "its rings cannot be used: the descriptor is no"),
    ];
    let huge = memfd(MemfdFlags::HUGETLB, 2 << 20, SealFlags::SHRINK);
    match &huge {
        Ok(huge) => offers.push(("huge pages", vec![huge.as_fd(), rings], no_memory)),
        Err(errno) => println!("this kernel has no huge pages to offer: {errno}"),
    }
    beside_a_running_job(&cluster, || {
        let ticket = cluster.job("offers", 1);
        let (_, hello) = Raw::join_with(&cluster, &ticket, 0, &settings());
        let before = descriptors();
        for (what, offer, reason) in &offers {
            let socket = dial(&cluster);
            match shake_hands(&socket, &hello, &ticket.nonce, offer) {
                Verdict::Refused { refusal: Refusal::Memory, message } => {
                    assert!(message.contains(reason), "{what}: {message}");
                    assert!(message.contains("rank 0 of job `offers`"), "{what}: {message}");
                }
                other => panic!("{what}: {other:?}"),
            }
        }
        await_true("what was refused is closed", || (descriptors() <= before).then_some(()));
        // A guess at the secret gets no further than over TCP.
        let offer = [arena, rings];
        match shake_hands(&dial(&cluster), &hello, &Nonce([0; 32]), &offer) {
            Verdict::Refused { refusal: Refusal::WrongNonce, message } => {
                assert!(message.contains("secret is wrong"), "{message}");
            }
            other => panic!("a wrong nonce: {other:?}"),
        }
        let socket = dial(&cluster);
        let verdict = shake_hands(&socket, &hello, &ticket.nonce, &offer);
        assert!(matches!(verdict, Verdict::Welcome { .. }), "{verdict:?}");
    });
}

/// Descriptors of this process, in which hub and workers are, but for TCP connections: the hub's calls to its manager come
/// and go all the time.
fn descriptors() -> usize {
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let inodes = table.lines().skip(1).filter_map(|line| line.split_whitespace().nth(9));
    let connections: Vec<_> = inodes.map(|inode| format!("socket:[{inode}]")).collect();
    let is_counted = |link: &std::path::Path| !connections.iter().any(|socket| link.as_os_str() == &**socket);
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    open.filter_map(|entry| std::fs::read_link(entry.path()).ok()).filter(|link| is_counted(link)).count()
}

#[test]
fn more_descriptors_than_fit_into_a_message_are_refused_and_closed() {
    let cluster = Cluster::new(1);
    let ticket = cluster.job("many", 1);
    let (_, hello) = Raw::join_with(&cluster, &ticket, 0, &settings());
    let (arena, rings) = (arena(&settings()), rings());
    let before = descriptors();
    {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let mut socket = dial(&cluster);
        let many = [arena.as_fd(); 200];
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
        let hello_wire = hello.encode();
        // Some with each half of the first message.
        for half in hello_wire.chunks(hello_wire.len() / 2) {
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&many)));
            let bytes = [std::io::IoSlice::new(half)];
            assert_eq!(sendmsg(&socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL).unwrap(), half.len());
        }
        let mut challenge = [0; CHALLENGE_BYTES];
        socket.read_exact(&mut challenge).unwrap();
        assert!(descriptors() < before + 20, "a stranger filled the hub's table");
        socket.write_all(&stream_proofs(&ticket.nonce, &hello, &challenge).0.0).unwrap();
        let mut verdict = [0; VERDICT_BYTES];
        socket.read_exact(&mut verdict).unwrap();
        let verdict = Verdict::decode(&verdict).unwrap();
        assert!(matches!(verdict, Verdict::Refused { refusal: Refusal::Memory, .. }), "{verdict:?}");
    }
    await_true("what was refused is closed", || (descriptors() <= before).then_some(()));
    let verdict = shake_hands(&dial(&cluster), &hello, &ticket.nonce, &[arena.as_fd(), rings.as_fd()]);
    assert!(matches!(verdict, Verdict::Welcome { .. }), "{verdict:?}");
}

#[test]
fn streams_of_one_rank_must_bring_the_same_arena() {
    let cluster = Cluster::new(2);
    let settings = Settings { chunk_bytes: 1024, ..Settings::new(keys(&[4096])) };
    let ticket = cluster.job("two-arenas", 1);
    let (_, hello) = Raw::join_with(&cluster, &ticket, 0, &settings);
    let (first, other) = (arena(&settings), arena(&settings));
    let open = |core: u16, arena: &Segment| {
        let (socket, rings) = (dial(&cluster), rings());
        let hello = at_core(&hello, core);
        let verdict = shake_hands(&socket, &hello, &ticket.nonce, &[arena.as_fd(), rings.as_fd()]);
        (verdict, socket)
    };
    let (verdict, _first_stream) = open(0, &first);
    assert!(matches!(verdict, Verdict::Welcome { .. }), "{verdict:?}");
    match open(1, &other).0 {
        Verdict::Refused { refusal: Refusal::Memory, message } => {
            assert!(message.contains("rank 0 of job `two-arenas`"), "{message}");
            assert!(message.contains("its streams bring different arenas"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    let (verdict, _second_stream) = open(1, &first);
    assert!(matches!(verdict, Verdict::Welcome { .. }), "{verdict:?}");
}

/// What rank 1 does to the hub.
type Offence = Box<dyn Fn(&mut LocalRaw)>;

fn says(bytes: Vec<u8>) -> Offence {
    Box::new(move |raw| raw.send(&bytes))
}

fn header(change: impl FnOnce(&mut [u8])) -> Offence {
    let mut bytes = push(0);
    change(&mut bytes);
    says(bytes)
}

#[test]
fn each_lie_in_shared_memory_fails_its_job_with_its_reason_and_no_other_job() {
    let cluster = Cluster::new(1);
    let bare =
        |operation, length| Header { length, codec: Codec::F32, ..Header::bare(operation) }.encode().to_vec();
    let retune = Header { chunk: 1, ..Header::bare(Operation::Retune) }.encode().to_vec();
    let lie = "which its ring cannot hold";
    // Whether the hub still says why to the one at fault: not over rings whose counts are lies.
    let offences: Vec<(&str, Offence, &str, bool)> = vec![
        ("bad operation", header(|bytes| bytes[0] = 200), "operation 200 does not exist", true),
        ("garbage", says(vec![0xff; 64]), "operation 255 does not exist", true),
        ("the hub's operation", says(bare(Operation::Parameters, 16)), "does not go this way", true),
        ("a chunk that is not", header(|bytes| bytes[4] = 9), "chunk 9, which is not on this stream", true),
        (
            "wrong length",
            header(|bytes| bytes[12] = 12),
            "12 bytes of f32 for chunk 0 of key `layer0`, which has 16 bytes",
            true,
        ),
        ("no length", header(|bytes| bytes[12] = 0), "0 bytes of f32 for chunk 0", true),
        ("oversized length", header(|bytes| bytes[12..].fill(0xff)), "announces 4294967295 bytes", true),
        ("wrong codec", header(|bytes| bytes[1] = Codec::F16 as u8), "16 bytes of f16", true),
        ("future step", says(push(5)), "step 5 was asked for, but step 0 is under way", true),
        ("an unknown group", says(retune), "group 1 that cannot be used: the job has no such group", true),
        ("twice", says([push(0), push(0)].concat()), "before the first was answered", true),
        (
            "parameters nobody asked for",
            says(bare(Operation::Initialise, 16)),
            "parameters to start from come once, from rank 0",
            true,
        ),
        ("more than a ring", Box::new(|raw| raw.claim(RING_BYTES_DEFAULT as u64 + 1)), lie, false),
        ("more than memory", Box::new(|raw| raw.claim(u64::MAX)), lie, false),
        (
            "less than before",
            Box::new(move |raw| {
                raw.send(&bare(Operation::Heartbeat, 0).repeat(2));
                // Until the hub has seen it.
                await_true("the hub reads", || {
                    let mut read = [0; 8];
                    raw.rings.read(READ, &mut read);
                    (u64::from_le_bytes(read) == raw.written).then_some(())
                });
                raw.claim(HEADER_BYTES as u64);
            }),
            lie,
            false,
        ),
        (
            "rings taken away",
            Box::new(move |raw| {
                raw.send(&bare(Operation::Heartbeat, 0));
                await_true("the hub reads", || {
                    let mut read = [0; 8];
                    raw.rings.read(READ, &mut read);
                    (u64::from_le_bytes(read) == raw.written).then_some(())
                });
                punch(&raw.rings);
                raw.wake();
            }),
            lie,
            false,
        ),
        (
            "an end without a goodbye",
            Box::new(|raw| {
                raw.rings.write(ENDED, &1_u32.to_le_bytes());
                raw.wake();
            }),
            "without a goodbye",
            false,
        ),
        (
            "an end in mid-frame",
            Box::new(|raw| {
                raw.rings.write(ENDED, &u32::MAX.to_le_bytes());
                raw.send(&push(0)[..8]);
            }),
            "the connection ended inside a frame",
            false,
        ),
    ];
    beside_a_running_job(&cluster, || {
        for (number, (what, offend, reason, is_told)) in offences.iter().enumerate() {
            let name = format!("lie{number}");
            let ticket = cluster.job(&name, 2);
            std::thread::scope(|scope| {
                let honest = scope.spawn(|| {
                    let exchange =
                        |job: Job| job.push_pull(0, vec![0.0f32; 4], vec![0.0f32; 4])?.wait().map(drop);
                    ticket.join(0, settings()).and_then(exchange)
                });
                let mut raw = LocalRaw::join(&cluster, &ticket, 1, &settings());
                offend(&mut raw);
                if *is_told {
                    let failure = raw.await_failure();
                    assert_eq!(failure.rank, Some(1), "{what}: {failure:?}");
                    let message = failure.message;
                    assert!(message.contains(reason), "{what}: {message}");
                    assert!(message.contains(&format!("job `{name}` failed: rank 1")), "{what}: {message}");
                }
                assert!(raw.is_closed(), "{what}");
                if let Err(told) = honest.join().unwrap() {
                    let told = told.to_string();
                    assert!(told.contains(reason) && told.contains("rank 1"), "{what}: {told}");
                } else {
                    assert_eq!(*what, "twice", "only there the honest rank's step can end before the lie");
                }
            });
            let status = cluster.await_end(&name);
            assert_eq!(status.state, JobState::Failed, "{what}");
            assert!(status.message.contains(reason), "{what}: {}", status.message);
            assert!(status.message.contains("rank 1"), "{what}: {}", status.message);
        }
    });
}

#[test]
fn an_offender_that_goes_on_sending_is_told_why_all_the_same() {
    let cluster = Cluster::new(1);
    for round in 0..40 {
        let name = format!("flood{round}");
        let ticket = cluster.job(&name, 1);
        let mut raw = LocalRaw::join(&cluster, &ticket, 0, &settings());
        raw.send(&push(5));
        let heartbeat = Header::bare(Operation::Heartbeat).encode();
        // As a worker in the middle of a step, which hears of the failure when it has sent what it had begun.
        for _ in 0..3000 {
            raw.send(&heartbeat);
        }
        let failure = raw.await_failure();
        assert!(failure.message.contains("step 5 was asked for"), "{name}: {}", failure.message);
    }
}

#[test]
fn a_flood_of_bells_leaves_a_core_to_the_other_jobs() {
    let cluster = Cluster::new(1);
    let ticket = cluster.job("flood", 1);
    let raw = LocalRaw::join(&cluster, &ticket, 0, &settings());
    let (socket, over) = (&raw.socket, AtomicBool::new(false));
    socket.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    std::thread::scope(|scope| {
        // Several, so that the socket is never empty for long.
        for _ in 0..4 {
            scope.spawn(|| {
                let (bells, begun) = (vec![1; 256 << 10], Instant::now());
                while !over.load(Ordering::Relaxed) && begun.elapsed() < PATIENCE {
                    let _ = (&*socket).write(&bells);
                }
            });
        }
        let others = catch_unwind(AssertUnwindSafe(|| {
            cluster.job("beside", 2).run(&settings(), |job| {
                for _ in 0..200 {
                    let (_, mean) =
                        job.push_pull(0, vec![1.0f32; 4], vec![0.0f32; 4]).unwrap().wait().unwrap();
                    assert_eq!(mean, [1.0; 4]);
                }
            });
        }));
        over.store(true, Ordering::Relaxed);
        others.unwrap_or_else(|panic| resume_unwind(panic));
    });
    assert!(!cluster.client.job("flood").unwrap().state.has_ended(), "ringing is no offence");
}

#[test]
fn memory_that_is_brought_twice_harms_its_own_job_at_most() {
    let cluster = Cluster::new(2);
    // An arena as large as the rings.
    let elements = (rings().len() / 2 / 4) as u64;
    let settings = Settings { chunk_bytes: 1024, ..Settings::new(keys(&[elements])) };
    assert_eq!(arena(&settings).len(), rings().len());
    let chunks = chunks_of_cores(&cluster, &settings);
    beside_a_running_job(&cluster, || {
        for (name, arena_is_rings) in [("same-arena", false), ("same-everything", true)] {
            let ticket = cluster.job(name, 2);
            let common = rings();
            let join = |rank| {
                let (_, hello) = Raw::join_with(&cluster, &ticket, rank, &settings);
                [0, 1].map(|core| {
                    let (socket, own) = (dial(&cluster), rings());
                    let offer = [common.as_fd(), if arena_is_rings { common.as_fd() } else { own.as_fd() }];
                    let verdict = shake_hands(&socket, &at_core(&hello, core), &ticket.nonce, &offer);
                    assert!(matches!(verdict, Verdict::Welcome { .. }), "{verdict:?}");
                    LocalRaw { socket, rings: own, written: 0, read: 0 }
                })
            };
            std::thread::scope(|scope| {
                let ranks = [0, 1].map(|rank| scope.spawn(move || join(rank)));
                let mut streams = ranks.map(|rank| rank.join().unwrap());
                for step in 0..20_u32 {
                    for (raw, chunks) in
                        streams.iter_mut().flat_map(|streams| streams.iter_mut().zip(&chunks))
                    {
                        for &(chunk, elements) in chunks {
                            let (operation, codec, length) = (Operation::PushPull, Codec::F32, elements * 4);
                            let wire = Header { operation, codec, chunk, step, length }.encode();
                            match arena_is_rings {
                                true => common.write(BYTES + 16 * (step as usize), &wire),
                                false => raw.send(&wire),
                            }
                        }
                        if arena_is_rings {
                            common.write(WRITTEN, &u64::from(16 * step).to_le_bytes());
                            raw.wake();
                        }
                    }
                    for (raw, chunks) in
                        streams.iter_mut().flat_map(|streams| streams.iter_mut().zip(&chunks))
                    {
                        for _ in chunks.iter().filter(|_| !arena_is_rings) {
                            assert_eq!(raw.await_frame(Operation::Parameters).0.step, step + 1);
                        }
                    }
                }
            });
            // What is left of it is lost with its streams, at the latest.
            let status = cluster.await_end(name);
            assert_eq!(status.state, JobState::Failed, "{status:?}");
        }
    });
}

#[test]
fn random_bytes_in_rings_harm_nobody_else() {
    let cluster = Cluster::new(1);
    let seed: u64 = std::env::var("PARAMHUB_TEST_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64);
    println!("PARAMHUB_TEST_SEED={seed}");
    let mut state = seed | 1;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    beside_a_running_job(&cluster, || {
        for round in 0..40 {
            let name = format!("noise{round}");
            let ticket = cluster.job(&name, 1);
            let mut raw = LocalRaw::join(&cluster, &ticket, 0, &settings());
            // As far as the hub's first check, then noise: a heartbeat, an operation, or a whole ring.
            let mut noise: Vec<u8> = (0..raw.rings.len() / 8).flat_map(|_| random().to_le_bytes()).collect();
            match round % 4 {
                0 => noise[BYTES] = Operation::PushPull as u8,
                1 => noise[BYTES..BYTES + 16].copy_from_slice(&Header::bare(Operation::Heartbeat).encode()),
                _ => {}
            }
            if round % 2 == 0 {
                noise[..8].copy_from_slice(&(random() % RING_BYTES_DEFAULT as u64).to_le_bytes());
            }
            raw.rings.write(0, &noise);
            raw.wake();
            drop(raw);
            let status = cluster.await_end(&name);
            assert_eq!(status.state, JobState::Failed, "{status:?}");
            assert!(status.message.contains("rank 0"), "{}", status.message);
        }
    });
}

#[test]
fn a_worker_that_is_gone_before_it_is_let_in_is_named_to_the_others() {
    let cluster = Cluster::new(1);
    for round in 0..8 {
        let name = format!("gone{round}");
        let ticket = cluster.job(&name, 2);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let exchange =
                    |job: Job| job.push_pull(0, vec![0.0f32; 4], vec![0.0f32; 4])?.wait().map(drop);
                ticket.join(0, settings()).and_then(exchange).unwrap_err().to_string()
            });
            let (_, hello) = Raw::join_with(&cluster, &ticket, 1, &settings());
            let (mut socket, arena, rings) = (dial(&cluster), arena(&settings()), rings());
            send_segments(&socket, &hello.encode(), &[arena.as_fd(), rings.as_fd()]).unwrap();
            let mut challenge = [0; CHALLENGE_BYTES];
            socket.read_exact(&mut challenge).unwrap();
            // The proof has arrived when the hub learns that there is nobody to welcome.
            socket.write_all(&stream_proofs(&ticket.nonce, &hello, &challenge).0.0).unwrap();
            drop(socket);
            let told = waits.join().unwrap();
            assert!(told.contains("rank 1 was lost"), "{told}");
        });
    }
}

/// A job of one rank with so many chunks that the answers fill the hub's ring, and their pushes.
fn many_chunks() -> (Settings, Vec<Vec<u8>>) {
    let chunks = 2 * RING_BYTES_DEFAULT / HEADER_BYTES;
    let settings = Settings { chunk_bytes: 1024, ..Settings::new(keys(&[chunks as u64 * 256])) };
    let pushes = (0..chunks as u32).map(|chunk| {
        let header = Header { chunk, length: 1024, ..Header::bare(Operation::PushPull) };
        Header { codec: Codec::F32, ..header }.encode().to_vec()
    });
    (settings, pushes.collect())
}

#[test]
fn a_lie_about_what_was_read_fails_its_job_when_the_hub_needs_the_room() {
    let cluster = Cluster::new(1);
    let (settings, pushes) = many_chunks();
    beside_a_running_job(&cluster, || {
        for lie in [1 << 40, u64::MAX] {
            let name = format!("reads-{lie}");
            let ticket = cluster.job(&name, 1);
            let mut raw = LocalRaw::join(&cluster, &ticket, 0, &settings);
            raw.rings.write(HUBS + READ, &u64::to_le_bytes(lie));
            for some in pushes.chunks(1000) {
                if cluster.client.job(&name).unwrap().state.has_ended() {
                    break;
                }
                raw.send(&some.concat());
                // So that this side stays honest about its own ring.
                let begun = Instant::now();
                let mut read = [0; 8];
                while u64::from_le_bytes(read) < raw.written && begun.elapsed().as_millis() < 500 {
                    raw.rings.read(READ, &mut read);
                }
            }
            assert!(raw.is_closed());
            let status = cluster.await_end(&name);
            assert_eq!(status.state, JobState::Failed);
            assert!(status.message.contains("rank 0 was lost"), "{}", status.message);
            assert!(status.message.contains("bytes are read after"), "{}", status.message);
        }
    });
}

#[test]
fn a_worker_that_reads_nothing_holds_up_nobody_and_goes_on_when_it_does() {
    let cluster = Cluster::new(1);
    let (settings, pushes) = many_chunks();
    beside_a_running_job(&cluster, || {
        let ticket = cluster.job("lazy", 1);
        let mut raw = LocalRaw::join(&cluster, &ticket, 0, &settings);
        for some in pushes.chunks(1000) {
            raw.send(&some.concat());
            await_true("the hub reads on", || {
                let mut read = [0; 8];
                raw.rings.read(READ, &mut read);
                (u64::from_le_bytes(read) == raw.written).then_some(())
            });
        }
        let mut answered = vec![false; pushes.len()];
        while answered.contains(&false) {
            let (header, _) = raw.await_frame(Operation::Parameters);
            assert_eq!(header.step, 1);
            assert!(!std::mem::replace(&mut answered[header.chunk as usize], true));
            raw.wake();
        }
        raw.send(&Header::bare(Operation::Leave).encode());
        assert_eq!(cluster.await_end("lazy").state, JobState::Finished);
    });
}

#[test]
fn scribbles_in_flags_and_arenas_harm_no_other_job_and_end_none() {
    const ELEMENTS: usize = 60_000;
    const STEPS: u32 = 60;
    let cluster = Cluster::new(2);
    beside_a_running_job(&cluster, || {
        for reproducible in [false, true] {
            let settings = Settings { reproducible, ..Settings::new(keys(&[ELEMENTS as u64])) };
            let name = format!("scribbled-{reproducible}");
            let ticket = cluster.job(&name, 2);
            let (shared, over) = (arena(&settings), AtomicBool::new(false));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let job = ticket.join(0, settings.clone()).unwrap();
                    for _ in 0..STEPS {
                        let (gradient, out) = (vec![1.0f32; ELEMENTS], vec![0.0f32; ELEMENTS]);
                        job.push_pull(0, gradient, out).unwrap().wait().unwrap();
                    }
                    job.leave().unwrap();
                });
                let (_, hello) = Raw::join_with(&cluster, &ticket, 1, &settings);
                let mut streams = [0, 1].map(|core| {
                    let (socket, rings) = (dial(&cluster), rings());
                    let offer = [shared.as_fd(), rings.as_fd()];
                    let verdict = shake_hands(&socket, &at_core(&hello, core), &ticket.nonce, &offer);
                    assert!(matches!(verdict, Verdict::Welcome { .. }), "{verdict:?}");
                    LocalRaw { socket, rings, written: 0, read: 0 }
                });
                scope.spawn(|| {
                    let (mut noise, begun) = (0x9e37_79b9_u32, Instant::now());
                    while !over.load(Ordering::Relaxed) && begun.elapsed() < PATIENCE {
                        for at in (0..shared.len() - 4).step_by(4) {
                            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                            shared.write(at, &noise.to_le_bytes());
                        }
                        // And takes the pages away, which its owner may: they come back as zeros.
                        punch(&shared);
                    }
                });
                exchange_scribbling(&mut streams, &chunks_of_cores(&cluster, &settings), STEPS);
                over.store(true, Ordering::Relaxed);
            });
            let status = cluster.await_end(&name);
            assert_eq!(status.state, JobState::Finished, "{status:?}");
        }
    });
}

/// Pushes every chunk at every step over rings whose flags hold anything, and leaves.
fn exchange_scribbling(streams: &mut [LocalRaw; 2], chunks: &[Vec<(u32, u32)>], steps: u32) {
    for step in 0..steps {
        for (raw, chunks) in streams.iter_mut().zip(chunks) {
            for flag in [READER_SLEEPS, WRITER_SLEEPS, HUBS + READER_SLEEPS, HUBS + WRITER_SLEEPS] {
                raw.rings.write(flag, &(0xdead_0000 + step).to_le_bytes());
            }
            for &(chunk, elements) in chunks {
                let (operation, codec, length) = (Operation::PushPull, Codec::F32, elements * 4);
                raw.send(&Header { operation, codec, chunk, step, length }.encode());
            }
        }
        for (raw, chunks) in streams.iter_mut().zip(chunks) {
            for _ in chunks {
                assert_eq!(raw.await_frame(Operation::Parameters).0.step, step + 1);
            }
        }
    }
    streams.iter_mut().for_each(|raw| raw.send(&Header::bare(Operation::Leave).encode()));
}

/// The chunks of each of the hub's two cores, and their elements.
fn chunks_of_cores(cluster: &Cluster, settings: &Settings) -> Vec<Vec<(u32, u32)>> {
    use paramhub_core::chunk::ChunkMap;
    use paramhub_core::placement::Placement;
    let map = ChunkMap::new(&settings.keys, settings.chunk_bytes).unwrap();
    let shape = cluster.client.hubs().unwrap().remove(0).shape;
    let placement = Placement::new(&settings.keys, &map, &[shape]).unwrap();
    let mut cores = vec![Vec::new(); 2];
    for (id, route) in (0..).zip(placement.routes()) {
        for &chunk in placement.chunks(id) {
            cores[usize::from(route.core)].push((chunk, map.extent(chunk).unwrap().elements));
        }
    }
    cores
}

#[test]
fn a_hub_without_shared_memory_says_so_to_who_needs_it_and_serves_the_others_over_tcp() {
    let cluster = Cluster::with(|config| config.shared_memory = false);
    let join = |name: &str, transport, shared_parameters| {
        let ticket = cluster.job(name, 1);
        let options = Options { transport, shared_parameters, ..Default::default() };
        Member::connect_with(ticket.membership(0), options).unwrap().init(settings())
    };
    let hub = cluster.hub().addresses()[0].to_string();
    for (name, transport, shared_parameters, parts) in [
        (
            "needs",
            Transport::Shm,
            Sharing::WherePossible,
            ["the transport shm needs", "use the transport auto or tcp"],
        ),
        (
            "shares",
            Transport::Auto,
            Sharing::Always,
            ["shared parameters need", "join without shared parameters"],
        ),
    ] {
        let told = join(name, transport, shared_parameters).expect_err("there is none").to_string();
        for part in parts.into_iter().chain([&*format!("job `{name}`, rank 0"), &hub, "--no-shared-memory"]) {
            assert!(told.contains(part), "no `{part}` in: {told}");
        }
    }
    let job = join("auto", Transport::Auto, Sharing::WherePossible).unwrap();
    assert!(!job.shares_memory() && !job.shares_parameters());
    let (_, mean) = job.push_pull(0, vec![2.0f32; 4], vec![0.0f32; 4]).unwrap().wait().unwrap();
    assert_eq!(mean, [2.0; 4]);
}
