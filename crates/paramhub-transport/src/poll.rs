//! Waiting for streams, and waking a thread that waits.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

/// The events to wait for. Errors and hang-ups are always reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Whether bytes or a connection can be taken, or the peer has closed.
    pub readable: bool,
    /// Whether bytes can be written.
    pub writable: bool,
}

impl Interest {
    /// Only reading.
    pub const READABLE: Interest = Interest { readable: true, writable: false };
    /// Only writing.
    pub const WRITABLE: Interest = Interest { readable: false, writable: true };
    /// Reading and writing.
    pub const BOTH: Interest = Interest { readable: true, writable: true };

    fn flags(self) -> EventFlags {
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN, self.readable);
        flags.set(EventFlags::OUT, self.writable);
        flags
    }
}

/// The set of descriptors for which one thread waits; epoll, level-triggered: what was not drained is
/// reported again.
///
/// Remove a descriptor before closing it.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    /// An empty set.
    pub fn new() -> io::Result<Self> {
        Ok(Poller { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)? })
    }

    /// Adds `fd`; its events carry `token`.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(token), interest.flags())?)
    }

    /// Changes the events of `fd`, and its token.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, fd, EventData::new_u64(token), interest.flags())?)
    }

    /// Removes `fd`.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    /// As [`wait`](Self::wait), but polls repeatedly for `spin` before the thread sleeps: a thread with a
    /// processor to itself then answers sooner by the time of a wake-up.
    pub fn wait_spinning(
        &self,
        events: &mut Events,
        spin: Duration,
        timeout: Option<Duration>,
    ) -> io::Result<()> {
        let spin = timeout.map_or(spin, |timeout| timeout.min(spin));
        if !spin.is_zero() {
            let until = Instant::now() + spin;
            while Instant::now() < until {
                self.wait(events, Some(Duration::ZERO))?;
                if !events.is_empty() {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
        }
        self.wait(events, timeout.map(|timeout| timeout - spin))
    }

    /// Waits until something is ready or `timeout` is over (`None`: without end, zero: not at all), and
    /// replaces the contents of `events`; there are none after a timeout. A signal does not end the wait
    /// early.
    pub fn wait(&self, events: &mut Events, timeout: Option<Duration>) -> io::Result<()> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut left = deadline.and(timeout);
        loop {
            events.list.clear();
            let timespec = left.and_then(|left| Timespec::try_from(left).ok());
            match epoll::wait(&self.epoll, spare_capacity(&mut events.list), timespec.as_ref()) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {
                    left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// Room for the events of one [`Poller::wait`]. The next wait reports what does not fit.
pub struct Events {
    list: Vec<epoll::Event>,
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl Events {
    /// Room for `capacity` events, at least one.
    pub fn with_capacity(capacity: usize) -> Self {
        Events { list: Vec::with_capacity(capacity.max(1)) }
    }

    /// The events of the last wait.
    pub fn iter(&self) -> impl Iterator<Item = Event> + '_ {
        self.list.iter().map(|event| {
            let (flags, data) = (event.flags, event.data);
            let broken = flags.intersects(EventFlags::HUP | EventFlags::ERR);
            Event {
                token: data.u64(),
                readable: broken || flags.contains(EventFlags::IN),
                writable: broken || flags.contains(EventFlags::OUT),
                hangup: broken,
            }
        })
    }

    /// Number of events.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether the wait ended without an event.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

/// A descriptor that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The token given to [`Poller::add`].
    pub token: u64,
    /// Whether reading will not block; it may return an error or the end.
    pub readable: bool,
    /// Whether writing will not block; it may return an error.
    pub writable: bool,
    /// Whether both directions are over. This is reported whatever the interest, again and again until the
    /// descriptor is removed.
    pub hangup: bool,
}

/// Ends another thread's [`Poller::wait`]. Clones wake the same poller.
///
/// The sleeping thread adds it to its poller like any descriptor. A wake lasts until [`drain`](Self::drain).
/// So the waker first queues its work, then wakes; the sleeper first drains, then looks at the queue.
#[derive(Clone, Debug)]
pub struct Waker {
    inner: Arc<WakerInner>,
}

#[derive(Debug)]
struct WakerInner {
    eventfd: OwnedFd,
    pending: AtomicBool,
}

impl Waker {
    /// A waker without a wake.
    pub fn new() -> io::Result<Self> {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waker { inner: Arc::new(WakerInner { eventfd, pending: AtomicBool::new(false) }) })
    }

    /// Makes the poller's current or next wait return. A wake costs no system call if the last one was not
    /// drained yet.
    pub fn wake(&self) {
        if !self.inner.pending.swap(true, Ordering::AcqRel) {
            // This cannot fail: the descriptor is valid, and the counter is never near its end, where it
            // would block.
            let _ = rustix::io::write(&self.inner.eventfd, &1u64.to_ne_bytes());
        }
    }

    /// Returns whether a wake waits for [`drain`](Self::drain).
    pub fn is_woken(&self) -> bool {
        self.inner.pending.load(Ordering::Acquire)
    }

    /// Ends the wakes so far. Everything queued before one of them is visible afterwards.
    pub fn drain(&self) {
        // First the counter, then the flag. In the other order, a wake in between would leave the flag set
        // with an empty counter, and no later wake would write.
        let _ = rustix::io::read(&self.inner.eventfd, &mut [0u8; 8]);
        self.inner.pending.swap(false, Ordering::AcqRel);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.eventfd.as_fd()
    }
}
