//! The manager's side: its certificates, and which of them a caller gets.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

use paramhub_core::auth::Fingerprint;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use crate::authority::{Authority, AuthorityRecord, RENEWAL};
use crate::error::TrustError;
use crate::names::{Asked, asked, label};
use crate::token_exchange::TOKEN_PROTOCOL;

/// The most authorities that a manager keeps: the one that signs, and those before it.
pub const AUTHORITIES_MAX: usize = 8;

/// The certificates of a manager. Programs of paramhub get those that its own authorities have signed; others get
/// the configured one, if there is one.
pub struct ManagerIdentity {
    certificates: Arc<Certificates>,
    tls: Arc<ServerConfig>,
    names: Vec<String>,
    files: Option<CertificateFiles>,
}

/// A certificate with its chain, and its key, in PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificate, then those that lead to its authority.
    pub certificate: PathBuf,
    /// The certificate's key.
    pub key: PathBuf,
}

impl ManagerIdentity {
    /// The identity of a manager with these authorities, the newest first, of which there must be one at least. Its
    /// certificates have `names` beside their own: host names and IP addresses. Programs that are not of paramhub
    /// get the certificate in `files`.
    ///
    /// # Errors
    /// If a name or a file cannot be used, or an authority cannot be read.
    pub fn new(
        authorities: Vec<AuthorityRecord>,
        names: Vec<String>,
        files: Option<CertificateFiles>,
    ) -> Result<Self, TrustError> {
        let configured = files.as_ref().map(Configured::read).transpose()?;
        let signers = signers(authorities, &names)?;
        let certificates = Arc::new(Certificates(RwLock::new(Known { signers, configured })));
        let mut tls = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has the suites of TLS 1.3")
            .with_no_client_auth()
            .with_cert_resolver(certificates.clone());
        tls.alpn_protocols = vec![b"http/1.1".to_vec(), TOKEN_PROTOCOL.to_vec()];
        // Without tickets no connection depends on the keys of another. A handshake costs little beside a call.
        tls.send_tls13_tickets = 0;
        Ok(ManagerIdentity { certificates, tls: Arc::new(tls), names, files })
    }

    /// A new authority.
    ///
    /// # Errors
    /// If the system gives no random numbers.
    pub fn make_authority() -> Result<AuthorityRecord, TrustError> {
        Authority::make(SystemTime::now()).map(|authority| authority.record)
    }

    /// How the manager answers handshakes.
    pub fn tls(&self) -> Arc<ServerConfig> {
        self.tls.clone()
    }

    /// The fingerprint of the authority that signs.
    pub fn authority(&self) -> Fingerprint {
        self.certificates.read(|known| known.signers[0].authority.fingerprint)
    }

    /// The certificate of the authority that signs, in PEM.
    pub fn authority_certificate(&self) -> String {
        self.certificates.read(|known| known.signers[0].authority.record.certificate.clone())
    }

    /// Every authority, the newest first.
    pub fn authorities(&self) -> Vec<AuthorityRecord> {
        self.certificates
            .read(|known| known.signers.iter().map(|signer| signer.authority.record.clone()).collect())
    }

    /// Replaces the authorities, the newest first, of which there must be one at least. Callers that know none of them cannot
    /// recognise the manager any more.
    ///
    /// # Errors
    /// If one cannot be read. Then nothing changes.
    pub fn replace_authorities(&self, authorities: Vec<AuthorityRecord>) -> Result<(), TrustError> {
        let signers = signers(authorities, &self.names)?;
        self.certificates.write(|known| known.signers = signers);
        Ok(())
    }

    /// Signs certificates anew that have little time left, and reads the configured one again if its file has
    /// changed. Call it every minute or so.
    ///
    /// # Errors
    /// If a certificate cannot be made or read. The former one stays.
    pub fn renew(&self, now: SystemTime) -> Result<(), TrustError> {
        // This host's clock may have been wrong when they were signed.
        let is_good = |signer: &Signer| (signer.valid.start..signer.valid.end - RENEWAL).contains(&now);
        if !self.certificates.read(|known| known.signers.iter().all(is_good)) {
            self.replace_authorities(self.authorities())?;
        }
        let Some(files) = &self.files else { return Ok(()) };
        let changed = changed_at(&files.certificate);
        if self
            .certificates
            .read(|known| known.configured.as_ref().is_none_or(|read| read.changed_at != changed))
        {
            let configured = Configured::read(files)?;
            self.certificates.write(|known| known.configured = Some(configured));
        }
        Ok(())
    }
}

impl fmt::Debug for ManagerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ManagerIdentity").field("authority", &self.authority()).finish_non_exhaustive()
    }
}

/// The certificates, for threads that answer handshakes.
#[derive(Debug)]
struct Certificates(RwLock<Known>);

#[derive(Debug)]
struct Known {
    /// The newest first.
    signers: Vec<Signer>,
    configured: Option<Configured>,
}

/// An authority, and the manager's certificate that it has signed.
struct Signer {
    authority: Authority,
    certificate: Arc<CertifiedKey>,
    valid: Range<SystemTime>,
}

impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signer").field("authority", &self.authority.fingerprint).finish_non_exhaustive()
    }
}

/// The certificate from files.
#[derive(Debug)]
struct Configured {
    certificate: Arc<CertifiedKey>,
    changed_at: Option<SystemTime>,
}

impl Certificates {
    fn read<T>(&self, look: impl FnOnce(&Known) -> T) -> T {
        look(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write(&self, change: impl FnOnce(&mut Known)) {
        change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner));
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.read(|known| {
            let newest = &known.signers[0].certificate;
            let chosen = match asked(hello.server_name()) {
                Asked::Manager => newest,
                Asked::Authority(digits) => known
                    .signers
                    .iter()
                    .find(|signer| label(signer.authority.fingerprint) == digits)
                    .map_or(newest, |signer| &signer.certificate),
                Asked::Other => {
                    known.configured.as_ref().map_or(newest, |configured| &configured.certificate)
                }
            };
            Some(chosen.clone())
        })
    }
}

impl Configured {
    fn read(files: &CertificateFiles) -> Result<Configured, TrustError> {
        let unreadable = |path: &Path, cause: rustls::pki_types::pem::Error| TrustError::File {
            path: path.to_owned(),
            cause: match cause {
                rustls::pki_types::pem::Error::Io(cause) => cause.to_string(),
                rustls::pki_types::pem::Error::NoItemsFound => "it has none in PEM".to_owned(),
                cause => cause.to_string(),
            },
        };
        let changed_at = changed_at(&files.certificate);
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(&files.certificate)
            .and_then(Iterator::collect)
            .map_err(|cause| unreadable(&files.certificate, cause))?;
        if chain.is_empty() {
            return Err(unreadable(&files.certificate, rustls::pki_types::pem::Error::NoItemsFound));
        }
        let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|cause| unreadable(&files.key, cause))?;
        let unmatched = |cause: rustls::Error| TrustError::Unmatched {
            certificate: files.certificate.clone(),
            key: files.key.clone(),
            cause: cause.to_string(),
        };
        let key = any_supported_type(&key)
            .map_err(|cause| TrustError::File { path: files.key.clone(), cause: cause.to_string() })?;
        let certificate = CertifiedKey::new(chain, key);
        certificate.keys_match().map_err(unmatched)?;
        Ok(Configured { certificate: Arc::new(certificate), changed_at })
    }
}

fn changed_at(file: &Path) -> Option<SystemTime> {
    std::fs::metadata(file).and_then(|about| about.modified()).ok()
}

/// Authorities with the certificates that they sign now.
fn signers(authorities: Vec<AuthorityRecord>, names: &[String]) -> Result<Vec<Signer>, TrustError> {
    assert!(!authorities.is_empty(), "a manager has an authority");
    let now = SystemTime::now();
    authorities
        .into_iter()
        .map(|record| {
            let authority = Authority::restore(record)?;
            let signed = authority.sign(names, now)?;
            Ok(Signer { authority, certificate: Arc::new(signed.key), valid: signed.valid })
        })
        .collect()
}
