//! Reads the URLs of managers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use paramhub_core::service::MANAGER_PORT;

use crate::error::ControlError;

/// The most managers of one client.
const MANAGERS_MAX: usize = 16;

/// Where a manager answers, and whether in clear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ManagerAddress {
    /// `http://host:port` or `https://host:port`.
    pub(crate) url: String,
    /// Whether the host is this machine, whatever a name server answers.
    is_loopback: bool,
}

impl ManagerAddress {
    /// Reads the URLs of one manager, or of several, separated by commas.
    pub(crate) fn parse_list(text: &str) -> Result<Vec<Self>, ControlError> {
        let mut addresses: Vec<ManagerAddress> = Vec::new();
        for url in text.split(',') {
            let address = ManagerAddress::parse(url)?;
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        if addresses.len() > MANAGERS_MAX {
            let cause = format!("it has {} URLs, and {MANAGERS_MAX} are possible", addresses.len());
            return Err(ControlError::Url { url: text.to_string(), cause });
        }
        Ok(addresses)
    }

    /// Reads `http://host:port`, `https://host:port`, `host:port` or `host`. The port defaults to the manager's.
    /// Without a scheme the manager is called in clear on this machine, and over TLS elsewhere.
    pub(crate) fn parse(text: &str) -> Result<Self, ControlError> {
        let refuse = |cause: &str| ControlError::Url { url: text.to_string(), cause: cause.to_string() };
        let trimmed = text.trim();
        let (scheme, authority) = match trimmed.split_once("://") {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => (Some("http"), rest),
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("https") => (Some("https"), rest),
            Some(_) => return Err(refuse("its scheme is neither http nor https")),
            None => (None, trimmed),
        };
        let authority = authority.strip_suffix('/').unwrap_or(authority);
        if authority.is_empty() {
            return Err(refuse("it names no host"));
        }
        if authority.contains(['/', '?', '#']) {
            return Err(refuse("it has a path or a query"));
        }
        if authority.contains('@') {
            return Err(refuse("it has a user name; the token is given separately"));
        }
        if !authority.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(refuse("it has a space or a character outside ASCII"));
        }
        let (host, port) = split_port(authority).map_err(refuse)?;
        let is_loopback = is_loopback(host);
        let scheme = scheme.unwrap_or(if is_loopback { "http" } else { "https" });
        Ok(ManagerAddress { url: format!("{scheme}://{host}:{port}"), is_loopback })
    }

    /// Calls the manager over TLS even if the URL says `http`, unless it is on this machine.
    pub(crate) fn encrypted(mut self) -> Self {
        if let Some(authority) = self.url.strip_prefix("http://")
            && !self.is_loopback
        {
            self.url = format!("https://{authority}");
        }
        self
    }

    /// The URL at which a worker calls the manager whose secret has a fingerprint or, if not, is called in clear.
    pub(crate) fn of_workers(&self, is_encrypted: bool) -> String {
        let scheme = if is_encrypted { "https" } else { "http" };
        match self.is_loopback {
            true => self.url.clone(),
            false => format!("{scheme}://{}", self.host_and_port()),
        }
    }

    /// `host:port`.
    pub(crate) fn host_and_port(&self) -> &str {
        self.url.split_once("://").expect("a URL has a scheme").1
    }
}

fn is_loopback(host: &str) -> bool {
    let literal = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(inner) => inner.parse::<Ipv6Addr>().map(IpAddr::V6),
        None => host.parse::<Ipv4Addr>().map(IpAddr::V4),
    };
    literal.map_or(host.eq_ignore_ascii_case("localhost"), |ip| ip.to_canonical().is_loopback())
}

/// Splits `host:port`, `host`, `[v6]:port` or `[v6]`.
fn split_port(authority: &str) -> Result<(&str, u16), &'static str> {
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    };
    let bracketed = host.starts_with('[') && host.ends_with(']');
    if bracketed {
        let inner = &host[1..host.len() - 1];
        inner.parse::<Ipv6Addr>().map_err(|_| "the address in brackets is not IPv6")?;
    } else if host.contains([':', '[', ']']) {
        return Err("an IPv6 address needs brackets, as in [::1]:7770");
    } else if host.is_empty() {
        return Err("it names no host");
    }
    match port.map(str::parse::<u16>) {
        None => Ok((host, MANAGER_PORT)),
        Some(Ok(port)) if port > 0 => Ok((host, port)),
        Some(_) => Err("its port is not a number from 1 to 65535"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_what_people_write() {
        for (text, url) in [
            ("http://10.0.0.1:80", "http://10.0.0.1:80"),
            ("HTTP://node-7:7770/", "http://node-7:7770"),
            ("https://node-7", "https://node-7:7770"),
            ("HTTPS://127.0.0.1:1", "https://127.0.0.1:1"),
            ("node-7:1234", "https://node-7:1234"),
            ("node-7", "https://node-7:7770"),
            (" 127.0.0.1 ", "http://127.0.0.1:7770"),
            ("localhost:99", "http://localhost:99"),
            ("[::1]:99", "http://[::1]:99"),
            ("[2001:db8::1]:99", "https://[2001:db8::1]:99"),
            ("http://[::1]", "http://[::1]:7770"),
            (crate::DEFAULT_URL, crate::DEFAULT_URL),
        ] {
            assert_eq!(ManagerAddress::parse(text).unwrap().url, url, "{text}");
        }
    }

    #[test]
    fn a_manager_that_can_be_recognised_is_not_called_in_clear_over_a_network() {
        for (text, url) in [
            ("http://10.0.0.1:80", "https://10.0.0.1:80"),
            ("https://10.0.0.1:80", "https://10.0.0.1:80"),
            ("http://127.0.0.1:80", "http://127.0.0.1:80"),
            ("http://127.0.0.1.example:80", "https://127.0.0.1.example:80"),
        ] {
            let address = ManagerAddress::parse(text).unwrap().encrypted();
            assert_eq!(address.url, url);
            assert!(url.ends_with(&format!("://{}", address.host_and_port())));
        }
    }

    #[test]
    fn several_managers_are_a_list_of_urls() {
        let read = |text: &str| ManagerAddress::parse_list(text).map_err(|refused| refused.to_string());
        let urls =
            |text: &str| read(text).unwrap().into_iter().map(|address| address.url).collect::<Vec<_>>();
        assert_eq!(urls("a:1, http://b ,[::1],a:1"), ["https://a:1", "http://b:7770", "http://[::1]:7770"]);
        assert_eq!(urls("a"), ["https://a:7770"]);
        assert!(read("a,,b").unwrap_err().contains("names no host"));
        assert!(read("a,b:0").unwrap_err().contains("`b:0`"));
        let many: Vec<String> = (1..=MANAGERS_MAX + 1).map(|port| format!("a:{port}")).collect();
        assert!(read(&many.join(",")).unwrap_err().contains("17 URLs"));
    }

    #[test]
    fn says_what_is_wrong_with_the_rest() {
        for (text, cause) in [
            ("", "names no host"),
            ("http://", "names no host"),
            (":7770", "names no host"),
            ("https://", "names no host"),
            ("tcp://a:1", "neither http nor https"),
            ("http://a:1/v1", "path"),
            ("http://u:p@a:1", "user name"),
            ("a:0", "port"),
            ("a:port", "port"),
            ("a:70000", "port"),
            ("::1", "brackets"),
            ("[::z]:1", "not IPv6"),
            ("a b:1", "space"),
            ("http://hüb:1", "ASCII"),
        ] {
            let refused = ManagerAddress::parse(text).unwrap_err().to_string();
            assert!(refused.contains(cause), "{text}: {refused}");
            assert!(refused.contains("http://127.0.0.1:7770"), "{text}: {refused}");
        }
    }
}
