//! Commands from user threads to the I/O thread.

use std::time::{Duration, Instant};

use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::program_states::StateInPieces;
use paramhub_core::requests::Request;
use paramhub_core::wire::Failure;
use paramhub_transport::runtime::Inbox;

use crate::error::WorkerError;
use crate::handle::{RequestBuffers, Ticket};
use crate::steps::KeyClaim;

/// The maximum of hyperparameter changes that wait: as many as a hub remembers.
pub(crate) const RETUNES_MAX: usize = 64;
/// How long a caller waits while the inbox has no room for its hyperparameter change.
pub(crate) const RETUNE_TIMEOUT: Duration = Duration::from_secs(10);

/// One command for the I/O thread.
pub(crate) enum JobCommand {
    /// Requests of one key or several, which end together.
    Requests {
        requests: Vec<KeyRequest>,
        ticket: Ticket,
    },
    /// The request of a layer's factors; `block` is the number of the layer's block.
    Factors {
        block: usize,
        samples: u32,
        step: u32,
        weight: Box<(RequestBuffers, Ticket)>,
        /// `None` where the layer has no bias.
        bias: Option<Box<(RequestBuffers, Ticket)>>,
    },
    Retune(HyperparameterChange),
    AwaitNorm {
        step: u32,
        ticket: Ticket,
    },
    /// Without a factor the step ends without an update.
    Release {
        step: u32,
        factor: Option<f32>,
    },
    SaveProgramState {
        state: StateInPieces,
        ticket: Ticket,
    },
    PullProgramState {
        step: u32,
        ticket: Ticket,
    },
    Leave {
        deadline: Instant,
    },
    /// This worker cannot go on; the I/O thread sends `announced` to the other ranks.
    GiveUp {
        error: WorkerError,
        announced: Failure,
    },
}

/// A request of one key, which was checked and has claimed the key.
pub(crate) struct KeyRequest {
    pub(crate) key: u32,
    pub(crate) request: Request,
    pub(crate) claim: KeyClaim,
    pub(crate) buffers: RequestBuffers,
}

/// A change of a group's hyperparameters.
#[derive(Clone, Copy)]
pub(crate) struct HyperparameterChange {
    pub(crate) group: u16,
    pub(crate) first_step: u32,
    pub(crate) hyperparameters: Hyperparameters,
}

/// The queue of commands. It counts hyperparameter changes until one has gone to every stream, and needs no
/// bound on requests, for a key has one at a time. [`NormHistory`](crate::norms::NormHistory) bounds the waits
/// for norms, a step is released once, and one program state is saved and one pulled at a time.
pub(crate) type JobInbox = Inbox<JobCommand, WorkerError>;
