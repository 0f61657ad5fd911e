//! The address of the etcd that keeps the state of several managers.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The port on which etcd listens for clients unless it is told otherwise.
const PORT: u16 = 2379;
/// The most bytes of a prefix: it is a part of every key.
const PREFIX_BYTES_MAX: usize = 256;

/// Where etcd answers, who asks it, and the prefix of all keys, as in `etcd://10.0.0.1,10.0.0.2:2379/paramhub`.
/// Shown without the password.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdAddress {
    /// `host:port` of each member, any of which is asked.
    pub(crate) members: Vec<String>,
    /// Without a slash at either end.
    pub(crate) prefix: String,
    pub(crate) user: Option<User>,
    /// The certificates of a connection over TLS; `None` for one in clear.
    pub(crate) tls: Option<EtcdTls>,
}

/// A user of etcd.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) password: String,
}

/// The files for a connection over TLS, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EtcdTls {
    /// The authority that has signed etcd's certificates.
    pub(crate) authority: PathBuf,
    /// The manager's own certificate and its key, where etcd asks for one.
    pub(crate) own: Option<(PathBuf, PathBuf)>,
}

impl EtcdAddress {
    /// Returns whether a text is meant as an address of etcd, and not as a directory.
    pub fn is_meant(text: &str) -> bool {
        text.starts_with("etcd://") || text.starts_with("etcds://")
    }

    fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "etcds" } else { "etcd" }
    }
}

impl FromStr for EtcdAddress {
    type Err = String;

    /// Reads `etcd://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/PREFIX`, or the same with `etcds://` and
    /// `?ca=FILE[&cert=FILE&key=FILE]`. In USER and PASSWORD `%40` stands for `@`, and so on.
    fn from_str(text: &str) -> Result<Self, String> {
        // The text may have a password, so no message repeats it.
        let refuse = |cause: &str| {
            format!(
                "this is no address of etcd: {cause}. Expected etcd://HOST:PORT[,HOST:PORT...]/PREFIX, as in \
                 etcd://10.0.0.1:2379/paramhub"
            )
        };
        let (is_encrypted, rest) = match text.trim().split_once("://") {
            Some(("etcd", rest)) => (false, rest),
            Some(("etcds", rest)) => (true, rest),
            _ => return Err(refuse("its scheme is neither etcd nor etcds")),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (user, rest) = match rest.rsplit_once('@') {
            Some((user, rest)) => (Some(read_user(user).map_err(|cause| refuse(&cause))?), rest),
            None => (None, rest),
        };
        let (hosts, prefix) =
            rest.split_once('/').ok_or_else(|| refuse("it has no prefix for the keys after its hosts"))?;
        let members: Result<Vec<String>, String> = hosts.split(',').map(read_member).collect();
        let prefix = prefix.trim_matches('/');
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte);
        if prefix.is_empty() || prefix.len() > PREFIX_BYTES_MAX || !prefix.bytes().all(allowed) {
            return Err(refuse(&format!(
                "its prefix must have 1 to {PREFIX_BYTES_MAX} letters, digits, `.`, `_`, `-` or `/`"
            )));
        }
        Ok(EtcdAddress {
            members: members.map_err(|cause| refuse(&cause))?,
            prefix: prefix.to_owned(),
            user,
            tls: read_query(is_encrypted, query).map_err(|cause| refuse(&cause))?,
        })
    }
}

impl fmt::Display for EtcdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://", self.scheme())?;
        if let Some(user) = &self.user {
            write!(f, "{}@", encoded(&user.name))?;
        }
        write!(f, "{}/{}", self.members.join(","), self.prefix)?;
        if let Some(EtcdTls { authority, own }) = &self.tls {
            write!(f, "?ca={}", authority.display())?;
            if let Some((certificate, key)) = own {
                write!(f, "&cert={}&key={}", certificate.display(), key.display())?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for EtcdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn read_user(text: &str) -> Result<User, String> {
    let (name, password) = text.split_once(':').ok_or("its user has no password")?;
    let decode =
        |text| decoded(text).ok_or("a `%` in its user or password is not followed by two hexadecimal digits");
    let (name, password) = (decode(name)?, decode(password)?);
    if name.is_empty() {
        return Err("its user has no name".to_owned());
    }
    Ok(User { name, password })
}

fn read_member(text: &str) -> Result<String, String> {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    let is_bracketed = host.starts_with('[') && host.ends_with(']');
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    if host.is_empty() {
        return Err("one of its hosts is empty".to_owned());
    }
    if !is_bracketed && !host.bytes().all(allowed) {
        return Err(format!("`{host}` is no host"));
    }
    match port.map_or(Ok(PORT), str::parse::<u16>) {
        Ok(port) if port > 0 => Ok(format!("{host}:{port}")),
        _ => Err(format!("the port of `{host}` is not a number from 1 to 65535")),
    }
}

fn read_query(is_encrypted: bool, query: &str) -> Result<Option<EtcdTls>, String> {
    let (mut authority, mut certificate, mut key) = (None, None, None);
    for option in query.split('&').filter(|option| !option.is_empty()) {
        match option.split_once('=') {
            Some(("ca", file)) => authority = Some(PathBuf::from(file)),
            Some(("cert", file)) => certificate = Some(PathBuf::from(file)),
            Some(("key", file)) => key = Some(PathBuf::from(file)),
            _ => return Err("only ca, cert and key can follow its `?`".to_owned()),
        }
    }
    if !is_encrypted {
        return match query {
            "" => Ok(None),
            _ => Err("files of certificates are for etcds, which is etcd over TLS".to_owned()),
        };
    }
    let authority =
        authority.ok_or("etcds needs the authority of etcd's certificates, as in ?ca=/etc/etcd/ca.pem")?;
    match (certificate, key) {
        (None, None) => Ok(Some(EtcdTls { authority, own: None })),
        (Some(certificate), Some(key)) => Ok(Some(EtcdTls { authority, own: Some((certificate, key)) })),
        _ => Err("a certificate (cert) needs its key (key), and a key its certificate".to_owned()),
    }
}

fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first == b'%' {
            let digits = rest.get(..2)?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
            rest = &rest[2..];
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).ok()
}

fn encoded(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    text.bytes()
        .map(|byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_shown_without_the_password() {
        for (text, shown) in [
            ("etcd://10.0.0.1:2379/paramhub", "etcd://10.0.0.1:2379/paramhub"),
            ("etcd://a,b:99,[::1]/x/y/", "etcd://a:2379,b:99,[::1]:2379/x/y"),
            ("etcd://root:se%40c:ret@a/p", "etcd://root@a:2379/p"),
            ("etcd://a%3Ab:x@a/p", "etcd://a%3Ab@a:2379/p"),
            ("etcds://a/p?ca=/etc/ca.pem", "etcds://a:2379/p?ca=/etc/ca.pem"),
            ("etcds://a/p?ca=1&cert=2&key=3", "etcds://a:2379/p?ca=1&cert=2&key=3"),
        ] {
            let address: EtcdAddress = text.parse().unwrap();
            assert_eq!((address.to_string().as_str(), format!("{address:?}").as_str()), (shown, shown));
            assert!(EtcdAddress::is_meant(text));
        }
        let address: EtcdAddress = "etcd://root:se%40c:ret@a/p".parse().unwrap();
        assert_eq!(address.user.unwrap().password, "se@c:ret");
        assert!(!EtcdAddress::is_meant("/var/lib/etcd://"));
    }

    #[test]
    fn what_is_wrong_is_said_without_the_password() {
        for (text, cause) in [
            ("http://a/p", "neither etcd nor etcds"),
            ("etcd://a", "no prefix"),
            ("etcd://a/", "its prefix must have"),
            ("etcd://a/a b", "its prefix must have"),
            ("etcd:///p", "hosts is empty"),
            ("etcd://a,/p", "hosts is empty"),
            ("etcd://a:0/p", "port"),
            ("etcd://a:x/p", "port"),
            ("etcd://a b/p", "no host"),
            ("etcd://secret@a/p", "no password"),
            ("etcd://:secret@a/p", "no name"),
            ("etcd://root:secret%4@a/p", "hexadecimal"),
            ("etcd://a/p?ca=x", "for etcds"),
            ("etcds://a/p", "needs the authority"),
            ("etcds://a/p?ca=x&cert=y", "needs its key"),
            ("etcds://a/p?secret=x", "only ca, cert and key"),
        ] {
            let refused = text.parse::<EtcdAddress>().unwrap_err();
            assert!(refused.contains(cause), "{text}: {refused}");
            assert!(!refused.contains("secret") && refused.contains("etcd://HOST"), "{text}: {refused}");
        }
    }
}
