//! Opens a stream: dials a hub and proves, both ways, knowledge of the job's nonce.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::auth::{Nonce, Proof};
use paramhub_core::wire::{CHALLENGE_BYTES, Hello, VERDICT_BYTES, Verdict, stream_proofs};
use paramhub_transport::shm::{
    RING_BYTES_DEFAULT, Segment, connect, create_rings, receive_segments, send_segments,
};
use paramhub_transport::socket::{dial_from, greet};

use crate::error::{WorkerError, WorkerId};
use crate::interfaces::Interfaces;

/// The configuration that the streams of one job share.
pub(crate) struct Dialler<'a> {
    pub(crate) who: &'a WorkerId,
    pub(crate) nonce: &'a Nonce,
    pub(crate) interfaces: &'a Interfaces,
    /// The deadline for opening all streams together.
    pub(crate) deadline: Instant,
}

/// A stream over shared memory.
pub(crate) struct LocalStream {
    pub(crate) socket: OwnedFd,
    pub(crate) rings: Arc<Segment>,
    /// The hub's parameters for all workers of the host, if the worker asked for them.
    pub(crate) common: Option<OwnedFd>,
    /// See [`Dialler::open`].
    pub(crate) state_slots: u8,
}

impl Dialler<'_> {
    /// Opens a stream over TCP to `hub` (`host:port`). Returns it ready for frames, with the number of state
    /// values that the job's optimizer keeps for each parameter, as the hub says. Draws the challenge of
    /// `hello`.
    pub(crate) fn open(&self, hub: &Arc<str>, hello: Hello) -> Result<(TcpStream, u8), WorkerError> {
        let socket = self.connect(hub, usize::from(hello.interface))?;
        self.greet(hub, socket, hello)
    }

    /// [`open`](Self::open) over an established connection.
    pub(crate) fn greet(
        &self,
        hub: &Arc<str>,
        mut socket: TcpStream,
        hello: Hello,
    ) -> Result<(TcpStream, u8), WorkerError> {
        let hello = self.challenging(hub, hello)?;
        let (expected, verdict) = greet(&mut socket, self.nonce, &hello, self.deadline)
            .map_err(|error| self.fail(hub, format!("the handshake failed: {error}")))?;
        self.check_verdict(hub, &expected, &verdict).map(|state_slots| (socket, state_slots))
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
        let failed = |error: io::Error| {
            // The kernel reports an expired read timeout as `WouldBlock`.
            let reason = match error.kind() {
                io::ErrorKind::WouldBlock => "the hub did not answer in time".to_owned(),
                _ => error.to_string(),
            };
            self.fail(hub, format!("the handshake over shared memory failed: {reason}"))
        };
        let rings = create_rings(RING_BYTES_DEFAULT).map_err(failed)?;
        let hello = self.challenging(hub, hello)?;
        let (expected, verdict, common) =
            self.handshake_locally(&socket, &hello, arena, &rings).map_err(failed)?;
        let state_slots = self.check_verdict(hub, &expected, &verdict)?;
        Ok(LocalStream { socket: socket.into(), rings: Arc::new(rings), common, state_slots })
    }

    fn challenging(&self, hub: &Arc<str>, hello: Hello) -> Result<Hello, WorkerError> {
        let mut challenge = [0; CHALLENGE_BYTES];
        getrandom::fill(&mut challenge)
            .map_err(|error| self.fail(hub, format!("the system gives no random numbers: {error}")))?;
        Ok(Hello { challenge, ..hello })
    }

    /// Checks that the hub accepts the stream and knows the nonce. Returns the number of state values that
    /// the optimizer keeps for each parameter.
    fn check_verdict(
        &self,
        hub: &Arc<str>,
        expected: &Proof,
        verdict: &[u8; VERDICT_BYTES],
    ) -> Result<u8, WorkerError> {
        match Verdict::decode(verdict) {
            Ok(Verdict::Welcome { proof, state_slots }) if proof.matches(expected) => Ok(state_slots),
            Ok(Verdict::Welcome { .. }) => Err(self.fail(
                hub,
                "it does not know the job's nonce: something else than the job's hub answers there".into(),
            )),
            Ok(Verdict::Refused { refusal, message }) => Err(WorkerError::Refused {
                who: self.who.clone(),
                hub: Arc::clone(hub),
                refusal,
                message: message.into(),
            }),
            Err(error) => Err(self.fail(hub, format!("it does not answer like a paramhub hub: {error}"))),
        }
    }

    /// Tries every address that the name stands for; `position` is the hub's number of the interface.
    fn connect(&self, hub: &Arc<str>, position: usize) -> Result<TcpStream, WorkerError> {
        let addresses = hub
            .to_socket_addrs()
            .map_err(|error| self.fail(hub, format!("the address is no use: {error}")))?;
        let mut refused = "its name stands for no address".to_owned();
        for address in addresses {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                refused =
                    "no time was left to dial it: the streams before it took all of the dial timeout".into();
                break;
            }
            let dialled = self.interfaces.source(address, position).and_then(|source| {
                let dialled = dial_from(source, address, left.max(Duration::from_millis(1)));
                dialled.map_err(|error| error.to_string())
            });
            match dialled {
                Ok(socket) => return Ok(socket),
                Err(error) => refused = error,
            }
        }
        Err(self.fail(hub, refused))
    }

    /// [`greet`] over shared memory: the first message carries the memory, and the last may carry a view of
    /// common parameters.
    fn handshake_locally(
        &self,
        socket: &UnixStream,
        hello: &Hello,
        arena: &Segment,
        rings: &Segment,
    ) -> io::Result<(Proof, [u8; VERDICT_BYTES], Option<OwnedFd>)> {
        let left = || self.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        socket.set_write_timeout(Some(left()))?;
        let mut common = None;
        let mut hear = |bytes: &mut [u8]| {
            let mut filled = 0;
            while filled < bytes.len() {
                socket.set_read_timeout(Some(left()))?;
                let (read, descriptors) = receive_segments(socket, &mut bytes[filled..])?;
                if read == 0 {
                    return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
                }
                filled += read;
                common = common.take().or(descriptors.into_iter().next());
            }
            Ok(())
        };
        send_segments(socket, &hello.encode(), &[arena.as_fd(), rings.as_fd()])?;
        let mut hub_challenge = [0; CHALLENGE_BYTES];
        hear(&mut hub_challenge)?;
        let (mine, theirs) = stream_proofs(self.nonce, hello, &hub_challenge);
        send_segments(socket, &mine.0, &[])?;
        let mut verdict = [0; VERDICT_BYTES];
        hear(&mut verdict)?;
        Ok((theirs, verdict, common))
    }

    pub(crate) fn fail(&self, hub: &Arc<str>, reason: String) -> WorkerError {
        WorkerError::Dial { who: self.who.clone(), hub: Arc::clone(hub), reason: reason.into() }
    }
}
