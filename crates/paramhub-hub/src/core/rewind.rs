//! Workers that go back to an earlier step because one of them is lost.

use std::time::Instant;

use paramhub_core::auth::Namespace;
use paramhub_core::placement::RouteId;
use paramhub_core::wire::{Notice, Operation};

use super::lane::AcceptedStream;
use super::ranks::unmap;
use super::{Core, CoreEvent};

impl Core {
    /// Closes the streams of a job's workers, with the reason why they go back, and refuses those of earlier epochs. If the job has
    /// other sites it ends here next, and hubs of these hear why.
    pub(super) fn rewind(&mut self, namespace: Namespace, epoch: u64, notice: &Notice, now: Instant) {
        let of_job = self.shard_of.iter().filter(|((job, _), _)| *job == namespace).map(|(_, &index)| index);
        let here: Vec<usize> = of_job.filter(|&index| !self.shards.index(index).ending).collect();
        self.joins.retain(|&(job, ..)| job != namespace);
        let payload = notice.encode();
        for index in here {
            let hosted = self.shards.index_mut(index);
            hosted.newest_streams.fill(Some((epoch, 0)));
            hosted.rewound = Some(payload.clone());
            let begun: Vec<_> =
                (0..hosted.lane_of.len() as u32).map(|port| hosted.shard.begun(port)).collect();
            let tokens = hosted.lane_of.clone();
            unmap(hosted.shard.stop_for_rewind());
            let ports = hosted.shard.plan().ports.clone();
            let of_workers =
                (0..).zip(tokens).zip(begun).filter(|&((port, _), _)| ports.side(port).is_worker());
            for ((_, token), begun) in of_workers {
                if let Some(lane) = token.and_then(|token| self.take_lane(token)) {
                    self.final_messages.dismiss(lane, begun, (Operation::Rewound, &payload), now);
                }
            }
        }
    }

    /// Closes a stream that was admitted before its port had a newer one, or before its rank was lost. If all workers have
    /// gone back meanwhile, it gets that as the reason.
    pub(super) fn refuse_stale(
        &mut self,
        namespace: Namespace,
        route: RouteId,
        accepted: AcceptedStream,
        now: Instant,
    ) {
        let shard = self.shard_of.get(&(namespace, route));
        if let Some(payload) = shard.and_then(|&shard| self.shards.index(shard).rewound.as_deref()) {
            self.final_messages.send_to_accepted(accepted, Operation::Rewound, payload, now);
        }
    }

    /// Returns whether the workers of a job go back to an earlier step when one of them is lost.
    pub(super) fn rewinds(&self, namespace: Namespace) -> bool {
        self.shards_of(namespace).any(|index| self.shards.index(index).shard.rewinds())
    }

    /// Reports the processes that have joined, once no chunk of their job is about to go back.
    pub(super) fn report_joins(&mut self, namespace: Namespace) {
        if self.joins.is_empty()
            || self.shards_of(namespace).any(|index| self.shards.index(index).shard.is_rewinding())
        {
            return;
        }
        for (_, rank, epoch) in self.joins.extract_if(.., |(job, ..)| *job == namespace) {
            self.mailbox.send_event(CoreEvent::RankJoined { namespace, rank, epoch });
        }
    }

    fn shards_of(&self, namespace: Namespace) -> impl Iterator<Item = usize> + '_ {
        self.shard_of.iter().filter(move |((job, _), _)| *job == namespace).map(|(_, &index)| index)
    }
}
