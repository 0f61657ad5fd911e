//! The end of a mesh: last words go to every peer, and what still comes is read, so that nothing on its way to them is lost.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use paramhub_transport::{Events, Interest, Poller};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};

/// A connection on which only last words remain.
#[derive(Debug)]
pub(crate) struct Parting {
    pub(crate) socket: OwnedFd,
    pub(crate) words: Vec<u8>,
    pub(crate) gone: usize,
    pub(crate) is_over: bool,
}

impl Parting {
    pub(crate) fn new(socket: OwnedFd, words: Vec<u8>) -> Self {
        Parting { socket, words, gone: 0, is_over: false }
    }

    fn speak(&mut self) {
        while !self.is_over && self.gone < self.words.len() {
            match rustix::net::send(&self.socket, &self.words[self.gone..], SendFlags::NOSIGNAL) {
                Ok(wrote) => self.gone += wrote,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => self.is_over = true,
            }
        }
        // Closing with unread bytes would reset the connection and take from the peer what it has not read.
        if !self.is_over && rustix::net::shutdown(&self.socket, Shutdown::Write).is_err() {
            self.is_over = true;
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

/// Says the last words and waits until every peer has closed, at most until `deadline`.
pub(crate) fn part(mut partings: Vec<Parting>, poller: &Poller, scratch: &mut [u8], deadline: Instant) {
    let mut events = Events::with_capacity(partings.len() + 1);
    for (token, parting) in partings.iter_mut().enumerate() {
        parting.speak();
        let has_said_all = parting.gone == parting.words.len();
        let interest = if has_said_all { Interest::READABLE } else { Interest::BOTH };
        if poller.add(&parting.socket, token as u64, interest).is_err() {
            parting.is_over = true;
        }
    }
    while partings.iter().any(|parting| !parting.is_over) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left == Duration::ZERO || poller.wait(&mut events, Some(left)).is_err() {
            return;
        }
        for event in events.iter() {
            let Some(parting) = partings.get_mut(event.token as usize) else { continue };
            if event.writable && parting.gone < parting.words.len() {
                parting.speak();
                if parting.gone == parting.words.len() {
                    // Fails only if the descriptor is not in the set.
                    let _ = poller.modify(&parting.socket, event.token, Interest::READABLE);
                }
            }
            if event.readable {
                parting.hear_out(scratch);
            }
            if parting.is_over {
                let _ = poller.remove(&parting.socket);
            }
        }
    }
}
