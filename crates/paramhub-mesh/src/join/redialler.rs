//! Makes connections again that were cut after the mesh was joined, on a thread of its own.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use paramhub_transport::dialling::{begin_dial, dialled};
use paramhub_transport::{Events, Interest, Waker};

use super::{ASK_EVERY, LISTENER, MeshJoin, NOBODY_THERE, REDIAL_FIRST};
use crate::command::{MeshCommand, MeshInbox};

const WAKER: u64 = LISTENER - 1;
/// The interval at which a rank dials one that is to dial it.
const PROBE_EVERY: Duration = Duration::from_millis(200);
/// The shortest interval at which calls from outside cause heartbeats.
const BEAT_EVERY: Duration = Duration::from_millis(100);

/// The thread that makes connections again. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Redialler {
    /// Taken when it is dropped.
    cuts: Option<Sender<(u32, u32)>>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Redialler {
    /// Starts the thread, which puts what becomes of each cut into `inbox`.
    pub(crate) fn start(join: MeshJoin, inbox: Arc<MeshInbox>) -> io::Result<Redialler> {
        let waker = Waker::new()?;
        join.poller.add(&waker, WAKER, Interest::READABLE)?;
        let (cuts, reported) = channel();
        let thread = RediallerThread {
            waker: waker.clone(),
            reported,
            inbox,
            cuts: HashMap::new(),
            probes: HashMap::new(),
            beat_from: Instant::now(),
            join,
        };
        let thread = thread::Builder::new().name("paramhub-redial".into()).spawn(move || thread.run())?;
        Ok(Redialler { cuts: Some(cuts), waker, thread: Some(thread) })
    }

    /// Reports that the connection of this number with this rank was cut; `false` if the thread has ended, so that nobody
    /// will make it again.
    pub(crate) fn connection_is_cut(&self, rank: u32, attempt: u32) -> bool {
        let is_reported = self.cuts.as_ref().is_some_and(|cuts| cuts.send((rank, attempt)).is_ok());
        self.waker.wake();
        is_reported
    }
}

impl Drop for Redialler {
    fn drop(&mut self) {
        self.cuts = None;
        self.waker.wake();
        // The panic hook has reported a panic of the thread.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct RediallerThread {
    join: MeshJoin,
    waker: Waker,
    reported: Receiver<(u32, u32)>,
    inbox: Arc<MeshInbox>,
    /// The ranks whose connections are cut.
    cuts: HashMap<u32, Cut>,
    /// Connections to ranks that are to dial this one. They show whether such a rank still listens, and remind it to try
    /// its own connections.
    probes: HashMap<u64, (u32, OwnedFd)>,
    /// When calls from outside may cause heartbeats again.
    beat_from: Instant,
}

struct Cut {
    deadline: Instant,
    /// When to dial the rank next, if it is the one that is to dial.
    probe_at: Option<Instant>,
}

impl RediallerThread {
    fn run(mut self) {
        let mut events = Events::with_capacity(64);
        loop {
            let now = Instant::now();
            if !self.take_reports(now) {
                return;
            }
            self.give_up_late_ones(now);
            self.join.dial_those_due(now);
            self.join.remove_expired(now);
            self.probe_those_due(now);
            let timeout = match self.cuts.is_empty() && self.join.pending.is_empty() {
                true => None,
                false => Some(ASK_EVERY.min(self.join.next_dial(now))),
            };
            if let Err(error) = self.join.poller.wait(&mut events, timeout) {
                return self.fail_all(&error.to_string());
            }
            for event in events.iter() {
                match event.token {
                    LISTENER => self.join.accept(),
                    WAKER => self.waker.drain(),
                    token if self.probes.contains_key(&token) => self.end_probe(token),
                    token => {
                        if let Err((rank, reason)) = self.join.advance_handshake(token) {
                            self.give_up(rank, reason);
                        }
                    }
                }
            }
            self.deliver();
            self.try_connections();
        }
    }

    /// Takes the reports of cuts; `false` if the mesh has ended.
    fn take_reports(&mut self, now: Instant) -> bool {
        loop {
            match self.reported.try_recv() {
                Ok((rank, attempt)) => self.begin(rank, attempt, now),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn begin(&mut self, rank: u32, attempt: u32, now: Instant) {
        let state = &mut self.join.ranks[rank as usize];
        if state.attempt != Some(attempt) || self.cuts.contains_key(&rank) {
            // The connection has been replaced meanwhile.
            return;
        }
        state.last_error = None;
        state.pause = REDIAL_FIRST;
        let dials = rank < self.join.config.rank;
        if dials {
            state.dial_at = Some(now);
        }
        let deadline = now + self.join.config.redial_grace;
        self.cuts.insert(rank, Cut { deadline, probe_at: (!dials).then_some(now) });
    }

    /// Hands new connections to the mesh.
    fn deliver(&mut self) {
        for (rank, state) in self.join.ranks.iter_mut().enumerate() {
            let (Some(socket), Some(attempt)) = (state.socket.take(), state.attempt) else { continue };
            let rank = rank as u32;
            self.cuts.remove(&rank);
            // A mesh that has ended needs it no more.
            let _ = self.inbox.put(MeshCommand::Reconnected { rank, attempt, socket });
        }
    }

    /// Has the mesh send heartbeats if a call has ended without a word. The caller may be a rank whose connection with
    /// this one is cut, of which this one learns when it sends.
    fn try_connections(&mut self) {
        let now = Instant::now();
        if std::mem::take(&mut self.join.was_hung_up) && now >= self.beat_from {
            self.beat_from = now + BEAT_EVERY;
            let _ = self.inbox.put(MeshCommand::Beat);
        }
    }

    fn give_up_late_ones(&mut self, now: Instant) {
        let late = self.cuts.iter().filter(|(_, cut)| cut.deadline <= now).map(|(&rank, _)| rank);
        for rank in late.collect::<Vec<u32>>() {
            let grace = self.join.config.redial_grace.as_secs_f64();
            let last_error = self.join.ranks[rank as usize].last_error.take();
            self.give_up(
                rank,
                match last_error {
                    Some(error) => format!("{grace} s have passed, and {error}"),
                    None => format!("{grace} s have passed"),
                },
            );
        }
    }

    fn give_up(&mut self, rank: u32, reason: String) {
        if self.cuts.remove(&rank).is_none() {
            return;
        }
        self.join.remove_handshake(u64::from(rank));
        let state = &mut self.join.ranks[rank as usize];
        state.dial_at = None;
        let attempt = state.attempt.expect("a connection that was cut had been made");
        let _ = self.inbox.put(MeshCommand::NotReconnected { rank, attempt, reason });
    }

    fn fail_all(&mut self, reason: &str) {
        for rank in self.cuts.keys().copied().collect::<Vec<u32>>() {
            self.give_up(rank, reason.to_owned());
        }
    }

    /// Dials the ranks that are to dial this one. If one refuses the connection, its process has ended.
    fn probe_those_due(&mut self, now: Instant) {
        for (&rank, cut) in &mut self.cuts {
            let address = self.join.config.addresses[rank as usize];
            let is_known = address.port() != 0 && !address.ip().is_unspecified();
            if !is_known || cut.probe_at.is_none_or(|at| at > now) {
                continue;
            }
            cut.probe_at = Some(now + PROBE_EVERY);
            let token = self.join.next_token;
            self.join.next_token += 1;
            // What the system refuses here says nothing about the other rank.
            if let Ok(socket) = begin_dial(address)
                && self.join.poller.add(&socket, token, Interest::WRITABLE).is_ok()
            {
                self.probes.insert(token, (rank, socket));
            }
        }
    }

    fn end_probe(&mut self, token: u64) {
        let Some((rank, socket)) = self.probes.remove(&token) else { return };
        let outcome = dialled(&socket);
        // This fails only if the descriptor is not in the set.
        let _ = self.join.poller.remove(&socket);
        if outcome.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
            self.give_up(rank, NOBODY_THERE.to_owned());
        }
    }
}
