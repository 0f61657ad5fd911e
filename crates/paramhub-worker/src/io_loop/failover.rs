//! Streams that are opened again: a cut stream by its own path or, in a job whose streams may move, by another.

use std::convert::Infallible;
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use paramhub_core::liveness::PeerLiveness;
use paramhub_core::resuming::{BrokenPath, RESUME, ResumeNotices, Retunes, StreamEnd};
use paramhub_core::wire::Refusal;
use paramhub_core::worker_job::{Consequence, FailureCause, Reopening};
use paramhub_transport::runtime::panic_message;
use paramhub_transport::{Interest, StreamError};

use super::IoLoop;
use crate::error::WorkerError;
use crate::lane::{ControlFrame, Lane};
use crate::notices::HubNotice;
use crate::resume::{Redialler, ResumedStream, StreamEvent, StreamEventSender, StreamFailure};

/// How long after the end of their time the attempts to open a stream again are still waited for.
const OVERDUE: Duration = Duration::from_secs(10);

/// What the I/O thread needs in addition in a job whose streams are opened again.
pub(crate) struct Failover {
    pub(crate) redialler: Arc<Redialler>,
    pub(crate) events: Receiver<StreamEvent>,
    pub(crate) event_sender: StreamEventSender,
    pub(crate) retunes: Retunes,
    /// The last end of a held step, which rank 0 has sent on every stream; without a factor the step was skipped.
    pub(crate) release: Option<(u32, Option<Arc<[u8]>>)>,
    /// When to notify this worker's program.
    pub(crate) notices: ResumeNotices,
}

impl IoLoop {
    /// Whether a lane's stream may be opened again.
    pub(super) fn may_resume(&self, index: usize) -> bool {
        let lane = &self.lanes[index];
        self.job.may_resume() && !lane.stream.is_shm() && !lane.is_closed()
    }

    /// Opens a lane's stream again after an error that may be the path's fault. Returns whether it does; if not, the
    /// stream is lost.
    pub(super) fn resumes_after_error(
        &mut self,
        index: usize,
        error: &StreamError,
        now: Instant,
    ) -> Result<bool, WorkerError> {
        let Some(end) = error.end().filter(|_| self.may_resume(index)) else { return Ok(false) };
        let Some(patience) = self.job.tries(end) else { return Ok(false) };
        if !self.lanes[index].cuts.may_retry(now, patience.min(RESUME)) {
            return Ok(false);
        }
        self.resume_stream(index, BrokenPath::after(end), error.to_string(), patience, now).map(|()| true)
    }

    /// Dials again where a hub has closed a stream before this worker has left, if the hub has a standby. Returns whether it
    /// does.
    pub(super) fn dials_after_close(&mut self, index: usize, now: Instant) -> Result<bool, WorkerError> {
        if !self.job.has_standbys() || self.job.is_closing() || !self.may_resume(index) {
            return Ok(false);
        }
        let patience = self.job.tries(StreamEnd::Closed).unwrap_or_default();
        if !self.lanes[index].cuts.may_retry(now, patience.min(RESUME)) {
            return Ok(false);
        }
        let reason = "it closed the connection".to_owned();
        self.resume_stream(index, BrokenPath::Somewhere, reason, patience, now).map(|()| true)
    }

    /// Dials the standby of a hub that has been silent for too long, if it has one, and the hub. Returns whether it does.
    pub(super) fn dials_instead(
        &mut self,
        index: usize,
        silence: Duration,
        now: Instant,
    ) -> Result<bool, WorkerError> {
        if !self.job.has_standbys() || !self.may_resume(index) {
            return Ok(false);
        }
        let patience = self.job.tries(StreamEnd::PathFailed).unwrap_or_default();
        let reason = format!("nothing was heard of it for {:.0} s", silence.as_secs_f64());
        self.resume_stream(index, BrokenPath::Somewhere, reason, patience, now).map(|()| true)
    }

    /// How long to try to open a stream again that may move.
    fn moving_patience(&self) -> Duration {
        self.job.tries(StreamEnd::PathFailed).unwrap_or_default()
    }

    /// Handles the reports of the watcher of interfaces and of the threads that open streams again.
    pub(super) fn take_stream_events(&mut self, now: Instant) -> Result<(), WorkerError> {
        while let Some(event) = self.failover.as_ref().and_then(|failover| failover.events.try_recv().ok()) {
            match event {
                StreamEvent::InterfaceDown { address, what } => {
                    self.resume_streams_from(address, &what, now)?
                }
                StreamEvent::ResumeOver { lane, outcome } => self.resumed(lane, outcome, now)?,
            }
        }
        Ok(())
    }

    fn resume_streams_from(&mut self, address: IpAddr, what: &str, now: Instant) -> Result<(), WorkerError> {
        for index in 0..self.lanes.len() {
            if self.lanes[index].source == Some(address) && self.may_resume(index) {
                let patience = self.moving_patience();
                self.resume_stream(index, BrokenPath::OwnInterface, what.to_owned(), patience, now)?;
            }
        }
        Ok(())
    }

    /// Opens silent streams again.
    pub(super) fn resume_silent(&mut self, now: Instant) -> Result<(), WorkerError> {
        for index in 0..self.lanes.len() {
            let silent = self.lanes[index].liveness.silence(now);
            if self.job.resumes_after(silent) && self.may_resume(index) {
                let reason = format!("nothing was heard of it for {:.0} s", silent.as_secs_f64());
                self.resume_stream(index, BrokenPath::Somewhere, reason, self.moving_patience(), now)?;
            }
        }
        Ok(())
    }

    /// Gives up the attempts to open a stream again that have not ended in time: the system may keep the thread that dials,
    /// for instance while it looks up the name of the hub.
    pub(super) fn give_up_overdue(&mut self, now: Instant) {
        for index in 0..self.lanes.len() {
            if !self.lanes[index].is_resuming_overdue(now) {
                continue;
            }
            let (who, hub) = (self.in_flight.shared.who.clone(), Arc::clone(&self.lanes[index].hub));
            let reason = "its stream was cut, and the attempts to open it again do not come to an end".into();
            let error = WorkerError::Lost { who, hub, rank: None, reason };
            self.lanes[index].close();
            let reopening = Reopening::<Infallible, _>::Failed(self.cut_off(error));
            if let Consequence::Announce(announcement) = self.job.reopened(reopening, false, now) {
                self.announce(announcement, now);
            }
        }
    }

    /// Opens a lane's stream again, on a thread of its own. The old stream stays open until a frame comes on
    /// the new one, so that the hub does not take its end for the end of this process.
    pub(super) fn resume_stream(
        &mut self,
        index: usize,
        broken: BrokenPath,
        reason: String,
        patience: Duration,
        now: Instant,
    ) -> Result<(), WorkerError> {
        let lane = &mut self.lanes[index];
        if !lane.begin_resuming(now + patience + OVERDUE) {
            return Ok(());
        }
        // This fails only if the descriptor is not in the set, and then there is nothing to remove.
        let _ = self.poller.remove(&lane.stream);
        let failover = self.failover.as_ref().expect("only such jobs resume streams");
        let (redialler, event_sender) = (Arc::clone(&failover.redialler), failover.event_sender.clone());
        let failure =
            StreamFailure { hub: Arc::clone(&lane.hub), source: lane.source, broken, reason, patience };
        let resume = move || {
            let outcome = redialler.resume(index, &failure);
            event_sender.send(StreamEvent::ResumeOver { lane: index, outcome });
        };
        let started = std::thread::Builder::new().name("paramhub-resume".into()).spawn(resume);
        started.map(drop).map_err(|error| {
            let who = self.in_flight.shared.who.clone();
            WorkerError::System { who, what: "start a thread", reason: error.to_string().into() }
        })
    }

    fn resumed(
        &mut self,
        index: usize,
        outcome: Result<Box<ResumedStream>, WorkerError>,
        now: Instant,
    ) -> Result<(), WorkerError> {
        let rewinds = self.in_flight.shared.rewind_every.is_some();
        let reopening = match outcome {
            Ok(resumed) => Reopening::Opened(resumed),
            // All ranks go back to an earlier step, and this one has not heard of it by another stream yet.
            Err(WorkerError::Refused { refusal: Refusal::Stale, hub, message, .. }) if rewinds => {
                Reopening::Failed(self.rewound_by_hub(hub, None, message))
            }
            Err(WorkerError::Refused { refusal: Refusal::JobEnded, hub, message, .. }) => {
                Reopening::Failed(self.ended_by_hub(hub, None, message))
            }
            Err(error) => Reopening::Failed(self.cut_off(error)),
        };
        match self.job.reopened(reopening, self.lanes[index].is_closed(), now) {
            Consequence::Ignore => {}
            Consequence::Close => self.lanes[index].close(),
            Consequence::Replace { stream, leaves } => self.replace_stream(index, *stream, leaves, now)?,
            Consequence::Announce(announcement) => self.announce(announcement, now),
        }
        Ok(())
    }

    /// The cause of a failure for a stream that cannot be opened again.
    fn cut_off(&self, error: WorkerError) -> FailureCause<WorkerError> {
        let message = match &error {
            WorkerError::InterfaceDown { what, .. } => format!("its {what}"),
            WorkerError::Lost { hub, reason, .. } => format!("it lost the hub at {hub}: {reason}"),
            error => format!("it is cut off: {error}"),
        };
        self.cause(error, message, None)
    }

    /// Replaces a lane's stream, and requests again every chunk that was not answered whole. `leaves` says
    /// whether the Leave message is sent again, too.
    fn replace_stream(
        &mut self,
        index: usize,
        resumed: ResumedStream,
        leaves: bool,
        now: Instant,
    ) -> Result<(), WorkerError> {
        self.announce_resumption(&resumed, now)?;
        let failover = self.failover.as_ref().expect("only such jobs resume streams");
        let lane = &mut self.lanes[index];
        lane.replace_stream(resumed, &failover.retunes, now);
        if let Some((step, wire)) = &failover.release {
            lane.requeue(ControlFrame::Release { step: *step, wire: wire.clone() });
        }
        self.in_flight.norms_resume(index);
        let slots = self.in_flight.requests.resend_route(&self.in_flight.placement, lane.route);
        slots.into_iter().for_each(|slot| lane.mark_ready(slot));
        if self.in_flight.placement.program_state_route() == Some(lane.route) {
            let (save, pull) = self.in_flight.program_states.resend();
            save.into_iter().for_each(|state| lane.send_program_state(state));
            pull.into_iter().for_each(|step| lane.requeue(ControlFrame::PullProgramState { step }));
        }
        if leaves {
            lane.requeue(ControlFrame::Leave);
        }
        self.in_flight.shared.counters.moved_one();
        let added = self.poller.add(&lane.stream, index as u64, Interest::READABLE);
        added.map_err(|error| self.internal(&error))?;
        self.send(index, now)
    }
}

impl IoLoop {
    /// Notifies this worker's program why its streams are opened again, once for all that fail together.
    fn announce_resumption(&mut self, resumed: &ResumedStream, now: Instant) -> Result<(), WorkerError> {
        let failover = self.failover.as_mut().expect("only such jobs resume streams");
        if !failover.notices.is_due(now) {
            return Ok(());
        }
        let shared = &self.in_flight.shared;
        let (rank, hub) = (shared.who.rank, Arc::clone(&resumed.hub));
        let from = resumed.source.map_or(String::new(), |source| format!(" from {source}"));
        let message = format!("rank {rank} goes on over {hub}{from}: {}", resumed.why);
        let notice = HubNotice { hub, rank: Some(rank), message };
        catch_unwind(AssertUnwindSafe(|| shared.notices.add(notice))).map_err(|panic| WorkerError::Callback {
            who: shared.who.clone(),
            message: panic_message(&*panic),
        })
    }
}

impl Lane {
    fn replace_stream(&mut self, resumed: ResumedStream, retunes: &Retunes, now: Instant) {
        self.retired = Some((std::mem::replace(&mut self.stream, resumed.stream), resumed.unheard));
        (self.hub, self.source) = (resumed.hub, resumed.source);
        self.requeue_begun_chunks();
        // The changes go ahead of every push that they hold for, as they did before.
        for (group, first_step, wire) in retunes.iter() {
            self.requeue(ControlFrame::Retune { group, first_step, wire: Arc::clone(wire) });
        }
        self.liveness = PeerLiveness::new(now);
        self.cuts.reopened(now);
        self.reopen();
    }
}
