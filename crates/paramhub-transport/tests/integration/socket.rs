//! Listening, dialling, and handshakes against a clock.

use std::io::{ErrorKind, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use paramhub_transport::dialling::dial;
use paramhub_transport::greeting::{read_exact_by, write_all_by};
use paramhub_transport::socket::listen;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(50);

fn any_port() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

#[test]
fn a_port_in_use_is_named_with_a_way_out() {
    let first = listen(any_port()).unwrap();
    let address = first.local_addr().unwrap();
    let error = listen(address).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddrInUse);
    let text = error.to_string();
    assert!(
        text.contains(&address.to_string()) && text.contains("in use") && text.contains("ss -ltnp"),
        "{text}"
    );
}

#[test]
fn a_port_is_free_again_at_once_after_its_connections() {
    let first = listen(any_port()).unwrap();
    let address = first.local_addr().unwrap();
    let near = dial(address, LONG).unwrap();
    // The listening side closes first and so keeps the connection in TIME_WAIT.
    drop(first.accept().unwrap());
    drop((first, near));
    listen(address).unwrap();
}

#[test]
fn a_foreign_address_is_named() {
    let error = listen("192.0.2.1:0".parse().unwrap()).unwrap_err();
    assert!(error.to_string().contains("192.0.2.1"), "{error}");
    assert_eq!(error.kind(), ErrorKind::AddrNotAvailable);
}

#[test]
fn an_address_without_a_listener_is_named_in_the_error() {
    // Bound, so that no other process gets the port meanwhile, but not listening.
    let taken = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    taken.bind(&any_port().into()).unwrap();
    let address = taken.local_addr().unwrap().as_socket().unwrap();
    let error = dial(address, LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

#[test]
fn a_handshake_takes_its_own_bytes_and_no_more() {
    let listener = listen(any_port()).unwrap();
    let mut near = dial(listener.local_addr().unwrap(), LONG).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    let deadline = Instant::now() + LONG;
    write_all_by(&mut near, b"hello, frames", deadline).unwrap();
    let (mut hello, mut rest) = ([0; 7], [0; 6]);
    read_exact_by(&mut far, &mut hello, deadline).unwrap();
    read_exact_by(&mut far, &mut rest, deadline).unwrap();
    assert_eq!((&hello, &rest), (b"hello, ", b"frames"));
    near.write_all(b"no").unwrap();
    drop(near);
    assert_eq!(read_exact_by(&mut far, &mut hello, deadline).unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn a_peer_that_drips_meets_the_deadline() {
    let listener = listen(any_port()).unwrap();
    let mut near = dial(listener.local_addr().unwrap(), LONG).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    let dripping = std::thread::spawn(move || {
        while near.write_all(b".").is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let mut buffer = vec![0; 1 << 20];
    let error = read_exact_by(&mut far, &mut buffer, Instant::now() + SHORT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    drop(far);
    dripping.join().unwrap();
}

#[test]
fn a_peer_that_reads_nothing_meets_the_deadline() {
    let listener = listen(any_port()).unwrap();
    let mut near = dial(listener.local_addr().unwrap(), LONG).unwrap();
    let bytes = vec![0; 64 << 20];
    let error = write_all_by(&mut near, &bytes, Instant::now() + SHORT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    let past = Instant::now();
    assert_eq!(read_exact_by(&mut near, &mut [0], past).unwrap_err().kind(), ErrorKind::TimedOut);
}
