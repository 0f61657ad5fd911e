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

/// Why a mesh cannot do what was asked. Once a mesh has failed, every outstanding and every later operation
/// gets the same error.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum MeshError {
    /// The configuration contradicts itself.
    #[error("{who}: {reason}")]
    Configuration {
        /// The rank that asked.
        who: MeshRank,
        /// What is wrong, and what to do.
        reason: Arc<str>,
    },
    /// The operating system refuses a thread, a descriptor or the like.
    #[error("{who}: cannot {what}: {reason}")]
    System {
        /// The rank that asked.
        who: MeshRank,
        /// What the rank tried to do.
        what: &'static str,
        /// What the operating system says.
        reason: Arc<str>,
    },
    /// Not every rank arrived in time.
    #[error("{who}: after {seconds} s {}: {}", arrived(*.size, .missing.len()), list(.missing))]
    Join {
        /// The rank that waited.
        who: MeshRank,
        /// Ranks in the mesh.
        size: u32,
        /// Seconds waited.
        seconds: f64,
        /// The missing ranks, and what is known of each.
        missing: Vec<(u32, Arc<str>)>,
    },
    /// A peer refused this rank while joining.
    #[error("{who}: rank {rank} at {address} refused the connection: {reason}")]
    Refused {
        /// The rank that dialled.
        who: MeshRank,
        /// The rank that refused.
        rank: u32,
        /// The address of that rank.
        address: Arc<str>,
        /// The reason that it gave.
        reason: Arc<str>,
    },
    /// The caller gave up while joining.
    #[error("{who}: joining was interrupted")]
    Interrupted {
        /// The rank that asked.
        who: MeshRank,
    },
    /// The request makes no sense at this rank.
    #[error("{who}: {what}: {reason}")]
    Misused {
        /// The rank that asked.
        who: MeshRank,
        /// The operation.
        what: Arc<str>,
        /// What is wrong, and what to do.
        reason: Arc<str>,
    },
    /// Too many operations are outstanding.
    #[error(
        "{who}: {outstanding} operations are outstanding, which is the limit: wait for some before issuing more"
    )]
    Congested {
        /// The rank that asked.
        who: MeshRank,
        /// The number of outstanding operations.
        outstanding: usize,
    },
    /// A peer's connection ended without a goodbye: its process died, or the network between failed.
    #[error("{who}: rank {rank} is lost: {reason}")]
    Lost {
        /// The rank that lost it.
        who: MeshRank,
        /// The peer.
        rank: u32,
        /// What happened to the connection.
        reason: Arc<str>,
    },
    /// A peer has sent nothing for too long while an operation was outstanding.
    #[error("{who}: rank {rank} has not been heard for {seconds:.1} s: is its machine still there?")]
    Silent {
        /// The rank that waited.
        who: MeshRank,
        /// The peer.
        rank: u32,
        /// Seconds of silence.
        seconds: f64,
    },
    /// A peer that is needed has left in order.
    #[error("{who}: {what}: rank {rank} has left the mesh")]
    PeerLeft {
        /// The rank that asked.
        who: MeshRank,
        /// The operation.
        what: Arc<str>,
        /// The peer.
        rank: u32,
    },
    /// A peer ended the mesh and sent the reason.
    #[error("{who}: rank {by} ended the mesh: {reason}")]
    Aborted {
        /// The rank that received the reason.
        who: MeshRank,
        /// The rank that ended the mesh.
        by: u32,
        /// The rank at fault, if one is.
        culprit: Option<u32>,
        /// The reason.
        reason: Arc<str>,
    },
    /// Sender and receiver disagree on a length.
    #[error(
        "{who}: {what}: rank {sender} sends {sent_bytes} bytes and rank {receiver} expects {expected_bytes}: both must name the same length"
    )]
    LengthMismatch {
        /// The rank that noticed.
        who: MeshRank,
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
        "{who}: collective {number} is {here} at rank {} but {there} at rank {rank}: all ranks must call the same collectives in the same order",
        .who.rank
    )]
    OperationMismatch {
        /// The rank that noticed.
        who: MeshRank,
        /// Position in the sequence of collectives, counted from 0.
        number: u64,
        /// What this rank calls.
        here: Arc<str>,
        /// The other rank.
        rank: u32,
        /// What that rank calls.
        there: Arc<str>,
    },
    /// A peer sent a frame that the protocol does not allow.
    #[error("{who}: rank {rank} broke the protocol: {reason}")]
    Protocol {
        /// The rank that noticed.
        who: MeshRank,
        /// The peer.
        rank: u32,
        /// What the peer sent.
        reason: Arc<str>,
    },
    /// This rank has left the mesh.
    #[error("{who}: this rank has left the mesh")]
    Left {
        /// The rank that asked.
        who: MeshRank,
    },
    /// This rank has ended the mesh itself, with [`Mesh::abort`](crate::Mesh::abort) or by dropping it.
    #[error("{who}: this rank has ended the mesh: {reason}")]
    GaveUp {
        /// The rank that asked.
        who: MeshRank,
        /// The reason that the program gave.
        reason: Arc<str>,
    },
    /// [`Mesh::leave`](crate::Mesh::leave) did not finish in time.
    #[error("{who}: leaving took more than {seconds} s; {outstanding} operations were given up")]
    LeaveTimeout {
        /// The rank that asked.
        who: MeshRank,
        /// Seconds waited.
        seconds: f64,
        /// Operations that have not ended.
        outstanding: usize,
    },
    /// A callback of the program panicked, or an invariant of the mesh is broken.
    #[error("{who}: the mesh's thread has failed: {reason}")]
    Internal {
        /// The rank whose thread it was.
        who: MeshRank,
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
            MeshError::GaveUp { who, .. } => Some(who.rank),
            MeshError::LengthMismatch { who, sender, receiver, .. } => {
                Some(if *sender == who.rank { *receiver } else { *sender })
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
