//! Joining: every pair of ranks gets one connection, and each proves that it knows the mesh's secret.
//!
//! The rank with the higher number dials. One loop serves all dials and all accepted connections and waits
//! for none in particular, so the order in which ranks arrive does not matter, and a foreign connection
//! delays no rank.
//!
//! Later the same loop makes connections again that were cut: see [`Redialler`].

mod handshake;
mod redialler;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::auth::Incarnation;
use paramhub_core::wire::Refusal;
use paramhub_transport::dialling::begin_dial;
use paramhub_transport::greeting::draw;
use paramhub_transport::handshakes::{ACCEPTS_PER_TURN, PendingHandshakes};
use paramhub_transport::socket::{listen, prepare};
use paramhub_transport::{Events, Interest, Poller};
use paramhub_trust::StreamListener;

use crate::config::MeshConfig;
use crate::error::{MeshError, MeshRank};
use crate::memory::agreement::{JoinDeadline, agree};
use crate::mesh::Mesh;
use crate::socket::PeerSocket;
use crate::wire::Hello;
use handshake::{HandshakeProgress, JoinHandshake};
pub(crate) use redialler::Redialler;

/// How long the handshake of an accepted connection may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long a dial may take that makes a connection again, at most. What has cut the connection may lose another one
/// without a word.
const REDIAL_HANDSHAKE: Duration = Duration::from_secs(1);
/// The maximum of accepted connections in their handshakes.
const PENDING_MAX: usize = 2048;
/// The pause before a refused or broken dial is tried again, doubled each time up to one second.
const REDIAL_FIRST: Duration = Duration::from_millis(20);
const REDIAL_MAX: Duration = Duration::from_secs(1);
/// How often the caller's function is asked whether to go on.
const ASK_EVERY: Duration = Duration::from_millis(100);
const LISTENER: u64 = u64::MAX;
/// What is known where a connection is refused.
const NOBODY_THERE: &str = "no program listens there";

/// Listens for the peers of a mesh that is about to be joined.
#[derive(Debug)]
pub struct MeshListener {
    listener: TcpListener,
    address: SocketAddr,
}

impl MeshListener {
    /// Listens on `ip` at a port that the system chooses. Accepts no connection before [`join`](Self::join).
    pub fn bind(ip: IpAddr) -> io::Result<MeshListener> {
        MeshListener::bind_to(SocketAddr::new(ip, 0))
    }

    /// [`bind`](Self::bind) at a port that the caller chooses.
    pub fn bind_to(address: SocketAddr) -> io::Result<MeshListener> {
        let listener = listen(address)?;
        let address = listener.local_addr()?;
        Ok(MeshListener { listener, address })
    }

    /// The address for the other ranks. If `ip` was unspecified, so is the address's.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connects to every other rank. Returns once all connections are established, or with an error that
    /// names the missing ranks.
    pub fn join(self, config: MeshConfig) -> Result<Mesh, MeshError> {
        self.join_while(config, |_| true)
    }

    /// [`join`](Self::join) that asks `goes_on(missing)` about ten times a second, with the ranks that are not connected yet.
    pub fn join_while(
        self,
        config: MeshConfig,
        mut goes_on: impl FnMut(&[u32]) -> bool,
    ) -> Result<Mesh, MeshError> {
        config.check()?;
        let deadline = Instant::now() + config.join_timeout;
        if config.size == 1 {
            let memory = agree(&config, &mut [None], JoinDeadline { at: deadline, goes_on: &mut goes_on })?;
            return Mesh::start(&config, vec![None], memory, None);
        }
        let mut join = MeshJoin::new(config.clone(), self.listener)?;
        let mut sockets = join.run(&mut goes_on)?;
        let memory = agree(&config, &mut sockets, JoinDeadline { at: deadline, goes_on: &mut goes_on })?;
        let dials_again = memory.is_err() && !config.redial_grace.is_zero();
        Mesh::start(&config, sockets, memory, dials_again.then_some(join))
    }
}

/// The connections so far, and the handshakes under way.
pub(crate) struct MeshJoin {
    config: MeshConfig,
    this_rank: MeshRank,
    listener: TcpListener,
    poller: Poller,
    incarnation: Incarnation,
    /// Makes the keys of connections that others dial; `None` if they are not encrypted.
    tls: Option<StreamListener>,
    ranks: Vec<RankConnection>,
    /// Handshakes that this rank began, by the rank that it dials, which is also their token.
    dials: HashMap<u64, JoinHandshake>,
    /// Handshakes that other ranks began. Their tokens begin at `size`.
    pending: PendingHandshakes<JoinHandshake>,
    next_token: u64,
    /// Whether an accepted connection has ended in its handshake.
    was_hung_up: bool,
}

/// The state of the connection with a rank.
struct RankConnection {
    socket: Option<PeerSocket>,
    /// The number of the newest connection; `None` before the first.
    attempt: Option<u32>,
    /// The number of the last dial. Each gets another, since the other end may have taken one that failed here.
    last_dial: u32,
    /// The incarnation of a rank that dials this one.
    incarnation: Option<Incarnation>,
    /// When to dial a rank that this one dials.
    dial_at: Option<Instant>,
    pause: Duration,
    /// The error of the last attempt.
    last_error: Option<Arc<str>>,
}

impl MeshJoin {
    fn new(config: MeshConfig, listener: TcpListener) -> Result<Self, MeshError> {
        let this_rank = config.this_rank();
        let prepared = || -> io::Result<(Poller, Incarnation, Option<StreamListener>)> {
            let poller = Poller::new()?;
            listener.set_nonblocking(true)?;
            poller.add(&listener, LISTENER, Interest::READABLE)?;
            let tls = config.encrypts.then(StreamListener::new).transpose().map_err(io::Error::other)?;
            Ok((poller, Incarnation(draw()?), tls))
        };
        let (poller, incarnation, tls) = prepared().map_err(|error| MeshError::System {
            this_rank: this_rank.clone(),
            what: "prepare to join",
            reason: error.to_string().into(),
        })?;
        let now = Instant::now();
        let ranks = (0..config.size)
            .map(|rank| {
                let dial_at = (rank < config.rank).then_some(now);
                RankConnection {
                    socket: None,
                    attempt: None,
                    last_dial: 0,
                    incarnation: None,
                    dial_at,
                    pause: REDIAL_FIRST,
                    last_error: None,
                }
            })
            .collect();
        let (dials, pending) = (HashMap::new(), PendingHandshakes::new(PENDING_MAX));
        let next_token = u64::from(config.size);
        Ok(MeshJoin {
            config,
            this_rank,
            listener,
            poller,
            incarnation,
            tls,
            ranks,
            dials,
            pending,
            next_token,
            was_hung_up: false,
        })
    }

    /// Runs until every rank is connected, and returns the connections by rank.
    fn run(&mut self, goes_on: &mut dyn FnMut(&[u32]) -> bool) -> Result<Vec<Option<PeerSocket>>, MeshError> {
        let begun = Instant::now();
        let mut next_question = begun + ASK_EVERY;
        let mut events = Events::with_capacity(256);
        loop {
            let now = Instant::now();
            if self.missing().next().is_none() {
                break;
            }
            if now.duration_since(begun) >= self.config.join_timeout {
                return Err(self.too_late());
            }
            if now >= next_question {
                if !goes_on(&self.missing().collect::<Vec<_>>()) {
                    return Err(MeshError::Interrupted { this_rank: self.this_rank.clone() });
                }
                next_question = now + ASK_EVERY;
            }
            self.dial_those_due(now);
            self.remove_expired(now);
            let left = self.config.join_timeout.saturating_sub(now.duration_since(begun));
            let timeout = left.min(ASK_EVERY).min(self.next_dial(now));
            self.poller.wait(&mut events, Some(timeout)).map_err(|error| MeshError::System {
                this_rank: self.this_rank.clone(),
                what: "wait for peers",
                reason: error.to_string().into(),
            })?;
            for event in events.iter() {
                match event.token {
                    LISTENER => self.accept(),
                    token => self.advance_handshake(token).map_err(|refused| self.refused_by(refused))?,
                }
            }
        }
        Ok(self.ranks.iter_mut().map(|state| state.socket.take()).collect())
    }

    fn missing(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.config.size)
            .filter(|rank| *rank != self.config.rank && self.ranks[*rank as usize].socket.is_none())
    }

    fn too_late(&self) -> MeshError {
        let missing = self.missing().map(|rank| {
            let why = match (&self.ranks[rank as usize].last_error, rank < self.config.rank) {
                (Some(last_error), _) => Arc::clone(last_error),
                (None, true) => format!(
                    "{} is connected but silent: it has not called join",
                    self.config.addresses[rank as usize]
                )
                .into(),
                (None, false) => "it has not dialled".into(),
            };
            (rank, why)
        });
        MeshError::Join {
            this_rank: self.this_rank.clone(),
            size: self.config.size,
            seconds: self.config.join_timeout.as_secs_f64(),
            missing: missing.collect(),
        }
    }

    fn next_dial(&self, now: Instant) -> Duration {
        let due = self.ranks.iter().filter_map(|state| state.dial_at).min();
        due.map_or(ASK_EVERY, |due| due.saturating_duration_since(now))
    }

    fn dial_those_due(&mut self, now: Instant) {
        for rank in 0..self.config.rank {
            let state = &mut self.ranks[rank as usize];
            if state.dial_at.is_some_and(|due| due <= now) {
                state.dial_at = None;
                if let Err(error) = self.dial(rank) {
                    self.dial_again(rank, error.to_string());
                }
            }
        }
    }

    fn dial(&mut self, rank: u32) -> io::Result<()> {
        let state = &mut self.ranks[rank as usize];
        let deadline = state.attempt.map(|_| {
            state.last_dial += 1;
            Instant::now() + REDIAL_HANDSHAKE.min(self.config.redial_grace / 4)
        });
        let hello = Hello {
            rank: self.config.rank,
            size: self.config.size,
            peer: rank,
            attempt: state.last_dial,
            incarnation: self.incarnation,
            challenge: draw()?,
        };
        let address = self.config.addresses[rank as usize];
        let encrypts = self.config.encrypts;
        let handshake = JoinHandshake::dialler(begin_dial(address)?, address, hello, encrypts, deadline);
        self.poller.add(&handshake.socket, u64::from(rank), handshake.interest())?;
        self.dials.insert(u64::from(rank), handshake);
        Ok(())
    }

    fn dial_again(&mut self, rank: u32, why: String) {
        let state = &mut self.ranks[rank as usize];
        state.last_error = Some(format!("{}: {why}", self.config.addresses[rank as usize]).into());
        state.dial_at = Some(Instant::now() + state.pause);
        state.pause = (state.pause * 2).min(REDIAL_MAX);
    }

    fn accept(&mut self) {
        // The poller reports the listener again if more connections wait.
        for _ in 0..ACCEPTS_PER_TURN {
            match self.listener.accept() {
                Ok((socket, address)) => self.begin_handshake(socket.into(), address),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    // The process is out of descriptors, for example: the connection stays queued, and a
                    // pause keeps the level-triggered poller from spinning on it. Connections in their
                    // handshakes must not hold the last descriptors.
                    let displaced = self.pending.remove_one();
                    self.deregister(displaced);
                    std::thread::sleep(Duration::from_millis(20));
                    return;
                }
            }
        }
    }

    fn begin_handshake(&mut self, socket: OwnedFd, address: SocketAddr) {
        let token = self.next_token;
        self.next_token += 1;
        let encrypts = self.config.encrypts;
        let handshake = JoinHandshake::listener(socket, address, encrypts, Instant::now() + HANDSHAKE);
        let ready = rustix::io::ioctl_fionbio(&handshake.socket, true)
            .map_err(io::Error::from)
            .and_then(|()| self.poller.add(&handshake.socket, token, handshake.interest()));
        if ready.is_ok() {
            let displaced = self.pending.insert(token, Some(address.ip()), handshake);
            self.deregister(displaced);
        }
    }

    fn refused_by(&self, (rank, reason): (u32, String)) -> MeshError {
        let address = self.config.addresses[rank as usize].to_string().into();
        MeshError::Refused { this_rank: self.this_rank.clone(), rank, address, reason: reason.into() }
    }

    /// Advances a handshake. Fails with the rank and the reason if a rank refuses the connection for good.
    fn advance_handshake(&mut self, token: u64) -> Result<(), (u32, String)> {
        let handshake = match token < u64::from(self.config.size) {
            true => self.dials.get_mut(&token),
            false => self.pending.get_mut(token),
        };
        let Some(handshake) = handshake else { return Ok(()) };
        let (config, ranks, tls) = (&self.config, &mut self.ranks, self.tls.as_ref());
        let mut check = |hello: &Hello| check_hello(config, ranks, hello);
        let progress = handshake.advance_handshake(&config.secrets, tls, &mut check);
        if let Some((rank, why)) = handshake.take_refusal()
            && (config.rank + 1..config.size).contains(&rank)
        {
            let said = format!("a connection from {} said it was this rank, but {why}", handshake.address);
            self.ranks[rank as usize].last_error = Some(said.into());
        }
        match progress {
            HandshakeProgress::Waits => {
                if self.poller.modify(&handshake.socket, token, handshake.interest()).is_err() {
                    self.remove_handshake(token);
                }
            }
            HandshakeProgress::Joined(hello) => self.finish_handshake(token, hello.peer, hello.attempt),
            HandshakeProgress::Admitted(hello) => self.finish_handshake(token, hello.rank, hello.attempt),
            HandshakeProgress::Refused(reason) => {
                self.remove_handshake(token);
                return Err((token as u32, reason));
            }
            HandshakeProgress::NobodyThere => {
                self.remove_handshake(token);
                if self.ranks[token as usize].attempt.is_some() {
                    return Err((token as u32, NOBODY_THERE.to_owned()));
                }
                self.dial_again(token as u32, NOBODY_THERE.to_owned());
            }
            HandshakeProgress::Failed(why) => {
                self.remove_handshake(token);
                match token < u64::from(self.config.size) {
                    true => self.dial_again(token as u32, why),
                    false => self.was_hung_up = true,
                }
            }
        }
        Ok(())
    }

    /// Ends a handshake that succeeded.
    fn finish_handshake(&mut self, token: u64, rank: u32, attempt: u32) {
        let Some(handshake) = self.remove_handshake(token) else { return };
        let state = &mut self.ranks[rank as usize];
        match prepare(&handshake.socket) {
            Ok(()) => {
                let keys = handshake.keys();
                state.socket = Some(PeerSocket::new(handshake.socket, keys.as_ref()));
                state.attempt = Some(attempt);
            }
            Err(error) if token < u64::from(self.config.size) => self.dial_again(rank, error.to_string()),
            Err(error) => state.last_error = Some(error.to_string().into()),
        }
    }

    fn remove_handshake(&mut self, token: u64) -> Option<JoinHandshake> {
        let handshake = match token < u64::from(self.config.size) {
            true => self.dials.remove(&token),
            false => self.pending.remove(token),
        }?;
        // This fails only if the descriptor is not in the set, and then there is nothing to remove.
        let _ = self.poller.remove(&handshake.socket);
        Some(handshake)
    }

    fn deregister(&self, pending: Option<JoinHandshake>) {
        if let Some(pending) = pending {
            let _ = self.poller.remove(&pending.socket);
        }
    }

    fn remove_expired(&mut self, now: Instant) {
        for pending in
            self.pending.remove_late(|pending| pending.deadline.is_some_and(|deadline| deadline <= now))
        {
            let _ = self.poller.remove(&pending.socket);
        }
        let late = |dial: &JoinHandshake| dial.deadline.is_some_and(|deadline| deadline <= now);
        let late = self.dials.iter().filter(|(_, dial)| late(dial)).map(|(&token, _)| token);
        for token in late.collect::<Vec<u64>>() {
            self.remove_handshake(token);
            self.dial_again(token as u32, "it does not answer".to_owned());
        }
    }
}

/// Checks the hello of a rank that has proved that it knows the secret.
fn check_hello(
    config: &MeshConfig,
    ranks: &mut [RankConnection],
    hello: &Hello,
) -> Result<(), (Refusal, String)> {
    let Hello { rank, size, peer, attempt, incarnation, .. } = *hello;
    let (own, own_size) = (config.rank, config.size);
    if peer != own {
        let message =
            format!("this is rank {own}, not rank {peer}: the ranks' addresses are in another order");
        return Err((Refusal::Rank, message));
    }
    if size != own_size {
        let message =
            format!("this mesh has {own_size} ranks, not {size}: start all ranks with the same number");
        return Err((Refusal::Rank, message));
    }
    if rank >= size || rank <= own {
        let message = format!("rank {rank} does not dial rank {own} in a mesh of {size}");
        return Err((Refusal::Rank, message));
    }
    let state = &mut ranks[rank as usize];
    if state.attempt.is_some() && state.incarnation != Some(incarnation) {
        let message = format!("rank {rank} is connected already: two processes have the same rank");
        return Err((Refusal::RankTaken, message));
    }
    let is_expected = match (state.attempt, &state.socket) {
        (None, _) => attempt == 0,
        // A process that lost its connection before it received the verdict dials again.
        (Some(0), Some(_)) if attempt == 0 => true,
        (Some(newest), _) => attempt > newest,
    };
    if !is_expected {
        let message = format!("connection {attempt} of rank {rank} is not the one that is expected next");
        return Err((Refusal::Stale, message));
    }
    state.incarnation = Some(incarnation);
    Ok(())
}
