//! Making connections, and the blocking reads and writes of their handshake.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use paramhub_core::auth::{Nonce, Proof};
use paramhub_core::wire::{CHALLENGE_BYTES, Hello, VERDICT_BYTES, stream_proofs};
use rustix::net::sockopt;
use socket2::{Domain, Protocol, Socket, Type};

/// Connections that may wait to be accepted: the streams of a large job all arrive at once.
const BACKLOG: i32 = 4096;

/// The send buffer of a connection inside one host, which the kernel doubles. There is no network link to
/// keep busy: data that is copied in waits to be copied out, and should still be in cache then. Three
/// loopback segments of 64 KiB fit.
pub const SAME_HOST_SEND_BYTES: usize = 104 << 10;

/// Listens on `address`; port 0 takes any free one. The listener is blocking. Errors name the address and
/// what to do.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let bound = || -> io::Result<TcpListener> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        // Connections of a hub that has just ended stay in TIME_WAIT and must not block its successor.
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Ok(socket.into())
    };
    bound().map_err(|error| {
        let advice = match error.kind() {
            ErrorKind::AddrInUse => format!(
                "the port is in use: stop the program that has it (`ss -ltnp 'sport = :{}'` names it) or listen on \
                 another port",
                address.port()
            ),
            ErrorKind::AddrNotAvailable => {
                "this machine has no such address: use one that `ip addr` lists".to_owned()
            }
            ErrorKind::PermissionDenied => {
                format!("port {} needs privileges: use one above 1023", address.port())
            }
            _ => error.to_string(),
        };
        io::Error::new(error.kind(), format!("cannot listen on {address}: {advice}"))
    })
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
            ErrorKind::ConnectionRefused => "nobody listens there: is the hub running?".to_owned(),
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

/// Prepares a connected socket for an event loop: non-blocking, without Nagle's delay, and inside one host
/// with a send buffer of [`SAME_HOST_SEND_BYTES`].
pub fn prepare(socket: &OwnedFd) -> io::Result<()> {
    rustix::io::ioctl_fionbio(socket, true)?;
    sockopt::set_tcp_nodelay(socket, true)?;
    if is_inside_one_host(socket) {
        sockopt::set_socket_send_buffer_size(socket, SAME_HOST_SEND_BYTES)?;
    }
    Ok(())
}

/// Whether both ends have the same address, as on loopback.
fn is_inside_one_host(socket: &OwnedFd) -> bool {
    let address =
        |any: rustix::net::SocketAddrAny| SocketAddr::try_from(any).ok().map(|address| address.ip());
    let near = rustix::net::getsockname(socket).ok().and_then(address);
    let far = rustix::net::getpeername(socket).ok().flatten().and_then(address);
    far.is_some_and(|far| far.is_loopback()) || (near.is_some() && near == far)
}

/// The caller's part of a handshake. Returns the proof that the hub must give, and the verdict that it gave.
pub fn greet(
    stream: &mut TcpStream,
    nonce: &Nonce,
    hello: &Hello,
    deadline: Instant,
) -> io::Result<(Proof, [u8; VERDICT_BYTES])> {
    write_all_by(stream, &hello.encode(), deadline)?;
    let mut hub_challenge = [0; CHALLENGE_BYTES];
    read_exact_by(stream, &mut hub_challenge, deadline)?;
    let (mine, theirs) = stream_proofs(nonce, hello, &hub_challenge);
    write_all_by(stream, &mine.0, deadline)?;
    let mut verdict = [0; VERDICT_BYTES];
    read_exact_by(stream, &mut verdict, deadline)?;
    Ok((theirs, verdict))
}

/// Fills `buffer` from a blocking stream, or fails with [`ErrorKind::TimedOut`] at `deadline`, however slowly
/// the peer sends. It takes no more bytes than `buffer` has.
pub fn read_exact_by(stream: &mut TcpStream, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        stream.set_read_timeout(Some(time_left(deadline)?))?;
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => {
                return Err(io::Error::new(
                    ErrorKind::UnexpectedEof,
                    format!("the connection ended after {filled} of {} bytes", buffer.len()),
                ));
            }
            Ok(read) => filled += read,
            Err(error) if is_temporary(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all of `bytes` to a blocking stream, or fails with [`ErrorKind::TimedOut`] at `deadline`.
pub fn write_all_by(stream: &mut TcpStream, bytes: &[u8], deadline: Instant) -> io::Result<()> {
    let mut written = 0;
    while written < bytes.len() {
        stream.set_write_timeout(Some(time_left(deadline)?))?;
        match stream.write(&bytes[written..]) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(wrote) => written += wrote,
            Err(error) if is_temporary(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::Error::new(ErrorKind::TimedOut, "the peer did not answer in time")),
        // The kernel counts in microseconds, and takes zero for "no timeout".
        left => Ok(left.max(Duration::from_micros(1))),
    }
}

/// Whether the error is a timeout or an interruption: the deadline decides, not the kernel's clock.
fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
