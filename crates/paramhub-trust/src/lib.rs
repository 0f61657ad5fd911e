//! TLS between the connection manager and its callers.
//!
//! The manager is its own authority: it signs its certificate itself, so that no files are needed. A worker
//! recognises it by the authority's [fingerprint](paramhub_core::auth::Fingerprint), which the job's secret
//! carries; the bearer of a token by a proof that the manager knows the token, after which it remembers the
//! fingerprint. Programs such as curl and browsers get the authority's certificate as a file.
//!
//! Only TLS 1.3 is spoken.
#![forbid(unsafe_code)]

mod authority;
mod caller;
mod error;
mod names;
mod server;
mod stream;
#[cfg(test)]
mod tests;
mod token_exchange;

pub use authority::{AuthorityRecord, is_name};
pub use caller::{caller_by_fingerprint, caller_by_token};
pub use error::TrustError;
pub use names::{manager_name, server_name};
pub use server::{AUTHORITIES_MAX, CertificateFiles, ManagerIdentity};
pub use stream::{Cipher, StreamKeys, StreamListener, StreamTls, TLS_HANDSHAKE};
pub use token_exchange::{
    ANSWER_BYTES, AnswerError, REQUEST_BYTES, TOKEN_PROTOCOL, TokenExchange, answer_token,
};
