//! A core makes gradients from factors in turns, so that one large layer does not keep it from serving its
//! streams.

use std::time::Instant;

use super::scheduler::WorkUnit;
use super::{Core, CoreEvent, RELEASE_TURN_ELEMENTS};

impl Core {
    /// Takes one turn: computes a part of a gradient from its factors, or updates some chunks whose gradient
    /// is complete, and sends the answers that result. If work is left, schedules the next turn.
    pub(super) fn make(&mut self, shard: usize, now: Instant) {
        let hosted = self.shards.index_mut(shard);
        hosted.makes = false;
        if hosted.ending || !hosted.shard.is_making() {
            return;
        }
        let made = hosted.shard.make_some(RELEASE_TURN_ELEMENTS);
        if hosted.shard.is_making() {
            hosted.makes = true;
            self.scheduler.add(hosted.job, WorkUnit::SumFactors(shard));
        }
        if let Err(fault) = made {
            // A turn fails only because a worker has left while others wait for its contribution. This turn
            // belongs to no stream that could carry the fault, so the job controller hears of it here.
            let plan = hosted.shard.plan();
            let culprit = fault.culprit(plan.ports.neighbour(0));
            let (namespace, message) = (plan.namespace, fault.message(&plan.name(culprit)));
            let (route, cause) = (hosted.route, fault.cause());
            self.mailbox.send_event(CoreEvent::Faulted { namespace, route, culprit, message, cause });
        }
        self.answer(shard, now);
        self.end_snapshot(shard);
    }
}
