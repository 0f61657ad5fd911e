//! How the bearer of a token and the manager recognise each other right after the handshake.
//!
//! The caller offers [`TOKEN_PROTOCOL`] in the handshake (ALPN). It then sends its proof of 32 bytes. The
//! manager answers with 65 bytes: a byte that is 1 if it knows the token, its authority's fingerprint, and its
//! own proof. HTTP follows on the same connection.

use paramhub_core::auth::{Fingerprint, Proof};
use paramhub_core::tokens::{TokenKey, Tokens};
use rustls::ConnectionCommon;

/// The protocol by which a caller announces the exchange.
pub const TOKEN_PROTOCOL: &[u8] = b"paramhub-token/1";
/// Bytes of a caller's proof.
pub const REQUEST_BYTES: usize = 32;
/// Bytes of the manager's answer.
pub const ANSWER_BYTES: usize = 65;
const EXPORTER_LABEL: &[u8] = b"EXPORTER-paramhub-token";

/// A caller's side of the exchange.
pub struct TokenExchange {
    key: TokenKey,
    exported: [u8; 32],
}

/// Why a caller must not go on after the manager's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerError {
    /// Whoever answers says that it does not know the token.
    UnknownToken,
    /// Whoever answers does not know the token, although it says so, or the connection has one in its middle.
    WrongProof,
}

impl TokenExchange {
    /// The exchange over a connection whose handshake is complete.
    pub fn new<Side>(connection: &ConnectionCommon<Side>, token: &str) -> Result<Self, rustls::Error> {
        Ok(TokenExchange { key: TokenKey::of(token), exported: exported(connection)? })
    }

    /// What the caller sends.
    pub fn request(&self) -> [u8; REQUEST_BYTES] {
        self.key.prove_caller(&self.exported).0
    }

    /// The fingerprint of the manager's authority, from the answer.
    pub fn check(&self, answer: &[u8; ANSWER_BYTES]) -> Result<Fingerprint, AnswerError> {
        if answer[0] == 0 {
            return Err(AnswerError::UnknownToken);
        }
        if answer[0] != 1 {
            return Err(AnswerError::WrongProof);
        }
        let (authority, proof) = answer[1..].split_at(32);
        let authority = Fingerprint(authority.try_into().expect("it was split there"));
        let proof = Proof(proof.try_into().expect("the rest has as many"));
        if self.key.prove_manager(&self.exported, authority).matches(&proof) {
            Ok(authority)
        } else {
            Err(AnswerError::WrongProof)
        }
    }
}

/// The manager's answer to a caller's proof; one that says no more if it is no valid token's.
pub fn answer_token<Side>(
    connection: &ConnectionCommon<Side>,
    tokens: &Tokens,
    authority: Fingerprint,
    request: [u8; REQUEST_BYTES],
) -> Result<[u8; ANSWER_BYTES], rustls::Error> {
    let exported = exported(connection)?;
    let mut answer = [0; ANSWER_BYTES];
    if let Some(key) = tokens.proven(&exported, &Proof(request)) {
        answer[0] = 1;
        answer[1..33].copy_from_slice(&authority.0);
        answer[33..].copy_from_slice(&key.prove_manager(&exported, authority).0);
    }
    Ok(answer)
}

/// Bytes that only the two ends of the connection can derive from its keys.
fn exported<Side>(connection: &ConnectionCommon<Side>) -> Result<[u8; 32], rustls::Error> {
    connection.export_keying_material([0; 32], EXPORTER_LABEL, None)
}
