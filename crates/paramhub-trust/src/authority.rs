//! The manager's own authority, which signs the manager's certificates.

use std::fmt;
use std::ops::Range;
use std::time::{Duration, SystemTime};

use paramhub_core::auth::Fingerprint;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use ring::digest::{SHA256, digest};
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use serde::{Deserialize, Serialize};

use crate::error::TrustError;
use crate::names::own_names;

const DAY: Duration = Duration::from_secs(86_400);
/// How long an authority is valid. Its certificate is copied to hosts that run curl or Prometheus.
const AUTHORITY_VALID: Duration = Duration::from_secs(10 * 365 * 86_400);
/// How long a manager's certificate is valid. It is made anew when [`RENEWAL`] of it is left.
const CERTIFICATE_VALID: Duration = Duration::from_secs(90 * 86_400);
/// A certificate with less time left is made anew.
pub(crate) const RENEWAL: Duration = Duration::from_secs(60 * 86_400);
/// Certificates are valid from this long before they are made, for hosts whose clocks are slow.
const CLOCKS_DIFFER: Duration = DAY;

/// An authority as the manager's store keeps it. The key is secret.
#[derive(Clone, Serialize, Deserialize)]
pub struct AuthorityRecord {
    /// The certificate in PEM.
    pub certificate: String,
    /// The private key in PEM (PKCS #8).
    pub key: String,
    /// The time at which it was made, in seconds since 1970.
    pub made_at: u64,
}

/// The key stays out of logs.
impl fmt::Debug for AuthorityRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthorityRecord").field("made_at", &self.made_at).finish_non_exhaustive()
    }
}

/// An authority that can sign.
pub(crate) struct Authority {
    pub(crate) record: AuthorityRecord,
    pub(crate) fingerprint: Fingerprint,
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate with its key, and the times at which it is valid.
pub(crate) struct Signed {
    pub(crate) key: CertifiedKey,
    pub(crate) valid: Range<SystemTime>,
}

impl Authority {
    /// A new authority.
    pub(crate) fn make(now: SystemTime) -> Result<Authority, TrustError> {
        let key = KeyPair::generate().map_err(own)?;
        let certificate = params(now).self_signed(&key).map_err(own)?;
        let made_at = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Authority::restore(AuthorityRecord {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
            made_at,
        })
    }

    /// The authority of a record.
    pub(crate) fn restore(record: AuthorityRecord) -> Result<Authority, TrustError> {
        let key = KeyPair::from_pem(&record.key).map_err(own)?;
        let certificate = CertificateDer::from_pem_slice(record.certificate.as_bytes()).map_err(own)?;
        let fingerprint = fingerprint(&certificate).map_err(own)?;
        // An issuer needs no more of its certificate than the name and the uses of the key.
        let made_at = SystemTime::UNIX_EPOCH + Duration::from_secs(record.made_at);
        let issuer = Issuer::new(params(made_at), key);
        Ok(Authority { record, fingerprint, certificate, issuer })
    }

    /// A certificate of a manager that answers under these names, host names or IP addresses, beside its own.
    pub(crate) fn sign(&self, names: &[String], now: SystemTime) -> Result<Signed, TrustError> {
        if let Some(name) = names.iter().find(|name| !is_name(name)) {
            return Err(TrustError::Name { name: name.clone() });
        }
        let mut all: Vec<String> = own_names().into();
        all.extend_from_slice(names);
        all.sort();
        all.dedup();
        self.sign_for(all, now)
    }

    /// A certificate with these names alone.
    pub(crate) fn sign_for(&self, names: Vec<String>, now: SystemTime) -> Result<Signed, TrustError> {
        let key = KeyPair::generate().map_err(own)?;
        let mut params = CertificateParams::new(names).map_err(own)?;
        params.distinguished_name.push(DnType::CommonName, "paramhub connection manager");
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let valid = now - CLOCKS_DIFFER..now + CERTIFICATE_VALID;
        params.not_before = valid.start.into();
        params.not_after = valid.end.into();
        let certificate = params.signed_by(&key, &self.issuer).map_err(own)?;
        let chain = vec![certificate.der().clone(), self.certificate.clone()];
        let key =
            PrivateKeyDer::try_from(key.serialize_der()).map_err(|cause| TrustError::Own(cause.into()))?;
        let key = any_supported_type(&key).map_err(own)?;
        Ok(Signed { key: CertifiedKey::new(chain, key), valid })
    }
}

/// Whether a certificate can have this name: a host's name or an IP address.
pub fn is_name(name: &str) -> bool {
    ServerName::try_from(name).is_ok()
}

fn params(made_at: SystemTime) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "paramhub connection manager's authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = (made_at - CLOCKS_DIFFER).into();
    params.not_after = (made_at + AUTHORITY_VALID).into();
    params
}

/// The hash of a certificate's public key.
pub(crate) fn fingerprint(certificate: &CertificateDer<'_>) -> Result<Fingerprint, rustls::Error> {
    let key = ParsedCertificate::try_from(certificate)?.subject_public_key_info();
    let hash = digest(&SHA256, &key);
    Ok(Fingerprint(hash.as_ref().try_into().expect("SHA-256 has 32 bytes")))
}

fn own(cause: impl fmt::Display) -> TrustError {
    TrustError::Own(cause.to_string())
}
