//! What can go wrong, for people: who, what, and what to do.

use std::sync::Arc;

use paramhub_core::hyperparameters::HyperparameterError;
use paramhub_mesh::MeshError;
use paramhub_worker::WorkerError;
use thiserror::Error;

/// Why a layer cannot be exchanged.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum SyncError {
    /// The connections between the workers.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// The job, at its hubs.
    #[error(transparent)]
    Job(#[from] WorkerError),
    /// The optimizer cannot go on so.
    #[error("rank {rank}: layers that go by factors cannot take new hyperparameters: {reason}")]
    Hyperparameters {
        /// Who asked.
        rank: u32,
        /// What the optimizer says.
        reason: HyperparameterError,
    },
    /// The workers cannot reach one another.
    #[error("rank {rank}: the workers cannot exchange factors: {reason}")]
    Meeting {
        /// Who asked.
        rank: u32,
        /// Why, and what to do.
        reason: Arc<str>,
    },
    /// What this worker asks for makes no sense.
    #[error("rank {rank}, layer `{layer}`: {reason}")]
    Misplaced {
        /// Who asked.
        rank: u32,
        /// About which layer.
        layer: Arc<str>,
        /// What is wrong, and what to do.
        reason: Arc<str>,
    },
    /// Another worker does not do what this one does.
    #[error("rank {rank}, layer `{layer}`: rank {peer} {reason}")]
    Disagreement {
        /// Who noticed.
        rank: u32,
        /// At which layer.
        layer: Arc<str>,
        /// Who differs.
        peer: u32,
        /// In what.
        reason: Arc<str>,
    },
    /// A worker's factors hold a NaN or an infinity, and the job rejects such gradients.
    #[error(
        "rank {rank}, layer `{layer}`: rank {peer} sent factors of key `{key}` with a NaN or an infinity, and the job rejects such \
         gradients"
    )]
    NonFinite {
        /// Who noticed.
        rank: u32,
        /// At which layer.
        layer: Arc<str>,
        /// The key of its weight.
        key: Arc<str>,
        /// Whose they are.
        peer: u32,
    },
    /// The workers' processors round differently.
    #[error(
        "rank {rank}: rank {peer}'s processor rounds products otherwise than this one's, so that their parameters would drift \
         apart: let these layers go through the hub (scheme = hub), or use processors of one kind"
    )]
    Rounding {
        /// Who noticed.
        rank: u32,
        /// Who differs.
        peer: u32,
    },
    /// The operating system refuses threads.
    #[error("rank {rank}: cannot start threads for the layers: {reason}")]
    Threads {
        /// Who asked.
        rank: u32,
        /// What the operating system says.
        reason: Arc<str>,
    },
}
