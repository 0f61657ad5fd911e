//! Commands from a program's threads to an I/O thread.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::on_io_thread;
use crate::poll::Waker;

/// A queue of commands `C` in order of arrival, which wakes the I/O thread. It is closed with a reason `E`.
///
/// Commands that a program could put without end are counted, and their number is bounded. The others need
/// no bound: their number follows from what the program may do at once.
pub struct Inbox<C, E> {
    state: Mutex<InboxState<C, E>>,
    has_room: Condvar,
    counted_max: usize,
    waker: Waker,
}

struct InboxState<C, E> {
    commands: VecDeque<C>,
    counted: usize,
    /// Threads that wait for room. To wake where no thread waits would cost a system call as well.
    waiting: usize,
    /// Why the inbox accepts no more commands.
    closed: Option<E>,
}

impl<C, E: Clone> Inbox<C, E> {
    /// An empty inbox. `waker` wakes the thread that takes the commands; up to `counted_max` counted commands
    /// may be outstanding.
    pub fn new(waker: Waker, counted_max: usize) -> Self {
        let commands = VecDeque::with_capacity(64);
        let state = InboxState { commands, counted: 0, waiting: 0, closed: None };
        Inbox { state: Mutex::new(state), has_room: Condvar::new(), counted_max, waker }
    }

    /// Queues a command and wakes the I/O thread, or returns why the inbox takes no more. Drops a refused
    /// command.
    pub fn put(&self, command: C) -> Result<(), E> {
        self.offer(command).map_err(|(_, error)| error)
    }

    /// [`put`](Self::put), but returns a refused command.
    pub fn offer(&self, command: C) -> Result<(), (C, E)> {
        self.push(self.lock(), command)?;
        self.waker.wake();
        Ok(())
    }

    /// [`put`](Self::put) for a command that counts until [`uncount`](Self::uncount). Where the maximum is
    /// reached it waits for room, at most `timeout` and not at all on an I/O thread; `full` is the error if
    /// none came.
    pub fn put_counted(&self, command: C, timeout: Duration, full: impl FnOnce() -> E) -> Result<(), E> {
        self.put_counted_quietly(command, timeout, full)?;
        self.waker.wake();
        Ok(())
    }

    /// [`put_counted`](Self::put_counted), but leaves it to the caller to wake the I/O thread or to do its work.
    pub fn put_counted_quietly(
        &self,
        command: C,
        timeout: Duration,
        full: impl FnOnce() -> E,
    ) -> Result<(), E> {
        let (mut state, mut deadline) = (self.lock(), None);
        while state.closed.is_none() && state.counted == self.counted_max {
            let now = Instant::now();
            let deadline = *deadline.get_or_insert_with(|| match on_io_thread() {
                true => Some(now),
                false => now.checked_add(timeout),
            });
            let left = deadline.map_or(timeout, |deadline| deadline.saturating_duration_since(now));
            if left.is_zero() {
                drop(state);
                return Err(full());
            }
            state.waiting += 1;
            state = self.has_room.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
        }
        state.counted += 1;
        self.push(state, command).map_err(|(_, error)| error)
    }

    /// Lets go of the state before it returns a refused command: the drop of a command may end an operation and run its
    /// callbacks, and a callback may call this inbox.
    fn push(&self, mut state: MutexGuard<'_, InboxState<C, E>>, command: C) -> Result<(), (C, E)> {
        if let Some(error) = &state.closed {
            return Err((command, error.clone()));
        }
        state.commands.push_back(command);
        Ok(())
    }

    /// Moves all queued commands into `commands`.
    pub fn take(&self, commands: &mut VecDeque<C>) {
        commands.append(&mut self.lock().commands);
    }

    /// Makes room for another counted command: one is over.
    pub fn uncount(&self) {
        let mut state = self.lock();
        state.counted -= 1;
        let is_awaited = state.waiting > 0;
        drop(state);
        if is_awaited {
            self.has_room.notify_one();
        }
    }

    /// Accepts no more commands, for this reason unless there was an earlier one. Returns the queued
    /// commands.
    pub fn close(&self, reason: &E) -> VecDeque<C> {
        let mut state = self.lock();
        state.closed.get_or_insert_with(|| reason.clone());
        self.has_room.notify_all();
        std::mem::take(&mut state.commands)
    }

    /// Why the inbox takes no more commands, if it does not.
    pub fn closed(&self) -> Option<E> {
        self.lock().closed.clone()
    }

    fn lock(&self) -> MutexGuard<'_, InboxState<C, E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C, E> fmt::Debug for Inbox<C, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("counted_max", &self.counted_max).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::poll::{Events, Interest, Poller};
    use crate::runtime::become_io_thread;

    const LONG: Duration = Duration::from_secs(60);

    fn inbox(counted_max: usize) -> Inbox<u32, &'static str> {
        Inbox::new(Waker::new().unwrap(), counted_max)
    }

    fn taken(inbox: &Inbox<u32, &'static str>) -> Vec<u32> {
        let mut commands = VecDeque::new();
        inbox.take(&mut commands);
        commands.into()
    }

    #[test]
    fn a_command_wakes_the_thread_and_comes_in_order() {
        let (poller, waker) = (Poller::new().unwrap(), Waker::new().unwrap());
        poller.add(&waker, 7, Interest::READABLE).unwrap();
        let inbox = Inbox::<u32, &str>::new(waker, 1);
        (0..3).for_each(|command| inbox.put(command).unwrap());
        let mut events = Events::with_capacity(1);
        poller.wait(&mut events, Some(LONG)).unwrap();
        assert_eq!(events.iter().map(|event| event.token).collect::<Vec<_>>(), [7]);
        assert_eq!(taken(&inbox), [0, 1, 2]);
    }

    #[test]
    fn a_counted_command_waits_for_room_and_others_do_not() {
        let inbox = inbox(2);
        let full = || "full";
        inbox.put_counted(0, Duration::ZERO, full).unwrap();
        inbox.put_counted(1, Duration::ZERO, full).unwrap();
        assert_eq!(inbox.put_counted(2, Duration::ZERO, full), Err("full"));
        inbox.put(3).unwrap();
        // Taking a command is not the end of it.
        assert_eq!(taken(&inbox), [0, 1, 3]);
        assert_eq!(inbox.put_counted(4, Duration::from_millis(1), full), Err("full"));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| inbox.put_counted(5, LONG, full));
            inbox.uncount();
            waits.join().unwrap().unwrap();
            let cannot_wait = scope.spawn(|| {
                become_io_thread();
                inbox.put_counted(6, LONG, full)
            });
            assert_eq!(cannot_wait.join().unwrap(), Err("full"), "an I/O thread does not wait");
        });
        assert_eq!(taken(&inbox), [5]);
    }

    #[test]
    fn a_closed_inbox_gives_its_first_reason_also_to_those_that_wait() {
        let inbox = inbox(1);
        inbox.put_counted(0, LONG, || "full").unwrap();
        assert_eq!(inbox.closed(), None);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| inbox.put_counted(1, LONG, || "full"));
            assert_eq!(inbox.close(&"over"), [0]);
            assert_eq!(waits.join().unwrap(), Err("over"));
        });
        assert!(inbox.close(&"later").is_empty());
        assert_eq!((inbox.put(2), inbox.closed()), (Err("over"), Some("over")));
        assert_eq!(inbox.offer(3), Err((3, "over")), "the command comes back");
    }
}
