//! Asks the kernel which route a connection would take. A source address alone does not determine it: without
//! rules for that address, the kernel routes by the destination and may use another interface.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Constants of `linux/rtnetlink.h` and `linux/netlink.h`.
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const RTA_DST: u16 = 1;
const RTA_SRC: u16 = 2;
const RTA_OIF: u16 = 4;
/// Bytes of `nlmsghdr`, of `rtmsg` and of `rtattr`.
const HEADER: usize = 16;
const ROUTE: usize = 12;
const ATTRIBUTE: usize = 4;

/// The bound of the wait; normally the kernel answers at once.
const PATIENCE: Duration = Duration::from_secs(1);

/// The interface by which a connection from `source` to `destination` leaves this host; `None` if there is no
/// route between them.
///
/// # Errors
/// The error of the operating system, if the kernel cannot be asked.
pub fn leaves_by(source: IpAddr, destination: IpAddr) -> io::Result<Option<String>> {
    let family = AddressFamily::NETLINK;
    let socket = rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
    let kernel = SocketAddrNetlink::new(0, 0);
    rustix::net::sendto(&socket, &question(source, destination), SendFlags::empty(), &kernel)?;
    let mut answer = [0; 4096];
    let (read, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::empty())?;
    let Some(index) = outgoing_interface(&answer[..read])? else { return Ok(None) };
    Ok(Some(rustix::net::netdevice::index_to_name_inlined(&socket, index)?.as_str().to_owned()))
}

fn question(source: IpAddr, destination: IpAddr) -> Vec<u8> {
    let (family, bits) = match destination {
        IpAddr::V4(_) => (AddressFamily::INET, 32),
        IpAddr::V6(_) => (AddressFamily::INET6, 128),
    };
    let mut attributes = Vec::new();
    for (kind, ip) in [(RTA_DST, destination), (RTA_SRC, source)] {
        let octets = match ip {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        attributes.extend(((ATTRIBUTE + octets.len()) as u16).to_ne_bytes());
        attributes.extend(kind.to_ne_bytes());
        attributes.extend(octets);
    }
    let length = HEADER + ROUTE + attributes.len();
    let mut question = (length as u32).to_ne_bytes().to_vec();
    question.extend(RTM_GETROUTE.to_ne_bytes());
    question.extend(NLM_F_REQUEST.to_ne_bytes());
    // Sequence number and sender: a socket with one question needs neither.
    question.extend([0; 8]);
    // Family and the lengths of the prefixes; the kernel determines type of service, table, protocol, scope,
    // type and flags.
    question.extend([family.as_raw() as u8, bits, bits]);
    question.extend([0; ROUTE - 3]);
    question.extend(attributes);
    question
}

/// Reads the answer; `None` if the kernel knows no route.
fn outgoing_interface(answer: &[u8]) -> io::Result<Option<u32>> {
    let broken =
        || io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer about a route cannot be read");
    let u16_at = |at: usize| Some(u16::from_ne_bytes(answer.get(at..at + 2)?.try_into().ok()?));
    let u32_at = |at: usize| Some(u32::from_ne_bytes(answer.get(at..at + 4)?.try_into().ok()?));
    match u16_at(4).ok_or_else(broken)? {
        // Unreachable, or the source is not an address of this host.
        NLMSG_ERROR => return Ok(None),
        RTM_NEWROUTE => {}
        _ => return Err(broken()),
    }
    let mut at = HEADER + ROUTE;
    while let (Some(length), Some(kind)) = (u16_at(at), u16_at(at + 2)) {
        if kind == RTA_OIF {
            return u32_at(at + ATTRIBUTE).map(Some).ok_or_else(broken);
        }
        // Attributes begin at multiples of four; one shorter than its own header would never end.
        at += usize::from(length).max(ATTRIBUTE).next_multiple_of(4);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_reached_by_loopback() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(leaves_by(ip("127.0.0.1"), ip("127.0.0.2")).unwrap().as_deref(), Some("lo"));
        assert_eq!(leaves_by(ip("192.0.2.1"), ip("127.0.0.1")).unwrap(), None, "not an address of this host");
    }

    #[test]
    fn an_answer_that_is_cut_or_alien_is_no_route() {
        let mut answer = vec![0; HEADER + ROUTE];
        answer[4..6].copy_from_slice(&RTM_NEWROUTE.to_ne_bytes());
        assert_eq!(outgoing_interface(&answer).unwrap(), None);
        answer.extend([0, 0, 99, 0]);
        assert_eq!(outgoing_interface(&answer).unwrap(), None, "a length of nothing ends all the same");
        answer.extend([8, 0].map(|byte: u8| byte));
        answer.extend(RTA_OIF.to_ne_bytes());
        assert!(outgoing_interface(&answer).is_err(), "the interface's number is cut off");
        answer.extend(7u32.to_ne_bytes());
        assert_eq!(outgoing_interface(&answer).unwrap(), Some(7));
        assert!(outgoing_interface(&answer[..3]).is_err());
    }
}
