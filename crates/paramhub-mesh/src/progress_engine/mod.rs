//! The engine that moves every transfer, computes, and ends operations.

mod closing;
mod collectives;
mod fifo;
mod inbound;
mod kept_frames;
mod leaving;
mod liveness;
mod matching;
mod operations_in_flight;
mod outbound;
mod peer;
mod reconnecting;
mod sequence;
mod shared_engine;
mod shared_memory;
mod slab;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use paramhub_core::liveness::{FINAL_MESSAGE_TIMEOUT, LivenessRules, OwnPauses};
use paramhub_transport::{Events, Interest, Poller, Waker};

use crate::command::{MeshCommand, MeshInbox};
use crate::error::{MeshError, MeshRank};
use crate::join::Redialler;
use crate::memory::{Pipeline, SharedSegment};
use crate::operation::{OperationKind, OperationRequest};
use crate::socket::PeerSocket;
use crate::wire::PIECE_BYTES;
use closing::close_all;
use inbound::PeerEnd;
pub(crate) use operations_in_flight::OperationsInFlight;
use operations_in_flight::{SendProgress, StepId};
use peer::{Peer, RankState};
use shared_engine::MeshEnd;
pub(crate) use shared_engine::SharedEngine;
pub(crate) use slab::SlabKey;

/// Bytes that one peer may send or receive before the others have their turn.
const TURN_BYTES: usize = 1 << 20;
/// Bytes that are copied or reduced before the peers have their turn.
const COMPUTE_BYTES: usize = 1 << 20;
/// Room for a piece and for the bytes that are read ahead of it.
const SCRATCH_BYTES: usize = PIECE_BYTES + (16 << 10);
/// The time for which a caller that waits polls for peers before it sleeps.
const CALLER_SPIN: Duration = Duration::from_micros(300);
/// The time for which a caller that goes on in shared memory does not look at the peers' connections.
const POLL_EVERY: Duration = Duration::from_micros(500);
const WAKER: u64 = u64::MAX;
const DOORBELL: u64 = u64::MAX - 1;

/// The state of the engine.
pub(crate) struct ProgressEngine {
    in_flight: OperationsInFlight,
    ranks: Vec<RankState>,
    poller: Arc<Poller>,
    waker: Waker,
    inbox: Arc<MeshInbox>,
    commands: VecDeque<MeshCommand>,
    /// Collectives that have not begun.
    queue: VecDeque<OperationRequest>,
    /// Steps that compute; `computed` is the progress of the first.
    computing: VecDeque<StepId>,
    computed: usize,
    /// Present where all ranks share memory.
    pipeline: Option<Pipeline>,
    scratch: Box<[u8]>,
    sends: SendProgress,
    /// While leaving: how long it may take, and the deadline.
    leaving: Option<(Duration, Instant)>,
    liveness_rules: LivenessRules,
    own_pauses: OwnPauses,
    /// Makes connections again that were cut; `None` where they are not.
    redialler: Option<Redialler>,
    next_check: Instant,
    /// The number of announcements to the next rank that may wait.
    announcements_waiting: usize,
    /// The error with which the engine stopped on the thread of a caller.
    failure_at_caller: Option<MeshError>,
    /// Whether a panic has ended a caller's work, which may have left anything.
    has_panicked: bool,
    /// Whether the mesh's thread is about to end the mesh.
    is_ending: bool,
}

/// When the engine is to be run again.
enum NextTurn {
    /// At the next event, and after this time at the latest.
    Within(Duration),
    /// This rank has left the mesh.
    Never,
}

impl ProgressEngine {
    /// Takes connections whose handshake is over, by rank; `None` at this rank's own place.
    pub(crate) fn new(
        this_rank: MeshRank,
        sockets: Vec<Option<PeerSocket>>,
        waker: Waker,
        inbox: Arc<MeshInbox>,
        dead_after: Duration,
        memory: Option<SharedSegment>,
        redialler: Option<Redialler>,
    ) -> std::io::Result<Self> {
        let poller = Poller::new()?;
        let pipeline = memory.map(Pipeline::new);
        if let Some(pipeline) = &pipeline {
            poller.add(pipeline.doorbell(), DOORBELL, Interest::READABLE)?;
        }
        poller.add(&waker, WAKER, Interest::READABLE)?;
        let now = Instant::now();
        let size = sockets.len() as u32;
        let liveness_rules = LivenessRules::of_mesh(dead_after);
        let mut ranks = Vec::with_capacity(sockets.len());
        for (rank, socket) in sockets.into_iter().enumerate() {
            ranks.push(match socket {
                None => RankState::Own,
                Some(socket) => {
                    poller.add(&socket, rank as u64, Interest::READABLE)?;
                    RankState::Connected(Box::new(Peer::new(rank as u32, socket, now)))
                }
            });
        }
        Ok(ProgressEngine {
            in_flight: OperationsInFlight::new(this_rank, size, Arc::clone(&inbox)),
            ranks,
            poller: Arc::new(poller),
            waker,
            inbox,
            commands: VecDeque::with_capacity(64),
            queue: VecDeque::new(),
            computing: VecDeque::new(),
            computed: 0,
            pipeline,
            scratch: vec![0; SCRATCH_BYTES].into_boxed_slice(),
            sends: SendProgress::default(),
            leaving: None,
            liveness_rules,
            own_pauses: OwnPauses::new(now, liveness_rules.heartbeat),
            redialler,
            next_check: now,
            announcements_waiting: 0,
            failure_at_caller: None,
            has_panicked: false,
            is_ending: false,
        })
    }

    /// Ends every operation, tells the peers, and closes the connections.
    fn close(mut self, end: MeshEnd) -> Result<(), MeshError> {
        let (outcome, error) = match end {
            MeshEnd::Left => (Ok(()), MeshError::Left { this_rank: self.in_flight.this_rank.clone() }),
            MeshEnd::Failed(error) => (Err(error.clone()), error),
        };
        let queued = self.inbox.close(&error);
        let deadline = match (&outcome, self.leaving) {
            (Ok(()), Some((_, deadline))) => deadline,
            _ => Instant::now() + FINAL_MESSAGE_TIMEOUT,
        };
        // Send the last messages before callbacks run, which may take long.
        let connections = self.last_messages(outcome.is_ok(), &error);
        let operations: Vec<SlabKey> = self.in_flight.operations.iter().map(|(key, _)| key).collect();
        for key in operations {
            self.in_flight.end(key, Err(error.clone()));
        }
        let unbegun = self.commands.drain(..).chain(queued).filter_map(|command| match command {
            MeshCommand::Run(request) => Some(*request),
            _ => None,
        });
        for request in self.queue.drain(..).chain(unbegun).collect::<Vec<_>>() {
            self.in_flight.refuse(request, error.clone());
        }
        // Nothing wakes this thread any more. This fails only if the descriptor is not in the set.
        let _ = self.poller.remove(&self.waker);
        if let Some(pipeline) = &self.pipeline {
            let _ = self.poller.remove(pipeline.doorbell());
        }
        close_all(connections, &self.poller, &mut self.scratch, deadline);
        outcome
    }

    /// Ends the operations for which everything has come. A peer that had all it needed may have ended the mesh before
    /// this rank has made use of what the peer had sent.
    fn end_what_is_complete(&mut self) {
        self.in_flight.end_those_over();
        loop {
            // The mesh has failed already, for the first reason.
            if self.work().is_err() {
                return;
            }
            let has_more = self.pipeline.as_ref().is_some_and(Pipeline::has_more);
            if !has_more && self.computing.is_empty() {
                return;
            }
        }
    }

    /// Handles what has happened, and does what there is to do until this rank may leave the mesh or must wait.
    fn turn(&mut self, events: &mut Events) -> Result<NextTurn, MeshError> {
        loop {
            if let Some(failure) = self.failure_at_caller.take() {
                return Err(failure);
            }
            self.clear_sleep();
            let now = Instant::now();
            self.handle(events, now)?;
            self.look_after_peers(now)?;
            self.work()?;
            if self.leaving.is_some() {
                self.send_announcements()?;
            }
            if self.may_leave(now)? {
                return Ok(NextTurn::Never);
            }
            if !self.has_immediate_work() && self.prepare_to_sleep()? {
                let wake_at =
                    self.leaving.map_or(self.next_check, |(_, deadline)| deadline.min(self.next_check));
                return Ok(NextTurn::Within(wake_at.saturating_duration_since(now)));
            }
            self.poll(events, Duration::ZERO)?;
        }
    }

    /// Runs on the thread of a caller, until `is_done`, until `deadline`, or until the mesh's thread must go on. Sleeps
    /// where there is nothing to do.
    fn run_for_caller(
        &mut self,
        is_done: impl Fn() -> bool,
        deadline: Option<Instant>,
    ) -> Result<(), MeshError> {
        let mut events = Events::with_capacity(64);
        let (mut poll_at, mut spin_until) = (Instant::now() + POLL_EVERY, None);
        self.clear_sleep();
        loop {
            self.work()?;
            // The mesh's thread handles what wakes it.
            if is_done() || !self.may_run_for_caller() || self.waker.is_woken() {
                return Ok(());
            }
            let now = Instant::now();
            let is_late = deadline.is_some_and(|deadline| now >= deadline);
            if !is_late && now < poll_at && self.may_go_on_in_memory() {
                continue;
            }
            self.poll(&mut events, Duration::ZERO)?;
            if events.is_empty() && !is_late && !self.has_immediate_work() {
                let is_waiting_in_memory = self.pipeline.as_ref().is_some_and(Pipeline::is_waiting);
                if !is_waiting_in_memory && now < *spin_until.get_or_insert(now + CALLER_SPIN) {
                    // There may be more ranks than processors.
                    thread::yield_now();
                } else {
                    if self.announce_sleep()? {
                        let wake_at =
                            deadline.map_or(self.next_check, |deadline| deadline.min(self.next_check));
                        self.poll(&mut events, wake_at.saturating_duration_since(now))?;
                    }
                    self.clear_sleep();
                }
            }
            if !events.is_empty() {
                spin_until = None;
            }
            if events.iter().any(|event| event.token == WAKER) {
                return Ok(());
            }
            let now = Instant::now();
            poll_at = now + POLL_EVERY;
            self.handle(&events, now)?;
            self.look_after_peers(now)?;
            if is_late {
                return self.work();
            }
        }
    }

    fn poll(&mut self, events: &mut Events, timeout: Duration) -> Result<(), MeshError> {
        self.poller.wait(events, Some(timeout)).map_err(|error| self.system("wait for peers", &error))
    }

    /// Finds those peers that are silent, where it is time to.
    fn look_after_peers(&mut self, now: Instant) -> Result<(), MeshError> {
        self.discount_own_pause(now);
        if now >= self.next_check {
            self.check_liveness(now)?;
            self.next_check = now + self.liveness_rules.check_every();
        }
        Ok(())
    }

    /// Handles what has happened at the descriptors. It does no harm if another thread has handled it already.
    fn handle(&mut self, events: &Events, now: Instant) -> Result<(), MeshError> {
        self.discount_own_pause(now);
        for event in events.iter() {
            match (event.token, &self.pipeline) {
                (WAKER, _) => {
                    self.waker.drain();
                    continue;
                }
                (DOORBELL, Some(pipeline)) => {
                    pipeline.doorbell().clear();
                    continue;
                }
                _ => {}
            }
            let rank = event.token as u32;
            if event.writable
                && let RankState::Connected(peer) = &mut self.ranks[rank as usize]
            {
                peer.outbound.is_blocked = false;
            }
            if event.readable {
                self.receive(rank, now)?;
            }
        }
        Ok(())
    }

    /// Does all work that needs no waiting.
    fn work(&mut self) -> Result<(), MeshError> {
        loop {
            if let Some(failure) = self.in_flight.failure.take() {
                return Err(failure);
            }
            self.inbox.take(&mut self.commands);
            while let Some(command) = self.commands.pop_front() {
                self.execute(command)?;
            }
            self.begin_collectives()?;
            while let Some(id) = self.in_flight.ready.pop_front() {
                self.issue(id)?;
            }
            self.compute();
            self.advance_memory()?;
            self.compare_with_previous_rank()?;
            self.withdraw();
            self.flush()?;
            self.in_flight.end_those_over();
            if self.in_flight.ready.is_empty() && !self.may_begin() && self.in_flight.failure.is_none() {
                return Ok(());
            }
        }
    }

    /// Returns whether there is work that needs no input.
    fn has_immediate_work(&self) -> bool {
        let is_due =
            |state: &RankState| matches!(state, RankState::Connected(peer) if peer.outbound.is_due());
        let has_more = self.pipeline.as_ref().is_some_and(Pipeline::has_more);
        has_more || !self.computing.is_empty() || self.ranks.iter().any(is_due)
    }

    /// Returns whether callers may run the engine. They leave the end of the mesh to its own thread.
    fn may_run_for_caller(&self) -> bool {
        !self.is_ending && self.leaving.is_none() && self.failure_at_caller.is_none()
    }

    /// Returns whether the mesh's thread has something to do before the next event.
    fn must_go_on(&self) -> bool {
        !self.may_run_for_caller() || self.has_immediate_work()
    }

    /// Returns whether no operation is under way.
    fn is_idle(&self) -> bool {
        self.in_flight.operations.is_empty() && self.queue.is_empty() && self.leaving.is_none()
    }

    fn execute(&mut self, command: MeshCommand) -> Result<(), MeshError> {
        match command {
            MeshCommand::Run(request) => match request.kind {
                OperationKind::Collective(_) => self.queue.push_back(*request),
                _ => {
                    self.in_flight.begin(*request, 0, false);
                }
            },
            MeshCommand::QueryAwaitedRanks { completion, answer } => {
                // The asking thread may have gone.
                let _ = answer.try_send(self.awaited(&completion));
            }
            MeshCommand::Leave { timeout } => {
                self.leaving.get_or_insert((timeout, Instant::now() + timeout));
                for command in
                    self.inbox.close(&MeshError::Left { this_rank: self.in_flight.this_rank.clone() })
                {
                    self.execute(command)?;
                }
            }
            MeshCommand::Beat => self.beat(),
            MeshCommand::Reconnected { rank, attempt, socket } => {
                return self.reconnected(rank, attempt, socket);
            }
            MeshCommand::NotReconnected { rank, attempt, reason } => {
                return self.not_reconnected(rank, attempt, &reason);
            }
            MeshCommand::Abort { reason } => {
                return Err(MeshError::GaveUp { this_rank: self.in_flight.this_rank.clone(), reason });
            }
        }
        Ok(())
    }

    fn has_peers(&self) -> bool {
        self.ranks.iter().any(|state| matches!(state, RankState::Connected(_)))
    }

    fn flush(&mut self) -> Result<(), MeshError> {
        let takens_are_due = std::mem::take(&mut self.in_flight.takens_are_due);
        for rank in 0..self.ranks.len() {
            let RankState::Connected(peer) = &mut self.ranks[rank] else { continue };
            if takens_are_due {
                peer.outbound.hurry();
            }
            if peer.cut.is_some() {
                continue;
            }
            if peer.outbound.is_due() {
                let before = peer.outbound.written;
                peer.outbound.flush(&mut peer.socket, &self.in_flight, TURN_BYTES as u64, &mut self.sends);
                if peer.outbound.written > before {
                    peer.liveness.sent(self.own_pauses.last_turn());
                }
            }
            let is_blocked = peer.outbound.is_blocked && peer.outbound.has_something();
            if is_blocked != peer.awaits_writable {
                peer.awaits_writable = is_blocked;
                let interest = if is_blocked { Interest::BOTH } else { Interest::READABLE };
                if let Err(error) = self.poller.modify(&peer.socket, rank as u64, interest) {
                    return Err(self.system("wait for a peer", &error));
                }
            }
        }
        self.in_flight.note(&mut self.sends);
        Ok(())
    }

    fn receive(&mut self, rank: u32, now: Instant) -> Result<(), MeshError> {
        let RankState::Connected(peer) = &mut self.ranks[rank as usize] else { return Ok(()) };
        if peer.cut.is_some() {
            return Ok(());
        }
        let received = peer.receive(&mut self.in_flight, &mut self.scratch, TURN_BYTES)?;
        if received.bytes > 0 {
            peer.liveness.heard(now);
        }
        match received.is_over {
            None => Ok(()),
            Some(PeerEnd::Left(collectives)) => self.peer_left(rank, collectives),
            Some(PeerEnd::Aborted { culprit, reason }) => {
                let this_rank = self.in_flight.this_rank.clone();
                Err(MeshError::Aborted { this_rank, by: rank, culprit, reason: reason.into() })
            }
            Some(PeerEnd::Lost(reason)) => Err(self.lost(rank, reason)),
            Some(PeerEnd::Cut(reason)) => self.cut(rank, reason),
        }
    }

    fn system(&self, what: &'static str, error: &std::io::Error) -> MeshError {
        MeshError::System {
            this_rank: self.in_flight.this_rank.clone(),
            what,
            reason: error.to_string().into(),
        }
    }
}
