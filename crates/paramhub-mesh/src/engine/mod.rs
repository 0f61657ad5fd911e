//! The mesh's thread: one loop that moves every transfer, computes, and ends operations.

mod board;
mod ending;
mod fifo;
mod inbound;
mod matching;
mod outbound;
mod parting;
mod peer;
mod sequence;
mod sharing;
mod slab;
#[cfg(test)]
mod tests;
mod watch;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_transport::{Events, Interest, Poller, Waker};

use crate::error::{MeshError, Who, panic_message};
use crate::handle::become_mesh_thread;
use crate::inbox::{Command, Inbox};
use crate::memory::{Commons, Pipeline};
use crate::operation::{Request, What};
use crate::schedule::Work;
use crate::wire::{Header, Kind, PIECE_BYTES};
pub(crate) use board::Board;
use board::{Landing, StepId};
use inbound::Over;
use matching::Waiting;
use parting::part;
use peer::{Peer, Seat};
pub(crate) use slab::Key;

/// Collectives under way at a time: the next one's announcements travel while this one's last pieces do.
const COLLECTIVES_MAX: usize = 4;
/// The same in shared memory, where the chunks of many may be under way.
const COLLECTIVES_IN_MEMORY_MAX: usize = 64;
/// Bytes one peer may bring, or be sent, before the others have their turn.
const TURN_BYTES: usize = 1 << 20;
/// Bytes that are copied or reduced before the peers have their turn.
const COMPUTE_BYTES: usize = 1 << 20;
/// Room for a piece and what is read ahead of it.
const SCRATCH_BYTES: usize = PIECE_BYTES + (16 << 10);
/// How long the last words of a mesh that failed may take.
const LAST_WORDS: Duration = Duration::from_secs(1);
const WAKER: u64 = u64::MAX;
const BELL: u64 = u64::MAX - 1;

/// What the mesh's thread works with.
pub(crate) struct Engine {
    board: Board,
    seats: Vec<Seat>,
    poller: Poller,
    waker: Waker,
    inbox: Arc<Inbox>,
    commands: VecDeque<Command>,
    /// Collectives that have not begun.
    queue: VecDeque<Request>,
    /// Steps that compute, and how far the first has come.
    computing: VecDeque<StepId>,
    computed: usize,
    /// Where all ranks share memory.
    pipeline: Option<Pipeline>,
    scratch: Box<[u8]>,
    done: Vec<StepId>,
    /// While leaving: how long it may take, and until when that is.
    leaving: Option<(Duration, Instant)>,
    heartbeat: Duration,
    dead_after: Duration,
    last_turn: Instant,
}

/// How an engine's loop ended.
enum End {
    Left,
    Failed(MeshError),
}

impl Engine {
    /// Over connections whose handshake is over, by rank; none at the own.
    pub(crate) fn new(
        who: Who,
        sockets: Vec<Option<OwnedFd>>,
        waker: Waker,
        inbox: Arc<Inbox>,
        dead_after: Duration,
        memory: Option<Commons>,
    ) -> std::io::Result<Self> {
        let poller = Poller::new()?;
        let pipeline = memory.map(Pipeline::new);
        if let Some(pipeline) = &pipeline {
            poller.add(pipeline.bell(), BELL, Interest::READABLE)?;
        }
        poller.add(&waker, WAKER, Interest::READABLE)?;
        let now = Instant::now();
        let size = sockets.len() as u32;
        let mut seats = Vec::with_capacity(sockets.len());
        for (rank, socket) in sockets.into_iter().enumerate() {
            seats.push(match socket {
                None => Seat::Own,
                Some(socket) => {
                    poller.add(&socket, rank as u64, Interest::READABLE)?;
                    Seat::Present(Box::new(Peer::new(rank as u32, socket, now)))
                }
            });
        }
        Ok(Engine {
            board: Board::new(who, size, Arc::clone(&inbox)),
            seats,
            poller,
            waker,
            inbox,
            commands: VecDeque::with_capacity(64),
            queue: VecDeque::new(),
            computing: VecDeque::new(),
            computed: 0,
            pipeline,
            scratch: vec![0; SCRATCH_BYTES].into_boxed_slice(),
            done: Vec::new(),
            leaving: None,
            heartbeat: dead_after / 6,
            dead_after,
            last_turn: now,
        })
    }

    /// Serves the mesh until it is left or fails; then every operation has been ended.
    pub(crate) fn run(mut self) -> Result<(), MeshError> {
        become_mesh_thread();
        let who = self.board.who.clone();
        let end = catch_unwind(AssertUnwindSafe(|| self.serve())).unwrap_or_else(|panic| {
            End::Failed(MeshError::Internal { who: who.clone(), reason: panic_message(&*panic) })
        });
        let (outcome, error) = match end {
            End::Left => (Ok(()), MeshError::Left { who }),
            End::Failed(error) => (Err(error.clone()), error),
        };
        let queued = self.inbox.close(&error);
        let deadline = match (&outcome, self.leaving) {
            (Ok(()), Some((_, deadline))) => deadline,
            _ => Instant::now() + LAST_WORDS,
        };
        // Before callbacks run, which may take their time.
        let partings = self.last_words(outcome.is_ok(), &error);
        let operations: Vec<Key> = self.board.operations.iter().map(|(key, _)| key).collect();
        for key in operations {
            self.board.end(key, Err(error.clone()));
        }
        let unbegun = self.commands.drain(..).chain(queued).filter_map(|command| match command {
            Command::Run(request) => Some(*request),
            _ => None,
        });
        for request in self.queue.drain(..).chain(unbegun).collect::<Vec<_>>() {
            self.board.refuse(request, error.clone());
        }
        // Nobody has anything to say to this thread any more. Fails only if the descriptor is not in the set.
        let _ = self.poller.remove(&self.waker);
        if let Some(pipeline) = &self.pipeline {
            let _ = self.poller.remove(pipeline.bell());
        }
        part(partings, &self.poller, &mut self.scratch, deadline);
        outcome
    }

    fn serve(&mut self) -> End {
        match self.turn_until_left() {
            Ok(()) => End::Left,
            Err(error) => End::Failed(error),
        }
    }

    fn turn_until_left(&mut self) -> Result<(), MeshError> {
        let mut events = Events::with_capacity(256);
        let mut next_beat = Instant::now();
        loop {
            let now = Instant::now();
            self.forgive_own_absence(now);
            if now >= next_beat {
                self.beat(now)?;
                next_beat = now + self.heartbeat / 4;
            }
            self.work()?;
            if self.has_left(now)? {
                return Ok(());
            }
            let timeout = match self.is_restless() || !self.sleeps_over_memory() {
                true => Duration::ZERO,
                false => next_beat.saturating_duration_since(now),
            };
            let timeout = match self.leaving {
                Some((_, deadline)) => timeout.min(deadline.saturating_duration_since(now)),
                None => timeout,
            };
            self.poller
                .wait(&mut events, Some(timeout))
                .map_err(|error| self.system("wait for peers", &error))?;
            if let Some(pipeline) = &mut self.pipeline {
                pipeline.rise();
            }
            let now = Instant::now();
            self.forgive_own_absence(now);
            for event in events.iter() {
                match (event.token, &self.pipeline) {
                    (WAKER, _) => {
                        self.waker.drain();
                        continue;
                    }
                    (BELL, Some(pipeline)) => {
                        pipeline.bell().hear();
                        continue;
                    }
                    _ => {}
                }
                let rank = event.token as u32;
                if event.writable
                    && let Seat::Present(peer) = &mut self.seats[rank as usize]
                {
                    peer.outbound.is_blocked = false;
                }
                if event.readable {
                    self.receive(rank, now)?;
                }
            }
        }
    }

    /// Does all that can be done without waiting.
    fn work(&mut self) -> Result<(), MeshError> {
        loop {
            if let Some(failure) = self.board.failure.take() {
                return Err(failure);
            }
            self.inbox.take(&mut self.commands);
            while let Some(command) = self.commands.pop_front() {
                self.obey(command)?;
            }
            self.begin_collectives()?;
            while let Some(id) = self.board.free.pop_front() {
                self.issue(id)?;
            }
            self.compute();
            self.advance_memory()?;
            self.tell_neighbours()?;
            self.withdraw();
            self.flush()?;
            if self.board.free.is_empty() && !self.may_begin() && self.board.failure.is_none() {
                return Ok(());
            }
        }
    }

    /// Whether something can go on without anything coming in.
    fn is_restless(&self) -> bool {
        let is_due = |seat: &Seat| matches!(seat, Seat::Present(peer) if peer.outbound.is_due());
        let has_more = self.pipeline.as_ref().is_some_and(Pipeline::has_more);
        has_more || !self.computing.is_empty() || self.seats.iter().any(is_due)
    }

    fn obey(&mut self, command: Command) -> Result<(), MeshError> {
        match command {
            Command::Run(request) => match request.what {
                What::Collective(_) => self.queue.push_back(*request),
                _ => {
                    self.board.begin(*request, 0, false);
                }
            },
            Command::Inquire { completion, answer } => {
                // Whoever asked may have gone.
                let _ = answer.try_send(self.awaited(&completion));
            }
            Command::Leave { timeout } => {
                self.leaving.get_or_insert((timeout, Instant::now() + timeout));
                for command in self.inbox.close(&MeshError::Left { who: self.board.who.clone() }) {
                    self.obey(command)?;
                }
            }
            Command::Abort { reason } => {
                return Err(MeshError::GaveUp { who: self.board.who.clone(), reason });
            }
        }
        Ok(())
    }

    fn may_begin(&self) -> bool {
        let Some(next) = self.queue.front() else { return false };
        let most = if next.plan.is_some() { COLLECTIVES_IN_MEMORY_MAX } else { COLLECTIVES_MAX };
        self.board.collectives < most && (self.seats.len() == 1 || self.board.sequence.may_begin())
    }

    fn begin_collectives(&mut self) -> Result<(), MeshError> {
        while self.may_begin() {
            let mut request = self.queue.pop_front().expect("there is one");
            let What::Collective(descriptor) = request.what else {
                unreachable!("only collectives are queued");
            };
            if let Some(rank) = self.gone_before(self.board.sequence.begun()) {
                let (who, what) = (self.board.who.clone(), request.what.to_string().into());
                self.board.refuse(request, MeshError::PeerLeft { who, what, rank });
                continue;
            }
            if self.seats.len() == 1 {
                self.board.begin(request, 0, false);
                continue;
            }
            let number = self.board.sequence.begin(descriptor);
            let next = (self.board.who.rank + 1) % self.board.size;
            if let Seat::Present(peer) = &mut self.seats[next as usize] {
                let begin = Header { tag: number, ..Header::bare(Kind::Begin) };
                peer.outbound.control(begin, &descriptor.encode());
            }
            let plan = request.plan.take();
            let key = self.board.begin(request, number, plan.is_some());
            if let (Some(plan), Some(pipeline)) = (plan, &mut self.pipeline) {
                pipeline.push(key, number, descriptor, plan);
            }
        }
        Ok(())
    }

    /// A rank that left before it began the collective of this number.
    fn gone_before(&self, number: u64) -> Option<u32> {
        let is_gone = |seat: &Seat| matches!(seat, Seat::Left { collectives } if *collectives <= number);
        self.seats.iter().position(is_gone).map(|rank| rank as u32)
    }

    /// Begins a step.
    fn issue(&mut self, id: StepId) -> Result<(), MeshError> {
        let Some(operation) = self.board.operations.get(id.operation) else { return Ok(()) };
        match operation.work(id.step) {
            Work::Send { peer: rank, index, from } => {
                let address = self.board.address(id.operation, index);
                match &mut self.seats[rank as usize] {
                    Seat::Present(peer) => {
                        let pairing = peer.matching.send(address, Waiting { id, from });
                        peer.act(&self.board, address, pairing)
                    }
                    _ => self.miss(id.operation, rank),
                }
            }
            Work::Receive { peer: rank, index, into } | Work::ReceiveReduce { peer: rank, index, into } => {
                let is_reduced = matches!(operation.work(id.step), Work::ReceiveReduce { .. });
                let address = self.board.address(id.operation, index);
                match &mut self.seats[rank as usize] {
                    Seat::Present(peer) => {
                        let landing = Landing::new(id, into, Some(rank), address, is_reduced);
                        let ticket = self.board.landings.insert(landing);
                        announce(peer, Kind::Ready, ticket, address, into.bytes);
                        Ok(())
                    }
                    _ => self.miss(id.operation, rank),
                }
            }
            Work::ReceiveAny { into } => {
                let address = self.board.address(id.operation, 0);
                let landing = Landing::new(id, into, None, address, false);
                let ticket = self.board.landings.insert(landing);
                let mut left = None;
                for (rank, seat) in self.seats.iter_mut().enumerate() {
                    match seat {
                        Seat::Present(peer) => announce(peer, Kind::ReadyAny, ticket, address, into.bytes),
                        Seat::Left { .. } => left = Some(rank as u32),
                        Seat::Own => {}
                    }
                }
                match left {
                    Some(rank) if !self.has_peers() => {
                        self.board.landings.remove(ticket);
                        self.miss(id.operation, rank)
                    }
                    _ => Ok(()),
                }
            }
            Work::Copy { .. } | Work::Reduce { .. } | Work::Divide { .. } => {
                self.computing.push_back(id);
                Ok(())
            }
        }
    }

    fn has_peers(&self) -> bool {
        self.seats.iter().any(|seat| matches!(seat, Seat::Present(_)))
    }

    fn compute(&mut self) {
        let mut budget = COMPUTE_BYTES;
        while budget > 0
            && let Some(&id) = self.computing.front()
        {
            let Some(operation) = self.board.operations.get_mut(id.operation) else {
                (_, self.computed) = (self.computing.pop_front(), 0);
                continue;
            };
            let work = operation.work(id.step);
            let now = operation.compute(work, self.computed, budget, self.board.size);
            budget = budget.saturating_sub((now - self.computed).max(64));
            self.computed = now;
            let (Work::Copy { into: span, .. } | Work::Reduce { into: span, .. } | Work::Divide { span }) =
                work
            else {
                unreachable!("{work:?} computes nothing");
            };
            if now == span.bytes {
                (_, self.computed) = (self.computing.pop_front(), 0);
                self.board.ended(id);
            }
        }
    }

    /// Compares what the previous rank has begun, and lets it know.
    fn tell_neighbours(&mut self) -> Result<(), MeshError> {
        let previous = (self.board.who.rank + self.board.size - 1) % self.board.size;
        match self.board.sequence.compare() {
            Ok(None) => Ok(()),
            Ok(Some(compared)) => {
                if let Seat::Present(peer) = &mut self.seats[previous as usize] {
                    peer.outbound.control(Header { tag: compared, ..Header::bare(Kind::Begun) }, &[]);
                }
                Ok(())
            }
            Err(mismatch) => Err(MeshError::OperationMismatch {
                who: self.board.who.clone(),
                number: mismatch.number,
                here: mismatch.ours.to_string().into(),
                rank: previous,
                there: mismatch.theirs.to_string().into(),
            }),
        }
    }

    fn withdraw(&mut self) {
        for (ticket, tag, winner) in self.board.withdrawn.drain(..) {
            for seat in &mut self.seats {
                if let Seat::Present(peer) = seat
                    && peer.rank != winner
                {
                    let withdraw = Header { ticket, tag, ..Header::bare(Kind::Withdraw) };
                    peer.outbound.control(withdraw, &[]);
                }
            }
        }
    }

    fn flush(&mut self) -> Result<(), MeshError> {
        for rank in 0..self.seats.len() {
            let Seat::Present(peer) = &mut self.seats[rank] else { continue };
            if peer.outbound.is_due() {
                let before = peer.outbound.written;
                peer.outbound.flush(&peer.socket, &self.board, TURN_BYTES as u64, &mut self.done);
                if peer.outbound.written > before {
                    peer.spoken = self.last_turn;
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
        for id in self.done.drain(..) {
            self.board.ended(id);
        }
        Ok(())
    }

    fn receive(&mut self, rank: u32, now: Instant) -> Result<(), MeshError> {
        let Seat::Present(peer) = &mut self.seats[rank as usize] else { return Ok(()) };
        let received = peer.receive(&mut self.board, &mut self.scratch, TURN_BYTES)?;
        if received.bytes > 0 {
            peer.heard = now;
        }
        let who = self.board.who.clone();
        match received.is_over {
            None => Ok(()),
            Some(Over::Left(collectives)) => self.let_go(rank, collectives),
            Some(Over::Aborted { culprit, reason }) => {
                Err(MeshError::Aborted { who, by: rank, culprit, reason: reason.into() })
            }
            Some(Over::Lost(reason)) => Err(MeshError::Lost { who, rank, reason: reason.into() }),
        }
    }

    fn system(&self, what: &'static str, error: &std::io::Error) -> MeshError {
        MeshError::System { who: self.board.who.clone(), what, reason: error.to_string().into() }
    }
}

fn announce(peer: &mut Peer, kind: Kind, ticket: Key, address: board::Address, bytes: usize) {
    let header = Header {
        channel: address.0,
        ticket: ticket.to_wire(),
        tag: address.1,
        bytes: bytes as u64,
        ..Header::bare(kind)
    };
    peer.outbound.control(header, &[]);
}
