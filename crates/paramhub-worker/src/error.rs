//! Errors, as messages for people: which worker, what went wrong, and what to do.

use std::fmt;
use std::sync::Arc;

use paramhub_control::ControlError;
use paramhub_core::requests::Request;
use paramhub_core::settings::SettingsError;
use paramhub_core::wire::Refusal;
use thiserror::Error;

/// The worker to which an error happened; error messages begin with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerId {
    /// The job's name; its namespace until ConnectService has answered with the name.
    pub job: Arc<str>,
    /// The worker's rank.
    pub rank: u32,
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job `{}`, rank {}", self.job, self.rank)
    }
}

/// Why a worker cannot do what was asked. Once a job has failed, every outstanding and every later request
/// gets the same error.
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
        /// The worker that asked.
        who: WorkerId,
        /// `ConnectService`, `InitService` or `LeaveService`.
        call: &'static str,
        /// What the manager or the network says.
        cause: Arc<ControlError>,
    },
    /// The settings contradict themselves.
    #[error("{who}: {cause}")]
    Settings {
        /// The worker that asked.
        who: WorkerId,
        /// What is wrong with them.
        cause: Arc<SettingsError>,
    },
    /// The hubs' placement of the chunks differs from this worker's, or a hub's shape cannot be used.
    #[error("{who}: {reason}")]
    Placement {
        /// The worker that asked.
        who: WorkerId,
        /// What differs, and what to do.
        reason: Arc<str>,
    },
    /// The interfaces that streams are to leave by do not exist.
    #[error("{who}: its streams cannot leave from where they should: {reason}")]
    Interfaces {
        /// The worker that asked.
        who: WorkerId,
        /// The interfaces that were asked for, and those that exist.
        reason: Arc<str>,
    },
    /// A hub cannot be reached or does not behave like one of this job.
    #[error("{who}: no stream to the hub at {hub}: {reason}")]
    Dial {
        /// The worker that dialled.
        who: WorkerId,
        /// The hub's address.
        hub: Arc<str>,
        /// What happened to the connection.
        reason: Arc<str>,
    },
    /// A hub refused this worker's stream.
    #[error("{who}: the hub at {hub} refused the stream: {message}")]
    Refused {
        /// The worker that dialled.
        who: WorkerId,
        /// The hub's address.
        hub: Arc<str>,
        /// The refusal, for programs.
        refusal: Refusal,
        /// The hub's reason.
        message: Arc<str>,
    },
    /// The operating system refuses a thread, a descriptor or the like.
    #[error("{who}: cannot {what}: {reason}")]
    System {
        /// The worker that asked.
        who: WorkerId,
        /// What the worker tried to do.
        what: &'static str,
        /// What the operating system says.
        reason: Arc<str>,
    },
    /// There is no such key.
    #[error("{who}: key {key} does not exist: the table has {keys}, counted from 0")]
    NoSuchKey {
        /// The worker that asked.
        who: WorkerId,
        /// The key that does not exist.
        key: u32,
        /// The number of keys in the table.
        keys: usize,
    },
    /// A buffer does not fit its key.
    #[error(
        "{who}: key {key} takes {expected_bytes} bytes, but the {buffer} has {got_bytes}: pass as many elements of that type as the key has"
    )]
    Length {
        /// The worker that asked.
        who: WorkerId,
        /// The key with its type and shape.
        key: Arc<str>,
        /// `gradient`, `parameters`, `gradient in place` or `state`.
        buffer: &'static str,
        /// Elements times bytes of the dtype, or of f32 for state.
        expected_bytes: u64,
        /// Bytes of the buffer.
        got_bytes: usize,
    },
    /// The key has a request under way, and a key has one at a time.
    #[error("{who}: a {request:?} of key {key} is still under way: wait for it first")]
    KeyBusy {
        /// The worker that asked.
        who: WorkerId,
        /// The key with its type and shape.
        key: Arc<str>,
        /// The request under way.
        request: Request,
    },
    /// The request is not allowed in this job or at this rank.
    #[error("{who}: {reason}")]
    Misused {
        /// The worker that asked.
        who: WorkerId,
        /// Why, and what to do instead.
        reason: Arc<str>,
    },
    /// The I/O thread did not take a hyperparameter change in time.
    #[error("{who}: too many hyperparameter changes wait to be sent, and the hubs took none for {seconds} s")]
    Congested {
        /// The worker that asked.
        who: WorkerId,
        /// Seconds waited.
        seconds: f64,
    },
    /// The hub ended the job and sent the reason.
    #[error("{who}: the hub at {hub} ended the job{}: {message}", FaultOf(*.culprit))]
    Failed {
        /// The worker that received the reason.
        who: WorkerId,
        /// The hub's address.
        hub: Arc<str>,
        /// The rank at fault, if one is.
        culprit: Option<u32>,
        /// The hub's reason.
        message: Arc<str>,
    },
    /// A worker of the job is lost, or a hub of a job that has checkpoints, and all workers go back to an earlier step. This
    /// worker joins anew, as another process in its place would, and gets the step at which all go on.
    #[error("{who}: {message}")]
    Rewound {
        /// The worker that goes back.
        who: WorkerId,
        /// The rank that is lost, if one is.
        culprit: Option<u32>,
        /// The hub's reason, or how the hub was lost.
        message: Arc<str>,
    },
    /// The connection to a hub is lost.
    #[error("{who}: lost the hub at {hub}{}: {reason}. Is it still running? Its log says more", InProcessOf(*.rank))]
    Lost {
        /// The worker that lost it.
        who: WorkerId,
        /// The hub's address.
        hub: Arc<str>,
        /// The rank in whose process the hub runs, where [`Options::hub_rank`](crate::Options::hub_rank) says
        /// it.
        rank: Option<u32>,
        /// What happened to the connection.
        reason: Arc<str>,
    },
    /// A hub has sent nothing for too long.
    #[error(
        "{who}: the hub at {hub}{} has been silent for {seconds:.0} s: it hangs, or the network between is cut (the job's dead_after_s bounds this)",
        InProcessOf(*.rank)
    )]
    Silent {
        /// The worker that waited.
        who: WorkerId,
        /// The hub's address.
        hub: Arc<str>,
        /// The rank in whose process the hub runs, where [`Options::hub_rank`](crate::Options::hub_rank) says
        /// it.
        rank: Option<u32>,
        /// Seconds of silence.
        seconds: f64,
    },
    /// An interface of this host that streams go through does not work.
    #[error("{who}: this worker's {what}. Streams to a hub went through it")]
    InterfaceDown {
        /// The worker that watched.
        who: WorkerId,
        /// The interface, its address, and what happened to it.
        what: Arc<str>,
    },
    /// This worker has ended the job for all ranks, through an [`AbortHandle`](crate::AbortHandle).
    #[error("{who}: gave up: {reason}")]
    GaveUp {
        /// The worker that gave up.
        who: WorkerId,
        /// The reason that the program gave.
        reason: Arc<str>,
    },
    /// A hub broke the protocol.
    #[error(
        "{who}: the hub at {hub} broke the protocol: {reason}. Do both ends run the same release of paramhub?"
    )]
    Protocol {
        /// The worker that noticed.
        who: WorkerId,
        /// The hub's address.
        hub: Arc<str>,
        /// What the hub did.
        reason: Arc<str>,
    },
    /// A callback panicked on the I/O thread, which ended the job.
    #[error("{who}: a callback panicked on the I/O thread, which ends the job: {message}")]
    Callback {
        /// The worker whose callback it was.
        who: WorkerId,
        /// The panic's message.
        message: Arc<str>,
    },
    /// The job was left with requests under way.
    #[error("{who}: left the job while requests were under way for {keys}")]
    LeftEarly {
        /// The worker that left.
        who: WorkerId,
        /// The first of the keys.
        keys: Arc<str>,
    },
    /// The job was left before.
    #[error("{who}: the job was left")]
    Left {
        /// The worker that left.
        who: WorkerId,
    },
    /// The client itself is at fault.
    #[error("{who}: the I/O thread failed, please report this: {message}")]
    Internal {
        /// The worker whose thread it was.
        who: WorkerId,
        /// The panic's message.
        message: Arc<str>,
    },
}

impl WorkerError {
    /// The rank at fault, if a hub has named one, or if the hub itself is lost and runs in a rank's process.
    pub fn culprit(&self) -> Option<u32> {
        match self {
            WorkerError::Failed { culprit, .. } | WorkerError::Rewound { culprit, .. } => *culprit,
            WorkerError::Lost { rank, .. } | WorkerError::Silent { rank, .. } => *rank,
            _ => None,
        }
    }

    /// The hub that the worker has lost or cannot reach, and what it has seen of that; `None` for any other error, and
    /// where the hub itself has said why the job ends.
    pub(crate) fn lost_hub(&self) -> Option<(&Arc<str>, String)> {
        match self {
            WorkerError::Lost { hub, reason, .. } | WorkerError::Dial { hub, reason, .. } => {
                Some((hub, reason.to_string()))
            }
            WorkerError::Silent { hub, seconds, .. } => {
                Some((hub, format!("it has been silent for {seconds:.0} s")))
            }
            _ => None,
        }
    }

    /// The error of a worker in a job whose ranks go back to a checkpoint when a hub is lost: one that has lost a hub joins
    /// anew, and the manager then knows how the job goes on. A hub that has been started again does not know the job yet.
    pub(crate) fn or_rewound(self) -> Self {
        let (who, what) = match self {
            WorkerError::Lost { who, hub, reason, .. } => (who, format!("lost the hub at {hub}: {reason}")),
            WorkerError::Silent { who, hub, seconds, .. } => {
                (who, format!("the hub at {hub} has been silent for {seconds:.0} s"))
            }
            WorkerError::Refused { who, hub, refusal: Refusal::WrongNonce, .. } => {
                (who, format!("the hub at {hub} does not know the job any more"))
            }
            WorkerError::Refused { who, hub, refusal: Refusal::JobEnded, .. } => {
                (who, format!("the job is over at the hub at {hub}"))
            }
            error => return error,
        };
        let message =
            format!("{what}; all ranks go back to the newest checkpoint, if hubs come for the job").into();
        WorkerError::Rewound { who, culprit: None, message }
    }

    /// Adds the rank in whose process the job's hubs run to an error about a lost hub.
    pub(crate) fn with_hub_rank(mut self, hub_rank: Option<u32>) -> Self {
        if let WorkerError::Lost { rank, .. } | WorkerError::Silent { rank, .. } = &mut self {
            *rank = hub_rank;
        }
        self
    }
}

/// The rank in whose process a hub runs, printed behind the hub's address.
struct InProcessOf(Option<u32>);

impl fmt::Display for InProcessOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |rank| write!(f, " (in the process of rank {rank})"))
    }
}

/// The rank at fault, printed behind "the hub ended the job".
struct FaultOf(Option<u32>);

impl fmt::Display for FaultOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |rank| write!(f, " because of rank {rank}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hub_is_lost_where_it_has_not_said_why_the_job_ends() {
        let (who, hub) = (WorkerId { job: "digits".into(), rank: 1 }, Arc::<str>::from("10.0.0.7:7771"));
        let lost = |error: WorkerError| error.lost_hub().map(|(hub, reason)| format!("{hub}: {reason}"));
        let (who, hub) = (|| who.clone(), || Arc::clone(&hub));
        let closed = || Arc::<str>::from("it closed the connection");
        let cases = [
            (
                WorkerError::Lost { who: who(), hub: hub(), rank: None, reason: closed() },
                Some("10.0.0.7:7771: it closed the connection"),
            ),
            (
                WorkerError::Silent { who: who(), hub: hub(), rank: Some(0), seconds: 30.2 },
                Some("10.0.0.7:7771: it has been silent for 30 s"),
            ),
            (
                WorkerError::Dial { who: who(), hub: hub(), reason: "connection refused".into() },
                Some("10.0.0.7:7771: connection refused"),
            ),
            (WorkerError::Failed { who: who(), hub: hub(), culprit: None, message: closed() }, None),
            (WorkerError::Protocol { who: who(), hub: hub(), reason: closed() }, None),
            (WorkerError::InterfaceDown { who: who(), what: "interface eth1 is down".into() }, None),
            (WorkerError::Left { who: who() }, None),
        ];
        for (error, expected) in cases {
            assert_eq!(lost(error.clone()).as_deref(), expected, "{error}");
        }
    }
}
