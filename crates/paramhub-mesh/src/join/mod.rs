//! Joining: every pair of ranks gets one connection, and each proves that it knows the mesh's secret.
//!
//! The rank with the higher number dials. All dials and all guests are served by one loop that waits for nobody in particular,
//! so the order in which ranks arrive does not matter, and a stranger delays nobody.

mod knock;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::auth::Incarnation;
use paramhub_core::wire::Refusal;
use paramhub_transport::handshakes::{ACCEPTS_PER_TURN, Handshakes};
use paramhub_transport::socket::{begin_dial, listen, prepare};
use paramhub_transport::{Events, Interest, Poller};

use crate::config::MeshConfig;
use crate::error::{MeshError, Who};
use crate::memory::agreement::{Patience, agree};
use crate::mesh::Mesh;
use crate::wire::Hello;
use knock::{Knock, Progress, draw};

/// How long a connection that came in may take to prove itself.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Connections from others that may be proving themselves at once.
const GUESTS_MAX: usize = 2048;
/// Pause before a refused or broken dial is tried again, doubled each time up to the second.
const REDIAL_FIRST: Duration = Duration::from_millis(20);
const REDIAL_MAX: Duration = Duration::from_secs(1);
/// How often the caller is asked whether to go on.
const ASK_EVERY: Duration = Duration::from_millis(100);
const LISTENER: u64 = u64::MAX;

/// Listens for the peers of a mesh that is about to be joined.
#[derive(Debug)]
pub struct MeshListener {
    listener: TcpListener,
    address: SocketAddr,
}

impl MeshListener {
    /// Listens on `ip` at a port that the system chooses. Nothing is accepted before [`join`](Self::join).
    pub fn bind(ip: IpAddr) -> io::Result<MeshListener> {
        MeshListener::bind_to(SocketAddr::new(ip, 0))
    }

    /// [`bind`](Self::bind) at a port of the caller's choice.
    pub fn bind_to(address: SocketAddr) -> io::Result<MeshListener> {
        let listener = listen(address)?;
        let address = listener.local_addr()?;
        Ok(MeshListener { listener, address })
    }

    /// For the other ranks. If `ip` was unspecified, so is this one's.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connects to every other rank. Returns once all connections stand, or with the ranks that are missing.
    pub fn join(self, config: MeshConfig) -> Result<Mesh, MeshError> {
        self.join_while(config, || true)
    }

    /// [`join`](Self::join), which asks about ten times a second whether to go on.
    pub fn join_while(
        self,
        config: MeshConfig,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Mesh, MeshError> {
        config.check()?;
        let deadline = Instant::now() + config.join_timeout;
        let sockets = if config.size == 1 {
            drop(self.listener);
            vec![None]
        } else {
            Joining::new(&config, self.listener)?.run(&mut goes_on)?
        };
        let memory = agree(&config, &sockets, Patience { deadline, goes_on: &mut goes_on })?;
        Mesh::start(&config, sockets, memory)
    }
}

/// The connections so far, and those on their way.
struct Joining<'a> {
    config: &'a MeshConfig,
    who: Who,
    listener: TcpListener,
    poller: Poller,
    incarnation: Incarnation,
    seats: Vec<Seat>,
    /// Handshakes that this rank began, by the rank that it dials; this is their token.
    dials: HashMap<u64, Knock>,
    /// Handshakes that others began. Their tokens begin at `size`.
    guests: Handshakes<Knock>,
    next_guest: u64,
}

/// What is known of a rank.
struct Seat {
    joined: Option<OwnedFd>,
    /// Which process dialled, of one that dials.
    incarnation: Option<Incarnation>,
    /// When to dial, of one that is to be dialled.
    dial_at: Option<Instant>,
    pause: Duration,
    /// What came of the last attempt.
    last: Option<Arc<str>>,
}

impl<'a> Joining<'a> {
    fn new(config: &'a MeshConfig, listener: TcpListener) -> Result<Self, MeshError> {
        let who = config.who();
        let prepared = || -> io::Result<(Poller, Incarnation)> {
            let poller = Poller::new()?;
            listener.set_nonblocking(true)?;
            poller.add(&listener, LISTENER, Interest::READABLE)?;
            Ok((poller, Incarnation(draw()?)))
        };
        let (poller, incarnation) = prepared().map_err(|error| MeshError::System {
            who: who.clone(),
            what: "prepare to join",
            reason: error.to_string().into(),
        })?;
        let now = Instant::now();
        let seats = (0..config.size)
            .map(|rank| {
                let dial_at = (rank < config.rank).then_some(now);
                Seat { joined: None, incarnation: None, dial_at, pause: REDIAL_FIRST, last: None }
            })
            .collect();
        let (dials, guests) = (HashMap::new(), Handshakes::new(GUESTS_MAX));
        let next_guest = u64::from(config.size);
        Ok(Joining { config, who, listener, poller, incarnation, seats, dials, guests, next_guest })
    }

    fn run(mut self, goes_on: &mut dyn FnMut() -> bool) -> Result<Vec<Option<OwnedFd>>, MeshError> {
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
                if !goes_on() {
                    return Err(MeshError::Interrupted { who: self.who });
                }
                next_question = now + ASK_EVERY;
            }
            self.dial_those_due(now);
            self.dismiss_late(now);
            let left = self.config.join_timeout.saturating_sub(now.duration_since(begun));
            let timeout = left.min(ASK_EVERY).min(self.next_dial(now));
            self.poller.wait(&mut events, Some(timeout)).map_err(|error| MeshError::System {
                who: self.who.clone(),
                what: "wait for peers",
                reason: error.to_string().into(),
            })?;
            for event in events.iter() {
                match event.token {
                    LISTENER => self.accept(),
                    token => self.attend(token)?,
                }
            }
        }
        Ok(self.seats.into_iter().map(|seat| seat.joined).collect())
    }

    fn missing(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.config.size)
            .filter(|rank| *rank != self.config.rank && self.seats[*rank as usize].joined.is_none())
    }

    fn too_late(&self) -> MeshError {
        let missing = self.missing().map(|rank| {
            let why = match (&self.seats[rank as usize].last, rank < self.config.rank) {
                (Some(last), _) => Arc::clone(last),
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
            who: self.who.clone(),
            size: self.config.size,
            seconds: self.config.join_timeout.as_secs_f64(),
            missing: missing.collect(),
        }
    }

    fn next_dial(&self, now: Instant) -> Duration {
        let due = self.seats.iter().filter_map(|seat| seat.dial_at).min();
        due.map_or(ASK_EVERY, |due| due.saturating_duration_since(now))
    }

    fn dial_those_due(&mut self, now: Instant) {
        for rank in 0..self.config.rank {
            let seat = &mut self.seats[rank as usize];
            if seat.dial_at.is_some_and(|due| due <= now) {
                seat.dial_at = None;
                if let Err(error) = self.dial(rank) {
                    self.dial_again(rank, error.to_string());
                }
            }
        }
    }

    fn dial(&mut self, rank: u32) -> io::Result<()> {
        let hello = Hello {
            rank: self.config.rank,
            size: self.config.size,
            peer: rank,
            incarnation: self.incarnation,
            challenge: draw()?,
        };
        let address = self.config.addresses[rank as usize];
        let knock = Knock::dialler(begin_dial(address)?, address, hello);
        self.poller.add(&knock.socket, u64::from(rank), knock.interest())?;
        self.dials.insert(u64::from(rank), knock);
        Ok(())
    }

    fn dial_again(&mut self, rank: u32, why: String) {
        let seat = &mut self.seats[rank as usize];
        seat.last = Some(format!("{}: {why}", self.config.addresses[rank as usize]).into());
        seat.dial_at = Some(Instant::now() + seat.pause);
        seat.pause = (seat.pause * 2).min(REDIAL_MAX);
    }

    fn accept(&mut self) {
        // The poller reports the listener again if more connections wait.
        for _ in 0..ACCEPTS_PER_TURN {
            match self.listener.accept() {
                Ok((socket, address)) => self.welcome(socket.into(), address),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    // Out of descriptors, for example: the connection stays queued, and a pause keeps the level-triggered
                    // poller from spinning on it. Strangers must not hold the last descriptors.
                    let displaced = self.guests.remove_one();
                    self.forget(displaced);
                    std::thread::sleep(Duration::from_millis(20));
                    return;
                }
            }
        }
    }

    fn welcome(&mut self, socket: OwnedFd, address: SocketAddr) {
        let token = self.next_guest;
        self.next_guest += 1;
        let knock = Knock::listener(socket, address, Instant::now() + HANDSHAKE);
        let ready = rustix::io::ioctl_fionbio(&knock.socket, true)
            .map_err(io::Error::from)
            .and_then(|()| self.poller.add(&knock.socket, token, knock.interest()));
        if ready.is_ok() {
            let displaced = self.guests.insert(token, Some(address.ip()), knock);
            self.forget(displaced);
        }
    }

    fn attend(&mut self, token: u64) -> Result<(), MeshError> {
        let knock = match token < u64::from(self.config.size) {
            true => self.dials.get_mut(&token),
            false => self.guests.get_mut(token),
        };
        let Some(knock) = knock else { return Ok(()) };
        let (config, seats) = (self.config, &mut self.seats);
        let progress = knock.attend(&config.secret, &mut |hello| judge(config, seats, hello));
        if let Some((rank, why)) = knock.take_refusal()
            && (config.rank + 1..config.size).contains(&rank)
        {
            let said = format!("a connection from {} said it was this rank, but {why}", knock.address);
            self.seats[rank as usize].last = Some(said.into());
        }
        match progress {
            Progress::Waits => {
                if self.poller.modify(&knock.socket, token, knock.interest()).is_err() {
                    self.dismiss(token);
                }
            }
            Progress::Joined => self.seat(token, token as u32),
            Progress::Admitted(rank) => self.seat(token, rank),
            Progress::Refused(reason) => {
                let address = knock.address.to_string().into();
                return Err(MeshError::Refused {
                    who: self.who.clone(),
                    rank: token as u32,
                    address,
                    reason: reason.into(),
                });
            }
            Progress::Failed(why) => {
                self.dismiss(token);
                if token < u64::from(config.size) {
                    self.dial_again(token as u32, why);
                }
            }
        }
        Ok(())
    }

    /// A handshake has ended well.
    fn seat(&mut self, token: u64, rank: u32) {
        let Some(knock) = self.dismiss(token) else { return };
        let seat = &mut self.seats[rank as usize];
        match prepare(&knock.socket) {
            Ok(()) => seat.joined = Some(knock.socket),
            Err(error) if token < u64::from(self.config.size) => self.dial_again(rank, error.to_string()),
            Err(error) => seat.last = Some(error.to_string().into()),
        }
    }

    fn dismiss(&mut self, token: u64) -> Option<Knock> {
        let knock = match token < u64::from(self.config.size) {
            true => self.dials.remove(&token),
            false => self.guests.remove(token),
        }?;
        // Fails only if the descriptor is not in the set, and then there is nothing to take out.
        let _ = self.poller.remove(&knock.socket);
        Some(knock)
    }

    fn forget(&self, guest: Option<Knock>) {
        if let Some(guest) = guest {
            let _ = self.poller.remove(&guest.socket);
        }
    }

    fn dismiss_late(&mut self, now: Instant) {
        for guest in self.guests.remove_late(|guest| guest.deadline.is_some_and(|deadline| deadline <= now)) {
            let _ = self.poller.remove(&guest.socket);
        }
    }
}

/// What stands against a rank that has proved that it knows the secret.
fn judge(config: &MeshConfig, seats: &mut [Seat], hello: &Hello) -> Result<(), (Refusal, String)> {
    let Hello { rank, size, peer, incarnation, .. } = *hello;
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
    let seat = &mut seats[rank as usize];
    // The same process dials again if it lost its connection before it was told that it had one.
    if seat.joined.is_some() && seat.incarnation != Some(incarnation) {
        let message = format!("rank {rank} is connected already: two processes have the same rank");
        return Err((Refusal::RankTaken, message));
    }
    seat.incarnation = Some(incarnation);
    Ok(())
}
