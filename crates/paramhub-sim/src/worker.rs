//! A worker: the production state machines of its requests, of its streams and of how it ends, and a program that trains.
//! Before it has streams it is a [`Member`].

mod share_hubs;
mod streams;

use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::chunk::ChunkId;
use paramhub_core::codec::{Codec, Dtype};
use paramhub_core::liveness::{HEARTBEAT, LivenessChange, LivenessRules, OwnPauses};
use paramhub_core::requests::{Request, Requests};
use paramhub_core::resuming::{BrokenPath, StreamEnd};
use paramhub_core::wire::{Failure, Header, Notice, Operation};
use paramhub_core::worker_job::{Announcement, FailureCause, Output, Progress, WorkerJob};

use crate::call::Line;
use crate::job::JobPlan;
use crate::member::{Joined, Member};
use crate::message::{Content, Contribution, Frame, Message};
use crate::network::{Arrival, Process, StreamId};
use crate::world::{Context, Wake};

use share_hubs::ShareHubs;
use streams::{Lane, LaneState};

/// How long the last requests may take when the program leaves.
const LEAVING: Duration = Duration::from_secs(60);

/// A worker and its program.
pub(crate) struct Worker {
    process: Process,
    rank: u32,
    plan: Arc<JobPlan>,
    member: Member,
    /// What it knows of the job, once it has joined.
    joined: Option<Joined>,
    job: WorkerJob<String>,
    requests: Requests,
    lanes: Vec<Lane>,
    /// Where the chunks are, once it has joined a job with standbys.
    share_hubs: Option<ShareHubs>,
    program: Program,
    step: u32,
    own_pauses: OwnPauses,
    /// The hubs that it has lost or cannot reach, each with the error that this is to its program.
    lost_hubs: Vec<(String, Process)>,
    /// The errors with which its streams end if all ranks go back to an earlier step.
    rewound: Vec<String>,
    is_ticking: bool,
    outcome: Option<Result<(), String>>,
}

/// What the program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    /// It joins the job at the manager.
    Joining,
    /// It waits until all streams are open.
    Connecting,
    /// Rank 0 sends the initial parameters, and the others wait for them.
    Initialising,
    /// It computes gradients.
    Computing,
    /// It waits for a step's parameters.
    Waiting,
    /// All steps are done.
    Leaving,
}

struct LanesAndRequests<'a>(&'a [Lane], &'a Requests);

impl Progress<String> for LanesAndRequests<'_> {
    fn has_requests(&self) -> bool {
        self.1.underway().next().is_some()
    }

    fn are_streams_closed(&self) -> bool {
        self.0.iter().all(|lane| matches!(lane.state, LaneState::Closed))
    }

    fn left_early(&self) -> String {
        "it left before its requests were answered".into()
    }
}

impl Worker {
    /// The process of this number among those that were started for a rank, together with `workers` in all if this may change.
    /// It is about to join the job.
    pub(crate) fn new(
        rank: u32,
        number: u8,
        workers: Option<u32>,
        plan: &Arc<JobPlan>,
        context: &mut Context<'_>,
    ) -> Worker {
        let process = Process::Worker(rank, number);
        let wait = context.random.time(&context.starting.clone());
        context.wake_in(process, wait, Wake::Begin);
        Worker {
            process,
            rank,
            plan: plan.clone(),
            member: Member::new(rank, number, workers, plan),
            joined: None,
            job: WorkerJob::new(plan.resuming),
            requests: requests(plan),
            lanes: Vec::new(),
            share_hubs: None,
            program: Program::Joining,
            step: 0,
            own_pauses: OwnPauses::new(context.instant(), HEARTBEAT),
            lost_hubs: Vec::new(),
            rewound: Vec::new(),
            is_ticking: false,
            outcome: None,
        }
    }

    /// The manager has answered, or not: the streams are opened, or the worker ends.
    fn join(&mut self, joined: Option<Result<Joined, String>>, context: &mut Context<'_>) {
        match joined {
            None => {}
            Some(Err(error)) => self.outcome = Some(Err(error)),
            Some(Ok(joined)) => {
                self.step = joined.step.unwrap_or(0);
                self.joined = Some(joined);
                self.program = Program::Connecting;
                self.own_pauses = OwnPauses::new(context.instant(), HEARTBEAT);
                self.open_all(context);
                if !std::mem::replace(&mut self.is_ticking, true) {
                    self.next_tick(context);
                }
            }
        }
    }

    /// How the job has ended here, if it has.
    pub(crate) fn outcome(&self) -> Option<&Result<(), String>> {
        self.outcome.as_ref()
    }

    /// Whether all first streams are open.
    pub(crate) fn is_connected(&self) -> bool {
        !matches!(self.program, Program::Joining | Program::Connecting)
    }

    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    /// The steps that are done.
    pub(crate) fn step(&self) -> u32 {
        self.step
    }

    /// All ranks go back to an earlier step: it joins the job anew.
    fn begin_again(&mut self, context: &mut Context<'_>) {
        self.lanes.clear();
        self.lost_hubs.clear();
        self.rewound.clear();
        (self.job, self.requests) = (WorkerJob::new(self.plan.resuming), requests(&self.plan));
        (self.program, self.joined) = (Program::Joining, None);
        self.member.begin_again(context);
    }

    /// The epoch since which it has its rank, once it has joined.
    pub(crate) fn epoch(&self) -> Option<u64> {
        self.joined.as_ref().map(|joined| joined.epoch)
    }

    fn next_tick(&self, context: &mut Context<'_>) {
        context.wake_in(self.process, self.rules().check_every(), Wake::Tick);
    }

    /// What a worker that has streams knows of its job.
    fn joined(&self) -> &Joined {
        self.joined.as_ref().expect("only a worker that has joined has streams")
    }

    fn rules(&self) -> LivenessRules {
        LivenessRules::of_stream(self.plan.resuming.heartbeat(HEARTBEAT), self.plan.dead_after)
    }

    /// An end of a stream learns something.
    pub(crate) fn arrived(&mut self, stream: StreamId, arrival: Arrival, context: &mut Context<'_>) {
        if self.outcome.is_some() {
            return;
        }
        if self.program == Program::Joining {
            let joined = self.member.arrived(stream, &arrival, context);
            return self.join(joined, context);
        }
        self.discount_own_pause(context.instant());
        if self.asker_arrived(stream, &arrival, context) {
            return self.go_on(context);
        }
        let opening = |lane: &Lane| match lane.state {
            LaneState::Opening(opening) | LaneState::Resuming(_, Some(opening)) => Some(opening),
            _ => None,
        };
        if let Some(index) = self.lanes.iter().position(|lane| opening(lane) == Some(stream)) {
            self.greeted(index, stream, arrival, context);
        } else if let Some(index) = self.lanes.iter().position(|lane| lane.stream == Some(stream))
            && matches!(self.lanes[index].state, LaneState::Open)
        {
            match arrival {
                Arrival::Message(Message::Frame(frame)) => self.take_frame(index, frame, context),
                Arrival::Message(_) => {}
                Arrival::Closed if self.plan.resuming.has_standbys && !self.job.is_closing() => {
                    self.cut(index, StreamEnd::Closed, context);
                }
                Arrival::Closed => self.end_lane(index, "it closed the connection", context),
                Arrival::Broken => self.cut(index, StreamEnd::PathFailed, context),
                Arrival::Reset => self.cut(index, StreamEnd::Reset, context),
                Arrival::Refused => self.end_lane(index, "nobody listens", context),
            }
        }
        self.go_on(context);
    }

    /// A time has come.
    pub(crate) fn wake(&mut self, wake: Wake, context: &mut Context<'_>) {
        if self.outcome.is_some() {
            return;
        }
        let now = context.instant();
        self.discount_own_pause(now);
        match wake {
            Wake::Tick => {
                self.tick(context);
                self.next_tick(context);
            }
            Wake::Begin => self.member.begin(context),
            Wake::Call(Line::Shares, awaited) => self.asker_woken(awaited, context),
            Wake::Call(_, awaited) => {
                let joined = self.member.woken(awaited, context);
                self.join(joined, context);
            }
            Wake::Program if self.program == Program::Computing => self.push(context),
            Wake::Program => {}
            // It has begun again since.
            Wake::Redial(lane) | Wake::DialTimeout { lane, .. } if lane >= self.lanes.len() => {}
            Wake::Redial(index) => match self.lanes[index].state {
                LaneState::Resuming(attempts, None) if self.lanes[index].asking.is_none() => {
                    self.redial(index, attempts, context);
                }
                LaneState::Opening(_) => self.open(index, context),
                _ => {}
            },
            Wake::DialTimeout { lane, stream } => match self.lanes[lane].state {
                LaneState::Resuming(attempts, Some(opening)) if opening == stream => {
                    self.lanes[lane].unheard.push(stream);
                    self.dialled_in_vain(lane, attempts, false, context);
                }
                LaneState::Opening(opening) if opening == stream => {
                    let hub = self.lanes[lane].hub;
                    let cause = self.loss(hub, format!("{hub:?} did not answer in time"), None);
                    self.give_up(cause, context);
                }
                _ => {}
            },
            other => unreachable!("{other:?} is of others"),
        }
        self.go_on(context);
    }

    fn discount_own_pause(&mut self, now: Instant) {
        let pause = self.own_pauses.turn(now);
        if !pause.is_zero() {
            self.lanes.iter_mut().for_each(|lane| lane.liveness.forgive(pause, now));
        }
    }

    fn take_frame(&mut self, index: usize, frame: Frame, context: &mut Context<'_>) {
        let lane = &mut self.lanes[index];
        lane.liveness.heard(context.instant());
        for stream in lane.retired.take().into_iter().chain(lane.unheard.drain(..)) {
            context.close(stream, self.process);
        }
        let header = frame.header;
        match frame.content {
            _ if header.operation == Operation::Heartbeat => {}
            Content::Failure(failure) => {
                let cause =
                    FailureCause { error: failure.message.clone(), announced: failure, lost_hub: None };
                match self.job.failed(cause, context.instant()) {
                    Some(announcement) => self.announce(announcement, context),
                    None => self.end_lane(index, "the job was left", context),
                }
            }
            Content::Rewound(Notice { rank, message }) => {
                let error = format!("rank {} is to begin again: {message}", self.rank);
                self.rewound.push(error.clone());
                let lost_hub = Some(format!("{:?}", lane.hub).into());
                let cause = FailureCause { error, announced: Failure { rank, message }, lost_hub };
                match self.job.failed(cause, context.instant()) {
                    Some(announcement) => self.announce(announcement, context),
                    None => self.end_lane(index, "the job was left", context),
                }
            }
            content => {
                let expected = match self.requests.expect(&header) {
                    Ok(expected) => expected,
                    Err(error) => return context.ledger.violate(|| format!("rank {}: {error}", self.rank)),
                };
                if let Content::Parameters(digest) = content {
                    let first = self.joined().step.filter(|_| self.program == Program::Initialising);
                    if first.is_some_and(|first| first != header.step) {
                        context.ledger.violate(|| format!("rank {} joins between two steps", self.rank));
                    }
                    let from = self.lanes[index].stream.expect("a frame comes by a stream");
                    context.ledger.received(self.rank, from, header.chunk, header.step, digest);
                }
                if self.requests.answered(expected).finished.is_some()
                    && self.requests.underway().next().is_none()
                {
                    self.answered(context);
                }
            }
        }
    }

    /// All requests of the program have been answered.
    fn answered(&mut self, context: &mut Context<'_>) {
        match self.program {
            Program::Initialising => self.compute_or_leave(context),
            Program::Waiting => {
                self.step += 1;
                context.ledger.reached(self.step);
                self.compute_or_leave(context);
            }
            Program::Joining | Program::Connecting | Program::Computing | Program::Leaving => {}
        }
    }

    fn compute_or_leave(&mut self, context: &mut Context<'_>) {
        if self.step < self.plan.steps {
            return self.compute(context);
        }
        self.program = Program::Leaving;
        self.job.leave(context.instant() + LEAVING);
    }

    fn compute(&mut self, context: &mut Context<'_>) {
        self.program = Program::Computing;
        let time = context.random.time(&context.compute);
        context.wake_in(self.process, time, Wake::Program);
    }

    fn push(&mut self, _: &mut Context<'_>) {
        self.program = Program::Waiting;
        self.begin(Request::PushPull, self.step);
    }

    fn begin(&mut self, request: Request, step: u32) {
        for key in 0..self.plan.keys {
            let chunks = self.requests.begin(key, request, step).expect("no request is under way");
            chunks.for_each(|chunk| self.mark_ready(chunk));
        }
    }

    fn mark_ready(&mut self, chunk: ChunkId) {
        let (route, slot) = self.joined().composed.placements[0].locate(chunk).expect("a chunk of the job");
        let lane = self.lanes.iter_mut().find(|lane| lane.route == route).expect("a lane for each route");
        lane.ready.insert(slot);
    }

    /// Carries on with whatever is due: the program, what is to be sent, and the end.
    fn go_on(&mut self, context: &mut Context<'_>) {
        if self.program == Program::Connecting
            && self.lanes.iter().all(|lane| matches!(lane.state, LaneState::Open))
        {
            self.program = Program::Initialising;
            let initialises = self.rank == 0 && self.joined().step.is_none();
            self.begin(if initialises { Request::Initialise } else { Request::Pull }, 0);
        }
        loop {
            self.send_ready(context);
            let progress = LanesAndRequests(&self.lanes, &self.requests);
            match self.job.check_time(context.instant(), &progress) {
                None => break,
                Some(Output::SendLeave) => {
                    self.queue_last(&Header::bare(Operation::Leave), &Content::Nothing)
                }
                Some(Output::Announce(announcement)) => self.announce(announcement, context),
                Some(Output::Over(outcome)) => {
                    let lost = |error| self.lost_hubs.iter().find(|(of_loss, _)| of_loss == error);
                    if let Some((error, hub)) = outcome.as_ref().err().and_then(lost) {
                        self.member.report_lost_hub(*hub, error, context);
                    }
                    for index in 0..self.lanes.len() {
                        self.close_lane(index, context);
                    }
                    if outcome.as_ref().is_err_and(|error| self.rewound.contains(error)) {
                        return self.begin_again(context);
                    }
                    self.outcome = Some(outcome);
                    break;
                }
            }
        }
        if let Some(deadline) = self.job.deadline() {
            let wait = deadline.saturating_duration_since(context.instant());
            context.wake_in(self.process, wait, Wake::Program);
        }
    }

    fn send_ready(&mut self, context: &mut Context<'_>) {
        if !self.job.is_sending() || self.lanes.is_empty() {
            return;
        }
        let (composed, epoch) = (self.joined().composed.clone(), self.joined().epoch);
        for index in 0..self.lanes.len() {
            let lane = &mut self.lanes[index];
            let (LaneState::Open, Some(stream)) = (lane.state, lane.stream) else { continue };
            if lane.has_ended_sending {
                continue;
            }
            let mut frames: Vec<(Header, Content)> = lane.control.drain(..).collect();
            for slot in std::mem::take(&mut lane.ready) {
                let chunk = composed.placements[0].chunks(lane.route)[slot as usize];
                let (header, _) = self.requests.header(chunk);
                self.requests.sent(chunk);
                let content = match header.operation {
                    Operation::PushPull => {
                        Content::Gradient(Contribution { step: header.step, rank: self.rank, epoch })
                    }
                    _ => Content::Nothing,
                };
                frames.push((header, content));
            }
            if !frames.is_empty() {
                lane.liveness.sent(context.instant());
            }
            for (header, content) in frames {
                context.send(stream, self.process, Message::Frame(Frame { header, content }));
            }
            if self.job.is_closing() {
                lane.has_ended_sending = true;
                context.network.end_sending(stream, self.process, context.agenda);
            }
        }
    }

    fn tick(&mut self, context: &mut Context<'_>) {
        let now = context.instant();
        for index in 0..self.lanes.len() {
            let silence = self.lanes[index].liveness.silence(now);
            if self.job.resumes_after(silence) {
                let patience = self.job.tries(StreamEnd::PathFailed).unwrap_or_default();
                self.resume(index, BrokenPath::Somewhere, patience, context);
            }
        }
        if !self.job.watches_hubs() {
            return;
        }
        let rules = self.rules();
        for index in 0..self.lanes.len() {
            let lane = &mut self.lanes[index];
            if !matches!(lane.state, LaneState::Open) {
                continue;
            }
            if let Some(LivenessChange::Dead(silence)) = lane.liveness.check(now, &rules) {
                if self.plan.resuming.has_standbys {
                    let patience = self.job.tries(StreamEnd::PathFailed).unwrap_or_default();
                    self.resume(index, BrokenPath::Somewhere, patience, context);
                    continue;
                }
                let hub = lane.hub;
                let what = format!("it has not heard {hub:?} for {} s", silence.as_secs_f64());
                let cause = self.loss(hub, what, Some(format!("{hub:?}")));
                return self.give_up(cause, context);
            }
            if lane.liveness.is_heartbeat_due(now, &rules) {
                lane.control.push_back((Header::bare(Operation::Heartbeat), Content::Nothing));
            }
        }
    }

    fn cause(&self, error: String, lost_hub: Option<String>) -> FailureCause<String> {
        let announced =
            Failure { rank: Some(self.rank), message: format!("rank {} gave up: {error}", self.rank) };
        FailureCause {
            error: format!("rank {}: {error}", self.rank),
            announced,
            lost_hub: lost_hub.map(Into::into),
        }
    }

    /// The cause that a hub is lost or cannot be reached, and has not said why. The manager will hear of it.
    fn loss(&mut self, hub: Process, what: String, closes: Option<String>) -> FailureCause<String> {
        let cause = self.cause(what, closes);
        self.lost_hubs.push((cause.error.clone(), hub));
        cause
    }

    fn give_up(&mut self, cause: FailureCause<String>, context: &mut Context<'_>) {
        if let Some(announcement) = self.job.give_up(cause, context.instant()) {
            self.announce(announcement, context);
        }
    }

    /// Sends the reason why this worker cannot go on, and closes the streams of the hub that is lost.
    fn announce(&mut self, announcement: Announcement, context: &mut Context<'_>) {
        for index in 0..self.lanes.len() {
            let is_lost =
                announcement.lost_hub.as_deref() == Some(format!("{:?}", self.lanes[index].hub).as_str());
            // A stream that is not open cannot carry the reason.
            if is_lost || !matches!(self.lanes[index].state, LaneState::Open) {
                self.close_lane(index, context);
            }
        }
        self.queue_last(&Header::bare(Operation::Failure), &Content::Failure(announcement.announced));
    }

    /// Sends a last message on every stream instead of the chunks that wait.
    fn queue_last(&mut self, header: &Header, content: &Content) {
        for lane in &mut self.lanes {
            lane.ready.clear();
            lane.control.push_back((*header, content.clone()));
        }
    }
}

/// What a worker that has requested nothing has under way.
fn requests(plan: &JobPlan) -> Requests {
    let keys = plan.keys as usize;
    Requests::new(plan.map.clone(), vec![Dtype::F32; keys], vec![Codec::F32; keys])
}
