//! Gradients that are made of factors, in turns.

use std::time::Instant;

use super::scheduler::WorkUnit;
use super::{Core, CoreEvent, RELEASE_TURN_ELEMENTS};

impl Core {
    /// Makes a part of a gradient, or updates some chunks that are made, and sends the answers that result.
    pub(super) fn make(&mut self, shard: usize, now: Instant) {
        let hosted = self.shards.index_mut(shard);
        hosted.makes = false;
        if hosted.ending || !hosted.shard.is_making() {
            return;
        }
        let made = hosted.shard.make_some(RELEASE_TURN_ELEMENTS);
        if hosted.shard.is_making() {
            hosted.makes = true;
            self.scheduler.add(hosted.job, WorkUnit::Make(shard));
        }
        if let Err(fault) = made {
            // A worker for which others wait has left; no stream of this turn is at fault.
            let plan = hosted.shard.plan();
            let culprit = fault.culprit(plan.ports.neighbour(0));
            let (namespace, message) = (plan.namespace, fault.message(&plan.name(culprit)));
            let cause = fault.cause();
            self.mailbox.send_event(CoreEvent::Faulted { namespace, culprit, message, cause });
        }
        self.answer(shard, now);
        self.end_snapshot(shard);
    }
}
