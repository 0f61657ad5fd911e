//! The end of a mesh: last words go to every peer, and what still comes is read, so that nothing on its way to them is lost.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use paramhub_transport::{Events, Interest, Poller};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};

/// A connection on which only last words remain.
#[derive(Debug)]
pub(crate) struct Parting {
    socket: OwnedFd,
    words: Vec<u8>,
    gone: usize,
    /// Our side is closed, or broken.
    has_said_all: bool,
    is_over: bool,
}

impl Parting {
    pub(crate) fn begin(socket: OwnedFd, words: Vec<u8>) -> Self {
        let mut parting = Parting { socket, words, gone: 0, has_said_all: false, is_over: false };
        parting.speak();
        parting
    }

    fn speak(&mut self) {
        while !self.has_said_all && self.gone < self.words.len() {
            match rustix::net::send(&self.socket, &self.words[self.gone..], SendFlags::NOSIGNAL) {
                Ok(wrote) => self.gone += wrote,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => (self.has_said_all, self.is_over) = (true, true),
            }
        }
        if !self.has_said_all {
            self.has_said_all = true;
            // Closing with unread bytes would reset the connection and take from the peer what it has not read.
            self.is_over = rustix::net::shutdown(&self.socket, Shutdown::Write).is_err();
        }
    }

    fn hear_out(&mut self, scratch: &mut [u8]) {
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

/// Says what is left to say and waits until every peer has closed, at most until `deadline`.
pub(crate) fn part(mut partings: Vec<Parting>, poller: &Poller, scratch: &mut [u8], deadline: Instant) {
    let mut events = Events::with_capacity(partings.len() + 1);
    for (token, parting) in partings.iter_mut().enumerate() {
        let interest = if parting.has_said_all { Interest::READABLE } else { Interest::BOTH };
        parting.is_over |= poller.add(&parting.socket, token as u64, interest).is_err();
    }
    while partings.iter().any(|parting| !parting.is_over) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left == Duration::ZERO || poller.wait(&mut events, Some(left)).is_err() {
            return;
        }
        for event in events.iter() {
            let parting = &mut partings[event.token as usize];
            if event.writable && !parting.has_said_all {
                parting.speak();
                if parting.has_said_all {
                    parting.is_over |=
                        poller.modify(&parting.socket, event.token, Interest::READABLE).is_err();
                }
            }
            if event.readable {
                parting.hear_out(scratch);
            }
            if parting.is_over {
                // Fails only if the descriptor is not in the set.
                let _ = poller.remove(&parting.socket);
            }
        }
    }
}
