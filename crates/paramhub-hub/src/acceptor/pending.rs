use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::Instant;

use paramhub_core::auth::{Namespace, Proof, StreamSecret};
use paramhub_core::liveness::FINAL_MESSAGE_TIMEOUT;
use paramhub_core::service::{ErrorCode, refusal};
use paramhub_core::wire::{
    Caller, Capabilities, HELLO_BYTES_MAX, HELLO_HEAD_BYTES, HandshakeError, Hello, HubHandshake, MAGIC,
    PROOF_BYTES, Refusal, Welcome, hello_length,
};
use paramhub_transport::greeting::{Discarded, PendingMessages, draw};
use paramhub_transport::shm::receive_segments;
use paramhub_trust::{StreamKeys, StreamListener, TLS_HANDSHAKE};
use rustix::net::Shutdown;

use super::RateLimitedWarnings;
use crate::directory::{AdmittedStream, Directory, Origin};

/// Descriptors that a connection may send; further ones are closed.
const DESCRIPTORS_MAX: usize = 4;

/// A connection whose handshake is under way.
pub(super) struct PendingConnection {
    pub(super) socket: OwnedFd,
    pub(super) origin: ConnectionOrigin,
    pub(super) deadline: Instant,
    messages: PendingMessages,
    state: HandshakeState,
}

/// The origin of a connection.
pub(super) enum ConnectionOrigin {
    /// An address, at a listener that stands for these interfaces.
    Interfaces(SocketAddr, Range<u16>),
    /// A process of this host, with the descriptors that it has sent so far.
    Local(Vec<OwnedFd>),
}

impl ConnectionOrigin {
    /// The address whose connections are counted together; `None` for a process of this host.
    pub(super) fn peer(&self) -> Option<IpAddr> {
        match self {
            ConnectionOrigin::Interfaces(from, _) => Some(from.ip()),
            ConnectionOrigin::Local(_) => None,
        }
    }

    fn read(&mut self, socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            ConnectionOrigin::Interfaces(..) => Ok(rustix::io::read(socket, buffer)?),
            ConnectionOrigin::Local(brought) => {
                let (read, descriptors) = receive_segments(socket, buffer)?;
                let room = DESCRIPTORS_MAX - brought.len();
                brought.extend(descriptors.into_iter().take(room));
                Ok(read)
            }
        }
    }
}

impl fmt::Display for ConnectionOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectionOrigin::Interfaces(from, _) => from.fmt(f),
            ConnectionOrigin::Local(_) => f.write_str("a process of this host"),
        }
    }
}

enum HandshakeState {
    /// So many bytes of the Hello are awaited: its head, which tells its length, then all of it.
    Hello {
        wanted: usize,
    },
    Proof(Box<HubHandshake>),
    /// The welcome is being sent.
    Welcome(Hello, Option<AdmittedStream>),
    /// The welcome is being sent to a stream that probes the network.
    Probe(Namespace),
    /// The refusal is being sent; then the hub closes its side, and the peer has a second to read it.
    Refusal {
        closed: bool,
    },
}

/// What to do with a connection next.
pub(super) enum HandshakeStep {
    Wait,
    Leave,
    Admit(Hello, AdmittedStream),
    /// The stream belongs to the probe of this name.
    Probe(Namespace),
}

impl PendingConnection {
    pub(super) fn new(socket: OwnedFd, origin: ConnectionOrigin, deadline: Instant) -> PendingConnection {
        // A proof is shorter than a Hello.
        let messages = PendingMessages::new(HELLO_BYTES_MAX);
        let state = HandshakeState::Hello { wanted: HELLO_HEAD_BYTES };
        PendingConnection { socket, origin, deadline, messages, state }
    }

    pub(super) fn has_sent_all(&self) -> bool {
        self.messages.has_sent_all()
    }

    /// Reads and answers as far as possible without waiting.
    pub(super) fn advance(
        &mut self,
        directory: &Directory,
        tls: &StreamListener,
        warnings: &mut RateLimitedWarnings,
    ) -> io::Result<HandshakeStep> {
        loop {
            match self.send_pending() {
                Ok(true) => {}
                Ok(false) => return Ok(HandshakeStep::Wait),
                // The stream has its place, and the others rely on it: its core finds it broken and reports
                // whose it was.
                Err(_) if matches!(self.state, HandshakeState::Welcome(..)) => {}
                Err(error) => return Err(error),
            }
            match &mut self.state {
                HandshakeState::Welcome(hello, admitted) => {
                    let admitted = admitted.take().expect("a connection is admitted once");
                    return Ok(HandshakeStep::Admit(*hello, admitted));
                }
                HandshakeState::Probe(probe) => return Ok(HandshakeStep::Probe(*probe)),
                HandshakeState::Refusal { closed } => {
                    if !std::mem::replace(closed, true) {
                        rustix::net::shutdown(&self.socket, Shutdown::Write)?;
                    }
                    return self.discard();
                }
                HandshakeState::Hello { .. } | HandshakeState::Proof(_) => {}
            }
            let wanted = if let HandshakeState::Hello { wanted } = self.state { wanted } else { PROOF_BYTES };
            let (socket, origin) = (&self.socket, &mut self.origin);
            let is_complete = self.messages.receive(wanted, |buffer| origin.read(socket, buffer))?;
            let heard = self.messages.received();
            // Only a Hello does not begin so: one proof in 256 does.
            if matches!(self.state, HandshakeState::Hello { .. })
                && heard.first() == Some(&TLS_HANDSHAKE)
                && !self.messages.are_encrypted()
                && matches!(self.origin, ConnectionOrigin::Interfaces(..))
            {
                self.messages.begin_tls(tls.begin()?)?;
                continue;
            }
            if matches!(self.state, HandshakeState::Hello { .. })
                && heard.iter().zip(&MAGIC).any(|(heard, magic)| heard != magic)
            {
                // These bytes cannot become a Hello, so the caller is refused now, not after the timeout.
                if heard.len() < MAGIC.len() {
                    return Ok(HandshakeStep::Wait);
                }
                self.refuse_other_protocol(warnings);
                continue;
            }
            if !is_complete {
                return Ok(HandshakeStep::Wait);
            }
            self.answer(directory, warnings)?;
        }
    }

    /// What this hub can do on this connection.
    fn capabilities(&self) -> Capabilities {
        if self.messages.are_encrypted() { Capabilities::ENCRYPTED } else { Capabilities::default() }
    }

    /// The keys of the stream that follows; `None` if it is not encrypted.
    pub(super) fn keys(&self) -> Option<StreamKeys> {
        self.messages.keys()
    }

    /// Sends what is pending; `true` when nothing is left.
    fn send_pending(&mut self) -> io::Result<bool> {
        if let HandshakeState::Welcome(_, Some(AdmittedStream { memory: Some(memory), .. })) = &self.state
            && let Some(common) = memory.common_descriptor()
            && !self.messages.has_sent_all()
        {
            self.messages.send_with(&self.socket, &[common])?;
        }
        self.messages.send(&self.socket)
    }

    /// Drops what a refused peer still sends.
    fn discard(&mut self) -> io::Result<HandshakeStep> {
        let (socket, origin) = (&self.socket, &mut self.origin);
        Ok(match self.messages.discard(|buffer| origin.read(socket, buffer))? {
            Discarded::Waits => HandshakeStep::Wait,
            Discarded::Ended | Discarded::TooMuch => HandshakeStep::Leave,
        })
    }

    fn answer(&mut self, directory: &Directory, warnings: &mut RateLimitedWarnings) -> io::Result<()> {
        match &self.state {
            HandshakeState::Hello { wanted } => {
                let is_head = *wanted == HELLO_HEAD_BYTES;
                match is_head {
                    true => self.answer_head(warnings),
                    false => self.answer_hello(warnings)?,
                }
            }
            HandshakeState::Proof(_) => self.answer_proof(directory, warnings),
            HandshakeState::Welcome(..) | HandshakeState::Probe(_) | HandshakeState::Refusal { .. } => {
                unreachable!("nothing is asked after the verdict")
            }
        }
        Ok(())
    }

    /// Finds out from the first bytes of a Hello how many follow.
    fn answer_head(&mut self, warnings: &mut RateLimitedWarnings) {
        let head = self.messages.received().try_into().expect("the head of a Hello");
        match hello_length(head) {
            Ok(wanted) => self.state = HandshakeState::Hello { wanted },
            Err(error) => self.refuse_hello(warnings, &error),
        }
    }

    fn answer_hello(&mut self, warnings: &mut RateLimitedWarnings) -> io::Result<()> {
        match HubHandshake::begin(self.messages.received(), draw()?) {
            Ok(_) if self.messages.has_unread_bytes(&self.socket)? => {
                return Err(io::Error::other("it sent more than a Hello before it was challenged"));
            }
            Ok(handshake) => {
                self.messages.forget_received();
                self.messages.queue(handshake.challenge_message());
                self.state = HandshakeState::Proof(Box::new(handshake));
            }
            Err(error) => self.refuse_hello(warnings, &error),
        }
        Ok(())
    }

    fn answer_proof(&mut self, directory: &Directory, warnings: &mut RateLimitedWarnings) {
        let placeholder = HandshakeState::Refusal { closed: false };
        let HandshakeState::Proof(handshake) = std::mem::replace(&mut self.state, placeholder) else {
            unreachable!("a proof is awaited")
        };
        let hello = *handshake.hello();
        // For an unknown job the proof is checked against a secret that no job has, so that the check takes as
        // long as for a known one.
        let probes = hello.caller == Caller::Prober;
        let known = match probes {
            true => directory.probe.nonce(hello.namespace).map(StreamSecret::from),
            false => directory.stream_secret(&hello, handshake.version()),
        };
        let secret = self.messages.bind(&known.unwrap_or(StreamSecret([0; 32])));
        let given = Proof(self.messages.take());
        let is_proven = handshake.is_proven(&secret, &given) && known.is_some();
        // Probes carry nothing that is worth encrypting, and measure the network without it.
        let may_probe =
            matches!(self.origin, ConnectionOrigin::Interfaces(..)) && !self.messages.are_encrypted();
        if probes && is_proven && may_probe {
            self.messages.queue(&handshake.welcome(&secret, &Welcome::default()));
            self.state = HandshakeState::Probe(hello.namespace);
            return;
        }
        if probes {
            // This deserves no warning: the other hub tries again until this one knows of the probe.
            let message = "this hub waits for no such probe";
            return self.send_verdict(&handshake.refusal(Refusal::WrongNonce, message));
        }
        if !is_proven {
            let message =
                "the job is unknown here or the secret is wrong: check PARAMHUB_JOB and PARAMHUB_SECRET";
            return self.refuse(warnings, &handshake, Refusal::WrongNonce, message);
        }
        let capabilities = self.capabilities();
        let missing = hello.required.without(capabilities);
        if !missing.is_empty() {
            let message = format!("the caller requires what this hub cannot do: {missing}");
            return self.refuse(warnings, &handshake, Refusal::Capability, &message);
        }
        let origin = match &mut self.origin {
            ConnectionOrigin::Interfaces(_, interfaces) => Origin::Interfaces(interfaces.clone()),
            ConnectionOrigin::Local(brought) => Origin::Local(std::mem::take(brought)),
        };
        match directory.admit(&hello, origin, self.messages.are_encrypted()) {
            Ok(admitted) => {
                let (epoch, state_slots) = (admitted.place.epoch, admitted.state_slots);
                let welcome = Welcome { granted: hello.offered.and(capabilities), epoch, state_slots };
                self.messages.queue(&handshake.welcome(&secret, &welcome));
                self.state = HandshakeState::Welcome(hello, Some(admitted));
            }
            Err((refusal, message)) => self.refuse(warnings, &handshake, refusal, &message),
        }
    }

    /// Refuses a caller with another protocol. A caller that takes this port for the connection manager's
    /// gets an HTTP answer.
    fn refuse_other_protocol(&mut self, warnings: &mut RateLimitedWarnings) {
        const HTTP: [&[u8; 4]; 5] = [b"GET ", b"POST", b"DELE", b"HEAD", b"PUT "];
        if !HTTP.iter().any(|method| self.messages.received().starts_with(*method)) {
            return self.refuse_hello(warnings, &HandshakeError::Magic);
        }
        let message = "this is a hub's data port: give the URL of its connection manager, which `hub ready: manager URL` and \
                       `manager ready: URL` name when they start";
        warnings
            .warn(Instant::now(), || format!("turned {} away: it speaks HTTP to a data port", self.origin));
        let error = refusal(ErrorCode::BadRequest, message);
        let body = serde_json::to_string(&error).expect("an error is plain data");
        let head = "HTTP/1.1 421 Misdirected Request\r\ncontent-type: application/json\r\nconnection: close";
        let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        self.messages.queue(answer.as_bytes());
        self.close_after_answer();
    }

    /// Refuses a caller whose Hello cannot be read, in the form in which it expects the answer.
    fn refuse_hello(&mut self, warnings: &mut RateLimitedWarnings, error: &HandshakeError) {
        let message = error.to_string();
        warnings.warn(Instant::now(), || format!("turned {} away: {message}", self.origin));
        let answer = HubHandshake::refuse_hello(self.messages.received(), &message);
        self.send_verdict(&answer);
    }

    fn refuse(
        &mut self,
        warnings: &mut RateLimitedWarnings,
        handshake: &HubHandshake,
        refusal: Refusal,
        message: &str,
    ) {
        // A worker of a job with standbys asks each of the two hubs until one of them serves it.
        if refusal != Refusal::Busy {
            warnings.warn(Instant::now(), || format!("turned {} away: {message}", self.origin));
        }
        self.send_verdict(&handshake.refusal(refusal, message));
    }

    fn send_verdict(&mut self, verdict: &[u8]) {
        self.messages.queue(verdict);
        self.close_after_answer();
    }

    fn close_after_answer(&mut self) {
        self.state = HandshakeState::Refusal { closed: false };
        self.deadline = self.deadline.min(Instant::now() + FINAL_MESSAGE_TIMEOUT);
    }
}
