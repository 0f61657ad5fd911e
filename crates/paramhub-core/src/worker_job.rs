//! The state machine of a job at one worker: when commands are taken, what a broken stream or a lost hub leads to,
//! how the worker leaves, and with which outcome the job ends.
//!
//! It has no clock, no threads and no sockets, and it knows neither requests nor streams. The caller reports
//! each event with its time, and carries out what the event leads to before it reports the next. After each
//! round of events it calls [`check_time`](WorkerJob::check_time) until that returns nothing. The worker's I/O
//! loop is that caller, and a simulator in one thread.
//!
//! A job is running until its program leaves or gives it up, a stream breaks, or a hub is silent for too long.
//! Leaving waits for the requests under way. A stream that just ended leaves the others some time to bring the
//! reason. In both cases the job is closing after that: the worker sends its last message on every stream, and
//! the hubs close their ends. The first cause counts, with one exception: the reason that a hub sends replaces
//! the loss of a stream.
//!
//! `Error` is what the program of the worker gets; this machine only keeps and returns it.

mod reopening;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::limits::RESUME_S;
use crate::liveness::FINAL_MESSAGE_TIMEOUT;
use crate::resuming::ResumeTerms;
use crate::wire::Failure;
pub use reopening::{Consequence, Reopening};

/// The time that leaving may take: a hub closes its end once it has read the Leave message.
pub const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);
/// The time that leaving may take in a job that may have to open a stream again by other paths to send the Leave
/// message.
pub const LEAVE_TIMEOUT_MOVING: Duration = Duration::from_secs(RESUME_S + 5);

/// The time that leaving may take in a job with these terms.
pub fn leave_timeout(resuming: &ResumeTerms) -> Duration {
    let least = if resuming.moves { LEAVE_TIMEOUT_MOVING } else { LEAVE_TIMEOUT };
    least.max(LEAVE_TIMEOUT + resuming.redial_grace)
}

/// A job at one worker.
#[derive(Debug)]
pub struct WorkerJob<Error> {
    phase: Phase<Error>,
    /// Which streams are opened again.
    resuming: ResumeTerms,
}

#[derive(Debug)]
enum Phase<Error> {
    Running,
    /// A stream ended; the others may still bring the reason, for a hub that fails a job closes its streams
    /// one by one.
    StreamLost {
        cause: FailureCause<Error>,
        deadline: Instant,
    },
    /// The worker leaves as soon as no request is under way.
    Leaving {
        deadline: Instant,
    },
    /// This worker sends its last messages, then the hubs close their ends.
    Closing {
        deadline: Instant,
        outcome: Result<(), Error>,
    },
    Over,
}

/// Why a worker cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailureCause<Error> {
    /// What this worker's program gets.
    pub error: Error,
    /// What this worker sends to the other ranks.
    pub announced: Failure,
    /// The address of the hub that is lost, if one is.
    pub lost_hub: Option<Arc<str>>,
}

/// What a worker that cannot go on does: it closes the streams of the hub that is lost, and sends the reason on
/// all others instead of the chunks that wait. The hubs pass the reason to the other ranks; otherwise they
/// would report that this worker is lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The reason.
    pub announced: Failure,
    /// The address of the hub that is lost, if one is.
    pub lost_hub: Option<Arc<str>>,
}

/// What the passing of time, an answer or the end of a stream leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output<Error> {
    /// Send a Leave message on every stream, instead of the chunks that wait.
    SendLeave,
    /// Send the reason why this worker cannot go on.
    Announce(Announcement),
    /// The job is over, with this outcome.
    Over(Result<(), Error>),
}

/// Which commands of the program are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandsTaken {
    /// All.
    All,
    /// Only the command that gives the job up: the requests under way may wait in vain.
    GiveUpOnly,
    /// None. Requests that come after a Leave message or a broken stream end with the job.
    None,
}

/// What the state of a job depends on besides its events.
pub trait Progress<Error> {
    /// Whether any request is under way.
    fn has_requests(&self) -> bool;
    /// Whether no frame will come on any stream, and none is being opened again.
    fn are_streams_closed(&self) -> bool;
    /// The error of a worker that leaves although requests are under way.
    fn left_early(&self) -> Error;
}

impl<Error> WorkerJob<Error> {
    /// A job that runs. `resuming` says which streams are opened again.
    pub fn new(resuming: ResumeTerms) -> WorkerJob<Error> {
        WorkerJob { phase: Phase::Running, resuming }
    }

    /// Which commands of the program are taken.
    pub fn commands_taken(&self) -> CommandsTaken {
        match self.phase {
            Phase::Running => CommandsTaken::All,
            Phase::Leaving { .. } => CommandsTaken::GiveUpOnly,
            Phase::StreamLost { .. } | Phase::Closing { .. } | Phase::Over => CommandsTaken::None,
        }
    }

    /// Whether frames are sent. None are while the reason for the loss of a stream may still come.
    pub fn is_sending(&self) -> bool {
        !matches!(self.phase, Phase::StreamLost { .. })
    }

    /// Whether a stream on which nothing more waits to be sent is shut down for sending.
    pub fn is_closing(&self) -> bool {
        matches!(self.phase, Phase::Closing { .. })
    }

    /// Whether heartbeats are sent, and a hub that is silent for too long is lost.
    pub fn watches_hubs(&self) -> bool {
        matches!(self.phase, Phase::Running | Phase::Leaving { .. })
    }

    /// When [`check_time`](Self::check_time) is to be called although nothing has happened; `None` if there is no
    /// such time.
    pub fn deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Running | Phase::Over => None,
            Phase::StreamLost { deadline, .. }
            | Phase::Leaving { deadline }
            | Phase::Closing { deadline, .. } => Some(deadline),
        }
    }

    /// The program leaves: the requests under way may take until the deadline.
    pub fn leave(&mut self, deadline: Instant) {
        if matches!(self.phase, Phase::Running) {
            self.phase = Phase::Leaving { deadline };
        }
    }

    /// A stream broke and is not opened again. The job fails unless it is closing, but only after the other
    /// streams had time to bring the reason.
    pub fn stream_lost(&mut self, cause: FailureCause<Error>, now: Instant) {
        if matches!(self.phase, Phase::Running | Phase::Leaving { .. }) {
            self.phase = Phase::StreamLost { cause, deadline: now + FINAL_MESSAGE_TIMEOUT };
        }
    }

    /// A hub sent the reason why the job failed, or a frame that breaks a rule. The other hubs may not know yet:
    /// one that saw this worker's streams end without a reason would name this worker as the cause. Returns
    /// `None` in a job that is closing or over, which reacts to no failure any more and only loses that stream.
    pub fn failed(&mut self, cause: FailureCause<Error>, now: Instant) -> Option<Announcement> {
        match self.phase {
            Phase::Running | Phase::Leaving { .. } | Phase::StreamLost { .. } => {
                Some(self.announce(cause, now))
            }
            Phase::Closing { .. } | Phase::Over => None,
        }
    }

    /// The program gives the job up, or a hub has been silent for too long. Returns `None` if the job is about
    /// to end already.
    pub fn give_up(&mut self, cause: FailureCause<Error>, now: Instant) -> Option<Announcement> {
        self.watches_hubs().then(|| self.announce(cause, now))
    }

    /// Looks for deadlines that have passed, and for requests and streams that have ended. Called until it
    /// returns nothing, or that the job is over.
    pub fn check_time(&mut self, now: Instant, progress: &impl Progress<Error>) -> Option<Output<Error>> {
        match &self.phase {
            Phase::Running | Phase::Over => return None,
            Phase::Leaving { .. } if !progress.has_requests() => return Some(self.send_leave(Ok(()), now)),
            Phase::Leaving { deadline } if now >= *deadline => {
                return Some(self.send_leave(Err(progress.left_early()), now));
            }
            Phase::Leaving { .. } => return None,
            Phase::StreamLost { deadline, .. } | Phase::Closing { deadline, .. } => {
                if now < *deadline && !progress.are_streams_closed() {
                    return None;
                }
            }
        }
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::StreamLost { cause, .. } => Some(Output::Announce(self.announce(cause, now))),
            Phase::Closing { outcome, .. } => Some(Output::Over(outcome)),
            Phase::Running | Phase::Leaving { .. } | Phase::Over => unreachable!("these were handled above"),
        }
    }

    fn send_leave(&mut self, outcome: Result<(), Error>, now: Instant) -> Output<Error> {
        let timeout = leave_timeout(&self.resuming);
        self.phase = Phase::Closing { deadline: now + timeout, outcome };
        Output::SendLeave
    }

    fn announce(&mut self, cause: FailureCause<Error>, now: Instant) -> Announcement {
        let FailureCause { error, announced, lost_hub } = cause;
        self.phase = Phase::Closing { deadline: now + FINAL_MESSAGE_TIMEOUT, outcome: Err(error) };
        Announcement { announced, lost_hub }
    }
}
