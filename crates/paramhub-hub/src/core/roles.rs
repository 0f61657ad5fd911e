//! Routes of which this hub becomes the only one, or with which it has nothing more to do, since another hub is lost.

use std::time::Instant;

use paramhub_core::auth::Namespace;
use paramhub_core::job_control::RoleChange;
use paramhub_core::placement::RouteId;
use paramhub_core::ports::Side;

use super::scheduler::WorkUnit;
use super::{Core, CoreEvent, RELEASE_TURN_ELEMENTS};

impl Core {
    /// Changes what this hub is for a route.
    pub(super) fn change_role(
        &mut self,
        namespace: Namespace,
        route: RouteId,
        change: RoleChange,
        now: Instant,
    ) {
        let Some(&index) = self.shard_of.get(&(namespace, route)) else { return };
        if self.shards.index(index).ending {
            return;
        }
        match change {
            RoleChange::TakeOver => {
                self.close_streams(index, |side| side == Side::Serving);
                self.shards.index_mut(index).shard.take_over();
            }
            RoleChange::GoOnAlone => {
                self.close_streams(index, |side| side == Side::Standby);
                self.shards.index_mut(index).shard.go_on_alone();
                self.schedule_sums(index);
            }
            RoleChange::Doubt => self.close_streams(index, |side| matches!(side, Side::Worker(_))),
            RoleChange::Stop => self.close_streams(index, |_| true),
        }
        self.shards.index_mut(index).serves = matches!(change, RoleChange::TakeOver | RoleChange::GoOnAlone);
        self.answer(index, now);
    }

    /// Closes the streams of a route's ports with these roles, without a word.
    fn close_streams(&mut self, index: usize, closes: impl Fn(Side) -> bool) {
        for port in 0..self.shards.index(index).lane_of.len() as u32 {
            let hosted = self.shards.index_mut(index);
            let side = hosted.shard.plan().ports.side(port);
            if !closes(side) {
                continue;
            }
            let token = hosted.lane_of[port as usize];
            if let Side::Worker(worker) = side {
                hosted.shard.send_away(worker);
            }
            token.into_iter().for_each(|token| drop(self.take_lane(token)));
        }
    }

    fn schedule_sums(&mut self, index: usize) {
        let hosted = self.shards.index_mut(index);
        if hosted.shard.has_sums_to_end() && !std::mem::replace(&mut hosted.ends_sums, true) {
            self.scheduler.add(hosted.job, WorkUnit::EndSums(index));
        }
    }

    /// Ends some steps for which a standby was awaited that is lost, and sends the answers that result.
    pub(super) fn end_sums(&mut self, index: usize, now: Instant) {
        let hosted = self.shards.index_mut(index);
        hosted.ends_sums = false;
        if hosted.ending {
            return;
        }
        if let Err(fault) = hosted.shard.end_sums(RELEASE_TURN_ELEMENTS) {
            let namespace = hosted.shard.plan().namespace;
            let reason = fault.message("a worker");
            return self.mailbox.send_event(CoreEvent::CannotGoOn { namespace, reason });
        }
        self.schedule_sums(index);
        self.answer(index, now);
        self.end_snapshot(index);
    }
}
