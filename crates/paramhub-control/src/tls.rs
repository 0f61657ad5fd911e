//! The TLS connection of one call, and how the manager at its other end is recognised.

use std::io::{Error, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};

use paramhub_core::auth::Fingerprint;
use paramhub_core::service::{ErrorCode, refusal};
use paramhub_trust::{
    ANSWER_BYTES, AnswerError, TokenExchange, caller_by_fingerprint, caller_by_token, manager_name,
    server_name,
};
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout, Transport, TransportAdapter,
};

use crate::error::ControlError;

/// What a client knows about the manager, and how it learns more.
pub(crate) struct Recognition {
    /// The token with which the manager can be recognised, and its authority learnt.
    token: Option<String>,
    /// The authority that signs the manager's certificates, once it is known.
    known: Mutex<Option<Known>>,
}

#[derive(Clone)]
struct Known {
    authority: Fingerprint,
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
        "it does not know the token that was given, although it claims to: another program answers there"
    )]
    WrongProof,
}

impl Recognition {
    pub(crate) fn new(token: Option<String>, authority: Option<Fingerprint>) -> Recognition {
        let known = authority.map(Known::new);
        Recognition { token, known: Mutex::new(known) }
    }

    /// Forgets the authority, if a token can tell it again. Returns whether that is so.
    pub(crate) fn forget(&self) -> bool {
        self.token.is_some() && self.lock().take().is_some()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the handshake over a stream, and recognises the manager.
    fn recognise<S: Read + Write>(&self, mut stream: S) -> Result<StreamOwned<ClientConnection, S>, Error> {
        let known = self.lock().clone();
        if let Some(Known { authority, config }) = known {
            let mut connection =
                ClientConnection::new(config, server_name(authority)).map_err(Error::other)?;
            connection.complete_io(&mut stream)?;
            return Ok(StreamOwned::new(connection, stream));
        }
        let Some(token) = &self.token else { return Err(Error::other(Unrecognised::NothingKnown)) };
        let mut connection =
            ClientConnection::new(caller_by_token(), manager_name()).map_err(Error::other)?;
        connection.complete_io(&mut stream)?;
        let exchange = TokenExchange::new(&connection, token).map_err(Error::other)?;
        let mut stream = StreamOwned::new(connection, stream);
        stream.write_all(&exchange.request())?;
        let mut answer = [0; ANSWER_BYTES];
        stream.read_exact(&mut answer)?;
        let authority = exchange.check(&answer).map_err(|refused| {
            Error::other(match refused {
                AnswerError::UnknownToken => Unrecognised::UnknownToken,
                AnswerError::WrongProof => Unrecognised::WrongProof,
            })
        })?;
        *self.lock() = Some(Known::new(authority));
        Ok(stream)
    }
}

impl Known {
    fn new(authority: Fingerprint) -> Known {
        Known { authority, config: caller_by_fingerprint(authority) }
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
        rustls::Error::InvalidCertificate(cause) => {
            let cause = format!(
                "its certificate is not of the authority that the job's secret names ({cause}): another program answers there, \
                 or the manager's authority was replaced and revoked"
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
