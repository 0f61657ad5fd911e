//! Routes of a running job that a hub allocates as a further standby, and those that it gives up, as the product's
//! `job_control/further_shares.rs` orders it.

use std::sync::Arc;

use paramhub_core::job_control::{CoreEvent, Event, RoleChange};
use paramhub_core::placement::RouteId;
use paramhub_core::service::{self, JobCounters};
use paramhub_core::standbys::Role;

use super::job::HubJob;
use super::route::RouteState;
use super::{Hub, PASSING};
use crate::world::{Context, Wake};

impl Hub {
    /// Plans further shares of the job that this hub has.
    pub(super) fn plan_further(&mut self, ordered: Box<service::JobPlan>) -> Event {
        let (namespace, epoch, hub) = (ordered.namespace, ordered.epoch.number, ordered.hub as u16);
        let further = ordered.further.clone().unwrap_or_default();
        let wants = self.control.wants_further(namespace, epoch, hub, &further);
        let Some(job) = self.job.as_mut().filter(|_| wants) else {
            return Event::AllocateAgain(ordered);
        };
        let (planned, terms) = HubJob::plan(&self.plan, &ordered);
        job.further = planned.routes;
        Event::PlannedFurther { terms: Box::new(terms), further }
    }

    /// The cores allocate further routes, and the streams of the hubs that serve them are admitted.
    pub(super) fn open_further(&mut self, context: &mut Context<'_>) {
        let Some(job) = &mut self.job else { return };
        for (id, route) in std::mem::take(&mut job.further) {
            for chunk in &route.chunks {
                context.ledger.begins_anew((route.copy, chunk.id));
            }
            let at = (route.core, route.core);
            job.streams.add_standby_route(id, at, Arc::clone(&route.neighbours));
            job.routes.insert(id, route);
            let passing = context.random.time(&PASSING);
            let opened = Wake::Opened { allocation: self.allocations, route: id };
            context.wake_in(self.process, passing, opened);
        }
    }

    /// A core frees a route with which this hub has nothing more to do.
    pub(super) fn give_up(&mut self, id: RouteId, context: &mut Context<'_>) {
        self.close_streams(id, RoleChange::Stop, context);
        self.stop_dialling_standby(id, context);
        let Some(job) = &mut self.job else { return };
        job.streams.change_role(id, Role::None);
        let route = job.route(id);
        (route.serves, route.is_given_up, route.state) = (false, true, RouteState::Freed);
        let passing = context.random.time(&PASSING);
        context.wake_in(self.process, passing, Wake::Freed { allocation: self.allocations });
    }

    /// A core has freed a route with which this hub has nothing more to do.
    pub(super) fn given_up(&mut self, context: &mut Context<'_>) {
        let closed = CoreEvent::Closed { counters: JobCounters::default(), left_out: Vec::new() };
        self.handle_core(closed, context);
    }
}
