//! TLS at the beginning of an encrypted data stream. It makes the keys; the frames are encrypted by
//! [`paramhub-transport`](https://docs.rs/paramhub-transport), which keeps them in cache.
//!
//! Its certificate proves nothing: whoever listens has made it a moment ago. Both ends prove inside the connection
//! that they know the stream's secret, and these proofs cover the connection's [`ChannelBinding`]. Somebody in the
//! middle has two connections with two bindings, and can pass on the proofs of neither.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::{Arc, LazyLock};

use paramhub_core::auth::ChannelBinding;
use rcgen::{CertificateParams, KeyPair};
use rustls::crypto::ring::cipher_suite::{TLS13_AES_128_GCM_SHA256, TLS13_CHACHA20_POLY1305_SHA256};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{CipherSuite, ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

use crate::caller::{Recognise, caller};
use crate::error::TrustError;

/// The first byte of a TLS handshake, which no Hello has.
pub const TLS_HANDSHAKE: u8 = 22;
/// Bytes of a TLS record before its content.
const RECORD_HEAD_BYTES: usize = 5;
/// The most bytes of a record's content: no message of a stream's handshake is longer.
const RECORD_BYTES_MAX: usize = 4 << 10;
/// The most bytes that a peer may send before the stream has its keys.
const HANDSHAKE_BYTES_MAX: usize = 16 << 10;
/// The types of a record's content in TLS 1.3.
const CONTENT_TYPES: std::ops::RangeInclusive<u8> = 20..=23;

/// How the records of a stream are encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    /// AES-128-GCM, where the caller's processor computes it.
    Aes128Gcm,
    /// ChaCha20-Poly1305, otherwise.
    ChaCha20Poly1305,
}

/// The secrets of one end of an encrypted stream. Each stream has its own, and each direction.
#[derive(Clone)]
pub struct StreamKeys {
    /// The cipher of both directions.
    pub cipher: Cipher,
    /// The secret of what this end sends.
    pub sending: [u8; 32],
    /// The secret of what this end receives.
    pub receiving: [u8; 32],
}

impl StreamKeys {
    /// The keys of the other end.
    #[must_use]
    pub fn mirrored(&self) -> StreamKeys {
        StreamKeys { cipher: self.cipher, sending: self.receiving, receiving: self.sending }
    }
}

/// Keys stay out of logs.
impl fmt::Debug for StreamKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamKeys").field("cipher", &self.cipher).finish_non_exhaustive()
    }
}

/// The listening end of encrypted streams: a hub, or a rank of a mesh. It has a certificate of its own, which lasts as
/// long as its process.
#[derive(Clone)]
pub struct StreamListener {
    tls: Arc<ServerConfig>,
}

impl StreamListener {
    /// A listener with a new certificate.
    ///
    /// # Errors
    /// If the system gives no random numbers.
    pub fn new() -> Result<StreamListener, TrustError> {
        let own = |error: rcgen::Error| TrustError::Own(error.to_string());
        let key = KeyPair::generate().map_err(own)?;
        let certificate = CertificateParams::default().self_signed(&key).map_err(own)?;
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut tls = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has the suites of TLS 1.3")
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)
            .map_err(|error| TrustError::Own(error.to_string()))?;
        tls.send_tls13_tickets = 0;
        Ok(StreamListener { tls: Arc::new(tls) })
    }

    /// Begins the handshake of a stream.
    ///
    /// # Errors
    /// If the system gives no random numbers.
    pub fn begin(&self) -> io::Result<StreamTls> {
        let connection = ServerConnection::new(self.tls.clone()).map_err(io::Error::other)?;
        Ok(StreamTls::new(connection.into(), false))
    }
}

impl fmt::Debug for StreamListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamListener").finish_non_exhaustive()
    }
}

/// The TLS connection of one stream, until the stream has its keys. It moves no bytes itself: what comes is given to
/// [`absorb`](Self::absorb), and what it has to say is in [`take_outgoing`](Self::take_outgoing).
pub struct StreamTls {
    connection: Connection,
    is_caller: bool,
    /// The head of the record that comes, as far as it is here.
    head: [u8; RECORD_HEAD_BYTES],
    head_bytes: usize,
    /// Bytes of its content that are still to come.
    content_bytes: usize,
    /// Bytes that may still come in all.
    bytes_left: usize,
}

impl StreamTls {
    /// The caller's end.
    ///
    /// # Errors
    /// If the system gives no random numbers.
    pub fn call() -> io::Result<StreamTls> {
        let name = ServerName::try_from("paramhub.internal").expect("a host's name");
        let connection = ClientConnection::new(CALLER.clone(), name).map_err(io::Error::other)?;
        Ok(StreamTls::new(connection.into(), true))
    }

    fn new(connection: Connection, is_caller: bool) -> StreamTls {
        let head = [0; RECORD_HEAD_BYTES];
        let bytes_left = HANDSHAKE_BYTES_MAX;
        StreamTls { connection, is_caller, head, head_bytes: 0, content_bytes: 0, bytes_left }
    }

    /// How many bytes may be read next. What follows may be no TLS any more, so no more must be read.
    pub fn wants(&self) -> usize {
        match self.content_bytes {
            0 => RECORD_HEAD_BYTES - self.head_bytes,
            left => left,
        }
    }

    /// Takes bytes that have come.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`] if they are no TLS, or not that of an honest peer. An alert for the peer may be in
    /// what it has to say.
    pub fn absorb(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let is_too_much = || io::Error::new(ErrorKind::InvalidData, "it sends more than a handshake has");
        self.bytes_left = self.bytes_left.checked_sub(bytes.len()).ok_or_else(is_too_much)?;
        while !bytes.is_empty() {
            let (now, rest) = bytes.split_at(self.wants().min(bytes.len()));
            bytes = rest;
            if self.content_bytes > 0 {
                self.content_bytes -= now.len();
            } else {
                self.head[self.head_bytes..self.head_bytes + now.len()].copy_from_slice(now);
                self.head_bytes += now.len();
                if self.head_bytes < RECORD_HEAD_BYTES {
                    continue;
                }
                self.head_bytes = 0;
                self.content_bytes = usize::from(u16::from_be_bytes([self.head[3], self.head[4]]));
                if !CONTENT_TYPES.contains(&self.head[0]) || self.content_bytes > RECORD_BYTES_MAX {
                    return Err(io::Error::new(ErrorKind::InvalidData, NoTls));
                }
                self.give(&{ self.head })?;
                continue;
            }
            self.give(now)?;
        }
        Ok(())
    }

    fn give(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.connection.read_tls(&mut bytes)?;
            let processed = self.connection.process_new_packets();
            processed.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        }
        Ok(())
    }

    /// Adds what this end has to send next.
    pub fn take_outgoing(&mut self, outgoing: &mut Vec<u8>) {
        while self.connection.wants_write() {
            self.connection.write_tls(outgoing).expect("a vector takes every byte");
        }
    }

    /// Encrypts a message; it is sent once the handshake is over.
    pub fn write(&mut self, message: &[u8]) -> io::Result<()> {
        self.connection.writer().write_all(message)
    }

    /// The bytes of messages that have come, as many as `buffer` takes; [`ErrorKind::WouldBlock`] if there are none, and
    /// 0 if the peer has ended the connection.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.connection.reader().read(buffer)
    }

    /// Whether messages have come that were not read, or a part of one.
    pub fn has_unread(&mut self) -> bool {
        let state = self.connection.process_new_packets();
        let is_between_records = self.head_bytes == 0 && self.content_bytes == 0;
        !is_between_records || state.map_or(true, |state| state.plaintext_bytes_to_read() > 0)
    }

    /// What the proofs of both ends have to cover.
    ///
    /// # Panics
    /// If the handshake is not over: then no message has come.
    pub fn binding(&self) -> ChannelBinding {
        ChannelBinding(self.export(b"EXPORTER-paramhub-stream-binding"))
    }

    /// The keys of the stream.
    ///
    /// # Panics
    /// If the handshake is not over.
    pub fn keys(&self) -> StreamKeys {
        let suite = self.connection.negotiated_cipher_suite().expect("the handshake is over").suite();
        let cipher = match suite {
            CipherSuite::TLS13_CHACHA20_POLY1305_SHA256 => Cipher::ChaCha20Poly1305,
            _ => Cipher::Aes128Gcm,
        };
        let keys = StreamKeys {
            cipher,
            sending: self.export(b"EXPORTER-paramhub-stream-caller"),
            receiving: self.export(b"EXPORTER-paramhub-stream-listener"),
        };
        if self.is_caller { keys } else { keys.mirrored() }
    }

    fn export(&self, label: &[u8]) -> [u8; 32] {
        self.connection.export_keying_material([0; 32], label, None).expect("the handshake is over")
    }
}

impl fmt::Debug for StreamTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamTls").field("is_caller", &self.is_caller).finish_non_exhaustive()
    }
}

/// The peer sends something else than TLS.
#[derive(Debug, thiserror::Error)]
#[error("it does not encrypt its streams: it is of an older release, or something else answers there")]
struct NoTls;

/// The suites of encrypted streams. The caller's order counts: it puts the one first that its processor computes faster.
fn provider() -> Arc<CryptoProvider> {
    let mut suites = vec![TLS13_AES_128_GCM_SHA256, TLS13_CHACHA20_POLY1305_SHA256];
    if !has_aes() {
        suites.reverse();
    }
    Arc::new(CryptoProvider { cipher_suites: suites, ..ring::default_provider() })
}

/// Whether the processor has instructions for AES and for the products of GCM.
fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("aes") && is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

/// How streams are called.
static CALLER: LazyLock<Arc<ClientConfig>> = LazyLock::new(|| {
    // The proofs that follow recognise the peer.
    let mut tls = caller(provider(), Recognise::ByProofs);
    tls.resumption = rustls::client::Resumption::disabled();
    Arc::new(tls)
});

#[cfg(test)]
mod tests;
