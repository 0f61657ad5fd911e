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
mod quantised;
mod ranks;
mod restart;
mod restored;
mod resume;
mod rewind;
mod roles;
mod room;
mod scheduler;
mod shard;
mod snapshot;
mod snapshots;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod stepped_hub;
mod streams;
mod table;
mod tick;

use std::collections::HashMap;
use std::time::{Duration, Instant};
use std::{io, iter};

use paramhub_core::auth::Namespace;
use paramhub_core::composition::Neighbour;
use paramhub_core::job_control::Recipient;
use paramhub_core::liveness::{HEARTBEAT, OwnPauses};
use paramhub_core::placement::RouteId;
use paramhub_core::wire::{Notice, Operation};
use paramhub_transport::{Events, Interest, Poller, Scratch};

use final_messages::FinalMessages;
use lane::Lane;
pub(crate) use lane::{AcceptedStream, Carrier};
use scheduler::{JobScheduler, WorkUnit};
use table::Table;

pub(crate) use mailbox::{CoreCommand, CoreEvent, CoreHandle, Mailbox, mailbox};
pub(crate) use plan::ShardPlan;
pub(crate) use restart::panic_text;
pub(crate) use restored::Restored;
use shard::Shard;
pub(crate) use shard::memory_bytes;
pub(crate) use snapshot::{ChunkMark, Snapshot, SnapshotOutcome, SnapshotTarget};

/// Poller events taken at once.
const EVENTS: usize = 256;
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
    /// When the first worker is lost whose stream was cut, if none replaces it.
    cut_until: Option<Instant>,
    /// The processes that join when all chunks of their job here have gone back: job, rank and epoch.
    joins: Vec<(Namespace, u32, u64)>,
    busy: Duration,
    idle: Duration,
    /// The pauses of this thread, found at every tick.
    own_pauses: OwnPauses,
    /// The interval of ticks, which depends on the jobs.
    tick_interval: Duration,
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
    /// The epoch and the attempt of each port's newest stream; `None` before its first.
    newest_streams: Vec<Option<(u64, u32)>>,
    /// The notice with which the job's workers have gone back last, as it travels.
    rewound: Option<Vec<u8>>,
    memory: MemoryState,
    /// `true` if the job is over.
    ending: bool,
    /// `true` if chunks of a released step wait for their turn.
    releases: bool,
    /// `true` if chunks wait to be copied for a snapshot.
    copies: bool,
    /// `true` if a gradient waits to be made of factors.
    makes: bool,
    /// `true` if workers exchange here: their streams are not adopted otherwise.
    serves: bool,
    /// `true` if sums wait to be ended because their standby is lost.
    ends_sums: bool,
    /// `true` if chunks wait for their part in a change of the membership.
    changes_members: bool,
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
            cut_until: None,
            joins: Vec::new(),
            busy: Duration::ZERO,
            idle: Duration::ZERO,
            own_pauses: OwnPauses::new(Instant::now(), HEARTBEAT),
            tick_interval: tick::tick_interval(iter::empty()),
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
        if turn_ended - self.own_pauses.last_turn() >= self.tick_interval {
            self.tick(turn_ended);
            turn_ended = Instant::now();
        }
        // After the tick, which finds that this thread has stood still.
        self.lose_cut_off(turn_ended);
        self.busy += turn_ended - now;
        Ok(Some(turn_ended))
    }

    /// Returns the time at which the next tick or deadline is due.
    fn wakes_at(&self) -> Instant {
        let deadlines = self.timed.iter().filter_map(|&shard| self.shards.index(shard).shard.next_deadline());
        let latest = self.own_pauses.last_turn() + self.tick_interval;
        deadlines.chain(self.cut_until).fold(latest, Instant::min)
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
                WorkUnit::ChangeMembers(shard) => self.change_members(shard, now),
                WorkUnit::EndSums(shard) => self.end_sums(shard, now),
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

    /// Executes the commands in the mailbox; `true` after the command to stop.
    fn handle_commands(&mut self, now: Instant) -> bool {
        while let Ok(command) = self.mailbox.commands.try_recv() {
            match command {
                CoreCommand::Open { plan, restored } => self.open(*plan, restored.map(|restored| *restored)),
                CoreCommand::Adopt {
                    namespace,
                    route,
                    port,
                    stream,
                    epoch,
                    attempt,
                    resumed_by,
                    standby,
                } => {
                    if standby.is_some() && standby != self.standby_of(namespace, route) {
                        // It was dialled before another hub became the standby.
                        continue;
                    }
                    if self.is_stale(namespace, route, port, (epoch, attempt)) {
                        self.refuse_stale(namespace, route, stream, now);
                        continue;
                    }
                    if let Some(by) = resumed_by {
                        self.make_way(namespace, route, port, by);
                    }
                    self.adopt(namespace, route, port, stream, now);
                }
                CoreCommand::Notify { namespace, to, notice } => self.notify(namespace, to, &notice, now),
                CoreCommand::Arm { namespace, target, snapshot } => self.arm(namespace, target, snapshot),
                CoreCommand::Disarm { namespace, route } => self.disarm(namespace, route),
                CoreCommand::ChangeRank { namespace, rank, epoch, change } => {
                    self.change_rank(namespace, rank, epoch, change, now);
                }
                CoreCommand::Rewind { namespace, epoch, notice } => {
                    self.rewind(namespace, epoch, &notice, now);
                }
                CoreCommand::ChangeRole { namespace, route, change, counterpart } => {
                    self.change_role(namespace, route, change, counterpart, now);
                }
                CoreCommand::End { namespace, failure } => self.end(namespace, failure.as_ref(), now),
                CoreCommand::Stop => return true,
            }
        }
        false
    }

    /// Sends a notice to ranks that exchange here, or to a site that passes it on to its ranks.
    fn notify(&mut self, namespace: Namespace, to: Recipient, notice: &Notice, now: Instant) {
        match to {
            Recipient::Rank(rank) => self.notify_neighbour(namespace, Neighbour::Worker(rank), notice, now),
            Recipient::Site(site) => self.notify_neighbour(namespace, Neighbour::Site(site), notice, now),
            Recipient::All => {
                let here = self.shard_of.iter().find(|((job, _), _)| *job == namespace);
                let ports = here.map(|(_, &index)| self.shards.index(index).shard.plan().ports.clone());
                for rank in ports.iter().flat_map(|ports| ports.ranks()) {
                    self.notify_neighbour(namespace, Neighbour::Worker(*rank), notice, now);
                }
            }
        }
    }

    /// Sends a notice to a neighbour on one of its streams here by which contributions come.
    fn notify_neighbour(
        &mut self,
        namespace: Namespace,
        neighbour: Neighbour,
        notice: &Notice,
        now: Instant,
    ) {
        let here = self.shard_of.iter().filter(|((job, _), _)| *job == namespace).map(|(_, &index)| index);
        let mut lanes = here.filter_map(|index| {
            let hosted = self.shards.index(index);
            let port = hosted.shard.plan().ports.of_neighbour(neighbour)?;
            hosted.lane_of[port as usize].map(|token| (index, port, token))
        });
        if let Some((shard, port, token)) = lanes.next() {
            self.shards.index_mut(shard).shard.message(port, Operation::Notice, notice.encode());
            self.flush(token, now);
        }
    }
}

#[cfg(test)]
#[path = "room_tests.rs"]
mod room_tests;
