//! Guards a manager without a token against DNS rebinding: a web page can have its own name resolve to
//! loopback, and the browser then takes the manager for the page's site. The `Host` header shows that, for it
//! still carries the page's name.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use paramhub_core::service::ErrorCode;

use crate::access::Access;
use crate::error::Refusal;

/// The one page that is served under any name: it says only that the manager runs.
const OPEN_PAGE: &str = "/health";
/// The number of characters of an unknown name that a message repeats.
const SHOWN_CHARS: usize = 64;

/// Refuses requests whose `Host` does not name loopback. A manager with a token needs no such guard, as no
/// page knows the token.
pub(crate) async fn guard(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    // Without a token the manager listens on loopback only: the configuration enforces that.
    if access.tokens().are_needed() || request.uri().path() == OPEN_PAGE {
        return next.run(request).await;
    }
    match check(&request) {
        Ok(()) => next.run(request).await,
        Err(refused) => refused.into_response(),
    }
}

fn check(request: &Request) -> Result<(), Refusal> {
    let mut names = request.headers().get_all(header::HOST).iter().map(|value| value.as_bytes()).peekable();
    if names.peek().is_none() {
        return Err(misdirected("the request has no Host header".to_string()));
    }
    let target = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    match names.chain(target).find(|name| !is_loopback(name)) {
        None => Ok(()),
        Some(name) => {
            let shown: String = String::from_utf8_lossy(name).chars().take(SHOWN_CHARS).collect();
            Err(misdirected(format!("the request's Host is {shown:?}, which is no name of loopback")))
        }
    }
}

fn misdirected(what: String) -> Refusal {
    let message = format!(
        "{what}: a connection manager on loopback without an admin token takes requests to 127.0.0.1, [::1] and \
         localhost only, so that no web page can reach it under a name of its own. Use one of these, or start it with \
         --admin-token or PARAMHUB_ADMIN_TOKEN"
    );
    Refusal::with_status(StatusCode::MISDIRECTED_REQUEST, ErrorCode::BadRequest, message)
}

/// Returns whether `host`, `host:port`, `[v6]` or `[v6]:port` can mean only this machine, whatever a name
/// server answers.
fn is_loopback(authority: &[u8]) -> bool {
    let Ok(authority) = std::str::from_utf8(authority) else { return false };
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port),
        _ => (authority, ""),
    };
    let literal = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(inner) => inner.parse::<Ipv6Addr>().map(IpAddr::V6),
        None => host.parse::<Ipv4Addr>().map(IpAddr::V4),
    };
    let is_here =
        literal.map_or(host.eq_ignore_ascii_case("localhost"), |ip| ip.to_canonical().is_loopback());
    is_here && port.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_no_name_server_answers_for_are_loopback() {
        for name in
            ["localhost", "LocalHost:7770", "127.0.0.1", "127.0.0.1:1", "127.1.2.3:80", "[::1]", "[::1]:99"]
        {
            assert!(is_loopback(name.as_bytes()), "{name}");
        }
        for name in [
            "",
            ":7770",
            "evil.example",
            "evil.example:7770",
            "localhost.evil.example",
            "evil.localhost",
            "127.0.0.1.evil.example:7770",
            "evil@127.0.0.1",
            "127.0.0.1:7770@evil.example",
            "127.0.0.1:7770/evil",
            "10.0.0.1:7770",
            "0.0.0.0:7770",
            "127.1",
            "2130706433",
            "::1",
            "[::]:7770",
            "[::1",
            "[127.0.0.1]",
            "localhost localhost",
        ] {
            assert!(!is_loopback(name.as_bytes()), "{name}");
        }
        assert!(!is_loopback(b"\xff"));
    }
}
