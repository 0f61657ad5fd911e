use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use paramhub_core::auth::{Namespace, Nonce, Proof};
use paramhub_core::service::{ErrorCode, ServiceError};
use paramhub_core::wire::{
    CHALLENGE_BYTES, Caller, HELLO_BYTES, HandshakeError, Hello, MAGIC, PROOF_BYTES, Refusal, Verdict,
    stream_proofs,
};
use paramhub_transport::handshakes::{DISCARDED_BYTES_MAX, has_unread_bytes};
use paramhub_transport::shm::{receive_segments, send_segments};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};

use super::Warnings;
use crate::directory::{Admitted, Directory, Origin};

/// How long a refused connection may take to read why.
const FAREWELL: Duration = Duration::from_secs(1);
/// Descriptors a guest may bring; what else it sends is closed.
const DESCRIPTORS_MAX: usize = 4;

/// A connection that has not proven itself.
pub(super) struct Guest {
    pub(super) socket: OwnedFd,
    pub(super) by: CameBy,
    pub(super) deadline: Instant,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    stage: Stage,
}

/// How a guest came in.
pub(super) enum CameBy {
    /// From an address, by a listener that is these interfaces.
    Interfaces(SocketAddr, Range<u16>),
    /// From a process of this host, with the descriptors it has brought so far.
    Local(Vec<OwnedFd>),
}

impl CameBy {
    /// The address whose connections are counted together; a process of this host has none.
    pub(super) fn peer(&self) -> Option<IpAddr> {
        match self {
            CameBy::Interfaces(from, _) => Some(from.ip()),
            CameBy::Local(_) => None,
        }
    }
}

impl fmt::Display for CameBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CameBy::Interfaces(from, _) => from.fmt(f),
            CameBy::Local(_) => f.write_str("a process of this host"),
        }
    }
}

enum Stage {
    Hello,
    Proof {
        hello: Hello,
        challenge: [u8; CHALLENGE_BYTES],
    },
    /// The welcome is on its way.
    Welcome(Hello, Option<Admitted>),
    /// The same, of a stream that probes the network.
    Probe(Namespace),
    /// The refusal is on its way; then our side closes, and the peer has a second to read it.
    Refusal {
        closed: bool,
        /// Bytes that came after it.
        discarded: usize,
    },
}

/// What to do with a guest next.
pub(super) enum Next {
    Wait,
    Leave,
    Admit(Hello, Admitted),
    /// It belongs to the probe of this name.
    Probe(Namespace),
}

impl Guest {
    pub(super) fn new(socket: OwnedFd, by: CameBy, deadline: Instant) -> Guest {
        let (inbox, outbox) = (Vec::with_capacity(HELLO_BYTES), Vec::new());
        Guest { socket, by, deadline, inbox, outbox, stage: Stage::Hello }
    }

    pub(super) fn has_said_all(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Reads and answers as far as it goes without waiting.
    pub(super) fn attend(&mut self, directory: &Directory, warnings: &mut Warnings) -> io::Result<Next> {
        loop {
            match self.speak() {
                Ok(true) => {}
                Ok(false) => return Ok(Next::Wait),
                // It has its place, and the others count on it: its core finds the stream broken and says whose it was.
                Err(_) if matches!(self.stage, Stage::Welcome(..)) => {}
                Err(error) => return Err(error),
            }
            match &mut self.stage {
                Stage::Welcome(hello, admitted) => {
                    let admitted = admitted.take().expect("a guest is admitted once");
                    return Ok(Next::Admit(*hello, admitted));
                }
                Stage::Probe(probe) => return Ok(Next::Probe(*probe)),
                Stage::Refusal { closed, .. } => {
                    if !std::mem::replace(closed, true) {
                        rustix::net::shutdown(&self.socket, Shutdown::Write)?;
                    }
                    return self.discard();
                }
                Stage::Hello | Stage::Proof { .. } => {}
            }
            let wanted = if matches!(self.stage, Stage::Hello) { HELLO_BYTES } else { PROOF_BYTES };
            let is_complete = self.listen(wanted)?;
            if matches!(self.stage, Stage::Hello)
                && self.inbox.iter().zip(&MAGIC).any(|(heard, magic)| heard != magic)
            {
                // These bytes cannot become a Hello: the caller is told now, and not when its time is up.
                if self.inbox.len() < MAGIC.len() {
                    return Ok(Next::Wait);
                }
                self.refuse_other_protocol(warnings);
                continue;
            }
            if !is_complete {
                return Ok(Next::Wait);
            }
            let heard = std::mem::take(&mut self.inbox);
            self.answer(&heard, directory, warnings)?;
        }
    }

    /// Sends what is to be sent; `true` when nothing is left.
    fn speak(&mut self) -> io::Result<bool> {
        if let Stage::Welcome(_, Some(Admitted { memory: Some(memory), .. })) = &self.stage
            && let Some(common) = memory.common_descriptor()
            && !self.outbox.is_empty()
        {
            send_segments(&self.socket, &self.outbox, &[common])?;
            self.outbox.clear();
        }
        while !self.outbox.is_empty() {
            match rustix::net::send(&self.socket, &self.outbox, SendFlags::NOSIGNAL) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    self.outbox.drain(..written);
                }
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }

    /// Reads up to `wanted` bytes, not one more: what follows them belongs to the core. `true` when they are here.
    fn listen(&mut self, wanted: usize) -> io::Result<bool> {
        let mut buffer = [0; HELLO_BYTES];
        while self.inbox.len() < wanted {
            match self.read(&mut buffer[..wanted - self.inbox.len()]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.inbox.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match &mut self.by {
            CameBy::Interfaces(..) => Ok(rustix::io::read(&self.socket, buffer)?),
            CameBy::Local(brought) => {
                let (read, descriptors) = receive_segments(self.socket.as_fd(), buffer)?;
                let room = DESCRIPTORS_MAX - brought.len();
                brought.extend(descriptors.into_iter().take(room));
                Ok(read)
            }
        }
    }

    /// Reads what a refused peer still sends, so that closing does not reset the connection over an unread refusal. A peer
    /// that sends more than an honest one could loses the connection at once.
    fn discard(&mut self) -> io::Result<Next> {
        let mut ignored = [0; 4096];
        loop {
            match self.read(&mut ignored) {
                Ok(0) => return Ok(Next::Leave),
                Ok(read) => {
                    let Stage::Refusal { discarded, .. } = &mut self.stage else {
                        unreachable!("bytes are discarded after a refusal alone")
                    };
                    *discarded += read;
                    if *discarded > DISCARDED_BYTES_MAX {
                        return Ok(Next::Leave);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Next::Wait),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn answer(&mut self, heard: &[u8], directory: &Directory, warnings: &mut Warnings) -> io::Result<()> {
        match &self.stage {
            Stage::Hello => match Hello::decode(heard.try_into().expect("as many bytes as were wanted")) {
                Ok(_) if has_unread_bytes(&self.socket)? => {
                    return Err(io::Error::other("it sent more than a Hello before it was challenged"));
                }
                Ok(hello) => {
                    let mut challenge = [0; CHALLENGE_BYTES];
                    getrandom::fill(&mut challenge).map_err(io::Error::other)?;
                    self.outbox.extend_from_slice(&challenge);
                    self.stage = Stage::Proof { hello, challenge };
                }
                Err(error) => {
                    self.skip_challenge();
                    self.refuse(warnings, Refusal::Protocol, error.to_string());
                }
            },
            Stage::Proof { hello, challenge } => {
                let hello = *hello;
                // An unknown job is checked against a nonce nobody has, so that it takes as long as a known one.
                let probes = hello.caller == Caller::Prober;
                let nonce = match probes {
                    true => directory.probe.nonce(hello.namespace),
                    false => directory.nonce(hello.namespace),
                };
                let (worker, hub) = stream_proofs(&nonce.unwrap_or(Nonce([0; 32])), &hello, challenge);
                let given = Proof(heard.try_into().expect("as many bytes as were wanted"));
                let is_proven = given.matches(&worker) && nonce.is_some();
                if probes && is_proven && matches!(self.by, CameBy::Interfaces(..)) {
                    let welcome = Verdict::Welcome { proof: hub, state_slots: 0 };
                    self.outbox.extend_from_slice(&welcome.encode());
                    self.stage = Stage::Probe(hello.namespace);
                    return Ok(());
                }
                if probes {
                    // Not worth a warning: it comes again until this hub has been told of the probe.
                    self.turn_away(Refusal::WrongNonce, "this hub waits for no such probe".to_string());
                    return Ok(());
                }
                if !is_proven {
                    let message = "the job is unknown here or the secret is wrong: check PARAMHUB_JOB and PARAMHUB_SECRET";
                    self.refuse(warnings, Refusal::WrongNonce, message.to_string());
                    return Ok(());
                }
                let origin = match &mut self.by {
                    CameBy::Interfaces(_, interfaces) => Origin::Interfaces(interfaces.clone()),
                    CameBy::Local(brought) => Origin::Local(std::mem::take(brought)),
                };
                match directory.admit(&hello, origin) {
                    Ok(admitted) => {
                        let welcome = Verdict::Welcome { proof: hub, state_slots: admitted.state_slots };
                        self.outbox.extend_from_slice(&welcome.encode());
                        self.stage = Stage::Welcome(hello, Some(admitted));
                    }
                    Err((refusal, message)) => self.refuse(warnings, refusal, message),
                }
            }
            Stage::Welcome(..) | Stage::Probe(_) | Stage::Refusal { .. } => {
                unreachable!("nothing is asked after the verdict")
            }
        }
        Ok(())
    }

    /// Refuses a caller that speaks another protocol; one that takes this port for the connection manager's is told so in HTTP.
    fn refuse_other_protocol(&mut self, warnings: &mut Warnings) {
        const HTTP: [&[u8; 4]; 5] = [b"GET ", b"POST", b"DELE", b"HEAD", b"PUT "];
        if !HTTP.iter().any(|method| self.inbox.starts_with(*method)) {
            self.skip_challenge();
            return self.refuse(warnings, Refusal::Protocol, HandshakeError::Magic.to_string());
        }
        let message = "this is a hub's data port: give the URL of its connection manager, which `hub ready: manager URL` and \
                       `manager ready: URL` name when they start";
        warnings.tell(Instant::now(), || format!("turned {} away: it speaks HTTP to a data port", self.by));
        let error = ServiceError { code: ErrorCode::BadRequest, message: message.into() };
        let body = serde_json::to_string(&error).expect("an error is plain data");
        let head = "HTTP/1.1 421 Misdirected Request\r\ncontent-type: application/json\r\nconnection: close";
        let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        self.outbox.extend_from_slice(answer.as_bytes());
        self.close_after_answer();
    }

    /// A caller looks for the verdict behind a challenge.
    fn skip_challenge(&mut self) {
        self.outbox.extend_from_slice(&[0; CHALLENGE_BYTES]);
    }

    fn refuse(&mut self, warnings: &mut Warnings, refusal: Refusal, message: String) {
        warnings.tell(Instant::now(), || format!("turned {} away: {message}", self.by));
        self.turn_away(refusal, message);
    }

    fn turn_away(&mut self, refusal: Refusal, message: String) {
        self.outbox.extend_from_slice(&Verdict::Refused { refusal, message }.encode());
        self.close_after_answer();
    }

    fn close_after_answer(&mut self) {
        self.stage = Stage::Refusal { closed: false, discarded: 0 };
        self.deadline = self.deadline.min(Instant::now() + FAREWELL);
    }
}
