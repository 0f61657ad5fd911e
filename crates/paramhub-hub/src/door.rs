//! Lets streams in: accepts connections on every interface, proves that each knows its job's nonce, and hands it to the
//! core of its route. Strangers get a bounded time, a bounded place and nothing else.

mod guest;

use std::collections::HashMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use paramhub_transport::{Events, Interest, Poller, Waker};
use tracing::{debug, warn};

use crate::core::{CoreCommand, CoreHandle};
use crate::directory::Directory;
use guest::{CameBy, Guest, Next};

/// How long a connection may take to prove itself.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Connections that may be proving themselves at once; the oldest makes room for the newest.
const GUESTS_MAX: usize = 4096;
const WAKER: u64 = u64::MAX;

/// The thread that accepts.
pub(crate) struct Door {
    poller: Poller,
    waker: Waker,
    stop: Arc<AtomicBool>,
    listeners: Vec<TcpListener>,
    /// Where processes of this host come in; its token follows those of `listeners`.
    local: Option<UnixListener>,
    /// How often each of them is listed among the hub's interfaces, side by side.
    copies: u16,
    guests: HashMap<u64, Guest>,
    next_token: u64,
    directory: Arc<Directory>,
    cores: Vec<CoreHandle>,
}

/// Stops a door.
#[derive(Clone, Debug)]
pub(crate) struct DoorStop {
    waker: Waker,
    stop: Arc<AtomicBool>,
}

impl DoorStop {
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl Door {
    pub(crate) fn new(
        listeners: Vec<TcpListener>,
        copies: u16,
        local: Option<UnixListener>,
        directory: Arc<Directory>,
        cores: Vec<CoreHandle>,
    ) -> io::Result<(Door, DoorStop)> {
        let (poller, waker) = (Poller::new()?, Waker::new()?);
        poller.add(&waker, WAKER, Interest::READABLE)?;
        for (token, listener) in listeners.iter().enumerate() {
            listener.set_nonblocking(true)?;
            poller.add(listener, token as u64, Interest::READABLE)?;
        }
        let local_token = listeners.len() as u64;
        if let Some(listener) = &local {
            listener.set_nonblocking(true)?;
            poller.add(listener, local_token, Interest::READABLE)?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let handle = DoorStop { waker: waker.clone(), stop: stop.clone() };
        let (next_token, guests) = (local_token + 1, HashMap::new());
        let door =
            Door { poller, waker, stop, listeners, local, copies, guests, next_token, directory, cores };
        Ok((door, handle))
    }

    /// Accepts until stopped.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(256);
        while !self.stop.load(Ordering::Acquire) {
            self.poller.wait(&mut events, Some(Duration::from_millis(500)))?;
            for event in events.iter() {
                match event.token {
                    WAKER => self.waker.drain(),
                    token if token <= self.listeners.len() as u64 => self.accept(token as usize),
                    token => self.attend(token),
                }
            }
            self.show_out_the_late();
        }
        Ok(())
    }

    fn accept(&mut self, token: usize) {
        loop {
            let accepted = match (self.listeners.get(token), &self.local) {
                (Some(listener), _) => listener.accept().map(|(socket, from)| {
                    let first = token as u16 * self.copies;
                    (OwnedFd::from(socket), CameBy::Interfaces(from, first..first + self.copies))
                }),
                (None, Some(local)) => {
                    local.accept().map(|(socket, _)| (OwnedFd::from(socket), CameBy::Local(Vec::new())))
                }
                (None, None) => return,
            };
            match accepted {
                Ok((socket, by)) => self.welcome(socket, by),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    // Out of descriptors, for example: the connection stays queued, and a moment's rest keeps the
                    // level-triggered poller from spinning on it. Strangers must not hold the last descriptors.
                    warn!("cannot accept a connection: {error}");
                    self.dismiss_oldest();
                    std::thread::sleep(Duration::from_millis(20));
                    return;
                }
            }
        }
    }

    fn welcome(&mut self, socket: OwnedFd, by: CameBy) {
        if self.guests.len() >= GUESTS_MAX {
            self.dismiss_oldest();
        }
        let token = self.next_token;
        self.next_token += 1;
        let ready = rustix::io::ioctl_fionbio(&socket, true)
            .map_err(io::Error::from)
            .and_then(|()| self.poller.add(&socket, token, Interest::READABLE));
        if ready.is_ok() {
            self.guests.insert(token, Guest::new(socket, by, Instant::now() + HANDSHAKE));
        }
    }

    fn attend(&mut self, token: u64) {
        let Some(guest) = self.guests.get_mut(&token) else { return };
        match guest.attend(&self.directory) {
            Ok(Next::Wait) => {
                let interest = if guest.has_said_all() { Interest::READABLE } else { Interest::BOTH };
                if self.poller.modify(&guest.socket, token, interest).is_err() {
                    self.dismiss(token);
                }
            }
            Ok(Next::Leave) => {
                self.dismiss(token);
            }
            Ok(Next::Admit(hello, admitted)) => {
                if let Some(guest) = self.dismiss(token) {
                    let core = &self.cores[usize::from(hello.core)];
                    let (namespace, route, port) = (hello.namespace, admitted.route, admitted.port);
                    let (socket, memory) = (guest.socket, admitted.memory);
                    let resumed_by = admitted.resumed_by;
                    core.send(CoreCommand::Adopt { namespace, route, port, socket, memory, resumed_by });
                }
            }
            Ok(Next::Probe(probe)) => {
                if let Some(guest) = self.dismiss(token) {
                    self.directory.probe.admit(probe, guest.socket);
                }
            }
            Err(error) => {
                debug!("{} left during its handshake: {error}", guest.by);
                self.dismiss(token);
            }
        }
    }

    fn dismiss(&mut self, token: u64) -> Option<Guest> {
        let guest = self.guests.remove(&token)?;
        // Fails only if the descriptor is not in the set, and then there is nothing to take out.
        let _ = self.poller.remove(&guest.socket);
        Some(guest)
    }

    fn dismiss_oldest(&mut self) {
        if let Some(&oldest) = self.guests.keys().min() {
            self.dismiss(oldest);
        }
    }

    fn show_out_the_late(&mut self) {
        let now = Instant::now();
        let late: Vec<u64> =
            self.guests.iter().filter(|(_, guest)| now >= guest.deadline).map(|(&token, _)| token).collect();
        for token in late {
            if let Some(guest) = self.dismiss(token) {
                debug!("{} did not finish its handshake within {HANDSHAKE:?}", guest.by);
            }
        }
    }
}
