use thiserror::Error;

use super::{Capabilities, HandshakeError, PROOF_BYTES, bytes, u16_at, u32_at, u64_at};
use crate::auth::Proof;
use crate::limits::MESSAGE_BYTES_MAX;

/// Bytes of a verdict before the hub's proof.
pub(super) const VERDICT_HEAD_BYTES: usize = 24;
/// Bytes of a [`Verdict`].
pub const VERDICT_BYTES: usize = VERDICT_HEAD_BYTES + PROOF_BYTES + MESSAGE_BYTES_MAX;

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
    /// The caller is of another epoch of the job, or has opened a newer stream to the route.
    Stale = 10,
    /// The hub lacks a capability that the caller requires, or requires one that the caller lacks.
    Capability = 11,
}

impl Refusal {
    pub(super) fn from_wire(number: u16) -> Option<Refusal> {
        use Refusal::{
            Busy, Capability, JobEnded, Memory, Placement, Protocol, Rank, RankTaken, Route, Stale,
            WrongNonce,
        };
        [WrongNonce, Rank, RankTaken, Placement, Route, JobEnded, Busy, Protocol, Memory, Stale, Capability]
            .into_iter()
            .find(|&refusal| refusal as u16 == number)
    }
}

/// What a hub tells the caller whose stream is open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Welcome {
    /// The capabilities of the caller that both ends use from here on.
    pub granted: Capabilities,
    /// The job's epoch, as the hub knows it.
    pub epoch: u64,
    /// State values per parameter of the job's optimizer. Of an optimizer that is registered at the hub, only
    /// the hub knows them.
    pub state_slots: u8,
}

/// The hub's last handshake message.
///
/// ```text
///  0         2            4         8       16            17     24              56                    1080
///  +---------+------------+---------+-------+-------------+------+---------------+---------------------+
///  | refusal | text bytes | granted | epoch | state slots | zero | hub's proof   | text, zero-padded   |
///  +---------+------------+---------+-------+-------------+------+---------------+---------------------+
/// ```
/// A welcome has refusal 0 and no text; a refusal has zeros between the length of its text and the text.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// Frames may follow.
    Welcome {
        /// What was agreed.
        welcome: Welcome,
        /// Proof that the hub knows the secret, too, and has agreed to this.
        proof: Proof,
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
    /// The wire form of a welcome; `prove` proves its head.
    pub fn welcome(welcome: &Welcome, prove: impl FnOnce(&[u8]) -> Proof) -> Vec<u8> {
        let mut wire = vec![0; VERDICT_BYTES];
        wire[4..8].copy_from_slice(&welcome.granted.0.to_le_bytes());
        wire[8..16].copy_from_slice(&welcome.epoch.to_le_bytes());
        wire[16] = welcome.state_slots;
        let proof = prove(&wire[..VERDICT_HEAD_BYTES]);
        wire[VERDICT_HEAD_BYTES..VERDICT_HEAD_BYTES + PROOF_BYTES].copy_from_slice(&proof.0);
        wire
    }

    /// The wire form of a refusal; the message is cut at [`MESSAGE_BYTES_MAX`].
    pub fn refused(refusal: Refusal, message: &str) -> Vec<u8> {
        let mut wire = vec![0; VERDICT_BYTES];
        let text = &message.as_bytes()[..message.floor_char_boundary(MESSAGE_BYTES_MAX)];
        wire[0..2].copy_from_slice(&(refusal as u16).to_le_bytes());
        wire[2..4].copy_from_slice(&(text.len() as u16).to_le_bytes());
        let at = VERDICT_HEAD_BYTES + PROOF_BYTES;
        wire[at..at + text.len()].copy_from_slice(text);
        wire
    }

    /// Reads the wire form.
    pub fn decode(wire: &[u8; VERDICT_BYTES]) -> Result<Verdict, HandshakeError> {
        let status = u16_at(wire, 0);
        if status == 0 {
            let welcome = Welcome {
                granted: Capabilities(u32_at(wire, 4)),
                epoch: u64_at(wire, 8),
                state_slots: wire[16],
            };
            let reserved = u64_at(wire, 16) >> 8 | u64::from(u16_at(wire, 2)) << 56;
            if reserved != 0 {
                return Err(HandshakeError::Reserved(reserved));
            }
            return Ok(Verdict::Welcome { welcome, proof: Proof(bytes(wire, VERDICT_HEAD_BYTES)) });
        }
        let refusal = Refusal::from_wire(status).ok_or(HandshakeError::Verdict(status))?;
        let length = usize::from(u16_at(wire, 2)).min(MESSAGE_BYTES_MAX);
        let at = VERDICT_HEAD_BYTES + PROOF_BYTES;
        let message = String::from_utf8_lossy(&wire[at..at + length]).into_owned();
        Ok(Verdict::Refused { refusal, message })
    }

    /// Reads a verdict as the caller of the stream: a welcome must bring the proof that `prove` computes for its
    /// head.
    pub fn open(
        wire: &[u8; VERDICT_BYTES],
        prove: impl FnOnce(&[u8]) -> Proof,
    ) -> Result<Welcome, VerdictError> {
        match Verdict::decode(wire)? {
            Verdict::Welcome { welcome, proof } if proof.matches(&prove(&wire[..VERDICT_HEAD_BYTES])) => {
                Ok(welcome)
            }
            Verdict::Welcome { .. } => Err(VerdictError::Unproven),
            Verdict::Refused { refusal, message } => Err(VerdictError::Refused { refusal, message }),
        }
    }
}

/// Why a caller does not take its stream as open.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum VerdictError {
    /// The welcome has another proof than the secret gives.
    #[error("it does not know the job's secret: something else than the job's hub answers there")]
    Unproven,
    /// The hub refuses the stream.
    #[error("{message}")]
    Refused {
        /// The reason, for programs.
        refusal: Refusal,
        /// The reason, for people.
        message: String,
    },
    /// The hub grants other capabilities than the caller offers and requires.
    #[error("the hub grants other capabilities ({0}) than were asked for")]
    Capabilities(Capabilities),
    /// The bytes are no answer of a hub.
    #[error("it does not answer like a paramhub hub: {0}")]
    Unreadable(#[from] HandshakeError),
}
