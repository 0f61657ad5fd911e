//! Errors of communicators.

use std::sync::Arc;

use paramhub_mesh::MeshError;
use paramhub_syncer::SyncError;
use paramhub_worker::WorkerError;
use thiserror::Error;

/// The reason why a collective failed.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum CommunicatorError {
    /// The connections between the ranks failed.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// The ranks of a job cannot reach one another.
    #[error(transparent)]
    Rendezvous(Arc<SyncError>),
    /// The connection manager refused a call or could not be reached.
    #[error(transparent)]
    Job(#[from] WorkerError),
    /// Buffers do not fit the call.
    #[error("collective `{name}`: {reason}")]
    Misused {
        /// The name of the exchange.
        name: String,
        /// The part that does not fit.
        reason: String,
    },
    /// Ranks make different calls.
    #[error(
        "rank {rank} does not do what rank 0 does: call {sequence} of this communicator is {theirs} there, and {zeros} at rank 0; \
         collectives come in one order at all ranks"
    )]
    Mismatch {
        /// The first rank that differs from rank 0.
        rank: u32,
        /// The number of calls before this one.
        sequence: u64,
        /// The call of that rank.
        theirs: String,
        /// The call of rank 0.
        zeros: String,
    },
    /// The library that was called refuses the call.
    #[error("rank {rank}: {call}: {reason}")]
    Library {
        /// The rank that called it.
        rank: u32,
        /// The call, and its purpose.
        call: String,
        /// The library's message, or what to do.
        reason: String,
    },
    /// The operating system refuses a thread, a descriptor or the like.
    #[error("rank {rank}: cannot {what}: {reason}")]
    System {
        /// The rank that asked.
        rank: u32,
        /// The action that failed.
        what: &'static str,
        /// The operating system's reason.
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
