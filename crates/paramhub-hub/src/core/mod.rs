//! A core: one thread that owns chunks end to end, their streams, sums, optimizer state and answers (PHub section 3.2.4).
//!
//! The thread shares nothing with other cores. It runs to completion: every frame that a read brought is summed,
//! optimised and answered before the next stream gets its turn. Whose that is follows from what each job has had.

mod arenas;
mod buffer;
mod deadlines;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod exercise;
mod farewell;
mod fault;
mod lane;
mod mailbox;
mod making;
mod outbox;
mod plan;
mod ports;
mod quantised;
mod restart;
mod restored;
mod resume;
mod room;
mod shard;
mod snapshot;
mod snapshots;
mod table;
mod tick;
mod turns;

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::placement::RouteId;
use paramhub_core::wire::{Header, Notice, Operation};
use paramhub_transport::{Events, Interest, Poller, Scratch};

use farewell::Farewells;
use fault::Fault;
use lane::{Arrival, Flushed, Lane, Taken};
use table::Table;
use turns::{Turns, Unit};

pub(crate) use mailbox::{Cause, CoreCommand, CoreEvent, CoreHandle, Mailbox, mailbox};
pub(crate) use plan::{ShardPlan, memory_bytes};
pub(crate) use ports::{Neighbour, Ports, Side};
pub(crate) use restart::panic_text;
pub(crate) use restored::Restored;
use shard::Shard;
pub(crate) use shard::{Absence, AwaitedNews, Late};
pub(crate) use snapshot::{Mark, Outcome, Snapshot, Wanted};

/// How often a core looks at the clock for heartbeats, silent workers and counters.
const TICK: Duration = Duration::from_millis(250);
/// Readiness reports taken at once.
const EVENTS: usize = 256;
/// Turns a worker may be left asleep over an answer while the core serves others.
const UNANNOUNCED_TURNS: u32 = 8;
/// Elements of a released step that are updated before the streams have their turn: as many as one of them brings in its.
const RELEASE_TURN_ELEMENTS: usize = 64 << 10;
/// How long jobs that share a core are served before the poller is asked who else has something to do: one or two turns of a
/// stream. A job that is alone is served all that the poller has reported.
const SLICE: Duration = Duration::from_micros(100);
/// Where many streams are ready, asking takes long: of the time that is served, one part in so many at most...
const SLICE_POLLS: u32 = 16;
/// ...unless others would wait longer than this for it.
const SLICE_MAX: Duration = Duration::from_millis(1);
const WAKER: u64 = u64::MAX;

/// The state of a core's thread.
pub(crate) struct Core {
    /// Its number at the hub.
    number: usize,
    poller: Poller,
    mailbox: Mailbox,
    spin: Duration,
    scratch: Scratch,
    shards: Table<Hosted>,
    shard_of: HashMap<(Namespace, RouteId), usize>,
    lanes: Table<Lane>,
    /// What is to be done, job by job.
    turns: Turns,
    /// Lanes whose workers may sleep over something sent.
    unannounced: Vec<u64>,
    turns_unannounced: u32,
    farewells: Farewells,
    /// Shards whose steps may end by time.
    timed: Vec<usize>,
    busy: Duration,
    idle: Duration,
    last_tick: Instant,
    /// Panics in a row while no job was here.
    panics_alone: u32,
    /// How long this thread has served, without the times in which it was not let run.
    awake: Duration,
}

/// A shard and the lanes of its ports.
struct Hosted {
    shard: Shard,
    route: RouteId,
    /// The job's number in [`Turns`].
    job: usize,
    lane_of: Vec<Option<u64>>,
    memory: Memory,
    /// The job is over.
    ending: bool,
    /// Chunks of a released step wait for their turn.
    releases: bool,
    /// Chunks wait to be copied for a snapshot.
    copies: bool,
    /// A gradient waits to be made of factors.
    makes: bool,
}

/// How far a shard's memory is taken, or given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    Opening,
    Open,
    Freeing,
    Freed,
}

impl Core {
    /// It looks for work for `spin` before it sleeps.
    pub(crate) fn new(number: usize, mailbox: Mailbox, spin: Duration) -> io::Result<Self> {
        let poller = Poller::new()?;
        poller.add(&mailbox.waker, WAKER, Interest::READABLE)?;
        Ok(Core {
            number,
            poller,
            mailbox,
            spin,
            scratch: Scratch::default(),
            shards: Table::default(),
            shard_of: HashMap::new(),
            lanes: Table::default(),
            turns: Turns::default(),
            unannounced: Vec::new(),
            turns_unannounced: 0,
            farewells: Farewells::default(),
            timed: Vec::new(),
            busy: Duration::ZERO,
            idle: Duration::ZERO,
            last_tick: Instant::now(),
            panics_alone: 0,
            awake: Duration::ZERO,
        })
    }

    /// Serves until told to stop.
    fn serve_until_stopped(&mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(EVENTS);
        let mut turn_ended = Some(Instant::now());
        while let Some(ended) = turn_ended {
            let patience = match self.turns.is_empty() && self.unannounced.is_empty() {
                true => self.wakes_at().saturating_duration_since(ended),
                false => Duration::ZERO,
            };
            turn_ended = self.turn(&mut events, ended, patience)?;
        }
        Ok(())
    }

    /// Asks the poller, which may wait for so long, and serves for a while what there is to do. Says when it was done, unless it was
    /// told to stop.
    fn turn(
        &mut self,
        events: &mut Events,
        last_ended: Instant,
        patience: Duration,
    ) -> io::Result<Option<Instant>> {
        let had_work = !self.turns.is_empty();
        self.poller.wait_spinning(events, self.spin, Some(patience))?;
        let now = Instant::now();
        let polled = now - last_ended;
        let slice = match had_work {
            true => (polled * SLICE_POLLS).clamp(SLICE, SLICE_MAX),
            false => SLICE,
        };
        match had_work {
            true => self.busy += polled,
            false => self.idle += polled,
        }
        let mut mail = false;
        for event in events.iter() {
            match event.token {
                WAKER => mail = true,
                token => self.due(token, event.readable, event.writable),
            }
        }
        self.announce(now);
        let mut begun = now;
        if mail {
            self.mailbox.waker.drain();
            if self.obey(now) {
                return Ok(None);
            }
            begun = Instant::now();
        }
        let mut turn_ended = self.serve(begun, slice);
        turn_ended = self.end_late(turn_ended);
        if turn_ended - self.last_tick >= TICK {
            self.tick(turn_ended);
            turn_ended = Instant::now();
        }
        self.busy += turn_ended - now;
        Ok(Some(turn_ended))
    }

    /// When the clock has something to do next.
    fn wakes_at(&self) -> Instant {
        let deadlines = self.timed.iter().filter_map(|&shard| self.shards.index(shard).shard.next_deadline());
        deadlines.fold(self.last_tick + TICK, Instant::min)
    }

    /// Ends steps that have had their time, some of each shard's, and says when it was done.
    fn end_late(&mut self, mut now: Instant) -> Instant {
        let mut position = 0;
        // Sending may end a job, whose shards then are not here any more.
        while let Some(&index) = self.timed.get(position) {
            position += 1;
            let hosted = self.shards.index_mut(index);
            if hosted.shard.next_deadline().is_none_or(|at| at > now) {
                continue;
            }
            let job = hosted.job;
            hosted.shard.end_late(now, RELEASE_TURN_ELEMENTS);
            self.answer(index, now);
            let done = Instant::now();
            self.turns.charge(job, done - now);
            now = done;
        }
        now
    }

    /// A stream has something to do, or something new to do.
    fn due(&mut self, token: u64, readable: bool, writable: bool) {
        // A token of a lane that is gone may still be among the events.
        let Some(lane) = self.lanes.at_mut(token) else { return };
        let waited = lane.due.is_any();
        lane.due.readable |= readable;
        lane.due.writable |= writable;
        if !waited && lane.due.is_any() {
            self.turns.add(self.shards.index(lane.shard).job, Unit::Lane(token));
        }
    }

    /// Does what waits, job by job, and says when it was done: all of it, or where others share the core, a slice. What is
    /// left waits for the next turn.
    fn serve(&mut self, begun: Instant, slice: Duration) -> Instant {
        let is_shared = self.turns.is_shared();
        let (mut now, mut served) = (begun, None);
        // What comes back for more has its turn after the poller has been asked for others.
        for _ in 0..self.turns.len() {
            let Some((job, unit)) = self.turns.next() else { break };
            match unit {
                Unit::Lane(token) => self.serve_lane(token, now),
                Unit::Release(shard) => self.release(shard, now),
                Unit::Copy(shard) => self.copy(shard),
                Unit::Make(shard) => self.make(shard, now),
                Unit::Memory(shard) => self.take_or_give_memory(shard),
            }
            served = Some(job);
            // The clock is read for each unit only where there is somebody to be fair to.
            if is_shared {
                let done = Instant::now();
                self.turns.charge(job, done - now);
                now = done;
                if now - begun >= slice {
                    break;
                }
            }
        }
        if let Some(job) = served
            && !is_shared
        {
            now = Instant::now();
            self.turns.charge(job, now - begun);
        }
        now
    }

    fn serve_lane(&mut self, token: u64, now: Instant) {
        let Some(lane) = self.lanes.at_mut(token) else { return };
        let due = std::mem::take(&mut lane.due);
        if lane.is_cut() {
            return;
        }
        // What a worker said before its stream broke, such as its goodbye, is heard before the break is.
        if due.readable {
            self.receive(token, now);
        }
        if due.writable || self.lanes.at_mut(token).is_some_and(|lane| lane.waits_for_bell()) {
            self.flush(token, now);
        }
    }

    /// Takes what a stream has brought and sends what that set free.
    fn receive(&mut self, token: u64, now: Instant) {
        let Some(lane) = self.lanes.at_mut(token) else { return };
        let hosted = self.shards.index_mut(lane.shard);
        let left_before = hosted.shard.has_left(lane.port);
        let taken = lane.receive(&mut hosted.shard, &mut self.scratch, now);
        let (shard, port) = (lane.shard, lane.port);
        if hosted.shard.is_releasing() && !std::mem::replace(&mut hosted.releases, true) {
            self.turns.add(hosted.job, Unit::Release(shard));
        }
        if hosted.shard.is_making() && !std::mem::replace(&mut hosted.makes, true) {
            self.turns.add(hosted.job, Unit::Make(shard));
        }
        if hosted.shard.has_left(port) && !left_before {
            let (namespace, route) = (hosted.shard.plan().namespace, hosted.route);
            self.mailbox.tell(CoreEvent::Left { namespace, route, port });
        }
        self.answer(shard, now);
        self.end_snapshot(shard);
        match taken {
            Ok(Taken::Closed) => self.drop_lane(token),
            Ok(Taken::Open) => {}
            Ok(Taken::Cut) => self.cut(token),
            // Shared memory reports it once.
            Ok(Taken::More) => self.due(token, true, true),
            Err(fault) => self.fault(token, &fault, now),
        }
    }

    /// Updates some chunks of a released step and sends what that set free.
    fn release(&mut self, shard: usize, now: Instant) {
        let hosted = self.shards.index_mut(shard);
        hosted.releases = false;
        if hosted.ending || !hosted.shard.is_releasing() {
            return;
        }
        hosted.shard.update_released(RELEASE_TURN_ELEMENTS);
        if hosted.shard.is_releasing() {
            hosted.releases = true;
            self.turns.add(hosted.job, Unit::Release(shard));
        }
        self.answer(shard, now);
        self.end_snapshot(shard);
    }

    /// Sends by every port of a shard that has something new. One that takes no more for now has its turn when the poller
    /// says that it does.
    fn answer(&mut self, shard: usize, now: Instant) {
        while let Some(port) = self.shards.index_mut(shard).shard.dirty.pop_first() {
            if let Some(token) = self.shards.index_mut(shard).lane_of[port as usize]
                && self.lanes.at_mut(token).is_some_and(|lane| !lane.waits_writable && !lane.is_cut())
            {
                self.flush(token, now);
            }
        }
    }

    fn flush(&mut self, token: u64, now: Instant) {
        let Some(lane) = self.lanes.at_mut(token).filter(|lane| !lane.is_cut()) else { return };
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
                    self.due(token, true, true);
                }
            }
            Err(error) if lane.may_be_resumed(&hosted.shard, &error) => self.cut(token),
            Err(error) => self.fault(token, &Fault::Lost(error.to_string()), now),
        }
    }

    /// Wakes the workers that were left asleep over an answer, if there is nothing else to do for them.
    fn announce(&mut self, now: Instant) {
        if self.unannounced.is_empty() {
            return;
        }
        // Others' work must not keep a worker asleep over its answer for long.
        self.turns_unannounced += 1;
        let all = self.turns.is_empty() || self.turns_unannounced > UNANNOUNCED_TURNS;
        if all {
            self.turns_unannounced = 0;
        }
        for position in (0..self.unannounced.len()).rev() {
            let token = self.unannounced[position];
            let Some(lane) = self.lanes.at_mut(token) else {
                self.unannounced.swap_remove(position);
                continue;
            };
            if all || self.turns.rests(self.shards.index(lane.shard).job) {
                self.unannounced.swap_remove(position);
                if let Err(error) = lane.announce() {
                    self.fault(token, &Fault::Lost(error.to_string()), now);
                }
            }
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
            let cause = fault.cause();
            self.mailbox.tell(CoreEvent::Faulted { namespace, culprit, message, cause });
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
        self.turns.remove_lane(hosted.job, token);
        self.close_if_over(lane.shard);
    }

    /// Does what the mailbox asks; `true` to stop.
    fn obey(&mut self, now: Instant) -> bool {
        while let Ok(command) = self.mailbox.commands.try_recv() {
            match command {
                CoreCommand::Open(plan) => self.open(*plan),
                CoreCommand::Adopt { namespace, route, port, socket, memory, resumed_by } => {
                    if let Some(by) = resumed_by {
                        self.make_way(namespace, route, port, by);
                    }
                    self.adopt(namespace, route, port, Arrival { socket, memory }, now);
                }
                CoreCommand::Notify { namespace, rank, notice } => self.notify(namespace, rank, &notice, now),
                CoreCommand::NotifyAll { namespace, notice } => self.notify_all(namespace, &notice, now),
                CoreCommand::Arm { namespace, wanted, snapshot } => self.arm(namespace, wanted, snapshot),
                CoreCommand::Disarm { namespace, route } => self.disarm(namespace, route),
                CoreCommand::End { namespace, failure } => self.end(namespace, failure.as_ref(), now),
                CoreCommand::Stop => return true,
            }
        }
        false
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
        let (frame_bytes_max, to) = (plan.frame_bytes_max(), plan.ports.side(port).incoming());
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
                self.turns.add_lane(hosted.job);
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
                let cause = fault.cause();
                self.mailbox.tell(CoreEvent::Faulted { namespace, culprit, message, cause });
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

    /// Tells every rank that exchanges here.
    fn notify_all(&mut self, namespace: Namespace, notice: &Notice, now: Instant) {
        let here = self.shard_of.iter().find(|((job, _), _)| *job == namespace);
        let workers = here.map(|(_, &index)| self.shards.index(index).shard.plan().ports.clone());
        for rank in workers.iter().flat_map(|ports| ports.ranks()) {
            self.notify(namespace, *rank, notice, now);
        }
    }
}

#[cfg(test)]
#[path = "room_tests.rs"]
mod room_tests;
