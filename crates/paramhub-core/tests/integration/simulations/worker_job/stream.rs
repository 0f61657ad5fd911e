//! A stream of a simulated worker, and what its hub has received on it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// What a stream can still carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Open,
    SendClosed,
    Resuming,
    Closed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    Chunk,
    Leave,
    Reason,
}

#[derive(Clone, Debug)]
pub(super) struct SimulatedStream {
    pub(super) hub: Arc<str>,
    pub(super) state: State,
    /// By when the attempts to open it again are over.
    pub(super) resumes_until: Instant,
    /// Frames that wait to be sent.
    pub(super) queue: VecDeque<Frame>,
    /// Whether the hub reads nothing.
    pub(super) is_blocked: bool,
    /// Whether the next write fails.
    pub(super) fails_to_send: bool,
    /// Whether it broke, or its hub is lost.
    pub(super) is_lost: bool,
    /// The last message that the hub received.
    pub(super) last: Option<Frame>,
}

impl SimulatedStream {
    pub(super) fn new(hub: Arc<str>) -> SimulatedStream {
        SimulatedStream {
            hub,
            state: State::Open,
            resumes_until: Instant::now(),
            queue: VecDeque::new(),
            is_blocked: false,
            fails_to_send: false,
            is_lost: false,
            last: None,
        }
    }

    /// Whether frames may still come.
    pub(super) fn may_receive(&self) -> bool {
        matches!(self.state, State::Open | State::SendClosed)
    }

    /// The hub receives what waits, if it reads.
    pub(super) fn deliver(&mut self) {
        if self.is_blocked {
            return;
        }
        for frame in self.queue.drain(..) {
            assert_eq!(self.last, None, "{frame:?} comes after the last message");
            self.last = (frame != Frame::Chunk).then_some(frame);
        }
    }

    /// The worker sends nothing more.
    pub(super) fn close_sending(&mut self) {
        assert!(self.last.is_some(), "the hub has not received the last message");
        self.state = State::SendClosed;
    }

    /// The last message that the hub has received or that waits until the hub reads.
    pub(super) fn last_message(&self) -> Option<Frame> {
        self.last.or(self.queue.back().copied())
    }
}
