//! Gradients that are made of factors, by turns.

use std::time::Instant;

use super::turns::Unit;
use super::{Core, CoreEvent, RELEASE_TURN_ELEMENTS};

impl Core {
    /// Makes a part of a gradient, or updates some chunks that are made, and sends what that set free.
    pub(super) fn make(&mut self, shard: usize, now: Instant) {
        let hosted = self.shards.index_mut(shard);
        hosted.makes = false;
        if hosted.ending || !hosted.shard.is_making() {
            return;
        }
        let made = hosted.shard.make_some(RELEASE_TURN_ELEMENTS);
        if hosted.shard.is_making() {
            hosted.makes = true;
            self.turns.add(hosted.job, Unit::Make(shard));
        }
        if let Err(fault) = made {
            // Somebody has left whom others wait for; no stream of this turn's is at fault.
            let plan = hosted.shard.plan();
            let culprit = fault.culprit(plan.ports.neighbour(0));
            let (namespace, message) = (plan.namespace, fault.message(&plan.name(culprit)));
            let cause = fault.cause();
            self.mailbox.tell(CoreEvent::Faulted { namespace, culprit, message, cause });
        }
        self.answer(shard, now);
        self.end_snapshot(shard);
    }
}
