//! The mesh's thread: one loop that moves every transfer, computes, and ends operations.

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
mod shared_memory;
mod slab;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::liveness::{FINAL_MESSAGE_TIMEOUT, LivenessRules, OwnPauses};
use paramhub_transport::runtime::{become_io_thread, panic_message};
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
pub(crate) use slab::SlabKey;

/// Bytes that one peer may send or receive before the others have their turn.
const TURN_BYTES: usize = 1 << 20;
/// Bytes that are copied or reduced before the peers have their turn.
const COMPUTE_BYTES: usize = 1 << 20;
/// Room for a piece and for the bytes that are read ahead of it.
const SCRATCH_BYTES: usize = PIECE_BYTES + (16 << 10);
const WAKER: u64 = u64::MAX;
const DOORBELL: u64 = u64::MAX - 1;

/// The state of the mesh's thread.
pub(crate) struct ProgressEngine {
    in_flight: OperationsInFlight,
    ranks: Vec<RankState>,
    poller: Poller,
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
}

/// The way in which the loop ended.
enum LoopEnd {
    Left,
    Failed(MeshError),
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
            poller,
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
        })
    }

    /// Serves the mesh until this rank leaves it or it fails. On return every operation has ended.
    pub(crate) fn run(mut self) -> Result<(), MeshError> {
        become_io_thread();
        let this_rank = self.in_flight.this_rank.clone();
        let end = catch_unwind(AssertUnwindSafe(|| self.serve())).unwrap_or_else(|panic| {
            LoopEnd::Failed(MeshError::Internal {
                this_rank: this_rank.clone(),
                reason: panic_message(&*panic),
            })
        });
        let (outcome, error) = match end {
            LoopEnd::Left => (Ok(()), MeshError::Left { this_rank }),
            LoopEnd::Failed(error) => (Err(error.clone()), error),
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

    fn serve(&mut self) -> LoopEnd {
        match self.run_until_left() {
            Ok(()) => LoopEnd::Left,
            Err(error) => {
                self.end_what_is_complete();
                LoopEnd::Failed(error)
            }
        }
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

    fn run_until_left(&mut self) -> Result<(), MeshError> {
        let mut events = Events::with_capacity(256);
        let mut next_check = Instant::now();
        loop {
            let now = Instant::now();
            self.discount_own_pause(now);
            if now >= next_check {
                self.check_liveness(now)?;
                next_check = now + self.liveness_rules.check_every();
            }
            self.work()?;
            if self.may_leave(now)? {
                return Ok(());
            }
            let timeout = match self.has_immediate_work() || !self.prepare_to_sleep() {
                true => Duration::ZERO,
                false => next_check.saturating_duration_since(now),
            };
            let timeout = match self.leaving {
                Some((_, deadline)) => timeout.min(deadline.saturating_duration_since(now)),
                None => timeout,
            };
            self.poller
                .wait(&mut events, Some(timeout))
                .map_err(|error| self.system("wait for peers", &error))?;
            if let Some(pipeline) = &mut self.pipeline {
                pipeline.clear_sleep();
            }
            let now = Instant::now();
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
        }
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
