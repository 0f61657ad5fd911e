//! The TLS connection of one call, and how the manager at its other end is recognised.

use std::io::{Error, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paramhub_core::auth::Fingerprint;
use paramhub_core::service::{ErrorCode, refusal};
use paramhub_trust::{
    ANSWER_BYTES, AnswerError, TOKEN_PROTOCOL, TokenExchange, caller_by_fingerprint, caller_by_token,
    manager_name, server_name,
};
use rustls::{CertificateError, ClientConfig, ClientConnection, StreamOwned};
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout, Transport, TransportAdapter,
};

use crate::error::ControlError;

/// What a client knows about the manager, and how it learns more.
pub(crate) struct Recognition {
    /// The token with which the manager can be recognised, and its authority learnt.
    token: Option<String>,
    state: Mutex<RecognitionState>,
}

#[derive(Default)]
struct RecognitionState {
    /// The authority that signs the manager's certificates, once it is known.
    known: Option<KnownAuthority>,
    /// Whether the manager has shown a certificate of another authority since. Its token then says which it has now.
    is_doubted: bool,
}

#[derive(Clone)]
struct KnownAuthority {
    fingerprint: Fingerprint,
    config: Arc<ClientConfig>,
}

/// Why the program that answers is not recognised as the manager, where the handshake does not tell.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unrecognised {
    #[error(
        "nothing tells by what to recognise it: give the admin token or another token of it, or a job's whole \
         PARAMHUB_SECRET"
    )]
    NothingKnown,
    #[error(
        "it does not know the token that was given: the token is wrong or revoked, or another program answers there"
    )]
    UnknownToken,
    #[error(
        "its certificate is of another authority than before, and it does not know the token that was given: another program \
         answers there, or its authority was replaced and the token revoked"
    )]
    AnotherAuthority,
    #[error(
        "it does not know the token that was given, although it claims to: another program answers there"
    )]
    WrongProof,
    #[error("it does not know how to recognise callers by a token: another program answers there")]
    NoExchange,
}

impl Recognition {
    pub(crate) fn new(token: Option<String>, authority: Option<Fingerprint>) -> Recognition {
        let known = authority.map(KnownAuthority::new);
        Recognition { token, state: Mutex::new(RecognitionState { known, is_doubted: false }) }
    }

    /// Doubts that the manager still has the authority that is known, so that the next call asks for it by the
    /// token. Returns false without a token.
    pub(crate) fn doubt(&self) -> bool {
        self.lock().is_doubted = true;
        self.token.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, RecognitionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the handshake over a stream, and recognises the manager.
    fn recognise<S: Read + Write>(&self, stream: S) -> Result<StreamOwned<ClientConnection, S>, Error> {
        let (known, is_doubted) = {
            let state = self.lock();
            (state.known.clone(), state.is_doubted)
        };
        match (known, &self.token) {
            (Some(known), _) if !is_doubted => by_fingerprint(stream, known),
            (known, Some(token)) => {
                let learnt = by_token(stream, token);
                let mut state = self.lock();
                state.is_doubted = false;
                let (stream, authority) = learnt.map_err(|refused| match (known, refused) {
                    (Some(_), LearnError::Unrecognised(Unrecognised::UnknownToken)) => {
                        Error::other(Unrecognised::AnotherAuthority)
                    }
                    (_, LearnError::Unrecognised(why)) => Error::other(why),
                    (_, LearnError::Connection(failure)) => failure,
                })?;
                state.known = Some(KnownAuthority::new(authority));
                Ok(stream)
            }
            (_, None) => Err(Error::other(Unrecognised::NothingKnown)),
        }
    }
}

/// Recognises a manager whose authority is known.
fn by_fingerprint<S: Read + Write>(
    mut stream: S,
    known: KnownAuthority,
) -> Result<StreamOwned<ClientConnection, S>, Error> {
    let name = server_name(known.fingerprint);
    let mut connection = ClientConnection::new(known.config, name).map_err(Error::other)?;
    connection.complete_io(&mut stream)?;
    Ok(StreamOwned::new(connection, stream))
}

/// Recognises a manager by a token that it knows, and learns its authority.
fn by_token<S: Read + Write>(
    mut stream: S,
    token: &str,
) -> Result<(StreamOwned<ClientConnection, S>, Fingerprint), LearnError> {
    let mut connection = ClientConnection::new(caller_by_token(), manager_name()).map_err(Error::other)?;
    connection.complete_io(&mut stream)?;
    if connection.alpn_protocol() != Some(TOKEN_PROTOCOL) {
        return Err(LearnError::Unrecognised(Unrecognised::NoExchange));
    }
    let exchange = TokenExchange::new(&connection, token).map_err(Error::other)?;
    let mut stream = StreamOwned::new(connection, stream);
    stream.write_all(&exchange.request())?;
    let mut answer = [0; ANSWER_BYTES];
    stream.read_exact(&mut answer)?;
    let authority = exchange.check(&answer).map_err(|refused| {
        LearnError::Unrecognised(match refused {
            AnswerError::UnknownToken => Unrecognised::UnknownToken,
            AnswerError::WrongProof => Unrecognised::WrongProof,
        })
    })?;
    Ok((stream, authority))
}

enum LearnError {
    Connection(Error),
    Unrecognised(Unrecognised),
}

impl From<Error> for LearnError {
    fn from(failure: Error) -> Self {
        LearnError::Connection(failure)
    }
}

impl KnownAuthority {
    fn new(fingerprint: Fingerprint) -> KnownAuthority {
        KnownAuthority { fingerprint, config: caller_by_fingerprint(fingerprint) }
    }
}

impl std::fmt::Debug for Recognition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recognition").finish_non_exhaustive()
    }
}

/// Encrypts the connections of calls to `https` URLs.
#[derive(Debug)]
pub(crate) struct TlsConnector(pub(crate) Arc<Recognition>);

impl<In: Transport> Connector<In> for TlsConnector {
    type Out = Either<In, TlsTransport>;

    fn connect(
        &self,
        details: &ConnectionDetails,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, ureq::Error> {
        let Some(transport) = chained else { return Ok(None) };
        if !details.needs_tls() {
            return Ok(Some(Either::A(transport)));
        }
        let mut stream = TransportAdapter::new(transport.boxed(), details.current_time.clone());
        stream.set_timeout(details.timeout);
        let stream = self.0.recognise(stream)?;
        let config = details.config;
        let buffers = LazyBuffers::new(config.input_buffer_size(), config.output_buffer_size());
        Ok(Some(Either::B(TlsTransport { stream, buffers })))
    }
}

/// An encrypted connection.
pub(crate) struct TlsTransport {
    stream: StreamOwned<ClientConnection, TransportAdapter>,
    buffers: LazyBuffers,
}

impl Transport for TlsTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        self.stream.sock.set_timeout(timeout);
        let output = &self.buffers.output()[..amount];
        self.stream.write_all(output)?;
        Ok(())
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        self.stream.sock.set_timeout(timeout);
        let input = self.buffers.input_append_buf();
        let amount = self.stream.read(input)?;
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    fn is_open(&mut self) -> bool {
        self.stream.sock.get_mut().is_open()
    }

    fn is_tls(&self) -> bool {
        true
    }
}

impl std::fmt::Debug for TlsTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsTransport").finish_non_exhaustive()
    }
}

/// Whether a handshake failed because of the certificate.
pub(crate) fn is_unknown_certificate(failure: &Error) -> bool {
    matches!(inner(failure), Some(rustls::Error::InvalidCertificate(_)))
}

/// Why a call failed, if TLS is the reason.
pub(crate) fn explain(failure: &Error, url: &str) -> Option<ControlError> {
    let url = url.to_owned();
    let unrecognised = |url, cause| Some(ControlError::Unrecognised { url, cause });
    match inner(failure) {
        // A manager in clear answers so over HTTP.
        Some(Unrecognised::UnknownToken) => {
            let message = format!("{url}: {}", Unrecognised::UnknownToken);
            return Some(ControlError::Service(refusal(ErrorCode::Unauthorized, message)));
        }
        Some(cause) => return unrecognised(url, cause.to_string()),
        None => {}
    }
    match inner(failure)? {
        rustls::Error::InvalidCertificate(
            cause @ (CertificateError::ExpiredContext { .. }
            | CertificateError::Expired
            | CertificateError::NotValidYetContext { .. }
            | CertificateError::NotValidYet),
        ) => {
            let cause = format!(
                "its certificate is not valid now ({cause}): compare the clocks of this host and the manager's"
            );
            unrecognised(url, cause)
        }
        rustls::Error::InvalidCertificate(cause) => {
            let cause = format!(
                "its certificate is not of the authority that is known ({cause}): another program answers there, or the \
                 manager's authority was replaced and revoked"
            );
            unrecognised(url, cause)
        }
        rustls::Error::InvalidMessage(_) => {
            let cause = "it does not speak TLS. A manager on loopback, or one with --plain-http, has a URL that begins with \
                         http://";
            Some(ControlError::Protocol { url, cause: cause.to_owned() })
        }
        cause => Some(ControlError::Protocol { url, cause: cause.to_string() }),
    }
}

fn inner<E: std::error::Error + 'static>(failure: &Error) -> Option<&E> {
    failure.get_ref()?.downcast_ref()
}
