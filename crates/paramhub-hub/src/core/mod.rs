//! A core: one thread that owns chunks end to end, their streams, sums, optimizer state and answers (PHub section 3.2.4).
//!
//! The thread shares nothing with other cores. It runs to completion: every frame that a read brought is summed,
//! optimised and answered before the next stream gets its turn.

mod arenas;
mod buffer;
mod farewell;
mod fault;
mod lane;
mod mailbox;
mod outbox;
mod plan;
mod ports;
mod shard;
mod table;

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::placement::RouteId;
use paramhub_core::wire::{Failure, Header, Notice, Operation};
use paramhub_transport::{Events, Interest, Poller, Scratch};

use farewell::Farewells;
use fault::Fault;
use lane::{Arrival, Flushed, Lane, Pulse, Taken};
use table::Table;

pub(crate) use mailbox::{CoreCommand, CoreEvent, CoreHandle, Mailbox, mailbox};
pub(crate) use plan::{ShardPlan, memory_bytes};
pub(crate) use ports::{Neighbour, Ports, Side};
use shard::Shard;

/// How often a core looks at the clock for heartbeats, silent workers and counters.
const TICK: Duration = Duration::from_millis(250);
/// Readiness reports taken at once.
const EVENTS: usize = 256;
/// Turns a worker may be left asleep over an answer while the core serves others.
const UNANNOUNCED_TURNS: u32 = 8;
/// Elements of a released step that are updated before the streams have their turn: as many as one of them brings in its.
const RELEASE_TURN_ELEMENTS: usize = 64 << 10;
const WAKER: u64 = u64::MAX;

/// The state of a core's thread.
pub(crate) struct Core {
    poller: Poller,
    mailbox: Mailbox,
    spin: Duration,
    scratch: Scratch,
    shards: Table<Hosted>,
    shard_of: HashMap<(Namespace, RouteId), usize>,
    lanes: Table<Lane>,
    /// Lanes over shared memory whose turn ended before their work did, for the next turn.
    again: Vec<u64>,
    /// Those of the turn before.
    due: Vec<u64>,
    /// Shards with chunks of a released step to be updated.
    releasing: Vec<usize>,
    /// Lanes whose workers may sleep over something sent.
    unannounced: Vec<u64>,
    turns_unannounced: u32,
    farewells: Farewells,
    busy: Duration,
    idle: Duration,
    last_tick: Instant,
}

/// A shard and the lanes of its ports.
struct Hosted {
    shard: Shard,
    route: RouteId,
    lane_of: Vec<Option<u64>>,
    ending: bool,
}

impl Core {
    /// It looks for work for `spin` before it sleeps.
    pub(crate) fn new(mailbox: Mailbox, spin: Duration) -> io::Result<Self> {
        let poller = Poller::new()?;
        poller.add(&mailbox.waker, WAKER, Interest::READABLE)?;
        Ok(Core {
            poller,
            mailbox,
            spin,
            scratch: Scratch::default(),
            shards: Table::default(),
            shard_of: HashMap::new(),
            lanes: Table::default(),
            again: Vec::new(),
            due: Vec::new(),
            releasing: Vec::new(),
            unannounced: Vec::new(),
            turns_unannounced: 0,
            farewells: Farewells::default(),
            busy: Duration::ZERO,
            idle: Duration::ZERO,
            last_tick: Instant::now(),
        })
    }

    /// Serves until told to stop.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(EVENTS);
        let mut turn_ended = Instant::now();
        loop {
            // A TCP lane whose budget ran out before its bytes did is reported again, behind the others; what lies in
            // shared memory is reported once.
            let is_idle = self.again.is_empty() && self.unannounced.is_empty() && self.releasing.is_empty();
            let timeout = match is_idle {
                true => (self.last_tick + TICK).saturating_duration_since(turn_ended),
                false => Duration::ZERO,
            };
            self.poller.wait_spinning(&mut events, self.spin, Some(timeout))?;
            let now = Instant::now();
            self.idle += now - turn_ended;
            std::mem::swap(&mut self.again, &mut self.due);
            // Others' work must not keep a worker asleep over its answer for long.
            self.turns_unannounced += u32::from(!self.unannounced.is_empty());
            let has_work = !events.is_empty() || !self.due.is_empty() || !self.releasing.is_empty();
            if !has_work || self.turns_unannounced > UNANNOUNCED_TURNS {
                self.announce(now);
            }
            for event in events.iter() {
                if event.token == WAKER {
                    self.mailbox.waker.drain();
                    if self.obey(now) {
                        return Ok(());
                    }
                    continue;
                }
                // What a worker said before its stream broke, such as its goodbye, is heard before the break is.
                if event.readable {
                    self.receive(event.token, now);
                }
                if event.writable || self.lanes.at_mut(event.token).is_some_and(|lane| lane.waits_for_bell())
                {
                    self.flush(event.token, now);
                }
            }
            while let Some(token) = self.due.pop() {
                self.receive(token, now);
                self.flush(token, now);
            }
            self.release(now);
            if now - self.last_tick >= TICK {
                self.tick(now);
            }
            turn_ended = Instant::now();
            self.busy += turn_ended - now;
        }
    }

    /// Takes what a stream has brought and sends what that set free.
    fn receive(&mut self, token: u64, now: Instant) {
        // A token of a lane that is gone may still be among this turn's events.
        let Some(lane) = self.lanes.at_mut(token) else { return };
        let hosted = self.shards.index_mut(lane.shard);
        let left_before = hosted.shard.has_left(lane.port);
        let taken = lane.receive(&mut hosted.shard, &mut self.scratch, now);
        let (shard, port) = (lane.shard, lane.port);
        if hosted.shard.is_releasing() && !self.releasing.contains(&shard) {
            self.releasing.push(shard);
        }
        if hosted.shard.has_left(port) && !left_before {
            let (namespace, route) = (hosted.shard.plan().namespace, hosted.route);
            self.mailbox.tell(CoreEvent::Left { namespace, route, port });
        }
        self.answer(shard, now);
        match taken {
            Ok(Taken::Closed) => self.drop_lane(token),
            Ok(Taken::Open) => {}
            Ok(Taken::More) => self.come_back(token),
            Err(fault) => self.fault(token, &fault, now),
        }
    }

    /// Updates some chunks of every released step and sends what that set free.
    fn release(&mut self, now: Instant) {
        for position in (0..self.releasing.len()).rev() {
            let shard = self.releasing[position];
            if self.is_releasing(shard) {
                self.shards.index_mut(shard).shard.update_released(RELEASE_TURN_ELEMENTS);
                self.answer(shard, now);
            }
            if !self.is_releasing(shard) {
                self.releasing.swap_remove(position);
            }
        }
    }

    /// Whether the shard at this place lives and has chunks to update.
    fn is_releasing(&self, shard: usize) -> bool {
        self.shards.contains_index(shard) && {
            let hosted = self.shards.index(shard);
            !hosted.ending && hosted.shard.is_releasing()
        }
    }

    /// Sends by every port of a shard that has something new. One that takes no more for now has its turn when the poller
    /// says that it does.
    fn answer(&mut self, shard: usize, now: Instant) {
        while let Some(port) = self.shards.index_mut(shard).shard.dirty.pop_first() {
            if let Some(token) = self.shards.index_mut(shard).lane_of[port as usize]
                && self.lanes.at_mut(token).is_some_and(|lane| !lane.waits_writable)
            {
                self.flush(token, now);
            }
        }
    }

    fn flush(&mut self, token: u64, now: Instant) {
        let Some(lane) = self.lanes.at_mut(token) else { return };
        let hosted = self.shards.index_mut(lane.shard);
        match lane.flush(&mut hosted.shard, now) {
            Ok(flushed) => {
                if flushed == Flushed::All && hosted.shard.says_farewell(lane.port) {
                    let (namespace, route, port) = (hosted.shard.plan().namespace, hosted.route, lane.port);
                    self.mailbox.tell(CoreEvent::Left { namespace, route, port });
                }
                let (unfinished, is_shm) = (flushed != Flushed::All, lane.is_shm());
                if lane.is_unannounced() && !self.unannounced.contains(&token) {
                    self.unannounced.push(token);
                }
                if unfinished != lane.waits_writable {
                    lane.waits_writable = unfinished;
                    let interest = lane.interest();
                    if is_shm {
                        // It is told of room by the bell it always listens to.
                    } else if let Err(error) = self.poller.modify(&*lane, token, interest) {
                        return self.fault(token, &Fault::Lost(error.to_string()), now);
                    }
                }
                if is_shm && flushed == Flushed::Some {
                    self.come_back(token);
                }
            }
            Err(error) => self.fault(token, &Fault::Lost(error.to_string()), now),
        }
    }

    /// There is nothing else to do: wakes the workers that were left asleep over an answer.
    fn announce(&mut self, now: Instant) {
        self.turns_unannounced = 0;
        while let Some(token) = self.unannounced.pop() {
            if let Some(Err(error)) = self.lanes.at_mut(token).map(Lane::announce) {
                self.fault(token, &Fault::Lost(error.to_string()), now);
            }
        }
    }

    fn come_back(&mut self, token: u64) {
        if !self.again.contains(&token) {
            self.again.push(token);
        }
    }

    /// A stream cannot go on: the steward decides about the job, and this stream waits for the reason.
    fn fault(&mut self, token: u64, fault: &Fault, now: Instant) {
        let Some(lane) = self.lanes.at_mut(token) else { return };
        let port = lane.port;
        let hosted = self.shards.index_mut(lane.shard);
        let told_before = lane.is_draining();
        let leaves_quietly = hosted.shard.has_left(port) && matches!(fault, Fault::Lost(_));
        let plan = hosted.shard.plan();
        let namespace = plan.namespace;
        lane.mute(now);
        if !told_before && !leaves_quietly && !hosted.ending {
            let culprit = fault.culprit(plan.ports.neighbour(port));
            let message = fault.message(&plan.name(culprit));
            self.mailbox.tell(CoreEvent::Faulted { namespace, culprit, message });
        }
        if matches!(fault, Fault::Lost(_)) {
            self.drop_lane(token);
        }
    }

    fn drop_lane(&mut self, token: u64) {
        let Some(lane) = self.lanes.remove(token) else { return };
        // Fails only if the descriptor is not in the set, and then there is nothing to take out.
        let _ = self.poller.remove(&lane);
        let hosted = self.shards.index_mut(lane.shard);
        hosted.lane_of[lane.port as usize] = None;
        self.close_if_over(lane.shard);
    }

    fn close_if_over(&mut self, index: usize) {
        let hosted = self.shards.index_mut(index);
        if !hosted.ending || hosted.lane_of.iter().any(Option::is_some) {
            return;
        }
        let (namespace, route) = (hosted.shard.plan().namespace, hosted.route);
        let counters = hosted.shard.counters();
        self.shards.remove_index(index);
        self.shard_of.remove(&(namespace, route));
        // So that a job shorter than a tick has been counted when it is over.
        self.publish();
        self.mailbox.tell(CoreEvent::Closed { namespace, counters });
    }

    /// Does what the mailbox asks; `true` to stop.
    fn obey(&mut self, now: Instant) -> bool {
        while let Ok(command) = self.mailbox.commands.try_recv() {
            match command {
                CoreCommand::Open(plan) => self.open(*plan),
                CoreCommand::Adopt { namespace, route, port, socket, memory } => {
                    self.adopt(namespace, route, port, Arrival { socket, memory }, now);
                }
                CoreCommand::Notify { namespace, rank, notice } => self.notify(namespace, rank, &notice, now),
                CoreCommand::End { namespace, failure } => self.end(namespace, failure.as_ref(), now),
                CoreCommand::Stop => return true,
            }
        }
        false
    }

    fn open(&mut self, plan: ShardPlan) {
        let (namespace, route, ports) = (plan.namespace, plan.route, plan.ports.len() as usize);
        let missing_bytes = match Shard::new(plan) {
            Ok(shard) => {
                let hosted = Hosted { shard, route, lane_of: vec![None; ports], ending: false };
                let index = self.shards.insert_index(hosted);
                self.shard_of.insert((namespace, route), index);
                None
            }
            Err(missing) => Some(missing.bytes),
        };
        // So that whoever asks whether the hub holds anything is told from the beginning.
        self.publish();
        self.mailbox.tell(CoreEvent::Opened { namespace, missing_bytes });
    }

    fn adopt(&mut self, namespace: Namespace, route: RouteId, port: u32, arrival: Arrival, now: Instant) {
        let living =
            self.shard_of.get(&(namespace, route)).copied().filter(|&shard| !self.shards.index(shard).ending);
        let Some(shard) = living else {
            // The job ended while the stream's handshake was under way.
            return self.farewells.tell(namespace, arrival, now);
        };
        let hosted = self.shards.index_mut(shard);
        debug_assert!(hosted.lane_of[port as usize].is_none(), "a port is given once");
        let plan = hosted.shard.plan();
        let (frame_bytes_max, to) = (plan.frame_bytes_max(), plan.ports.side(port).from_there());
        let arenas = arrival.memory.as_ref().map(|memory| memory.arenas.clone());
        let added = arrival.connect(to, frame_bytes_max).and_then(|stream| {
            let lane = Lane::new(stream, shard, port, now);
            let token = self.lanes.insert(lane);
            let lane = self.lanes.at_mut(token).expect("it was just put in");
            let added = self.poller.add(&*lane, token, Interest::READABLE);
            if added.is_err() {
                self.lanes.remove(token);
            }
            added.map(|()| token)
        });
        match added {
            Ok(token) => {
                let hosted = self.shards.index_mut(shard);
                hosted.lane_of[port as usize] = Some(token);
                if let Some(arenas) = arenas {
                    hosted.shard.attach(port, arenas);
                }
                self.flush(token, now);
            }
            Err(error) => {
                let plan = self.shards.index(shard).shard.plan();
                let culprit = plan.ports.neighbour(port);
                let fault = Fault::Lost(format!("the hub cannot serve its stream: {error}"));
                let message = fault.message(&plan.name(culprit));
                self.mailbox.tell(CoreEvent::Faulted { namespace, culprit, message });
            }
        }
    }

    /// Tells a rank on one of its streams here.
    fn notify(&mut self, namespace: Namespace, rank: u32, notice: &Notice, now: Instant) {
        let here = self.shard_of.iter().filter(|((job, _), _)| *job == namespace).map(|(_, &index)| index);
        let lane = here.filter_map(|index| {
            let hosted = self.shards.index(index);
            let port = hosted.shard.plan().ports.of_rank(rank)?;
            hosted.lane_of[port as usize].map(|token| (index, port, token))
        });
        if let Some((shard, port, token)) = lane.into_iter().next() {
            let payload = notice.encode();
            let header = Header { length: payload.len() as u32, ..Header::bare(Operation::Notice) };
            self.shards.index_mut(shard).shard.outboxes[port as usize].message(header, payload);
            self.flush(token, now);
        }
    }

    fn end(&mut self, namespace: Namespace, failure: Option<&Failure>, now: Instant) {
        if let Some(failure) = failure {
            self.farewells.remember(namespace, failure.clone());
        }
        let here: Vec<usize> =
            self.shard_of.iter().filter(|((job, _), _)| *job == namespace).map(|(_, &index)| index).collect();
        for index in here {
            let hosted = self.shards.index_mut(index);
            hosted.ending = true;
            hosted.shard.free();
            let lanes: Vec<(usize, u64)> = hosted
                .lane_of
                .iter()
                .enumerate()
                .filter_map(|(port, lane)| lane.map(|lane| (port, lane)))
                .collect();
            for (port, token) in lanes {
                if let Some(failure) = failure {
                    let payload = failure.encode();
                    let header = Header { length: payload.len() as u32, ..Header::bare(Operation::Failure) };
                    self.shards.index_mut(index).shard.outboxes[port].message(header, payload);
                }
                if let Some(lane) = self.lanes.at_mut(token) {
                    lane.drain(now);
                }
                self.flush(token, now);
            }
            if self.shards.contains_index(index) {
                self.close_if_over(index);
            }
        }
    }

    /// Heartbeats, silent workers, streams that were given time to close, and counters.
    fn tick(&mut self, now: Instant) {
        let pause = (now - self.last_tick).saturating_sub(TICK * 4);
        self.last_tick = now;
        for token in self.lanes.tokens() {
            let Some(lane) = self.lanes.at_mut(token) else { continue };
            if !pause.is_zero() {
                lane.forgive(pause);
            }
            if lane.is_overdue(now) {
                self.drop_lane(token);
                continue;
            }
            let (port, index) = (lane.port, lane.shard);
            let hosted = self.shards.index_mut(index);
            let namespace = hosted.shard.plan().namespace;
            let dead_after = hosted.shard.plan().dead_after;
            let who = hosted.shard.plan().ports.neighbour(port);
            let pulse = if hosted.shard.has_left(port) { None } else { lane.pulse(now, dead_after) };
            if lane.wants_heartbeat(now, dead_after) && hosted.shard.outboxes[port as usize].is_empty() {
                hosted.shard.outboxes[port as usize].message(Header::bare(Operation::Heartbeat), Vec::new());
                self.flush(token, now);
            }
            match pulse {
                Some(Pulse::Silent(silence)) => {
                    let seconds = Some(silence.as_secs_f64());
                    self.mailbox.tell(CoreEvent::Silence { namespace, who, seconds });
                }
                Some(Pulse::HeardAgain) => {
                    self.mailbox.tell(CoreEvent::Silence { namespace, who, seconds: None });
                }
                Some(Pulse::Dead(silence)) => self.fault(token, &Fault::Silent(silence), now),
                None => {}
            }
        }
        self.farewells.let_go(now);
        self.mailbox.retry();
        self.publish();
    }

    fn publish(&mut self) {
        let mut report = self.mailbox.report.lock().expect("nobody panics while counting");
        report.time.busy_ns = self.busy.as_nanos() as u64;
        report.time.idle_ns = self.idle.as_nanos() as u64;
        report.jobs.clear();
        report.jobs.extend(
            self.shards.values().map(|hosted| (hosted.shard.plan().namespace, hosted.shard.counters())),
        );
    }
}
