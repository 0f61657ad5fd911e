//! One connection's handshake, from either side, without waiting.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use paramhub_core::auth::{Nonce, Proof};
use paramhub_core::wire::{CHALLENGE_BYTES, Challenge, PROOF_BYTES, Refusal, VERDICT_BYTES, Verdict};
use paramhub_transport::Interest;
use paramhub_transport::handshakes::{DISCARDED_BYTES_MAX, has_unread_bytes};
use paramhub_transport::socket::dialled;
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};

use crate::wire::{HELLO_BYTES, Hello};

/// How long a refused connection may take to read why.
const FAREWELL: Duration = Duration::from_secs(1);

/// A connection that has not proved itself.
pub(super) struct Knock {
    pub(super) socket: OwnedFd,
    /// The other end.
    pub(super) address: SocketAddr,
    /// `None`: as long as joining takes.
    pub(super) deadline: Option<Instant>,
    inbox: [u8; VERDICT_BYTES],
    heard: usize,
    outbox: Vec<u8>,
    stage: Stage,
    /// The rank that a guest said it is, and why it was refused.
    refusal: Option<(u32, String)>,
}

enum Stage {
    /// Dialler: not connected yet.
    Dialling(Hello),
    /// Dialler: said hello.
    AwaitsChallenge(Hello),
    /// Dialler: said what proves it, and expects this proof.
    AwaitsVerdict(Proof),
    /// Listener.
    AwaitsHello,
    /// Listener: sent this challenge.
    AwaitsProof(Hello, Challenge),
    /// Listener: the welcome is on its way to this rank.
    Welcomes(u32),
    /// Listener: the refusal is on its way; then our side closes, and the peer has a second to read it. So many bytes that
    /// came after it have been thrown away.
    Refuses { is_closed: bool, discarded: usize },
}

/// How a handshake stands.
pub(super) enum Progress {
    Waits,
    /// Frames may follow.
    Joined,
    /// A listener's: this rank has joined.
    Admitted(u32),
    /// A dialler's: final, for this reason.
    Refused(String),
    /// Over, and may be tried again.
    Failed(String),
}

/// What a listener holds against a hello that has been proved.
pub(super) type Judge<'a> = dyn FnMut(&Hello) -> Result<(), (Refusal, String)> + 'a;

impl Knock {
    pub(super) fn dialler(socket: OwnedFd, address: SocketAddr, hello: Hello) -> Self {
        Knock::new(socket, address, None, Stage::Dialling(hello))
    }

    pub(super) fn listener(socket: OwnedFd, address: SocketAddr, deadline: Instant) -> Self {
        Knock::new(socket, address, Some(deadline), Stage::AwaitsHello)
    }

    fn new(socket: OwnedFd, address: SocketAddr, deadline: Option<Instant>, stage: Stage) -> Self {
        Knock {
            socket,
            address,
            deadline,
            inbox: [0; VERDICT_BYTES],
            heard: 0,
            outbox: Vec::new(),
            stage,
            refusal: None,
        }
    }

    pub(super) fn interest(&self) -> Interest {
        let is_dialling = matches!(self.stage, Stage::Dialling(_));
        Interest { readable: !is_dialling, writable: is_dialling || !self.outbox.is_empty() }
    }

    /// Which rank a guest that was just refused said it is, and why it was refused; only good for messages.
    pub(super) fn take_refusal(&mut self) -> Option<(u32, String)> {
        self.refusal.take()
    }

    /// Goes as far as it can.
    pub(super) fn attend(&mut self, secret: &Nonce, judge: &mut Judge<'_>) -> Progress {
        match self.advance(secret, judge) {
            Ok(progress) => progress,
            Err(error) => Progress::Failed(match error.kind() {
                io::ErrorKind::ConnectionRefused => "nobody listens there".to_owned(),
                io::ErrorKind::UnexpectedEof => "it hung up during the handshake".to_owned(),
                _ => error.to_string(),
            }),
        }
    }

    fn advance(&mut self, secret: &Nonce, judge: &mut Judge<'_>) -> io::Result<Progress> {
        if let Stage::Dialling(hello) = self.stage {
            dialled(&self.socket)?;
            self.outbox.extend_from_slice(&hello.encode());
            self.stage = Stage::AwaitsChallenge(hello);
        }
        loop {
            if !self.speak()? {
                return Ok(Progress::Waits);
            }
            let wanted = match &mut self.stage {
                Stage::Welcomes(rank) => return Ok(Progress::Admitted(*rank)),
                Stage::Refuses { is_closed, .. } => {
                    if !std::mem::replace(is_closed, true) {
                        rustix::net::shutdown(&self.socket, Shutdown::Write)?;
                    }
                    return self.discard();
                }
                Stage::Dialling(_) => unreachable!("the dialling is over"),
                Stage::AwaitsChallenge(_) => CHALLENGE_BYTES,
                Stage::AwaitsVerdict(_) => VERDICT_BYTES,
                Stage::AwaitsHello => HELLO_BYTES,
                Stage::AwaitsProof(..) => PROOF_BYTES,
            };
            if !self.listen(wanted)? {
                return Ok(Progress::Waits);
            }
            self.heard = 0;
            if let Some(progress) = self.answer(secret, judge)? {
                return Ok(progress);
            }
        }
    }

    /// `wanted` bytes are in the inbox.
    fn answer(&mut self, secret: &Nonce, judge: &mut Judge<'_>) -> io::Result<Option<Progress>> {
        match &self.stage {
            Stage::AwaitsChallenge(hello) => {
                let challenge: Challenge = self.inbox[..CHALLENGE_BYTES].try_into().expect("a fixed range");
                let (ours, theirs) = hello.proofs(secret, &challenge);
                self.outbox.extend_from_slice(&ours.0);
                self.stage = Stage::AwaitsVerdict(theirs);
            }
            Stage::AwaitsVerdict(expected) => {
                return Ok(Some(match Verdict::decode(&self.inbox) {
                    Ok(Verdict::Welcome { proof, .. }) if proof.matches(expected) => Progress::Joined,
                    Ok(Verdict::Welcome { .. }) => Progress::Refused(
                        "it does not know the mesh's secret: something else answers there".into(),
                    ),
                    Ok(Verdict::Refused { message, .. }) => Progress::Refused(message),
                    Err(error) => {
                        Progress::Refused(format!("it does not answer like a paramhub mesh: {error}"))
                    }
                }));
            }
            Stage::AwaitsHello => {
                match Hello::decode(self.inbox[..HELLO_BYTES].try_into().expect("a fixed range")) {
                    Ok(_) if has_unread_bytes(&self.socket)? => {
                        return Err(io::Error::other("it sent more than a hello before it was challenged"));
                    }
                    Ok(hello) => {
                        let challenge = draw()?;
                        self.outbox.extend_from_slice(&challenge);
                        self.stage = Stage::AwaitsProof(hello, challenge);
                    }
                    Err(error) => {
                        // A dialler of another version finds the verdict where it looks for it.
                        self.outbox.extend_from_slice(&[0; CHALLENGE_BYTES]);
                        self.refuse(None, Refusal::Protocol, error.to_string());
                    }
                }
            }
            Stage::AwaitsProof(hello, challenge) => {
                let hello = *hello;
                let (theirs, ours) = hello.proofs(secret, challenge);
                let proof = Proof(self.inbox[..PROOF_BYTES].try_into().expect("a fixed range"));
                if !proof.matches(&theirs) {
                    let message = "the secret is wrong: do both ranks mean the same mesh?";
                    self.refuse(Some(hello.rank), Refusal::WrongNonce, message.into());
                } else if let Err((refusal, message)) = judge(&hello) {
                    self.refuse(Some(hello.rank), refusal, message);
                } else {
                    self.outbox.extend_from_slice(&Verdict::Welcome { proof: ours, state_slots: 0 }.encode());
                    self.stage = Stage::Welcomes(hello.rank);
                }
            }
            Stage::Dialling(_) | Stage::Welcomes(_) | Stage::Refuses { .. } => {
                unreachable!("nothing is heard in these stages")
            }
        }
        Ok(None)
    }

    fn refuse(&mut self, rank: Option<u32>, refusal: Refusal, message: String) {
        self.refusal = rank.map(|rank| (rank, message.clone()));
        self.outbox.extend_from_slice(&Verdict::Refused { refusal, message }.encode());
        self.stage = Stage::Refuses { is_closed: false, discarded: 0 };
        self.deadline = self.deadline.map(|deadline| deadline.min(Instant::now() + FAREWELL));
    }

    /// Closing with unread bytes would reset the connection and take the verdict from the peer. A peer that sends more than an
    /// honest one could loses the connection at once.
    fn discard(&mut self) -> io::Result<Progress> {
        loop {
            match rustix::io::read(&self.socket, &mut self.inbox) {
                Ok(0) => return Ok(Progress::Failed("it was refused".to_owned())),
                Ok(read) => {
                    let Stage::Refuses { discarded, .. } = &mut self.stage else {
                        unreachable!("bytes are discarded after a refusal alone")
                    };
                    *discarded += read;
                    if *discarded > DISCARDED_BYTES_MAX {
                        return Ok(Progress::Failed("it was refused and went on sending".to_owned()));
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Progress::Waits),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Sends what is to be sent; `true` when nothing is left.
    fn speak(&mut self) -> io::Result<bool> {
        while !self.outbox.is_empty() {
            match rustix::net::send(&self.socket, &self.outbox, SendFlags::NOSIGNAL) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(wrote) => drop(self.outbox.drain(..wrote)),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }

    /// Reads up to `wanted` bytes, not one more: what follows are frames. `true` when they are here.
    fn listen(&mut self, wanted: usize) -> io::Result<bool> {
        while self.heard < wanted {
            match rustix::io::read(&self.socket, &mut self.inbox[self.heard..wanted]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.heard += read,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }
}

/// Bytes that nobody can foresee.
pub(super) fn draw<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}
