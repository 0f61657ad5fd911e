//! Streams that are opened again: a cut stream by its own path or, in a job whose streams may move, by another.

use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use paramhub_core::liveness::PeerLiveness;
use paramhub_core::resuming::{BrokenPath, ResumeNotices, Retunes, StreamEnd};
use paramhub_core::wire::{Refusal, Release};
use paramhub_core::worker_job::{Consequence, FailureCause, Reopening};
use paramhub_transport::runtime::panic_message;
use paramhub_transport::{Interest, StreamError};

use super::IoLoop;
use crate::error::WorkerError;
use crate::lane::{ControlFrame, Lane};
use crate::notices::HubNotice;
use crate::resume::{Redialler, ResumedStream, StreamEvent, StreamEventSender, StreamFailure};

/// What the I/O thread needs in addition in a job whose streams are opened again.
pub(crate) struct Failover {
    pub(crate) redialler: Arc<Redialler>,
    pub(crate) events: Receiver<StreamEvent>,
    pub(crate) event_sender: StreamEventSender,
    pub(crate) retunes: Retunes,
    /// The last release of a step, which rank 0 has sent on every stream.
    pub(crate) release: Option<(u32, [u8; Release::BYTES])>,
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
        if !self.lanes[index].cuts.may_retry(now, patience) {
            return Ok(false);
        }
        let broken = match end {
            StreamEnd::Reset => BrokenPath::Nowhere,
            StreamEnd::Closed | StreamEnd::PathFailed => BrokenPath::Somewhere,
        };
        self.resume_stream(index, broken, error.to_string(), patience).map(|()| true)
    }

    /// How long to try to open a stream again that may move.
    fn moving_patience(&self) -> Duration {
        self.job.tries(StreamEnd::PathFailed).unwrap_or_default()
    }

    /// Handles the reports of the watcher of interfaces and of the threads that open streams again.
    pub(super) fn take_stream_events(&mut self, now: Instant) -> Result<(), WorkerError> {
        while let Some(event) = self.failover.as_ref().and_then(|failover| failover.events.try_recv().ok()) {
            match event {
                StreamEvent::InterfaceDown { address, what } => self.resume_streams_from(address, &what)?,
                StreamEvent::ResumeOver { lane, outcome } => self.resumed(lane, outcome, now)?,
            }
        }
        Ok(())
    }

    fn resume_streams_from(&mut self, address: IpAddr, what: &str) -> Result<(), WorkerError> {
        for index in 0..self.lanes.len() {
            if self.lanes[index].source == Some(address) && self.may_resume(index) {
                let patience = self.moving_patience();
                self.resume_stream(index, BrokenPath::OwnInterface, what.to_owned(), patience)?;
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
                self.resume_stream(index, BrokenPath::Somewhere, reason, self.moving_patience())?;
            }
        }
        Ok(())
    }

    /// Opens a lane's stream again, on a thread of its own. The old stream stays open until a frame comes on
    /// the new one, so that the hub does not take its end for the end of this process.
    pub(super) fn resume_stream(
        &mut self,
        index: usize,
        broken: BrokenPath,
        reason: String,
        patience: Duration,
    ) -> Result<(), WorkerError> {
        let lane = &mut self.lanes[index];
        if !lane.begin_resuming() {
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
        if let Some((step, wire)) = failover.release {
            lane.requeue(ControlFrame::Release { step, wire });
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
