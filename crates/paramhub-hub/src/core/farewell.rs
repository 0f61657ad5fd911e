//! Streams whose job ended between their handshake and their core: they are told why, and given time to read it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::limits::CONTROL_BYTES_MAX;
use paramhub_core::wire::{Direction, Failure, Header, Operation};
use paramhub_transport::{Connection, Outgoing, Stream};

use super::lane::{Arrival, Lane};

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
    readers: Vec<(Connection, Instant)>,
    /// The same, of streams that a core served when it panicked.
    lanes: Vec<(Lane, Instant)>,
}

impl Farewells {
    /// Remembers why a job failed.
    pub(super) fn remember(&mut self, namespace: Namespace, failure: Failure) {
        if self.reasons.len() == ENDED_MAX {
            self.reasons.pop_front();
        }
        self.reasons.push_back((namespace, failure));
    }

    /// Tells a latecomer why its job is over. The stream's buffer is empty, so it takes the frame at once.
    pub(super) fn tell(&mut self, namespace: Namespace, arrival: Arrival, now: Instant) {
        let Some((_, failure)) = self.reasons.iter().find(|(ended, _)| *ended == namespace) else { return };
        let Ok(mut stream) = arrival.connect(Direction::ToHub, CONTROL_BYTES_MAX as usize) else { return };
        let payload = failure.encode();
        let header = Header { length: payload.len() as u32, ..Header::bare(Operation::Failure) };
        let told = stream.send(&[Outgoing { header, payload: &payload }]);
        if told.is_ok() && stream.end_sending().is_ok() && self.readers.len() < READERS_MAX {
            self.readers.push((stream, now + READ));
        }
    }

    /// Tells a stream that was served why its job is over, behind the rest of the frame that has `begun` to leave.
    pub(super) fn tell_lane(&mut self, namespace: Namespace, lane: &mut Lane, begun: Option<Header>) {
        if let Some((_, failure)) = self.reasons.iter().find(|(ended, _)| *ended == namespace) {
            // Who cannot be told finds the stream closed.
            let _ = lane.say_last(begun, &failure.encode());
        }
    }

    /// Gives a stream that was told time to read it.
    pub(super) fn keep(&mut self, lane: Lane, now: Instant) {
        if self.lanes.len() < READERS_MAX {
            self.lanes.push((lane, now + READ));
        }
    }

    /// Lets go of those who have read or had their time; what they still send is thrown away, so that letting go does not
    /// reset a connection over an unread reason.
    pub(super) fn let_go(&mut self, now: Instant) {
        self.readers.retain_mut(|(stream, until)| now < *until && !stream.discard());
        self.lanes.retain_mut(|(lane, until)| now < *until && !lane.discard());
    }
}
