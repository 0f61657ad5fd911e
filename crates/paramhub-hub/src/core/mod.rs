//! A core: one thread that owns chunks end to end, with their streams, sums, optimizer state and answers
//! (PHub section 3.2.4).
//!
//! The thread shares nothing with other cores. It runs to completion: it sums, optimises and answers every
//! frame that a read brought before it serves the next stream. Which job is served next depends on the time
//! that each has used.

mod arenas;
mod buffer;
mod deadlines;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod exercise;
mod factor_layers;
mod fault;
mod final_messages;
mod lane;
mod layout;
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
mod scheduler;
mod shard;
mod snapshot;
mod snapshots;
#[cfg(any(test, feature = "fuzzing"))]
mod stepped_hub;
mod table;
mod tick;

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::liveness::{HEARTBEAT, OwnPauses};
use paramhub_core::placement::RouteId;
use paramhub_core::wire::{Notice, Operation};
use paramhub_transport::{Events, Interest, Poller, Scratch};

use fault::Fault;
use final_messages::FinalMessages;
use lane::{AcceptedStream, Flushed, Lane, ReceiveOutcome};
use scheduler::{JobScheduler, WorkUnit};
use table::Table;

pub(crate) use mailbox::{CoreCommand, CoreEvent, CoreHandle, Mailbox, mailbox};
pub(crate) use plan::ShardPlan;
pub(crate) use ports::{Ports, Side};
pub(crate) use restart::panic_text;
pub(crate) use restored::Restored;
use shard::Shard;
pub(crate) use shard::memory_bytes;
pub(crate) use snapshot::{ChunkMark, Snapshot, SnapshotOutcome, SnapshotTarget};

/// The interval at which a core checks the clock for heartbeats, silent workers and counters.
const TICK: Duration = Duration::from_millis(250);
/// Poller events taken at once.
const EVENTS: usize = 256;
/// Turns for which a worker may sleep although an answer is there, while the core serves others.
const UNANNOUNCED_TURNS: u32 = 8;
/// The elements of a released step, or of a gradient made from factors, that a core works on before it serves
/// the streams again: as many as one stream brings in its turn.
const RELEASE_TURN_ELEMENTS: usize = 64 << 10;
/// The time that jobs that share a core are served before the core polls again: one or two turns of a
/// stream. For a job that is alone, the core serves everything that the poller has reported.
const SLICE: Duration = Duration::from_micros(100);
/// With many streams ready, polling takes long. So the core serves for at least this many times as long as it
/// polled...
const SLICE_POLLS: u32 = 16;
/// ...unless other streams would wait longer than this.
const SLICE_MAX: Duration = Duration::from_millis(1);
const WAKER: u64 = u64::MAX;

/// The state of a core's thread.
pub(crate) struct Core {
    /// The core's number at the hub.
    number: usize,
    poller: Poller,
    mailbox: Mailbox,
    spin: Duration,
    scratch: Scratch,
    shards: Table<HostedShard>,
    shard_of: HashMap<(Namespace, RouteId), usize>,
    lanes: Table<Lane>,
    /// The work to do, job by job.
    scheduler: JobScheduler,
    /// The lanes whose workers may sleep although an answer is there.
    unannounced: Vec<u64>,
    turns_unannounced: u32,
    final_messages: FinalMessages,
    /// The shards whose steps may end by time.
    timed: Vec<usize>,
    busy: Duration,
    idle: Duration,
    /// The pauses of this thread, found at every tick.
    own_pauses: OwnPauses,
    /// Panics in a row while the core had no job.
    panics_alone: u32,
    /// The time that the thread has served, without the times in which the system did not run it.
    awake: Duration,
}

/// A shard and the lanes of its ports.
struct HostedShard {
    shard: Shard,
    route: RouteId,
    /// The job's number in [`JobScheduler`].
    job: usize,
    lane_of: Vec<Option<u64>>,
    memory: MemoryState,
    /// `true` if the job is over.
    ending: bool,
    /// `true` if chunks of a released step wait for their turn.
    releases: bool,
    /// `true` if chunks wait to be copied for a snapshot.
    copies: bool,
    /// `true` if a gradient waits to be made of factors.
    makes: bool,
}

/// The part of a shard's memory that has been taken, or given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemoryState {
    Opening,
    Open,
    Freeing,
    Freed,
}

impl Core {
    /// A core that looks for work for `spin` before it sleeps.
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
            scheduler: JobScheduler::default(),
            unannounced: Vec::new(),
            turns_unannounced: 0,
            final_messages: FinalMessages::default(),
            timed: Vec::new(),
            busy: Duration::ZERO,
            idle: Duration::ZERO,
            own_pauses: OwnPauses::new(Instant::now(), HEARTBEAT),
            panics_alone: 0,
            awake: Duration::ZERO,
        })
    }

    /// Serves until it receives the command to stop.
    fn serve_until_stopped(&mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(EVENTS);
        let mut turn_ended = Some(Instant::now());
        while let Some(ended) = turn_ended {
            let timeout = match self.scheduler.is_empty() && self.unannounced.is_empty() {
                true => self.wakes_at().saturating_duration_since(ended),
                false => Duration::ZERO,
            };
            turn_ended = self.turn(&mut events, ended, timeout)?;
        }
        Ok(())
    }

    /// Polls, for `timeout` at most, and then serves the work for a while. Returns when the turn ended, or
    /// `None` after the command to stop.
    fn turn(
        &mut self,
        events: &mut Events,
        last_ended: Instant,
        timeout: Duration,
    ) -> io::Result<Option<Instant>> {
        let had_work = !self.scheduler.is_empty();
        self.poller.wait_spinning(events, self.spin, Some(timeout))?;
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
            if self.handle_commands(now) {
                return Ok(None);
            }
            begun = Instant::now();
        }
        let mut turn_ended = self.serve(begun, slice);
        turn_ended = self.end_late(turn_ended);
        if turn_ended - self.own_pauses.last_turn() >= TICK {
            self.tick(turn_ended);
            turn_ended = Instant::now();
        }
        self.busy += turn_ended - now;
        Ok(Some(turn_ended))
    }

    /// Returns the time at which the next tick or deadline is due.
    fn wakes_at(&self) -> Instant {
        let deadlines = self.timed.iter().filter_map(|&shard| self.shards.index(shard).shard.next_deadline());
        deadlines.fold(self.own_pauses.last_turn() + TICK, Instant::min)
    }

    /// Ends steps whose time is over, some of each shard's, and returns when that was done.
    fn end_late(&mut self, mut now: Instant) -> Instant {
        let mut position = 0;
        // Sending may end a job and remove its shards.
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
            self.scheduler.add_time(job, done - now);
            now = done;
        }
        now
    }

    /// Notes that a stream has work, or further work.
    fn due(&mut self, token: u64, readable: bool, writable: bool) {
        // A token of a lane that is gone may still be among the events.
        let Some(lane) = self.lanes.at_mut(token) else { return };
        let waited = lane.readiness.is_any();
        lane.readiness.readable |= readable;
        lane.readiness.writable |= writable;
        if !waited && lane.readiness.is_any() {
            self.scheduler.add(self.shards.index(lane.shard).job, WorkUnit::Lane(token));
        }
    }

    /// Serves the work job by job: all of it or, if jobs share the core, for a slice. Returns when that was
    /// done. The rest waits for the next turn.
    fn serve(&mut self, begun: Instant, slice: Duration) -> Instant {
        let is_shared = self.scheduler.is_shared();
        let (mut now, mut served) = (begun, None);
        // A stream with more to do is served again only after the core has polled for others.
        for _ in 0..self.scheduler.len() {
            let Some((job, unit)) = self.scheduler.next() else { break };
            match unit {
                WorkUnit::Lane(token) => self.serve_lane(token, now),
                WorkUnit::UpdateReleased(shard) => self.release(shard, now),
                WorkUnit::CopySnapshot(shard) => self.copy(shard),
                WorkUnit::SumFactors(shard) => self.make(shard, now),
                WorkUnit::Memory(shard) => self.take_or_give_memory(shard),
            }
            served = Some(job);
            // The clock is read for each unit only if several jobs share the core.
            if is_shared {
                let done = Instant::now();
                self.scheduler.add_time(job, done - now);
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
            self.scheduler.add_time(job, now - begun);
        }
        now
    }

    fn serve_lane(&mut self, token: u64, now: Instant) {
        let Some(lane) = self.lanes.at_mut(token) else { return };
        let due = std::mem::take(&mut lane.readiness);
        if lane.is_cut() {
            return;
        }
        // Frames that a worker sent before its stream broke, such as a Leave, are handled before the break.
        if due.readable {
            self.receive(token, now);
        }
        if due.writable || self.lanes.at_mut(token).is_some_and(|lane| lane.waits_for_doorbell()) {
            self.flush(token, now);
        }
    }

    /// Takes what a stream has brought and sends the answers that result.
    fn receive(&mut self, token: u64, now: Instant) {
        let Some(lane) = self.lanes.at_mut(token) else { return };
        let hosted = self.shards.index_mut(lane.shard);
        let left_before = hosted.shard.has_left(lane.port);
        let taken = lane.receive(&mut hosted.shard, &mut self.scratch, now);
        let (shard, port) = (lane.shard, lane.port);
        if hosted.shard.is_releasing() && !std::mem::replace(&mut hosted.releases, true) {
            self.scheduler.add(hosted.job, WorkUnit::UpdateReleased(shard));
        }
        if hosted.shard.is_making() && !std::mem::replace(&mut hosted.makes, true) {
            self.scheduler.add(hosted.job, WorkUnit::SumFactors(shard));
        }
        if hosted.shard.has_left(port) && !left_before {
            let (namespace, route) = (hosted.shard.plan().namespace, hosted.route);
            self.mailbox.send_event(CoreEvent::Left { namespace, route, port });
        }
        self.answer(shard, now);
        self.end_snapshot(shard);
        match taken {
            Ok(ReceiveOutcome::Closed) => self.drop_lane(token),
            Ok(ReceiveOutcome::Open) => {}
            Ok(ReceiveOutcome::Cut) => self.cut(token),
            // Shared memory reports it only once.
            Ok(ReceiveOutcome::More) => self.due(token, true, true),
            Err(fault) => self.fault(token, &fault, now),
        }
    }

    /// Updates some chunks of a released step and sends the answers that result.
    fn release(&mut self, shard: usize, now: Instant) {
        let hosted = self.shards.index_mut(shard);
        hosted.releases = false;
        if hosted.ending || !hosted.shard.is_releasing() {
            return;
        }
        hosted.shard.update_released(RELEASE_TURN_ELEMENTS);
        if hosted.shard.is_releasing() {
            hosted.releases = true;
            self.scheduler.add(hosted.job, WorkUnit::UpdateReleased(shard));
        }
        self.answer(shard, now);
        self.end_snapshot(shard);
    }

    /// Sends by every port of a shard that has something new. A stream that takes no more for now is served
    /// when the poller reports room.
    fn answer(&mut self, shard: usize, now: Instant) {
        while let Some(port) = self.shards.index_mut(shard).shard.next_dirty_port() {
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
                if flushed == Flushed::All && hosted.shard.sends_leave(lane.port) {
                    let (namespace, route, port) = (hosted.shard.plan().namespace, hosted.route, lane.port);
                    self.mailbox.send_event(CoreEvent::Left { namespace, route, port });
                }
                let (unfinished, is_shm) = (flushed != Flushed::All, lane.is_shm());
                if lane.is_unannounced() && !self.unannounced.contains(&token) {
                    self.unannounced.push(token);
                }
                if unfinished != lane.waits_writable {
                    lane.waits_writable = unfinished;
                    let interest = lane.interest();
                    if is_shm {
                        // A stream over shared memory reports room by its doorbell, to which the core always
                        // listens.
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

    /// Wakes the workers that sleep over an answer, once there is nothing else to do for them.
    fn announce(&mut self, now: Instant) {
        if self.unannounced.is_empty() {
            return;
        }
        // Work of others must not keep a worker asleep over its answer for long.
        self.turns_unannounced += 1;
        let all = self.scheduler.is_empty() || self.turns_unannounced > UNANNOUNCED_TURNS;
        if all {
            self.turns_unannounced = 0;
        }
        for position in (0..self.unannounced.len()).rev() {
            let token = self.unannounced[position];
            let Some(lane) = self.lanes.at_mut(token) else {
                self.unannounced.swap_remove(position);
                continue;
            };
            if all || self.scheduler.has_no_work(self.shards.index(lane.shard).job) {
                self.unannounced.swap_remove(position);
                if let Err(error) = lane.announce() {
                    self.fault(token, &Fault::Lost(error.to_string()), now);
                }
            }
        }
    }

    /// Handles a stream that cannot go on: the job controller decides about the job, and the stream waits for
    /// the reason.
    fn fault(&mut self, token: u64, fault: &Fault, now: Instant) {
        let Some(lane) = self.lanes.at_mut(token) else { return };
        let port = lane.port;
        let hosted = self.shards.index_mut(lane.shard);
        let was_reported = lane.is_draining();
        let leaves_quietly = hosted.shard.has_left(port) && matches!(fault, Fault::Lost(_));
        let plan = hosted.shard.plan();
        let namespace = plan.namespace;
        lane.mute(now);
        if !was_reported && !leaves_quietly && !hosted.ending {
            let culprit = fault.culprit(plan.ports.neighbour(port));
            let message = fault.message(&plan.name(culprit));
            let cause = fault.cause();
            self.mailbox.send_event(CoreEvent::Faulted { namespace, culprit, message, cause });
        }
        if matches!(fault, Fault::Lost(_)) {
            self.drop_lane(token);
        }
    }

    fn drop_lane(&mut self, token: u64) {
        let Some(lane) = self.lanes.remove(token) else { return };
        // This fails only if the descriptor is not in the set; then there is nothing to remove.
        let _ = self.poller.remove(&lane);
        let hosted = self.shards.index_mut(lane.shard);
        hosted.lane_of[lane.port as usize] = None;
        self.scheduler.remove_lane(hosted.job, token);
        self.close_if_over(lane.shard);
    }

    /// Executes the commands in the mailbox; `true` after the command to stop.
    fn handle_commands(&mut self, now: Instant) -> bool {
        while let Ok(command) = self.mailbox.commands.try_recv() {
            match command {
                CoreCommand::Open(plan) => self.open(*plan),
                CoreCommand::Adopt { namespace, route, port, socket, memory, resumed_by } => {
                    if let Some(by) = resumed_by {
                        self.make_way(namespace, route, port, by);
                    }
                    self.adopt(namespace, route, port, AcceptedStream { socket, memory }, now);
                }
                CoreCommand::Notify { namespace, rank, notice } => self.notify(namespace, rank, &notice, now),
                CoreCommand::NotifyAll { namespace, notice } => self.notify_all(namespace, &notice, now),
                CoreCommand::Arm { namespace, target, snapshot } => self.arm(namespace, target, snapshot),
                CoreCommand::Disarm { namespace, route } => self.disarm(namespace, route),
                CoreCommand::End { namespace, failure } => self.end(namespace, failure.as_ref(), now),
                CoreCommand::Stop => return true,
            }
        }
        false
    }

    fn adopt(
        &mut self,
        namespace: Namespace,
        route: RouteId,
        port: u32,
        accepted: AcceptedStream,
        now: Instant,
    ) {
        let living =
            self.shard_of.get(&(namespace, route)).copied().filter(|&shard| !self.shards.index(shard).ending);
        let Some(shard) = living else {
            // The job ended during the stream's handshake.
            return self.final_messages.send(namespace, accepted, now);
        };
        let hosted = self.shards.index_mut(shard);
        debug_assert!(hosted.lane_of[port as usize].is_none(), "a port is given once");
        let plan = hosted.shard.plan();
        let (frame_bytes_max, to) = (plan.frame_bytes_max(), plan.ports.side(port).incoming());
        let arenas = accepted.memory.as_ref().map(|memory| memory.arenas.clone());
        let added = accepted.connect(to, frame_bytes_max).and_then(|stream| {
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
                self.scheduler.add_lane(hosted.job);
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
                self.mailbox.send_event(CoreEvent::Faulted { namespace, culprit, message, cause });
            }
        }
    }

    /// Sends a notice to a rank on one of its streams here.
    fn notify(&mut self, namespace: Namespace, rank: u32, notice: &Notice, now: Instant) {
        let here = self.shard_of.iter().filter(|((job, _), _)| *job == namespace).map(|(_, &index)| index);
        let lane = here.filter_map(|index| {
            let hosted = self.shards.index(index);
            let port = hosted.shard.plan().ports.of_rank(rank)?;
            hosted.lane_of[port as usize].map(|token| (index, port, token))
        });
        if let Some((shard, port, token)) = lane.into_iter().next() {
            self.shards.index_mut(shard).shard.message(port, Operation::Notice, notice.encode());
            self.flush(token, now);
        }
    }

    /// Sends a notice to every rank that exchanges here.
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
