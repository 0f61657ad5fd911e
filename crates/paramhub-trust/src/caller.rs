//! The callers' side of TLS: how the peer is recognised.

use std::sync::Arc;

use paramhub_core::auth::Fingerprint;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::authority::fingerprint;
use crate::names::manager_name;
use crate::token_exchange::TOKEN_PROTOCOL;

/// How a caller that knows the authority's fingerprint calls the manager.
pub fn caller_by_fingerprint(authority: Fingerprint) -> Arc<ClientConfig> {
    Arc::new(caller(Arc::new(ring::default_provider()), Recognise::ByFingerprint(authority)))
}

/// How the bearer of a token calls a manager of which it knows nothing else. The handshake proves nothing: both
/// ends have to [exchange proofs](crate::TokenExchange) after it, before anything else.
pub fn caller_by_token() -> Arc<ClientConfig> {
    let mut config = caller(Arc::new(ring::default_provider()), Recognise::ByProofs);
    config.alpn_protocols = vec![TOKEN_PROTOCOL.to_vec()];
    Arc::new(config)
}

/// How a peer is called that is recognised so.
pub(crate) fn caller(provider: Arc<CryptoProvider>, recognise: Recognise) -> ClientConfig {
    let algorithms = provider.signature_verification_algorithms;
    ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("the provider has the suites of TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(PeerVerifier { recognise, algorithms }))
        .with_no_client_auth()
}

/// Checks a peer's certificate.
#[derive(Debug)]
struct PeerVerifier {
    recognise: Recognise,
    algorithms: WebPkiSupportedAlgorithms,
}

/// How a peer is recognised.
#[derive(Debug)]
pub(crate) enum Recognise {
    /// It is the manager: its certificate is signed by this authority, has the manager's name, and is valid now.
    ByFingerprint(Fingerprint),
    /// It has any certificate: proofs over the connection follow.
    ByProofs,
}

impl ServerCertVerifier for PeerVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Recognise::ByFingerprint(expected) = self.recognise else {
            return Ok(ServerCertVerified::assertion());
        };
        let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let authority = others
            .iter()
            .find(|other| fingerprint(other).is_ok_and(|fingerprint| fingerprint == expected))
            .ok_or(unknown)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        let certificate = ParsedCertificate::try_from(certificate)?;
        let algorithms = self.algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&certificate, &roots, &[], now, algorithms)?;
        verify_server_name(&certificate, &manager_name())?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("only TLS 1.3 is spoken".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
