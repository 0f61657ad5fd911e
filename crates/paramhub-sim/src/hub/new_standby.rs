//! The copies of chunks for another standby, while the job runs, as the product's `core/shard/new_standby.rs` makes them.

use std::collections::BTreeSet;
use std::sync::Arc;

use paramhub_core::job_control::CoreEvent;
use paramhub_core::placement::RouteId;

use super::Hub;
use super::route::{Leave, Route};
use crate::world::{Context, Plant};

/// The most chunks that are sent to the new standby and not acknowledged. Routes have few chunks here.
const COPIES_UNDER_WAY: usize = 2;

/// The chunks that a new standby has still to get.
#[derive(Debug, Default)]
pub(super) struct Copying {
    /// The next slot to copy.
    next: u32,
    unacknowledged: BTreeSet<u32>,
}

impl Route {
    /// Has chunks that this hub serves alone get the hub at this position as a standby. The stream to it is still to come.
    pub(super) fn take_standby(&mut self, standby: u16) {
        let Some(port) = self.neighbours.counterpart() else { return };
        self.neighbours = Arc::new(self.neighbours.as_ref().clone().with_standby());
        self.standby = Some(standby);
        self.exchange.take_standby();
        self.departures.set_lost(port, false);
        let state = &mut self.ports[port as usize];
        state.owed.clear();
        state.starts.clear();
        (state.is_cut, state.is_muted, state.leave) = (false, false, Leave::NotDue);
        // The streams to an earlier standby had numbers of their own.
        state.newest = None;
        self.pass_on_leaves_again(port);
        if (0..self.neighbours.workers()).all(|member| self.departures.has_left(member)) {
            // All workers have left this route, and some have not left others yet. No further Leave would end it there.
            self.departures.set_lost(port, true);
            self.ports[port as usize].leave = Leave::Due;
            return;
        }
        self.copying = Some(Copying::default());
        self.copy_more();
    }

    /// Begins to copy further chunks, as many as may be under way.
    fn copy_more(&mut self) {
        let (Some(copying), Some(port)) = (&mut self.copying, self.neighbours.counterpart()) else { return };
        while copying.unacknowledged.len() < COPIES_UNDER_WAY && (copying.next as usize) < self.chunks.len() {
            let slot = copying.next;
            copying.next += 1;
            if self.exchange.begin_copy(slot) {
                copying.unacknowledged.insert(slot);
                self.ports[port as usize].starts.insert(slot);
            }
        }
    }

    /// Notes that the standby has acknowledged a chunk with which it begins.
    pub(super) fn copy_acknowledged(&mut self, slot: u32) {
        if self.copying.as_mut().is_some_and(|copying| copying.unacknowledged.remove(&slot)) {
            self.copy_more();
        }
    }

    /// Returns whether the new standby has got its last chunk since the last call.
    fn take_copied(&mut self, plant: Option<Plant>) -> bool {
        let slots = self.chunks.len();
        let is_over = |copying: &mut Copying| {
            let are_acknowledged = copying.unacknowledged.is_empty() || plant == Some(Plant::CopiedTooSoon);
            copying.next as usize == slots && are_acknowledged
        };
        self.copying.take_if(is_over).is_some()
    }
}

impl Hub {
    /// Reports that the new standby of a route has all chunks, once it has.
    pub(super) fn report_copied(&mut self, route: RouteId, context: &mut Context<'_>) {
        let state = self.job.as_mut().and_then(|job| job.routes.get_mut(&route));
        if state.is_some_and(|state| state.take_copied(context.plant)) {
            context.trace(|| format!("{:?} has copied route {route}", self.process));
            self.handle_core_later(CoreEvent::Copied { route }, context);
        }
    }
}
