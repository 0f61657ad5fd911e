//! Proofs that a peer knows a secret, without revealing it (PHub section 3.1: access control by namespace and
//! nonce).
//!
//! A proof is a BLAKE3 hash over a purpose and the proven parts, with the secret as the key. Each purpose has
//! its own label, so a proof for one purpose is worthless for another.
//!
//! Whoever knows a job's nonce may ask the manager for a rank. The manager gives the rank's process a secret
//! of its own, with which it proves its streams: a rank cannot act as another rank or as a hub.

mod job_secret;
mod stream_secrets;

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

pub use job_secret::JobSecret;
pub use stream_secrets::{ChannelBinding, Epoch, EpochSecret, StreamSecret};

/// Names a job everywhere: 128 random bits, written as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
#[serde(try_from = "String", into = "String")]
pub struct Namespace(pub [u8; 16]);

/// A job's shared secret: 256 random bits, written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
#[serde(try_from = "String", into = "String")]
pub struct Nonce(pub [u8; 32]);

/// Distinguishes two processes that claim the same rank: 128 random bits that a worker draws when it starts,
/// written as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
#[serde(try_from = "String", into = "String")]
pub struct Incarnation(pub [u8; 16]);

impl Incarnation {
    /// In the hello of a hub: it says nothing of the hub that it calls.
    pub const NONE: Incarnation = Incarnation([0; 16]);

    /// In the hello of a hub to a standby: the position that the standby has in the job. Another process may have come to its
    /// address since, with another position.
    pub fn of_standby(position: u16) -> Incarnation {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&(u32::from(position) + 1).to_le_bytes());
        Incarnation(bytes)
    }
}

/// Known to one process alone, which repeats it to the manager with every ConnectService: whoever has it holds
/// the rank. 256 random bits, written as 64 hexadecimal digits.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
#[serde(try_from = "String", into = "String")]
pub struct RankClaim(pub [u8; 32]);

/// A keyed hash under a secret, written as 64 hexadecimal digits. Compare proofs in [constant
/// time](Proof::matches).
#[derive(Clone, Copy, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
#[serde(try_from = "String", into = "String")]
pub struct Proof(pub [u8; 32]);

/// The SHA-256 hash of the public key of an authority that signs certificates, as X.509 encodes the key
/// (SubjectPublicKeyInfo), written as 64 hexadecimal digits. It is not secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
#[serde(try_from = "String", into = "String")]
pub struct Fingerprint(pub [u8; 32]);

/// The use of a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A worker asks the manager to join: ConnectService.
    Connect,
    /// A worker sends its settings to the manager: InitService.
    Init,
    /// A worker leaves before it has reached a hub.
    Leave,
    /// The caller of a stream answers the hub's challenge.
    StreamCaller,
    /// A hub answers the challenge of a stream's caller.
    StreamHub,
    /// A worker of protocol version 1 answers a hub's challenge.
    StreamWorkerVersion1,
    /// A hub answers the challenge of a worker of protocol version 1.
    StreamHubVersion1,
    /// A rank of a mesh answers the challenge of the peer it dialled.
    MeshDialler,
    /// A rank of a mesh answers the challenge of the peer that dialled it.
    MeshListener,
    /// A caller of the manager shows that it knows a token.
    TokenCaller,
    /// The manager shows that it knows the caller's token.
    TokenManager,
    /// The proof is sent to no peer: it becomes a secret itself.
    Derive,
}

impl Purpose {
    fn label(self) -> &'static [u8] {
        match self {
            Purpose::Connect => b"paramhub v1 connect",
            Purpose::Init => b"paramhub v1 init",
            Purpose::Leave => b"paramhub v1 leave",
            Purpose::StreamCaller => b"paramhub v2 stream caller",
            Purpose::StreamHub => b"paramhub v2 stream hub",
            Purpose::StreamWorkerVersion1 => b"paramhub v1 stream worker",
            Purpose::StreamHubVersion1 => b"paramhub v1 stream hub",
            Purpose::MeshDialler => b"paramhub v1 mesh dialler",
            Purpose::MeshListener => b"paramhub v1 mesh listener",
            Purpose::TokenCaller => b"paramhub v1 token caller",
            Purpose::TokenManager => b"paramhub v1 token manager",
            Purpose::Derive => b"paramhub v1 derived secret",
        }
    }
}

/// Proves knowledge of `secret` for one purpose, bound to `parts`. The hash covers the lengths, so bytes
/// cannot move from one part to another.
fn prove(secret: &[u8; 32], purpose: Purpose, parts: &[&[u8]]) -> Proof {
    let mut hasher = blake3::Hasher::new_keyed(secret);
    for part in std::iter::once(&purpose.label()).chain(parts) {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    Proof(*hasher.finalize().as_bytes())
}

impl Nonce {
    /// Proves knowledge of this nonce for one purpose, bound to `parts`.
    pub fn prove(&self, purpose: Purpose, parts: &[&[u8]]) -> Proof {
        prove(&self.0, purpose, parts)
    }

    /// A secret for something else that only this job's members may take part in, for example a mesh. Each
    /// use has its own label.
    pub fn derive(&self, label: &str) -> Nonce {
        Nonce(self.prove(Purpose::Derive, &[label.as_bytes()]).0)
    }

    /// The proof with which `rank` asks to join.
    pub fn prove_rank(
        &self,
        purpose: Purpose,
        namespace: Namespace,
        rank: u32,
        incarnation: Incarnation,
    ) -> Proof {
        StreamSecret::from(*self).prove_rank(purpose, namespace, rank, incarnation)
    }
}

impl RankClaim {
    /// Returns whether both claims are equal, in constant time.
    pub fn matches(&self, other: &RankClaim) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Proof {
    /// Returns whether both proofs are equal, in constant time.
    pub fn matches(&self, other: &Proof) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

fn to_hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes all");
        text
    })
}

fn from_hex<const N: usize>(text: &str, what: &str) -> Result<[u8; N], String> {
    let digits = text.as_bytes();
    let value = |digit: u8| (digit as char).to_digit(16).map(|value| value as u8);
    let mut bytes = [0; N];
    if digits.len() != 2 * N {
        return Err(format!("{what} has {} hexadecimal digits, not {}", 2 * N, digits.len()));
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let (Some(high), Some(low)) = (value(pair[0]), value(pair[1])) else {
            return Err(format!("{what} has a character that is no hexadecimal digit"));
        };
        *byte = high << 4 | low;
    }
    Ok(bytes)
}

macro_rules! hexadecimal {
    ($name:ident, $what:literal) => {
        impl From<$name> for String {
            fn from(value: $name) -> String {
                to_hex(&value.0)
            }
        }

        impl TryFrom<String> for $name {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                from_hex(text, $what).map($name)
            }
        }
    };
}

hexadecimal!(Namespace, "a namespace");
hexadecimal!(Nonce, "a nonce");
hexadecimal!(Incarnation, "an incarnation");
hexadecimal!(Fingerprint, "a fingerprint");
hexadecimal!(Proof, "a proof");
hexadecimal!(RankClaim, "a claim");
hexadecimal!(EpochSecret, "an epoch's secret");
hexadecimal!(StreamSecret, "a stream's secret");

impl std::fmt::Display for Namespace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&to_hex(&self.0))
    }
}

impl std::fmt::Debug for Namespace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Namespace({self})")
    }
}

impl std::fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Incarnation({})", to_hex(&self.0))
    }
}

macro_rules! hidden {
    ($($name:ident),*) => {$(
        /// Secrets stay out of logs.
        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(concat!(stringify!($name), "(..)"))
            }
        }
    )*};
}

hidden!(Nonce, Proof, RankClaim, EpochSecret, StreamSecret);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_nonce_purpose_and_parts_only() {
        let nonce = Nonce([7; 32]);
        let proof = nonce.prove(Purpose::Connect, &[b"ab", b"c"]);
        assert!(proof.matches(&nonce.prove(Purpose::Connect, &[b"ab", b"c"])));
        assert!(!proof.matches(&nonce.prove(Purpose::Connect, &[b"a", b"bc"])));
        assert!(!proof.matches(&nonce.prove(Purpose::Init, &[b"ab", b"c"])));
        assert!(!proof.matches(&Nonce([8; 32]).prove(Purpose::Connect, &[b"ab", b"c"])));
    }

    #[test]
    fn derived_secrets_differ_by_label_and_nonce() {
        let nonce = Nonce([7; 32]);
        assert_eq!(nonce.derive("probe").0, nonce.derive("probe").0);
        for other in [nonce, nonce.derive("mesh"), Nonce([8; 32]).derive("probe")] {
            assert!(nonce.derive("probe").0 != other.0);
        }
    }

    #[test]
    fn secrets_stay_out_of_debug_output() {
        assert_eq!(format!("{:?} {:?}", Nonce([0xab; 32]), Proof([0xcd; 32])), "Nonce(..) Proof(..)");
    }

    #[test]
    fn hexadecimal_round_trips_and_says_what_is_wrong() {
        let nonce = Nonce(std::array::from_fn(|i| i as u8 * 7));
        assert_eq!(String::from(nonce).parse::<Nonce>().unwrap(), nonce);
        assert_eq!("abc".parse::<Namespace>().unwrap_err(), "a namespace has 32 hexadecimal digits, not 3");
        assert!("zz".repeat(16).parse::<Namespace>().unwrap_err().contains("no hexadecimal digit"));
        assert!("é".repeat(16).parse::<Namespace>().is_err());
    }
}
