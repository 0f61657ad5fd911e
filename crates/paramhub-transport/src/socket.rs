//! Listening, and sockets for event loops.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

use rustix::net::sockopt;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

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

/// Lets so many bytes wait in a socket that the kernel has not sent yet (`TCP_NOTSENT_LOWAT`). A non-blocking write takes no
/// more, and the socket counts as writable when fewer wait than half of this.
pub(crate) fn limit_unsent(socket: &OwnedFd, bytes: usize) -> io::Result<()> {
    SockRef::from(socket).set_tcp_notsent_lowat(u32::try_from(bytes).unwrap_or(u32::MAX))
}

/// Whether both ends have the same address, as on loopback.
pub(crate) fn is_inside_one_host(socket: &OwnedFd) -> bool {
    let address =
        |any: rustix::net::SocketAddrAny| SocketAddr::try_from(any).ok().map(|address| address.ip());
    let near = rustix::net::getsockname(socket).ok().and_then(address);
    let far = rustix::net::getpeername(socket).ok().flatten().and_then(address);
    far.is_some_and(|far| far.is_loopback()) || (near.is_some() && near == far)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpStream};

    use super::*;

    /// The bytes that a socket takes whose peer does not read.
    fn taken(prepare: impl Fn(&OwnedFd)) -> usize {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        // Little is sent, since the peer has little room.
        SockRef::from(&listener).set_recv_buffer_size(32 << 10).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _far = listener.accept().unwrap();
        SockRef::from(&near).set_send_buffer_size(4 << 20).unwrap();
        let near = OwnedFd::from(near);
        prepare(&near);
        rustix::io::ioctl_fionbio(&near, true).unwrap();
        let bytes = [0; 16 << 10];
        std::iter::from_fn(|| rustix::io::write(&near, &bytes).ok()).sum()
    }

    #[test]
    fn little_waits_in_a_socket_whose_unsent_bytes_are_limited() {
        let unlimited = taken(|_| {});
        let limited = taken(|socket| limit_unsent(socket, 128 << 10).unwrap());
        // The socket also has what was sent and not read, and the segment that reached the limit.
        assert!(
            (128 << 10..512 << 10).contains(&limited),
            "{limited} bytes were taken, {unlimited} without a limit"
        );
        assert!(unlimited > 2 * limited, "{limited} bytes were taken, {unlimited} without a limit");
    }
}
