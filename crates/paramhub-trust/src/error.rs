//! Why certificates cannot be made or read.

use std::path::PathBuf;

use thiserror::Error;

/// Why certificates cannot be made or read.
#[derive(Debug, Error)]
pub enum TrustError {
    /// A file that was given cannot be used.
    #[error("the certificate or its key cannot be read from {}: {cause}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The fault.
        cause: String,
    },
    /// Certificate and key do not belong together.
    #[error("the key in {} is not that of the certificate in {}: {cause}", key.display(), certificate.display())]
    Unmatched {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// The fault.
        cause: String,
    },
    /// A name that the certificate is to have is none.
    #[error("`{name}` cannot be a name in a certificate: expected a host's name or an IP address")]
    Name {
        /// The name.
        name: String,
    },
    /// A certificate cannot be signed, or a stored authority cannot be read.
    #[error("the manager's own certificates can be neither read nor made: {0}")]
    Own(String),
}
