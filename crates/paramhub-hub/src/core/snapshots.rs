//! Snapshots of the shards on a core: rare commands, and turns among those of streams.

use paramhub_core::auth::Namespace;
use paramhub_core::placement::RouteId;

use super::scheduler::WorkUnit;
use super::snapshot::{Snapshot, SnapshotTarget};
use super::{Core, CoreEvent};

/// Elements that are looked at and copied before the streams are served: about as many as one stream brings
/// in its turn.
const COPY_TURN_ELEMENTS: usize = 64 << 10;

impl Core {
    /// Begins a snapshot. That of a job that has ended is dropped: the requester learns of the end otherwise.
    pub(super) fn arm(&mut self, namespace: Namespace, target: SnapshotTarget, snapshot: Box<Snapshot>) {
        let Some(shard) = self.living(namespace, snapshot.route) else { return };
        self.shards.index_mut(shard).shard.arm(target, snapshot);
        self.wish_to_copy(shard);
    }

    pub(super) fn disarm(&mut self, namespace: Namespace, route: RouteId) {
        if let Some(shard) = self.living(namespace, route) {
            self.shards.index_mut(shard).shard.disarm();
            self.end_snapshot(shard);
        }
    }

    /// Copies some chunks.
    pub(super) fn copy(&mut self, shard: usize) {
        let hosted = self.shards.index_mut(shard);
        hosted.copies = false;
        if hosted.ending {
            return;
        }
        hosted.shard.copy_some(COPY_TURN_ELEMENTS);
        self.wish_to_copy(shard);
        self.end_snapshot(shard);
    }

    /// Sends off a snapshot that is complete, or will not be completed.
    #[inline]
    pub(super) fn end_snapshot(&mut self, shard: usize) {
        let hosted = self.shards.index_mut(shard);
        if let Some(snapshot) = hosted.shard.ended_snapshot() {
            let namespace = hosted.shard.plan().namespace;
            self.mailbox.send_event(CoreEvent::Snapshot { namespace, snapshot });
        }
    }

    fn wish_to_copy(&mut self, shard: usize) {
        let hosted = self.shards.index_mut(shard);
        if hosted.shard.is_copying() && !std::mem::replace(&mut hosted.copies, true) {
            self.scheduler.add(hosted.job, WorkUnit::CopySnapshot(shard));
        }
    }

    fn living(&self, namespace: Namespace, route: RouteId) -> Option<usize> {
        let shard = self.shard_of.get(&(namespace, route)).copied();
        shard.filter(|&shard| !self.shards.index(shard).ending)
    }
}
