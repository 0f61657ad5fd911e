//! Accepts connections on every interface, proves that each knows its secret of a job, and passes it to the core
//! of its route. The time and the number of connections that have proved nothing are bounded.

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod exercise;
mod pending;

use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use paramhub_core::stream_admission::StreamPlace;
use paramhub_transport::handshakes::{ACCEPTS_PER_TURN, PendingHandshakes};
use paramhub_transport::{Events, Interest, Poller, Waker};
use paramhub_trust::StreamListener;
use tracing::{debug, warn};

use crate::core::{AcceptedStream, Carrier, CoreCommand, CoreHandle};
use crate::directory::Directory;
use pending::{ConnectionOrigin, HandshakeStep, PendingConnection};

/// How long a connection may take for its proof.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Connections whose handshake may be under way at once.
const HANDSHAKES_MAX: usize = 4096;
/// The divisor of the process's descriptors that these may hold: streams of running jobs and checkpoints need
/// the others.
const DESCRIPTORS_SHARE: u64 = 4;
/// Pause before the next accept if the system had no descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// How often the acceptor looks for connections that take too long.
const LATE_EVERY: Duration = Duration::from_millis(100);
const WAKER: u64 = u64::MAX;

/// The thread that accepts connections and runs their handshakes.
pub(crate) struct Acceptor {
    poller: Poller,
    waker: Waker,
    stop: Arc<AtomicBool>,
    listeners: Vec<TcpListener>,
    /// The listener for processes of this host; its token follows those of `listeners`.
    local: Option<UnixListener>,
    /// How many copies of each of them the hub's shape lists, side by side.
    copies: u16,
    handshakes: PendingHandshakes<PendingConnection>,
    /// Makes the keys of encrypted streams.
    tls: StreamListener,
    next_token: u64,
    warnings: RateLimitedWarnings,
    directory: Arc<Directory>,
    cores: Vec<CoreHandle>,
}

/// Stops the acceptor.
#[derive(Clone, Debug)]
pub(crate) struct AcceptorStop {
    waker: Waker,
    stop: Arc<AtomicBool>,
}

impl AcceptorStop {
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl Acceptor {
    pub(crate) fn new(
        listeners: Vec<TcpListener>,
        copies: u16,
        local: Option<UnixListener>,
        directory: Arc<Directory>,
        cores: Vec<CoreHandle>,
        descriptors_max: u64,
    ) -> io::Result<(Acceptor, AcceptorStop)> {
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
        let handle = AcceptorStop { waker: waker.clone(), stop: stop.clone() };
        let places = (descriptors_max / DESCRIPTORS_SHARE).min(HANDSHAKES_MAX as u64);
        let acceptor = Acceptor {
            poller,
            waker,
            stop,
            listeners,
            local,
            copies,
            handshakes: PendingHandshakes::new(places as usize),
            tls: StreamListener::new().map_err(io::Error::other)?,
            next_token: local_token + 1,
            warnings: RateLimitedWarnings::default(),
            directory,
            cores,
        };
        Ok((acceptor, handle))
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
                    token => self.advance(token),
                }
            }
            let now = Instant::now();
            if now >= next_look {
                next_look = now + LATE_EVERY;
                self.remove_late(now);
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
                    (OwnedFd::from(socket), ConnectionOrigin::Interfaces(from, first..first + self.copies))
                }),
                (None, Some(local)) => local
                    .accept()
                    .map(|(socket, _)| (OwnedFd::from(socket), ConnectionOrigin::Local(Vec::new()))),
                (None, None) => return,
            };
            match accepted {
                Ok((socket, origin)) => self.begin_handshake(socket, origin),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    // Out of descriptors, for example. The connection stays queued, and a pause keeps the
                    // level-triggered poller from spinning on it. Connections that have proved nothing must
                    // not hold the last descriptors.
                    self.warnings.warn(Instant::now(), || {
                        format!(
                            "cannot accept a connection: {error}; if this process has no descriptors left, raise its limit \
                             (ulimit -n, or LimitNOFILE= of its systemd unit)"
                        )
                    });
                    self.evict_one();
                    std::thread::sleep(ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn begin_handshake(&mut self, socket: OwnedFd, origin: ConnectionOrigin) {
        let token = self.next_token;
        self.next_token += 1;
        let ready = rustix::io::ioctl_fionbio(&socket, true)
            .map_err(io::Error::from)
            .and_then(|()| self.poller.add(&socket, token, Interest::READABLE));
        if ready.is_ok() {
            let peer = origin.peer();
            let connection = PendingConnection::new(socket, origin, Instant::now() + HANDSHAKE);
            let evicted = self.handshakes.insert(token, peer, connection);
            self.close_evicted(evicted);
        }
    }

    fn advance(&mut self, token: u64) {
        let Some(connection) = self.handshakes.get_mut(token) else { return };
        match connection.advance(&self.directory, &self.tls, &mut self.warnings) {
            Ok(HandshakeStep::Wait) => {
                let interest = if connection.has_sent_all() { Interest::READABLE } else { Interest::BOTH };
                if self.poller.modify(&connection.socket, token, interest).is_err() {
                    self.remove(token);
                }
            }
            Ok(HandshakeStep::Leave) => {
                self.remove(token);
            }
            Ok(HandshakeStep::Admit(hello, admitted)) => {
                if let Some(connection) = self.remove(token) {
                    let core = &self.cores[usize::from(hello.core)];
                    let StreamPlace { route, port, epoch, attempt, resumed_by } = admitted.place;
                    let keys = connection.keys();
                    let carrier = admitted.memory.map_or(Carrier::Tcp(keys), Carrier::Memory);
                    let stream = AcceptedStream { socket: connection.socket, carrier };
                    let namespace = hello.namespace;
                    core.send(CoreCommand::Adopt {
                        namespace,
                        route,
                        port,
                        stream,
                        epoch,
                        attempt,
                        resumed_by,
                        standby: None,
                    });
                }
            }
            Ok(HandshakeStep::Probe(probe)) => {
                if let Some(connection) = self.remove(token) {
                    self.directory.probe.admit(probe, connection.socket);
                }
            }
            Err(error) => {
                debug!("{} left during its handshake: {error}", connection.origin);
                self.remove(token);
            }
        }
    }

    fn remove(&mut self, token: u64) -> Option<PendingConnection> {
        let connection = self.handshakes.remove(token)?;
        // This fails only if the descriptor is not in the set; then there is nothing to remove.
        let _ = self.poller.remove(&connection.socket);
        Some(connection)
    }

    fn evict_one(&mut self) {
        let evicted = self.handshakes.remove_one();
        self.close_evicted(evicted);
    }

    fn close_evicted(&self, connection: Option<PendingConnection>) {
        if let Some(connection) = connection {
            debug!(
                "{} lost its place during its handshake: too many connections have proved nothing",
                connection.origin
            );
            let _ = self.poller.remove(&connection.socket);
        }
    }

    fn remove_late(&mut self, now: Instant) {
        for connection in self.handshakes.remove_late(|connection| now >= connection.deadline) {
            debug!("{} did not finish its handshake within {HANDSHAKE:?}", connection.origin);
            let _ = self.poller.remove(&connection.socket);
        }
    }
}

/// Warnings that unproven peers can cause: a few lines per second reach the log, and the next line counts the
/// rest.
#[derive(Debug, Default)]
struct RateLimitedWarnings {
    second: Option<Instant>,
    admitted: u32,
    left_out: u64,
}

impl RateLimitedWarnings {
    const PER_SECOND: u32 = 3;

    fn warn(&mut self, now: Instant, message: impl FnOnce() -> String) {
        if let Some(message) = self.admit(now, message) {
            warn!("{message}");
        }
    }

    fn admit(&mut self, now: Instant, message: impl FnOnce() -> String) -> Option<String> {
        if self.second.is_none_or(|begun| now.duration_since(begun) >= Duration::from_secs(1)) {
            (self.second, self.admitted) = (Some(now), 0);
        }
        if self.admitted == Self::PER_SECOND {
            self.left_out += 1;
            return None;
        }
        self.admitted += 1;
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
    fn unproven_peers_cause_a_bounded_number_of_warnings_and_the_rest_is_counted() {
        let (mut warnings, begun) = (RateLimitedWarnings::default(), Instant::now());
        let mut admit =
            |after_ms| warnings.admit(begun + Duration::from_millis(after_ms), || "refused".into());
        let first: Vec<Option<String>> = (0..50).map(&mut admit).collect();
        assert_eq!(first.iter().flatten().count(), RateLimitedWarnings::PER_SECOND as usize);
        assert_eq!(admit(1001).unwrap(), "refused (47 more warnings of this kind were left out)");
        assert_eq!(admit(1002).unwrap(), "refused");
    }
}
