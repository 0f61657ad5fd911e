//! The start of a stream: four messages of fixed size. Afterwards each end trusts the other's identity (PHub
//! section 3.1).
//!
//! ```text
//! worker                                   hub
//!   | -- Hello: rank, route, challenge -------> |
//!   | <-- Challenge ---------------------------- |
//!   | -- proof over both challenges -----------> |
//!   | <-- Verdict: welcome and proof, or why not |
//!   | === frames both ways ==================== |
//! ```
//! The hub challenges the caller of an unknown job too, so that a caller without a nonce cannot find out
//! which jobs exist.

use thiserror::Error;

use crate::auth::{Incarnation, Namespace, Nonce, Proof, Purpose};
use crate::limits::MESSAGE_BYTES_MAX;

/// The first four bytes of every stream.
pub const MAGIC: [u8; 4] = *b"PHUB";
/// Bytes of a [`Hello`].
pub const HELLO_BYTES: usize = 112;
/// Bytes of a [`Challenge`].
pub const CHALLENGE_BYTES: usize = 32;
/// Bytes of a proof.
pub const PROOF_BYTES: usize = 32;
/// Bytes of a [`Verdict`].
pub const VERDICT_BYTES: usize = 4 + PROOF_BYTES + MESSAGE_BYTES_MAX;
/// The protocol's version; both ends must have the same.
pub const VERSION: u16 = 1;

/// Random bytes that make a proof worthless on another connection.
pub type Challenge = [u8; CHALLENGE_BYTES];

/// The process that opens a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// A worker of the job.
    Worker {
        /// Its rank.
        rank: u32,
        /// `true` if it reads parameters from the arena that all workers of its host share; on local streams
        /// only.
        shares_parameters: bool,
        /// `true` if the stream replaces one that the rank had on this route and lost.
        resumes: bool,
    },
    /// A hub of a site below or beside the called one.
    Hub {
        /// The site.
        site: u16,
        /// The caller's route whose sums come on this stream.
        route: u16,
    },
    /// A hub that probes the network: bytes without frames follow.
    Prober,
}

/// The first message on a stream, from a worker or from a hub of another site.
///
/// ```text
///   0        4      6    8       12        16         32            48               80                112
///   +--------+------+----+-------+----+----+----------+-------------+----------------+-----------------+
///   |  PHUB  |  1   |flag|caller | if |core|namespace | incarnation | placement hash |    challenge    |
///   +--------+------+----+-------+----+----+----------+-------------+----------------+-----------------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The caller of the stream: a worker's rank; with flag 2 a hub's route and site, 16 bits each; with flag
    /// 3 zeros, for a hub that probes; with flag 4 a rank whose stream resumes.
    pub caller: Caller,
    /// Position of the interface in its hub.
    pub interface: u16,
    /// Core of the hub.
    pub core: u16,
    /// The job, or the probe.
    pub namespace: Namespace,
    /// The incarnation given to ConnectService; zeros from a hub.
    pub incarnation: Incarnation,
    /// Digest of the placement that the caller computed: a worker's of its site, a hub's of all sites.
    pub placement: [u8; 32],
    /// The challenge that the hub must answer.
    pub challenge: Challenge,
}

/// The reason why bytes are not a valid handshake message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum HandshakeError {
    /// The bytes are not paramhub's.
    #[error("the first bytes are not paramhub's")]
    Magic,
    /// Another version of the protocol.
    #[error(
        "protocol version {0} is spoken, this side speaks {VERSION}: use the same release of paramhub on both ends"
    )]
    Version(u16),
    /// The reserved bits are not zero.
    #[error("the reserved bits are {0:#06x}, not zero")]
    Reserved(u16),
    /// A verdict with an unknown number.
    #[error("the verdict {0} does not exist")]
    Verdict(u16),
}

impl Hello {
    /// The wire form.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut wire = [0; HELLO_BYTES];
        wire[0..4].copy_from_slice(&MAGIC);
        wire[4..6].copy_from_slice(&VERSION.to_le_bytes());
        let (flags, caller) = match self.caller {
            Caller::Worker { rank, shares_parameters, resumes } => {
                (u8::from(shares_parameters) | u8::from(resumes) << 2, rank)
            }
            Caller::Hub { site, route } => (2, u32::from(site) << 16 | u32::from(route)),
            Caller::Prober => (3, 0),
        };
        wire[6] = flags;
        wire[8..12].copy_from_slice(&caller.to_le_bytes());
        wire[12..14].copy_from_slice(&self.interface.to_le_bytes());
        wire[14..16].copy_from_slice(&self.core.to_le_bytes());
        wire[16..32].copy_from_slice(&self.namespace.0);
        wire[32..48].copy_from_slice(&self.incarnation.0);
        wire[48..80].copy_from_slice(&self.placement);
        wire[80..112].copy_from_slice(&self.challenge);
        wire
    }

    /// Reads the wire form.
    pub fn decode(wire: &[u8; HELLO_BYTES]) -> Result<Hello, HandshakeError> {
        fn bytes<const N: usize>(wire: &[u8], at: usize) -> [u8; N] {
            wire[at..at + N].try_into().expect("a fixed range")
        }
        if wire[0..4] != MAGIC {
            return Err(HandshakeError::Magic);
        }
        let version = u16::from_le_bytes(bytes(wire, 4));
        if version != VERSION {
            return Err(HandshakeError::Version(version));
        }
        let number = u32::from_le_bytes(bytes(wire, 8));
        let caller = match u16::from_le_bytes(bytes(wire, 6)) {
            flags @ (0 | 1 | 4) => {
                Caller::Worker { rank: number, shares_parameters: flags == 1, resumes: flags == 4 }
            }
            2 => Caller::Hub { site: (number >> 16) as u16, route: number as u16 },
            3 if number == 0 => Caller::Prober,
            reserved => return Err(HandshakeError::Reserved(reserved)),
        };
        Ok(Hello {
            caller,
            interface: u16::from_le_bytes(bytes(wire, 12)),
            core: u16::from_le_bytes(bytes(wire, 14)),
            namespace: Namespace(bytes(wire, 16)),
            incarnation: Incarnation(bytes(wire, 32)),
            placement: bytes(wire, 48),
            challenge: bytes(wire, 80),
        })
    }
}

/// The two proofs of a stream: the worker's over the hub's challenge, then the hub's over the worker's.
pub fn stream_proofs(nonce: &Nonce, hello: &Hello, hub_challenge: &Challenge) -> (Proof, Proof) {
    let parts: [&[u8]; 2] = [&hello.encode(), hub_challenge];
    (nonce.prove(Purpose::StreamWorker, &parts), nonce.prove(Purpose::StreamHub, &parts))
}

/// The reason why a hub refuses a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Refusal {
    /// The job is unknown here or the proof is wrong; the hub does not say which.
    WrongNonce = 1,
    /// The rank is not one of the job's.
    Rank = 2,
    /// The stream's rank is connected already.
    RankTaken = 3,
    /// The two ends computed different placements.
    Placement = 4,
    /// The hub has no such interface and core.
    Route = 5,
    /// The job is ending.
    JobEnded = 6,
    /// The hub is shutting down or has no room for the stream.
    Busy = 7,
    /// Another protocol or version.
    Protocol = 8,
    /// The memory a local worker offers cannot be used.
    Memory = 9,
}

impl Refusal {
    fn from_wire(number: u16) -> Option<Refusal> {
        use Refusal::{Busy, JobEnded, Memory, Placement, Protocol, Rank, RankTaken, Route, WrongNonce};
        [WrongNonce, Rank, RankTaken, Placement, Route, JobEnded, Busy, Protocol, Memory]
            .into_iter()
            .find(|&refusal| refusal as u16 == number)
    }
}

/// The hub's last handshake message.
///
/// ```text
///  0            2              4                36                     1060
///  +------------+--------------+----------------+----------------------+
///  | 0, refusal | text bytes   | the hub's proof| text, zero-padded    |
///  +------------+--------------+----------------+----------------------+
/// ```
/// A welcome has no text; the field of the text's length then has the number of state slots.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// Frames may follow.
    Welcome {
        /// Proof that the hub knows the nonce, too.
        proof: Proof,
        /// State values per parameter of the job's optimizer. Of an optimizer that is registered at the hub,
        /// only the hub knows them.
        state_slots: u8,
    },
    /// The connection closes.
    Refused {
        /// The reason, for programs.
        refusal: Refusal,
        /// The reason, for people.
        message: String,
    },
}

impl Verdict {
    /// The wire form; the message is cut at [`MESSAGE_BYTES_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        let mut wire = vec![0; VERDICT_BYTES];
        match self {
            Verdict::Welcome { proof, state_slots } => {
                wire[2] = *state_slots;
                wire[4..4 + PROOF_BYTES].copy_from_slice(&proof.0);
            }
            Verdict::Refused { refusal, message } => {
                let text = &message.as_bytes()[..message.floor_char_boundary(MESSAGE_BYTES_MAX)];
                wire[0..2].copy_from_slice(&(*refusal as u16).to_le_bytes());
                wire[2..4].copy_from_slice(&(text.len() as u16).to_le_bytes());
                wire[4 + PROOF_BYTES..4 + PROOF_BYTES + text.len()].copy_from_slice(text);
            }
        }
        wire
    }

    /// Reads the wire form.
    pub fn decode(wire: &[u8; VERDICT_BYTES]) -> Result<Verdict, HandshakeError> {
        let status = u16::from_le_bytes([wire[0], wire[1]]);
        if status == 0 {
            let proof = Proof(wire[4..4 + PROOF_BYTES].try_into().expect("a fixed range"));
            return Ok(Verdict::Welcome { proof, state_slots: wire[2] });
        }
        let refusal = Refusal::from_wire(status).ok_or(HandshakeError::Verdict(status))?;
        let length = usize::from(u16::from_le_bytes([wire[2], wire[3]])).min(MESSAGE_BYTES_MAX);
        let text = &wire[4 + PROOF_BYTES..4 + PROOF_BYTES + length];
        Ok(Verdict::Refused { refusal, message: String::from_utf8_lossy(text).into_owned() })
    }
}

/// Why a caller does not take its stream as open.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum VerdictError {
    /// The welcome has another proof than the nonce gives.
    #[error("it does not know the job's nonce: something else than the job's hub answers there")]
    Unproven,
    /// The hub refuses the stream.
    #[error("{message}")]
    Refused {
        /// The reason, for programs.
        refusal: Refusal,
        /// The reason, for people.
        message: String,
    },
    /// The bytes are no verdict.
    #[error("it does not answer like a paramhub hub: {0}")]
    Unreadable(#[from] HandshakeError),
}

impl Verdict {
    /// Reads a verdict as the caller of the stream: a welcome must bring the proof that is `expected`. Returns
    /// the number of state values per parameter.
    pub fn open(wire: &[u8; VERDICT_BYTES], expected: &Proof) -> Result<u8, VerdictError> {
        match Verdict::decode(wire)? {
            Verdict::Welcome { proof, state_slots } if proof.matches(expected) => Ok(state_slots),
            Verdict::Welcome { .. } => Err(VerdictError::Unproven),
            Verdict::Refused { refusal, message } => Err(VerdictError::Refused { refusal, message }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello() -> Hello {
        Hello {
            caller: Caller::Worker { rank: 3, shares_parameters: true, resumes: false },
            interface: 1,
            core: 2,
            namespace: Namespace([1; 16]),
            incarnation: Incarnation([2; 16]),
            placement: [3; 32],
            challenge: [4; 32],
        }
    }

    #[test]
    fn a_hello_round_trips_and_other_protocols_are_recognised() {
        let wire = hello().encode();
        assert_eq!(Hello::decode(&wire), Ok(hello()));
        let hub = Hello { caller: Caller::Hub { site: 300, route: 700 }, ..hello() };
        assert_eq!(Hello::decode(&hub.encode()), Ok(hub));
        let resumes = Caller::Worker { rank: 3, shares_parameters: false, resumes: true };
        let resumed = Hello { caller: resumes, ..hello() };
        assert_eq!(Hello::decode(&resumed.encode()), Ok(resumed));
        let prober = Hello { caller: Caller::Prober, ..hello() };
        assert_eq!(Hello::decode(&prober.encode()), Ok(prober));
        let mut other_protocol = wire;
        other_protocol[0] = b'G';
        assert_eq!(Hello::decode(&other_protocol), Err(HandshakeError::Magic));
        let mut newer = wire;
        newer[4] = 2;
        assert_eq!(Hello::decode(&newer), Err(HandshakeError::Version(2)));
        let mut odd = wire;
        odd[7] = 1;
        assert_eq!(Hello::decode(&odd), Err(HandshakeError::Reserved(0x101)));
    }

    #[test]
    fn proofs_depend_on_every_field_and_both_challenges() {
        let nonce = Nonce([9; 32]);
        let (worker, hub) = stream_proofs(&nonce, &hello(), &[5; 32]);
        assert!(!worker.matches(&hub));
        let caller = Caller::Worker { rank: 4, shares_parameters: true, resumes: false };
        let other_rank = Hello { caller, ..hello() };
        assert!(!worker.matches(&stream_proofs(&nonce, &other_rank, &[5; 32]).0));
        assert!(!worker.matches(&stream_proofs(&nonce, &hello(), &[6; 32]).0));
    }

    #[test]
    fn verdicts_round_trip() {
        let refused = Verdict::Refused { refusal: Refusal::RankTaken, message: "rank 3 is connected".into() };
        let Ok(Verdict::Refused { refusal, message }) =
            Verdict::decode(&refused.encode().try_into().unwrap())
        else {
            panic!("a refusal reads as one");
        };
        assert_eq!((refusal, message.as_str()), (Refusal::RankTaken, "rank 3 is connected"));
        let welcome = Verdict::Welcome { proof: Proof([7; 32]), state_slots: 2 };
        let Ok(Verdict::Welcome { proof, state_slots: 2 }) =
            Verdict::decode(&welcome.encode().try_into().unwrap())
        else {
            panic!("a welcome reads as one");
        };
        assert!(proof.matches(&Proof([7; 32])));
    }

    #[test]
    fn a_verdict_opens_a_stream_only_with_the_expected_proof() {
        let wire = |verdict: Verdict| verdict.encode().try_into().unwrap();
        let welcome = wire(Verdict::Welcome { proof: Proof([7; 32]), state_slots: 2 });
        assert_eq!(Verdict::open(&welcome, &Proof([7; 32])), Ok(2));
        assert_eq!(Verdict::open(&welcome, &Proof([8; 32])), Err(VerdictError::Unproven));
        let (refusal, message) = (Refusal::Busy, "full".to_string());
        let refused = wire(Verdict::Refused { refusal, message: message.clone() });
        assert_eq!(Verdict::open(&refused, &Proof([7; 32])), Err(VerdictError::Refused { refusal, message }));
        let unreadable = Verdict::open(&[0xff; VERDICT_BYTES], &Proof([7; 32]));
        assert!(matches!(unreadable, Err(VerdictError::Unreadable(_))), "{unreadable:?}");
    }

    proptest! {
        #[test]
        fn no_bytes_panic_the_decoders(bytes in prop::collection::vec(any::<u8>(), VERDICT_BYTES), status in 0u16..12) {
            let mut wire: [u8; VERDICT_BYTES] = bytes.try_into().unwrap();
            wire[0..2].copy_from_slice(&status.to_le_bytes());
            let _ = Verdict::decode(&wire);
            let _ = Hello::decode(wire[..HELLO_BYTES].try_into().unwrap());
        }
    }
}
