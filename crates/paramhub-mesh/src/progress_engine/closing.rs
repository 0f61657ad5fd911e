//! The end of a mesh: it sends its last messages to every peer, and reads what still comes, so that no
//! message to a peer is lost.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use paramhub_transport::{Events, Interest, Poller};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};

/// A connection on which only last messages remain.
#[derive(Debug)]
pub(crate) struct ClosingConnection {
    socket: OwnedFd,
    last_messages: Vec<u8>,
    gone: usize,
    /// `true` if this rank's side is closed, or broken.
    is_sent: bool,
    is_over: bool,
}

impl ClosingConnection {
    pub(crate) fn begin(socket: OwnedFd, last_messages: Vec<u8>) -> Self {
        let mut connection =
            ClosingConnection { socket, last_messages, gone: 0, is_sent: false, is_over: false };
        connection.send_rest();
        connection
    }

    fn send_rest(&mut self) {
        while !self.is_sent && self.gone < self.last_messages.len() {
            match rustix::net::send(&self.socket, &self.last_messages[self.gone..], SendFlags::NOSIGNAL) {
                Ok(wrote) => self.gone += wrote,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => (self.is_sent, self.is_over) = (true, true),
            }
        }
        if !self.is_sent {
            self.is_sent = true;
            // Shut down writing only: closing with unread bytes would reset the connection and take from the
            // peer what it has not read.
            self.is_over = rustix::net::shutdown(&self.socket, Shutdown::Write).is_err();
        }
    }

    fn drain(&mut self, scratch: &mut [u8]) {
        while !self.is_over {
            match rustix::io::read(&self.socket, &mut *scratch) {
                Ok(0) => self.is_over = true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => self.is_over = true,
            }
        }
    }
}

/// Sends the rest and waits until every peer has closed, at most until `deadline`.
pub(crate) fn close_all(
    mut connections: Vec<ClosingConnection>,
    poller: &Poller,
    scratch: &mut [u8],
    deadline: Instant,
) {
    let mut events = Events::with_capacity(connections.len() + 1);
    for (token, connection) in connections.iter_mut().enumerate() {
        let interest = if connection.is_sent { Interest::READABLE } else { Interest::BOTH };
        connection.is_over |= poller.add(&connection.socket, token as u64, interest).is_err();
    }
    while connections.iter().any(|connection| !connection.is_over) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left == Duration::ZERO || poller.wait(&mut events, Some(left)).is_err() {
            return;
        }
        for event in events.iter() {
            let connection = &mut connections[event.token as usize];
            if event.writable && !connection.is_sent {
                connection.send_rest();
                if connection.is_sent {
                    connection.is_over |=
                        poller.modify(&connection.socket, event.token, Interest::READABLE).is_err();
                }
            }
            if event.readable {
                connection.drain(scratch);
            }
            if connection.is_over {
                // This fails only if the descriptor is not in the set.
                let _ = poller.remove(&connection.socket);
            }
        }
    }
}
