//! Opens a stream: dials a hub and proves, both ways, knowledge of the rank's secret.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use paramhub_core::auth::StreamSecret;
use paramhub_core::wire::{Hello, VerdictError};
use paramhub_transport::dialling::{dial_first, dial_from};
use paramhub_transport::greeting::{GreetingError, greet, greet_locally};
use paramhub_transport::shm::{RING_BYTES_DEFAULT, Segment, connect, create_rings};
use paramhub_trust::StreamKeys;

use crate::error::{WorkerError, WorkerId};
use crate::interfaces::Interfaces;

/// The configuration that the streams of one job share.
pub(crate) struct Dialler<'a> {
    pub(crate) who: &'a WorkerId,
    pub(crate) secret: &'a StreamSecret,
    pub(crate) interfaces: &'a Interfaces,
    /// Whether streams over TCP are encrypted.
    pub(crate) encrypts: bool,
    /// The deadline for opening all streams together.
    pub(crate) deadline: Instant,
}

/// A stream over TCP, ready for frames.
pub(crate) struct OpenedTcp {
    pub(crate) socket: TcpStream,
    /// The keys of an encrypted stream.
    pub(crate) keys: Option<StreamKeys>,
    /// The number of state values that the job's optimizer keeps for each parameter, as the hub says.
    pub(crate) state_slots: u8,
}

/// A stream over shared memory.
pub(crate) struct LocalStream {
    pub(crate) socket: OwnedFd,
    pub(crate) rings: Arc<Segment>,
    /// The hub's parameters for all workers of the host, if the worker asked for them.
    pub(crate) common: Option<OwnedFd>,
    /// See [`OpenedTcp`].
    pub(crate) state_slots: u8,
}

impl Dialler<'_> {
    /// Opens a stream over TCP to `hub` (`host:port`). Draws the challenge of `hello`.
    pub(crate) fn open(&self, hub: &Arc<str>, hello: Hello) -> Result<OpenedTcp, WorkerError> {
        let socket = self.connect(hub, usize::from(hello.interface))?;
        self.greet(hub, socket, hello)
    }

    /// [`open`](Self::open) over an established connection.
    pub(crate) fn greet(
        &self,
        hub: &Arc<str>,
        mut socket: TcpStream,
        hello: Hello,
    ) -> Result<OpenedTcp, WorkerError> {
        let (welcome, keys) = greet(&mut socket, self.secret, hello, self.encrypts, self.deadline)
            .map_err(|error| self.not_opened(hub, error))?;
        Ok(OpenedTcp { socket, keys, state_slots: welcome.state_slots })
    }

    /// Connects to the hub of this host that listens on `name`, if there is one.
    pub(crate) fn connect_locally(&self, name: &str) -> io::Result<UnixStream> {
        connect(name, self.deadline.saturating_duration_since(Instant::now()))
    }

    /// [`open`](Self::open) to a hub of this host, which receives `arena` and the rings of the stream.
    pub(crate) fn open_locally(
        &self,
        hub: &Arc<str>,
        socket: UnixStream,
        hello: Hello,
        arena: &Segment,
    ) -> Result<LocalStream, WorkerError> {
        let failed =
            |error: io::Error| self.fail(hub, format!("the handshake over shared memory failed: {error}"));
        let rings = create_rings(RING_BYTES_DEFAULT).map_err(failed)?;
        let offered = [arena.as_fd(), rings.as_fd()];
        let opened = greet_locally(&socket, self.secret, hello, &offered, self.deadline);
        let (welcome, common) = opened.map_err(|error| match error {
            GreetingError::Connection(error) => failed(error),
            error => self.not_opened(hub, error),
        })?;
        let state_slots = welcome.state_slots;
        Ok(LocalStream { socket: socket.into(), rings: Arc::new(rings), common, state_slots })
    }

    /// The error of a handshake. What a hub refuses has an error of its own.
    fn not_opened(&self, hub: &Arc<str>, error: GreetingError) -> WorkerError {
        match error {
            GreetingError::Verdict(VerdictError::Refused { refusal, message }) => WorkerError::Refused {
                who: self.who.clone(),
                hub: Arc::clone(hub),
                refusal,
                message: message.into(),
            },
            error => self.fail(hub, error.to_string()),
        }
    }

    /// Tries every address that the name stands for; `position` is the hub's number of the interface.
    fn connect(&self, hub: &Arc<str>, position: usize) -> Result<TcpStream, WorkerError> {
        dial_first(hub, self.deadline, |address, timeout| {
            let source = self.interfaces.source(address, position)?;
            dial_from(source, address, timeout).map_err(|error| error.to_string())
        })
        .map_err(|error| self.fail(hub, error.to_string()))
    }

    pub(crate) fn fail(&self, hub: &Arc<str>, reason: String) -> WorkerError {
        WorkerError::Dial { who: self.who.clone(), hub: Arc::clone(hub), reason: reason.into() }
    }
}
