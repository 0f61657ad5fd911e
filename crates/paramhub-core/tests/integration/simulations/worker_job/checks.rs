//! What must hold of a worker's job, whatever happens, and how it must end.

use std::time::{Duration, Instant};

use paramhub_core::liveness::FINAL_MESSAGE_TIMEOUT;
use paramhub_core::worker_job::{Announcement, FailureCause, leave_timeout};

use super::stream::{Frame, State};
use super::{Error, Simulation};

/// How the job must end, as the events so far decide it.
#[derive(Clone, Debug)]
pub(super) enum Expected {
    /// Nothing has decided it.
    Nothing,
    /// For the loss of a stream, unless a hub sends a reason by then.
    Lost { cause: FailureCause<Error>, until: Instant },
    /// With this outcome, when all streams are closed, or then. The worker announces this, or leaves.
    End { outcome: Result<(), Error>, announcement: Option<Announcement>, until: Instant },
}

impl Simulation {
    /// Whether nothing has decided how the job ends.
    pub(super) fn is_serving(&self) -> bool {
        matches!(self.expected, Expected::Nothing)
    }

    /// Whether a stream that breaks is to be opened again.
    pub(super) fn may_reopen(&self) -> bool {
        let has_something_to_say =
            matches!(self.expected, Expected::Nothing | Expected::End { outcome: Ok(()), .. });
        self.resuming.resumes() && has_something_to_say
    }

    /// A stream was lost that is not opened again.
    pub(super) fn expect_loss(&mut self, cause: &FailureCause<Error>) {
        if self.is_serving() {
            let until = self.now + FINAL_MESSAGE_TIMEOUT;
            self.expected = Expected::Lost { cause: cause.clone(), until };
        }
    }

    /// The worker cannot go on, and says so.
    pub(super) fn expect_announced(&mut self, cause: &FailureCause<Error>) {
        if self.is_serving() {
            self.expect_announcement(cause.clone());
        }
    }

    /// A hub sent the reason why the job is over.
    pub(super) fn expect_reason(&mut self, cause: &FailureCause<Error>) {
        if matches!(self.expected, Expected::Nothing | Expected::Lost { .. }) {
            self.expect_announcement(cause.clone());
        }
    }

    /// What follows from answers, streams that are closed, and the time.
    pub(super) fn expect_passing_time(&mut self) {
        match self.expected.clone() {
            Expected::Nothing => {
                let Some(leaves_by) = self.leaves_by else { return };
                let timeout = leave_timeout(&self.resuming);
                if self.requests == 0 {
                    self.expect_end(Ok(()), None, timeout);
                } else if self.now >= leaves_by {
                    self.expect_end(Err(Error::LeftEarly), None, timeout);
                }
            }
            Expected::Lost { cause, until } if self.now >= until || self.are_streams_closed() => {
                self.expect_announcement(cause);
            }
            Expected::Lost { .. } | Expected::End { .. } => {}
        }
    }

    fn expect_announcement(&mut self, cause: FailureCause<Error>) {
        let FailureCause { error, announced, lost_hub } = cause;
        self.expect_end(Err(error), Some(Announcement { announced, lost_hub }), FINAL_MESSAGE_TIMEOUT);
    }

    fn expect_end(
        &mut self,
        outcome: Result<(), Error>,
        announcement: Option<Announcement>,
        timeout: Duration,
    ) {
        self.expected = Expected::End { outcome, announcement, until: self.now + timeout };
    }

    /// The worker announces the first cause, and nothing if it leaves.
    pub(super) fn check_last_message(&self, announced: Option<&Announcement>) {
        let Expected::End { announcement, .. } = &self.expected else {
            panic!("{announced:?} is announced, but expected is {:?}", self.expected)
        };
        assert_eq!(announced, announcement.as_ref());
    }

    /// The job is over: once, in time, with its first cause, and after every hub that can be reached has the last
    /// message.
    pub(super) fn over(&mut self, outcome: Result<(), Error>) {
        match &self.expected {
            Expected::End { outcome: expected, announcement, until } => {
                let last = if announcement.is_some() { Frame::Reason } else { Frame::Leave };
                assert_eq!(outcome, *expected);
                assert!(self.are_streams_closed() || self.now == *until, "it is over at the wrong time");
                for stream in self.streams.iter().filter(|stream| !stream.is_lost) {
                    let is_away = matches!(stream.state, State::Resuming | State::Closed);
                    assert!(is_away || stream.last_message() == Some(last), "{stream:?} has no {last:?}");
                }
            }
            Expected::Nothing | Expected::Lost { .. } => panic!("{outcome:?} has no cause"),
        }
        assert!(self.outcome.replace(outcome).is_none(), "it is over twice");
    }

    /// What must hold after each turn.
    pub(super) fn check(&self) {
        let is_over = match &self.expected {
            Expected::Nothing => false,
            Expected::Lost { until, .. } => {
                assert!(self.now < *until && !self.are_streams_closed(), "it still waits for a reason");
                false
            }
            Expected::End { until, .. } => self.now >= *until || self.are_streams_closed(),
        };
        assert_eq!(self.outcome.is_some(), is_over, "expected is {:?}", self.expected);
        let has_received = |frame| self.streams.iter().any(|stream| stream.last == Some(frame));
        assert!(!has_received(Frame::Leave) || !has_received(Frame::Reason), "it leaves or gives up");
    }

    /// Nothing happens to a job that is over.
    pub(super) fn check_silence(&mut self) {
        assert_eq!(self.job.deadline(), None);
        let cause = self.cause(Error::GaveUp, None);
        self.job.stream_lost(cause.clone(), self.now);
        assert_eq!(self.job.failed(cause.clone(), self.now), None);
        assert_eq!(self.job.give_up(cause, self.now), None);
        assert_eq!(self.job.check_time(self.now, &self.situation()), None);
    }
}
