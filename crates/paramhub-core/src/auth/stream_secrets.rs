//! The secrets with which the streams of a job are proved.

use serde::{Deserialize, Serialize};

use super::{Incarnation, Namespace, Nonce, Proof, Purpose, prove};
use crate::wire::{Caller, Hello};

/// A membership of a job, from which the secrets of its streams are derived. The manager draws a new one for
/// each epoch and gives it to the job's hubs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Epoch {
    /// The number of the epoch: 1 for a job's first.
    pub number: u64,
    /// The secret, which ranks do not know.
    pub secret: EpochSecret,
}

/// The secret that the hubs of a job share in one epoch, 256 bits, written as 64 hexadecimal digits.
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

/// The secrets of a job's streams, as a hub knows them.
#[derive(Clone, Debug)]
pub struct StreamSecrets {
    /// The job's nonce.
    pub nonce: Nonce,
    /// The job's epoch.
    pub epoch: Epoch,
    /// The ranks whose workers speak protocol version 1, ascending. The manager has given them no secrets, so
    /// their streams are proved with the nonce.
    pub version_1_ranks: Vec<u32>,
}

impl StreamSecrets {
    /// The secret with which a caller must prove its stream; `None` for a caller that may open none. A rank
    /// speaks one version for the life of the job, so that nobody with the nonce alone can be taken for a rank
    /// that has a secret.
    pub fn of(&self, hello: &Hello, version: u16) -> Option<StreamSecret> {
        match hello.caller {
            Caller::Worker { rank, .. } => {
                let is_version_1 = self.version_1_ranks.binary_search(&rank).is_ok();
                match (version, is_version_1) {
                    (1, true) => Some(self.nonce.into()),
                    (1, false) | (_, true) => None,
                    (_, false) => Some(self.epoch.secret.of_rank(rank)),
                }
            }
            Caller::Hub { .. } => Some(self.epoch.secret.of_hubs()),
            Caller::Prober => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Attempt, Capabilities};

    fn hello(caller: Caller) -> Hello {
        Hello {
            caller,
            interface: 0,
            core: 0,
            offered: Capabilities::default(),
            required: Capabilities::default(),
            attempt: Attempt::first(1),
            namespace: Namespace([1; 16]),
            incarnation: Incarnation([2; 16]),
            placement: [3; 32],
            challenge: [4; 32],
        }
    }

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
    }

    #[test]
    fn the_nonce_proves_the_streams_of_ranks_without_a_secret_only() {
        let secrets = StreamSecrets {
            nonce: Nonce([9; 32]),
            epoch: Epoch { number: 1, secret: EpochSecret([8; 32]) },
            version_1_ranks: vec![1],
        };
        let of =
            |rank, version| secrets.of(&hello(Caller::Worker { rank, shares_parameters: false }), version);
        assert_eq!(of(0, 2), Some(secrets.epoch.secret.of_rank(0)));
        assert_eq!(of(1, 1), Some(StreamSecret(secrets.nonce.0)));
        assert_eq!((of(0, 1), of(1, 2)), (None, None));
        assert_eq!(secrets.of(&hello(Caller::Prober), 2), None);
        let hub = secrets.of(&hello(Caller::Hub { site: 0, route: 0 }), 2);
        assert_eq!(hub, Some(secrets.epoch.secret.of_hubs()));
    }
}
