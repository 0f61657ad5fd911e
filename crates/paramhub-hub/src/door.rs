//! Lets streams in: accepts connections on every interface, proves that each knows its job's nonce, and hands it to the
//! core of its route. Strangers get a bounded time, a bounded place and nothing else.

mod guest;

use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use paramhub_transport::handshakes::{ACCEPTS_PER_TURN, Handshakes};
use paramhub_transport::{Events, Interest, Poller, Waker};
use tracing::{debug, warn};

use crate::core::{CoreCommand, CoreHandle};
use crate::directory::Directory;
use guest::{CameBy, Guest, Next};

/// How long a connection may take to prove itself.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Connections that may be proving themselves at once.
const GUESTS_MAX: usize = 4096;
/// The share of the process's descriptors that they may hold: streams of running jobs and checkpoints need the others.
const DESCRIPTORS_SHARE: u64 = 4;
/// Pause before connections are accepted again where the system had no descriptor left for one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// How often connections that take too long are looked for.
const LATE_EVERY: Duration = Duration::from_millis(100);
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
    guests: Handshakes<Guest>,
    next_token: u64,
    warnings: Warnings,
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
        descriptors_max: u64,
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
        let places = (descriptors_max / DESCRIPTORS_SHARE).min(GUESTS_MAX as u64);
        let door = Door {
            poller,
            waker,
            stop,
            listeners,
            local,
            copies,
            guests: Handshakes::new(places as usize),
            next_token: local_token + 1,
            warnings: Warnings::default(),
            directory,
            cores,
        };
        Ok((door, handle))
    }

    /// Accepts until stopped.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(256);
        let mut next_look = Instant::now() + LATE_EVERY;
        while !self.stop.load(Ordering::Acquire) {
            self.poller.wait(&mut events, Some(Duration::from_millis(500)))?;
            for event in events.iter() {
                match event.token {
                    WAKER => self.waker.drain(),
                    token if token <= self.listeners.len() as u64 => self.accept(token as usize),
                    token => self.attend(token),
                }
            }
            let now = Instant::now();
            if now >= next_look {
                next_look = now + LATE_EVERY;
                self.dismiss_late(now);
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: usize) {
        // The poller reports the listener again if more connections wait.
        for _ in 0..ACCEPTS_PER_TURN {
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
                    // Out of descriptors, for example: the connection stays queued, and a pause keeps the level-triggered
                    // poller from spinning on it. Strangers must not hold the last descriptors.
                    self.warnings.tell(Instant::now(), || {
                        format!(
                            "cannot accept a connection: {error}; if this process has no descriptors left, raise its limit \
                             (ulimit -n, or LimitNOFILE= of its systemd unit)"
                        )
                    });
                    self.dismiss_one();
                    std::thread::sleep(ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn welcome(&mut self, socket: OwnedFd, by: CameBy) {
        let token = self.next_token;
        self.next_token += 1;
        let ready = rustix::io::ioctl_fionbio(&socket, true)
            .map_err(io::Error::from)
            .and_then(|()| self.poller.add(&socket, token, Interest::READABLE));
        if ready.is_ok() {
            let peer = by.peer();
            let guest = Guest::new(socket, by, Instant::now() + HANDSHAKE);
            let displaced = self.guests.insert(token, peer, guest);
            self.close(displaced);
        }
    }

    fn attend(&mut self, token: u64) {
        let Some(guest) = self.guests.get_mut(token) else { return };
        match guest.attend(&self.directory, &mut self.warnings) {
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
        let guest = self.guests.remove(token)?;
        // Fails only if the descriptor is not in the set, and then there is nothing to take out.
        let _ = self.poller.remove(&guest.socket);
        Some(guest)
    }

    fn dismiss_one(&mut self) {
        let displaced = self.guests.remove_one();
        self.close(displaced);
    }

    fn close(&self, guest: Option<Guest>) {
        if let Some(guest) = guest {
            debug!(
                "{} lost its place during its handshake: too many connections have proved nothing",
                guest.by
            );
            let _ = self.poller.remove(&guest.socket);
        }
    }

    fn dismiss_late(&mut self, now: Instant) {
        for guest in self.guests.remove_late(|guest| now >= guest.deadline) {
            debug!("{} did not finish its handshake within {HANDSHAKE:?}", guest.by);
            let _ = self.poller.remove(&guest.socket);
        }
    }
}

/// Warnings that strangers can cause: only so many lines a second reach the log, and the next line counts the rest.
#[derive(Debug, Default)]
struct Warnings {
    second: Option<Instant>,
    told: u32,
    left_out: u64,
}

impl Warnings {
    const PER_SECOND: u32 = 3;

    fn tell(&mut self, now: Instant, message: impl FnOnce() -> String) {
        if let Some(message) = self.admit(now, message) {
            warn!("{message}");
        }
    }

    fn admit(&mut self, now: Instant, message: impl FnOnce() -> String) -> Option<String> {
        if self.second.is_none_or(|begun| now.duration_since(begun) >= Duration::from_secs(1)) {
            (self.second, self.told) = (Some(now), 0);
        }
        if self.told == Self::PER_SECOND {
            self.left_out += 1;
            return None;
        }
        self.told += 1;
        Some(match std::mem::take(&mut self.left_out) {
            0 => message(),
            left_out => format!("{} ({left_out} more warnings of this kind were left out)", message()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_cause_a_bounded_number_of_warnings_and_the_rest_is_counted() {
        let (mut warnings, begun) = (Warnings::default(), Instant::now());
        let mut told =
            |after_ms| warnings.admit(begun + Duration::from_millis(after_ms), || "refused".into());
        let first: Vec<Option<String>> = (0..50).map(&mut told).collect();
        assert_eq!(first.iter().flatten().count(), Warnings::PER_SECOND as usize);
        assert_eq!(told(1001).unwrap(), "refused (47 more warnings of this kind were left out)");
        assert_eq!(told(1002).unwrap(), "refused");
    }
}
