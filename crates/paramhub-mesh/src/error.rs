//! Errors, as messages for people: which rank, what went wrong, and what to do.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

/// The rank to which an error happened; error messages begin with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshRank {
    /// The mesh's name.
    pub mesh: Arc<str>,
    /// The rank within the mesh.
    pub rank: u32,
}

impl fmt::Display for MeshRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mesh `{}`, rank {}", self.mesh, self.rank)
    }
}

/// The reason why a mesh cannot do what was asked. Once a mesh has failed, every outstanding and every
/// later operation gets the same error.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum MeshError {
    /// The configuration contradicts itself.
    #[error("{this_rank}: {reason}")]
    Configuration {
        /// The rank that asked.
        this_rank: MeshRank,
        /// The fault and the remedy.
        reason: Arc<str>,
    },
    /// The operating system refuses a thread, a descriptor or the like.
    #[error("{this_rank}: cannot {what}: {reason}")]
    System {
        /// The rank that asked.
        this_rank: MeshRank,
        /// The action that failed.
        what: &'static str,
        /// The operating system's reason.
        reason: Arc<str>,
    },
    /// Not every rank arrived in time.
    #[error("{this_rank}: after {seconds} s {}: {}", arrived(*.size, .missing.len()), list(.missing))]
    Join {
        /// The rank that waited.
        this_rank: MeshRank,
        /// Ranks in the mesh.
        size: u32,
        /// Seconds waited.
        seconds: f64,
        /// The missing ranks, and what is known of each.
        missing: Vec<(u32, Arc<str>)>,
    },
    /// A peer refused this rank while joining.
    #[error("{this_rank}: rank {rank} at {address} refused the connection: {reason}")]
    Refused {
        /// The rank that dialled.
        this_rank: MeshRank,
        /// The rank that refused.
        rank: u32,
        /// The address of that rank.
        address: Arc<str>,
        /// The reason that it gave.
        reason: Arc<str>,
    },
    /// The caller gave up while joining.
    #[error("{this_rank}: joining was interrupted")]
    Interrupted {
        /// The rank that asked.
        this_rank: MeshRank,
    },
    /// The request makes no sense at this rank.
    #[error("{this_rank}: {what}: {reason}")]
    Misused {
        /// The rank that asked.
        this_rank: MeshRank,
        /// The operation.
        what: Arc<str>,
        /// The fault and the remedy.
        reason: Arc<str>,
    },
    /// Too many operations are outstanding.
    #[error(
        "{this_rank}: {outstanding} operations are outstanding, which is the limit: wait for some before issuing more"
    )]
    Congested {
        /// The rank that asked.
        this_rank: MeshRank,
        /// The number of outstanding operations.
        outstanding: usize,
    },
    /// A peer's connection ended without a leave message: its process died, or the network between failed.
    #[error("{this_rank}: rank {rank} is lost: {reason}")]
    Lost {
        /// The rank that lost it.
        this_rank: MeshRank,
        /// The peer.
        rank: u32,
        /// The end of the connection.
        reason: Arc<str>,
    },
    /// A peer has sent nothing for too long while an operation was outstanding.
    #[error("{this_rank}: rank {rank} has not been heard for {seconds:.1} s: is its machine still there?")]
    Silent {
        /// The rank that waited.
        this_rank: MeshRank,
        /// The peer.
        rank: u32,
        /// Seconds of silence.
        seconds: f64,
    },
    /// A peer that is needed has left in order.
    #[error("{this_rank}: {what}: rank {rank} has left the mesh")]
    PeerLeft {
        /// The rank that asked.
        this_rank: MeshRank,
        /// The operation.
        what: Arc<str>,
        /// The peer.
        rank: u32,
    },
    /// A peer ended the mesh and sent the reason.
    #[error("{this_rank}: rank {by} ended the mesh: {reason}")]
    Aborted {
        /// The rank that received the reason.
        this_rank: MeshRank,
        /// The rank that ended the mesh.
        by: u32,
        /// The rank at fault, if one is.
        culprit: Option<u32>,
        /// The reason.
        reason: Arc<str>,
    },
    /// Sender and receiver disagree on a length.
    #[error(
        "{this_rank}: {what}: rank {sender} sends {sent_bytes} bytes and rank {receiver} expects {expected_bytes}: both must name the same length"
    )]
    LengthMismatch {
        /// The rank that noticed.
        this_rank: MeshRank,
        /// The operation, with its tag.
        what: Arc<str>,
        /// The sending rank.
        sender: u32,
        /// Bytes that it sends.
        sent_bytes: u64,
        /// The receiving rank.
        receiver: u32,
        /// Bytes that it expects.
        expected_bytes: u64,
    },
    /// Two ranks call different collectives at the same position of their sequences.
    #[error(
        "{this_rank}: collective {number} is {here} at rank {} but {there} at rank {rank}: all ranks must call the same collectives in the same order",
        .this_rank.rank
    )]
    OperationMismatch {
        /// The rank that noticed.
        this_rank: MeshRank,
        /// Position in the sequence of collectives, counted from 0.
        number: u64,
        /// The collective that this rank calls.
        here: Arc<str>,
        /// The other rank.
        rank: u32,
        /// The collective that that rank calls.
        there: Arc<str>,
    },
    /// A peer sent a frame that the protocol does not allow.
    #[error("{this_rank}: rank {rank} broke the protocol: {reason}")]
    Protocol {
        /// The rank that noticed.
        this_rank: MeshRank,
        /// The peer.
        rank: u32,
        /// The message of the peer.
        reason: Arc<str>,
    },
    /// This rank has left the mesh.
    #[error("{this_rank}: this rank has left the mesh")]
    Left {
        /// The rank that asked.
        this_rank: MeshRank,
    },
    /// This rank has ended the mesh itself, with [`Mesh::abort`](crate::Mesh::abort) or by dropping it.
    #[error("{this_rank}: this rank has ended the mesh: {reason}")]
    GaveUp {
        /// The rank that asked.
        this_rank: MeshRank,
        /// The reason that the program gave.
        reason: Arc<str>,
    },
    /// [`Mesh::leave`](crate::Mesh::leave) did not finish in time.
    #[error("{this_rank}: leaving took more than {seconds} s; {outstanding} operations were given up")]
    LeaveTimeout {
        /// The rank that asked.
        this_rank: MeshRank,
        /// Seconds waited.
        seconds: f64,
        /// Operations that have not ended.
        outstanding: usize,
    },
    /// A callback of the program panicked, or an invariant of the mesh is broken.
    #[error("{this_rank}: the mesh's thread has failed: {reason}")]
    Internal {
        /// The rank whose thread it was.
        this_rank: MeshRank,
        /// The panic's message, or the broken invariant.
        reason: Arc<str>,
    },
}

impl MeshError {
    /// The rank at fault, if one is known.
    pub fn rank(&self) -> Option<u32> {
        match self {
            MeshError::Refused { rank, .. }
            | MeshError::Lost { rank, .. }
            | MeshError::Silent { rank, .. }
            | MeshError::PeerLeft { rank, .. }
            | MeshError::OperationMismatch { rank, .. }
            | MeshError::Protocol { rank, .. } => Some(*rank),
            MeshError::Aborted { culprit, .. } => *culprit,
            MeshError::Join { missing, .. } => missing.first().map(|(rank, _)| *rank),
            MeshError::GaveUp { this_rank, .. } => Some(this_rank.rank),
            MeshError::LengthMismatch { this_rank, sender, receiver, .. } => {
                Some(if *sender == this_rank.rank { *receiver } else { *sender })
            }
            _ => None,
        }
    }
}

fn arrived(size: u32, missing: usize) -> String {
    format!("only {} of {size} ranks are connected", size as usize - missing)
}

fn list(missing: &[(u32, Arc<str>)]) -> String {
    const NAMED_MAX: usize = 16;
    let mut text = missing
        .iter()
        .take(NAMED_MAX)
        .map(|(rank, why)| format!("rank {rank} is missing ({why})"))
        .collect::<Vec<_>>()
        .join(", ");
    if missing.len() > NAMED_MAX {
        text.push_str(&format!(" and {} more", missing.len() - NAMED_MAX));
    }
    text
}
