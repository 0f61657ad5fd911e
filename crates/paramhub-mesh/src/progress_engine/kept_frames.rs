//! The counted frames of one direction of a connection, from the first that the peer may not have received.

use std::collections::VecDeque;

use super::operations_in_flight::{SendProgress, StepId};
use crate::wire::Header;

/// Kept bytes above which no transfer is copied here any more.
const ROOM_BYTES: usize = 1 << 20;

#[derive(Debug, Default)]
pub(crate) struct KeptFrames {
    bytes: Vec<u8>,
    /// The bytes of each kept frame.
    lengths: VecDeque<u32>,
    /// The frames that the peer has received; they are kept no longer.
    received: u64,
    /// The bytes of these.
    received_bytes: u64,
    /// The kept bytes that have left on the present connection.
    gone: usize,
    /// Sends whose bytes are kept, and where in all counted frames' bytes each of them ends. They are over when
    /// they have left once.
    sends: VecDeque<(u64, StepId)>,
}

impl KeptFrames {
    pub(crate) fn push(&mut self, header: Header, payload: &[u8]) {
        let header = Header { length: payload.len() as u32, ..header };
        let wire = header.encode();
        self.bytes.extend_from_slice(&wire);
        self.bytes.extend_from_slice(payload);
        self.lengths.push_back((wire.len() + payload.len()) as u32);
    }

    /// Adds a frame with which a send is over.
    pub(crate) fn push_send(&mut self, header: Header, payload: &[u8], send: StepId) {
        self.push(header, payload);
        self.sends.push_back((self.received_bytes + self.bytes.len() as u64, send));
    }

    /// Returns whether a transfer may be copied here.
    pub(crate) fn has_room(&self) -> bool {
        self.bytes.len() < ROOM_BYTES
    }

    /// Sends that are not over.
    pub(crate) fn sends(&self) -> impl Iterator<Item = StepId> + '_ {
        self.sends.iter().map(|(_, send)| *send)
    }

    /// What has not left on the present connection.
    pub(crate) fn unsent(&self) -> &[u8] {
        &self.bytes[self.gone..]
    }

    /// Notes that so many more bytes have left, and the sends that are over with them.
    pub(crate) fn left(&mut self, bytes: usize, progress: &mut SendProgress) {
        self.gone += bytes;
        let gone = self.received_bytes + self.gone as u64;
        while let Some((_, send)) = self.sends.pop_front_if(|(end, _)| *end <= gone) {
            progress.left.push(send);
            progress.ended.push(send);
        }
    }

    /// Drops the frames that the peer has received, which are the first `frames`; `false` if there have not been so
    /// many. The count may be older than one before: the peer sends it again after a cut, behind the newest.
    pub(crate) fn acknowledge(&mut self, frames: u64) -> bool {
        let newly = frames.saturating_sub(self.received);
        if newly > self.lengths.len() as u64 {
            return false;
        }
        let bytes: usize = self.lengths.drain(..newly as usize).map(|length| length as usize).sum();
        self.bytes.drain(..bytes);
        self.received += newly;
        self.received_bytes += bytes as u64;
        self.gone = self.gone.saturating_sub(bytes);
        true
    }

    /// Begins a connection on which the peer has received the first `frames`; the others leave again. `false` if that
    /// cannot be.
    pub(crate) fn resend(&mut self, frames: u64, progress: &mut SendProgress) -> bool {
        let is_possible = frames >= self.received && self.acknowledge(frames);
        self.gone = 0;
        self.left(0, progress);
        is_possible
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress_engine::slab::Slab;
    use crate::wire::{HEADER_BYTES, Kind};

    fn step(number: u32) -> StepId {
        let mut slab = Slab::new();
        StepId { operation: slab.insert(()), step: number }
    }

    #[test]
    fn frames_are_kept_until_they_are_acknowledged_and_leave_again_on_a_new_connection() {
        let mut kept = KeptFrames::default();
        let mut progress = SendProgress::default();
        kept.push(Header::bare(Kind::Ready), &[]);
        kept.push_send(Header::bare(Kind::Whole), &[7; 4], step(1));
        kept.push_send(Header::bare(Kind::Whole), &[8; 4], step(2));
        let all = kept.unsent().to_vec();
        assert_eq!(all.len(), 3 * HEADER_BYTES + 8);
        kept.left(2 * HEADER_BYTES + 3, &mut progress);
        assert!(progress.ended.is_empty(), "a byte of the first send has not left");
        kept.left(1, &mut progress);
        assert_eq!((&progress.left[..], &progress.ended[..]), (&[step(1)][..], &[step(1)][..]));
        assert!(kept.acknowledge(1));
        assert_eq!(kept.unsent(), &all[2 * HEADER_BYTES + 4..]);
        // The second frame was lost with the connection, and its send is over only once.
        assert!(kept.resend(1, &mut progress));
        assert_eq!((kept.unsent(), progress.ended.len()), (&all[HEADER_BYTES..], 1));
        // The third had come whole, though not all of it had been counted as sent.
        assert!(kept.resend(3, &mut progress));
        assert_eq!((kept.unsent(), &progress.ended[..]), (&[][..], &[step(1), step(2)][..]));
        assert!(kept.acknowledge(2), "a count that was sent again");
        let mut resend = |frames| kept.resend(frames, &mut progress);
        assert!(!resend(2) && !resend(4), "impossible");
        assert!(!kept.acknowledge(4), "impossible");
    }
}
