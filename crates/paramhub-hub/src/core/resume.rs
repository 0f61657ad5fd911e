//! Streams that are cut, and those that take their place.

use paramhub_core::auth::Namespace;
use paramhub_core::placement::RouteId;
use paramhub_core::wire::{Header, Operation};

use super::{Core, CoreEvent};

impl Core {
    /// A stream comes that takes the place of a port's: what the old one still brings is lost, as the worker knows.
    pub(super) fn make_way(&mut self, namespace: Namespace, route: RouteId, port: u32, by: u16) {
        let living =
            self.shard_of.get(&(namespace, route)).copied().filter(|&shard| !self.shards.index(shard).ending);
        let Some(shard) = living else { return };
        if let Some(token) = self.shards.index(shard).lane_of[port as usize] {
            self.drop_lane(token);
        }
        let shard = &mut self.shards.index_mut(shard).shard;
        shard.resume(port);
        // The worker keeps the old stream until it hears the new one.
        shard.outboxes[port as usize].message(Header::bare(Operation::Heartbeat), Vec::new());
        let who = shard.plan().ports.neighbour(port);
        self.mailbox.tell(CoreEvent::Moved { namespace, who, by });
    }

    /// A stream that another may yet take the place of is broken: it waits, as one that is silent does.
    pub(super) fn cut(&mut self, token: u64) {
        let Some(lane) = self.lanes.at_mut(token) else { return };
        if !lane.cut() {
            // Fails only if the descriptor is not in the set, and then there is nothing to take out.
            let _ = self.poller.remove(&*lane);
        }
    }
}
