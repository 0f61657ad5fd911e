//! How the job ends at this worker: what happens to its streams is reported to the state machine
//! [`WorkerJob`](paramhub_core::worker_job::WorkerJob), and what that decides is carried out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::wire::{Failure, Notice};
use paramhub_core::worker_job::{Announcement, FailureCause, Output, Progress};

use super::IoLoop;
use crate::command::JobCommand;
use crate::error::WorkerError;
use crate::inbound::FrameFault;
use crate::lane::{ControlFrame, Lane};
use crate::requests_in_flight::RequestsInFlight;

/// The requests and streams of the job, as its state machine asks for them.
struct JobProgress<'a> {
    in_flight: &'a RequestsInFlight,
    lanes: &'a [Lane],
}

impl Progress<WorkerError> for JobProgress<'_> {
    fn has_requests(&self) -> bool {
        self.in_flight.underway() > 0 || self.in_flight.program_states.underway().next().is_some()
    }

    fn are_streams_closed(&self) -> bool {
        self.lanes.iter().all(Lane::is_closed)
    }

    fn left_early(&self) -> WorkerError {
        self.in_flight.left_early()
    }
}

impl IoLoop {
    /// Moves on to the next phase if it is due; `Some` when the job is over.
    pub(super) fn progress(&mut self, now: Instant) -> Option<Result<(), WorkerError>> {
        loop {
            let progress = JobProgress { in_flight: &self.in_flight, lanes: &self.lanes };
            match self.job.check_time(now, &progress)? {
                Output::SendLeave => self.send_leave(now),
                Output::Announce(announcement) => self.announce(announcement, now),
                Output::Over(outcome) => return Some(outcome),
            }
        }
    }

    /// Looks among the commands of a job that leaves for the one that gives it up.
    pub(super) fn look_for_give_up(&mut self, now: Instant) {
        self.in_flight.shared.inbox.take(&mut self.commands);
        let is_give_up = |command: &JobCommand| matches!(command, JobCommand::GiveUp { .. });
        let found = self.commands.iter().position(is_give_up);
        if let Some(JobCommand::GiveUp { error, announced }) = found.and_then(|at| self.commands.remove(at)) {
            self.give_up(FailureCause { error, announced, lost_hub: None }, now);
        }
    }

    /// Reports that this worker cannot go on.
    pub(super) fn give_up(&mut self, cause: FailureCause<WorkerError>, now: Instant) {
        if let Some(announcement) = self.job.give_up(cause, now) {
            self.announce(announcement, now);
        }
    }

    /// Reports that a lane's stream broke and is not opened again.
    pub(super) fn lose_stream(&mut self, index: usize, reason: &str, now: Instant) {
        let (who, hub) = (self.in_flight.shared.who.clone(), Arc::clone(&self.lanes[index].hub));
        let message = format!("it lost the hub at {hub}: {reason}");
        let error = WorkerError::Lost { who, hub: Arc::clone(&hub), rank: None, reason: reason.into() };
        self.job.stream_lost(self.cause(error, message, Some(hub)), now);
    }

    /// Reports that the hub of a lane has been silent for too long.
    pub(super) fn lose_silent_hub(&mut self, index: usize, silence: Duration, now: Instant) {
        let (who, hub) = (self.in_flight.shared.who.clone(), Arc::clone(&self.lanes[index].hub));
        let seconds = silence.as_secs_f64();
        let message = format!("it has not heard the hub at {hub} for {seconds:.0} s");
        let error = WorkerError::Silent { who, hub: Arc::clone(&hub), rank: None, seconds };
        self.give_up(self.cause(error, message, Some(hub)), now);
    }

    /// Reports a hub's failure message, or a frame that breaks a rule. What a callback of the program has
    /// caused ends the job in any phase.
    pub(super) fn end_by_fault(
        &mut self,
        index: usize,
        fault: FrameFault,
        now: Instant,
    ) -> Result<(), WorkerError> {
        let (who, hub) = (self.in_flight.shared.who.clone(), Arc::clone(&self.lanes[index].hub));
        let cause = match fault {
            FrameFault::Callback(message) => return Err(WorkerError::Callback { who, message }),
            FrameFault::Failure(Failure { rank, message }) => self.ended_by_hub(hub, rank, message.into()),
            FrameFault::Rewound(Notice { rank, message }) => self.rewound_by_hub(hub, rank, message.into()),
            FrameFault::Protocol(reason) => {
                let message = format!("the hub at {hub} broke the protocol: {reason}");
                let lost_hub = Some(Arc::clone(&hub));
                let error = WorkerError::Protocol { who, hub, reason: reason.into() };
                self.cause(error, message, lost_hub)
            }
        };
        match self.job.failed(cause, now) {
            Some(announcement) => self.announce(announcement, now),
            None => self.end_lane(index, "the job was left", now)?,
        }
        Ok(())
    }

    /// The cause of a failure that a hub has reported.
    pub(super) fn ended_by_hub(
        &self,
        hub: Arc<str>,
        culprit: Option<u32>,
        message: Arc<str>,
    ) -> FailureCause<WorkerError> {
        let who = self.in_flight.shared.who.clone();
        let announced = format!("the hub at {hub} ended the job: {message}");
        let error = WorkerError::Failed { who, hub: Arc::clone(&hub), culprit, message };
        self.cause(error, announced, Some(hub))
    }

    /// The cause of the end of a job that goes back to an earlier step, as a hub has said.
    pub(super) fn rewound_by_hub(
        &self,
        hub: Arc<str>,
        culprit: Option<u32>,
        message: Arc<str>,
    ) -> FailureCause<WorkerError> {
        let who = self.in_flight.shared.who.clone();
        let announced = message.to_string();
        self.cause(WorkerError::Rewound { who, culprit, message }, announced, Some(hub))
    }

    /// The cause of a failure that this worker announces under its rank.
    pub(super) fn cause(
        &self,
        error: WorkerError,
        message: String,
        lost_hub: Option<Arc<str>>,
    ) -> FailureCause<WorkerError> {
        let announced = Failure { rank: Some(self.in_flight.shared.who.rank), message };
        FailureCause { error, announced, lost_hub }
    }

    /// Closes the streams of the hub that is lost, and sends the reason why this worker cannot go on to the
    /// hubs that can still be reached.
    pub(super) fn announce(&mut self, announcement: Announcement, now: Instant) {
        let Announcement { announced, lost_hub } = announcement;
        if let Some(lost_hub) = lost_hub {
            for lane in self.lanes.iter_mut().filter(|lane| lane.hub == lost_hub && !lane.is_closed()) {
                lane.close();
                // This fails only if the descriptor is not in the set, and then there is nothing to remove.
                let _ = self.poller.remove(&lane.stream);
            }
        }
        let wire: Arc<[u8]> = announced.encode().into();
        for index in 0..self.lanes.len() {
            if self.lanes[index].is_closed() {
                continue;
            }
            self.lanes[index].forget_chunks();
            self.lanes[index].queue_control(ControlFrame::GiveUp(Arc::clone(&wire)));
            // The other streams carry the reason as well.
            let _ = self.send(index, now);
        }
    }

    /// Queues a Leave message on every stream, behind the frame that has begun there.
    fn send_leave(&mut self, now: Instant) {
        for index in 0..self.lanes.len() {
            self.lanes[index].forget_chunks();
            self.lanes[index].queue_control(ControlFrame::Leave);
            // A stream that breaks now needs no Leave message.
            let _ = self.send(index, now);
        }
    }
}

impl RequestsInFlight {
    fn left_early(&self) -> WorkerError {
        let keys = self.shared.settings.keys.keys();
        let mut names: Vec<String> =
            self.requests.underway().take(4).map(|key| format!("`{}`", keys[key as usize].name)).collect();
        if self.underway() > names.len() {
            names.push(format!("{} more", self.underway() - names.len()));
        }
        let states = self.program_states.underway();
        names.extend(states.map(|step| format!("the program state of step {step}")));
        WorkerError::LeftEarly { who: self.shared.who.clone(), keys: names.join(", ").into() }
    }
}
