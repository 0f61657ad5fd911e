//! The start of a stream: four messages, after which each end trusts the other's identity (PHub section 3.1).
//!
//! ```text
//! caller                                        hub
//!   | -- Hello: version, caller, route ---------> |
//!   | <-- Challenge: the version of both -------- |
//!   | -- proof over Hello and Challenge --------> |
//!   | <-- Verdict: welcome and proof, or why not  |
//!   | === frames both ways ===================== |
//! ```
//! The hub challenges the caller of an unknown job too, so that a caller without a secret cannot find out
//! which jobs exist.
//!
//! A Hello names the newest and the oldest version that its caller speaks, and its length. A hub answers in
//! the newest version of both. The proofs cover the Hello as it was sent, the Challenge and the fields of the
//! Verdict, so nobody between the two can lower the version or change what was agreed.
//!
//! [`CallerHandshake`] and [`HubHandshake`] read and make the messages of either side; their users move the
//! bytes.

mod caller;
mod capabilities;
mod hello;
mod hub;
mod verdict;
mod version_1;

use thiserror::Error;

pub use caller::CallerHandshake;
pub use capabilities::Capabilities;
pub use hello::{Attempt, Caller, HELLO_BYTES, HELLO_BYTES_MAX, HELLO_HEAD_BYTES, Hello, hello_length};
pub use hub::HubHandshake;
pub use verdict::{Refusal, VERDICT_BYTES, Verdict, VerdictError, Welcome};

/// The first four bytes of every stream.
pub const MAGIC: [u8; 4] = *b"PHUB";
/// The newest version of the protocol that this release speaks.
pub const VERSION: u16 = 2;
/// The oldest version in which a hub of this release serves workers: that of the release before.
pub const VERSION_OLDEST: u16 = 1;
/// Bytes of a challenge.
pub const CHALLENGE_BYTES: usize = 32;
/// Bytes of the message that carries a hub's challenge.
pub const CHALLENGE_MESSAGE_BYTES: usize = 8 + CHALLENGE_BYTES;
/// Bytes of a proof.
pub const PROOF_BYTES: usize = 32;

/// Random bytes that make a proof worthless on another connection.
pub type Challenge = [u8; CHALLENGE_BYTES];

/// The reason why bytes are not a valid handshake message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum HandshakeError {
    /// The bytes are not paramhub's.
    #[error("the first bytes are not paramhub's")]
    Magic,
    /// The caller speaks no version that this side speaks.
    #[error(
        "the caller speaks protocol versions {oldest} to {newest}, this side {VERSION_OLDEST} to {VERSION}: use the same \
         release of paramhub on both ends"
    )]
    CallerVersion {
        /// The oldest version of the caller.
        oldest: u16,
        /// The newest version of the caller.
        newest: u16,
    },
    /// The hub speaks only versions that are older than this side's.
    #[error(
        "the hub speaks an older protocol than version {VERSION}: use the same release of paramhub on both ends, or \
         install the newer one at the hubs first"
    )]
    HubIsOlder,
    /// The hub has chosen a version that this side does not speak.
    #[error("the hub answers in protocol version {0}, this side speaks {VERSION}")]
    HubVersion(u16),
    /// A Hello whose length no Hello of its version has.
    #[error("the Hello claims to have {0} bytes")]
    Length(u16),
    /// A caller with a number that this release does not know.
    #[error("callers of kind {0} are not known to this release")]
    Caller(u8),
    /// Reserved bytes or flags are not zero.
    #[error("reserved bits are set: {0:#x}")]
    Reserved(u64),
    /// A verdict with an unknown number.
    #[error("the verdict {0} does not exist")]
    Verdict(u16),
}

fn bytes<const N: usize>(wire: &[u8], at: usize) -> [u8; N] {
    wire[at..at + N].try_into().expect("a fixed range")
}

fn u16_at(wire: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes(wire, at))
}

fn u32_at(wire: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes(wire, at))
}

fn u64_at(wire: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes(wire, at))
}

#[cfg(test)]
mod tests;
