//! The I/O thread: one loop over all streams of a job.

mod moving;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::limits::RESUME_S;
use paramhub_core::wire::{Failure, Release};
use paramhub_transport::{Events, Interest, Poller, ReceiveError, Scratch, Stream, Waker};

use crate::desk::Desk;
use crate::error::{WorkerError, panic_message};
use crate::handle::become_io_thread;
use crate::inbound::{Fault, Inbound};
use crate::inbox::{Change, Command};
use crate::lane::{Control, Lane};
pub(crate) use moving::Moving;

/// Bytes one stream may take or give before the others have their turn.
const TURN_BYTES: usize = 1 << 20;
/// When a stream ends, how long the others may still tell why: a hub that fails a job closes its streams one by one.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long the farewell may take: hubs close their end once they have read it.
const FAREWELL: Duration = Duration::from_secs(2);
/// The waker's token; a lane's is its position.
const WAKER: u64 = u64::MAX;

/// How long the farewell may take where a stream may have to be opened again for it.
const LONG_FAREWELL: Duration = Duration::from_secs(RESUME_S + 5);

/// What the I/O thread works with.
pub(crate) struct Engine {
    desk: Desk,
    lanes: Vec<Lane>,
    /// Of every route that has chunks.
    lane_of: Vec<Option<u16>>,
    poller: Poller,
    waker: Waker,
    scratch: Scratch,
    /// Taken from the inbox, not begun.
    commands: VecDeque<Command>,
    phase: Phase,
    /// Of a job whose streams go on another way.
    moving: Option<Moving>,
    heartbeat: Duration,
    dead_after: Duration,
    spin: Duration,
    /// The rank in whose process the hubs run, for errors.
    hub_rank: Option<u32>,
    last_turn: Instant,
}

enum Phase {
    Running,
    /// A stream ended; others may still tell why.
    Doomed {
        error: WorkerError,
        deadline: Instant,
    },
    /// Leaving as soon as nothing is under way.
    Leaving {
        deadline: Instant,
    },
    /// Nothing is under way: the farewell leaves, then hubs close.
    Parting {
        deadline: Instant,
        outcome: Result<(), WorkerError>,
    },
}

/// Timing of an [`Engine`].
pub(crate) struct Pace {
    pub(crate) heartbeat: Duration,
    pub(crate) dead_after: Duration,
    pub(crate) spin: Duration,
    pub(crate) hub_rank: Option<u32>,
    pub(crate) scratch_bytes: usize,
}

impl Engine {
    /// Over streams whose handshake is over.
    pub(crate) fn new(
        desk: Desk,
        lanes: Vec<Lane>,
        waker: Waker,
        pace: &Pace,
        moving: Option<Moving>,
    ) -> std::io::Result<Self> {
        let poller = Poller::new()?;
        poller.add(&waker, WAKER, Interest::READABLE)?;
        let mut lane_of = vec![None; desk.placement.routes().len()];
        for (index, lane) in lanes.iter().enumerate() {
            poller.add(&lane.stream, index as u64, Interest::READABLE)?;
            lane_of[usize::from(lane.route)] = Some(index as u16);
        }
        Ok(Engine {
            desk,
            lanes,
            lane_of,
            poller,
            waker,
            scratch: Scratch::new(pace.scratch_bytes),
            commands: VecDeque::with_capacity(64),
            phase: Phase::Running,
            moving,
            heartbeat: pace.heartbeat,
            dead_after: pace.dead_after,
            spin: pace.spin,
            hub_rank: pace.hub_rank,
            last_turn: Instant::now(),
        })
    }

    /// Serves the job until it is left or fails; then every request under way has been ended.
    pub(crate) fn run(mut self) -> Result<(), WorkerError> {
        become_io_thread();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.serve())).unwrap_or_else(|panic| {
            let who = self.desk.shared.who.clone();
            Err(WorkerError::Internal { who, message: panic_message(&*panic) })
        });
        let outcome = outcome.map_err(|error| error.with_hub_rank(self.hub_rank));
        let shared = Arc::clone(&self.desk.shared);
        let reason = outcome.clone().err().unwrap_or_else(|| WorkerError::Left { who: shared.who.clone() });
        let queued = shared.inbox.close(&reason);
        // Hang up first, so that the hubs learn of it before any callback runs.
        self.lanes.clear();
        self.desk.fail_all(&reason);
        for command in self.commands.drain(..).chain(queued) {
            let ticket = match command {
                Command::Request { key, ticket, .. } => {
                    shared.steps.release(key);
                    ticket
                }
                Command::Factors { block, tickets, .. } => {
                    let (weight, bias) = *tickets;
                    shared.blocks[block].keys().for_each(|key| shared.steps.release(key));
                    let _ = bias.map(|bias| bias.finish(Err(reason.clone())));
                    weight
                }
                Command::AwaitNorm { ticket, .. } => ticket,
                Command::Retune(_)
                | Command::Release { .. }
                | Command::Leave { .. }
                | Command::GiveUp { .. } => {
                    continue;
                }
            };
            let _ = ticket.finish(Err(reason.clone()));
        }
        outcome
    }

    fn serve(&mut self) -> Result<(), WorkerError> {
        let mut events = Events::with_capacity(256);
        let mut next_tick = Instant::now();
        loop {
            let now = Instant::now();
            self.forgive_own_absence(now);
            if now >= next_tick {
                self.beat(now)?;
                next_tick = now + self.heartbeat / 4;
            }
            if let Some(outcome) = self.progress(now) {
                return outcome;
            }
            let is_restless = self.lanes.iter().any(Lane::is_restless);
            let timeout = match is_restless && !matches!(self.phase, Phase::Doomed { .. }) {
                true => Duration::ZERO,
                false => self.wake_at(next_tick).saturating_duration_since(now),
            };
            self.poller
                .wait_spinning(&mut events, self.spin, Some(timeout))
                .map_err(|error| self.internal(&error))?;
            let now = Instant::now();
            self.forgive_own_absence(now);
            for event in events.iter() {
                if event.token == WAKER {
                    self.waker.drain();
                    continue;
                }
                let lane = event.token as usize;
                // Of a stream that is being replaced an event may still be among these.
                if event.readable && !self.lanes[lane].closed && !self.lanes[lane].is_moving {
                    self.receive(lane, now)?;
                }
                if event.writable || self.lanes[lane].stream.is_shm() {
                    self.send(lane, now)?;
                }
            }
            for lane in 0..self.lanes.len() {
                if self.lanes[lane].is_restless() {
                    if self.lanes[lane].has_more {
                        self.receive(lane, now)?;
                    }
                    self.send(lane, now)?;
                }
            }
            self.hear_news(now)?;
            self.take_commands(now)?;
        }
    }

    /// Begins what user threads asked for, in order.
    fn take_commands(&mut self, now: Instant) -> Result<(), WorkerError> {
        if matches!(self.phase, Phase::Leaving { .. }) {
            // What is under way would wait in vain for an interface that is down.
            self.desk.shared.inbox.take(&mut self.commands);
            let given_up = self.commands.iter().find_map(|command| match command {
                Command::GiveUp { error, told } => Some((error.clone(), told.clone())),
                _ => None,
            });
            if let Some((error, told)) = given_up {
                self.give_up(error, &told, now);
            }
            return Ok(());
        }
        if !matches!(self.phase, Phase::Running) {
            // What comes after a farewell or a broken stream ends with the job.
            return Ok(());
        }
        self.desk.shared.inbox.take(&mut self.commands);
        while let Some(command) = self.commands.pop_front() {
            match command {
                Command::Request { key, request, step, ticket } => {
                    for chunk in self.desk.begin(key, request, step, ticket) {
                        let (route, slot) =
                            self.desk.placement.locate(chunk).expect("every chunk has a place");
                        let lane = self.lane_of[usize::from(route)].expect("a route with chunks has a lane");
                        self.lanes[usize::from(lane)].ask(slot);
                    }
                }
                Command::Factors { block, samples, step, tickets } => {
                    let chunk = self.desk.begin_block(block, samples, step, *tickets);
                    let (route, slot) = self.desk.placement.locate(chunk).expect("every chunk has a place");
                    let lane = self.lane_of[usize::from(route)].expect("a route with chunks has a lane");
                    self.lanes[usize::from(lane)].ask(slot);
                }
                Command::Retune(change) => {
                    if !self.lanes.iter().all(Lane::has_room_for_retune) {
                        self.commands.push_front(Command::Retune(change));
                        break;
                    }
                    let Change { group, first_step, hyperparameters } = change;
                    let wire: Arc<[u8]> = hyperparameters.to_wire().as_slice().into();
                    if let Some(moving) = &mut self.moving {
                        moving.retunes.say(group, first_step, Arc::clone(&wire));
                    }
                    for lane in &mut self.lanes {
                        lane.say(Control::Retune { group, first_step, wire: Arc::clone(&wire) });
                    }
                    self.desk.shared.inbox.retune_taken();
                }
                Command::AwaitNorm { step, ticket } => {
                    self.desk.await_norm(step, ticket).map_err(|message| {
                        let who = self.desk.shared.who.clone();
                        WorkerError::Callback { who, message }
                    })?;
                }
                Command::Release { step, factor } => self.release(step, factor),
                Command::GiveUp { error, told } => {
                    self.give_up(error, &told, now);
                    break;
                }
                Command::Leave { deadline } => {
                    self.phase = Phase::Leaving { deadline };
                    break;
                }
            }
        }
        self.send_ready(now)
    }

    /// Lets every hub update the step it holds, ahead of what else is to be sent.
    fn release(&mut self, step: u32, factor: f32) {
        let wire = Release(factor).encode();
        for lane in &mut self.lanes {
            lane.say(Control::Release { step, wire });
        }
    }

    /// Sends on every stream that has something and room.
    fn send_ready(&mut self, now: Instant) -> Result<(), WorkerError> {
        for lane in 0..self.lanes.len() {
            // One that is polled for room is full: its turn comes when it has some.
            if !self.lanes[lane].polls_writable && self.lanes[lane].has_work() {
                self.send(lane, now)?;
            }
        }
        Ok(())
    }

    fn send(&mut self, index: usize, now: Instant) -> Result<(), WorkerError> {
        let lane = &mut self.lanes[index];
        if lane.has_work() && !matches!(self.phase, Phase::Doomed { .. }) {
            match lane.pump(&mut self.desk, TURN_BYTES) {
                Ok(0) => {}
                Ok(bytes) => {
                    lane.last_sent = now;
                    self.desk.shared.counters.sent(bytes);
                }
                Err(error) if self.is_cut(index, &error) => {
                    self.cut(index, None, error.to_string())?;
                }
                Err(error) => {
                    // What the hub said before it went is still to be read.
                    self.lanes[index].deaf = true;
                    self.lose(index, &error.to_string(), now);
                }
            }
        }
        let lane = &mut self.lanes[index];
        if matches!(self.phase, Phase::Parting { .. }) && lane.may_end() {
            lane.deaf = true;
            // A stream that cannot even be ended has ended.
            let _ = lane.stream.end_sending();
        }
        self.poll_lane(index)
    }

    /// Polls a lane for room if and only if it has something to send.
    fn poll_lane(&mut self, index: usize) -> Result<(), WorkerError> {
        let lane = &mut self.lanes[index];
        let wanted = lane.has_work() && !matches!(self.phase, Phase::Doomed { .. });
        if lane.closed || lane.is_moving || wanted == lane.polls_writable {
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
        let Engine { desk, lanes, scratch, .. } = self;
        let lane = &mut lanes[index];
        let before = lane.stream.bytes_received();
        let mut inbound = Inbound { desk, route: lane.route, lane: index, hub: &lane.hub };
        let received = lane.stream.receive(&mut inbound, scratch, TURN_BYTES);
        if lane.stream.bytes_received() > before {
            lane.last_heard = now;
            lane.retired = None;
        }
        lane.has_more = matches!(&received, Ok(received) if received.more && !received.closed);
        self.desk.count_received();
        if let Some((step, factor)) = self.desk.take_release() {
            self.release(step, factor);
            self.send_ready(now)?;
        }
        match received {
            Ok(received) if !received.closed => Ok(()),
            Ok(_) => self.end_lane(index, "it closed the connection", now),
            Err(ReceiveError::Stream(error)) if self.is_cut(index, &error) => {
                self.cut(index, None, error.to_string())
            }
            Err(ReceiveError::Stream(error)) => self.end_lane(index, &error.to_string(), now),
            Err(ReceiveError::Frame(error)) => self.blame(index, Fault::Offence(error.to_string()), now),
            Err(ReceiveError::Sink(fault)) => self.blame(index, fault, now),
        }
    }

    /// Nothing more will come from a stream.
    fn end_lane(&mut self, index: usize, reason: &str, now: Instant) -> Result<(), WorkerError> {
        let lane = &mut self.lanes[index];
        lane.closed = true;
        lane.deaf = true;
        let removed = self.poller.remove(&lane.stream);
        self.lose(index, reason, now);
        removed.map_err(|error| self.internal(&error))
    }

    /// A stream broke: the job fails unless it is over, but not before the other streams had a chance to say why.
    fn lose(&mut self, index: usize, reason: &str, now: Instant) {
        if matches!(self.phase, Phase::Running | Phase::Leaving { .. }) {
            let (who, hub) = (self.desk.shared.who.clone(), Arc::clone(&self.lanes[index].hub));
            let error = WorkerError::Lost { who, hub, rank: None, reason: reason.into() };
            self.phase = Phase::Doomed { error, deadline: now + LAST_WORDS };
        }
    }

    fn blame(&mut self, index: usize, fault: Fault, now: Instant) -> Result<(), WorkerError> {
        let (who, hub) = (self.desk.shared.who.clone(), Arc::clone(&self.lanes[index].hub));
        Err(match fault {
            Fault::Callback(message) => WorkerError::Callback { who, message },
            // All was answered; what befalls the job now is the others' business.
            _ if matches!(self.phase, Phase::Parting { .. }) => {
                return self.end_lane(index, "the job was left", now);
            }
            Fault::Failure(failure) => {
                let message = failure.message.into();
                WorkerError::Failed { who, hub, culprit: failure.rank, message }
            }
            Fault::Offence(reason) => WorkerError::Protocol { who, hub, reason: reason.into() },
        })
    }

    /// Sends heartbeats where nothing else was sent, and fails the job if a hub has been silent for too long.
    fn beat(&mut self, now: Instant) -> Result<(), WorkerError> {
        if self.moving.is_some() {
            self.move_silent(now)?;
        }
        if matches!(self.phase, Phase::Doomed { .. } | Phase::Parting { .. }) {
            return Ok(());
        }
        for index in 0..self.lanes.len() {
            let lane = &mut self.lanes[index];
            if lane.is_moving {
                continue;
            }
            let silent = now.saturating_duration_since(lane.last_heard);
            if silent > self.dead_after {
                let (who, hub) = (self.desk.shared.who.clone(), Arc::clone(&lane.hub));
                let error = WorkerError::Silent { who, hub, rank: None, seconds: silent.as_secs_f64() };
                return self.give_up_hub(error, now);
            }
            if !lane.has_work() && now.saturating_duration_since(lane.last_sent) >= self.heartbeat {
                lane.say(Control::Heartbeat);
                self.send(index, now)?;
            }
        }
        Ok(())
    }

    /// While this process was stopped, the machine asleep or a callback slow, nobody could be heard: that is no silence of
    /// the hubs. Called around everything that takes time, above all before silence is judged.
    fn forgive_own_absence(&mut self, now: Instant) {
        let absence = now.saturating_duration_since(self.last_turn);
        if absence > self.heartbeat * 2 {
            for lane in &mut self.lanes {
                lane.last_heard += absence;
            }
        }
        self.last_turn = now;
    }

    /// Moves on to the next phase where it is due; `Some` when the job is over.
    fn progress(&mut self, now: Instant) -> Option<Result<(), WorkerError>> {
        if let Phase::Leaving { deadline } = self.phase {
            let underway = self.desk.underway();
            if underway == 0 {
                self.part(now, Ok(()));
            } else if now >= deadline {
                let outcome = Err(self.left_early());
                self.part(now, outcome);
            }
        }
        if let Phase::Doomed { error, deadline } = &self.phase {
            let (error, is_over) = (error.clone(), now >= *deadline || self.are_all_closed());
            return is_over.then(|| self.give_up_hub(error, now).err()).flatten().map(Err);
        }
        match &self.phase {
            Phase::Parting { deadline, outcome } => {
                let over = now >= *deadline || self.are_all_closed();
                over.then(|| outcome.clone())
            }
            Phase::Running | Phase::Leaving { .. } | Phase::Doomed { .. } => None,
        }
    }

    /// Says farewell on every stream, after whatever frame has begun there.
    fn part(&mut self, now: Instant, outcome: Result<(), WorkerError>) {
        let farewell = if self.moving.is_some() { LONG_FAREWELL } else { FAREWELL };
        self.phase = Phase::Parting { deadline: now + farewell, outcome };
        for index in 0..self.lanes.len() {
            self.lanes[index].forget_chunks();
            self.lanes[index].say(Control::Leave);
            // A stream that breaks now is one less to take leave of.
            let _ = self.send(index, now);
        }
    }

    /// A hub is lost, and nobody has said why. If there are others they are told before this worker goes, or the other ranks
    /// would hear from them that it was this one who is lost.
    fn give_up_hub(&mut self, error: WorkerError, now: Instant) -> Result<(), WorkerError> {
        let (hub, message) = match &error {
            WorkerError::Lost { hub, reason, .. } => (hub, format!("it lost the hub at {hub}: {reason}")),
            WorkerError::Silent { hub, seconds, .. } => {
                (hub, format!("it has not heard the hub at {hub} for {seconds:.0} s"))
            }
            _ => return Err(error),
        };
        for lane in self.lanes.iter_mut().filter(|lane| lane.hub == *hub && !lane.closed) {
            lane.closed = true;
            lane.deaf = true;
            // Fails only if the descriptor is not in the set, and then there is nothing to take out.
            let _ = self.poller.remove(&lane.stream);
        }
        if self.are_all_closed() {
            return Err(error);
        }
        let told = Failure { rank: Some(self.desk.shared.who.rank), message };
        self.give_up(error, &told, now);
        Ok(())
    }

    fn are_all_closed(&self) -> bool {
        self.lanes.iter().all(|lane| lane.closed)
    }

    /// Ends with `error`, once the hubs that can still hear it have been told why, and with them the other ranks.
    fn give_up(&mut self, error: WorkerError, told: &Failure, now: Instant) {
        self.phase = Phase::Parting { deadline: now + LAST_WORDS, outcome: Err(error) };
        let wire: Arc<[u8]> = told.encode().into();
        for index in 0..self.lanes.len() {
            if self.lanes[index].closed {
                continue;
            }
            self.lanes[index].forget_chunks();
            self.lanes[index].say(Control::GiveUp(Arc::clone(&wire)));
            // The other streams tell it as well.
            let _ = self.send(index, now);
        }
    }

    fn left_early(&self) -> WorkerError {
        let shared = &self.desk.shared;
        let keys = shared.settings.keys.keys();
        let mut names: Vec<String> = self
            .desk
            .requests
            .underway()
            .take(4)
            .map(|key| format!("`{}`", keys[key as usize].name))
            .collect();
        if self.desk.underway() > names.len() {
            names.push(format!("{} more", self.desk.underway() - names.len()));
        }
        WorkerError::LeftEarly { who: shared.who.clone(), keys: names.join(", ").into() }
    }

    fn wake_at(&self, next_tick: Instant) -> Instant {
        match self.phase {
            Phase::Running => next_tick,
            Phase::Doomed { deadline, .. }
            | Phase::Leaving { deadline }
            | Phase::Parting { deadline, .. } => next_tick.min(deadline),
        }
    }

    fn internal(&self, error: &std::io::Error) -> WorkerError {
        let who = self.desk.shared.who.clone();
        WorkerError::System { who, what: "wait for its streams", reason: error.to_string().into() }
    }
}
