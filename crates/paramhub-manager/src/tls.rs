//! Encrypted connections: the handshake, and how the manager and the bearer of a token recognise each other
//! before any request.

use std::net::{IpAddr, SocketAddr};

use paramhub_core::tokens::Tokens;
use paramhub_trust::{ManagerIdentity, REQUEST_BYTES, TOKEN_PROTOCOL, answer_token, is_name};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// The first byte of a connection whose caller begins a TLS handshake. No HTTP request begins with it.
pub(crate) const HANDSHAKE: u8 = 22;

/// Makes the handshake, and exchanges proofs with a caller that announces a token. Fails if the caller does not
/// keep to the protocol.
pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    identity: &ManagerIdentity,
    tokens: &Tokens,
) -> std::io::Result<TlsStream<S>> {
    let mut stream = TlsAcceptor::from(identity.tls()).accept(stream).await?;
    if stream.get_ref().1.alpn_protocol() == Some(TOKEN_PROTOCOL) {
        let mut request = [0; REQUEST_BYTES];
        stream.read_exact(&mut request).await?;
        let answer = answer_token(stream.get_ref().1, tokens, identity.authority(), request);
        stream.write_all(&answer.map_err(std::io::Error::other)?).await?;
        stream.flush().await?;
    }
    Ok(stream)
}

/// The names of this machine for a certificate: its host name, and the addresses at which a manager that listens
/// there is reached.
pub(crate) fn machine_names(listen: SocketAddr) -> Vec<String> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let addresses: Vec<IpAddr> = if listen.ip().is_unspecified() {
        let interfaces = nix::ifaddrs::getifaddrs().into_iter().flatten();
        interfaces.filter_map(|interface| address(interface.address.as_ref()?)).collect()
    } else {
        vec![listen.ip()]
    };
    // Some hosts have names that no certificate can have, such as `(none)`.
    let all = std::iter::once(host).chain(addresses.iter().map(IpAddr::to_string));
    let mut names: Vec<String> = all.filter(|name| is_name(name)).collect();
    names.sort();
    names.dedup();
    names
}

fn address(address: &nix::sys::socket::SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|address| IpAddr::from(address.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::from(address.ip())))
}
