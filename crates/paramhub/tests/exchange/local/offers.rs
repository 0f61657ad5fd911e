//! Memory that a worker offers with its streams, or fails to offer.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use paramhub_core::arena::ArenaLayout;
use paramhub_core::settings::Settings;
use paramhub_core::wire::{CHALLENGE_MESSAGE_BYTES, Refusal, VERDICT_BYTES, Verdict};
use paramhub_transport::shm::{Segment, create_rings, send_segments};
use paramhub_worker::{Job, Member, Options, ParameterSharing, Transport};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::{arena, at_core, dial, rings, shake_hands};
use crate::bystander::beside_a_running_job;
use crate::cluster::{Cluster, Ticket, Transports, await_true, keys};
use crate::raw::{Raw, proof, settings};

fn memfd(flags: MemfdFlags, length: usize, seals: SealFlags) -> rustix::io::Result<OwnedFd> {
    let memory = memfd_create("by hand", flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, length as u64)?;
    fcntl_add_seals(&memory, seals)?;
    Ok(memory)
}

#[test]
fn unusable_descriptors_are_refused_and_harm_no_job() {
    let cluster = Cluster::new(Transports::shm(), 1);
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
            match shake_hands(&socket, &hello, &ticket, offer) {
                Verdict::Refused { refusal: Refusal::Memory, message } => {
                    assert!(message.contains(reason), "{what}: {message}");
                    assert!(message.contains("rank 0 of job `offers`"), "{what}: {message}");
                }
                other => panic!("{what}: {other:?}"),
            }
        }
        await_true("what was refused is closed", || (descriptors() <= before).then_some(()));
        // A guessed secret gets no further than over TCP.
        let offer = [arena, rings];
        match shake_hands(
            &dial(&cluster),
            &hello,
            &Ticket { secrets: Arc::default(), ..ticket.clone() },
            &offer,
        ) {
            Verdict::Refused { refusal: Refusal::WrongNonce, message } => {
                assert!(message.contains("secret is wrong"), "{message}");
            }
            other => panic!("a wrong nonce: {other:?}"),
        }
        let socket = dial(&cluster);
        let verdict = shake_hands(&socket, &hello, &ticket, &offer);
        assert!(matches!(verdict, Verdict::Welcome { .. }), "{verdict:?}");
    });
}

/// The descriptors of this process, in which hub and workers run, without TCP connections: the hub's calls to
/// its manager come and go all the time.
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
    let cluster = Cluster::new(Transports::shm(), 1);
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
        // Some send each half of the first message.
        for half in hello_wire.chunks(hello_wire.len() / 2) {
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&many)));
            let bytes = [std::io::IoSlice::new(half)];
            assert_eq!(sendmsg(&socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL).unwrap(), half.len());
        }
        let mut challenge = [0; CHALLENGE_MESSAGE_BYTES];
        socket.read_exact(&mut challenge).unwrap();
        assert!(descriptors() < before + 20, "unauthenticated connections filled the hub's table");
        socket.write_all(&proof(&ticket, &hello, &challenge).0).unwrap();
        let mut verdict = [0; VERDICT_BYTES];
        socket.read_exact(&mut verdict).unwrap();
        let verdict = Verdict::decode(&verdict).unwrap();
        assert!(matches!(verdict, Verdict::Refused { refusal: Refusal::Memory, .. }), "{verdict:?}");
    }
    await_true("what was refused is closed", || (descriptors() <= before).then_some(()));
    let verdict = shake_hands(&dial(&cluster), &hello, &ticket, &[arena.as_fd(), rings.as_fd()]);
    assert!(matches!(verdict, Verdict::Welcome { .. }), "{verdict:?}");
}

#[test]
fn streams_of_one_rank_must_bring_the_same_arena() {
    let cluster = Cluster::new(Transports::shm(), 2);
    let settings = Settings { chunk_bytes: 1024, ..Settings::new(keys(&[4096])) };
    let ticket = cluster.job("two-arenas", 1);
    let (_, hello) = Raw::join_with(&cluster, &ticket, 0, &settings);
    let (first, other) = (arena(&settings), arena(&settings));
    let open = |core: u16, arena: &Segment| {
        let (socket, rings) = (dial(&cluster), rings());
        let hello = at_core(&hello, core);
        let verdict = shake_hands(&socket, &hello, &ticket, &[arena.as_fd(), rings.as_fd()]);
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

#[test]
fn a_worker_that_is_gone_before_it_is_let_in_is_named_to_the_others() {
    let cluster = Cluster::new(Transports::shm(), 1);
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
            let mut challenge = [0; CHALLENGE_MESSAGE_BYTES];
            socket.read_exact(&mut challenge).unwrap();
            // The proof has arrived when the hub notices that the other end is gone.
            socket.write_all(&proof(&ticket, &hello, &challenge).0).unwrap();
            drop(socket);
            let error = waits.join().unwrap();
            assert!(error.contains("rank 1 was lost"), "{error}");
        });
    }
}

#[test]
fn a_hub_without_shared_memory_refuses_workers_that_need_it_and_serves_the_others_over_tcp() {
    let cluster = Cluster::with(Transports::shm(), |config| config.shared_memory = false);
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
            ParameterSharing::WherePossible,
            ["the transport shm needs", "use the transport auto or tcp"],
        ),
        (
            "shares",
            Transport::Auto,
            ParameterSharing::Always,
            ["shared parameters need", "join without shared parameters"],
        ),
    ] {
        let message = join(name, transport, shared_parameters).expect_err("there is none").to_string();
        for part in parts.into_iter().chain([&*format!("job `{name}`, rank 0"), &hub, "--no-shared-memory"]) {
            assert!(message.contains(part), "no `{part}` in: {message}");
        }
    }
    let job = join("auto", Transport::Auto, ParameterSharing::WherePossible).unwrap();
    assert!(!job.shares_memory() && !job.shares_parameters());
    let (_, mean) = job.push_pull(0, vec![2.0f32; 4], vec![0.0f32; 4]).unwrap().wait().unwrap();
    assert_eq!(mean, [2.0; 4]);
}
