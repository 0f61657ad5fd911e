//! The options with which `hub` and `manager` say how a connection manager is called from other machines.

use std::path::PathBuf;

use clap::Args;
use paramhub::CertificateFiles;

use super::Usage;

#[derive(Args)]
pub(super) struct TlsFlags {
    /// Let other machines call the connection manager over HTTP in clear, where nobody can listen [default: false, TLS]
    #[arg(long, env = "PARAMHUB_PLAIN_HTTP")]
    pub(super) plain_http: Option<bool>,
    /// Further names or addresses under which curl and browsers call the connection manager, for its certificate [default:
    /// those of this machine]
    #[arg(long = "tls-name", value_name = "NAME", value_delimiter = ',', env = "PARAMHUB_TLS_NAMES")]
    pub(super) tls_names: Option<Vec<String>>,
    /// A certificate with its chain, in PEM, that curl and browsers get; with --tls-key [default: one of the connection
    /// manager's own authority, see `paramhub ca`]
    #[arg(long, value_name = "FILE", env = "PARAMHUB_TLS_CERTIFICATE")]
    pub(super) tls_certificate: Option<PathBuf>,
    /// The key of that certificate, in PEM
    #[arg(long, value_name = "FILE", env = "PARAMHUB_TLS_KEY")]
    pub(super) tls_key: Option<PathBuf>,
}

/// The certificate that was given, in two files.
pub(super) fn certificate(
    certificate: &Option<PathBuf>,
    key: &Option<PathBuf>,
) -> Result<Option<CertificateFiles>, Usage> {
    match (certificate.clone(), key.clone()) {
        (Some(certificate), Some(key)) => Ok(Some(CertificateFiles { certificate, key })),
        (None, None) => Ok(None),
        _ => Err(Usage("a certificate needs its key: give both --tls-certificate and --tls-key".to_owned())),
    }
}
