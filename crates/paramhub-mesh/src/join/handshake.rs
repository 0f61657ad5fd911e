//! One connection's handshake, on either side, without blocking.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Instant;

use paramhub_core::auth::{Proof, StreamSecret};
use paramhub_core::liveness::FINAL_MESSAGE_TIMEOUT;
use paramhub_core::wire::{
    CHALLENGE_BYTES, Challenge, PROOF_BYTES, Refusal, VERDICT_BYTES, Verdict, VerdictError, Welcome,
};
use paramhub_transport::Interest;
use paramhub_transport::dialling::dialled;
use paramhub_transport::greeting::{Discarded, PendingMessages, draw};
use paramhub_trust::{StreamKeys, StreamListener, StreamTls, TLS_HANDSHAKE};
use rustix::net::Shutdown;

use crate::secrets::MeshSecrets;
use crate::wire::{HELLO_BYTES, Hello};

/// A connection whose peer has not proved that it knows the secret.
pub(super) struct JoinHandshake {
    pub(super) socket: OwnedFd,
    /// The address of the peer.
    pub(super) address: SocketAddr,
    /// Whether the connection is to be encrypted.
    encrypts: bool,
    /// `None` where only the join as a whole has a deadline.
    pub(super) deadline: Option<Instant>,
    messages: PendingMessages,
    state: HandshakeState,
    /// The rank that an accepted connection claimed, and why it was refused.
    refusal: Option<(u32, String)>,
}

enum HandshakeState {
    /// The dialler is not connected yet.
    Dialling(Hello),
    /// The dialler has sent its hello.
    AwaitsChallenge(Hello),
    /// The dialler has answered this challenge.
    AwaitsVerdict(Hello, Challenge),
    /// The listener expects a hello.
    AwaitsHello,
    /// The listener has sent this challenge.
    AwaitsProof(Hello, Challenge),
    /// The listener is sending the welcome to the rank with this hello.
    Welcomes(Hello),
    /// The listener is sending the refusal; then it closes its side, and the peer has a second to read the
    /// refusal.
    Refuses { is_closed: bool },
}

/// The result of a turn of a handshake.
pub(super) enum HandshakeProgress {
    Waits,
    /// At a dialler: the handshake with this hello has succeeded, and frames may follow.
    Joined(Hello),
    /// At a listener: the rank with this hello is admitted.
    Admitted(Hello),
    /// At a dialler: the refusal is final, for this reason.
    Refused(String),
    /// At a dialler: no program listens at the address, though one may later.
    NobodyThere,
    /// The handshake has failed and may be tried again.
    Failed(String),
}

/// A listener's check of a hello that has been proved.
pub(super) type HelloCheck<'a> = dyn FnMut(&Hello) -> Result<(), (Refusal, String)> + 'a;

impl JoinHandshake {
    /// A dial, which may wait for as long as it takes the other rank to join if it has no deadline.
    pub(super) fn dialler(
        socket: OwnedFd,
        address: SocketAddr,
        hello: Hello,
        encrypts: bool,
        deadline: Option<Instant>,
    ) -> Self {
        JoinHandshake::new(socket, address, encrypts, deadline, HandshakeState::Dialling(hello))
    }

    pub(super) fn listener(socket: OwnedFd, address: SocketAddr, encrypts: bool, deadline: Instant) -> Self {
        JoinHandshake::new(socket, address, encrypts, Some(deadline), HandshakeState::AwaitsHello)
    }

    fn new(
        socket: OwnedFd,
        address: SocketAddr,
        encrypts: bool,
        deadline: Option<Instant>,
        state: HandshakeState,
    ) -> Self {
        let bytes_max = match state {
            HandshakeState::AwaitsHello => HELLO_BYTES.max(PROOF_BYTES),
            _ => VERDICT_BYTES,
        };
        JoinHandshake {
            socket,
            address,
            encrypts,
            deadline,
            messages: PendingMessages::new(bytes_max),
            state,
            refusal: None,
        }
    }

    pub(super) fn interest(&self) -> Interest {
        let is_dialling = matches!(self.state, HandshakeState::Dialling(_));
        Interest { readable: !is_dialling, writable: is_dialling || !self.messages.has_sent_all() }
    }

    /// The keys of the connection, once it is open; `None` if it is not encrypted.
    pub(super) fn keys(&self) -> Option<StreamKeys> {
        self.messages.keys()
    }

    /// The rank that a just refused connection claimed, and why it was refused; the rank is not proved and
    /// serves messages only.
    pub(super) fn take_refusal(&mut self) -> Option<(u32, String)> {
        self.refusal.take()
    }

    /// Advances the handshake as far as it goes without blocking.
    pub(super) fn advance_handshake(
        &mut self,
        secrets: &MeshSecrets,
        tls: Option<&StreamListener>,
        check_hello: &mut HelloCheck<'_>,
    ) -> HandshakeProgress {
        match self.advance(secrets, tls, check_hello) {
            Ok(progress) => progress,
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => HandshakeProgress::NobodyThere,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                HandshakeProgress::Failed("it hung up during the handshake".to_owned())
            }
            Err(error) => HandshakeProgress::Failed(error.to_string()),
        }
    }

    fn advance(
        &mut self,
        secrets: &MeshSecrets,
        tls: Option<&StreamListener>,
        check_hello: &mut HelloCheck<'_>,
    ) -> io::Result<HandshakeProgress> {
        if let HandshakeState::Dialling(hello) = self.state {
            dialled(&self.socket)?;
            if self.encrypts {
                self.messages.begin_tls(StreamTls::call()?)?;
            }
            self.messages.queue(&hello.encode());
            self.state = HandshakeState::AwaitsChallenge(hello);
        }
        loop {
            if !self.messages.send(&self.socket)? {
                return Ok(HandshakeProgress::Waits);
            }
            let wanted = match &mut self.state {
                HandshakeState::Welcomes(hello) => return Ok(HandshakeProgress::Admitted(*hello)),
                HandshakeState::Refuses { is_closed } => {
                    if !std::mem::replace(is_closed, true) {
                        rustix::net::shutdown(&self.socket, Shutdown::Write)?;
                    }
                    return self.discard();
                }
                HandshakeState::Dialling(_) => unreachable!("the dialling is over"),
                HandshakeState::AwaitsChallenge(_) => CHALLENGE_BYTES,
                HandshakeState::AwaitsVerdict(..) => VERDICT_BYTES,
                HandshakeState::AwaitsHello => HELLO_BYTES,
                HandshakeState::AwaitsProof(..) => PROOF_BYTES,
            };
            let socket = &self.socket;
            let is_whole = self.messages.receive(wanted, |buffer| Ok(rustix::io::read(socket, buffer)?))?;
            let is_tls = self.messages.received().first() == Some(&TLS_HANDSHAKE);
            if let (HandshakeState::AwaitsHello, true, false, Some(tls)) =
                (&self.state, is_tls, self.messages.are_encrypted(), tls)
            {
                self.messages.begin_tls(tls.begin()?)?;
                continue;
            }
            if !is_whole {
                return Ok(HandshakeProgress::Waits);
            }
            if let Some(progress) = self.answer(secrets, check_hello)? {
                return Ok(progress);
            }
        }
    }

    /// Handles a message that has come whole.
    fn answer(
        &mut self,
        secrets: &MeshSecrets,
        check_hello: &mut HelloCheck<'_>,
    ) -> io::Result<Option<HandshakeProgress>> {
        match &self.state {
            HandshakeState::AwaitsChallenge(hello) => {
                let hello = *hello;
                let challenge: Challenge = self.messages.take();
                let secret = self.messages.bind(&secret_with(secrets, hello.peer));
                let proof = hello.dialler_proof(&secret, &challenge);
                self.messages.queue(&proof.0);
                self.state = HandshakeState::AwaitsVerdict(hello, challenge);
            }
            HandshakeState::AwaitsVerdict(hello, challenge) => {
                let (hello, challenge) = (*hello, *challenge);
                let secret = self.messages.bind(&secret_with(secrets, hello.peer));
                let expected = |head: &[u8]| hello.listener_proof(&secret, &challenge, head);
                return Ok(Some(match Verdict::open(&self.messages.take(), expected) {
                    Ok(_) => HandshakeProgress::Joined(hello),
                    Err(VerdictError::Unproven) => HandshakeProgress::Refused(
                        "it does not know the mesh's secret: something else answers there".into(),
                    ),
                    Err(VerdictError::Refused { message, .. }) => HandshakeProgress::Refused(message),
                    Err(error @ VerdictError::Capabilities(_)) => {
                        HandshakeProgress::Refused(error.to_string())
                    }
                    Err(VerdictError::Unreadable(error)) => HandshakeProgress::Refused(format!(
                        "it does not answer like a paramhub mesh: {error}"
                    )),
                }));
            }
            HandshakeState::AwaitsHello => {
                match Hello::decode(&self.messages.take::<HELLO_BYTES>()) {
                    Ok(_) if self.messages.has_unread_bytes(&self.socket)? => {
                        return Err(io::Error::other("it sent more than a hello before it was challenged"));
                    }
                    Ok(_) if self.encrypts != self.messages.are_encrypted() => {
                        self.messages.queue(&[0; CHALLENGE_BYTES]);
                        let message =
                            "the connections of this mesh are encrypted: give all ranks the same `encrypt`";
                        self.refuse(None, Refusal::Capability, message.into());
                    }
                    Ok(hello) => {
                        let challenge = draw()?;
                        self.messages.queue(&challenge);
                        self.state = HandshakeState::AwaitsProof(hello, challenge);
                    }
                    Err(error) => {
                        // A dialler of another version reads the verdict behind a challenge.
                        self.messages.queue(&[0; CHALLENGE_BYTES]);
                        self.refuse(None, Refusal::Protocol, error.to_string());
                    }
                }
            }
            HandshakeState::AwaitsProof(hello, challenge) => {
                let (hello, challenge) = (*hello, *challenge);
                let known = secrets.with(hello.rank);
                // The check takes as long for a rank that there is not.
                let secret = self.messages.bind(&secret_with(secrets, hello.rank));
                let proof = Proof(self.messages.take());
                if !proof.matches(&hello.dialler_proof(&secret, &challenge)) || known.is_none() {
                    let message = "the secret is wrong: do both ranks mean the same mesh?";
                    self.refuse(Some(hello.rank), Refusal::WrongNonce, message.into());
                } else if let Err((refusal, message)) = check_hello(&hello) {
                    self.refuse(Some(hello.rank), refusal, message);
                } else {
                    let prove = |head: &[u8]| hello.listener_proof(&secret, &challenge, head);
                    self.messages.queue(&Verdict::welcome(&Welcome::default(), prove));
                    self.state = HandshakeState::Welcomes(hello);
                }
            }
            HandshakeState::Dialling(_) | HandshakeState::Welcomes(_) | HandshakeState::Refuses { .. } => {
                unreachable!("nothing is heard in these stages")
            }
        }
        Ok(None)
    }

    fn refuse(&mut self, rank: Option<u32>, refusal: Refusal, message: String) {
        self.refusal = rank.map(|rank| (rank, message.clone()));
        self.messages.queue(&Verdict::refused(refusal, &message));
        self.state = HandshakeState::Refuses { is_closed: false };
        self.deadline = self.deadline.map(|deadline| deadline.min(Instant::now() + FINAL_MESSAGE_TIMEOUT));
    }

    /// Drops what a refused peer still sends.
    fn discard(&mut self) -> io::Result<HandshakeProgress> {
        let socket = &self.socket;
        Ok(match self.messages.discard(|buffer| Ok(rustix::io::read(socket, buffer)?))? {
            Discarded::Waits => HandshakeProgress::Waits,
            Discarded::Ended => HandshakeProgress::Failed("it was refused".to_owned()),
            Discarded::TooMuch => HandshakeProgress::Failed("it was refused and went on sending".to_owned()),
        })
    }
}

/// The secret of the connections with a rank, or one that nobody has where there is no such rank.
fn secret_with(secrets: &MeshSecrets, rank: u32) -> StreamSecret {
    secrets.with(rank).unwrap_or(StreamSecret([0; 32]))
}
