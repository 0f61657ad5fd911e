//! Errors of the exchange, for people: what failed at which rank, and what to do.

use std::sync::Arc;

use paramhub_core::hyperparameters::HyperparameterError;
use paramhub_mesh::MeshError;
use paramhub_worker::WorkerError;
use thiserror::Error;

/// The reason why a layer cannot be exchanged.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum SyncError {
    /// The connections between the workers failed.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// The job failed at its hubs.
    #[error(transparent)]
    Job(#[from] WorkerError),
    /// The optimizer cannot go on with these hyperparameters.
    #[error("rank {rank}: layers that go by factors cannot take new hyperparameters: {reason}")]
    Hyperparameters {
        /// The rank that asked.
        rank: u32,
        /// The optimizer's reason.
        reason: HyperparameterError,
    },
    /// The workers cannot reach one another.
    #[error("rank {rank}: the workers cannot exchange factors: {reason}")]
    Rendezvous {
        /// The rank that asked.
        rank: u32,
        /// The reason, and the remedy.
        reason: Arc<str>,
    },
    /// This worker made a request that makes no sense.
    #[error("rank {rank}, layer `{layer}`: {reason}")]
    Misused {
        /// The rank that asked.
        rank: u32,
        /// The layer of the request.
        layer: Arc<str>,
        /// The fault and the remedy.
        reason: Arc<str>,
    },
    /// Another worker's layer, step or message does not match this one's.
    #[error("rank {rank}, layer `{layer}`: rank {peer} {reason}")]
    Disagreement {
        /// The rank that noticed.
        rank: u32,
        /// The layer on which they differ.
        layer: Arc<str>,
        /// The rank that differs.
        peer: u32,
        /// The part that differs.
        reason: Arc<str>,
    },
    /// This worker's factors hold a NaN or an infinity, and the job rejects such gradients.
    #[error(
        "rank {rank}, layer `{layer}`: the factors of key `{key}` hold a NaN or an infinity, and the job rejects such gradients"
    )]
    NonFinite {
        /// The rank whose factors these are.
        rank: u32,
        /// The layer of the factors.
        layer: Arc<str>,
        /// The key of the layer's weight.
        key: Arc<str>,
    },
    /// The workers' processors round differently.
    #[error(
        "rank {rank}: rank {peer}'s processor rounds products otherwise than this one's, so that their parameters would drift \
         apart: let these layers go through the hub (scheme = hub), or use processors of one kind"
    )]
    Rounding {
        /// The rank that noticed.
        rank: u32,
        /// The rank that differs.
        peer: u32,
    },
    /// The operating system refuses threads.
    #[error("rank {rank}: cannot start threads for the layers: {reason}")]
    Threads {
        /// The rank that asked.
        rank: u32,
        /// The operating system's reason.
        reason: Arc<str>,
    },
}

impl SyncError {
    /// Returns the reason why this rank gives up, for the hubs, if they cannot notice it themselves: what
    /// passes between workers alone is unknown to them, and a job whose ranks just leave would count as
    /// finished.
    pub(crate) fn reason_for_hubs(&self) -> Option<String> {
        match self {
            SyncError::NonFinite { key, .. } => Some(format!(
                "its factors of key `{key}` hold a NaN or an infinity, and the job rejects such gradients"
            )),
            SyncError::Disagreement { layer, peer, reason, .. } => {
                Some(format!("it exchanges layer `{layer}` with rank {peer}, which {reason}"))
            }
            SyncError::Mesh(_)
            | SyncError::Job(_)
            | SyncError::Hyperparameters { .. }
            | SyncError::Rendezvous { .. }
            | SyncError::Misused { .. }
            | SyncError::Rounding { .. }
            | SyncError::Threads { .. } => None,
        }
    }
}
