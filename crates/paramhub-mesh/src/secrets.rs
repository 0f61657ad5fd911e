//! The secrets with which the ranks of a mesh prove themselves to one another.

use std::sync::Arc;

use paramhub_core::auth::{Nonce, StreamSecret};

/// The secrets of a mesh, as one rank knows them.
#[derive(Clone, Debug)]
pub enum MeshSecrets {
    /// One secret that all ranks know and nothing else does. A rank could act as another.
    Shared(Nonce),
    /// The secret that this rank shares with each other rank and with nothing else, by rank; `None` for itself.
    Pairs(Arc<[Option<StreamSecret>]>),
}

impl MeshSecrets {
    /// The secret of the connections with a rank; `None` if there is no such rank.
    pub(crate) fn with(&self, rank: u32) -> Option<StreamSecret> {
        match self {
            MeshSecrets::Shared(secret) => Some((*secret).into()),
            MeshSecrets::Pairs(secrets) => secrets.get(rank as usize).copied().flatten(),
        }
    }

    /// Secrets for another mesh of the same ranks. Each mesh has its own label.
    #[must_use]
    pub fn derive(&self, label: &str) -> MeshSecrets {
        match self {
            MeshSecrets::Shared(secret) => MeshSecrets::Shared(secret.derive(label)),
            MeshSecrets::Pairs(secrets) => MeshSecrets::Pairs(
                secrets.iter().map(|secret| secret.map(|secret| secret.derive(label))).collect(),
            ),
        }
    }
}

impl From<Nonce> for MeshSecrets {
    fn from(secret: Nonce) -> MeshSecrets {
        MeshSecrets::Shared(secret)
    }
}
