//! Listening, and sockets for event loops.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

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
