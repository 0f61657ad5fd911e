//! What can go wrong, for people: who, what, and what to do.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use thiserror::Error;

/// The rank an error happened to, as its messages begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who {
    /// The mesh's name.
    pub mesh: Arc<str>,
    /// The rank within the mesh.
    pub rank: u32,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mesh `{}`, rank {}", self.mesh, self.rank)
    }
}

/// Why a mesh cannot do what was asked. Once a mesh has failed, everything outstanding and later gets the same error.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum MeshError {
    /// The configuration contradicts itself.
    #[error("{who}: {reason}")]
    Configuration {
        /// Who asked.
        who: Who,
        /// What is wrong, and what to do.
        reason: Arc<str>,
    },
    /// The operating system refuses a thread, a descriptor or the like.
    #[error("{who}: cannot {what}: {reason}")]
    System {
        /// Who asked.
        who: Who,
        /// What was tried.
        what: &'static str,
        /// What the operating system says.
        reason: Arc<str>,
    },
    /// Not every rank arrived in time.
    #[error("{who}: after {seconds} s {}: {}", arrived(*.size, .missing.len()), list(.missing))]
    Join {
        /// Who waited.
        who: Who,
        /// Ranks in the mesh.
        size: u32,
        /// How long it waited.
        seconds: f64,
        /// Who is missing, and what is known about it.
        missing: Vec<(u32, Arc<str>)>,
    },
    /// A peer turned this rank away while joining.
    #[error("{who}: rank {rank} at {address} refused the connection: {reason}")]
    Refused {
        /// Who dialled.
        who: Who,
        /// Who refused.
        rank: u32,
        /// Its address.
        address: Arc<str>,
        /// Its reason.
        reason: Arc<str>,
    },
    /// The caller gave up while joining.
    #[error("{who}: joining was interrupted")]
    Interrupted {
        /// Who asked.
        who: Who,
    },
    /// The request makes no sense at this rank.
    #[error("{who}: {what}: {reason}")]
    Misplaced {
        /// Who asked.
        who: Who,
        /// The operation.
        what: Arc<str>,
        /// What is wrong, and what to do.
        reason: Arc<str>,
    },
    /// Too much is outstanding.
    #[error(
        "{who}: {outstanding} operations are outstanding, which is the limit: wait for some before issuing more"
    )]
    Congested {
        /// Who asked.
        who: Who,
        /// How many.
        outstanding: usize,
    },
    /// A peer's connection ended without a goodbye: its process has died, or the network between has.
    #[error("{who}: rank {rank} is lost: {reason}")]
    Lost {
        /// To whom it happened.
        who: Who,
        /// The peer.
        rank: u32,
        /// What was seen.
        reason: Arc<str>,
    },
    /// A peer has not been heard for too long while something was outstanding.
    #[error("{who}: rank {rank} has not been heard for {seconds:.1} s: is its machine still there?")]
    Silent {
        /// Who waited.
        who: Who,
        /// The peer.
        rank: u32,
        /// For how long.
        seconds: f64,
    },
    /// A peer that is needed has left in order.
    #[error("{who}: {what}: rank {rank} has left the mesh")]
    PeerLeft {
        /// Who asked.
        who: Who,
        /// The operation.
        what: Arc<str>,
        /// The peer.
        rank: u32,
    },
    /// A peer ended the mesh and said why.
    #[error("{who}: rank {by} ended the mesh: {reason}")]
    Aborted {
        /// Who was told.
        who: Who,
        /// Who told.
        by: u32,
        /// The rank that is to blame, if one is.
        culprit: Option<u32>,
        /// The reason.
        reason: Arc<str>,
    },
    /// Sender and receiver disagree on a length.
    #[error(
        "{who}: {what}: rank {sender} sends {sent_bytes} bytes and rank {receiver} expects {expected_bytes}: both must name the same length"
    )]
    LengthMismatch {
        /// Who noticed.
        who: Who,
        /// The operation, with its tag.
        what: Arc<str>,
        /// Who sends.
        sender: u32,
        /// Bytes it sends.
        sent_bytes: u64,
        /// Who receives.
        receiver: u32,
        /// Bytes it expects.
        expected_bytes: u64,
    },
    /// Two ranks call different collectives at the same place.
    #[error(
        "{who}: collective {number} is {here} at rank {} but {there} at rank {rank}: all ranks must call the same collectives in the same order",
        .who.rank
    )]
    OperationMismatch {
        /// Who noticed.
        who: Who,
        /// Position in the sequence of collectives, counted from 0.
        number: u64,
        /// What this rank calls.
        here: Arc<str>,
        /// The other rank.
        rank: u32,
        /// What it calls.
        there: Arc<str>,
    },
    /// A peer sent something that the protocol does not allow.
    #[error("{who}: rank {rank} broke the protocol: {reason}")]
    Protocol {
        /// Who noticed.
        who: Who,
        /// The peer.
        rank: u32,
        /// What it sent.
        reason: Arc<str>,
    },
    /// This rank has left the mesh.
    #[error("{who}: this rank has left the mesh")]
    Left {
        /// Who asked.
        who: Who,
    },
    /// This rank has ended the mesh itself, with [`Mesh::abort`](crate::Mesh::abort) or by dropping it.
    #[error("{who}: this rank has ended the mesh: {reason}")]
    GaveUp {
        /// Who asked.
        who: Who,
        /// The reason it gave.
        reason: Arc<str>,
    },
    /// [`Mesh::leave`](crate::Mesh::leave) did not finish in time.
    #[error("{who}: leaving took more than {seconds} s; {outstanding} operations were given up")]
    LeaveTimeout {
        /// Who asked.
        who: Who,
        /// How long it waited.
        seconds: f64,
        /// Operations without an end.
        outstanding: usize,
    },
    /// A callback of the program's own panicked, or an invariant of ours is broken.
    #[error("{who}: the mesh's thread has failed: {reason}")]
    Internal {
        /// Where.
        who: Who,
        /// The message.
        reason: Arc<str>,
    },
}

impl MeshError {
    /// The rank that is to blame, if one is known.
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

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> Arc<str> {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).into(),
        (_, Some(text)) => text.as_str().into(),
        _ => "a panic without a message".into(),
    }
}
