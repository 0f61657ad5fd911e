//! Streams that are opened again: in which phase of the job, and what becomes of each and of the job.
//! [`resuming`](crate::resuming) has the paths and how long they are tried.

use std::time::{Duration, Instant};

use super::{Announcement, FailureCause, Phase, WorkerJob};
use crate::resuming::{SILENT, StreamEnd};

/// How the attempts to open a stream again have ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reopening<Stream, Error> {
    /// There is a new stream.
    Opened(Stream),
    /// No path led there, or the hub said that the job has ended.
    Failed(FailureCause<Error>),
}

/// What becomes of a stream that was to be opened again, and of its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Consequence<Stream> {
    /// Nothing.
    Ignore,
    /// The stream counts as closed.
    Close,
    /// The new stream takes its place.
    Replace {
        /// The new stream.
        stream: Stream,
        /// Whether the Leave message is sent again, on the new stream.
        leaves: bool,
    },
    /// The worker gives the job up, and says so on its other streams.
    Announce(Announcement),
}

impl<Error> WorkerJob<Error> {
    /// How long this worker tries to open a stream again that has ended like this; `None` if the stream is lost.
    pub fn tries(&self, end: StreamEnd) -> Option<Duration> {
        self.resuming.worker_tries(end).filter(|_| self.may_resume())
    }

    /// Whether streams may be opened again now.
    pub fn may_resume(&self) -> bool {
        self.resuming.resumes()
            && match self.phase {
                Phase::Running | Phase::Leaving { .. } => true,
                // The Leave message must still arrive. A worker that has failed has nothing more to say.
                Phase::Closing { ref outcome, .. } => outcome.is_ok(),
                // The others may still bring the reason.
                Phase::StreamLost { .. } | Phase::Over => false,
            }
    }

    /// Whether another hub can take over what a hub serves.
    pub fn has_standbys(&self) -> bool {
        self.resuming.has_standbys
    }

    /// Whether a stream that has been silent for this long is to be opened again.
    pub fn resumes_after(&self, silence: Duration) -> bool {
        silence > SILENT && self.resuming.moves && self.may_resume()
    }

    /// The attempts to open a stream again have ended. `is_closed` says whether the stream was closed meanwhile.
    pub fn reopened<Stream>(
        &mut self,
        reopening: Reopening<Stream, Error>,
        is_closed: bool,
        now: Instant,
    ) -> Consequence<Stream> {
        let is_closing = self.is_closing();
        if is_closed || !self.may_resume() {
            return if is_closing { Consequence::Close } else { Consequence::Ignore };
        }
        match reopening {
            Reopening::Opened(stream) => Consequence::Replace { stream, leaves: is_closing },
            // All requests have been answered; this worker no longer reacts to a failure of the job.
            Reopening::Failed(_) if is_closing => Consequence::Close,
            Reopening::Failed(cause) => Consequence::Announce(self.announce(cause, now)),
        }
    }
}
