//! Routes of which this hub becomes the only one, or with which it has nothing more to do, since another hub is lost; and routes
//! that get another standby.

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
        counterpart: String,
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
            RoleChange::TakeStandby { standby } => {
                let hosted = self.shards.index_mut(index);
                hosted.shard.take_standby(standby, counterpart);
                if let Some(port) = hosted.shard.plan().ports.counterpart() {
                    // The streams to an earlier standby had numbers of their own.
                    hosted.newest_streams[port as usize] = None;
                }
            }
            RoleChange::Doubt => self.close_streams(index, |side| matches!(side, Side::Worker(_))),
            RoleChange::Stop => {
                self.close_streams(index, |_| true);
                return self.end_shard(index, None, now);
            }
        }
        self.shards.index_mut(index).serves = match change {
            RoleChange::TakeOver | RoleChange::GoOnAlone | RoleChange::TakeStandby { .. } => true,
            RoleChange::Doubt | RoleChange::Stop => false,
        };
        self.answer(index, now);
        self.report_standby_ready(index);
    }

    /// The position of a route's standby in the job, if this hub serves the route and has one.
    pub(super) fn standby_of(&self, namespace: Namespace, route: RouteId) -> Option<u16> {
        let index = self.shard_of.get(&(namespace, route))?;
        self.shards.index(*index).shard.plan().standby
    }

    /// Reports that the new standby of a route has all chunks, once it has.
    pub(super) fn report_standby_ready(&mut self, index: usize) {
        let hosted = self.shards.index_mut(index);
        if hosted.shard.take_standby_ready() {
            let (namespace, route) = (hosted.shard.plan().namespace, hosted.route);
            self.mailbox.send_event(CoreEvent::Copied { namespace, route });
        }
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
        self.report_standby_ready(index);
        self.end_snapshot(index);
    }
}
