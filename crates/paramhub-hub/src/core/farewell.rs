//! Streams whose job ended between their handshake and their core: they are told why, and given time to read it.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::wire::{Failure, Header, Operation};

/// Jobs whose reason is remembered; a handshake takes seconds at most.
const ENDED_MAX: usize = 256;
/// Streams that may be reading at once; beyond that they are cut off.
const READERS_MAX: usize = 1024;
/// How long a stream may take to read the reason and close.
const READ: Duration = Duration::from_secs(1);

/// The last words of ended jobs, and the latecomers who are reading them.
#[derive(Default)]
pub(super) struct Farewells {
    reasons: VecDeque<(Namespace, Failure)>,
    readers: Vec<(TcpStream, Instant)>,
}

impl Farewells {
    /// Remembers why a job failed.
    pub(super) fn remember(&mut self, namespace: Namespace, failure: Failure) {
        if self.reasons.len() == ENDED_MAX {
            self.reasons.pop_front();
        }
        self.reasons.push_back((namespace, failure));
    }

    /// Tells a latecomer why its job is over. The socket's buffer is empty, so it takes the frame at once.
    pub(super) fn tell(&mut self, namespace: Namespace, mut socket: TcpStream, now: Instant) {
        let Some((_, failure)) = self.reasons.iter().find(|(ended, _)| *ended == namespace) else { return };
        let payload = failure.encode();
        let header = Header { length: payload.len() as u32, ..Header::bare(Operation::Failure) };
        let frame = [&header.encode()[..], &payload].concat();
        let told = socket.set_nonblocking(true).and_then(|()| socket.write_all(&frame));
        if told.and_then(|()| socket.shutdown(Shutdown::Write)).is_ok() && self.readers.len() < READERS_MAX {
            self.readers.push((socket, now + READ));
        }
    }

    /// Lets go of those who have read or had their time; what they still send is thrown away, so that letting go does not
    /// reset a connection over an unread reason.
    pub(super) fn let_go(&mut self, now: Instant) {
        self.readers.retain_mut(|(socket, until)| now < *until && is_open(socket));
    }
}

fn is_open(socket: &mut TcpStream) -> bool {
    let mut ignored = [0; 16 << 10];
    // One that never stops sending must not keep the core here.
    for _ in 0..16 {
        match socket.read(&mut ignored) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
        }
    }
    true
}
