//! Streams whose job ended between their handshake and their core: they receive the reason, and time to read
//! it.

use std::collections::VecDeque;
use std::time::Instant;

use paramhub_core::auth::Namespace;
use paramhub_core::limits::CONTROL_BYTES_MAX;
use paramhub_core::liveness::FINAL_MESSAGE_TIMEOUT;
use paramhub_core::wire::{Direction, Failure, Header, Operation};
use paramhub_transport::{Connection, Outgoing, Stream};

use super::lane::{AcceptedStream, Lane};

/// Jobs whose reason is kept; a handshake takes seconds at most.
const ENDED_MAX: usize = 256;
/// Streams that may be reading at once; further ones are closed.
const READERS_MAX: usize = 1024;

/// The reasons why jobs have ended, and the late streams that are reading them.
#[derive(Default)]
pub(super) struct FinalMessages {
    reasons: VecDeque<(Namespace, Failure)>,
    readers: Vec<(Connection, Instant)>,
    /// Lanes that a core served when it panicked, and that are reading the reason.
    lanes: Vec<(Lane, Instant)>,
}

impl FinalMessages {
    /// Keeps the reason why a job failed.
    pub(super) fn remember(&mut self, namespace: Namespace, failure: Failure) {
        if self.reasons.len() == ENDED_MAX {
            self.reasons.pop_front();
        }
        self.reasons.push_back((namespace, failure));
    }

    /// Forgets why a job has ended that begins again.
    pub(super) fn forget(&mut self, namespace: Namespace) {
        self.reasons.retain(|(ended, _)| *ended != namespace);
    }

    /// Sends a late stream the reason why its job is over.
    pub(super) fn send(&mut self, namespace: Namespace, accepted: AcceptedStream, now: Instant) {
        let Some((_, failure)) = self.reasons.iter().find(|(ended, _)| *ended == namespace) else { return };
        let payload = failure.encode();
        self.send_to_accepted(accepted, Operation::Failure, &payload, now);
    }

    /// Sends a stream that no core serves its only message. The stream's buffer is empty, so it takes the frame at once.
    pub(super) fn send_to_accepted(
        &mut self,
        accepted: AcceptedStream,
        operation: Operation,
        payload: &[u8],
        now: Instant,
    ) {
        let Ok(mut stream) = accepted.connect(Direction::ToHub, CONTROL_BYTES_MAX as usize) else { return };
        let header = Header { length: payload.len() as u32, ..Header::bare(operation) };
        let sent = stream.send(&[Outgoing { header, payload }]);
        if sent.is_ok() && stream.end_sending().is_ok() && self.readers.len() < READERS_MAX {
            self.readers.push((stream, now + FINAL_MESSAGE_TIMEOUT));
        }
    }

    /// Sends a lane that was served the reason why its job is over, after the rest of the frame that has
    /// `begun` to leave.
    pub(super) fn send_to_lane(&mut self, namespace: Namespace, lane: &mut Lane, begun: Option<Header>) {
        if let Some((_, failure)) = self.reasons.iter().find(|(ended, _)| *ended == namespace) {
            // If the reason cannot be sent, the peer finds the stream closed.
            let _ = lane.send_final(begun, Operation::Failure, &failure.encode());
        }
    }

    /// Sends the worker of a stream the reason why its job goes on without it, after the rest of the frame that has
    /// `begun` to leave.
    pub(super) fn dismiss(
        &mut self,
        mut lane: Lane,
        begun: Option<Header>,
        (operation, payload): (Operation, &[u8]),
        now: Instant,
    ) {
        // If the reason cannot be sent, the worker finds the stream closed.
        if lane.send_final(begun, operation, payload).is_ok() {
            self.keep(lane, now);
        }
    }

    /// Gives a stream with the reason time to read it.
    pub(super) fn keep(&mut self, lane: Lane, now: Instant) {
        if self.lanes.len() < READERS_MAX {
            self.lanes.push((lane, now + FINAL_MESSAGE_TIMEOUT));
        }
    }

    /// Closes streams whose peers have read the reason or whose time is over. What the peers still send is
    /// dropped, so that closing does not reset a connection before the reason is read.
    pub(super) fn close_finished(&mut self, now: Instant) {
        self.readers.retain_mut(|(stream, until)| now < *until && !stream.discard());
        self.lanes.retain_mut(|(lane, until)| now < *until && !lane.discard());
    }
}
