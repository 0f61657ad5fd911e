//! The names in certificates and handshakes.

use paramhub_core::auth::Fingerprint;
use rustls::pki_types::ServerName;

/// The name in every certificate of a manager, whatever its address: callers recognise it by its role.
const MANAGER: &str = "manager.paramhub.internal";
/// The hexadecimal digits of a fingerprint that a caller names.
const DIGITS: usize = 16;

/// The name by which a caller asks for the certificate of the manager, and which the certificate must have.
pub fn manager_name() -> ServerName<'static> {
    ServerName::try_from(MANAGER).expect("it is a DNS name")
}

/// The name by which a caller asks for the certificate that this authority has signed: a manager may have
/// several authorities while one replaces another.
pub fn server_name(authority: Fingerprint) -> ServerName<'static> {
    let name = format!("{}.{MANAGER}", label(authority));
    ServerName::try_from(name).expect("hexadecimal digits make a DNS label")
}

pub(crate) fn label(authority: Fingerprint) -> String {
    let mut digits = authority.to_string();
    digits.truncate(DIGITS);
    digits
}

/// What the caller asks for.
pub(crate) enum Asked<'a> {
    /// The certificate of the authority with this label.
    Authority(&'a str),
    /// The manager's certificate.
    Manager,
    /// Another name, or none: the caller is no program of paramhub.
    Other,
}

pub(crate) fn asked(name: Option<&str>) -> Asked<'_> {
    match name.and_then(|name| name.strip_suffix(MANAGER)) {
        Some("") => Asked::Manager,
        Some(label) => Asked::Authority(label.trim_end_matches('.')),
        None => Asked::Other,
    }
}

/// The DNS names of every certificate, apart from those of the machine.
pub(crate) fn own_names() -> [String; 2] {
    [MANAGER.to_owned(), "localhost".to_owned()]
}
