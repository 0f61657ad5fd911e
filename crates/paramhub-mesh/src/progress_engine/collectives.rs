//! Which collectives begin, in which order, and whether the ranks agree on it.

use super::ProgressEngine;
use super::peer::RankState;
use crate::descriptor::Descriptor;
use crate::error::MeshError;
use crate::operation::OperationKind;
use crate::wire::{Header, Kind};

/// The maximum of collectives under way: announcements of the next one travel while the last pieces of this
/// one do.
const COLLECTIVES_MAX: usize = 4;
/// The same maximum in shared memory, where the chunks of many collectives may be under way.
const COLLECTIVES_IN_MEMORY_MAX: usize = 64;
/// The most announcements that wait for another frame or for this rank's sleep.
const ANNOUNCEMENTS_WAITING_MAX: usize = 64;

impl ProgressEngine {
    pub(super) fn may_begin(&self) -> bool {
        let Some(next) = self.queue.front() else { return false };
        let most = if next.plan.is_some() { COLLECTIVES_IN_MEMORY_MAX } else { COLLECTIVES_MAX };
        self.in_flight.collectives < most && (self.ranks.len() == 1 || self.in_flight.sequence.may_begin())
    }

    pub(super) fn begin_collectives(&mut self) -> Result<(), MeshError> {
        while self.may_begin() {
            let mut request = self.queue.pop_front().expect("there is one");
            let OperationKind::Collective(descriptor) = request.kind else {
                unreachable!("only collectives are queued");
            };
            if let Some(rank) = self.gone_before(self.in_flight.sequence.begun()) {
                let (this_rank, what) = (self.in_flight.this_rank.clone(), request.kind.to_string().into());
                self.in_flight.refuse(request, MeshError::PeerLeft { this_rank, what, rank });
                continue;
            }
            if self.ranks.len() == 1 {
                self.in_flight.begin(request, 0, false);
                continue;
            }
            let number = self.in_flight.sequence.begin(descriptor);
            let plan = request.plan.take();
            self.announce(number, &descriptor, plan.is_some());
            let key = self.in_flight.begin(request, number, plan.is_some());
            if let (Some(plan), Some(pipeline)) = (plan, &mut self.pipeline) {
                pipeline.push(key, number, descriptor, plan);
            }
        }
        Ok(())
    }

    /// Tells the next rank of a collective. Where it goes through shared memory, most differences are found by the labels in
    /// it, so that this may wait: until this rank would sleep, since another may wait for it elsewhere.
    fn announce(&mut self, number: u64, descriptor: &Descriptor, is_in_memory: bool) {
        let next = self.next_rank();
        let RankState::Connected(peer) = &mut self.ranks[next] else { return };
        let begin = Header { tag: number, ..Header::bare(Kind::Begin) };
        if is_in_memory && self.announcements_waiting < ANNOUNCEMENTS_WAITING_MAX {
            peer.outbound.control_later(begin, &descriptor.encode());
            self.announcements_waiting += 1;
        } else {
            peer.outbound.control(begin, &descriptor.encode());
            self.announcements_waiting = 0;
        }
    }

    /// Sends the announcements that have waited.
    pub(super) fn send_announcements(&mut self) -> Result<(), MeshError> {
        if std::mem::take(&mut self.announcements_waiting) == 0 {
            return Ok(());
        }
        let next = self.next_rank();
        if let RankState::Connected(peer) = &mut self.ranks[next] {
            peer.outbound.hurry();
        }
        self.flush()
    }

    fn next_rank(&self) -> usize {
        ((self.in_flight.this_rank.rank + 1) % self.in_flight.size) as usize
    }

    /// A rank that left before it began the collective of this number.
    fn gone_before(&self, number: u64) -> Option<u32> {
        let is_gone =
            |state: &RankState| matches!(state, RankState::Left { collectives } if *collectives <= number);
        self.ranks.iter().position(is_gone).map(|rank| rank as u32)
    }

    /// Compares the collectives that the previous rank has begun, and acknowledges them.
    pub(super) fn compare_with_previous_rank(&mut self) -> Result<(), MeshError> {
        let previous = (self.in_flight.this_rank.rank + self.in_flight.size - 1) % self.in_flight.size;
        match self.in_flight.sequence.compare() {
            Ok(None) => Ok(()),
            Ok(Some(compared)) => {
                if let RankState::Connected(peer) = &mut self.ranks[previous as usize] {
                    peer.outbound.control(Header { tag: compared, ..Header::bare(Kind::Begun) }, &[]);
                }
                Ok(())
            }
            Err(mismatch) => Err(MeshError::OperationMismatch {
                this_rank: self.in_flight.this_rank.clone(),
                number: mismatch.number,
                here: mismatch.ours.to_string().into(),
                rank: previous,
                there: mismatch.theirs.to_string().into(),
            }),
        }
    }
}
