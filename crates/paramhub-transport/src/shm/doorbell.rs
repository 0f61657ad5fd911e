//! Waking another process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;

/// An eventfd for which one process's poller waits, and which others write to once they have its descriptor.
///
/// A wake lasts until [`clear`](Self::clear). Unlike a [`Waker`](crate::Waker), each wake costs a system call,
/// so the caller first checks whether the other side sleeps.
#[derive(Debug)]
pub struct Doorbell {
    eventfd: OwnedFd,
}

impl Doorbell {
    /// A doorbell that nothing has woken.
    pub fn new() -> io::Result<Self> {
        Ok(Doorbell { eventfd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)? })
    }

    /// A doorbell from another process. This makes the descriptor non-blocking for both processes, because they
    /// share its flags. The other process is trusted to leave them so: otherwise a read of an empty counter or
    /// a write to a full one would make this process wait.
    pub fn adopt(descriptor: OwnedFd) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&descriptor)?;
        rustix::fs::fcntl_setfl(&descriptor, flags | OFlags::NONBLOCK)?;
        Ok(Doorbell { eventfd: descriptor })
    }

    /// Makes the poller's current or next wait return, in whichever process it is.
    pub fn wake(&self) {
        // If the counter is full, the write fails, but the poller wakes all the same.
        let _ = rustix::io::write(&self.eventfd, &1_u64.to_ne_bytes());
    }

    /// Resets the eventfd: earlier wakes no longer end a wait.
    pub fn clear(&self) {
        // This fails if there was no wake.
        let _ = rustix::io::read(&self.eventfd, &mut [0_u8; 8]);
    }
}

impl AsFd for Doorbell {
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
    fn a_wake_through_a_passed_descriptor_ends_a_wait() {
        let doorbell = Doorbell::new().unwrap();
        let passed = Doorbell::adopt(doorbell.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let poller = Poller::new().unwrap();
        poller.add(&doorbell, 7, Interest::READABLE).unwrap();
        let mut events = Events::with_capacity(4);
        poller.wait(&mut events, Some(Duration::ZERO)).unwrap();
        assert!(events.is_empty());
        passed.wake();
        passed.wake();
        poller.wait(&mut events, Some(Duration::from_secs(60))).unwrap();
        assert_eq!(events.iter().map(|event| event.token).collect::<Vec<_>>(), [7]);
        doorbell.clear();
        // No wake is left, and the read does not wait.
        doorbell.clear();
        poller.wait(&mut events, Some(Duration::ZERO)).unwrap();
        assert!(events.is_empty());
    }
}
