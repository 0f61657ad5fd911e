//! What both ends say and do on a connection that replaces another.

use super::*;
use crate::command::MeshCommand;

/// Three frames of data, the last of one byte.
const BYTES: usize = 2 * PIECE_BYTES + 1;
/// More than a connection takes at once.
const LARGE: usize = 16 << 20;

/// Replaces the connection with rank 1. Returns the peer's end of the new one, the first frames on it, and the connection
/// before, which this rank did not know to be cut.
fn reconnect(mesh: &Mesh, raw_peer: &mut RawPeer, attempt: u32) -> (Header, Vec<Header>, RawPeer) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let before = std::mem::replace(raw_peer, RawPeer(theirs));
    let socket = PeerSocket::from(OwnedFd::from(ours));
    mesh.inbox.put(MeshCommand::Reconnected { rank: 1, attempt, socket }).unwrap();
    let (resume, _) = raw_peer.hear_all();
    assert_eq!(resume.kind, Kind::Resume);
    let arrived = (0..resume.bytes).map(|_| raw_peer.hear_all().0).collect::<Vec<_>>();
    assert!(arrived.iter().all(|frame| frame.kind == Kind::Arrived));
    (resume, arrived, before)
}

fn resume(frames: u64, arrived: u64) -> Header {
    Header { tag: frames, bytes: arrived, ..Header::bare(Kind::Resume) }
}

fn arrived(ticket: u64, bytes: u64) -> Header {
    Header { ticket, bytes, ..Header::bare(Kind::Arrived) }
}

fn numbers(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at % 251) as u8).collect()
}

#[test]
fn a_send_goes_on_at_the_byte_that_the_peer_expects_and_ends_when_it_is_taken() {
    let (mesh, mut raw_peers) = by_hand(2);
    let raw_peer = &mut raw_peers[0];
    let data = numbers(BYTES);
    let send = mesh.send(1, 5, SendRegion::owned(data.clone())).unwrap();
    raw_peer.send(Header { ticket: 9, tag: 5, bytes: BYTES as u64, ..Header::bare(Kind::Ready) }, &[]);
    assert_eq!(raw_peer.receive().0.bytes, 0);

    let (resumed, _, _before) = reconnect(&mesh, raw_peer, 1);
    assert_eq!(resumed, resume(1, 0), "it has received the Ready");
    let expected = PIECE_BYTES + 100;
    raw_peer.send(resume(0, 1), &[]);
    raw_peer.send(arrived(9, expected as u64), &[]);
    let mut at = expected;
    while at < BYTES {
        let (frame, payload) = raw_peer.receive();
        assert_eq!((frame.kind, frame.ticket, frame.bytes), (Kind::Data, 9, at as u64));
        assert_eq!(payload, data[at..][..payload.len()]);
        at += payload.len();
    }
    assert!(!send.wait_timeout(Duration::from_millis(50)).unwrap(), "the peer may not have all of it");

    // All of it has come to the peer, whose Taken is lost with the connection, and is sent again.
    reconnect(&mesh, raw_peer, 2);
    raw_peer.send(resume(0, 0), &[]);
    assert!(!send.wait_timeout(Duration::from_millis(50)).unwrap());
    raw_peer.send(Header { ticket: 9, ..Header::bare(Kind::Taken) }, &[]);
    send.wait().unwrap();
}

#[test]
fn what_has_come_of_a_small_transfer_is_kept_and_the_rest_taken_from_its_repetition() {
    let (mesh, mut raw_peers) = by_hand(2);
    let raw_peer = &mut raw_peers[0];
    let mut got = [0_u8; 4];
    lend(|lending| {
        let receive = mesh.receive(1, 5, lending.receive(&mut got)).unwrap();
        let (ready, _) = raw_peer.receive();
        let whole = Header { length: 4, ticket: ready.ticket, ..Header::bare(Kind::Whole) };
        raw_peer.0.write_all(&whole.encode()).unwrap();
        raw_peer.0.write_all(&[1, 2]).unwrap();
        // Nothing says that these bytes have been read.
        assert!(!receive.wait_timeout(Duration::from_millis(100)).unwrap());

        let (_, incomplete, _before) = reconnect(&mesh, raw_peer, 1);
        assert_eq!(incomplete, [arrived(ready.ticket, 2)]);
        raw_peer.send(resume(1, 0), &[]);
        raw_peer.send(whole, &[7, 7, 3, 4]);
        receive.wait().unwrap();
    });
    assert_eq!(got, [1, 2, 3, 4]);
}

#[test]
fn frames_that_the_peer_has_not_received_are_sent_again_and_no_others() {
    let (mesh, mut raw_peers) = by_hand(2);
    let raw_peer = &mut raw_peers[0];
    let _receives = [1, 2, 3].map(|tag| receive(&mesh, 1, tag, 4));
    assert_eq!([(); 3].map(|()| raw_peer.receive().0.tag), [1, 2, 3]);
    reconnect(&mesh, raw_peer, 1);
    // Until the peer has said where it is, heartbeats alone are sent.
    mesh.inbox.put(MeshCommand::Beat).unwrap();
    assert_eq!(raw_peer.hear_all().0.kind, Kind::Heartbeat);
    raw_peer.send(resume(1, 0), &[]);
    assert_eq!([(); 2].map(|()| raw_peer.receive().0.tag), [2, 3]);
    // A count that is behind another is one that was sent again.
    for count in [3, 2, 3] {
        raw_peer.send(Header { tag: count, ..Header::bare(Kind::Received) }, &[]);
    }
    let _receive = receive(&mesh, 1, 4, 4);
    assert_eq!(raw_peer.receive().0.tag, 4);
}

#[test]
fn what_cannot_be_after_a_cut_ends_the_mesh() {
    let offences: [(_, &[Header]); 5] = [
        ("another frame than the first after a cut", &[Header::bare(Kind::Heartbeat)]),
        ("another frame than the first after a cut", &[arrived(9, 1)]),
        ("a count of frames that cannot be", &[resume(2, 0)]),
        ("a count of bytes that cannot be", &[resume(1, 1), arrived(9, LARGE as u64)]),
        // Not all of it has been sent.
        ("a count of bytes that cannot be", &[resume(1, 0)]),
    ];
    for (expected, frames) in offences {
        let (mesh, mut raw_peers) = by_hand(2);
        let raw_peer = &mut raw_peers[0];
        let receive = receive(&mesh, 1, 1, 4);
        let send = mesh.send(1, 5, SendRegion::owned(vec![0_u8; LARGE])).unwrap();
        raw_peer.receive();
        raw_peer.send(Header { ticket: 9, tag: 5, bytes: LARGE as u64, ..Header::bare(Kind::Ready) }, &[]);
        raw_peer.receive();
        let _before = reconnect(&mesh, raw_peer, 1);
        frames.iter().for_each(|frame| raw_peer.send(*frame, &[]));
        let error = receive.wait().unwrap_err();
        assert!(error.to_string().contains(expected), "{expected}: {error}");
        send.wait().unwrap_err();
    }
    // What only a connection after a cut begins with is refused on the first.
    let (mesh, mut raw_peers) = by_hand(2);
    let receive = receive(&mesh, 1, 1, 4);
    raw_peers[0].send(resume(0, 0), &[]);
    assert!(receive.wait().unwrap_err().to_string().contains("what a connection after a cut begins with"));
}
