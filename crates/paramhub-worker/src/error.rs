//! What can go wrong, for people: who, what, and what to do.

use std::fmt;
use std::sync::Arc;

use paramhub_control::ControlError;
use paramhub_core::requests::Request;
use paramhub_core::settings::SettingsError;
use paramhub_core::wire::Refusal;
use thiserror::Error;

/// The worker an error happened to, as its messages begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who {
    /// The job's name; its namespace until ConnectService has told the name.
    pub job: Arc<str>,
    /// The worker's rank.
    pub rank: u32,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job `{}`, rank {}", self.job, self.rank)
    }
}

/// Why a worker cannot do what was asked. Once a job has failed, every outstanding and later request gets the same error.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The environment does not say which job to join.
    #[error(
        "{variable} {problem}: start the worker with `paramhub run -n N -- CMD`, which sets it, or set it to {expected}"
    )]
    Environment {
        /// The variable.
        variable: &'static str,
        /// What is wrong with it.
        problem: Arc<str>,
        /// What it should hold.
        expected: &'static str,
    },
    /// The connection manager refused a call or could not be reached.
    #[error("{who}: {call} failed: {cause}")]
    Manager {
        /// Who asked.
        who: Who,
        /// `ConnectService`, `InitService` or `LeaveService`.
        call: &'static str,
        /// What the manager or the network says.
        cause: Arc<ControlError>,
    },
    /// The settings contradict themselves.
    #[error("{who}: {cause}")]
    Settings {
        /// Who asked.
        who: Who,
        /// What is wrong with them.
        cause: Arc<SettingsError>,
    },
    /// The hubs placed the chunks otherwise than this worker, or their shape cannot be used.
    #[error("{who}: {reason}")]
    Placement {
        /// Who asked.
        who: Who,
        /// What differs, and what to do.
        reason: Arc<str>,
    },
    /// The interfaces that streams are to leave from are not there.
    #[error("{who}: its streams cannot leave from where they should: {reason}")]
    Interfaces {
        /// Who asked.
        who: Who,
        /// What was asked for and what there is.
        reason: Arc<str>,
    },
    /// A hub cannot be reached or does not behave like one of this job.
    #[error("{who}: no stream to the hub at {hub}: {reason}")]
    Dial {
        /// Who dialled.
        who: Who,
        /// The hub's address.
        hub: Arc<str>,
        /// What happened.
        reason: Arc<str>,
    },
    /// A hub turned this worker away.
    #[error("{who}: the hub at {hub} refused the stream: {message}")]
    Refused {
        /// Who dialled.
        who: Who,
        /// The hub's address.
        hub: Arc<str>,
        /// For programs.
        refusal: Refusal,
        /// The hub's reason.
        message: Arc<str>,
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
    /// There is no such key.
    #[error("{who}: key {key} does not exist: the table has {keys}, counted from 0")]
    NoSuchKey {
        /// Who asked.
        who: Who,
        /// Asked for.
        key: u32,
        /// Keys in the table.
        keys: usize,
    },
    /// A buffer does not fit its key.
    #[error(
        "{who}: key {key} takes {expected_bytes} bytes, but the {buffer} has {got_bytes}: pass as many elements of that type as the key has"
    )]
    Length {
        /// Who asked.
        who: Who,
        /// The key with its type and shape.
        key: Arc<str>,
        /// `gradient`, `parameters`, `gradient in place` or `state`.
        buffer: &'static str,
        /// Elements times bytes of the dtype, or of f32 for state.
        expected_bytes: u64,
        /// Bytes of the buffer.
        got_bytes: usize,
    },
    /// A key has one request at a time.
    #[error("{who}: a {request:?} of key {key} is still under way: wait for it first")]
    Unfinished {
        /// Who asked.
        who: Who,
        /// The key with its type and shape.
        key: Arc<str>,
        /// What is under way.
        request: Request,
    },
    /// The request has no place in this job or at this rank.
    #[error("{who}: {reason}")]
    Misplaced {
        /// Who asked.
        who: Who,
        /// Why, and what to do instead.
        reason: Arc<str>,
    },
    /// The I/O thread did not take a hyperparameter change in time.
    #[error("{who}: too many hyperparameter changes wait to be sent, and the hubs took none for {seconds} s")]
    Congested {
        /// Who asked.
        who: Who,
        /// How long it waited.
        seconds: f64,
    },
    /// The hub ended the job and said why.
    #[error("{who}: the hub at {hub} ended the job{}: {message}", FaultOf(*.culprit))]
    Failed {
        /// Who was told.
        who: Who,
        /// The hub's address.
        hub: Arc<str>,
        /// The rank at fault, if one is.
        culprit: Option<u32>,
        /// The hub's reason.
        message: Arc<str>,
    },
    /// A hub went away.
    #[error("{who}: lost the hub at {hub}{}: {reason}. Is it still running? Its log says more", InProcessOf(*.rank))]
    Lost {
        /// Who lost it.
        who: Who,
        /// The hub's address.
        hub: Arc<str>,
        /// The rank in whose process the hub runs, where [`Options::hub_rank`](crate::Options::hub_rank) says it.
        rank: Option<u32>,
        /// How.
        reason: Arc<str>,
    },
    /// Nothing came from a hub for too long.
    #[error(
        "{who}: the hub at {hub}{} has been silent for {seconds:.0} s: it hangs, or the network between is cut (the job's dead_after_s bounds this)",
        InProcessOf(*.rank)
    )]
    Silent {
        /// Who waited.
        who: Who,
        /// The hub's address.
        hub: Arc<str>,
        /// The rank in whose process the hub runs, where [`Options::hub_rank`](crate::Options::hub_rank) says it.
        rank: Option<u32>,
        /// How long.
        seconds: f64,
    },
    /// An interface of this host that streams go through does not work.
    #[error("{who}: this worker's {what}. Streams to a hub went through it")]
    InterfaceDown {
        /// Who watched.
        who: Who,
        /// The interface, its address, and what happened to it.
        what: Arc<str>,
    },
    /// This worker has ended the job for all, through a [`Resignation`](crate::Resignation).
    #[error("{who}: gave up: {reason}")]
    GaveUp {
        /// Who did.
        who: Who,
        /// Why.
        reason: Arc<str>,
    },
    /// A hub broke the protocol.
    #[error(
        "{who}: the hub at {hub} broke the protocol: {reason}. Do both ends run the same release of paramhub?"
    )]
    Protocol {
        /// Who noticed.
        who: Who,
        /// The hub's address.
        hub: Arc<str>,
        /// What it did.
        reason: Arc<str>,
    },
    /// A callback panicked on the I/O thread, which ended the job.
    #[error("{who}: a callback panicked on the I/O thread, which ends the job: {message}")]
    Callback {
        /// Whose callback.
        who: Who,
        /// The panic's message.
        message: Arc<str>,
    },
    /// The job was left with requests under way.
    #[error("{who}: left the job while requests were under way for {keys}")]
    LeftEarly {
        /// Who left.
        who: Who,
        /// The first of the keys.
        keys: Arc<str>,
    },
    /// The job was left before.
    #[error("{who}: the job was left")]
    Left {
        /// Who left.
        who: Who,
    },
    /// The client itself is at fault.
    #[error("{who}: the I/O thread failed, please report this: {message}")]
    Internal {
        /// Whose thread.
        who: Who,
        /// The panic's message.
        message: Arc<str>,
    },
}

impl WorkerError {
    /// The rank at fault, if a hub has named one, or if the hub itself is lost and runs in a rank's process.
    pub fn culprit(&self) -> Option<u32> {
        match self {
            WorkerError::Failed { culprit, .. } => *culprit,
            WorkerError::Lost { rank, .. } | WorkerError::Silent { rank, .. } => *rank,
            _ => None,
        }
    }

    /// Notes in whose process the job's hubs run, where the error is of a hub that was lost.
    pub(crate) fn with_hub_rank(mut self, hub_rank: Option<u32>) -> Self {
        if let WorkerError::Lost { rank, .. } | WorkerError::Silent { rank, .. } = &mut self {
            *rank = hub_rank;
        }
        self
    }
}

/// Follows a hub's address with the rank whose process it is in.
struct InProcessOf(Option<u32>);

impl fmt::Display for InProcessOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |rank| write!(f, " (in the process of rank {rank})"))
    }
}

/// Ends "the hub ended the job" with the rank at fault.
struct FaultOf(Option<u32>);

impl fmt::Display for FaultOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |rank| write!(f, " because of rank {rank}"))
    }
}

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> Arc<str> {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("it did not say why").into()
}
