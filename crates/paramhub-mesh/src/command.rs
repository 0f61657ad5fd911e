//! Commands from user threads, and from the thread that dials again, to the mesh's thread.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use paramhub_transport::runtime::Inbox;

use crate::error::MeshError;
use crate::handle::OperationCompletion;
use crate::operation::OperationRequest;
use crate::socket::PeerSocket;

/// The maximum of outstanding operations.
pub(crate) const OUTSTANDING_MAX: usize = 1 << 16;

/// One command for the mesh's thread.
pub(crate) enum MeshCommand {
    Run(Box<OperationRequest>),
    /// Asks which ranks the operation of this completion waits for.
    QueryAwaitedRanks {
        completion: Arc<OperationCompletion>,
        answer: SyncSender<Vec<u32>>,
    },
    Leave {
        timeout: Duration,
    },
    /// Sends heartbeats, since the other end of a connection may have lost it.
    Beat,
    /// A connection that was cut is replaced by this one.
    Reconnected {
        rank: u32,
        attempt: u32,
        socket: PeerSocket,
    },
    /// The connection of this number was cut and cannot be replaced, for this reason.
    NotReconnected {
        rank: u32,
        attempt: u32,
        reason: String,
    },
    /// The program ends the mesh, for this reason.
    Abort {
        reason: Arc<str>,
    },
}

/// The queue of commands. It counts operations until they end.
pub(crate) type MeshInbox = Inbox<MeshCommand, MeshError>;
