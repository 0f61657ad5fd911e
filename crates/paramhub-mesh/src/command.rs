//! Commands from user threads to the mesh's thread.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use paramhub_transport::runtime::Inbox;

use crate::error::MeshError;
use crate::handle::OperationCompletion;
use crate::operation::OperationRequest;

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
    /// The program ends the mesh, for this reason.
    Abort {
        reason: Arc<str>,
    },
}

/// The queue of commands. It counts operations until they end.
pub(crate) type MeshInbox = Inbox<MeshCommand, MeshError>;
