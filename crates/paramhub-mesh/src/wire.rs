//! The messages between peers of a mesh, byte for byte. All integers are little-endian.
//!
//! # The handshake
//! The rank with the higher number dials. The two ranks exchange four messages of fixed size:
//! ```text
//! dialler                                  listener
//!   | -- Hello, 72 bytes ----------------------> |
//!   | <-- challenge, 32 bytes ------------------ |
//!   | -- dialler's proof, 32 bytes ------------> |
//!   | <-- verdict, 1060 bytes ------------------ |
//!   | ============ frames, both ways =========== |
//! ```
//! ```text
//! 0        4         6      8      12     16     20     24            40              72
//! +--------+---------+------+------+------+------+------+-------------+---------------+
//! | "PHUM" | version | zero | rank | size | peer | try  | incarnation | challenge     |
//! | 4 bytes| u16 = 4 | u16  | u32  | u32  | u32  | u32  | 16 bytes    | 32 bytes      |
//! +--------+---------+------+------+------+------+------+-------------+---------------+
//! ```
//! `try` is 0 when the mesh is joined. A dialler whose connection was cut dials again with the next number each
//! time.
//!
//! The verdict is that of a hub ([`paramhub_core::wire::Verdict`]), and a peer proves its knowledge as there;
//! the parts are the whole Hello, the listener's challenge and, for the listener, the head of the verdict. The
//! secret is that of the two ranks ([`MeshSecrets`](crate::MeshSecrets)).
//!
//! An encrypted connection begins with TLS (the first byte is 22, which no Hello has), and the messages follow
//! inside it; the secret is then [bound](StreamSecret::bound_to) to the connection. What comes after the verdict
//! is in records ([`paramhub_transport::encryption`]).
//!
//! # The memory
//! After the handshakes rank 0 sends each other rank an Offer of memory to share, 56 bytes. If it has no
//! memory, they are all zero, and no message about memory follows.
//! ```text
//! 0         8        24       56
//! +---------+--------+--------+
//! | 1 (u64) | name   | token  |
//! |         | 16 b.  | 32 b.  |
//! +---------+--------+--------+
//! ```
//! A rank on rank 0's host can connect to the abstract Unix socket `paramhub-mesh-` and the name in
//! hexadecimal digits. It sends the token, and gets the descriptors of the memory and of every rank's
//! eventfd, by rank: at most four to a message, which carries their number in one byte. Over the mesh's
//! connection each rank then answers in one byte, 1 if it has mapped the memory and 0 if not, and rank 0
//! sends 1 to all ranks if all have and 0 if not.
//!
//! # Frames
//! A header of 32 bytes, then `length` bytes of payload.
//! ```text
//! 0      1         2      4        8        16       24       32
//! +------+---------+------+--------+--------+--------+--------+-- - - - - --+
//! | kind | channel | zero | length | ticket | tag    | bytes  | payload     |
//! | u8   | u8      | u16  | u32    | u64    | u64    | u64    |             |
//! +------+---------+------+--------+--------+--------+--------+-- - - - - --+
//! ```
//! | no. | kind | channel | ticket | tag | bytes | payload |
//! | --- | --- | --- | --- | --- | --- | --- |
//! | 1 | Ready | yes | the receive's | the receive's | that it takes | none |
//! | 2 | ReadyAny | 0 | the receive's | the receive's | that it takes | none |
//! | 3 | Claim | 0 | that of a ReadyAny | its tag | 0 | none |
//! | 4 | Grant | 0 | that of a ReadyAny | its tag | 0 | none |
//! | 5 | Withdraw | 0 | that of a ReadyAny | its tag | 0 | none |
//! | 6 | Data | 0 | of the Ready it answers | 0 | where in the transfer the payload belongs | up to 256 KiB of it |
//! | 7 | Begin | 0 | 0 | the collective's number | 0 | 24 bytes that describe it |
//! | 8 | Begun | 0 | 0 | collectives compared so far | 0 | none |
//! | 9 | Heartbeat | 0 | 0 | 0 | 0 | none |
//! | 10 | Leave | 0 | 0 | collectives begun | 0 | none |
//! | 11 | Abort | 0 | 0 | the culprit's rank, or 2^64 - 1 | 0 | a text of at most 1024 bytes |
//! | 12 | Whole | 0 | of the Ready it answers | 0 | 0 | the whole transfer, up to 64 KiB |
//! | 13 | Taken | 0 | that of a transfer in Data frames, all of which has come | 0 | 0 | none |
//! | 14 | Received | 0 | 0 | counted frames received so far | 0 | none |
//! | 15 | Resume | 0 | 0 | counted frames received so far | number of Arrived frames behind it | none |
//! | 16 | Arrived | 0 | that of a receive from this peer that is not complete | 0 | bytes that have come | none |
//!
//! # A connection that was cut
//! All frames but Data, Heartbeat, Resume and Arrived are counted, and a rank keeps those that the peer may not have
//! received. It also keeps what a transfer sends until it is Taken. On the first connection frames begin at
//! once. On each later one both ends first send Resume and an Arrived frame for every receive from the peer that
//! is not complete. With the peer's, a rank sends again the counted frames that the peer has not received, and
//! goes on with each transfer at the byte that the peer expects. Of a Whole that is sent again the receiver skips
//! the bytes that had come.

use paramhub_core::auth::{Incarnation, Proof, Purpose, StreamSecret};
use paramhub_core::limits::MESSAGE_BYTES_MAX;
use paramhub_core::wire::{CHALLENGE_BYTES, Challenge};
use thiserror::Error;

use crate::descriptor::DESCRIPTOR_BYTES;

/// The first four bytes of every connection.
pub(crate) const MAGIC: [u8; 4] = *b"PHUM";
/// The version of handshake and frames; both ends must have the same.
pub(crate) const VERSION: u16 = 4;
/// Bytes of a [`Hello`].
pub(crate) const HELLO_BYTES: usize = 72;
/// Bytes of an [`SegmentOffer`].
pub(crate) const OFFER_BYTES: usize = 56;
/// Bytes of the token that a rank shows to get the offered memory.
pub(crate) const TOKEN_BYTES: usize = 32;
/// The offer of a rank 0 without memory to share.
pub(crate) const NO_OFFER: [u8; OFFER_BYTES] = [0; OFFER_BYTES];
/// Bytes of a [`Header`].
pub(crate) const HEADER_BYTES: usize = 32;
/// Payload bytes of one [`Kind::Data`] frame. Transfers take turns frame by frame, so a small one waits for
/// this many bytes of a large one.
pub(crate) const PIECE_BYTES: usize = 256 << 10;
/// The most bytes of a transfer that is sent in one counted frame. A copy of so many costs less than to wait until
/// the peer has them. Collectives that are bound by latency send no more at a time.
pub(crate) const WHOLE_BYTES_MAX: usize = crate::schedule::SMALL_BYTES_MAX;
/// Payload bytes of a frame that carries no tensor.
pub(crate) const CONTROL_BYTES_MAX: usize = MESSAGE_BYTES_MAX;

/// A dialler's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The rank that dials.
    pub(crate) rank: u32,
    /// The number of ranks in the mesh, as the dialler knows it.
    pub(crate) size: u32,
    /// The rank that the dialler means to reach.
    pub(crate) peer: u32,
    /// 0 when the mesh is joined, and one more each time that the dialler dials because its connection was cut.
    pub(crate) attempt: u32,
    /// Random bytes, drawn once per join.
    pub(crate) incarnation: Incarnation,
    /// The challenge that the listener must answer.
    pub(crate) challenge: Challenge,
}

/// The reason why bytes are no Hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum HelloError {
    #[error("the first bytes are not those of a paramhub mesh")]
    Magic,
    #[error(
        "mesh protocol version {0} is spoken, this side speaks {VERSION}: use the same release of paramhub everywhere"
    )]
    Version(u16),
    #[error("reserved bytes are not zero")]
    Reserved,
}

impl Hello {
    pub(crate) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut wire = [0; HELLO_BYTES];
        wire[0..4].copy_from_slice(&MAGIC);
        wire[4..6].copy_from_slice(&VERSION.to_le_bytes());
        wire[8..12].copy_from_slice(&self.rank.to_le_bytes());
        wire[12..16].copy_from_slice(&self.size.to_le_bytes());
        wire[16..20].copy_from_slice(&self.peer.to_le_bytes());
        wire[20..24].copy_from_slice(&self.attempt.to_le_bytes());
        wire[24..40].copy_from_slice(&self.incarnation.0);
        wire[40..72].copy_from_slice(&self.challenge);
        wire
    }

    pub(crate) fn decode(wire: &[u8; HELLO_BYTES]) -> Result<Hello, HelloError> {
        if wire[0..4] != MAGIC {
            return Err(HelloError::Magic);
        }
        let version = u16::from_le_bytes(bytes(wire, 4));
        if version != VERSION {
            return Err(HelloError::Version(version));
        }
        if wire[6..8] != [0; 2] {
            return Err(HelloError::Reserved);
        }
        Ok(Hello {
            rank: u32::from_le_bytes(bytes(wire, 8)),
            size: u32::from_le_bytes(bytes(wire, 12)),
            peer: u32::from_le_bytes(bytes(wire, 16)),
            attempt: u32::from_le_bytes(bytes(wire, 20)),
            incarnation: Incarnation(bytes(wire, 24)),
            challenge: bytes::<CHALLENGE_BYTES>(wire, 40),
        })
    }

    /// The proof of the rank that dials.
    pub(crate) fn dialler_proof(&self, secret: &StreamSecret, listener_challenge: &Challenge) -> Proof {
        secret.prove(Purpose::MeshDialler, &[&self.encode(), listener_challenge])
    }

    /// The proof of the rank that is dialled, for a verdict that begins with `head`.
    pub(crate) fn listener_proof(
        &self,
        secret: &StreamSecret,
        listener_challenge: &Challenge,
        head: &[u8],
    ) -> Proof {
        secret.prove(Purpose::MeshListener, &[&self.encode(), listener_challenge, head])
    }
}

/// Rank 0's offer of memory, for the ranks of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentOffer {
    /// Random, so that no other socket has the name.
    pub(crate) name: [u8; 16],
    pub(crate) token: [u8; TOKEN_BYTES],
}

impl SegmentOffer {
    pub(crate) fn encode(&self) -> [u8; OFFER_BYTES] {
        let mut wire = NO_OFFER;
        wire[0] = 1;
        wire[8..24].copy_from_slice(&self.name);
        wire[24..56].copy_from_slice(&self.token);
        wire
    }

    /// `None` where the offer is of no memory.
    pub(crate) fn decode(wire: &[u8; OFFER_BYTES]) -> Result<Option<SegmentOffer>, &'static str> {
        match u64::from_le_bytes(bytes(wire, 0)) {
            0 if *wire == NO_OFFER => Ok(None),
            1 => Ok(Some(SegmentOffer { name: bytes(wire, 8), token: bytes(wire, 24) })),
            _ => Err("an offer of memory that is none"),
        }
    }

    /// The name of the abstract Unix socket.
    pub(crate) fn path(&self) -> String {
        let digits: String = self.name.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("paramhub-mesh-{digits}")
    }
}

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Ready = 1,
    ReadyAny = 2,
    Claim = 3,
    Grant = 4,
    Withdraw = 5,
    Data = 6,
    Begin = 7,
    Begun = 8,
    Heartbeat = 9,
    Leave = 10,
    Abort = 11,
    Whole = 12,
    Taken = 13,
    Received = 14,
    Resume = 15,
    Arrived = 16,
}

impl Kind {
    const ALL: [Kind; 16] = {
        use Kind::*;
        [
            Ready, ReadyAny, Claim, Grant, Withdraw, Data, Begin, Begun, Heartbeat, Leave, Abort, Whole,
            Taken, Received, Resume, Arrived,
        ]
    };

    /// Returns whether the frames of this kind are counted, so that they are sent again after a cut.
    pub(crate) fn is_counted(self) -> bool {
        !matches!(self, Kind::Data | Kind::Heartbeat | Kind::Resume | Kind::Arrived)
    }

    fn accepts(self, length: usize) -> bool {
        match self {
            Kind::Data => length <= PIECE_BYTES,
            Kind::Whole => length <= WHOLE_BYTES_MAX,
            Kind::Begin => length == DESCRIPTOR_BYTES,
            Kind::Abort => length <= CONTROL_BYTES_MAX,
            _ => length == 0,
        }
    }
}

/// The channel of a tag, which keeps the tags of collectives apart from the user's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Channel {
    PointToPoint = 0,
    Collective = 1,
}

/// The header ahead of every payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) channel: Channel,
    pub(crate) length: u32,
    pub(crate) ticket: u64,
    pub(crate) tag: u64,
    pub(crate) bytes: u64,
}

/// The reason why bytes are no header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum HeaderError {
    #[error("a frame of the unknown kind {0}")]
    Kind(u8),
    #[error("a frame in the unknown channel {0}")]
    Channel(u8),
    #[error("a {kind:?} frame whose payload has {length} bytes")]
    Length { kind: Kind, length: u32 },
    #[error("a frame with reserved bytes that are not zero")]
    Reserved,
}

impl Header {
    /// A header without payload, ticket, tag and number.
    pub(crate) const fn bare(kind: Kind) -> Header {
        Header { kind, channel: Channel::PointToPoint, length: 0, ticket: 0, tag: 0, bytes: 0 }
    }

    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut wire = [0; HEADER_BYTES];
        wire[0] = self.kind as u8;
        wire[1] = self.channel as u8;
        wire[4..8].copy_from_slice(&self.length.to_le_bytes());
        wire[8..16].copy_from_slice(&self.ticket.to_le_bytes());
        wire[16..24].copy_from_slice(&self.tag.to_le_bytes());
        wire[24..32].copy_from_slice(&self.bytes.to_le_bytes());
        wire
    }

    /// Reads the wire form, and checks that the length is within its kind's bounds.
    pub(crate) fn decode(wire: &[u8; HEADER_BYTES]) -> Result<Header, HeaderError> {
        let kind =
            Kind::ALL.into_iter().find(|kind| *kind as u8 == wire[0]).ok_or(HeaderError::Kind(wire[0]))?;
        let channel = match wire[1] {
            0 => Channel::PointToPoint,
            1 => Channel::Collective,
            other => return Err(HeaderError::Channel(other)),
        };
        if wire[2..4] != [0; 2] {
            return Err(HeaderError::Reserved);
        }
        let length = u32::from_le_bytes(bytes(wire, 4));
        if !kind.accepts(length as usize) {
            return Err(HeaderError::Length { kind, length });
        }
        Ok(Header {
            kind,
            channel,
            length,
            ticket: u64::from_le_bytes(bytes(wire, 8)),
            tag: u64::from_le_bytes(bytes(wire, 16)),
            bytes: u64::from_le_bytes(bytes(wire, 24)),
        })
    }
}

fn bytes<const N: usize>(wire: &[u8], at: usize) -> [u8; N] {
    wire[at..at + N].try_into().expect("a fixed range")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello() -> Hello {
        Hello { rank: 3, size: 5, peer: 1, attempt: 2, incarnation: Incarnation([7; 16]), challenge: [8; 32] }
    }

    #[test]
    fn a_hello_round_trips_and_other_protocols_are_recognised() {
        let wire = hello().encode();
        assert_eq!(Hello::decode(&wire), Ok(hello()));
        for (at, error) in
            [(0, HelloError::Magic), (4, HelloError::Version(0x00fe)), (6, HelloError::Reserved)]
        {
            let mut odd = wire;
            odd[at] = 0xfe;
            assert_eq!(Hello::decode(&odd), Err(error));
        }
    }

    #[test]
    fn proofs_depend_on_side_secret_and_every_field() {
        let secret = StreamSecret([9; 32]);
        let dialler = hello().dialler_proof(&secret, &[1; 32]);
        let other_rank = Hello { rank: 4, ..hello() };
        let other_attempt = Hello { attempt: 3, ..hello() };
        for other in [
            hello().listener_proof(&secret, &[1; 32], b""),
            hello().dialler_proof(&StreamSecret([8; 32]), &[1; 32]),
            hello().dialler_proof(&secret, &[2; 32]),
            other_rank.dialler_proof(&secret, &[1; 32]),
            other_attempt.dialler_proof(&secret, &[1; 32]),
        ] {
            assert!(!dialler.matches(&other));
        }
        let listener = |head: &[u8]| hello().listener_proof(&secret, &[1; 32], head);
        assert!(listener(b"a").matches(&listener(b"a")) && !listener(b"a").matches(&listener(b"b")));
    }

    #[test]
    fn offers_round_trip_and_none_is_none() {
        let offer = SegmentOffer { name: [3; 16], token: [4; TOKEN_BYTES] };
        assert_eq!(SegmentOffer::decode(&offer.encode()), Ok(Some(offer)));
        assert_eq!(offer.path(), format!("paramhub-mesh-{}", "03".repeat(16)));
        assert_eq!(SegmentOffer::decode(&NO_OFFER), Ok(None));
        let mut odd = NO_OFFER;
        odd[30] = 1;
        assert!(SegmentOffer::decode(&odd).is_err());
    }

    #[test]
    fn lengths_are_bounded_by_kind() {
        for (kind, length, is_good) in [
            (Kind::Data, PIECE_BYTES, true),
            (Kind::Data, PIECE_BYTES + 1, false),
            (Kind::Whole, WHOLE_BYTES_MAX, true),
            (Kind::Whole, WHOLE_BYTES_MAX + 1, false),
            (Kind::Ready, 1, false),
            (Kind::Begin, DESCRIPTOR_BYTES, true),
            (Kind::Begin, DESCRIPTOR_BYTES - 1, false),
            (Kind::Abort, CONTROL_BYTES_MAX + 1, false),
        ] {
            let header = Header { length: length as u32, ..Header::bare(kind) };
            assert_eq!(Header::decode(&header.encode()).is_ok(), is_good, "{kind:?} of {length}");
        }
    }

    proptest! {
        #[test]
        fn headers_round_trip(kind in 0..Kind::ALL.len(), ticket: u64, tag: u64, bytes: u64) {
            let header = Header { ticket, tag, bytes, channel: Channel::Collective, ..Header::bare(Kind::ALL[kind]) };
            if header.kind != Kind::Begin {
                prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
            }
        }

        #[test]
        fn no_bytes_panic_the_decoders(head: [u8; HEADER_BYTES], hello in prop::collection::vec(any::<u8>(), HELLO_BYTES)) {
            let _ = Header::decode(&head);
            let _ = Hello::decode(hello.as_slice().try_into().unwrap());
        }
    }
}
