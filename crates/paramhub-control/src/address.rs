//! Reads the manager's URL.

use paramhub_core::service::MANAGER_PORT;

use crate::error::ControlError;

/// Turns `http://host:port`, `host:port` or `host` into `http://host:port`; the port defaults to the
/// manager's.
pub(crate) fn parse_url(text: &str) -> Result<String, ControlError> {
    let refuse = |cause: &str| ControlError::Url { url: text.to_string(), cause: cause.to_string() };
    let trimmed = text.trim();
    let authority = match trimmed.split_once("://") {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
        Some((scheme, _)) if scheme.eq_ignore_ascii_case("https") => {
            return Err(refuse("the manager speaks plain http, not https"));
        }
        Some(_) => return Err(refuse("its scheme is not http")),
        None => trimmed,
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
    Ok(format!("http://{host}:{port}"))
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
        inner.parse::<std::net::Ipv6Addr>().map_err(|_| "the address in brackets is not IPv6")?;
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
            ("node-7:1234", "http://node-7:1234"),
            ("node-7", "http://node-7:7770"),
            (" 127.0.0.1 ", "http://127.0.0.1:7770"),
            ("[::1]:99", "http://[::1]:99"),
            ("http://[::1]", "http://[::1]:7770"),
            (crate::DEFAULT_URL, crate::DEFAULT_URL),
        ] {
            assert_eq!(parse_url(text).unwrap(), url, "{text}");
        }
    }

    #[test]
    fn says_what_is_wrong_with_the_rest() {
        for (text, cause) in [
            ("", "names no host"),
            ("http://", "names no host"),
            (":7770", "names no host"),
            ("https://a:1", "not https"),
            ("tcp://a:1", "scheme is not http"),
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
            let refused = parse_url(text).unwrap_err().to_string();
            assert!(refused.contains(cause), "{text}: {refused}");
            assert!(refused.contains("http://127.0.0.1:7770"), "{text}: {refused}");
        }
    }
}
