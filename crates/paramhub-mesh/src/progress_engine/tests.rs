//! An engine against peers whose frames a test writes by hand, or over connections that split everything into
//! small pieces.

mod reconnecting;

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use paramhub_core::auth::Nonce;
use paramhub_transport::{ReceiveRegion, SendRegion, lend};

use crate::config::MeshConfig;
use crate::descriptor::{Collective, DESCRIPTOR_BYTES, Descriptor};
use crate::element::{ElementType, ReduceOp};
use crate::error::MeshError;
use crate::mesh::Mesh;
use crate::socket::PeerSocket;
use crate::wire::{Channel, HEADER_BYTES, Header, Kind, PIECE_BYTES};

const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

fn mesh(rank: u32, sockets: Vec<Option<UnixStream>>) -> Mesh {
    mesh_with(rank, sockets, MeshConfig::DEAD_AFTER)
}

fn mesh_with(rank: u32, sockets: Vec<Option<UnixStream>>, dead_after: Duration) -> Mesh {
    let nowhere: SocketAddr = ([127, 0, 0, 1], 1).into();
    let config = MeshConfig::new(rank, Nonce([0; 32]), vec![nowhere; sockets.len()]);
    let sockets = sockets.into_iter().map(|socket| {
        socket.map(|socket| {
            socket.set_nonblocking(true).unwrap();
            PeerSocket::from(OwnedFd::from(socket))
        })
    });
    Mesh::start(
        &MeshConfig { dead_after, ..config },
        sockets.collect(),
        Err("these peers are no processes".into()),
        None,
    )
    .unwrap()
}

/// A peer's end of a connection, driven by hand.
struct RawPeer(UnixStream);

impl RawPeer {
    fn send(&mut self, header: Header, payload: &[u8]) {
        let header = Header { length: payload.len() as u32, ..header };
        self.0.write_all(&header.encode()).unwrap();
        self.0.write_all(payload).unwrap();
    }

    /// The next frame that is no heartbeat.
    fn receive(&mut self) -> (Header, Vec<u8>) {
        loop {
            let (header, payload) = self.hear_all();
            if header.kind != Kind::Heartbeat {
                return (header, payload);
            }
        }
    }

    fn hear_all(&mut self) -> (Header, Vec<u8>) {
        self.0.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        let mut head = [0; HEADER_BYTES];
        self.0.read_exact(&mut head).unwrap();
        let header = Header::decode(&head).unwrap();
        let mut payload = vec![0; header.length as usize];
        self.0.read_exact(&mut payload).unwrap();
        (header, payload)
    }
}

/// Rank 0 of a mesh whose other ranks are driven by hand.
fn by_hand(size: usize) -> (Mesh, Vec<RawPeer>) {
    let (mut sockets, mut raw_peers) = (vec![None], Vec::new());
    for _ in 1..size {
        let (ours, theirs) = UnixStream::pair().unwrap();
        sockets.push(Some(ours));
        raw_peers.push(RawPeer(theirs));
    }
    (mesh(0, sockets), raw_peers)
}

fn receive(mesh: &Mesh, peer: u32, tag: u64, bytes: usize) -> crate::Handle {
    mesh.receive(peer, tag, ReceiveRegion::owned(vec![0_u8; bytes])).unwrap()
}

#[test]
fn a_breach_of_the_protocol_is_named_and_ends_the_mesh() {
    type Offence = fn(&mut RawPeer, Header);
    // Each offence gets the announcement of a receive of 100 bytes.
    let offences: [(&str, Offence); 12] = [
        ("data that no operation waits for", |raw_peer, ready| {
            raw_peer.send(Header { ticket: ready.ticket + 1, ..Header::bare(Kind::Data) }, &[0; 10]);
        }),
        ("data out of order", |raw_peer, ready| {
            raw_peer.send(Header { ticket: ready.ticket, bytes: 10, ..Header::bare(Kind::Data) }, &[0; 10]);
        }),
        ("more data than was asked for", |raw_peer, ready| {
            raw_peer.send(Header { ticket: ready.ticket, ..Header::bare(Kind::Data) }, &[0; 101]);
        }),
        ("an empty piece of data", |raw_peer, ready| {
            raw_peer.send(Header { ticket: ready.ticket, ..Header::bare(Kind::Data) }, &[]);
        }),
        ("the unknown kind 99", |raw_peer, _| {
            raw_peer.0.write_all(&[99; HEADER_BYTES]).unwrap();
        }),
        ("a Data frame whose payload has 262145 bytes", |raw_peer, ready| {
            let length = PIECE_BYTES as u32 + 1;
            let header = Header { ticket: ready.ticket, length, ..Header::bare(Kind::Data) };
            raw_peer.0.write_all(&header.encode()).unwrap();
        }),
        ("the unknown channel 7", |raw_peer, _| {
            let mut head = Header::bare(Kind::Heartbeat).encode();
            head[1] = 7;
            raw_peer.0.write_all(&head).unwrap();
        }),
        ("reserved bytes", |raw_peer, _| {
            let mut head = Header::bare(Kind::Heartbeat).encode();
            head[2] = 7;
            raw_peer.0.write_all(&head).unwrap();
        }),
        ("a grant that was not claimed", |raw_peer, ready| {
            raw_peer.send(Header { ticket: ready.ticket, ..Header::bare(Kind::Grant) }, &[]);
        }),
        ("a collective that does not exist", |raw_peer, _| {
            raw_peer.send(Header::bare(Kind::Begin), &[0xff; DESCRIPTOR_BYTES]);
        }),
        ("a collective out of order", |raw_peer, _| {
            let barrier = Descriptor::new(Collective::Barrier).encode();
            raw_peer.send(Header { tag: 1, ..Header::bare(Kind::Begin) }, &barrier);
        }),
        ("a count of collectives that cannot be", |raw_peer, _| {
            raw_peer.send(Header { tag: 256, ..Header::bare(Kind::Begun) }, &[]);
        }),
    ];
    for (expected, commit) in offences {
        let (mesh, mut raw_peers) = by_hand(2);
        let handle = receive(&mesh, 1, 3, 100);
        let (ready, _) = raw_peers[0].receive();
        assert_eq!((ready.kind, ready.tag, ready.bytes), (Kind::Ready, 3, 100));
        commit(&mut raw_peers[0], ready);
        let error = handle.wait().unwrap_err();
        assert!(matches!(error, MeshError::Protocol { rank: 1, .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        // The offender receives the reason.
        let (abort, text) = raw_peers[0].receive();
        assert_eq!((abort.kind, abort.tag), (Kind::Abort, 1));
        assert!(String::from_utf8(text).unwrap().contains(expected));
    }
}

#[test]
fn data_for_another_rank_is_an_offence() {
    let (mesh, mut raw_peers) = by_hand(3);
    let handle = receive(&mesh, 1, 3, 4);
    let (ready, _) = raw_peers[0].receive();
    raw_peers[1].send(Header { ticket: ready.ticket, ..Header::bare(Kind::Data) }, &[0; 4]);
    let error = handle.wait().unwrap_err().to_string();
    assert!(
        error.contains("rank 2 broke the protocol: it sent data that another rank was asked for"),
        "{error}"
    );
}

#[test]
fn a_receive_from_any_rank_is_granted_once() {
    let (mesh, mut raw_peers) = by_hand(3);
    let handle = mesh.receive_any(6, ReceiveRegion::owned(vec![0_u8; 2])).unwrap();
    let offers: Vec<Header> = raw_peers.iter_mut().map(|raw_peer| raw_peer.receive().0).collect();
    assert!(offers.iter().all(|offer| offer.kind == Kind::ReadyAny && offer.ticket == offers[0].ticket));
    let claim = Header { ticket: offers[0].ticket, tag: 6, ..Header::bare(Kind::Claim) };
    raw_peers[1].send(claim, &[]);
    assert_eq!(raw_peers[1].receive().0.kind, Kind::Grant);
    assert_eq!(raw_peers[0].receive().0, Header { kind: Kind::Withdraw, ..claim });
    // A claim that crosses with the withdrawal is ignored, also when it comes after the end.
    raw_peers[0].send(claim, &[]);
    raw_peers[1].send(Header { ticket: claim.ticket, ..Header::bare(Kind::Data) }, &[8, 9]);
    handle.wait().unwrap();
    assert_eq!(handle.source(), Some(2));
    raw_peers[0].send(claim, &[]);
    let next = receive(&mesh, 1, 7, 1);
    let (ready, _) = raw_peers[0].receive();
    assert_ne!(ready.ticket, claim.ticket);
    raw_peers[0].send(Header { ticket: ready.ticket, ..Header::bare(Kind::Data) }, &[0]);
    next.wait().unwrap();
}

#[test]
fn a_claim_that_is_withdrawn_waits_for_the_next_receive() {
    let (mesh, mut raw_peers) = by_hand(2);
    let first = mesh.send(1, 6, SendRegion::owned(vec![1_u8])).unwrap();
    let second = mesh.send(1, 6, SendRegion::owned(vec![2_u8])).unwrap();
    let offer = |kind, ticket| Header { ticket, tag: 6, bytes: 1, ..Header::bare(kind) };
    raw_peers[0].send(offer(Kind::ReadyAny, 50), &[]);
    assert_eq!(raw_peers[0].receive().0, Header { bytes: 0, ..offer(Kind::Claim, 50) });
    raw_peers[0].send(offer(Kind::Withdraw, 50), &[]);
    raw_peers[0].send(offer(Kind::Ready, 51), &[]);
    let (data, payload) = raw_peers[0].receive();
    assert_eq!((data.ticket, payload), (51, vec![1]), "the first send comes first");
    first.wait().unwrap();
    // An offer that is withdrawn before a send claims it is gone.
    raw_peers[0].send(offer(Kind::Ready, 52), &[]);
    assert_eq!(raw_peers[0].receive().1, [2]);
    second.wait().unwrap();
    // The end of a receive shows that the frames before its data have been read.
    let after = receive(&mesh, 1, 7, 1);
    let (ready, _) = raw_peers[0].receive();
    raw_peers[0].send(offer(Kind::ReadyAny, 53), &[]);
    raw_peers[0].send(offer(Kind::Withdraw, 53), &[]);
    raw_peers[0].send(offer(Kind::Ready, 54), &[]);
    raw_peers[0].send(Header { ticket: ready.ticket, ..Header::bare(Kind::Data) }, &[0]);
    after.wait().unwrap();
    let third = mesh.send(1, 6, SendRegion::owned(vec![3_u8])).unwrap();
    assert_eq!(raw_peers[0].receive().0.kind, Kind::Taken);
    assert_eq!(raw_peers[0].receive().0.ticket, 54);
    third.wait().unwrap();
}

#[test]
fn an_end_without_a_leave_message_is_a_loss_and_with_one_is_none() {
    let (mesh, mut raw_peers) = by_hand(3);
    let handle = receive(&mesh, 2, 1, 4);
    raw_peers[0].send(Header::bare(Kind::Leave), &[]);
    drop(raw_peers.remove(0));
    let other = receive(&mesh, 2, 2, 4);
    assert!(!other.wait_timeout(Duration::from_millis(50)).unwrap(), "rank 2 is still there");
    // Read the frames: unread ones would reset the connection instead.
    assert_eq!([raw_peers[0].receive().0.tag, raw_peers[0].receive().0.tag], [1, 2]);
    // The stream ends inside a frame.
    raw_peers[0].0.write_all(&Header::bare(Kind::Heartbeat).encode()[..10]).unwrap();
    drop(raw_peers);
    for handle in [handle, other] {
        let error = handle.wait().unwrap_err();
        assert!(matches!(error, MeshError::Lost { rank: 2, .. }), "{error}");
        assert!(error.to_string().contains("ended inside a frame"), "{error}");
    }
}

#[test]
fn a_reason_that_is_passed_on_keeps_its_culprit() {
    let (mesh, mut raw_peers) = by_hand(3);
    let handle = receive(&mesh, 1, 1, 1);
    raw_peers[0].send(Header { tag: 2, ..Header::bare(Kind::Abort) }, "rank 2 caught fire".as_bytes());
    let error = handle.wait().unwrap_err();
    assert_eq!(error.rank(), Some(2));
    let (abort, text) = raw_peers[1].receive();
    assert_eq!((abort.kind, abort.tag, &*text), (Kind::Abort, 2, "rank 2 caught fire".as_bytes()));
}

#[test]
fn a_peer_that_only_beats_is_alive_and_one_that_does_not_is_given_up() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mesh = mesh_with(0, vec![None, Some(ours)], Duration::from_millis(2400));
    let mut raw_peer = RawPeer(theirs);
    let handle = receive(&mesh, 1, 1, 1);
    let mut beats = 0;
    // A heartbeat comes every 400 ms, so the loop lasts longer than the mesh would tolerate silence.
    while beats < 8 {
        if raw_peer.hear_all().0.kind == Kind::Heartbeat {
            beats += 1;
            raw_peer.send(Header::bare(Kind::Heartbeat), &[]);
        }
        assert!(!handle.is_done());
    }
    let error = handle.wait().unwrap_err();
    assert!(matches!(error, MeshError::Silent { rank: 1, .. }), "{error}");
}

#[test]
fn a_frame_that_has_begun_is_finished_before_the_last_words() {
    let (mesh, mut raw_peers) = by_hand(2);
    // More bytes than the socket takes.
    let handle = mesh.send(1, 1, SendRegion::owned(vec![6_u8; 8 << 20])).unwrap();
    raw_peers[0].send(Header { ticket: 5, tag: 1, bytes: 8 << 20, ..Header::bare(Kind::Ready) }, &[]);
    let (first, _) = raw_peers[0].receive();
    assert_eq!(first.kind, Kind::Data);
    mesh.abort("enough");
    assert!(handle.wait().is_err());
    loop {
        let (header, payload) = raw_peers[0].receive();
        if header.kind == Kind::Abort {
            assert_eq!(payload, b"enough");
            return;
        }
        assert!(header.kind == Kind::Data && payload.iter().all(|byte| *byte == 6));
    }
}

#[test]
fn announcements_are_bounded() {
    let (mesh, mut raw_peers) = by_hand(2);
    let handle = receive(&mesh, 1, 1, 1);
    let mut flood = Vec::new();
    for tag in 0..(1 << 18) + 1 {
        flood.extend_from_slice(&Header { tag, bytes: 1, ..Header::bare(Kind::Ready) }.encode());
    }
    let writer = thread::spawn(move || {
        // The mesh closes the connection before the last byte.
        let _ = raw_peers[0].0.write_all(&flood);
        raw_peers
    });
    let error = handle.wait().unwrap_err().to_string();
    assert!(error.contains("more announcements than a rank may have"), "{error}");
    drop(writer.join().unwrap());
}

/// Passes bytes on in pieces of random length.
fn crumble(mut from: UnixStream, mut to: UnixStream, mut state: u64) {
    let mut buffer = vec![0; 4096];
    loop {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let most = match state >> 62 {
            0 => 1 + (state >> 40) as usize % 5,
            1 => 1 + (state >> 40) as usize % 70,
            _ => 1 + (state >> 40) as usize % buffer.len(),
        };
        match from.read(&mut buffer[..most]) {
            Ok(0) | Err(_) => break,
            Ok(read) if to.write_all(&buffer[..read]).is_err() => break,
            Ok(_) => {}
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Write);
}

#[test]
fn small_pieces_make_whole_frames_and_elements() {
    let (a, a_far) = UnixStream::pair().unwrap();
    let (b, b_far) = UnixStream::pair().unwrap();
    let (a_again, b_again) = (a_far.try_clone().unwrap(), b_far.try_clone().unwrap());
    let ways = [
        thread::spawn(move || crumble(a_far, b_far, 1)),
        thread::spawn(move || crumble(b_again, a_again, 2)),
    ];
    let meshes = [mesh(0, vec![None, Some(a)]), mesh(1, vec![Some(b), None])];
    thread::scope(|scope| {
        for mesh in meshes {
            scope.spawn(move || {
                let rank = mesh.rank();
                for (round, elements) in [1, 7, 20_011, 8_193].into_iter().enumerate() {
                    let mut sums: Vec<f64> = (0..elements).map(|at| f64::from(at * (rank + 1))).collect();
                    let mut message = vec![round as u8 + rank as u8; 1000];
                    lend(|lending| {
                        let sum = mesh.allreduce(lending.receive(&mut sums), ElementType::F64, ReduceOp::Sum);
                        let message = match rank {
                            0 => mesh.send(1, 1, SendRegion::owned(message.clone())),
                            _ => mesh.receive(0, 1, lending.receive(&mut message)),
                        };
                        sum.unwrap().wait().unwrap();
                        message.unwrap().wait().unwrap();
                    });
                    assert!(sums.iter().enumerate().all(|(at, sum)| *sum == 3.0 * at as f64));
                    assert!(message.iter().all(|byte| *byte == round as u8));
                }
                mesh.leave(WAIT_TIMEOUT).unwrap();
            });
        }
    });
    ways.into_iter().for_each(|way| way.join().unwrap());
}

#[test]
fn a_channel_keeps_tags_apart() {
    let (mesh, mut raw_peers) = by_hand(2);
    let handle = mesh.send(1, 0, SendRegion::owned(vec![1_u8; 3])).unwrap();
    // A collective's announcement with the same tag, and even another length, does not concern the send.
    let other = Header { channel: Channel::Collective, ticket: 8, bytes: 9, ..Header::bare(Kind::Ready) };
    raw_peers[0].send(other, &[]);
    raw_peers[0].send(Header { channel: Channel::PointToPoint, ticket: 9, bytes: 3, ..other }, &[]);
    assert_eq!(raw_peers[0].receive().0.ticket, 9);
    handle.wait().unwrap();
}
