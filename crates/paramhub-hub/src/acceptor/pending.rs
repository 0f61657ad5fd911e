use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::Instant;

use paramhub_core::auth::{Namespace, Nonce, Proof};
use paramhub_core::liveness::FINAL_MESSAGE_TIMEOUT;
use paramhub_core::service::{ErrorCode, ServiceError};
use paramhub_core::wire::{
    CHALLENGE_BYTES, Caller, Challenge, HELLO_BYTES, HandshakeError, Hello, MAGIC, PROOF_BYTES, Refusal,
    Verdict, stream_proofs,
};
use paramhub_transport::greeting::{Discarded, PendingMessages, draw};
use paramhub_transport::handshakes::has_unread_bytes;
use paramhub_transport::shm::receive_segments;
use rustix::net::Shutdown;

use super::RateLimitedWarnings;
use crate::directory::{AdmittedStream, Directory, StreamOrigin};

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
    Hello,
    Proof {
        hello: Hello,
        challenge: Challenge,
    },
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
        let messages = PendingMessages::new(HELLO_BYTES);
        PendingConnection { socket, origin, deadline, messages, state: HandshakeState::Hello }
    }

    pub(super) fn has_sent_all(&self) -> bool {
        self.messages.has_sent_all()
    }

    /// Reads and answers as far as possible without waiting.
    pub(super) fn advance(
        &mut self,
        directory: &Directory,
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
                HandshakeState::Hello | HandshakeState::Proof { .. } => {}
            }
            let wanted = if matches!(self.state, HandshakeState::Hello) { HELLO_BYTES } else { PROOF_BYTES };
            let (socket, origin) = (&self.socket, &mut self.origin);
            let is_complete = self.messages.receive(wanted, |buffer| origin.read(socket, buffer))?;
            let heard = self.messages.received();
            if matches!(self.state, HandshakeState::Hello)
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
            HandshakeState::Hello => match Hello::decode(&self.messages.take()) {
                Ok(_) if has_unread_bytes(&self.socket)? => {
                    return Err(io::Error::other("it sent more than a Hello before it was challenged"));
                }
                Ok(hello) => {
                    let challenge: Challenge = draw()?;
                    self.messages.queue(&challenge);
                    self.state = HandshakeState::Proof { hello, challenge };
                }
                Err(error) => {
                    self.skip_challenge();
                    self.refuse(warnings, Refusal::Protocol, error.to_string());
                }
            },
            HandshakeState::Proof { hello, challenge } => {
                let hello = *hello;
                // For an unknown job the proof is checked against a nonce that no job has, so that the check
                // takes as long as for a known one.
                let probes = hello.caller == Caller::Prober;
                let nonce = match probes {
                    true => directory.probe.nonce(hello.namespace),
                    false => directory.nonce(hello.namespace),
                };
                let (worker, hub) = stream_proofs(&nonce.unwrap_or(Nonce([0; 32])), &hello, challenge);
                let given = Proof(self.messages.take());
                let is_proven = given.matches(&worker) && nonce.is_some();
                if probes && is_proven && matches!(self.origin, ConnectionOrigin::Interfaces(..)) {
                    let welcome = Verdict::Welcome { proof: hub, state_slots: 0 };
                    self.messages.queue(&welcome.encode());
                    self.state = HandshakeState::Probe(hello.namespace);
                    return Ok(());
                }
                if probes {
                    // This deserves no warning: the other hub tries again until this one knows of the probe.
                    self.send_refusal(Refusal::WrongNonce, "this hub waits for no such probe".to_string());
                    return Ok(());
                }
                if !is_proven {
                    let message = "the job is unknown here or the secret is wrong: check PARAMHUB_JOB and PARAMHUB_SECRET";
                    self.refuse(warnings, Refusal::WrongNonce, message.to_string());
                    return Ok(());
                }
                let stream_origin = match &mut self.origin {
                    ConnectionOrigin::Interfaces(_, interfaces) => {
                        StreamOrigin::Interfaces(interfaces.clone())
                    }
                    ConnectionOrigin::Local(brought) => StreamOrigin::Local(std::mem::take(brought)),
                };
                match directory.admit(&hello, stream_origin) {
                    Ok(admitted) => {
                        let welcome = Verdict::Welcome { proof: hub, state_slots: admitted.state_slots };
                        self.messages.queue(&welcome.encode());
                        self.state = HandshakeState::Welcome(hello, Some(admitted));
                    }
                    Err((refusal, message)) => self.refuse(warnings, refusal, message),
                }
            }
            HandshakeState::Welcome(..) | HandshakeState::Probe(_) | HandshakeState::Refusal { .. } => {
                unreachable!("nothing is asked after the verdict")
            }
        }
        Ok(())
    }

    /// Refuses a caller with another protocol. A caller that takes this port for the connection manager's
    /// gets an HTTP answer.
    fn refuse_other_protocol(&mut self, warnings: &mut RateLimitedWarnings) {
        const HTTP: [&[u8; 4]; 5] = [b"GET ", b"POST", b"DELE", b"HEAD", b"PUT "];
        if !HTTP.iter().any(|method| self.messages.received().starts_with(*method)) {
            self.skip_challenge();
            return self.refuse(warnings, Refusal::Protocol, HandshakeError::Magic.to_string());
        }
        let message = "this is a hub's data port: give the URL of its connection manager, which `hub ready: manager URL` and \
                       `manager ready: URL` name when they start";
        warnings
            .warn(Instant::now(), || format!("turned {} away: it speaks HTTP to a data port", self.origin));
        let error = ServiceError { code: ErrorCode::BadRequest, message: message.into() };
        let body = serde_json::to_string(&error).expect("an error is plain data");
        let head = "HTTP/1.1 421 Misdirected Request\r\ncontent-type: application/json\r\nconnection: close";
        let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        self.messages.queue(answer.as_bytes());
        self.close_after_answer();
    }

    /// Skips the challenge, since the caller expects the verdict after it.
    fn skip_challenge(&mut self) {
        self.messages.queue(&[0; CHALLENGE_BYTES]);
    }

    fn refuse(&mut self, warnings: &mut RateLimitedWarnings, refusal: Refusal, message: String) {
        warnings.warn(Instant::now(), || format!("turned {} away: {message}", self.origin));
        self.send_refusal(refusal, message);
    }

    fn send_refusal(&mut self, refusal: Refusal, message: String) {
        self.messages.queue(&Verdict::Refused { refusal, message }.encode());
        self.close_after_answer();
    }

    fn close_after_answer(&mut self) {
        self.state = HandshakeState::Refusal { closed: false };
        self.deadline = self.deadline.min(Instant::now() + FINAL_MESSAGE_TIMEOUT);
    }
}
