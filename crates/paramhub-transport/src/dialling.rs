//! Dialling: to one address, or to whichever of a peer's addresses answers.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use socket2::{Domain, Protocol, Socket, Type};
use thiserror::Error;

/// The least time that one address gets, since the kernel takes zero for "no timeout".
const DIAL_TIMEOUT_MIN: Duration = Duration::from_millis(1);

/// Why no address of a peer can be reached.
#[derive(Debug, Error)]
pub enum DialError {
    /// The name cannot be resolved.
    #[error("the address is no use: {0}")]
    Unresolved(io::Error),
    /// The name resolves to nothing.
    #[error("its name stands for no address")]
    NoAddress,
    /// The deadline was over before the first address was tried.
    #[error("no time was left to dial it: the streams before it took all of the dial timeout")]
    NoTimeLeft,
    /// Every address failed; each message names its own.
    #[error("{}", .0.join("; "))]
    Failed(Vec<String>),
}

/// Connects to the first address of `peer` (`host:port`) at which `dial_one` succeeds, in the order in which
/// the name lists them. `dial_one` gets an address and how long it may take, and its errors name the address.
pub fn dial_first<E: ToString>(
    peer: &str,
    deadline: Instant,
    mut dial_one: impl FnMut(SocketAddr, Duration) -> Result<TcpStream, E>,
) -> Result<TcpStream, DialError> {
    let mut failed = Vec::new();
    for address in peer.to_socket_addrs().map_err(DialError::Unresolved)? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() && failed.is_empty() {
            return Err(DialError::NoTimeLeft);
        }
        if left.is_zero() {
            failed.push(format!("no time was left for {address}"));
            continue;
        }
        match dial_one(address, left.max(DIAL_TIMEOUT_MIN)) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed.push(error.to_string()),
        }
    }
    Err(if failed.is_empty() { DialError::NoAddress } else { DialError::Failed(failed) })
}

/// Connects to `address` within `timeout`. The stream is blocking, without Nagle's delay. Errors name the
/// address.
pub fn dial(address: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    dial_from(None, address, timeout)
}

/// [`dial`] from one of this host's addresses.
pub fn dial_from(source: Option<IpAddr>, address: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let connected = || -> io::Result<TcpStream> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        if let Some(source) = source {
            socket.bind(&SocketAddr::new(source, 0).into())?;
        }
        socket.connect_timeout(&address.into(), timeout)?;
        let stream = TcpStream::from(socket);
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    connected().map_err(|error| {
        let reason = match error.kind() {
            ErrorKind::ConnectionRefused => "no program listens there: is the hub running?".to_owned(),
            ErrorKind::TimedOut => format!(
                "no answer within {} s: is the address right, and does a firewall stand between?",
                timeout.as_secs_f64()
            ),
            _ => error.to_string(),
        };
        let from = source.map_or(String::new(), |source| format!(" from {source}"));
        io::Error::new(error.kind(), format!("cannot connect{from} to {address}: {reason}"))
    })
}

/// Begins to connect to `address` without waiting. The socket is non-blocking; it becomes writable when it is
/// connected or has failed, and [`dialled`] returns which.
pub fn begin_dial(address: SocketAddr) -> io::Result<OwnedFd> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Ok(()) => Ok(socket.into()),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => {
            Ok(socket.into())
        }
        Err(error) => Err(error),
    }
}

/// The result of a connection that [`begin_dial`] began and that has become writable.
pub fn dialled(socket: impl AsFd) -> io::Result<()> {
    Ok(sockopt::socket_error(socket)??)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn a_peer_without_any_address_that_answers_is_said_so_for_each() {
        let deadline = Instant::now() + LONG;
        let refused = |address: SocketAddr, _| Err(format!("{address} refuses"));
        let failed = dial_first("127.0.0.1:1", deadline, refused).unwrap_err();
        assert_eq!(failed.to_string(), "127.0.0.1:1 refuses");
        let error = DialError::Failed(vec!["a refuses".into(), "b refuses".into()]);
        assert_eq!(error.to_string(), "a refuses; b refuses");
        let unresolved = dial_first("no port", deadline, refused).unwrap_err();
        assert!(matches!(unresolved, DialError::Unresolved(_)), "{unresolved}");
    }

    #[test]
    fn a_peer_is_not_dialled_after_the_deadline() {
        let dialled = dial_first("127.0.0.1:1", Instant::now(), |address, _| -> Result<TcpStream, String> {
            panic!("{address} was dialled")
        });
        assert!(matches!(dialled, Err(DialError::NoTimeLeft)), "{dialled:?}");
    }
}
