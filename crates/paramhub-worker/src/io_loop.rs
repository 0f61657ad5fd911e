//! The I/O thread: one loop over all streams of a job.

mod ending;
mod failover;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paramhub_core::chunk::ChunkId;
use paramhub_core::liveness::{LivenessChange, LivenessRules, OwnPauses};
use paramhub_core::placement::Placement;
use paramhub_core::resuming::ResumeTerms;
use paramhub_core::worker_job::{CommandsTaken, FailureCause, WorkerJob};
use paramhub_transport::runtime::{become_io_thread, panic_message};
use paramhub_transport::{Events, Interest, Poller, ReceiveError, Scratch, Stream, Waker};

use crate::command::{HyperparameterChange, JobCommand, KeyRequest};
use crate::error::WorkerError;
use crate::inbound::{FrameFault, InboundSink};
use crate::lane::{ControlFrame, Lane};
use crate::loss_report::LossReporter;
use crate::requests_in_flight::RequestsInFlight;
pub(crate) use failover::Failover;

/// Bytes that one stream may send or receive before the others have their turn.
const TURN_BYTES: usize = 1 << 20;
/// The waker's token; the token of a lane is its position.
const WAKER: u64 = u64::MAX;

/// The state of the I/O thread.
pub(crate) struct IoLoop {
    in_flight: RequestsInFlight,
    lanes: Vec<Lane>,
    /// The lane of each route; `None` where the route has no chunks.
    lane_of: Vec<Option<u16>>,
    poller: Poller,
    waker: Waker,
    scratch: Scratch,
    /// Commands that were taken from the inbox and have not begun.
    commands: VecDeque<JobCommand>,
    /// The rules by which the job ends.
    job: WorkerJob<WorkerError>,
    /// Present only in a job whose streams are opened again.
    failover: Option<Failover>,
    liveness_rules: LivenessRules,
    own_pauses: OwnPauses,
    spin: Duration,
    /// The rank in whose process the hubs run, for errors.
    hub_rank: Option<u32>,
    loss_reporter: Option<LossReporter>,
    outlives_hubs: bool,
}

/// Timing of an [`IoLoop`], and whom it tells of a lost hub.
pub(crate) struct IoLoopConfig {
    pub(crate) liveness_rules: LivenessRules,
    pub(crate) spin: Duration,
    pub(crate) hub_rank: Option<u32>,
    pub(crate) scratch_bytes: usize,
    pub(crate) loss_reporter: Option<LossReporter>,
    /// Whether all ranks go back to a checkpoint when a hub is lost.
    pub(crate) outlives_hubs: bool,
    pub(crate) resuming: ResumeTerms,
}

impl IoLoop {
    /// Takes streams whose handshake is over.
    pub(crate) fn new(
        in_flight: RequestsInFlight,
        lanes: Vec<Lane>,
        waker: Waker,
        config: IoLoopConfig,
        failover: Option<Failover>,
    ) -> std::io::Result<Self> {
        let poller = Poller::new()?;
        poller.add(&waker, WAKER, Interest::READABLE)?;
        let mut lane_of = vec![None; in_flight.placement.routes().len()];
        for (index, lane) in lanes.iter().enumerate() {
            poller.add(&lane.stream, index as u64, Interest::READABLE)?;
            lane_of[usize::from(lane.route)] = Some(index as u16);
        }
        Ok(IoLoop {
            in_flight,
            lanes,
            lane_of,
            poller,
            waker,
            scratch: Scratch::new(config.scratch_bytes),
            commands: VecDeque::with_capacity(64),
            job: WorkerJob::new(config.resuming),
            failover,
            liveness_rules: config.liveness_rules,
            own_pauses: OwnPauses::new(Instant::now(), config.liveness_rules.heartbeat),
            spin: config.spin,
            hub_rank: config.hub_rank,
            loss_reporter: config.loss_reporter,
            outlives_hubs: config.outlives_hubs,
        })
    }

    /// Serves the job until the worker leaves it or it fails. On return every request under way has ended.
    pub(crate) fn run(mut self) -> Result<(), WorkerError> {
        become_io_thread();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.serve())).unwrap_or_else(|panic| {
            let who = self.in_flight.shared.who.clone();
            Err(WorkerError::Internal { who, message: panic_message(&*panic) })
        });
        let outcome = outcome.map_err(|error| error.with_hub_rank(self.hub_rank));
        let loss = outcome.clone().err();
        let outcome = outcome.map_err(|error| if self.outlives_hubs { error.or_rewound() } else { error });
        let shared = Arc::clone(&self.in_flight.shared);
        let reason = outcome.clone().err().unwrap_or_else(|| WorkerError::Left { who: shared.who.clone() });
        let queued = shared.inbox.close(&reason);
        // Close the streams first, so that the hubs learn of the failure before any callback runs.
        self.lanes.clear();
        let reporter = self.loss_reporter.take();
        let report = reporter.and_then(|reporter| reporter.begin(loss.as_ref()?));
        self.in_flight.fail_all(&reason);
        for command in self.commands.drain(..).chain(queued) {
            let ticket = match command {
                JobCommand::Requests { requests, mut ticket } => {
                    // Only a request of one key may give its buffers back.
                    for KeyRequest { key, buffers, .. } in requests {
                        shared.steps.release(key);
                        ticket.value = buffers;
                    }
                    ticket
                }
                JobCommand::Factors { block, weight, bias, .. } => {
                    shared.blocks[block].keys().for_each(|key| shared.steps.release(key));
                    let [weight, bias] = [Some(weight), bias].map(|of_key| {
                        let (buffers, mut ticket) = *of_key?;
                        ticket.value = buffers;
                        Some(ticket)
                    });
                    let _ = bias.map(|bias| bias.finish(Err(reason.clone())));
                    let Some(weight) = weight else { continue };
                    weight
                }
                JobCommand::AwaitNorm { ticket, .. }
                | JobCommand::SaveProgramState { ticket, .. }
                | JobCommand::PullProgramState { ticket, .. } => ticket,
                JobCommand::Retune(_)
                | JobCommand::Release { .. }
                | JobCommand::Leave { .. }
                | JobCommand::GiveUp { .. } => {
                    continue;
                }
            };
            let _ = ticket.finish(Err(reason.clone()));
        }
        // The process may end with this thread. The report takes a bounded time, and does not panic.
        let _ = report.map(JoinHandle::join);
        outcome
    }

    fn serve(&mut self) -> Result<(), WorkerError> {
        let mut events = Events::with_capacity(256);
        let mut next_tick = Instant::now();
        loop {
            let now = Instant::now();
            self.discount_own_pause(now);
            if now >= next_tick {
                self.check_liveness(now)?;
                next_tick = now + self.liveness_rules.check_every();
            }
            if let Some(outcome) = self.progress(now) {
                return outcome;
            }
            let needs_polling = self.lanes.iter().any(Lane::needs_polling);
            let timeout = match needs_polling && self.job.is_sending() {
                true => Duration::ZERO,
                false => {
                    let wake_at = self.job.deadline().map_or(next_tick, |deadline| deadline.min(next_tick));
                    wake_at.saturating_duration_since(now)
                }
            };
            self.poller
                .wait_spinning(&mut events, self.spin, Some(timeout))
                .map_err(|error| self.internal(&error))?;
            let now = Instant::now();
            self.discount_own_pause(now);
            for event in events.iter() {
                if event.token == WAKER {
                    self.waker.drain();
                    continue;
                }
                let lane = event.token as usize;
                // The batch of events may still hold one of a stream that is being replaced.
                if event.readable && self.lanes[lane].may_receive() {
                    self.receive(lane, now)?;
                }
                if event.writable || self.lanes[lane].stream.is_shm() {
                    self.send(lane, now)?;
                }
            }
            for lane in 0..self.lanes.len() {
                if self.lanes[lane].needs_polling() {
                    if self.lanes[lane].has_more {
                        self.receive(lane, now)?;
                    }
                    self.send(lane, now)?;
                }
            }
            self.take_stream_events(now)?;
            self.take_commands(now)?;
        }
    }

    /// Begins the commands of user threads, in order.
    fn take_commands(&mut self, now: Instant) -> Result<(), WorkerError> {
        match self.job.commands_taken() {
            CommandsTaken::All => {}
            CommandsTaken::GiveUpOnly => {
                self.look_for_give_up(now);
                return Ok(());
            }
            CommandsTaken::None => return Ok(()),
        }
        self.in_flight.shared.inbox.take(&mut self.commands);
        while let Some(command) = self.commands.pop_front() {
            match command {
                JobCommand::Requests { requests, ticket } => {
                    let IoLoop { in_flight, lanes, lane_of, .. } = self;
                    let begun = in_flight.begin(requests, ticket, |placement, chunks| {
                        chunks.for_each(|chunk| mark_ready(lanes, lane_of, placement, chunk));
                    });
                    begun.map_err(|message| self.callback_panicked(message))?;
                }
                JobCommand::Factors { block, samples, step, weight, bias } => {
                    let bias = bias.map(|bias| *bias);
                    let chunk = self.in_flight.begin_block(block, samples, step, *weight, bias);
                    self.mark_ready(chunk);
                }
                JobCommand::Retune(change) => {
                    if !self.lanes.iter().all(Lane::has_room_for_retune) {
                        self.commands.push_front(JobCommand::Retune(change));
                        break;
                    }
                    let HyperparameterChange { group, first_step, hyperparameters } = change;
                    let wire: Arc<[u8]> = hyperparameters.to_wire().as_slice().into();
                    if let Some(failover) = &mut self.failover {
                        failover.retunes.record(group, first_step, Arc::clone(&wire));
                    }
                    for lane in &mut self.lanes {
                        lane.queue_control(ControlFrame::Retune {
                            group,
                            first_step,
                            wire: Arc::clone(&wire),
                        });
                    }
                    self.in_flight.shared.inbox.uncount();
                }
                JobCommand::AwaitNorm { step, ticket } => {
                    let awaited = self.in_flight.await_norm(step, ticket);
                    awaited.map_err(|message| self.callback_panicked(message))?;
                }
                JobCommand::Release { step, factor } => self.release(step, factor),
                JobCommand::SaveProgramState { state, ticket } => {
                    let state = self.in_flight.program_states.begin_save(state, ticket);
                    self.program_state_lane().send_program_state(state);
                }
                JobCommand::PullProgramState { step, ticket } => {
                    self.in_flight.program_states.begin_pull(step, ticket);
                    self.program_state_lane().queue_control(ControlFrame::PullProgramState { step });
                }
                JobCommand::GiveUp { error, announced } => {
                    self.give_up(FailureCause { error, announced, lost_hub: None }, now);
                    break;
                }
                JobCommand::Leave { deadline } => {
                    self.job.leave(deadline);
                    break;
                }
            }
        }
        self.send_ready(now)
    }

    /// Lets a chunk leave by the stream of its route.
    fn mark_ready(&mut self, chunk: ChunkId) {
        mark_ready(&mut self.lanes, &self.lane_of, &self.in_flight.placement, chunk);
    }

    /// The lane by which program states are exchanged.
    fn program_state_lane(&mut self) -> &mut Lane {
        let route = self.in_flight.placement.program_state_route().expect("a job has chunks");
        let lane = self.lane_of[usize::from(route)].expect("a route with chunks has a lane");
        &mut self.lanes[usize::from(lane)]
    }

    /// Ends a held step: queues a Release, or without a factor a Skip, for every hub, ahead of all chunks.
    fn release(&mut self, step: u32, factor: Option<f32>) {
        let wire = factor.map(|factor| self.in_flight.release_payload(step, factor));
        if let Some(failover) = &mut self.failover {
            failover.release = Some((step, wire.clone()));
        }
        for lane in &mut self.lanes {
            lane.queue_control(ControlFrame::Release { step, wire: wire.clone() });
        }
    }

    /// Sends on every stream that has frames to send and room for them.
    fn send_ready(&mut self, now: Instant) -> Result<(), WorkerError> {
        for lane in 0..self.lanes.len() {
            // A stream that is polled for room is full: an event reports when it has room.
            if !self.lanes[lane].polls_writable && self.lanes[lane].has_work() {
                self.send(lane, now)?;
            }
        }
        Ok(())
    }

    fn send(&mut self, index: usize, now: Instant) -> Result<(), WorkerError> {
        let lane = &mut self.lanes[index];
        if lane.has_work() && self.job.is_sending() {
            match lane.pump(&mut self.in_flight, TURN_BYTES) {
                Ok(0) => {}
                Ok(bytes) => {
                    lane.liveness.sent(now);
                    self.in_flight.shared.counters.sent(bytes);
                }
                Err(error) if self.resumes_after_error(index, &error, now)? => {}
                Err(error) => {
                    // The hub's last frames are still to be read.
                    self.lanes[index].close_sending();
                    self.lose_stream(index, &error.to_string(), now);
                }
            }
        }
        let lane = &mut self.lanes[index];
        if self.job.is_closing() && lane.may_end() {
            lane.close_sending();
            // If the stream cannot be shut down, it has ended already.
            let _ = lane.stream.end_sending();
        }
        self.poll_lane(index)
    }

    /// Polls a lane for room if and only if it has something to send.
    fn poll_lane(&mut self, index: usize) -> Result<(), WorkerError> {
        let lane = &mut self.lanes[index];
        let wanted = lane.has_work() && self.job.is_sending();
        if !lane.may_receive() || wanted == lane.polls_writable {
            return Ok(());
        }
        lane.polls_writable = wanted;
        if lane.stream.is_shm() {
            return Ok(());
        }
        let polled = self.poller.modify(&lane.stream, index as u64, lane.stream.interest(wanted));
        polled.map_err(|error| self.internal(&error))
    }

    fn receive(&mut self, index: usize, now: Instant) -> Result<(), WorkerError> {
        let IoLoop { in_flight, lanes, scratch, .. } = self;
        let lane = &mut lanes[index];
        let before = lane.stream.bytes_received();
        let (hub, begun) = (&lane.hub, &mut lane.begun_answer);
        let mut inbound = InboundSink { in_flight, route: lane.route, lane: index, hub, begun };
        let received = lane.stream.receive(&mut inbound, scratch, TURN_BYTES);
        if lane.stream.bytes_received() > before {
            lane.liveness.heard(now);
            lane.retired = None;
        }
        lane.has_more = matches!(&received, Ok(received) if received.more && !received.closed);
        self.in_flight.count_received();
        if let Some((step, factor)) = self.in_flight.take_release() {
            self.release(step, Some(factor));
            self.send_ready(now)?;
        }
        match received {
            Ok(received) if !received.closed => Ok(()),
            Ok(_) if self.dials_after_close(index, now)? => Ok(()),
            Ok(_) => self.end_lane(index, "it closed the connection", now),
            Err(ReceiveError::Stream(error)) => match self.resumes_after_error(index, &error, now)? {
                true => Ok(()),
                false => self.end_lane(index, &error.to_string(), now),
            },
            Err(ReceiveError::Frame(error)) => {
                self.end_by_fault(index, FrameFault::Protocol(error.to_string()), now)
            }
            Err(ReceiveError::Sink(fault)) => self.end_by_fault(index, fault, now),
        }
    }

    /// Ends a lane: no more frames will come from its stream.
    fn end_lane(&mut self, index: usize, reason: &str, now: Instant) -> Result<(), WorkerError> {
        let lane = &mut self.lanes[index];
        lane.close();
        let removed = self.poller.remove(&lane.stream);
        self.lose_stream(index, reason, now);
        removed.map_err(|error| self.internal(&error))
    }

    /// Sends heartbeats where nothing else was sent, and fails the job if a hub has been silent for too long.
    fn check_liveness(&mut self, now: Instant) -> Result<(), WorkerError> {
        if self.failover.is_some() {
            self.resume_silent(now)?;
            self.give_up_overdue(now);
        }
        if !self.job.watches_hubs() {
            return Ok(());
        }
        for index in 0..self.lanes.len() {
            let lane = &mut self.lanes[index];
            if lane.is_resuming() {
                continue;
            }
            if let Some(LivenessChange::Dead(silence)) = lane.liveness.check(now, &self.liveness_rules) {
                if self.dials_instead(index, silence, now)? {
                    continue;
                }
                self.lose_silent_hub(index, silence, now);
                return Ok(());
            }
            if !lane.has_work() && lane.liveness.is_heartbeat_due(now, &self.liveness_rules) {
                lane.queue_control(ControlFrame::Heartbeat);
                self.send(index, now)?;
            }
        }
        Ok(())
    }

    /// Forgives the hubs their silence while this thread itself did not read. Called around everything that
    /// takes time, above all before silence is judged.
    fn discount_own_pause(&mut self, now: Instant) {
        let pause = self.own_pauses.turn(now);
        if !pause.is_zero() {
            self.lanes.iter_mut().for_each(|lane| lane.liveness.forgive(pause, now));
        }
    }

    fn callback_panicked(&self, message: Arc<str>) -> WorkerError {
        WorkerError::Callback { who: self.in_flight.shared.who.clone(), message }
    }

    fn internal(&self, error: &std::io::Error) -> WorkerError {
        let who = self.in_flight.shared.who.clone();
        WorkerError::System { who, what: "wait for its streams", reason: error.to_string().into() }
    }
}

/// Lets a chunk leave by the stream of its route.
fn mark_ready(lanes: &mut [Lane], lane_of: &[Option<u16>], placement: &Placement, chunk: ChunkId) {
    let (route, slot) = placement.locate(chunk).expect("every chunk has a place");
    let lane = lane_of[usize::from(route)].expect("a route with chunks has a lane");
    lanes[usize::from(lane)].mark_ready(slot);
}
