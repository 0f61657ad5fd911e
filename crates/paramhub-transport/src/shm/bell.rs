//! Waking another process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;

/// An eventfd that one process's poller waits for and others write to, once they were passed its descriptor.
///
/// A ring is remembered until [`hear`](Self::hear). Unlike a [`Waker`](crate::Waker) it costs a system call each time: who rings
/// finds out first whether anyone sleeps.
#[derive(Debug)]
pub struct Bell {
    eventfd: OwnedFd,
}

impl Bell {
    /// A bell that has not rung.
    pub fn new() -> io::Result<Self> {
        Ok(Bell { eventfd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)? })
    }

    /// One that another process made. What it is otherwise, it cannot make this process wait.
    pub fn adopt(descriptor: OwnedFd) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&descriptor)?;
        rustix::fs::fcntl_setfl(&descriptor, flags | OFlags::NONBLOCK)?;
        Ok(Bell { eventfd: descriptor })
    }

    /// Makes the poller's current or next wait return, in whichever process it is.
    pub fn ring(&self) {
        // A counter that is full rings already.
        let _ = rustix::io::write(&self.eventfd, &1_u64.to_ne_bytes());
    }

    /// Forgets the rings so far.
    pub fn hear(&self) {
        // Fails where it has not rung.
        let _ = rustix::io::read(&self.eventfd, &mut [0_u8; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Events, Interest, Poller};

    #[test]
    fn a_ring_through_a_passed_descriptor_ends_a_wait() {
        let bell = Bell::new().unwrap();
        let passed = Bell::adopt(bell.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let poller = Poller::new().unwrap();
        poller.add(&bell, 7, Interest::READABLE).unwrap();
        let mut events = Events::with_capacity(4);
        poller.wait(&mut events, Some(Duration::ZERO)).unwrap();
        assert!(events.is_empty());
        passed.ring();
        passed.ring();
        poller.wait(&mut events, Some(Duration::from_secs(60))).unwrap();
        assert_eq!(events.iter().map(|event| event.token).collect::<Vec<_>>(), [7]);
        bell.hear();
        // Nothing is left, and hearing nothing does not wait.
        bell.hear();
        poller.wait(&mut events, Some(Duration::ZERO)).unwrap();
        assert!(events.is_empty());
    }
}
