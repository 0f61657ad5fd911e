//! Cut streams, and the streams that replace them.

use std::time::Instant;

use paramhub_core::auth::Namespace;
use paramhub_core::placement::RouteId;
use paramhub_core::ports::Side;
use paramhub_core::wire::Operation;

use super::fault::Fault;
use super::lane::Cut;
use super::{Core, CoreEvent};

impl Core {
    /// Whether a port has had a newer stream than this, by epoch and attempt; if not, this is the newest from now on. The acceptor
    /// admits streams in order, but passes each on when its welcome has left, and that of an older one can
    /// leave later.
    pub(super) fn is_stale(
        &mut self,
        namespace: Namespace,
        route: RouteId,
        port: u32,
        stream: (u64, u32),
    ) -> bool {
        let Some(&shard) = self.shard_of.get(&(namespace, route)) else { return false };
        let newest = &mut self.shards.index_mut(shard).newest_streams[port as usize];
        if newest.is_some_and(|newest| stream < newest) {
            return true;
        }
        *newest = Some(stream);
        false
    }

    /// Replaces a port's stream: what the old one still brings is lost, as both ends know.
    pub(super) fn make_way(&mut self, namespace: Namespace, route: RouteId, port: u32, by: u16) {
        let living =
            self.shard_of.get(&(namespace, route)).copied().filter(|&shard| !self.shards.index(shard).ending);
        let Some(shard) = living else { return };
        if let Some(token) = self.shards.index(shard).lane_of[port as usize] {
            self.drop_lane(token);
        }
        let shard = &mut self.shards.index_mut(shard).shard;
        shard.resume(port);
        if let Side::Worker(_) = shard.plan().ports.side(port) {
            // The worker keeps the old stream until a frame arrives on the new one.
            shard.message(port, Operation::Heartbeat, Vec::new());
        }
        let neighbour = shard.plan().ports.neighbour(port);
        self.mailbox.send_event(CoreEvent::Moved { namespace, route, neighbour, by });
    }

    /// Handles a broken stream that another may yet replace: it waits for that.
    pub(super) fn cut(&mut self, token: u64, cut: Cut) {
        let Some(lane) = self.lanes.at_mut(token) else { return };
        if lane.cut(cut) {
            self.cut_until = [self.cut_until, lane.cut_until()].into_iter().flatten().min();
            // This fails only if the descriptor is not in the set; then there is nothing to remove.
            let _ = self.poller.remove(&*lane);
            let (hosted, port) = (self.shards.index(lane.shard), lane.port);
            let plan = hosted.shard.plan();
            if plan.ports.side(port).takes_sums() {
                let attempt = hosted.newest_streams[port as usize].map_or(0, |(_, attempt)| attempt) + 1;
                let (namespace, route, until) = (plan.namespace, hosted.route, lane.cut_until());
                self.mailbox.send_event(CoreEvent::CutFromAbove { namespace, route, port, attempt, until });
            }
        }
    }

    /// Gives up the neighbours whose streams were cut and have not been replaced in time.
    pub(super) fn lose_cut_off(&mut self, now: Instant) {
        if self.cut_until.is_none_or(|until| now < until) {
            return;
        }
        self.cut_until = None;
        for token in self.lanes.tokens() {
            let Some(lane) = self.lanes.at_mut(token).filter(|lane| !lane.is_draining()) else { continue };
            match lane.cut_until() {
                Some(until) if now >= until => {
                    let grace = self.shards.index(lane.shard).shard.plan().resuming.redial_grace;
                    let reason = format!(
                        "{}, and it has not come back within {} s",
                        lane.cut_reason(),
                        grace.as_secs_f64()
                    );
                    self.fault(token, &Fault::Lost(reason), now);
                }
                until => self.cut_until = [self.cut_until, until].into_iter().flatten().min(),
            }
        }
    }
}
