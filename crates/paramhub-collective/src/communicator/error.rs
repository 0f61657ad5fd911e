//! What goes wrong in a communicator.

use std::sync::Arc;

use paramhub_mesh::MeshError;
use paramhub_syncer::SyncError;
use paramhub_worker::WorkerError;
use thiserror::Error;

/// Why a collective failed.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum CommunicatorError {
    /// The connections between the ranks.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// The ranks of a job do not find one another.
    #[error(transparent)]
    Meeting(Arc<SyncError>),
    /// The connection manager.
    #[error(transparent)]
    Job(#[from] WorkerError),
    /// Buffers that do not fit the call.
    #[error("collective `{name}`: {reason}")]
    Misplaced {
        /// What was to be exchanged.
        name: String,
        /// What does not fit.
        reason: String,
    },
    /// Ranks do not call the same.
    #[error(
        "rank {rank} does not do what rank 0 does: call {sequence} of this communicator is {theirs} there, and {zeros} at rank 0; \
         collectives come in one order at all ranks"
    )]
    Mismatch {
        /// The first rank that differs from rank 0.
        rank: u32,
        /// Calls before this one.
        sequence: u64,
        /// What it calls.
        theirs: String,
        /// What rank 0 calls.
        zeros: String,
    },
    /// The library that was called refuses.
    #[error("rank {rank}: {call}: {reason}")]
    Library {
        /// Whose call.
        rank: u32,
        /// What was called, and for what.
        call: String,
        /// What the library says, or what to do.
        reason: String,
    },
    /// The operating system refuses.
    #[error("rank {rank}: cannot {what}: {reason}")]
    System {
        /// Who asked.
        rank: u32,
        /// What was tried.
        what: &'static str,
        /// What the operating system says.
        reason: String,
    },
}

impl CommunicatorError {
    /// The rank at fault, where one is known.
    pub fn culprit(&self) -> Option<u32> {
        match self {
            CommunicatorError::Mesh(error) => error.rank(),
            CommunicatorError::Job(error) => error.culprit(),
            CommunicatorError::Mismatch { rank, .. } => Some(*rank),
            _ => None,
        }
    }
}
