//! The end of a mesh: it sends its last messages to every peer, and reads what still comes, because closing a
//! connection with unread bytes would take from the peer what it has not read.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_transport::{Events, Interest, Poller};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};

/// A connection on which only last messages remain.
#[derive(Debug)]
pub(crate) struct ClosingConnection {
    socket: Arc<OwnedFd>,
    last_messages: Vec<u8>,
    sent_bytes: usize,
    /// Whether all messages have been sent, and this rank's side is shut down.
    has_sent_all: bool,
    /// Whether the peer sends nothing more. It may still read.
    peer_has_ended: bool,
    is_broken: bool,
}

impl ClosingConnection {
    pub(crate) fn begin(socket: Arc<OwnedFd>, last_messages: Vec<u8>) -> Self {
        let mut connection = ClosingConnection {
            socket,
            last_messages,
            sent_bytes: 0,
            has_sent_all: false,
            peer_has_ended: false,
            is_broken: false,
        };
        connection.send_rest();
        connection
    }

    fn is_over(&self) -> bool {
        self.is_broken || (self.has_sent_all && self.peer_has_ended)
    }

    /// What the poller is to report: a peer that has ended would be readable without end.
    fn interest(&self) -> Interest {
        match (self.has_sent_all, self.peer_has_ended) {
            (false, false) => Interest::BOTH,
            (false, true) => Interest::WRITABLE,
            (true, _) => Interest::READABLE,
        }
    }

    fn send_rest(&mut self) {
        while self.sent_bytes < self.last_messages.len() {
            match rustix::net::send(&self.socket, &self.last_messages[self.sent_bytes..], SendFlags::NOSIGNAL)
            {
                Ok(wrote) => self.sent_bytes += wrote,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => return self.is_broken = true,
            }
        }
        self.has_sent_all = true;
        // Only writing: the peer may still send.
        self.is_broken = rustix::net::shutdown(&self.socket, Shutdown::Write).is_err();
    }

    fn drain(&mut self, scratch: &mut [u8]) {
        while !self.is_over() && !self.peer_has_ended {
            match rustix::io::read(&self.socket, &mut *scratch) {
                Ok(0) => self.peer_has_ended = true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => self.is_broken = true,
            }
        }
    }
}

/// Sends the rest and waits until every peer has ended, at most until `deadline`. The poller must have no other
/// descriptors.
pub(crate) fn close_all(
    mut connections: Vec<ClosingConnection>,
    poller: &Poller,
    scratch: &mut [u8],
    deadline: Instant,
) {
    let mut events = Events::with_capacity(connections.len() + 1);
    for (token, connection) in connections.iter_mut().enumerate() {
        let interest = connection.interest();
        connection.is_broken |= poller.add(&connection.socket, token as u64, interest).is_err();
    }
    while connections.iter().any(|connection| !connection.is_over()) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left == Duration::ZERO || poller.wait(&mut events, Some(left)).is_err() {
            return;
        }
        for event in events.iter() {
            let connection = &mut connections[event.token as usize];
            if event.readable {
                connection.drain(scratch);
            }
            if event.writable && !connection.has_sent_all && !connection.is_broken {
                connection.send_rest();
            }
            if connection.is_over() {
                // This fails only if the descriptor is not in the set.
                let _ = poller.remove(&connection.socket);
            } else {
                let interest = connection.interest();
                connection.is_broken |= poller.modify(&connection.socket, event.token, interest).is_err();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_peer_that_has_ended_receives_the_messages_that_its_socket_had_no_room_for() {
        let (ours, mut peer) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let last_messages: Vec<u8> = (0..4_000_000_u32).map(|byte| byte as u8).collect();
        let connection = ClosingConnection::begin(Arc::new(ours.into()), last_messages.clone());
        assert!(!connection.has_sent_all, "the socket takes fewer bytes");
        peer.shutdown(Shutdown::Write).unwrap();

        let poller = Poller::new().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        let closing =
            std::thread::spawn(move || close_all(vec![connection], &poller, &mut [0; 4096], deadline));
        let mut received = Vec::new();
        peer.read_to_end(&mut received).unwrap();
        assert!(received == last_messages, "{} bytes arrived", received.len());
        closing.join().unwrap();
    }

    #[test]
    fn what_a_peer_still_sends_is_read_before_its_connection_closes() {
        let (ours, peer) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let connection = ClosingConnection::begin(Arc::new(ours.into()), b"leave".to_vec());
        let poller = Poller::new().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        let closing =
            std::thread::spawn(move || close_all(vec![connection], &poller, &mut [0; 4096], deadline));
        std::io::Write::write_all(&mut &peer, &vec![1; 1 << 20]).unwrap();
        assert!(!closing.is_finished(), "the peer has not ended");
        peer.shutdown(Shutdown::Write).unwrap();
        closing.join().unwrap();
    }
}
