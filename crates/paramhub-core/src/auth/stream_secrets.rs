//! The secrets with which the streams of a job are proved.

use serde::{Deserialize, Serialize};

use super::{Incarnation, Namespace, Nonce, Proof, Purpose, prove};

/// The epoch with which a job begins, and the secret from which those of its streams are derived, in that epoch and
/// in later ones. The manager draws it and gives it to the job's hubs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Epoch {
    /// The number of the epoch: 1, unless the job begins again.
    pub number: u64,
    /// The secret, which ranks do not know.
    pub secret: EpochSecret,
}

/// The secret that the hubs of a job share, 256 bits, written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
#[serde(try_from = "String", into = "String")]
pub struct EpochSecret(pub [u8; 32]);

/// The secret with which the two ends of a stream prove themselves to each other, 256 bits, written as 64
/// hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
#[serde(try_from = "String", into = "String")]
pub struct StreamSecret(pub [u8; 32]);

/// A number that both ends of an encrypted connection know and that no other connection has: what is proved with it
/// holds for this connection alone (RFC 5056).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelBinding(pub [u8; 32]);

impl Epoch {
    /// The number of the epoch with which a job begins that has not begun before.
    pub const FIRST: u64 = 1;

    /// Whether the job has begun before, and begins again in this epoch.
    pub fn begins_again(&self) -> bool {
        self.number > Epoch::FIRST
    }

    /// The epoch of this number, in which the job begins again. It has other secrets.
    pub fn begin_again(&self, number: u64) -> Epoch {
        let secret = self.secret.derive(b"begin again", &[&number.to_le_bytes()]);
        Epoch { number, secret: EpochSecret(secret.0) }
    }

    /// The secret of the process that holds a rank since the epoch of this number.
    pub fn of_rank(&self, rank: u32, since: u64) -> StreamSecret {
        match since == self.number {
            true => self.secret.of_rank(rank),
            false => self.secret.derive(b"rank in epoch", &[&rank.to_le_bytes(), &since.to_le_bytes()]),
        }
    }
}

impl EpochSecret {
    /// The secret of a rank, for its streams to hubs and its calls to the manager.
    pub fn of_rank(&self, rank: u32) -> StreamSecret {
        self.derive(b"rank", &[&rank.to_le_bytes()])
    }

    /// The secret of the streams that hubs open to one another.
    pub fn of_hubs(&self) -> StreamSecret {
        self.derive(b"hubs", &[])
    }

    /// The secret of the streams between two ranks, which no other rank knows.
    pub fn of_pair(&self, rank: u32, other: u32) -> StreamSecret {
        let (low, high) = (rank.min(other), rank.max(other));
        self.derive(b"pair", &[&low.to_le_bytes(), &high.to_le_bytes()])
    }

    fn derive(&self, use_of_it: &[u8], parts: &[&[u8]]) -> StreamSecret {
        let parts: Vec<&[u8]> = std::iter::once(&use_of_it).chain(parts).copied().collect();
        StreamSecret(prove(&self.0, Purpose::Derive, &parts).0)
    }
}

impl StreamSecret {
    /// Proves knowledge of this secret for one purpose, bound to `parts`.
    pub fn prove(&self, purpose: Purpose, parts: &[&[u8]]) -> Proof {
        prove(&self.0, purpose, parts)
    }

    /// The proof with which `rank` calls the manager once it has its secret.
    pub fn prove_rank(
        &self,
        purpose: Purpose,
        namespace: Namespace,
        rank: u32,
        incarnation: Incarnation,
    ) -> Proof {
        self.prove(purpose, &[&namespace.0, &rank.to_le_bytes(), &incarnation.0])
    }

    /// The secret for the proofs on an encrypted connection.
    #[must_use]
    pub fn bound_to(&self, channel: &ChannelBinding) -> StreamSecret {
        StreamSecret(self.prove(Purpose::Derive, &[b"channel binding", &channel.0]).0)
    }

    /// A secret for one use between the ends that know this one. Each use has its own label.
    #[must_use]
    pub fn derive(&self, label: &str) -> StreamSecret {
        StreamSecret(self.prove(Purpose::Derive, &[label.as_bytes()]).0)
    }
}

/// What uses one secret for all streams, such as a probe.
impl From<Nonce> for StreamSecret {
    fn from(nonce: Nonce) -> StreamSecret {
        StreamSecret(nonce.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_caller_of_every_epoch_has_a_secret_of_its_own() {
        let (first, second) = (EpochSecret([1; 32]), EpochSecret([2; 32]));
        let of = |epoch: EpochSecret| {
            let ranks = (0..4).map(move |rank| epoch.of_rank(rank));
            let pairs = (0..4).flat_map(|low| (low + 1..4).map(move |high| (low, high)));
            let pairs = pairs.map(move |(low, high)| epoch.of_pair(low, high));
            ranks.chain(pairs).chain([epoch.of_hubs()])
        };
        let all: Vec<[u8; 32]> = of(first).chain(of(second)).map(|secret| secret.0).collect();
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert!(!distinct.contains(&first.0) && !distinct.contains(&second.0));
        assert_eq!(first.of_pair(3, 1), first.of_pair(1, 3));
        let epoch = Epoch { number: 1, secret: first };
        assert_eq!(epoch.of_rank(2, 1), first.of_rank(2));
        let later = [epoch.of_rank(2, 2), epoch.of_rank(2, 3), epoch.of_rank(3, 2)];
        assert!(later.iter().all(|secret| !distinct.contains(&secret.0)));
        assert_ne!(later[0].0, later[1].0);
    }
}
